"""From ATen to the closed op set: which op becomes which, with ATen's own type promotion.

`RULES` maps an ATen overload to a function `(builder, node) -> Node`. An op of the closed set that has its own ATen
overload gets its rule from its row in `opset.py`; here are those that are several closed ops. What has no rule goes
through PyTorch's decompositions until it does.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND  # 2.11, 2.13
from torch._prims_common import elementwise_dtypes  # 2.11, 2.13

from . import _compat
from .errors import UnsupportedOpError
from .graph import HALF, Builder, Graph, Node
from .opset import OPS, Op

aten = torch.ops.aten
Rule = Callable[["Lowering", fx.Node], Node]
RULES: dict[Any, Rule] = {}


class Lowering:
    """One graph in the making: closed-op values of the recorded nodes."""

    def __init__(self, core: str):
        self.b = Builder(core)
        self.env: dict[fx.Node, Node] = {}
        self.params: dict[str, fx.Node] = {}  # role -> static node that the kernel loads

    def node(self, fx_node: fx.Node) -> Node:
        """The value of a recorded node; a static one becomes a param of the kernel, or a number."""
        if fx_node not in self.env:
            val = fx_node.meta["val"]
            if "uniform" in fx_node.meta:
                self.env[fx_node] = self.b.const(fx_node.meta["uniform"], val.dtype)
            else:
                role = f"p{len(self.params)}"
                self.params[role] = fx_node
                self.env[fx_node] = self.b.input(role, val.dtype, _identifier(fx_node.meta.get("role")) or _assigned(fx_node) or "p")
        return self.env[fx_node]

    def cast(self, arg: Any, dtype: torch.dtype) -> Node:
        """An argument (recorded node or Python number) as a value of `dtype`."""
        if isinstance(arg, fx.Node):
            return self.b.convert(self.node(arg), dtype)
        if dtype in HALF:
            arg = torch.tensor(arg, dtype=dtype, device="cpu").item()
        return self.b.const(arg, dtype)

    def casts(self, args: Sequence[Any], dtype: torch.dtype) -> tuple[Node, ...]:
        return tuple(self.cast(a, dtype) for a in args)

    def op(self, name: str, *args: Node) -> Node:
        return self.b.op(name, *args)

    def const(self, value: Any, like: Node) -> Node:
        return self.b.const(value, like.dtype)


def lower(
    core: str, leaves: dict[str, fx.Node], outputs: dict[str, fx.Node], dtypes: dict[str, torch.dtype]
) -> tuple[Graph, dict[str, fx.Node]]:
    """Lower recorded nodes to a step graph.

    Args:
        leaves: time-dependent placeholders by role (`x0`, `v0`, `gy0`, ...).
        outputs: recorded nodes by role.
        dtypes: for roles that are carried from step to step: the dtype in which they are carried.

    Returns:
        The graph, and the static nodes that it loads as params, by role (`p0`, ...).
    """
    low = Lowering(core)
    for role, leaf in leaves.items():
        own = leaf.meta["val"].dtype
        value = low.b.input(role, dtypes.get(role, own), _identifier(leaf.meta.get("role")) or role)
        low.env[leaf] = low.b.convert(value, own)
    names = _names(outputs)
    for node in _topological(outputs.values()):
        if node in low.env or node.meta["kind"] != "step" or "uniform" in node.meta:
            continue
        if node.target in _MULTI:
            continue
        rule = RULES[node.target] if node.target in RULES else _part(node)
        low.b.line = node.meta["line"]
        before = len(low.b.nodes)
        value = low.b.convert(rule(low, node), node.meta["val"].dtype)
        if node in names and len(low.b.nodes) > before and value is low.b.nodes[-1]:
            value.name = low.b.name(names[node])
        low.env[node] = value
    values = {role: low.node(node) for role, node in outputs.items()}
    return low.b.graph({role: low.b.convert(v, dtypes.get(role, v.dtype)) for role, v in values.items()}), low.params


def _topological(roots) -> list[fx.Node]:
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


# --- the user's names ----------------------------------------------------------------------------------------------------
_RESERVED = frozenset(
    """alignas alignof and asm auto bool break case catch char class compl concept const continue decltype default delete do
    double else enum explicit export extern false final float for friend goto if import inline int int16_t int32_t int64_t int8_t
    long main major minor errno stdin stdout stderr assert linux unix mutable namespace new noexcept not nullptr operator or
    private protected public register requires return short
    signed sizeof static struct switch template this throw true try typedef typeid typename uint8_t union unsigned using
    virtual void volatile wchar_t while xor i j k n N T K tile begin flexsn half bfloat16 load store std tl triton p
    def del elif except from global in is lambda None nonlocal pass raise with yield True False await async""".split()
)


def _identifier(text: str | None) -> str | None:
    """A user's name as it may stand in generated code, or None."""
    if not text:
        return None
    name = text.rpartition(".")[2]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,40}", name) or "__" in name or re.fullmatch(r"t\d+", name):
        return None
    taken = name in _RESERVED or name.endswith(("_row", "_seq")) or name != name.lower()  # capitals may be C macros
    return name + "_" if taken else name


