"""A recurrent layer: a neuron that also takes what it gave at the step before, mixed by a module or a function."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.arguments import Stateful
from .._capture.signature import core_name, positional_names
from .._captured.core_owner import CoreOwner
from .._torch.compiling import outside_dynamo
from ..errors import ArgumentError, ShapeMismatchError
from ..module import FlexSN

Mixing = Callable[[Tensor], Tensor]


class _Step:
    """One step of a recurrent layer; it leads to what the neuron's core and the mixing capture."""

    def __init__(self, core: Callable[..., Any], mixing: Mixing, num_inputs: int, num_states: int):
        self.advance, self.mixing = core, mixing
        names = [*positional_names(core)[0][: num_inputs + num_states]]
        names.append(next(name for k in itertools.count() if (name := "y" + "_" * k) not in names))
        self.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])
        self.__name__ = f"recurrent_{core_name(core)}"

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        first, before = operands[0], operands[-1]
        try:
            mixed = self.mixing(before)
        except RuntimeError as error:
            if not hasattr(error, "__notes__"):
                error.add_note(f"The mixing was called with `y` of shape {list(before.shape)}, that of one step of the input.")
            raise
        if not isinstance(mixed, Tensor):
            raise ArgumentError(f"the mixing returned a {type(mixed).__name__}, not a tensor", core=self.__name__)
        try:
            total = first + mixed
        except RuntimeError as error:
            raise ShapeMismatchError(f"the mixing returned {list(mixed.shape)}, and a step of the input is {list(first.shape)}") from error
        returned = self.advance(total, *operands[1:-1])
        values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        return *values, values[0]


class MixingModule(CoreOwner):
    """A function as mixing: tensors in its cells, defaults and partial arguments are this module's own, under their names."""

    def forward(self, y: Tensor) -> Tensor:
        return self.captured_values().runnable(self.core)(y)

    def extra_repr(self) -> str:
        return core_name(self.core)


