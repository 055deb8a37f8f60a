"""Which ops are linear, and in what: those that may follow a sum over neurons on its way to the gradient of a param.

The kernel sums cotangents over time first, so whatever comes after must give the same for the sum as for its terms. And a
user's own backward of what is smaller than the step runs before a sum over neurons, where eager runs it after (`nonlinear`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch.tensors import OpOverload

# The number: how many arguments may depend on the sum.
LINEAR: dict[str, int] = {
    "aten::sum": 1, "aten::view": 1, "aten::_unsafe_view": 1, "aten::reshape": 1, "aten::expand": 1, "aten::permute": 1,
    "aten::t": 1, "aten::transpose": 1, "aten::squeeze": 1, "aten::unsqueeze": 1, "aten::mm": 1, "aten::bmm": 1,
    "aten::mv": 1, "aten::dot": 1, "aten::mul": 1, "aten::div": 1, "aten::neg": 1, "aten::clone": 1, "aten::_to_copy": 1,
    "aten::add": 2, "aten::sub": 2, "aten::where": 2, "aten::select": 1, "aten::slice": 1, "aten::select_backward": 1,
    "aten::slice_backward": 1, "aten::mean": 1, "aten::diagonal": 1, "aten::flip": 1, "aten::masked_fill": 1,
    "aten::cat": 9, "aten::cumsum": 1, "aten::constant_pad_nd": 1, "aten::roll": 1, "aten::repeat": 1, "aten::gather": 1,
    "aten::scatter_add": 2, "aten::index_put": 2, "aten::_unsafe_index_put": 2, "aten::index_add": 2,
    "aten::embedding_dense_backward": 1, "aten::index_select": 1, "aten::tril": 1, "aten::triu": 1,
    "aten::_weight_norm_interface_backward": 1, "aten::diagonal_backward": 1, "aten::scatter": 2, "aten::stack": 64,
    "aten::complex": 2, "aten::_conj": 1, "aten::_conj_physical": 1, "aten::view_as_real": 1, "aten::view_as_complex": 1,
}  # fmt: skip
PRODUCTS = {"aten::mul", "aten::mm", "aten::bmm", "aten::mv", "aten::dot"}
MIXING = {  # ops that mix neurons, of whatever others PyTorch composes them
    *LINEAR, "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::convolution", "aten::split", "aten::split_with_sizes", "aten::unbind",
}  # fmt: skip
LINEAR_IN_FIRST = {  # and nowhere else
    "aten::div", "aten::xlogy", "aten::special_xlog1py", "aten::logit_backward", "aten::convolution_backward",
    "aten::avg_pool2d_backward", "aten::upsample_nearest1d_backward",
}  # fmt: skip


def most_moving(name: str) -> int:
    """How many arguments of an op may depend on the sum; 0 if it is not known to be linear."""
    return LINEAR.get(name, int(name in LINEAR_IN_FIRST))


def addends(name: str, args: tuple) -> Sequence[Any]:
    """Arguments that the result has as terms: a constant among them would be added once, and not at every step."""
    if name in ("aten::add", "aten::sub", "aten::complex"):
        return args[:2]
    if name in ("aten::cat", "aten::stack"):
        return (args[:1] or ((),))[0]
    if name == "aten::where":
        return args[1:3]
    if name == "aten::masked_fill":
        return args[2:3]
    if name in ("aten::index_put", "aten::_unsafe_index_put"):
        return (*args[:1], *args[2:3])
    if name in ("aten::scatter", "aten::scatter_add", "aten::index_add"):
        return (*args[:1], *args[3:4])
    return args[2:3] if name == "aten::constant_pad_nd" else ()


def is_linear(func: Any, nodes: Sequence[fx.Node], moving: Sequence[fx.Node], result: Any) -> bool:
    """Whether an op is linear in those of its operands `nodes` that depend on the sum, up to constant `addends`."""
    name = func._schema.name
    condition = name in ("aten::where", "aten::masked_fill") and nodes[name == "aten::masked_fill"] in moving
    denominator = name in LINEAR_IN_FIRST and nodes[0] not in moving
    combined = name == "aten::scatter" and func._overloadname in ("reduce", "value_reduce")
    rounded = (name == "aten::div" and func._overloadname.endswith("_mode")) or _truncates(moving, result)
    return len(moving) <= most_moving(name) and not (condition or denominator or combined or rounded)


def _truncates(moving: Sequence[fx.Node], result: Any) -> bool:
    """Whether an op makes integers of floats, or shorter ones of integers: the sum of such is not that of the sum."""
    if not isinstance(result, Tensor) or result.dtype.is_floating_point or result.is_complex():
        return False
    return result.dtype is not torch.int64 or any(n.meta["val"].dtype.is_floating_point for n in moving)


def of_a_users_backward(node: fx.Node) -> bool:
    """Whether a custom function or a hook computed it in the backward, and not PyTorch that derived it."""
    return bool(node.meta.get("backward") and node.meta.get("users"))


def nonlinear(graph: fx.Graph, cotangents: Sequence[fx.Node], of: Sequence[fx.Node], grads: Sequence[fx.Node | None]) -> fx.Node | None:
    """The first op of a user's own backward that is not linear in the cotangents, or a gradient that no cotangent is in. What PyTorch
    derives is linear.

    Args:
        graph: a core and its VJP.
        of: those of the `cotangents` that are asked about.
        grads: what the VJP returns.
    """
    moving, behind = set(of), set(cotangents)
    constant = set[fx.Node]()  # the user's, that no cotangent is in

    def is_added(term: Any) -> bool:
        """Whether it counts once, and not as often as cotangents are summed; what PyTorch derives of no cotangent is zero."""
        if not isinstance(term, fx.Node):
            return term != 0
        value = term.meta.get("uniform", 1 if term in constant or not term.meta.get("backward") else 0)
        return term not in behind and value != 0

    for node in graph.nodes:
        nodes, users = [n for n in leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)], of_a_users_backward(node)
        there = [n for n in nodes if n in moving]
        zero = node.meta.get("uniform") == 0 and "of" in node.meta  # made of a cotangent, as `round` passes on
        moving.update([node] if there or zero else ())
        behind.update([node] if behind.intersection(nodes) or zero else ())
        constant.update([node] if node not in behind and (users or constant.intersection(nodes)) else ())
        if not there or not isinstance(node.target, OpOverload):
            continue
        sums = users or node.target is torch.ops.aten.add.Tensor  # by which autograd adds up gradients
        added = sums and any(map(is_added, leaves(addends(node.target._schema.name, node.args))))
        value = node.meta["val"]
        grown = isinstance(value, Tensor) and value.numel() > max(n.meta["val"].numel() for n in there if isinstance(n.meta["val"], Tensor))
        if added or (users and (grown or not is_linear(node.target, nodes, there, node.meta["val"]))):
            return node
    return next((g for g in grads if g is not None and is_added(g)), None)


def leaves(tree: Any) -> Iterator[Any]:
    """What nested arguments of an op hold."""
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        yield from leaves(tuple(tree.values()))
    else:
        yield tree
