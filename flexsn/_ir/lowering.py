"""From ATen to the closed op set: which op becomes which, with ATen's own type promotion.

`RULES` maps an ATen overload to a function `(builder, node) -> Node`. An op of the closed set that has its own ATen
overload gets its rule from its row in `_ir/ops.py`; here are those that are several closed ops. What has no rule goes
through PyTorch's decompositions until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.tensors import promoted_dtype
from ..errors import UnsupportedOpError
from .graph import HALF, Builder, Graph, Node
from .identifiers import assigned_name, identifier
from .ops import OPS, Op
from .roles import Kind, Role
from .rounding import rounding_of

aten = torch.ops.aten
Rule = Callable[["Lowering", fx.Node], Node]
RULES: dict[Any, Rule] = {}


class Lowering:
    """One graph in the making: closed-op values of the recorded nodes."""

    def __init__(self, core: str, device: torch.device):
        self.b = Builder(core)
        self.rounding = rounding_of(device)
        self.env: dict[fx.Node, Node] = {}
        self.params: dict[Role, fx.Node] = {}  # role -> static node that the kernel loads
        self.roles: dict[str, Role] = {}  # of the leaves, by their names in the recorded graph

    def node(self, fx_node: fx.Node) -> Node:
        """Return the value of a recorded node; a static one becomes a param of the kernel, or a number."""
        if fx_node not in self.env:
            val = fx_node.meta["val"]
            if "uniform" in fx_node.meta:
                of = frozenset(self.roles[name] for name in fx_node.meta.get("of", ()))
                self.env[fx_node] = self.b.const(fx_node.meta["uniform"], val.dtype, of)
            else:
                role = Role(Kind.PARAM, len(self.params))
                self.params[role] = fx_node
                self.env[fx_node] = self.b.input(role, val.dtype, identifier(fx_node.meta.get("role")) or assigned_name(fx_node) or "p")
        return self.env[fx_node]

    def add(self, fx_node: fx.Node, name: str | None = None) -> None:
        """Lower a recorded op whose operands are there.

        Args:
            name: the user's name for its value.
        """
        rule = RULES[fx_node.target] if fx_node.target in RULES else _part(fx_node)
        self.b.line = fx_node.meta["line"]
        before = len(self.b.nodes)
        value = self.b.convert(rule(self, fx_node), fx_node.meta["val"].dtype)
        if name is not None and len(self.b.nodes) > before and value is self.b.nodes[-1]:
            value.name = self.b.name(name)
        self.env[fx_node] = value

    def cast(self, arg: Any, dtype: torch.dtype) -> Node:
        """Return an argument (recorded node or Python number) as a value of `dtype`."""
        if isinstance(arg, fx.Node):
            return self.b.convert(self.node(arg), dtype)
        return self.b.const(arg, dtype)

    def casts(self, args: Sequence[Any], dtype: torch.dtype) -> tuple[Node, ...]:
        return tuple(self.cast(a, dtype) for a in args)

    def op(self, name: str, *args: Node) -> Node:
        return self.b.op(name, *args)

    def const(self, value: Any, like: Node) -> Node:
        return self.b.const(value, like.dtype)


def lower(
    core: str, leaves: Mapping[Role, fx.Node], outputs: Mapping[Role, fx.Node], dtypes: Mapping[Role, torch.dtype], device: torch.device
) -> tuple[Graph, dict[Role, fx.Node]]:
    """Lower recorded nodes to a step graph.

    Args:
        leaves: time-dependent placeholders by role (`x0`, `v0`, `gy0`, ...).
        outputs: recorded nodes by role.
        dtypes: for roles that are carried from step to step: the dtype in which they are carried.
        device: whose eager rules hold, where they differ.

    Returns:
        The graph, and the static nodes that it loads as params, by role (`p0`, ...).
    """
    low = Lowering(core, device)
    for role, leaf in leaves.items():
        low.roles[leaf.name] = role
        own = leaf.meta["val"].dtype
        value = low.b.input(role, dtypes.get(role, own), identifier(leaf.meta.get("role")) or role)
        low.env[leaf] = low.b.convert(value, own)
    names = _names(outputs)
    for node in _topological(outputs.values()):
        if node in low.env or node.meta["kind"] != "step" or "uniform" in node.meta:
            continue
        if node.target in _MULTI:
            continue
        low.add(node, names.get(node))
    values = {role: low.node(node) for role, node in outputs.items()}
    return low.b.graph({role: low.b.convert(v, dtypes.get(role, v.dtype)) for role, v in values.items()}), low.params


def _topological(roots: Iterable[fx.Node]) -> list[fx.Node]:
    live: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            if node.meta.get("kind") == "step":
                stack.extend(node.all_input_nodes)
    graph = next(iter(live)).graph if live else None
    return [n for n in graph.nodes if n in live] if graph is not None else []


def _names(outputs: Mapping[Role, fx.Node]) -> dict[fx.Node, str]:
    """Return names of nodes: `h` for the last op of the line `h = v + (x - v) / tau`."""
    last: dict[str, fx.Node] = {}
    for node in _topological(outputs.values()):
        if node.meta.get("kind") == "step" and node.op == "call_function" and node.meta.get("line"):
            last[node.meta["line"]] = node
    return {node: name for node in last.values() if (name := assigned_name(node))}


# --- rules -----------------------------------------------------------------------------------------------------------------
def _rule(*overloads: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for overload in overloads:
            packet, _, name = overload.partition(".")
            RULES[getattr(getattr(aten, packet), name)] = fn
        return fn

    return register


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args  # recorded nodes and Python numbers, as the op's schema has them


def _target(node: fx.Node) -> Any:
    return node.target  # of a recorded op: its ATen overload


def _promoted(args: Sequence[Any], *, to_float: bool = False) -> torch.dtype:
    vals = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    return promoted_dtype(vals, to_float=to_float)


def _direct(op: Op) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Node:
        args = [_args(node)[i] if i < len(_args(node)) else node.kwargs[_schema_name(node, i)] for i in range(op.arity)]
        dtype = _promoted(args, to_float=op.promote == "float") if op.result == "bool" else _dtype(node)
        if op.name in ("floor", "ceil", "trunc", "round") and not dtype.is_floating_point:
            return low.cast(args[0], dtype)
        if op.name == "nextafter" and node.meta["val"].dtype in HALF:
            raise UnsupportedOpError("`nextafter` of 16-bit floats has no rule", core=low.b.core, line=low.b.line)
        return low.op(op.name, *low.casts(args, dtype))

    return rule


def _schema_name(node: fx.Node, index: int) -> str:
    return _target(node)._schema.arguments[index].name


for _op in OPS.values():
    for _overload in _op.aten:
        _rule(_overload)(_direct(_op))


def _dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype in which a node is computed: as in eager, 16-bit floats in float32, and `lower` rounds the result once."""
    own = node.meta["val"].dtype
    return torch.float32 if own in HALF else own


