"""Complex numbers of a step, written down as pairs of real ones.

Every complex value that depends on time has two nodes, its real and its imaginary part, and an op on it is recorded as the real ops of
PyTorch's own formula. So nothing behind the recording knows of complex numbers, and gradients are those that PyTorch's formulas give,
conjugates included. The node of a complex value itself only stands for the two: no output leads there. What depends on params alone
stays complex, and runs in PyTorch around the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch.tensors import promoted_dtype

aten = torch.ops.aten
PLAIN = {aten._conj.default: aten._conj_physical.default}  # in place of a view that cannot be split into parts


class Pair(NamedTuple):
    """Real and imaginary part: tensors, or numbers."""

    re: Any
    im: Any


class Op(NamedTuple):
    """The op that a rule writes down, and its result on fake tensors."""

    func: Any
    val: Tensor


Rule = Callable[..., Any]  # takes the `Op` and its arguments, some as pairs; returns a pair, or a real tensor
_RULES: dict[str, tuple[Rule, tuple[int, ...]]] = {}
_OF_VIEWS = [f"aten::{name}" for name in ("select", "view_as_complex", "clone", "detach", "alias", "neg", "_neg_view")]
_MAKE = ("aten::complex", "aten::polar", "aten::view_as_complex")  # complex numbers of real ones


class Pairs:
    """The complex values of one recording.

    Attributes:
        recorder: what writes down the ops.
        parts: of the node of a complex value, or of its view as reals, the nodes of its two parts.
    """

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.parts: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def concern(self, func: Any, args: Any, kwargs: dict[str, Any], nodes: list[fx.Node]) -> bool:
        """Whether an op takes or gives complex numbers, or a view of them as reals."""
        if any(n in self.parts or n.meta["val"].is_complex() for n in nodes) or any(isinstance(a, complex) for a in args):
            return True
        if func._schema.name == "aten::select_backward":  # of `.real` and `.imag`
            viewed = any([*n.meta["val"].shape] == [*args[1]] and not n.meta["val"].is_complex() for n in self.parts)
            return viewed and args[2] % len(args[1]) == len(args[1]) - 1
        return func._schema.name in _MAKE or getattr(kwargs.get("dtype"), "is_complex", False)

    def record(self, func: Any, args: Any, kwargs: dict[str, Any], nodes: list[fx.Node]) -> Any:
        """Write down an op on values of a step as ops on their parts."""
        op = Op(func, self.recorder.evaluate(func, args, kwargs))
        rule, places = _RULES.get(func._schema.name, (None, ()))
        views = [n for n in nodes if n in self.parts and not n.meta["val"].is_complex()]
        if views and func._schema.name not in _OF_VIEWS and not (func is aten.add.Tensor and len(views) == 2):
            rule = None  # which may take the two parts for numbers of their own
        if rule is not None:
            given = [self._of(a) if k in places else a for k, a in enumerate(args)]
            dtype = promoted_dtype([n.meta["val"] for n in nodes], to_float=True) if op.val.dtype is torch.bool else op.val.dtype
            made = self.recorder.decompose(func, (op, *given), kwargs, _whole(rule, dtype.to_real()))
            if isinstance(made, Pair):
                parts = [self.recorder.node_of(part) for part in made]
                kinds = {n.meta["kind"] for n in parts}
                return self.recorder.track(op.val, self._join(op.val, parts, "reduced" if "reduced" in kinds else "step"))
            if made is not NotImplemented:
                return made
        self.recorder.poison(func, nodes)
        return self.recorder.add(func, args, kwargs, "step", nodes)

    def uniform(self, val: Tensor, value: Any, kind: str = "static", of: Any = ()) -> Tensor:
        """Track a complex tensor of one value, as `recorder.uniform` does a real one."""
        with self.recorder.fake:
            part = torch.empty(val.shape, dtype=val.dtype.to_real(), device=val.device)
        parts = [self.recorder.uniform(part, number, kind, of) for number in (complex(value).real, complex(value).imag)]
        return self.recorder.track(val, self._join(val, parts, kind))

    def summed(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for a complex one where its sums are computed with: in gradients of params."""
        return self._join(node.meta["val"], self.parts[node], "reduced") if node in self.parts else node

    def _of(self, value: Any) -> Pair:
        """Return the two parts of a number or a tensor."""
        if not isinstance(value, Tensor):
            return Pair(complex(value).real, complex(value).imag)
        recorder, node = self.recorder, self.recorder.node_of(value)
        if node not in self.parts:
            if not value.is_complex():
                return Pair(value, 0.0)
            kind = node.meta["kind"]  # of a param, or of an operand while `_program/pairs.py` finds out what is complex
            view = recorder.add(aten.clone.default, (value,), {}, kind, [node])  # a conjugate has no view
            view = recorder.add(aten.view_as_real.default, (view,), {}, kind, [node])
            self.parts[node] = tuple([recorder.node_of(recorder.add(aten.select.int, (view, -1, k), {}, kind, [node])) for k in (0, 1)])
        with recorder.fake:  # a new tensor for each: the core may write in place to the first
            return Pair(*[recorder.track(torch.empty_like(part.meta["val"]), part) for part in self.parts[node]])

    def _join(self, val: Tensor, parts: Any, kind: str) -> fx.Node:
        """Write down the node of a complex value, or of its view as reals."""
        recorder = self.recorder
        meta = {"kind": kind, "line": recorder.line(), "backward": recorder.in_backward, "users": recorder.by_user()}
        node = recorder.graph.create_node("call_function", aten.complex.default, tuple(parts))
        node.meta.update(val=val if val.is_complex() else recorder.evaluate(aten.view_as_complex.default, (val,), {}), **meta)
        if not val.is_complex():
            node = recorder.graph.create_node("call_function", aten.view_as_real.default, (node,))
            node.meta.update(val=val, **meta)
        if kind != "reduced":
            self.parts[node] = tuple(parts)
        return node


