"""Private names of PyTorch's tracers, each with the versions in which it was seen: 2.11, 2.13."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator  # 2.11, 2.13
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13

try:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # 2.11, 2.13
except ImportError:  # `backend="hop"` is then a call that no trace knows

    class ProxyTorchDispatchMode(TorchDispatchMode): ...  # type: ignore[no-redef]  # stands in for the missing one


__all__ = ["HigherOrderOperator", "ProxyTorchDispatchMode"]  # the names that are only passed on


def trace_body(
    core: Callable[..., Any], operands: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The graph of `core(*operands, *captured)` inside a trace, as a function of the operands and of those captured tensors that it
    reads; these."""
    from torch._higher_order_ops.utils import reenter_make_fx  # 2.11, 2.13
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # 2.11, 2.13

    def run(*args: torch.Tensor) -> Any:
        with _unnamed_module_calls():
            return core(*args)

    with disable_proxy_modes_tracing():
        body = reenter_make_fx(run)(*operands, *captured)
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"][len(operands) :]
    read = [tensor for tensor, node in zip(captured, placeholders, strict=True) if node.users]
    for node in placeholders:
        if not node.users:
            body.graph.erase_node(node)
    body.recompile()
    return body, read


@contextlib.contextmanager
def _unnamed_module_calls() -> Iterator[None]:
    """While inside, a trace asks for no paths of modules that are called: of a module under two names the trace of a body has none."""
    from torch.fx._symbolic_trace import _orig_module_call  # 2.11, 2.13

    traced = torch.nn.Module.__call__
    torch.nn.Module.__call__ = _orig_module_call  # type: ignore[method-assign]  # as the trace does, and undoes
    try:
        yield
    finally:
        torch.nn.Module.__call__ = traced  # type: ignore[method-assign]  # likewise


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


def traced_to_fx() -> bool:
    """Whether operators are written into a graph as they run: by `make_fx`, or by a non-strict export."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # 2.11, 2.13

    return get_proxy_mode() is not None


def torch_scan() -> Callable[..., Any] | None:
    """`scan(combine_fn, init, xs)`; imported on use, and None where PyTorch has none."""
    try:
        from torch._higher_order_ops.scan import scan  # 2.11, 2.13
    except ImportError:
        return None
    return scan


def let_graphs_read_scalars() -> None:
    """While Dynamo traces: a loop in Inductor's code counts its steps in a tensor and reads it. Without this only calls with
    `fullgraph=True` may."""
    from torch._guards import TracingContext  # 2.11, 2.13

    context = TracingContext.try_get()
    shapes = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if shapes is not None:
        shapes.settings = dataclasses.replace(shapes.settings, allow_scalar_outputs=True)


let_graphs_read_scalars._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `assume_constant_result`, which imports Dynamo


def torch_scan_node() -> Callable[..., Any]:
    """`scan(combine_fn, init, xs, additional_inputs)` on flat lists of tensors, as a trace records it."""
    from torch._higher_order_ops.scan import scan_op  # 2.11, 2.13

    return scan_op


def torch_while_loop() -> Callable[..., Any] | None:
    """`while_loop(cond, body, carried, additional)` that gives all iterations' results, stacked; None where PyTorch has none."""
    try:
        from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # 2.11, 2.13
    except ImportError:
        return None
    return while_loop_stack_output_op
