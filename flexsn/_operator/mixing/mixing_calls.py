"""A core's calls of PyTorch that mix neurons, and the parts of the core between them.

A call that mixes neurons (`s @ w`, `linear(h)`, `conv(y)`, `gates.chunk(4, -1)`) is known by its number: it is the n-th call of PyTorch
that the core makes. A segment is the core with the results of such calls given, and what they are called with returned: what is
elementwise goes the way of any core.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv1d_input, conv2d_input, conv3d_input
from torch.overrides import TorchFunctionMode

from ..._capture.decompositions import CELLS
from ..._capture.signature import Signature
from ..._capture.trace import Meta
from ..._torch.autograd import pulled_back, saved_tensors_hooks_there
from ...errors import NotElementwiseError
from .cpp_products import outer
from .cpp_walk import by_spikes
from .precision import in_its_dtype, tensors_in, with_tensors

# What a step takes and computes: `("x", k, 0)` an input, `("v", k, 0)` a state before the step and `("n", k, 0)` after it, `("y", k, 0)` an
# output, `("m", j, i)` result i of mixing call j, `("a", j, i)` its operand i if that is computed.
Place = tuple[str, int, int]
NOTHING: Place = ("0", 0, 0)  # zeros, which tell the number of steps to a segment that takes no sequence


@dataclass(frozen=True)
class Mixing:
    """A call that mixes neurons.

    Attributes:
        number: of the call, among all that the core makes.
        name: of the function.
        moving: which of the tensors among its arguments depend on time.
        operands: where these come from.
        results: what it returns for one step.
        returned: what makes of the results what it returns.
        line: the user's source line.
    """

    number: int
    name: str
    moving: tuple[int, ...]
    operands: tuple[Place, ...]
    results: tuple[Meta, ...]
    returned: Callable[[Sequence[Tensor]], Any]
    line: str


@dataclass(frozen=True)
class Segment:
    """An elementwise part of a core; called with the core, it gives the core of that part.

    Attributes:
        sig: of the whole core.
        metas: of its inputs and states.
        mixing: all its mixing calls.
        takes: the inputs of the part. What is not among them and the states are zeros, on which nothing that it gives depends.
        states: which states it advances.
        gives: its outputs.
    """

    sig: Signature
    metas: tuple[Meta, ...]
    mixing: tuple[Mixing, ...]
    takes: tuple[Place, ...]
    states: tuple[int, ...]
    gives: tuple[Place, ...]

    @property
    def signature(self) -> Signature:
        names = (*[self.name_of(p) for p in self.takes], *[self.sig.state_names[k] for k in self.states], *self.sig.param_names)
        return Signature(self.sig.core, len(self.takes), len(self.states), self.sig.num_params, names)

    def name_of(self, place: Place) -> str:
        kind, k, i = place
        if kind == "x":
            return self.sig.names[k]
        if kind == "v":
            return f"{self.sig.state_names[k]}_before"
        if place == NOTHING:
            return "nothing"
        return f"mixed_{k}_{i}" if len(self.mixing[k].results) > 1 else f"mixed_{k}"

    def meta_of(self, place: Place) -> Meta:
        """Return the meta of something that it takes."""
        kind, k, i = place
        if place == NOTHING:
            return Meta((), self.metas[0].dtype)
        return self.mixing[k].results[i] if kind == "m" else self.metas[k + (self.sig.num_inputs if kind == "v" else 0)]

    def __call__(self, core: Callable) -> Callable[..., Any]:
        sig, number_of = self.sig, {m.number: j for j, m in enumerate(self.mixing)}
        own = (*self.takes, *[("v", k, 0) for k in self.states])

        def segment(*operands: Tensor) -> tuple[Tensor, ...]:
            given, found, device = dict(zip(own, operands, strict=False)), dict[Place, Tensor](), operands[0].device
            enabled = torch.is_grad_enabled()  # before the core, which may disable gradients for a call

            def of(place: Place) -> Tensor:
                meta = self.meta_of(place)
                return given[place] if place in given else torch.zeros(meta.shape, dtype=meta.dtype, device=device)

            def answer(number: int, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
                if (j := number_of.get(number)) is None:
                    return in_its_dtype(func, args, kwargs, None)
                tensors, call = list(tensors_in((args, kwargs))), self.mixing[j]
                found.update({("a", j, i): tensors[k] for i, k in enumerate(call.moving)})
                results = [of(("m", j, i)) for i in range(len(call.results))]
                results = [y * 1.0 if y.is_floating_point() else y for y in results]  # a value that the core may write to
                return call.returned([y.detach() for y in results] if enabled and not torch.is_grad_enabled() else results)

            operands_of = [of(("x", k, 0)) for k in range(sig.num_inputs)] + [of(("v", k, 0)) for k in range(sig.num_states)]
            with Answering(answer):
                returned = core(*operands_of, *operands[len(own) :])
            values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            outs = len(values) - sig.num_states
            found |= {("y", k, 0): y for k, y in enumerate(values[:outs])} | {("n", k, 0): v for k, v in enumerate(values[outs:])}
            return *[found[p] for p in self.gives], *[found["n", k, 0] for k in self.states]

        return segment


class Answering(TorchFunctionMode):
    """While inside, calls of PyTorch's functions are counted, and `answer(number, func, args, kwargs)` makes their results.

    A cell, as of `nn.LSTMCell`, is the calls that it is made of. Hooks of saved tensors, as of checkpoints, see nothing of what is inside.
    """

    def __init__(self, answer: Callable[..., Any]):
        super().__init__()
        self.answer, self.count, self.hooks = answer, -1, list[contextlib.AbstractContextManager]()  # a cell enters once more

    def __enter__(self) -> Answering:
        there, kept = saved_tensors_hooks_there(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        self.hooks.append(kept if there else contextlib.nullcontext())
        self.hooks[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hooks.pop().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in CELLS:
            with self:
                return CELLS[func](*args, **(kwargs or {}))
        self.count += 1
        return self.answer(self.count, func, args, kwargs or {})


class MixingFunction:
    """A mixing call as a function of the operands that depend on time.

    Attributes:
        fixed: the other tensors among its arguments, of which autograd knows how the core made them.
    """

    def __init__(self, func: Callable, moving: Sequence[int], args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None = None):
        self.func, self.moving, self.autocast, self._given = func, moving, autocast, (args, kwargs)  # other tensors may be meant
        self.fixed = [t for k, t in enumerate(tensors_in((args, kwargs))) if k not in moving]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return its results for one step; `tensors`: its operands, then the fixed ones."""
        args, kwargs = self._arguments(tensors)
        return tuple(tensors_in(in_its_dtype(self.func, args, kwargs, self.autocast)))

    def _arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return what it calls its function with; `tensors`: its operands, then the fixed ones."""
        operands, fixed = iter(tensors[: len(self.moving)]), iter(tensors[len(self.moving) :])
        return with_tensors(self._given, iter([next(operands if k in self.moving else fixed) for k in range(len(tensors))]))

    @property
    def arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """What it calls its function with, but for its operands, in whose place nothing of use stands."""
        return self._arguments([*[torch.empty(0)] * len(self.moving), *self.fixed])

    def over(self, fixed: Sequence[Tensor]) -> MixingFunction:
        """Return the same function of other fixed tensors."""
        other = MixingFunction.__new__(MixingFunction)
        other.__dict__ |= self.__dict__
        other.fixed = [*fixed]
        return other

    def of_none(self) -> MixingFunction:
        """Return the same function, which holds no tensors."""
        args, kwargs = with_tensors(self._given, (torch.empty(0, dtype=t.dtype) for t in tensors_in(self._given)))
        return MixingFunction(self.func, self.moving, args, kwargs, self.autocast)

    def over_time(self, operands: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return its results for all steps, `[T, ...]`."""
        if self.weights is not None:
            w = fixed[0].T if self.func is torch.nn.functional.linear else fixed[0]
            if self.autocast is None and (found := by_spikes(operands[0], w, *fixed[1:])) is not None:
                return (found,)
            if self.func not in (torch.mm, Tensor.mm):  # products take any dims before the last: 80 us less
                return self(*operands, *fixed)
        return torch.vmap(self, in_dims=(*[0] * len(operands), *[None] * len(fixed)))(*operands, *fixed)

    @property
    def weights(self) -> Tensor | None:
        """`w` where it computes `operand @ w`, up to a bias that comes after `w` in `fixed`; None where it does something else."""
        if tuple(self.moving) != (0,) or not self.fixed or self.fixed[0].dim() != 2 or len(self.fixed) > 2:
            return None
        if self.func is torch.nn.functional.linear:
            return self.fixed[0].T
        return self.fixed[0] if self.func in _BY_WEIGHTS else None

    def with_graph(self, operands: Sequence[Tensor], needs: Sequence[bool]) -> Graph:
        """Return its results for one step, of leaves of autograd in place of its operands, and of those of `fixed` that are needed."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in operands]
            leaves += [t.detach().requires_grad_(need) for t, need in zip(self.fixed, needs, strict=True)]
            return leaves, self(*leaves)

    def pulled(
        self, operands: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool], graph: Graph | None = None
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """Return the gradients of its operands at one step, then those of `fixed` that are needed; of products without the latter.

        Args:
            needs: of which of `fixed`.
            graph: of `with_graph`, where the forward kept it.
        """
        if (weights := self.weights) is not None:
            return [(grads[0].to(self._dtype) @ weights.T.to(self._dtype)).to(grads[0].dtype)]
        leaves, results = graph or self.with_graph(operands, needs)
        used, asked = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad], [t for t in leaves if t.requires_grad]
        found = iter(pulled_back([y for y, _ in used], [g for _, g in used], asked) if used else ())
        return [next(found, None) if t.requires_grad else None for t in leaves]

    def of_weights(self, first: Tensor, later: Tensor, grads: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of `fixed`, of all steps of a product.

        Args:
            first, later: the operand at the first step, and at every step but that, `[T - 1, ...]`.
            grads: of its results, `[T, ...]`.
            needs: of which of `fixed`.
        """
        by, found = grads.reshape(-1, grads.shape[-1]), None
        if needs[0]:
            found = self._of_weights(first.reshape(-1, first.shape[-1]), later.reshape(-1, first.shape[-1]), by)
            found = found.T if self.func is torch.nn.functional.linear else found
        return [found, *[by.sum(0) if need else None for need in needs[1:]]]

    @functools.cached_property
    def convolution(self) -> dict[str, Any] | None:
        """The options of a convolution of its operand by `fixed`; None where it computes something else, or in another dtype."""
        (args, kwargs), dtypes = self._given, {t.dtype for t in tensors_in(self._given)}
        if tuple(self.moving) != (0,) or self.func not in _CONVOLUTIONS or len(args) < 2 or self.autocast is not None:
            return None
        options = dict(zip(_OPTIONS, args[3:], strict=False)) | {k: v for k, v in kwargs.items() if k != "bias"}
        real = len(dtypes) == 1 and dtypes.pop().is_floating_point
        return options if real and not isinstance(options.get("padding"), str) else None

    def of_operand(self, operand: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of its operand at one step of a convolution."""
        shape, batched = operand.shape, operand.dim() == self.fixed[0].dim()
        whole, given = (shape, grad) if batched else (torch.Size((1, *shape)), grad.unsqueeze(0))
        return _CONVOLUTIONS[self.func](whole, self.fixed[0].detach(), given, **self.convolution or {}).reshape(shape)

    def _of_weights(self, first: Tensor, later: Tensor, grads: Tensor) -> Tensor:
        """Return the gradient of `w` in `a @ w`, rows of `a` given in two parts."""
        if (found := outer(first, later, grads)) is not None:
            return found
        first, later, grads = [t.to(self._dtype) for t in (first, later, grads)]
        return torch.addmm(first.T @ grads[: len(first)], later.T, grads[len(first) :])

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which a product runs."""
        own = self.fixed[0].dtype
        return self.autocast if self.autocast is not None and own is torch.float32 else own


Graph = tuple[list[Tensor], tuple[Tensor, ...]]  # leaves, and results
_CONVOLUTIONS = {torch.conv1d: conv1d_input, torch.conv2d: conv2d_input, torch.conv3d: conv3d_input}
_OPTIONS = "stride", "padding", "dilation", "groups"
_BY_WEIGHTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


def mixing_functions(
    known: dict[Any, Any], tensors: Mapping[Any, Tensor], autocast: torch.dtype | None, found: Callable[[], list[MixingFunction]]
) -> list[MixingFunction]:  # fmt: skip
    """Return the calls of a core that mix neurons, without running it where that tells nothing new.

    Args:
        known: what calls of this kind keep. Where all fixed tensors are tensors that the core takes or captures, it then holds which.
        tensors: these, by name.
        found: finds the calls by running a step of the core.
    """
    key = "functions", autocast
    if (kept := known.get(key)) is not None:
        return [function.over([tensors[name] for name in names]) for function, names in kept]
    functions, names = found(), {id(t): name for name, t in tensors.items()}
    shared = Counter(map(id, tensors.values()))
    names = {own: name for own, name in names.items() if shared[own] == 1}  # of one under two names, which is meant is open
    if all(id(t) in names for f in functions for t in f.fixed):
        known[key] = [(f.of_none(), [names[id(t)] for t in f.fixed]) for f in functions]
    return functions


def functions_of_step(
    mixing: Sequence[Mixing], calls: int, core: Callable, name: str, operands: Sequence[Tensor], autocast: torch.dtype | None
) -> list[MixingFunction]:  # fmt: skip
    """Run one step of a core; return its calls that mix neurons.

    Args:
        calls: how many calls of PyTorch it made at its capture.
        operands: of one step, and params.
        autocast: the dtype of autocast at the call of the core; None where it is off.

    Raises:
        NotElementwiseError: it makes other calls now, as what is no capture tells it to.
    """
    by_number, found = {m.number: m for m in mixing}, list[MixingFunction]()
    other = NotElementwiseError("mixes neurons, and makes other calls of PyTorch than at its capture", core=name)

    def answer(number: int, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if (call := by_number.get(number)) is None:
            return in_its_dtype(func, args, kwargs, None)
        if call.name != name_of(func):
            raise other
        found.append(MixingFunction(func, call.moving, args, kwargs, autocast))
        return call.returned([operands[0].new_zeros(meta.shape, dtype=meta.dtype) for meta in call.results])

    with Answering(answer) as answering:
        core(*operands)
    if answering.count + 1 != calls:
        raise other
    return found


def name_of(func: Any) -> str:
    """Return the name of a function of PyTorch, or of an attribute (`T`)."""
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


# --- calls that pick or join values along the last dim, and compute nothing -------------------------------------------------------
_MOVES = {
    torch.cat, torch.concat, torch.concatenate, torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.narrow, Tensor.narrow,
    torch.roll, Tensor.roll, torch.tensor_split, Tensor.tensor_split, Tensor.__getitem__,
}  # fmt: skip


class Run(NamedTuple):
    """Values `start` to `start + width` of an operand's rows, which lie from `at` in those of a result."""

    operand: int
    start: int
    at: int
    width: int


def moves(f: MixingFunction, lead: Sequence[int], widths: Sequence[int]) -> list[list[Run]] | None:
    """Return the runs of values of which the results of a call are made; None of a call that does anything else.

    Args:
        lead: dims of operands and results before the last one.
        widths: of the operands.
    """
    if f.func not in _MOVES or f.fixed:
        return None
    ends, total, found = list(itertools.accumulate(widths)), sum(widths), list[list[Run]]()
    rows = torch.arange(math.prod(lead)).view(*lead, 1) * total  # values tell in which row they were
    numbered = [rows + torch.arange(end - width, end) for end, width in zip(ends, widths, strict=True)]
    for result in f(*numbered):
        if result.shape[:-1] != (*lead,) or not (result - rows == result[(0,) * len(lead)]).all():
            return None
        numbers = result[(0,) * len(lead)]
        breaks = [0, *(numbers.diff() != 1).nonzero().add(1).flatten().tolist(), len(numbers)]
        runs = list[Run]()
        for begin, end in itertools.pairwise(breaks):
            runs += _of_operands(int(numbers[begin]), begin, end - begin, widths)
        found.append(runs)
    return found


def _of_operands(number: int, at: int, width: int, widths: Sequence[int]) -> list[Run]:
    """Return the runs that a row of numbers in a row is made of, the operands numbered one after the other."""
    found, begin = list[Run](), 0
    for operand, own in enumerate(widths):
        start, end = max(number, begin), min(number + width, begin + own)
        if start < end:
            found.append(Run(operand, start - begin, at + start - number, end - start))
        begin += own
    return found