def _scaled_sum(low: Lowering, node: fx.Node, a: Any, b: Any, sign: int) -> Node:
    """Return `a + sign * alpha * b`, rounded once."""
    alpha: Any = node.kwargs.get("alpha", _args(node)[2] if len(_args(node)) > 2 else 1)
    dtype, own = _dtype(node), node.meta["val"].dtype
    number = own if low.rounding.narrow_numbers else dtype
    x, y = [low.b.convert(low.cast(v, own if isinstance(v, fx.Node) else number), dtype) for v in (a, b)]
    if dtype is torch.bool:
        return low.op("or", x, y) if alpha else x
    if alpha == 1:
        return low.op("add" if sign > 0 else "sub", x, y)
    scale = low.b.convert(low.cast(sign * alpha, number), dtype)
    return low.op("fma", y, scale, x) if dtype.is_floating_point else low.op("add", x, low.op("mul", scale, y))


@_rule("add.Tensor", "add.Scalar")
def _add(low: Lowering, node: fx.Node) -> Node:
    return _scaled_sum(low, node, _args(node)[0], _args(node)[1], 1)


@_rule("sub.Tensor", "sub.Scalar")
def _sub(low: Lowering, node: fx.Node) -> Node:
    return _scaled_sum(low, node, _args(node)[0], _args(node)[1], -1)


