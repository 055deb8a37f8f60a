"""Private names of AOTAutograd, each with the versions in which it was seen: its graphs, and what its partitioner saves."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .tracing import proxy_mode


def remade(tensor: torch.Tensor) -> torch.Tensor:
    """An input of a neuron, as its backward takes it in a compiled graph.

    The partitioner of AOTAutograd saves whatever an opaque operator of the backward reads, also what one pointwise pass
    makes from tensors that are saved anyway (a batch norm from the output of its convolution). Two negations in the
    backward graph, which no pass removes, give it something to fuse that recomputation with.
    """
    from torch.fx import traceback  # 2.11, 2.14

    if not (traceback.has_preserved_node_meta() and tensor.is_floating_point() and _made_pointwise(tensor)):
        return tensor
    before = traceback.current_meta.get("partitioner_tag")
    traceback.current_meta["partitioner_tag"] = "must_be_in_backward"  # it depends on no cotangent
    try:
        return tensor.neg().neg()
    finally:
        traceback.current_meta["partitioner_tag"] = before


def _made_pointwise(tensor: torch.Tensor) -> bool:
    """Whether the trace made this tensor elementwise, up to views and casts."""
    mode = proxy_mode()
    if mode is None or not hasattr(tensor, "from_functional"):  # 2.11, 2.14: a functional tensor
        return False
    node: Any = getattr(mode.tracer.unwrap_proxy(tensor.from_functional()), "node", None)  # a tensor is its own proxy where it has none
    while node is not None and opname(node.target) in _PASSED_THROUGH:
        node = node.args[0]
    return node is not None and torch.Tag.pointwise in getattr(node.target, "tags", ())


def opname(target: Any) -> str:
    """`view` for `aten.view.default`."""
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else ""


_PASSED_THROUGH = {"view", "_unsafe_view", "reshape", "convert_element_type", "_to_copy", "clone", "expand", "unsqueeze"}


@functools.cache
def _aot() -> tuple[Any, Any]:
    """AOTAutograd and its partitioner, imported on use; the warning filters that this adds (sympy's) go again."""
    with warnings.catch_warnings():
        import torch.fx.experimental.symbolic_shapes  # noqa: F401  fake tensors need it  (2.11, 2.14)
        from torch._functorch.aot_autograd import aot_export_joint_simple  # 2.11, 2.14
        from torch._functorch.partitioners import min_cut_rematerialization_partition  # 2.11, 2.14
    return aot_export_joint_simple, min_cut_rematerialization_partition


def aot_graph(fn: Callable, tensors: Sequence[torch.Tensor], *, joint: bool) -> torch.fx.GraphModule:
    """The functional ATen graph of `fn`, by AOTAutograd; `joint`: followed by its backward (`primals_*`, `tangents_*`)."""
    return _aot()[0](fn, tuple(tensors), trace_joint=joint)


def min_cut(joint: torch.fx.GraphModule, num_outputs: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """A joint graph cut in two, such that little is saved in between."""
    return _aot()[1](joint, None, num_fwd_outputs=num_outputs)


def load_aot() -> None:
    _aot()