def _assigned(node: fx.Node) -> str | None:
    match = re.match(r".*?:\d+: ([A-Za-z_]\w*)\s*(?::[^=]*)?=(?!=)", node.meta.get("line") or "")
    return _identifier(match.group(1)) if match else None


def _names(outputs: dict[str, fx.Node]) -> dict[fx.Node, str]:
    """`h` for the last op of the line `h = v + (x - v) / tau`."""
    last: dict[str, fx.Node] = {}
    for node in _topological(outputs.values()):
        if node.meta.get("kind") == "step" and node.op == "call_function" and node.meta.get("line"):
            last[node.meta["line"]] = node
    return {node: name for node in last.values() if (name := _assigned(node))}


# --- rules -----------------------------------------------------------------------------------------------------------------
def _rule(*overloads: str):
    def register(fn: Rule) -> Rule:
        for overload in overloads:
            packet, _, name = overload.partition(".")
            RULES[getattr(getattr(aten, packet), name)] = fn
        return fn

    return register


def _promoted(args: Sequence[Any], kind: KIND = KIND.DEFAULT) -> torch.dtype:
    vals = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    return elementwise_dtypes(*vals, type_promotion_kind=kind)[1]


def _direct(op: Op) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Node:
        args = [node.args[i] if i < len(node.args) else node.kwargs[_schema_name(node, i)] for i in range(op.arity)]
        kind = KIND.INT_TO_FLOAT if op.promote == "float" else KIND.DEFAULT
        dtype = _promoted(args, kind) if op.result == "bool" else _dtype(node)
        if op.name in ("floor", "ceil", "trunc", "round") and not dtype.is_floating_point:
            return low.cast(args[0], dtype)
        if op.name == "nextafter" and node.meta["val"].dtype in HALF:
            raise UnsupportedOpError("`nextafter` of 16-bit floats has no rule", core=low.b.core, line=low.b.line)
        return low.op(op.name, *low.casts(args, dtype))

    return rule


def _schema_name(node: fx.Node, index: int) -> str:
    return node.target._schema.arguments[index].name


for _op in OPS.values():
    for _overload in _op.aten:
        _rule(_overload)(_direct(_op))


def _dtype(node: fx.Node) -> torch.dtype:
    """In what a node is computed: as in eager, 16-bit floats in float32, and `lower` rounds the result once."""
    own = node.meta["val"].dtype
    return torch.float32 if own in HALF else own


def _scaled_sum(low: Lowering, dtype: torch.dtype, a: Any, b: Any, alpha: Any, sign: int) -> Node:
    x, y = low.casts((a, b), dtype)
    if dtype is torch.bool:
        return low.op("or", x, y) if alpha else x
    if alpha == 1:
        return low.op("add" if sign > 0 else "sub", x, y)
    scale = low.const(sign * alpha, x)
    return low.op("fma", y, scale, x) if dtype.is_floating_point else low.op("add", x, low.op("mul", scale, y))


@_rule("add.Tensor", "add.Scalar")
def _add(low: Lowering, node: fx.Node) -> Node:
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    return _scaled_sum(low, _dtype(node), node.args[0], node.args[1], alpha, 1)


@_rule("sub.Tensor", "sub.Scalar")
def _sub(low: Lowering, node: fx.Node) -> Node:
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    return _scaled_sum(low, _dtype(node), node.args[0], node.args[1], alpha, -1)


@_rule("rsub.Tensor", "rsub.Scalar")
def _rsub(low: Lowering, node: fx.Node) -> Node:
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    return _scaled_sum(low, _dtype(node), node.args[1], node.args[0], alpha, -1)


@_rule("reciprocal.default")
def _reciprocal(low: Lowering, node: fx.Node) -> Node:
    x = low.cast(node.args[0], _dtype(node))
    return low.op("div", low.const(1, x), x)


@_rule("rsqrt.default")
def _rsqrt(low: Lowering, node: fx.Node) -> Node:
    x = low.cast(node.args[0], _dtype(node))
    return low.op("div", low.const(1, x), low.op("sqrt", x))


@_rule("lerp.Scalar", "lerp.Tensor")
def _lerp(low: Lowering, node: fx.Node) -> Node:
    start, end, weight = low.casts(node.args[:3], _dtype(node))
    near = low.op("lt", low.op("abs", weight), low.const(0.5, weight))
    scale = low.op("where", near, weight, low.op("sub", weight, low.const(1, weight)))
    return low.op("fma", scale, low.op("sub", end, start), low.op("where", near, start, end))


