"""Which ops are linear, and in what: those that may follow a sum over neurons on its way to the gradient of a param.

The kernel sums cotangents over time first, so whatever comes after must give the same for the sum as for its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

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
    "aten::_weight_norm_interface_backward": 1, "aten::diagonal_backward": 1, "aten::scatter": 2,
}  # fmt: skip
PRODUCTS = {"aten::mul", "aten::mm", "aten::bmm", "aten::mv", "aten::dot"}
LINEAR_IN_FIRST = {  # and nowhere else
    "aten::div", "aten::xlogy", "aten::special_xlog1py", "aten::logit_backward", "aten::convolution_backward",
    "aten::avg_pool2d_backward", "aten::upsample_nearest1d_backward",
}  # fmt: skip


def most_moving(name: str) -> int:
    """How many arguments of an op may depend on the sum; 0 if it is not known to be linear."""
    return LINEAR.get(name, int(name in LINEAR_IN_FIRST))


def addends(name: str, args: tuple) -> Sequence[Any]:
    """Arguments that the result has as terms: a constant among them would be added once, and not at every step."""
    if name in ("aten::add", "aten::sub"):
        return args[:2]
    if name == "aten::cat":
        return (args[:1] or ((),))[0]
    if name == "aten::where":
        return args[1:3]
    if name == "aten::masked_fill":
        return args[2:3]
    if name in ("aten::scatter_add", "aten::index_put", "aten::_unsafe_index_put", "aten::index_add"):
        return args[:1]
    return (*args[:1], *args[3:4]) if name == "aten::scatter" else ()


def is_linear(func: Any, nodes: Sequence[fx.Node], moving: Sequence[fx.Node]) -> bool:
    """Whether an op is linear in those of its operands `nodes` that depend on the sum, up to constant `addends`."""
    name = func._schema.name
    condition = name in ("aten::where", "aten::masked_fill") and nodes[name == "aten::masked_fill"] in moving
    denominator = name in LINEAR_IN_FIRST and nodes[0] not in moving
    combined = name == "aten::scatter" and func._overloadname in ("reduce", "value_reduce")
    return len(moving) <= most_moving(name) and not (condition or denominator or combined)