@_rule("rsub.Tensor", "rsub.Scalar")
def _rsub(low: Lowering, node: fx.Node) -> Node:
    return _scaled_sum(low, node, _args(node)[1], _args(node)[0], -1)


@_rule("div.Tensor", "div.Scalar")
def _div(low: Lowering, node: fx.Node) -> Node:
    a, b = _args(node)[:2]
    dtype = _dtype(node)
    if low.rounding.reciprocals and not isinstance(b, fx.Node) and b != 0:
        scale = torch.ones((), dtype=dtype) / torch.tensor(b, dtype=dtype)
        return low.op("mul", low.cast(a, dtype), low.b.const(scale.item(), dtype))
    return low.op("div", *low.casts((a, b), dtype))


@_rule("reciprocal.default")
def _reciprocal(low: Lowering, node: fx.Node) -> Node:
    x = low.cast(_args(node)[0], _dtype(node))
    return low.op("div", low.const(1, x), x)


@_rule("rsqrt.default")
def _rsqrt(low: Lowering, node: fx.Node) -> Node:
    x = low.cast(_args(node)[0], _dtype(node))
    return low.op("div", low.const(1, x), low.op("sqrt", x))


@_rule("lerp.Scalar", "lerp.Tensor")
def _lerp(low: Lowering, node: fx.Node) -> Node:
    start, end, weight = low.casts(_args(node)[:3], _dtype(node))
    near = low.op("lt", low.op("abs", weight), low.const(0.5, weight))
    scale = low.op("where", near, weight, low.op("sub", weight, low.const(1, weight)))
    return low.op("fma", scale, low.op("sub", end, start), low.op("where", near, start, end))


@_rule("addcmul.default")
def _addcmul(low: Lowering, node: fx.Node) -> Node:
    base, a, b = low.casts(_args(node)[:3], _dtype(node))
    value = node.kwargs.get("value", 1)
    if not _dtype(node).is_floating_point:
        return low.op("add", base, low.op("mul", low.op("mul", low.const(value, a), a), b))
    if value == 1:
        return low.op("fma", a, b, base)
    if low.rounding.late_factors:
        return low.op("fma", low.const(value, a), low.op("mul", a, b), base)
    return low.op("fma", low.op("mul", low.const(value, a), a), b, base)


@_rule("addcdiv.default")
def _addcdiv(low: Lowering, node: fx.Node) -> Node:
    base, a, b = low.casts(_args(node)[:3], _dtype(node))
    value = node.kwargs.get("value", 1)
    if low.rounding.late_factors:
        return low.op("fma", low.const(value, a), low.op("div", a, b), base)
    return low.op("add", base, low.op("div", a if value == 1 else low.op("mul", low.const(value, a), a), b))