@_rule("addcmul.default")
def _addcmul(low: Lowering, node: fx.Node) -> Node:
    base, a, b = low.casts(node.args[:3], _dtype(node))
    value = node.kwargs.get("value", 1)
    if not _dtype(node).is_floating_point:
        return low.op("add", base, low.op("mul", low.op("mul", low.const(value, a), a), b))
    return low.op("fma", a if value == 1 else low.op("mul", low.const(value, a), a), b, base)


@_rule("addcdiv.default")
def _addcdiv(low: Lowering, node: fx.Node) -> Node:
    base, a, b = low.casts(node.args[:3], _dtype(node))
    value = node.kwargs.get("value", 1)
    return low.op("add", base, low.op("div", a if value == 1 else low.op("mul", low.const(value, a), a), b))


@_rule("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "hardtanh.default", "relu.default")
def _clamp(low: Lowering, node: fx.Node) -> Node:
    """Where x equals a bound up to the sign of zero, eager gives x beside a number, and the bound if it is a tensor."""
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs
    low_default, high_default = {aten.relu.default: (0, None), aten.hardtanh.default: (-1, 1)}.get(node.target, (None, None))
    bounds = given.get("min", given.get("min_val", low_default)), given.get("max", given.get("max_val", high_default))
    dtype = _dtype(node)
    x = low.cast(node.args[0], dtype)
    for op, bound in zip(("maximum", "minimum"), bounds, strict=True):
        if bound is not None:
            value = low.cast(bound, dtype)
            x = low.op(op, x, value) if isinstance(bound, fx.Node) else low.op(op, value, x)
    return x


@_rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(low: Lowering, node: fx.Node) -> Node:
    return low.op("where", low.cast(node.args[0], torch.bool), *low.casts(node.args[1:3], _dtype(node)))


@_rule("clone.default")
def _clone(low: Lowering, node: fx.Node) -> Node:
    return low.node(node.args[0])


@_rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(low: Lowering, node: fx.Node) -> Node:
    x, mask, value = node.args[:3]
    return low.op("where", low.cast(mask, torch.bool), low.cast(value, _dtype(node)), low.cast(x, _dtype(node)))


@_rule("threshold.default")
def _threshold(low: Lowering, node: fx.Node) -> Node:
    x, limit, value = low.casts(node.args[:3], _dtype(node))
    return low.op("where", low.op("le", x, limit), value, x)


@_rule("logical_and.default", "logical_or.default", "logical_xor.default")
def _logical(low: Lowering, node: fx.Node) -> Node:
    name = node.target._schema.name.removeprefix("aten::logical_")
    return low.op(name, *low.casts(node.args[:2], torch.bool))


@_rule("logical_not.default")
def _logical_not(low: Lowering, node: fx.Node) -> Node:
    return low.op("not", low.cast(node.args[0], torch.bool))


@_rule("bitwise_not.default")
def _bitwise_not(low: Lowering, node: fx.Node) -> Node:
    x = low.node(node.args[0])
    return low.op("not" if x.dtype is torch.bool else "invert", x)


@_rule("_to_copy.default")
def _to_copy(low: Lowering, node: fx.Node) -> Node:
    return low.cast(node.args[0], node.meta["val"].dtype)


@_rule("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _pow(low: Lowering, node: fx.Node) -> Node:
    """ATen's own shortcuts for some scalar exponents keep their bits."""
    base, exponent = node.args[:2]
    dtype = _dtype(node)
    x = low.cast(base, dtype)
    if not isinstance(exponent, fx.Node):
        if exponent == 0:
            return low.const(1, x)
        if exponent == 1:
            return x
        if exponent in (2, 3):
            square = low.op("mul", x, x)
            return square if exponent == 2 else low.op("mul", square, x)
        if dtype.is_floating_point and exponent in (0.5, -0.5, -1, -2):
            root = low.op("sqrt", x) if exponent in (0.5, -0.5) else low.op("mul", x, x) if exponent == -2 else x
            return root if exponent == 0.5 else low.op("div", low.const(1, x), root)
    if isinstance(base, (int, float)) and base == 2 and dtype.is_floating_point:
        return low.op("exp2", low.cast(exponent, dtype))
    return low.op("pow" if dtype.is_floating_point else "pow_int", x, low.cast(exponent, dtype))


def _by_kind(name: str) -> Rule:
    def rule(low: Lowering, node: fx.Node) -> Node:
        dtype, own = _dtype(node), node.meta["val"].dtype
        args = [low.b.convert(low.cast(a, own), dtype) for a in node.args[:2]]  # eager rounds a number to 16 bits here
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
    return low.op("div" if mode is None else "trunc_div", *low.casts(node.args[:2], _dtype(node)))


@_rule("index_put.default")
def _index_put(low: Lowering, node: fx.Node) -> Node:
    """`h[mask] = number`; other forms are refused when recorded (`elementwise_index_put`)."""
    args: Any = node.args
    x, (mask,), value = args[:3]
    return low.op("where", low.node(mask), *low.casts((value, x), _dtype(node)))


def _part(node: fx.Node) -> Rule:
    """The rule of one result of an op with several."""
    whole, index = node.args
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


# --- composites with eager's own formulas ----------------------------------------------------------------------------------
# Where PyTorch's decomposition is missing or rounds differently. `torch.addcmul` stands for the FMA that eager does.
_OWN: dict[Any, Callable[..., Any]] = {}


def _own(*overloads: str):
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            packet, _, name = overload.partition(".")
            _OWN[getattr(getattr(aten, packet), name)] = _wide(fn)
        return fn

    return register


def _wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As eager: 16-bit floats are computed in float32 and rounded once, at the end."""

    @functools.wraps(fn)
    def wide(*args, **kwargs):
        dtypes = {a.dtype for a in args if isinstance(a, Tensor)}
        if len(dtypes) > 1 or not dtypes <= set(HALF):
            return fn(*args, **kwargs)
        done = fn(*[a.float() if isinstance(a, Tensor) else a for a in args], **kwargs)
        return tuple(d.to(*dtypes) for d in done) if isinstance(done, tuple) else done.to(*dtypes)

    return wide


def _one_less_square(y: Tensor) -> Tensor:
    return torch.addcmul(torch.ones_like(y), y, y, value=-1)


@_own("heaviside.default")
def _heaviside(x: Tensor, values: Tensor) -> Tensor:
    return torch.where(x == 0, values, (x > 0).to(values.dtype))


@_own("logaddexp.default")
def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    larger = torch.maximum(x, y)
    return torch.where((x == y) & torch.isinf(x), x, larger + torch.log1p(torch.exp(-torch.abs(x - y))))


@_own("logaddexp2.default")
def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    larger = torch.maximum(x, y)
    spread = torch.log1p(torch.exp2(-torch.abs(x - y)))
    return torch.where((x == y) & torch.isinf(x), x, torch.add(larger, spread, alpha=1 / math.log(2)))


@_own("logit.default")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    z = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(z / (1 - z))


@_own("round.decimals")
def _round(x: Tensor, *, decimals: int) -> Tensor:
    scale = 10.0 ** abs(decimals)
    if decimals == 0 or not x.is_floating_point():
        return torch.round(x)
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


@_own("hardshrink.default")
def _hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, x)


@_own("hardshrink_backward.default", "softshrink_backward.default")
def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x < -lambd) | (x > lambd), grad, 0.0)


@_own("softshrink.default")
def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, torch.where(x > 0, x - lambd, x + lambd))


@_own("hardtanh_backward.default")
def _hardtanh_backward(grad: Tensor, x: Tensor, min_val: float, max_val: float) -> Tensor:
    return torch.where((x > min_val) & (x < max_val), grad, 0.0)


@_own("hardswish_backward.default")
def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, grad * (x / 3 + 0.5)))


@_own("elu_backward.default")
def _elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    """`x`: the input, or the output if `is_result`."""
    below = alpha * scale
    curve = x + below if is_result else below * torch.exp(x * input_scale)
    return torch.where(x > 0, grad * scale, grad * input_scale * curve)


@_own("sigmoid_backward.default")
def _sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y) * y


@_own("tanh_backward.default")
def _tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * _one_less_square(y)


@_own("silu_backward.default")
def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return grad * gate * torch.addcmul(torch.ones_like(x), x, 1 - gate)


@_own("mish_backward.default")
def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    bent = torch.tanh(torch.log1p(torch.exp(x)))
    return grad * torch.addcmul(bent, x * torch.sigmoid(x), _one_less_square(bent))


@_own("gelu_backward.default")
def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        density = torch.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return grad * torch.addcmul(below, x, density)
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    bent = torch.tanh(beta * torch.add(x, square * x, alpha=kappa))
    inner = beta * torch.add(torch.ones_like(x), square, alpha=3 * kappa)
    return grad * torch.addcmul(0.5 * (1 + bent), 0.5 * x * _one_less_square(bent), inner)


@_own("log_sigmoid_forward.default")
def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    small = torch.exp(-torch.abs(x))
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(small), small


@_own("log_sigmoid_backward.default")
def _log_sigmoid_backward(grad: Tensor, x: Tensor, small: Tensor) -> Tensor:
    share = small / (1 + small)
    return grad * torch.where(x < 0, 1 - share, share)


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """How PyTorch writes `func` in terms of other ops, if it does."""
    if func in _OWN:
        return _OWN[func]
    table = _compat.decomposition_table()
    if func in table:
        return table[func]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose
    return None
