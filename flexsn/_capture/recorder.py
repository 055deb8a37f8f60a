"""The dispatch mode that writes down what a core does, op by op; `_capture/restrictions.py` has what it cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._ir.lowering import RULES
from .._torch.compiling import unseen_by_dynamo
from .._torch.fake_tensors import FakeTensor, TorchDispatchMode, depends_on_values, disable_modes, lacks_fake_kernel
from .._torch.tensors import broadcast_shapes, functional_overload, memory_of, unwatched
from ..errors import (
    CoreError,
    FlexSNError,
    InPlaceError,
    NotElementwiseError,
    ParamGradientError,
    UnsupportedOpError,
    UnsupportedValueError,
)
from .complex_numbers import PLAIN, Pairs
from .decompositions import LAID_OUT_IN_PLACE, LAYOUT, decomposition
from .graph_writer import getitem
from .inner import MIXES, MOST
from .linearity import LINEAR, MIXING, PRODUCTS, addends, is_linear, leaves, most_moving
from .restrictions import Refusing, op_name
from .signature import BOOL_HINT, COMPLEX, DTYPES, Signature, dtype_hint

aten = torch.ops.aten

# Uniform tensors: no operand data flows into them, so they are numbers in the kernel.
_UNIFORM: dict[str, Callable[[tuple, dict], Any]] = {
    "aten::zeros": lambda a, k: 0, "aten::zeros_like": lambda a, k: 0, "aten::new_zeros": lambda a, k: 0,
    "aten::ones": lambda a, k: 1, "aten::ones_like": lambda a, k: 1, "aten::new_ones": lambda a, k: 1,
    "aten::full": lambda a, k: a[1], "aten::full_like": lambda a, k: a[1], "aten::new_full": lambda a, k: a[2],
    "aten::scalar_tensor": lambda a, k: a[0], "aten::empty_like": lambda a, k: 0,
}  # fmt: skip

_FILLED: dict[str, Callable[[tuple, dict], Any]] = {"aten::zero": lambda a, k: 0, "aten::fill": lambda a, k: a[1]}

_FACTORIES = {name.removeprefix("aten::") for name in _UNIFORM} | {"tensor", "as_tensor"}

_NEEDS_NO_STATE = "A kernel handles each neuron by itself: do this outside the core, or on params only."
_NEEDS_A_STATE = (
    "A kernel handles each neuron by itself: do this outside the core, on its outputs. Plain calls run it in turns with kernels; "
    'else there are the eager loop (`backend="torch"`) and single steps (`step_mode="s"`).'
)


class Recorder(Refusing, TorchDispatchMode):
    def __init__(self, sig: Signature, fake: Any, device: torch.device, captured: dict[str, Tensor], vjp: bool):
        super().__init__(sig, fake, device, captured, vjp=vjp)
        self.in_backward = False
        self.trains_params = False
        self.cotangents: set[fx.Node | None] = set()
        self.flows: list[list[fx.Node]] = []
        self.pairs = Pairs(self)

    def poison(self, func: Any, nodes: Sequence[fx.Node]) -> None:
        """Remember that `func` mixes neurons; raised after the core ran, so that a later `if` can be named instead."""
        op = self.user_op or func
        if torch.Tag.pointwise in op.tags or "quantize" in op_name(op):  # quantising is elementwise too, and has no tag
            numbers = " of complex numbers" if any(n.meta["val"].is_complex() for n in nodes) else ""
            error: FlexSNError = UnsupportedOpError(
                f"`{op_name(op)}`{numbers} has no rule in the closed op set", core=self.sig.core, line=self.line()
            )
        else:
            hint = _NEEDS_A_STATE if self.states_behind(nodes) else _NEEDS_NO_STATE
            error = NotElementwiseError(
                f"`{op_name(op)}` {MIXES}", core=self.sig.core, line=self.line(),
                hint=hint + f" Of sums it takes one over the last dim, of at most {MOST} values." * (op_name(op) in ("sum", "mean")),
            )  # fmt: skip
        if self.in_backward:
            raise error
        self.error = self.error or error

    # --- the dispatcher calls here for every op -----------------------------------------------------------------------
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it PyTorch imports it

    @unseen_by_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with self.remembering(), unwatched():
            return self.handle(func, args, kwargs or {})

    def handle(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if name in _METADATA:
            self.note_shape(args)
            return func(*args, **kwargs)
        if name == "aten::_efficientzerotensor":  # ops on a tensor without memory go past this mode
            func, name = aten.zeros.default, "aten::zeros"
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse_random(func, args, kwargs)
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
            self.refuse_read("item" if name != "aten::is_nonzero" else name, args[0])
            with disable_modes():
                return self.tracked[id(args[0])][1].meta["uniform"]
        if name in ("aten::lift_fresh", "aten::lift_fresh_copy") and not isinstance(args[0], FakeTensor):
            node = self.constant(args[0])
            return self.track(node.meta["val"], node)
        if self.inner is not None and self.inner.takes(func, list(_tensors((args, kwargs)))):
            return self.inner.run(func, args, kwargs)
        if func._schema.is_mutable:
            return self.in_place(func, args, kwargs)
        nodes = [self.node_of(a) for a in _tensors((args, kwargs))]
        return self.record(func, args, kwargs, nodes)

    def record(self, func: Any, args: tuple, kwargs: dict, nodes: list[fx.Node]) -> Any:
        name = func._schema.name
        negates = name in ("aten::sub", "aten::rsub", "aten::neg") and self.user_op is None and not self.in_backward
        if negates and any(isinstance(a, Tensor) and a.dtype is torch.bool for a in args):
            raise CoreError(  # as PyTorch does, but for fake tensors
                f"`{op_name(func)}`: the `-` operator with a bool tensor is not supported", core=self.sig.core, line=self.line(),
                hint=BOOL_HINT,
            )  # fmt: skip
        kinds = {n.meta["kind"] for n in nodes}
        if value_of := _UNIFORM.get(name) or _FILLED.get(name):
            val = self.evaluate(func, args, kwargs)
            value = value_of(args, kwargs)
            if val.is_complex():
                return self.pairs.uniform(val, value, "step" if "step" in kinds else "static", self.cotangents_behind(nodes))
            if isinstance(value, (int, float, bool)):
                return self.track(val, self.uniform(val, value, "step" if "step" in kinds else "static", self.cotangents_behind(nodes)))
        terms = {"aten::where": nodes[1:3], "aten::add": nodes[:2]}.get(name, ())
        if len(terms) == 2 and all(n.meta.get("uniform") == 0 for n in terms):  # no gradient, masked or accumulated
            val = self.evaluate(func, args, kwargs)
            return self.track(val, self.uniform(val, 0, "step" if "step" in kinds else "static", self.cotangents_behind(nodes)))
        if self.in_backward and kinds == {"static"} and self.vanishes(name, args):
            val = self.add(func, args, kwargs, "static", nodes)
            for part in _tensors(val):
                self.node_of(part).meta["nil"] = True
            return val
        if "step" in kinds and "reduced" not in kinds and self.pairs.concern(func, args, kwargs, nodes):
            return self.pairs.record(func, args, kwargs, nodes)
        if name in ("aten::detach", "aten::alias") and self.calling in _FACTORIES:  # what these end with: nobody sees the first tensor
            self.tracked.pop(id(args[0]), None)
        if name in ("aten::detach", "aten::alias") and "uniform" in nodes[0].meta:
            val = self.evaluate(func, args, kwargs)
            return self.track(val, self.uniform(val, nodes[0].meta["uniform"], nodes[0].meta["kind"], nodes[0].meta.get("of", ())))
        if name in ("aten::detach", "aten::alias") and kinds == {"static"}:
            return self.track(self.evaluate(func, args, kwargs), nodes[0])
        if func is aten._conj.default and not nodes:  # of a number
            return self.pairs.uniform(self.evaluate(func, args, kwargs), args[0].conjugate())
        if not kinds or kinds == {"static"}:
            return self.add(PLAIN.get(func, func), args, kwargs, "static", nodes)
        if "reduced" in kinds or (self.in_backward and func in RULES and self.grows(nodes)):
            return self.reduced(func, args, kwargs, nodes)
        if (name in LAYOUT or name == "aten::sum") and len(nodes) == 1:
            val, whole = self.evaluate(func, args, kwargs), nodes[0].meta["val"]
            if val.shape == whole.shape and val.dtype == whole.dtype:  # a sum of one element too
                return self.track(val, nodes[0])
        if func in RULES and (func is not aten.index_put.default or elementwise_index_put(*args, **kwargs)):
            return self.add(func, args, kwargs, "step", nodes)
        if self.in_backward and name in LINEAR:
            return self.reduced(func, args, kwargs, nodes)
        self.refuse_mixed_dtypes(self.user_op or func, nodes)
        decomposed = NotImplemented if name in MIXING else self.decompose(func, args, kwargs)  # those mix, however they are written
        if decomposed is not NotImplemented:
            return decomposed
        self.poison(func, nodes)
        return self.add(func, args, kwargs, "step", nodes)

    def vanishes(self, name: str, args: Sequence[Any]) -> bool:
        """Whether an op gives zero (or NaN) since a factor of it does, or all of its terms do."""

        def nil(arg: Any) -> bool:
            return is_nil(self.node_of(arg)) if isinstance(arg, Tensor) else isinstance(arg, (int, float)) and arg == 0

        if name in PRODUCTS:
            return any(map(nil, args))
        terms = list(leaves(addends(name, tuple(args))))
        if most_moving(name) == 1 or "_backward" in name:
            return all(map(nil, (*args[:1], *terms)))
        return most_moving(name) > 1 and all(map(nil, terms))

    def grows(self, nodes: list[fx.Node]) -> bool:
        """Whether the cotangent of a smaller return broadcasts against what depends on params alone: of such a cotangent the kernel
        holds the sum over neurons, not one value for each."""
        moving = [n for n in nodes if n.meta["kind"] == "step"]
        own = broadcast_shapes(*[n.meta["val"].shape for n in moving])
        whole = broadcast_shapes(*[n.meta["val"].shape for n in nodes])
        return math.prod(own) < math.prod(whole) and any(n in self.cotangents for n in behind(moving))

    def cotangents_behind(self, nodes: list[fx.Node]) -> tuple[str, ...]:
        """Names of the cotangents that nodes are computed from: zeros made of them (`round` passes such on) vanish with them."""
        found: set[str] = set()
        for node in behind(nodes) if self.in_backward else ():
            found.update([node.name] if node in self.cotangents else node.meta.get("of", ()))
        return tuple(sorted(found))

    def states_behind(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether nodes are computed from a state, which no call knows before its step."""
        return any(self.operand_names.get(node) in self.sig.state_names for node in behind(nodes))

    def reduced(self, func: Any, args: tuple, kwargs: dict, nodes: list[fx.Node]) -> Any:
        """A sum over neurons in the backward of a param, or a linear function of one."""
        name = func._schema.name
        moving = [n for n in nodes if n.meta["kind"] != "static"]
        if not most_moving(name):
            decomposed = self.decompose(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        affine = any(not self.moves_or_vanishes(a) for a in addends(name, args))
        if affine or not is_linear(func, nodes, moving, self.evaluate(func, args, kwargs)):
            if not self.trains_params:
                raise self.mixing(self.user_op or func, self.line())
            raise ParamGradientError(
                f"the gradient of a param applies `{op_name(self.user_op or func)}` to the summed cotangent, and is not known to be linear",
                core=self.sig.core, line=self.line(),
                hint="Compute it outside the core, once per call, and pass the result: `params=(f(w),)`.",
            )  # fmt: skip
        return self.add(func, args, kwargs, "reduced", nodes)

    def moves_or_vanishes(self, addend: Any) -> bool:
        """Whether an addend is itself summed over time, or zero; any other constant would be added T times too few."""
        if not isinstance(addend, Tensor):
            return addend == 0
        node = self.node_of(addend)
        return node.meta["kind"] != "static" or is_nil(node)

    def decompose(self, func: Any, args: tuple, kwargs: dict, rule: Callable[..., Any] | None = None) -> Any:
        rule = rule or decomposition(func)
        if rule is None:
            return NotImplemented
        outer = self.user_op
        if outer is None:
            self.user_op, self.user_line = func, self.line()
        try:
            with self:
                return rule(*args, **kwargs)
        except InPlaceError:
            if outer is not None:
                raise
            message = f"`{op_name(func)}` has no rule in the closed op set"
            raise UnsupportedOpError(message, core=self.sig.core, line=self.user_line) from None
        finally:
            if outer is None:
                self.user_op, self.user_line = None, None

    def in_place(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`h.mul_(2)` on a tensor that the core made: the functional op, and the tensor now stands for its result."""
        target = args[0] if args else None
        if "out" in kwargs or not isinstance(target, Tensor) or not func._schema.arguments[0].is_write:
            raise InPlaceError(f"`{op_name(func)}` writes into an argument", core=self.sig.core, line=self.line())
        self.refuse_write(target, f"`{op_name(func)}` writes into", " in place")
        if self.in_backward and self.by_user() and not self.node_of(target).meta.get("users"):
            self.note_shape(target)  # what autograd passes elsewhere, too, but for the sums over neurons that it made itself
        aliased = (self.user_op is not None or not self.vjp) and self.aliased(target)  # autograd too keeps what it saved
        if target._is_view() or aliased:
            raise InPlaceError(
                f"`{op_name(func)}` writes into a tensor that has views", core=self.sig.core, line=self.line(),
                hint="Make a new one: by the form without the underscore, or, of parts, by `torch.where(mask, a, h)`.",
            )  # fmt: skip
        if view := LAID_OUT_IN_PLACE.get(func):
            with self:
                result = view(*args, **kwargs)
            self.tracked[id(target)] = (target, self.tracked.pop(id(result))[1])
            return func(*args, **kwargs)
        functional = functional_overload(func)
        if functional is None:
            hint = "Write the form that makes a new tensor: `n = n >> 1`, not `n >>= 1`."
            raise InPlaceError(f"`{op_name(func)}` has no functional form", core=self.sig.core, line=self.line(), hint=hint)
        known = set(self.tracked)
        with self:
            result = functional(*args, **kwargs)
            if not torch.can_cast(result.dtype, target.dtype):  # `n += 0.5` of an integer, which PyTorch refuses
                raise CoreError(
                    f"`{op_name(func)}`: result type {_dtype_name(result)} can't be cast to the desired output type {_dtype_name(target)}",
                    core=self.sig.core, line=self.line(),
                )  # fmt: skip
            if result.dtype != target.dtype:
                result = aten._to_copy.default(result, dtype=target.dtype)
            if result.shape != target.shape:
                raise InPlaceError(f"`{op_name(func)}` changes the shape of its target", core=self.sig.core, line=self.line())
        self.tracked[id(target)] = (target, self.tracked[id(result)][1])
        if id(result) not in known:
            del self.tracked[id(result)]  # nobody else holds it: it is no view of the target
        return target

    def aliased(self, target: Tensor) -> bool:
        """Whether another tensor shares the memory of `target`; below autograd views do not say what they are."""
        memory = memory_of(target)
        others = [t for t, _ in self.tracked.values() if t is not target and isinstance(t, FakeTensor)]
        return any(memory_of(t) == memory for t in others)

    def add(self, func: Any, args: tuple, kwargs: dict, kind: str, nodes: list[fx.Node]) -> Any:
        if not self.calling and self.user_op is None and self.line():
            self.note_shape(list(_tensors((args, kwargs))))  # TorchScript, which reads sizes unseen
        val = self.evaluate(func, args, kwargs)
        if isinstance(val, Tensor) and any(val is a for a in _tensors((args, kwargs))):
            return val
        node = self.graph.create_node("call_function", func, mapped(args, self.node_of), mapped(kwargs, self.node_of))
        node.meta.update(kind=kind, val=val, line=self.line(), backward=self.in_backward, users=self.by_user())
        if kind == "step" and isinstance(val, Tensor) and val.dtype not in (*DTYPES, *COMPLEX):
            self.error = self.error or UnsupportedValueError(
                f"`{op_name(self.user_op or func)}` gives a {val.dtype}", core=self.sig.core, line=self.line(), hint=dtype_hint(val.dtype)
            )
        if isinstance(val, (tuple, list)):
            for i, part in enumerate(val):
                if isinstance(part, Tensor):
                    item = self.graph.create_node("call_function", getitem, (node, i))
                    item.meta.update(kind=kind, val=part, line=node.meta["line"])
                    self.track(part, item)
            return val
        return self.track(val, node)

    def mixing(self, func: Any, line: str | None, why: str = "") -> NotElementwiseError:
        return NotElementwiseError(
            f"`{op_name(func)}` in the backward is not elementwise{why}", core=self.sig.core, line=line,
            hint="A kernel handles each neuron by itself, backward, too.",
        )  # fmt: skip

    def by_user(self) -> bool:
        """Whether the user's code computes now, and not PyTorch, which differentiates it."""
        return bool(self.calling or self.line())

    def evaluate(self, func: Any, args: tuple, kwargs: dict) -> Any:
        fakes = mapped((args, kwargs), lambda t: t if isinstance(t, FakeTensor) else self.node_of(t).meta["val"])
        try:
            val = func(*fakes[0], **fakes[1])
        except ValueError as error:  # of a fake view: params lie otherwise in the call
            raise UnsupportedOpError(f"`{op_name(self.user_op or func)}`: {error}", core=self.sig.core, line=self.line()) from None
        except RuntimeError as error:
            if depends_on_values(error):
                raise NotElementwiseError(
                    f"the shape of `{op_name(self.user_op or func)}` depends on values", core=self.sig.core, line=self.line(),
                    hint="Decide neuron by neuron: `torch.where(mask, a, b)`.",
                ) from None  # fmt: skip
            self.note_shape(list(_tensors((args, kwargs))))  # the core may catch it
            if lacks_fake_kernel(func, error):
                raise self.error or self.untraceable(func) from None
            # what eager would say too: shapes that do not broadcast, dtypes that do not mix
            raise CoreError(f"`{op_name(self.user_op or func)}`: {error}", core=self.sig.core, line=self.line()) from None
        if isinstance(val, Tensor) and val.device.type == "meta" != self.device.type:
            raise UnsupportedOpError(
                f"`{op_name(self.user_op or func)}` gives a tensor on the meta device, where it has no values", core=self.sig.core,
                line=self.line(),
            )  # fmt: skip
        return val


_METADATA = {"aten::sym_size", "aten::size", "aten::stride", "aten::sym_stride", "aten::is_contiguous", "aten::numel",
             "aten::sym_numel", "aten::dim", "aten::storage_offset", "aten::is_pinned"}  # fmt: skip


def behind(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Nodes, and all that they are computed from, once each."""
    seen: set[fx.Node] = set()
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += node.all_input_nodes


def elementwise_index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> bool:
    """Whether it is `h[mask] = number`, with a mask for every neuron: PyTorch aligns smaller ones with the first dims."""
    mask = indices[0]
    masks = len(indices) == 1 and mask is not None and mask.dtype == torch.bool and mask.shape == x.shape
    return masks and values.numel() == 1 and not accumulate


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_nil(node: fx.Node) -> bool:
    """Whether a static part of a gradient is zero, or NaN: what a gradient that is zero by construction leads to."""
    return node.meta.get("uniform") == 0 or "nil" in node.meta


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        yield from itertools.chain.from_iterable(map(_tensors, tree))
    elif isinstance(tree, dict):
        yield from itertools.chain.from_iterable(map(_tensors, tree.values()))


def mapped(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """A tree of tuples, lists and dicts with `fn` of every tensor in it."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(x, fn) for x in tree)
    if isinstance(tree, dict):
        return {k: mapped(v, fn) for k, v in tree.items()}
    return tree
