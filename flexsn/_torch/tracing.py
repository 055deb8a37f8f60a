"""Private names of PyTorch's tracers, each with the versions in which it was seen: 2.11, 2.14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .availability import TRACES, moved
from .fake_tensors import FakeTensorMode

try:
    from torch._ops import HigherOrderOperator as HigherOrderOperator  # 2.11, 2.14
except ImportError:

    class HigherOrderOperator:  # type: ignore[no-redef]  # stands in for the missing one: no trace takes it
        def __init__(self, *_: Any, **__: Any): ...


def give_rules(operator: Any, *, autograd: Callable, eager: Callable, fake: Callable, functional: Callable, proxy: Callable) -> bool:
    """Say what a higher-order operator does: where autograd follows, without it, and under the modes of a trace. False where this PyTorch
    lacks a name for it."""
    if moved(TRACES):
        return False
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # 2.11, 2.13

    operator.py_impl(torch.DispatchKey.Autograd)(autograd)
    operator.py_impl(torch.DispatchKey.CompositeExplicitAutograd)(eager)
    operator.py_impl(FakeTensorMode)(fake)
    operator.py_functionalize_impl(functional)
    operator.py_impl(ProxyTorchDispatchMode)(proxy)
    return True


def trace_body(
    core: Callable[..., Any], operands: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of `core(*operands, *captured)` inside a trace, as a function of the operands and of those captured tensors that it
    reads; these."""
    from torch._higher_order_ops.utils import reenter_make_fx  # 2.11, 2.14
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # 2.11, 2.14

    with disable_proxy_modes_tracing():
        body = reenter_make_fx(core)(*operands, *captured)
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"][len(operands) :]
    read = [tensor for tensor, node in zip(captured, placeholders, strict=True) if node.users]
    for node in placeholders:
        if not node.users:
            body.graph.erase_node(node)
    body.recompile()
    return body, read


def record_call(mode: Any, operator: Any, body: torch.fx.GraphModule, args: tuple, run: Callable[[], Any]) -> Any:
    """Write `operator(body, *args)` into the graph of a trace as one node, whose values are those of `run()`."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree  # 2.11, 2.14

    name = mode.tracer.get_fresh_qualname(f"{operator.__name__}_body_")
    mode.tracer.root.register_module(name, body)
    proxies = tuple([mode.tracer.unwrap_proxy(arg) for arg in (body, *args)])
    node = mode.tracer.create_proxy("call_function", operator, proxies, {}, name=operator.__name__)
    with disable_proxy_modes_tracing():
        values = run()
    return track_tensor_tree(values, node, constant=None, tracer=mode.tracer)


def proxy_mode() -> Any:
    """The mode that writes operators into a graph as they run, by `make_fx` or by a non-strict export; None if there is none."""
    if moved(TRACES):
        return None
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # 2.11, 2.14

    return get_proxy_mode()


def torch_scan() -> Callable[..., Any] | None:
    """`scan(combine_fn, init, xs)`; imported on use, and None where PyTorch has none."""
    try:
        from torch._higher_order_ops.scan import scan  # 2.11, 2.14
    except ImportError:
        return None
    return scan


def torch_scan_node() -> Callable[..., Any]:
    """`scan(combine_fn, init, xs, additional_inputs)` on flat lists of tensors, as a trace records it."""
    torch_scan()
    return torch.ops.higher_order.scan


def torch_while_loop() -> Callable[..., Any] | None:
    """`while_loop(cond, body, carried, additional)` that gives all iterations' results, stacked; None where PyTorch has none."""
    torch_scan()  # its import registers both
    return getattr(torch.ops.higher_order, "while_loop_stack_output", None)