class Recurrent(FlexSN):
    """A recurrent layer, `y[t] = neuron(x[t] + mixing(y[t - 1]))`, where `y` is the neuron's first output, and zero before the first step.

    Called as a `FlexSN`: with a sequence `[T, *shape]` (of the neuron's first input; others go to it as they are), it returns one of each
    output. Carried `states` are the neuron's, then `y`. The neuron is not called: of it the layer takes the core with its arguments,
    where its states start, and how many there are.

    On a CPU a C++ loop runs layers whose mixing is made of products with weights (`nn.Linear`, `lambda y: y @ w`), norms over the last
    dim and elementwise ops, in float32 or float64; spikes that are mostly zero drive rows of the weights. Any other mixing, and any
    under autocast, takes turns with the neuron's kernel. On a GPU one Triton kernel runs layers of up to 512 neurons whose mixing is
    products with weights, and any other loop is recorded in CUDA graphs. Under `torch.compile` such a layer is one node of the graph;
    under export and `torch.func` it runs as any core that mixes neurons. Under autocast, and with weights of 16 bits, products run in
    16 bits, and what they give, spikes and states are computed in float32.

    Args:
        neuron: any neuron of flexsn, or a core, with `num_states`.
        mixing: any module or function of `y` at one step, of the shape of `x` at one step: `nn.Linear`, `nn.Conv2d`, a lambda.
        num_states: how many states a core has.
        step_mode, backend, store_state_seqs, strict, stateful: as of `FlexSN`; by default those of the neuron.

    Attributes:
        neuron, mixing: as given; a function as a module that calls it, whose own are the tensors in its cells, defaults and partial
            arguments, as those of a core are a `FlexSN`'s. Their parameters are this layer's: `neuron.tau`, `mixing.weight`, `mixing.w`.

    Raises:
        ArgumentError: the mixing is not callable, or returns no tensor; the neuron has `params`, or bounds, parametrized or pruned
            arguments, which the layer does not compute anew.
        ShapeMismatchError: the mixing returns a shape that does not broadcast with a step of the input.
    """

    def __init__(
        self, neuron: FlexSN | Callable[..., Any], mixing: Mixing, *, num_states: int | None = None, step_mode: str | None = None,
        backend: str | None = None, store_state_seqs: bool = False, strict: bool | None = None, stateful: Stateful | None = None,
    ):  # fmt: skip
        if not callable(mixing) or isinstance(mixing, type):
            what = f"{mixing.__name__} is a class" if isinstance(mixing, type) else f"it is {type(mixing).__name__}"
            raise ArgumentError(f"the mixing must be a module or a function: {what}", hint="Give a module or a function of `y`.")
        if not isinstance(neuron, FlexSN):
            neuron = FlexSN(neuron, num_states=num_states)
        elif num_states not in (None, neuron.num_states):
            raise ArgumentError(f"num_states={num_states}, but the neuron has {neuron.num_states}", hint="Leave it out.")
        if neuron.num_params:
            raise ArgumentError("the neuron has `params`", hint="Have its core take them from a closure.")
        super().__init__(
            _Step(neuron.core, mixing, neuron.num_inputs, neuron.num_states), neuron.num_inputs, neuron.num_states + 1, neuron.num_outputs,
            step_mode=step_mode or neuron.step_mode, backend=backend or neuron.backend, store_state_seqs=store_state_seqs,
            strict=neuron.strict if strict is None else strict, stateful=neuron.stateful if stateful is None else stateful,
        )  # fmt: skip
        self.neuron, self.mixing = neuron, mixing if isinstance(mixing, nn.Module) else MixingModule(mixing)
        self._followed = dict[tuple[str, ...], Any]()  # what the step is made of, by the attributes that lead to it
        self._numbered = 0  # of the `_changes` that it has
        self._follow()

    def _changes(self) -> int:
        """Return how often a number of the neuron was replaced."""
        neuron: Any = self.neuron
        return neuron.changes + (neuron._changes() if isinstance(neuron, Recurrent) else 0)

    def _follow(self) -> None:
        """Take the neuron's core and the mixing anew, if their tensors or the neuron's arguments are others now."""
        neuron, mixing = self.neuron, self.mixing
        if "parametrizations" in neuron._modules or neuron._forward_pre_hooks:
            raise ArgumentError(
                "a recurrent layer takes no neuron with bounds, parametrized or pruned arguments", core=core_name(neuron.core),
                hint="Learn the argument as it is.",
            )  # fmt: skip
        if isinstance(neuron, Recurrent):
            neuron._follow()
        owners: dict[str, CoreOwner] = {"neuron": neuron} | ({"mixing": mixing} if isinstance(mixing, MixingModule) else {})
        found: dict[tuple[str, ...], Any] = {("mixing",): mixing}
        for name, owner in owners.items():
            found[name, "core"] = owner.core
            found |= {(name, owner._own[path]): read() for path, read in owner.captured_values().own.items()}
        if found.keys() == self._followed.keys() and all(value is self._followed[place] for place, value in found.items()):
            return
        self._followed, self._numbered = found, self._changes()
        advance, *function = [owner.captured_values().runnable(owner.core) for owner in owners.values()]
        self.core = _Step(advance, function[0] if function else mixing, neuron.num_inputs, neuron.num_states)

    def captured_places(self) -> dict[int, tuple[str, ...]]:
        """Return, of every tensor in the cells of the step, by its `id`, the attributes that lead to what holds it now."""
        neuron: nn.Module = self.neuron
        inner = neuron.captured_places() if isinstance(neuron, Recurrent) else {}
        own = {id(value): place for place, value in self._followed.items() if isinstance(value, Tensor)}
        return own | {key: ("neuron", *place) for key, place in inner.items()}

    def __getstate__(self) -> dict[str, Any]:
        self._follow()  # the last call may have been under a transform, whose tensors cannot be copied
        return super().__getstate__()

    def __deepcopy__(self, memo: dict) -> FlexSN:
        made: Any = super().__deepcopy__(memo)
        made._follow()
        return made

    def start_states(self, *inputs: Tensor) -> list[Tensor | None]:
        if self.step_mode != self.neuron.step_mode:
            inputs = tuple([x.unsqueeze(0) if self.step_mode == "s" else x[0] for x in inputs])
        return [*self.neuron.start_states(*inputs), None]

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if not torch.compiler.is_dynamo_compiling():
            self._follow()
        elif self._numbered != self._changes() or self._followed["mixing",] is not self.mixing:
            _follow_outside(self)
        if inputs and isinstance(inputs[0], Tensor) and not (inputs[0].is_floating_point() or inputs[0].is_complex()):
            inputs = (inputs[0].to(self.start_dtype(*inputs)), *inputs[1:])  # spikes, of which the states at the start take the dtype
        return super().forward(*inputs, **named)

    def extra_repr(self) -> str:
        return f"step_mode={self.step_mode!r}, backend={self.backend!r}"


@outside_dynamo("a number of a recurrent layer's neuron, or its mixing, was replaced since the last call")
def _follow_outside(layer: Recurrent) -> None:
    """Follow, seen by the compiler as a break of its graph; the next call holds the layer whole again."""
    layer._follow()