@_rule("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "hardtanh.default", "relu.default")
def _clamp(low: Lowering, node: fx.Node) -> Node:
    """Where x equals a bound up to the sign of zero, eager gives x beside a number, and the bound if it is a tensor."""
    given = {a.name: v for a, v in zip(_target(node)._schema.arguments, _args(node), strict=False)} | node.kwargs
    low_default, high_default = {aten.relu.default: (0, None), aten.hardtanh.default: (-1, 1)}.get(_target(node), (None, None))
    bounds = given.get("min", given.get("min_val", low_default)), given.get("max", given.get("max_val", high_default))
    dtype = _dtype(node)
    x = low.cast(_args(node)[0], dtype)
    for op, bound in zip(("maximum", "minimum"), bounds, strict=True):
        if bound is not None:
            value = low.cast(bound, dtype)
            x = low.op(op, x, value) if isinstance(bound, fx.Node) else low.op(op, value, x)
    return x


@_rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(low: Lowering, node: fx.Node) -> Node:
    return low.op("where", low.cast(_args(node)[0], torch.bool), *low.casts(_args(node)[1:3], _dtype(node)))


@_rule("clone.default")
def _clone(low: Lowering, node: fx.Node) -> Node:
    return low.node(_args(node)[0])


@_rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(low: Lowering, node: fx.Node) -> Node:
    x, mask, value = _args(node)[:3]
    return low.op("where", low.cast(mask, torch.bool), low.cast(value, _dtype(node)), low.cast(x, _dtype(node)))


@_rule("threshold.default")
def _threshold(low: Lowering, node: fx.Node) -> Node:
    x, limit, value = low.casts(_args(node)[:3], _dtype(node))
    return low.op("where", low.op("le", x, limit), value, x)


@_rule("logical_and.default", "logical_or.default", "logical_xor.default")
def _logical(low: Lowering, node: fx.Node) -> Node:
    name = _target(node)._schema.name.removeprefix("aten::logical_")
    return low.op(name, *low.casts(_args(node)[:2], torch.bool))


@_rule("logical_not.default")
def _logical_not(low: Lowering, node: fx.Node) -> Node:
    return low.op("not", low.cast(_args(node)[0], torch.bool))


@_rule("bitwise_not.default")
def _bitwise_not(low: Lowering, node: fx.Node) -> Node:
    x = low.node(_args(node)[0])
    return low.op("not" if x.dtype is torch.bool else "invert", x)


@_rule("_to_copy.default")
def _to_copy(low: Lowering, node: fx.Node) -> Node:
    return low.cast(_args(node)[0], node.meta["val"].dtype)


@_rule("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _pow(low: Lowering, node: fx.Node) -> Node:
    """Return the power by ATen's own shortcuts for some scalar exponents, which keep its bits."""
    base, exponent = _args(node)[:2]
    dtype, own = _dtype(node), node.meta["val"].dtype
    x = low.cast(base, dtype)

    def times(a: Node, b: Node) -> Node:
        product = low.op("mul", a, b)
        rounded = own is torch.bfloat16 or (own is torch.float16 and low.rounding.rounds_powers)  # each
        return low.b.convert(low.b.convert(product, own), dtype) if rounded else product

    if not isinstance(exponent, fx.Node):
        if exponent in (0, 1):
            return x if exponent else low.const(1, x)
        if exponent in (2, 3):
            square = times(x, x)
            return square if exponent == 2 else times(square, x)
        if dtype.is_floating_point and exponent in (0.5, -0.5, -1, -2):
            root = low.op("sqrt", x) if exponent in (0.5, -0.5) else times(x, x) if exponent == -2 else x
            return root if exponent == 0.5 else low.op("div", low.const(1, x), root)
    if isinstance(base, (int, float)) and base == 2 and dtype.is_floating_point:
        return low.op("exp2", low.cast(exponent, dtype))
    return low.op("pow" if dtype.is_floating_point else "pow_int", x, low.b.convert(low.cast(exponent, own), dtype))


def _by_kind(name: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Node:
        dtype, own = _dtype(node), node.meta["val"].dtype
        args = [low.b.convert(low.cast(a, own), dtype) for a in _args(node)[:2]]  # eager rounds a number to 16 bits here
        return low.op(name if dtype.is_floating_point else f"{name}_int", *args)

    return rule


_rule("fmod.Tensor", "fmod.Scalar")(_by_kind("fmod"))
_rule("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")(_by_kind("remainder"))
_rule("floor_divide.default", "floor_divide.Scalar")(_by_kind("floor_div"))


@_rule("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(low: Lowering, node: fx.Node) -> Node:
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return _by_kind("floor_div")(low, node)
    return low.op("div" if mode is None else "trunc_div", *low.casts(_args(node)[:2], _dtype(node)))


@_rule("index_put.default")
def _index_put(low: Lowering, node: fx.Node) -> Node:
    """`h[mask] = number`; other forms are refused when recorded (`elementwise_index_put`)."""
    x, (mask,), value = _args(node)[:3]
    return low.op("where", low.node(mask), *low.casts((value, x), _dtype(node)))


def _part(node: fx.Node) -> Rule:
    """Return the rule of one result of an op with several."""
    whole, index = _args(node)
    assert isinstance(whole, fx.Node) and isinstance(index, int)
    return _MULTI[whole.target][index]


def _of_frexp(name: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Node:
        (whole,) = node.all_input_nodes
        return low.op(name, low.node(whole.all_input_nodes[0]))

    return rule


_MULTI: dict[Any, tuple[Rule, ...]] = {aten.frexp.Tensor: (_of_frexp("mantissa"), _of_frexp("exponent"))}
for _overload, _parts in _MULTI.items():
    RULES[_overload] = _parts[0]
