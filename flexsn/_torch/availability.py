"""Which internal interfaces of PyTorch flexsn relies on, and what to say when one has moved.

Each group is looked up when it is first needed. Where one is missing, a warning names it and the versions; what stands on
it raises, so that `backend="auto"` takes the eager loop, and everything else goes on.
"""

from __future__ import annotations

import functools
import importlib
import warnings

import torch

from .._version import TESTED_TORCH, __version__
from ..errors import BackendUnavailableError, InterfaceWarning

KNOWN = " to ".join(TESTED_TORCH)  # versions of PyTorch in which all of these were seen

INTERFACES = {
    "fused kernels": (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch._subclasses.fake_tensor:FakeTensor",
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "torch._subclasses.fake_tensor:UnsupportedFakeTensorException",
        "torch._subclasses.fake_tensor:UnsupportedOperatorException",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch._decomp:decomposition_table",
        "torch._prims_common:elementwise_dtypes",
        "torch._prims_common:ELEMENTWISE_TYPE_PROMOTION_KIND",
        "torch._ops:OpOverload",
        "torch._dispatch.python:no_python_dispatcher",
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "torch._guards:tracing",
        "torch.overrides:_pop_mode",
        "torch.overrides:_push_mode",
        "torch.utils._device:DeviceContext",
        "torch.nn.utils.parametrize:_cache",
        "torch.autograd.forward_ad:_current_level",
        "torch.autograd:Variable._execution_engine.queue_callback",
        "torch.autograd.graph:_engine_run_backward",
        "torch._C:_current_graph_task_id",
        "torch._C:_functorch.get_interpreter_stack",
        "torch._C:_functorch.get_unwrapped",
        "torch._C:_functorch.is_batchedtensor",
        "torch._C:_functorch.peek_interpreter_stack",
        "torch._C:_functorch.is_functorch_wrapped_tensor",
        "torch._C:_functorch.unwrap_if_dead",
        "torch._C:_functorch.TransformType.Functionalize",
        "torch._C:_functorch.TransformType.Vmap",
        "torch._C:_functorch.CVmapInterpreterPtr",
        "torch._C:_functorch.maybe_get_bdim",
        "torch._C:_functorch.maybe_get_level",
        "torch._C:DisableTorchFunction",
        "torch._C:_are_functorch_transforms_active",
        "torch._C:_disabled_torch_function_impl",
        "torch._C:_dispatch_has_kernel_for_dispatch_key",
        "torch._C:_dispatch_tls_is_dispatch_key_excluded",
        "torch._C:_len_torch_dispatch_stack",
        "torch._C:_len_torch_function_stack",
        "torch._C:_autograd._saved_tensors_hooks_get_disabled_error_message",
        "torch._C:_autograd._top_saved_tensors_default_hooks",
    ),
    "torch.compile": (
        "torch._dynamo.symbolic_convert:InstructionTranslator.current_tx",
        "torch._guards:TracingContext.try_get",
        "torch._C._dynamo:eval_frame._FrameAction",
        "torch._C._dynamo:eval_frame._FrameExecStrategy",
        "torch._C._dynamo:eval_frame.set_code_exec_strategy",
        "torch._C:_AutoDispatchBelowAutograd",
        "torch._dynamo:graph_break",
        "torch._dynamo:config.patch",
        "torch._dynamo.exc:Unsupported",
        "torch._dynamo.exc:UncapturedHigherOrderOpError",
        "torch._dynamo.compiled_autograd:_disable",
        "torch._dynamo.compiled_autograd:compiled_autograd_enabled",
        "torch._dynamo.guards:GuardBuilder.DUPLICATE_INPUT",
        "torch._dynamo.guards:GuardBuilder.ID_MATCH",
        "torch._dynamo.guards:install_guard",
        "torch._dynamo.source:AttrSource",
        "torch._dynamo.variables:ConstantVariable",
        "torch._dynamo.variables.base:VariableTracker",
        "torch._dynamo.variables.builder:wrap_fx_proxy",
        "torch._dynamo.variables.higher_order_ops:TorchHigherOrderOperatorVariable",
        "torch._dynamo.variables.higher_order_ops:LazyVariableTracker.realize_all",
        "torch._dynamo.variables.higher_order_ops:_hop_name_to_variable_class",
        "torch._dynamo.variables.higher_order_ops:_make_inlined",
        "torch._dynamo.variables.higher_order_ops:discard_graph_changes",
        "torch._dynamo.variables.higher_order_ops:speculate_subgraph",
        "torch._dynamo.variables.tensor:SymNodeVariable.evaluate_expr",
        "torch._higher_order_ops.utils:reenter_make_fx",
        "torch._higher_order_ops.utils:unique_graph_id",
        "torch.fx._symbolic_trace:_orig_module_call",
        "torch.fx.experimental.proxy_tensor:ProxyTorchDispatchMode",
        "torch.fx.experimental.proxy_tensor:disable_proxy_modes_tracing",
        "torch.fx.experimental.proxy_tensor:get_proxy_mode",
        "torch.fx.experimental.proxy_tensor:get_proxy_slot",
        "torch.fx.experimental.proxy_tensor:track_tensor_tree",
        "torch.utils:_pytree.tree_map",
        "torch._subclasses.functional_tensor:FunctionalTensor",
        "torch:_from_functional_tensor",
        "torch._inductor.lowering:fallback_handler",
        "torch._inductor.lowering:register_lowering",
        "torch._inductor.lowering:add_layout_constraint",
        "torch._inductor.ir:get_stride_order",
        "torch._inductor.ir:BaseView",
        "torch._inductor.ir:ComputedBuffer",
        "torch._inductor.ir:InputBuffer",
        "torch._inductor.ir:ExternKernel.realize_input",
        "torch._inductor.ir:ExternKernel.require_stride_order",
        "torch._inductor.ir:TensorBox.create",
        "torch._inductor.ir:FallbackKernel.create",
        "torch._inductor.ir:FallbackKernel.codegen",
        "torch._inductor.utils:is_dynamic",
        "torch._inductor.virtualized:V",
        "torch._inductor:config.triton.cudagraphs",
    ),
    "batch norms in kernels": (
        "torch._inductor.fx_passes.post_grad:pass_patterns",
        "torch._inductor.pattern_matcher:CallFunctionVarArgs",
        "torch._inductor.pattern_matcher:register_graph_pattern",
        "torch.fx.experimental.symbolic_shapes:statically_known_true",
    ),
    "flexsn.lowlevel": (
        "torch._functorch.aot_autograd:aot_export_joint_simple",
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
    ),
}


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
