"""Private names of PyTorch, all in one place, each with the versions in which it was seen: 2.11, 2.13."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator  # 2.11, 2.13
from torch._subclasses.fake_tensor import (  # 2.11, 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # 2.11, 2.13
from torch.utils._python_dispatch import _disable_current_modes as disable_modes  # 2.11, 2.13

__all__ = [
    "DYNAMIC_SHAPE_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "ProxyTorchDispatchMode",
    "current_device",
    "current_stream",
    "decomposition_table",
    "disable_modes",
    "forward_ad_level",
    "functional_overload",
    "functorch_active",
    "has_tangent",
    "is_plain",
    "is_symbolic",
    "memory_of",
    "no_modes",
    "no_saved_tensor_hooks",
    "quiet",
    "record_call",
    "scan_node",
    "scan_operator",
    "symbol",
    "trace_body",
    "transformed",
    "under_modes",
    "while_loop_stack_operator",
]  # fmt: skip

DYNAMIC_SHAPE_ERRORS = (DynamicOutputShapeException, DataDependentOutputException)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While inside, fake tensors do not log the errors that flexsn turns into its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # 2.13
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def decomposition_table() -> dict[Any, Any]:
    """ATen overload -> Python decomposition; imported on use (it pulls in much of PyTorch)."""
    import torch._refs  # noqa: F401  registers the decompositions  (2.11, 2.13)
    from torch._decomp import decomposition_table as table  # 2.11, 2.13

    return table


def functional_overload(func: Any) -> Any | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`."""
    base = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, base.removesuffix("_"), None) if base.endswith("_") else None
    return getattr(packet, func._overloadname, None) if packet is not None else None


def forward_ad_level() -> int:
    """-1 outside of `torch.autograd.forward_ad.dual_level()`."""
    return torch.autograd.forward_ad._current_level  # 2.11, 2.13


def has_tangent(tensor: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def current_stream(device: int) -> int:
    """The CUDA stream that PyTorch uses now, as a number; the public call makes an object first."""
    return torch._C._cuda_getCurrentRawStream(device)  # 2.11, 2.13


def current_device() -> int:
    return torch._C._cuda_getDevice()  # 2.11, 2.13


def transformed() -> bool:
    """Whether `torch.func` or a dispatch mode is active: tensors may then lack memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0  # 2.13


def under_modes(constants: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, made again where a dispatch mode sees it."""
    with disable_modes():
        values = [(t.tolist(), t.dtype, t.device) for t in constants]
    return [torch.tensor(v, dtype=dtype, device=device) for v, dtype, device in values]


def functorch_active() -> bool:
    """Whether `torch.func` transforms are active (`grad`, `vmap`, `jvp`, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # 2.11, 2.13


def is_plain(tensor: torch.Tensor) -> bool:
    """Not wrapped by a functorch transform, not fake, not functional: its memory can be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.device.type == "meta":
        return False
    functorch = torch._C._functorch  # 2.11, 2.13
    while functorch.is_gradtrackingtensor(tensor) and not functorch_active():  # of a `grad` that has ended: ops look inside
        tensor = functorch.get_unwrapped(tensor)
    return not functorch.is_functorch_wrapped_tensor(tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too."""
    return tensor.untyped_storage()._cdata  # 2.11, 2.13


def is_symbolic(size: Any) -> bool:
    """Whether a size is an unknown of a trace."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None  # 2.11, 2.13


def symbol(size: Any) -> str:
    """The expression of a symbolic size; equal ones are written alike."""
    return str(size.node.expr)  # 2.11, 2.13


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """While inside, nothing traces, transforms or casts: a core can be captured."""
    from torch._dispatch.python import no_python_dispatcher  # 2.11, 2.13
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11, 2.13
    from torch._guards import tracing  # 2.11, 2.13

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(None))
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(disable_modes())
        stack.enter_context(no_python_dispatcher())
        stack.enter_context(torch._C.DisableTorchFunction())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def no_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """While inside, no hooks of the caller see what autograd saves; `torch.func.grad` has disabled them anyway."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # 2.11, 2.13
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def trace_body(core: Callable[..., Any], examples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph of a core inside a trace."""
    from torch._higher_order_ops.utils import reenter_make_fx  # 2.11, 2.13
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # 2.11, 2.13

    with disable_proxy_modes_tracing():
        return reenter_make_fx(core)(*examples)


def record_call(mode: Any, operator: Any, body: torch.fx.GraphModule, args: tuple, run: Callable[[], Any]) -> Any:
    """Write `operator(body, *args)` into the graph of a trace as one node, whose values are those of `run()`."""
    from torch._higher_order_ops.utils import unique_graph_id  # 2.11, 2.13
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree  # 2.11, 2.13
    from torch.utils import _pytree as pytree  # 2.11, 2.13

    _, name = unique_graph_id(mode, prefix=f"{operator.__name__}_body")
    mode.tracer.root.register_module(name, body)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, (body, *args))
    node = mode.tracer.create_proxy("call_function", operator, proxies, {}, name=operator.__name__)
    with disable_proxy_modes_tracing():
        values = run()
    return track_tensor_tree(values, node, constant=None, tracer=mode.tracer)


def scan_operator() -> Callable[..., Any] | None:
    """`scan(combine_fn, init, xs)`; imported on use, and None where PyTorch has none."""
    try:
        from torch._higher_order_ops.scan import scan  # 2.11, 2.13
    except ImportError:
        return None
    return scan


def scan_node() -> Callable[..., Any]:
    """`scan(combine_fn, init, xs, additional_inputs)` on flat lists of tensors, as a trace records it."""
    from torch._higher_order_ops.scan import scan_op  # 2.11, 2.13

    return scan_op


def while_loop_stack_operator() -> Callable[..., Any] | None:
    """`while_loop(cond, body, carried, additional)` that gives all iterations' results, stacked; None where PyTorch has none."""
    try:
        from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # 2.11, 2.13
    except ImportError:
        return None
    return while_loop_stack_output_op