def _whole(rule: Rule, dtype: torch.dtype) -> Rule:
    """Return the rule for operands of several shapes and dtypes: it takes parts of one real `dtype`, and gives them the whole shape."""

    def cast(part: Tensor) -> Tensor:
        return part if part.dtype == dtype else part.to(dtype)

    def whole(op: Op, *args: Any, **kwargs: Any) -> Any:
        made = rule(op, *[_each(a, cast) if isinstance(a, Pair) else a for a in args], **kwargs)
        if not isinstance(made, Pair):
            return made
        shape = op.val.shape if op.val.is_complex() else op.val.shape[:-1]
        parts = [part if isinstance(part, Tensor) else torch.full(shape, part, dtype=dtype, device=op.val.device) for part in made]
        return Pair(*[p if p.shape == shape else torch.where(p.new_ones(shape, dtype=torch.bool), p, p) for p in parts])

    return whole


def _each(pair: Pair, function: Callable[[Tensor], Any]) -> Pair:
    """Return what a function gives of both parts; a number stays."""
    return Pair(*[function(part) if isinstance(part, Tensor) else part for part in pair])


# --- rules: the formulas of eager ------------------------------------------------------------------------------------------
def _rule(names: str, *places: int) -> Callable[[Rule], Rule]:
    """Register the rule of some ops; `places`: of those of their arguments that it takes as pairs."""

    def register(fn: Rule) -> Rule:
        _RULES.update({f"aten::{name}": (fn, places) for name in names.split()})
        return fn

    return register


@_rule("clone detach alias view _unsafe_view reshape expand squeeze unsqueeze sum", 0)
def _part_by_part(op: Op, z: Pair, *args: Any, **kwargs: Any) -> Pair:
    return _each(z, lambda part: op.func(part, *args, **kwargs))


