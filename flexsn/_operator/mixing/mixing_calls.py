"""Which of a core's calls of PyTorch mix neurons, and the core with their results given.

A call that mixes neurons (`s @ w`, `linear(y)`, `conv(y)`) is known by its number: it is the n-th call of PyTorch that the core makes. Its
result becomes an input of the step, and what is left of the core is elementwise: it goes the way of any core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..._capture.inner import MIXES
from ..._capture.signature import Signature
from ..._capture.trace import Meta, recording, trace
from ...errors import FlexSNError, NotElementwiseError
from .cpp_products import outer

_MOST = 16  # calls that mix neurons


@dataclass(frozen=True)
class Mixing:
    """A call that mixes neurons.

    Attributes:
        number: of the call, among all that the core makes.
        operand: which of inputs and states it takes.
        place: which of the tensors among its arguments that is.
        result: what it returns for one step.
        line: the user's source line.
    """

    number: int
    operand: int
    place: int
    result: Meta
    line: str


@dataclass(frozen=True)
class Rest:
    """What is left of a core without its calls that mix neurons; called with the core, it gives the core of that.

    Attributes:
        sig: of the whole core.
        metas: of its inputs and states.
        mixing: these calls, in order.
        inputs: which inputs the rest takes; before the results of the calls, and the states.
    """

    sig: Signature
    metas: tuple[Meta, ...]
    mixing: tuple[Mixing, ...]
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        told = []
        for j, call in enumerate(self.mixing):
            when = "at every step" if j in self.carried else "once, on the whole sequence"
            told.append(f"`mixed_{j}`, of `{self.sig.names[call.operand]}`, {when} ({call.line})")
        return "; ".join(told)

    @property
    def signature(self) -> Signature:
        """The signature of the rest."""
        sig = self.sig
        names = (*[sig.names[k] for k in self.inputs], *[f"mixed_{j}" for j in range(len(self.mixing))], *sig.state_names, *sig.param_names)
        return Signature(sig.core, len(self.inputs) + len(self.mixing), sig.num_states, sig.num_params, names)

    @property
    def carried(self) -> list[int]:
        """Which of the calls take a state."""
        return [j for j, m in enumerate(self.mixing) if m.operand >= self.sig.num_inputs]

    def state_of(self, j: int) -> int:
        """Which state call `j` takes."""
        return self.mixing[j].operand - self.sig.num_inputs

    def __call__(self, core: Callable) -> Callable[..., Any]:
        sig, count = self.sig, len(self.inputs)

        def rest(*operands: Tensor) -> Any:
            inputs, mixed = dict(zip(self.inputs, operands, strict=False)), operands[count : count + len(self.mixing)]
            results = dict(zip([m.number for m in self.mixing], mixed, strict=True))
            dropped = [torch.zeros(m.shape, dtype=m.dtype, device=operands[0].device) for m in self.metas[: sig.num_inputs]]
            with Answering(lambda number, func, args, kwargs: results[number] if number in results else func(*args, **kwargs)):
                return core(*[inputs.get(k, x) for k, x in enumerate(dropped)], *operands[count + len(self.mixing) :])

        return rest


class Answering(TorchFunctionMode):
    """While inside, calls of PyTorch's functions are counted, and `answer(number, func, args, kwargs)` makes their results."""

    def __init__(self, answer: Callable[..., Any]):
        super().__init__()
        self.answer, self.count = answer, -1

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return self.answer(self.count, func, args, kwargs or {})


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value)


