"""Which private names of PyTorch flexsn relies on, by feature, and what to say when one has moved.

Each group is looked up when its feature is first used. Where a name is missing, a warning names it, the feature and the versions.
That feature is off, and everything else goes on. Without `KERNELS`, `TRANSFORMS` (under a transform) or `LOWLEVEL` a call raises, and
`backend="auto"` takes the eager loop; without `COMPILE` or `TRACES` it runs between compiled parts; without `INDUCTOR` compiled
code calls the kernels through the dispatcher; without `FUSION` batch norms stay outside of them; without `GPU` public calls serve; without
`PROFILES` profiles show kernels without names.
"""

from __future__ import annotations

import functools
import importlib
import warnings

import torch

from .._version import TESTED_TORCH, __version__
from ..errors import BackendUnavailableError, InterfaceWarning

KNOWN = " to ".join(TESTED_TORCH)  # versions of PyTorch in which all of these were seen

KERNELS = "fused kernels"  # needed for anything but the eager loop; each of the groups below may be missing without it
TRANSFORMS = "torch.func transforms"
GPU = "quick launches on a GPU"
TRACES = "make_fx and export of higher-order operators"
COMPILE = "torch.compile"
INDUCTOR = "kernels in Inductor's code"
FUSION = "batch norms in kernels"
LOWLEVEL = "flexsn.lowlevel"
PROFILES = "names of neurons in profiles"

# By feature and module: what is read of it. The feature is off where one is missing. What a class holds counts with the class.
_NAMES = {
    KERNELS: {
        "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode in_kernel_invocation_manager",
        "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
        "torch._decomp": "decomposition_table",
        "torch._dispatch.python": "no_python_dispatcher",
        "torch._functorch.pyfunctorch": "temporarily_clear_interpreter_stack",
        "torch._guards": "tracing",
        "torch.overrides": "_pop_mode _push_mode",
        "torch.utils._device": "DeviceContext",
        "torch.nn.utils.parametrize": "_cache",
        "torch.autograd.forward_ad": "_current_level",
        "torch.autograd": "Variable._execution_engine.queue_callback",
        "torch.autograd.graph": "_engine_run_backward",
        "torch._C": "DisableTorchFunction _AutoDispatchBelowAutograd "
        "_current_graph_task_id _dispatch_tls_is_dispatch_key_excluded _len_torch_dispatch_stack _len_torch_function_stack",
        "torch._C._autograd": "_top_saved_tensors_default_hooks",
        "torch._C._functorch": "get_interpreter_stack maybe_get_level",
    },
    TRANSFORMS: {
        "torch._C._functorch": "CVmapInterpreterPtr get_unwrapped is_gradtrackingtensor maybe_get_bdim unwrap_if_dead",
        "torch": "_add_batch_dim _remove_batch_dim",
    },
    GPU: {
        "torch._C": "_cuda_getCurrentRawStream",
        "torch._C._dynamo.guards": "_empty_strided_cuda",
    },
    TRACES: {
        "torch._ops": "HigherOrderOperator",
        "torch._higher_order_ops.utils": "reenter_make_fx",
        "torch.fx.experimental.proxy_tensor": "ProxyTorchDispatchMode disable_proxy_modes_tracing get_proxy_mode track_tensor_tree",
    },
    COMPILE: {
        "torch._C._dynamo.eval_frame": "_FrameAction.SKIP _FrameExecStrategy set_code_exec_strategy",
        "torch._dynamo": "config.patch",
        "torch._dynamo.compiled_autograd": "_disable compiled_autograd_enabled",
        "torch._dynamo.exc": "UncapturedHigherOrderOpError Unsupported",
        "torch._dynamo.guards": "GuardBuilder install_guard",
        "torch._dynamo.source": "AttrSource",
        "torch._dynamo.symbolic_convert": "InstructionTranslator",
        "torch._dynamo.variables.base": "VariableTracker",
        "torch._dynamo.variables.builder": "wrap_fx_proxy",
        "torch._dynamo.variables.higher_order_ops": "LazyVariableTracker TorchHigherOrderOperatorVariable _hop_name_to_variable_class "
        "_make_inlined discard_graph_changes speculate_subgraph",
    },
    INDUCTOR: {
        "torch._inductor": "config.triton.cudagraphs",
        "torch._inductor.ir": "BaseView ComputedBuffer FallbackKernel InputBuffer TensorBox get_stride_order",
        "torch._inductor.lowering": "add_layout_constraint register_lowering",
        "torch._inductor.virtualized": "V",
    },
    FUSION: {
        "torch._inductor.fx_passes.post_grad": "pass_patterns",
        "torch._inductor.pattern_matcher": "CallFunctionVarArgs register_graph_pattern",
    },
    LOWLEVEL: {
        "torch._functorch.aot_autograd": "aot_export_joint_simple",
        "torch._functorch.partitioners": "min_cut_rematerialization_partition",
    },
    PROFILES: {
        "torch.autograd": "_profiler_enabled",
    },
}
INTERFACES = {group: [f"{module}:{name}" for module, names in of.items() for name in names.split()] for group, of in _NAMES.items()}


def _is_there(interface: str) -> bool:
    module, _, path = interface.partition(":")
    try:
        thing = importlib.import_module(module)
        for name in path.split("."):
            thing = getattr(thing, name)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def moved(group: str) -> str | None:
    """Which interfaces of a group this PyTorch lacks, as a sentence; None if all are there. Warns of it, once."""
    with warnings.catch_warnings():  # of imports: PyTorch's own matters
        warnings.simplefilter("ignore")
        missing = [name.replace(":", ".") for name in INTERFACES[group] if not _is_there(name)]
    if not missing:
        return None
    sentence = (
        f"{group}: PyTorch {torch.__version__} has no {', '.join(f'`{name}`' for name in missing)},"
        f" on which flexsn {__version__} relies (it knows PyTorch {KNOWN})"
    )
    warnings.warn(f"flexsn: {sentence}", InterfaceWarning, stacklevel=3)
    return sentence


def require(group: str) -> None:
    """Raise if an interface of a group has moved.

    Raises:
        BackendUnavailableError: it has; the message names it and the versions.
    """
    sentence = moved(group)
    if sentence is not None:
        raise BackendUnavailableError(sentence, hint=f"Install PyTorch {KNOWN}, or a newer flexsn.")
