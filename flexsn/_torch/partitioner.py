"""How AOTAutograd's partitioner, which cuts a graph into forward and backward, is kept from saving more than a neuron's backward needs."""

from __future__ import annotations

from typing import Any

import torch


def remade(tensor: torch.Tensor) -> torch.Tensor:
    """An input of a neuron, as its backward takes it in a compiled graph.

    The partitioner of AOTAutograd saves whatever an opaque operator of the backward reads, also what one pointwise pass
    makes from tensors that are saved anyway (a batch norm from the output of its convolution). Two negations in the
    backward graph, which no pass removes, give it something to fuse that recomputation with.
    """
    from torch.fx import traceback  # 2.11, 2.13

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
    from torch._subclasses.functional_tensor import FunctionalTensor  # 2.11, 2.13
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot  # 2.11, 2.13

    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return False
    slot = get_proxy_slot(torch._from_functional_tensor(tensor.elem), mode.tracer, None)
    node: Any = None if slot is None else slot.proxy.node
    while node is not None and opname(node.target) in _PASSED_THROUGH:
        node = node.args[0]
    return node is not None and torch.Tag.pointwise in getattr(node.target, "tags", ())


def opname(target: Any) -> str:
    """`view` for `aten.view.default`."""
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else ""


_PASSED_THROUGH = {"view", "_unsafe_view", "reshape", "convert_element_type", "_to_copy", "clone", "expand", "unsqueeze"}
