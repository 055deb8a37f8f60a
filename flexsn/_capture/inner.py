"""Values with an inner dim, `[*neurons, N]`, while a core is recorded: each is N values of every neuron, and an op on it N ops.

A core adds the values along its last dim itself (`d.sum(-1)`, with N up to 64). What it does then is written down as if the user had
written one state for each: elementwise ops go value by value, `sum` and `mean` over the last dim are chains of adds from the first value
to the last, and what picks, joins or shifts values there costs nothing. So every later stage sees ordinary, elementwise steps.

A value keeps its tensor of the whole shape, which PyTorch's fake kernels compute, and the tensors of its parts beside it (`parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._ir.graph import HALF
from .._ir.lowering import RULES
from .._torch.tensors import functional_overload
from ..errors import FlexSNError, InPlaceError, NotElementwiseError
from .linearity import LINEAR
from .restrictions import op_name

aten = torch.ops.aten
MOST = 64  # values along an inner dim

MIXES = "is not elementwise, but its operand depends on time"  # what is said of an op

_MAKES = {"aten::unsqueeze", "aten::stack", "aten::view", "aten::_unsafe_view", "aten::select_backward", "aten::slice_backward"}
_VALUE_BY_VALUE = {
    "aten::detach", "aten::alias", "aten::lift_fresh", "aten::contiguous", "aten::lift", "aten::zeros_like", "aten::ones_like",
    "aten::full_like", "aten::empty_like", "aten::log_sigmoid_forward", "aten::hardswish", "aten::fill",
}  # fmt: skip
_LIKE = {"aten::new_zeros", "aten::new_ones", "aten::new_full"}
_HINT = (
    f"Over the last dim, of at most {MOST} values, a kernel takes `sum` and `mean`, and what picks, joins or shifts values there: "
    "`select`, `unbind`, `stack`, `cat`, `flip`, `roll`. For a product write `(d * w).sum(-1)`."
)
_ALIGNS = "Give it the dim: `v.unsqueeze(-1)`."

Parts = tuple[Tensor, ...]


class Inner:
    """The values with an inner dim of one recording.

    Attributes:
        parts: those of a value, by the `id` of its tensor, which is kept so that its id stays its own.
    """

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.parts: dict[int, tuple[Tensor, Parts]] = {}
        self._split: dict[fx.Node, Parts] = {}  # of tensors that do not depend on time

    def of(self, tensor: Any) -> Parts | None:
        """Return the parts of a value with an inner dim; None of any other."""
        return self.parts.get(id(tensor), (None, None))[1]

    def takes(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether an op is on values with an inner dim, or makes one of values of every neuron."""
        if any(id(t) in self.parts for t in tensors):
            return True
        return func._schema.name in _MAKES and any(self.recorder.node_of(t).meta["kind"] == "step" for t in tensors)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Write an op down part by part."""
        name = func._schema.name
        if func._schema.is_mutable:
            if self.recorder.in_backward and (new := functional_overload(func)) is not None:  # PyTorch's own, into what it made
                self.parts[id(args[0])] = args[0], self._parts(self._op(new, args, kwargs))
                return args[0]
            raise InPlaceError(
                f"`{op_name(func)}` writes into a tensor with an inner dim", core=self.recorder.sig.core, line=self.recorder.line(),
                hint="Write the form that makes a new tensor.",
            )  # fmt: skip
        if name in _LIKE:
            return self._op(func, (self._parts(args[0])[0], *args[1:]), kwargs)
        val = self.recorder.evaluate(func, args, kwargs)
        if isinstance(val, Tensor) and any(val is a for a in args):
            return val
        if any(v.dim() and not v.shape[-1] for v in _flat(val)):
            raise self.refusal(func, "It gives no values here: a slice is empty.")
        if _elementwise(func):
            found = self._each(func, args, kwargs)
        elif name in _RULES:
            found = _RULES[name](self, val, *args)  # none of them is given by name but a dtype, which `val` has
        else:
            found = None
        if found is None:
            return self._plainly(func, args, kwargs)
        return self._made(func, val, found)

    def _made(self, func: Any, val: Any, found: Any) -> Any:
        """Return the result of an op that has the parts `found`, or is itself the value of every neuron that was found."""
        if isinstance(val, (tuple, list)):
            return type(val)(self._made(func, v, f) for v, f in zip(val, found, strict=True))
        if isinstance(found, Tensor):
            return found
        if any((*p.shape, len(found)) != tuple(val.shape) or p.dtype != val.dtype for p in found):
            raise self.refusal(func)
        self.parts[id(val)] = val, tuple(found)
        return val

    def _plainly(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Write down, as ever, an op that makes no inner dim of values without one, or is on its way to the gradient of a param."""
        if any(id(a) in self.parts for a in _flat(args)):
            if not (self.recorder.in_backward and func._schema.name in LINEAR):
                raise self.refusal(func)
            args = self._mapped(args, self.whole)
        return self.recorder.record(func, args, kwargs, [self.recorder.node_of(t) for t in _flat((args, tuple(kwargs.values())))])

    def refusal(self, func: Any, hint: str = _HINT) -> FlexSNError:
        op = self.recorder.user_op or func
        return NotElementwiseError(f"`{op_name(op)}` {MIXES}", core=self.recorder.sig.core, line=self.recorder.line(), hint=hint)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a value that is on its way to the gradient of a param as one tensor."""
        parts = self.of(tensor)
        return tensor if parts is None else self._joined(parts)

    def _joined(self, parts: Parts) -> Tensor:
        nodes = [self.recorder.node_of(p) for p in parts]
        return self.recorder.add(aten.stack.default, (list(parts), -1), {}, "reduced", nodes)

    def _op(self, func: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        return self.recorder.handle(func, args, kwargs or {})

    def _mapped(self, tree: Any, fn: Callable[[Tensor], Any]) -> Any:
        if isinstance(tree, Tensor):
            return fn(tree)
        return type(tree)(self._mapped(x, fn) for x in tree) if isinstance(tree, (tuple, list)) else tree

    def _alias(self, part: Tensor) -> Tensor:
        """Return a tensor of its own with this value: autograd makes one result of an op of it."""
        return self._op(aten.alias.default, (part,))

    def _parts(self, tensor: Tensor, func: Any = None) -> Parts:
        """Return the parts of an argument; of one that has the same for all of them, one.

        Raises:
            NotElementwiseError: it has a value of every neuron, which would be aligned with the inner dim.
        """
        parts = self.of(tensor)
        if parts is not None or not tensor.dim():
            return parts or (tensor,)
        node = self.recorder.node_of(tensor)
        if "uniform" in node.meta:
            val = self.recorder.evaluate(aten.new_empty.default, (node.meta["val"], tensor.shape[:-1] or (1,)), {})
            made = self.recorder.uniform(val, node.meta["uniform"], node.meta["kind"], node.meta.get("of", ()))
            return (self.recorder.track(val, made),) * tensor.shape[-1]
        if node.meta["kind"] != "static":
            raise self.refusal(func, _ALIGNS)
        if node not in self._split:  # parts have dims, as the tensor has: type promotion ranks one without lower
            rows = self._op(aten.unsqueeze.default, (tensor, 0)) if tensor.dim() == 1 else tensor
            self._split[node] = tuple(self._op(aten.unbind.int, (rows, -1)))
        return self._split[node]

    def _each(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the results of an elementwise op, part by part; of several results a tuple for each."""
        parts = {id(t): self._parts(t, func) for t in _flat((args, tuple(kwargs.values())))}
        count = max(map(len, parts.values()))

        def part(j: int) -> Callable[[Tensor], Tensor]:
            return lambda t: parts[id(t)][j if len(parts[id(t)]) > 1 else 0]

        done = [self._op(func, self._mapped(args, part(j)), {k: self._mapped(v, part(j)) for k, v in kwargs.items()}) for j in range(count)]
        return list(zip(*done, strict=True)) if isinstance(done[0], (tuple, list)) else done

    # --- over the inner dim -------------------------------------------------------------------------------------------------
    def _total(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Return the sum of the parts, added from the first to the last, 16-bit floats in float32."""
        wide = torch.float32 if dtype in HALF else dtype
        first, *others = [p if p.dtype == wide else self._op(aten._to_copy.default, (p,), {"dtype": wide}) for p in parts]
        for part in others:
            first = self._op(aten.add.Tensor, (first, part))
        return first

    def reduce(self, val: Tensor, x: Tensor, dims: Sequence[int] | None, keepdim: bool, mean: bool) -> Any:
        parts, last = self._parts(x), x.dim() - 1
        found = {d % x.dim() for d in dims} if dims else {*range(x.dim())}
        outer = sorted(found - {last})
        if last in found:
            total = self._total(parts, val.dtype)
            total = self._op(aten.div.Scalar, (total, len(parts))) if mean else total
            parts = (total if total.dtype == val.dtype else self._op(aten._to_copy.default, (total,), {"dtype": val.dtype}),)
        if outer:  # of a param's gradient; in a core it mixes neurons
            op = aten.mean.dim if mean else aten.sum.dim_IntList
            parts = tuple([self._op(op, (p, outer, keepdim)) for p in parts])
        summed = any(self.recorder.node_of(p).meta["kind"] == "reduced" for p in parts)
        if last in found and not keepdim:
            return parts[0] if summed else self._alias(parts[0])
        return self._joined(parts) if summed else parts

    def unsqueeze(self, val: Tensor, x: Tensor, dim: int) -> Any:
        return (x,) if dim % val.dim() == x.dim() and self.of(x) is None else None

    def squeeze(self, val: Tensor, x: Tensor, *dims: Any) -> Any:
        parts = self._parts(x)
        return parts if val.shape == x.shape else self._alias(parts[0]) if val.shape == x.shape[:-1] and len(parts) == 1 else None

    def view(self, val: Tensor, x: Tensor, *sizes: Any) -> Any:
        parts = self.of(x)
        if parts is None:
            return (x,) if val.shape == (*x.shape, 1) else None
        return self.squeeze(val, x)

    def expand(self, val: Tensor, x: Tensor, *sizes: Any) -> Any:
        parts = self._parts(x)
        if val.dim() != x.dim():
            return None
        parts = tuple([self._op(aten.expand.default, (p, val.shape[:-1])) for p in parts])
        return parts if len(parts) == val.shape[-1] else parts * val.shape[-1]

    def stack(self, val: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Any:
        inner = any(self.of(t) is not None for t in tensors)
        return None if inner or dim % val.dim() != val.dim() - 1 else tuple(tensors)

    def cat(self, val: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> Any:
        return [p for t in tensors for p in self._parts(t)] if dim % val.dim() == val.dim() - 1 else None

    def select(self, val: Tensor, x: Tensor, dim: int, index: int) -> Any:
        return self._alias(self._parts(x)[index]) if _is_last(x, dim) else None

    def slice(self, val: Tensor, x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        return self._parts(x)[start:end:step] if _is_last(x, dim) else self._parts(x) if val.shape == x.shape else None

    def unbind(self, val: Any, x: Tensor, dim: int = 0) -> Any:
        return [self._alias(p) for p in self._parts(x)] if _is_last(x, dim) else None

    def split(self, val: Any, x: Tensor, sizes: Any, dim: int = 0) -> Any:
        if not _is_last(x, dim):
            return None
        ends = [sum(v.shape[-1] for v in val[: k + 1]) for k in range(len(val))]
        return [self._parts(x)[end - v.shape[-1] : end] for v, end in zip(val, ends, strict=True)]

    def flip(self, val: Tensor, x: Tensor, dims: Sequence[int]) -> Any:
        return self._parts(x)[::-1] if [d % x.dim() for d in dims] == [x.dim() - 1] else None

    def roll(self, val: Tensor, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
        parts = self._parts(x)
        by = -shifts[0] % len(parts) if len(shifts) == len(dims) == 1 else 0
        return parts[by:] + parts[:by] if len(dims) == 1 and _is_last(x, dims[0]) else None

    def placed(self, val: Tensor, grad: Tensor, dim: int, at: Any) -> Any:
        """Return the gradient of a part, or of a slice, beside zeros."""
        if dim % val.dim() != val.dim() - 1:
            return None
        own = self.of(grad) or (grad,)
        zero = self._op(aten.zeros_like.default, (own[0],))
        places = range(val.shape[-1])[at]
        found = dict(zip([places] if isinstance(places, int) else places, own, strict=True))
        return [found.get(j, zero) for j in range(val.shape[-1])]


_RULES: dict[str, Callable[..., Any]] = {
    "aten::sum": lambda self, val, x, dims=None, keepdim=False, **_: self.reduce(val, x, dims, keepdim, False),
    "aten::mean": lambda self, val, x, dims=None, keepdim=False, **_: self.reduce(val, x, dims, keepdim, True),
    "aten::unsqueeze": Inner.unsqueeze, "aten::squeeze": Inner.squeeze, "aten::view": Inner.view, "aten::_unsafe_view": Inner.view,
    "aten::expand": Inner.expand, "aten::stack": Inner.stack, "aten::cat": Inner.cat, "aten::select": Inner.select,
    "aten::slice": Inner.slice, "aten::unbind": Inner.unbind, "aten::split": Inner.split, "aten::split_with_sizes": Inner.split,
    "aten::flip": Inner.flip, "aten::roll": Inner.roll,
    "aten::select_backward": lambda self, val, grad, sizes, dim, index: self.placed(val, grad, dim, index),
    "aten::slice_backward": lambda self, val, grad, sizes, dim, start, end, step: self.placed(val, grad, dim, slice(start, end, step)),
}  # fmt: skip


def _is_last(x: Tensor, dim: int) -> bool:
    return dim % x.dim() == x.dim() - 1


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for x in tree for t in _flat(x)] if isinstance(tree, (tuple, list)) else []


def _elementwise(func: Any) -> bool:
    """Whether an op gives every value from those at its place: by its tag, or, of gradients of such ops, which lack it, by their taking
    no dim."""
    name = func._schema.name
    if func is aten.index_put.default:
        return False
    derived = name.endswith("_backward") and not any("int" in str(a.type) for a in func._schema.arguments)
    return func in RULES or name in _VALUE_BY_VALUE or torch.Tag.pointwise in func.tags or (derived and name not in _RULES)