def take_apart(
    core: Callable, sig: Signature, metas: Sequence[Meta], device: torch.device, captured: dict[str, Tensor], num_outputs: int | None
) -> Rest:
    """Return what is left of a core without its calls that mix neurons.

    Args:
        core: on stand-ins of what it captures.
        metas: of inputs, states and params.
        captured: these stand-ins.

    Raises:
        NotElementwiseError: such a call takes anything but one input or state as it is, or none takes a state.
        FlexSNError: what else no kernel can do of the core.
    """
    ins, mixing, results = sig.num_inputs + sig.num_states, list[Mixing](), set[fx.Node]()

    def looking(*operands: Tensor) -> Any:
        recorder = recording()
        place_of = {recorder.node_of(t): k for k, t in enumerate(operands[:ins])}

        def answer(number: int, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            before = recorder.error
            result = func(*args, **kwargs)
            why, recorder.error = recorder.error, before
            if why is before:
                return result
            nodes = [recorder.node_of(t) for t in tensors_in((args, kwargs))]
            moving = [k for k, n in enumerate(nodes) if n.meta["kind"] == "step"]
            direct = len(moving) == 1 and nodes[moving[0]] in place_of and isinstance(result, Tensor)
            if not direct or not isinstance(why, NotElementwiseError) or MIXES not in why.reason or len(mixing) == _MOST:
                recorder.error = before or why
                return result
            results.add(recorder.node_of(result))
            mixing.append(Mixing(number, place_of[nodes[moving[0]]], moving[0], Meta(tuple(result.shape), result.dtype), why.line or ""))
            return result

        with Answering(answer):
            return core(*operands)

    recorded = trace(looking, sig, metas, device, captured, vjp=False, num_outputs=num_outputs)
    if not any(m.operand >= sig.num_inputs for m in mixing):
        raise NotElementwiseError("mixes no states", core=sig.core)
    reached, todo = set[fx.Node](), list(recorded.returns)
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += [] if node in results else node.all_input_nodes
    inputs = tuple([k for k in range(sig.num_inputs) if recorded.operands[k] in reached])
    return Rest(sig, tuple(metas[:ins]), tuple(mixing), inputs)


class MixingFunction:
    """A mixing call as a function of the operand that depends on time.

    Attributes:
        fixed: the other tensors among its arguments, of which autograd knows how the core made them.
    """

    def __init__(self, func: Callable, place: int, args: Any, kwargs: dict[str, Any]):
        self.func, self.place, self.args, self.kwargs = func, place, args, kwargs
        self.fixed = list(tensors_in((args, kwargs)))
        del self.fixed[place]

    def __call__(self, operand: Tensor, *fixed: Tensor) -> Tensor:
        """Return its result for one step."""
        given = iter([*fixed[: self.place], operand, *fixed[self.place :]])

        def put(tree: Any) -> Any:
            if isinstance(tree, Tensor):
                return next(given)
            if isinstance(tree, dict):
                return {key: put(value) for key, value in tree.items()}
            return type(tree)(map(put, tree)) if isinstance(tree, (tuple, list)) else tree

        return self.func(*put(self.args), **put(self.kwargs))

    def over_time(self, operands: Tensor, fixed: Sequence[Tensor]) -> Tensor:
        """Return its results for all steps, `[T, ...]`."""
        return torch.vmap(self, in_dims=(0, *[None] * len(fixed)))(operands, *fixed)

    @property
    def weights(self) -> Tensor | None:
        """`w` where it computes `operand @ w`, up to a bias that comes after `w` in `fixed`; None where it does something else."""
        if self.place or not self.fixed or self.fixed[0].dim() != 2 or len(self.fixed) > 2:
            return None
        if self.func is torch.nn.functional.linear:
            return self.fixed[0].T
        return self.fixed[0] if self.func in _PRODUCTS else None

    def pulled(self, operand: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of its operand at one step."""
        if (weights := self.weights) is not None:
            return grad @ weights.T
        with torch.enable_grad():
            operand = operand.detach().requires_grad_()
            result = self(operand, *[t.detach() for t in self.fixed])
            (found,) = torch.autograd.grad(result, operand, grad, allow_unused=True) if result.requires_grad else (None,)
        return torch.zeros_like(operand) if found is None else found

    def gradients(self, first: Tensor, later: Tensor, grads: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of `fixed`, of all steps.

        Args:
            first: the operand at the first step.
            later: the operand at every step but that, `[T - 1, ...]`.
            grads: of its results, `[T, ...]`.
            needs: of which of `fixed`.
        """
        if not any(needs):
            return [None] * len(needs)
        if self.weights is not None:
            by = grads.reshape(-1, grads.shape[-1])
            of_weights = _of_weights(first.reshape(-1, first.shape[-1]), later.reshape(-1, first.shape[-1]), by) if needs[0] else None
            if of_weights is not None and self.func is torch.nn.functional.linear:
                of_weights = of_weights.T
            return [of_weights, *[by.sum(0) if need else None for need in needs[1:]]]
        operands = torch.cat([first.unsqueeze(0), later])
        with torch.enable_grad():
            fixed = [t.detach().requires_grad_(need) for t, need in zip(self.fixed, needs, strict=True)]
            asked = [t for t, need in zip(fixed, needs, strict=True) if need]
            found = iter(torch.autograd.grad(self.over_time(operands, fixed), asked, grads, allow_unused=True))
        return [next(found) if need else None for need in needs]


def _of_weights(first: Tensor, later: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient of `w` in `a @ w`, rows of `a` given in two parts."""
    found = outer(first, later, grads)
    return torch.addmm(first.T @ grads[: len(first)], later.T, grads[len(first) :]) if found is None else found


_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


def mixing_functions(rest: Rest, core: Callable, operands: Sequence[Tensor]) -> list[MixingFunction]:
    """Run one step of a core; return its calls that mix neurons.

    Args:
        operands: of one step, and params.
    """
    by_number, found = {m.number: m for m in rest.mixing}, list[MixingFunction]()

    def answer(number: int, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if number not in by_number:
            return func(*args, **kwargs)
        found.append(MixingFunction(func, by_number[number].place, args, kwargs))
        return operands[0].new_zeros(by_number[number].result.shape, dtype=by_number[number].result.dtype)

    with Answering(answer):
        core(*operands)
    if len(found) != len(rest.mixing):
        raise FlexSNError("makes other calls of PyTorch than at its capture", core=rest.sig.core)
    return found