@_rule("select", 0)
def _select(op: Op, z: Pair, dim: int, index: int) -> Any:
    """`.real` and `.imag`."""
    return z[index] if not op.val.is_complex() and dim in (-1, op.val.dim()) else NotImplemented


@_rule("select_backward")
def _select_backward(op: Op, grad: Tensor, sizes: Any, dim: int, index: int) -> Pair:
    zero = torch.zeros_like(grad)
    return Pair(zero, grad) if index else Pair(grad, zero)


@_rule("_to_copy", 0)
def _to_copy(op: Op, z: Pair, **kwargs: Any) -> Any:
    return z if op.val.is_complex() else z.re


@_rule("add", 0, 1)
def _add(op: Op, a: Pair, b: Pair, alpha: Any = 1, sign: int = 1) -> Pair:
    b = b if alpha == 1 else _mul(op, Pair(complex(alpha).real, complex(alpha).imag), b)
    return Pair(a.re + b.re, a.im + b.im) if sign > 0 else Pair(a.re - b.re, a.im - b.im)


_rule("sub", 0, 1)(lambda op, a, b, alpha=1: _add(op, a, b, alpha, -1))
_rule("rsub", 0, 1)(lambda op, a, b, alpha=1: _add(op, b, a, alpha, -1))


@_rule("mul", 0, 1)
def _mul(op: Op, a: Pair, b: Pair) -> Pair:
    """As eager, which makes a real factor complex: so infinities, NaN and signs of zero are eager's too."""
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


@_rule("div", 0, 1)
def _div(op: Op, a: Pair, b: Pair) -> Pair:
    if isinstance(b.im, float) and b.im == 0:
        return Pair(a.re / b.re, a.im / b.re)
    re, im = (part if isinstance(part, Tensor) else torch.full_like(a.re, part) for part in b)
    scale = torch.maximum(torch.abs(re), torch.abs(im))  # so that no square overflows
    re, im = re / scale, im / scale
    square = (re * re + im * im) * scale
    return Pair((a.re * re + a.im * im) / square, (a.im * re - a.re * im) / square)


@_rule("polar")
def _polar(op: Op, radius: Tensor, angle: Tensor) -> Pair:
    return Pair(radius * torch.cos(angle), radius * torch.sin(angle))


@_rule("sgn", 0)
def _sgn(op: Op, z: Pair) -> Pair:
    radius = torch.hypot(z.re, z.im)
    return _each(z, lambda part: torch.where(radius == 0, 0.0, part / radius))


@_rule("where", 1, 2)
def _where(op: Op, condition: Tensor, a: Pair, b: Pair) -> Pair:
    return Pair(torch.where(condition, a.re, b.re), torch.where(condition, a.im, b.im))


_rule("complex")(lambda op, re, im: Pair(re, im))
_rule("view_as_real view_as_complex", 0)(lambda op, z: z)
_rule("neg _neg_view", 0)(lambda op, z: Pair(-z.re, -z.im))  # the second on a view of a conjugate, for its imaginary part
_rule("_conj _conj_physical", 0)(lambda op, z: Pair(z.re, -z.im))
_rule("reciprocal", 0)(lambda op, z: _div(op, Pair(1.0, 0.0), z))
_rule("pow", 0)(lambda op, z, exponent: z if exponent == 1 else _mul(op, z, z) if exponent == 2 else NotImplemented)
_rule("exp", 0)(lambda op, z: _polar(op, torch.exp(z.re), z.im))
_rule("abs", 0)(lambda op, z: torch.hypot(z.re, z.im))
_rule("angle", 0)(lambda op, z: torch.atan2(z.im, z.re))
_rule("masked_fill", 0, 2)(lambda op, z, mask, value: _where(op, mask, value, z))
_rule("eq", 0, 1)(lambda op, a, b: (a.re == b.re) & (a.im == b.im))
_rule("ne", 0, 1)(lambda op, a, b: (a.re != b.re) | (a.im != b.im))
