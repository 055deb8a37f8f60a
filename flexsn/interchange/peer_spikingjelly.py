"""SpikingJelly's neurons as flexsn's: their modes, states, resets and attributes. Their arithmetic is in `cores/spikingjelly.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from spikingjelly.activation_based import base, functional, layer, neuron
from torch import Tensor, nn

from .._capture.signature import positional_names
from ..errors import StateMismatchError
from ..module import FlexSN
from .cores.spikingjelly import CORES, GatedLIF, LinearRecurrent, OwnEquations, OwnStep, Recurrent
from .swap import LeaveAlone, NoNeuron, Swapped, check_fuses, check_plain, check_recurs

PARALLEL = (neuron.PSN, neuron.MaskedPSN, neuron.SlidingPSN)


class StoreVSeq:
    """The node's name for `store_state_seqs`; in Python, as Dynamo calls the setter of a property after the graph (2.11)."""

    def __get__(self, neuron: Any, kind: type | None = None) -> Any:
        return self if neuron is None else neuron.store_state_seqs

    def __set__(self, neuron: Any, value: bool) -> None:
        neuron.store_state_seqs, neuron.state_seqs = value, None


class SpikingJellyNeuron(Swapped):
    """As the node it stands for: `step_mode`, `reset()`, `detach()`, `store_v_seq` and `v_seq`, the states and constants by name."""

    def __init__(self, core: nn.Module, node: Any, step_mode: str, backend: str):
        memories, starts = self.memories(node)
        super().__init__(core, node, tuple(memories), step_mode, backend, num_inputs=2 if isinstance(core, GatedLIF) else 1)
        self.start = self.initial_states = tuple(starts)
        self.store_state_seqs = getattr(node, "store_v_seq", False)
        for name, value in memories.items():
            if isinstance(value, Tensor):
                self.set_state(name, value)

    @staticmethod
    def memories(node: Any) -> tuple[dict[str, Any], Sequence[float]]:
        """Return its states by name, and what each is after `reset()`."""
        return node._memories, tuple(node._memories_rv.values())

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if self.states is not None:
            self._check_inputs(inputs)
            self.states = self._settled(inputs[0])
        earlier = self.v_seq if self.step_mode == "s" else None
        outputs = super().forward(*inputs, **named)
        if earlier is not None and self.state_seqs:  # single steps of one shape add up until reset()
            k = self.state_names.index("v")
            if earlier.shape[1:] == self.state_seqs[k].shape[1:]:
                self.state_seqs[k] = torch.cat([earlier, self.state_seqs[k]])
        return outputs

    def _settled(self, x: Tensor) -> list[Tensor]:
        """The carried states as those of one step of `x`: numbers are filled in; one of another shape starts anew."""
        shape, found = x.shape[self.step_mode == "m" :], []
        for state, start in zip(self.states or (), self.start, strict=True):
            if isinstance(self.core, OwnEquations) and state.dim():  # these broadcast, and start at `reset()` alone
                found.append(state)
                continue
            value = state if state.shape == shape or not state.dim() else torch.as_tensor(start, dtype=torch.float64)
            found.append(value.to(x.device, x.dtype).expand(shape))
        return found

    @property
    def holder(self) -> Any:
        return self.core.node if isinstance(self.core, OwnStep) else self.core

    def state(self, name: str) -> Any:
        k = self.state_names.index(name)
        return self.start[k] if self.states is None else self.states[k]

    def set_state(self, name: str, value: Tensor | float) -> None:
        """A number, for the shape of the next call, is kept as a tensor without dims."""
        now: Sequence[Any] = self.start if self.states is None else self.states
        values = [value if n == name else v for n, v in zip(self.state_names, now, strict=True)]
        self.states = [v if isinstance(v, Tensor) else torch.tensor(float(v), dtype=torch.float64) for v in values]

    store_v_seq = StoreVSeq()

    @property
    def v_seq(self) -> Tensor | None:
        return self.state_seqs[self.state_names.index("v")] if self.state_seqs else None


class GatedNeuron(SpikingJellyNeuron):
    """`[T, B, C, H, W]` with the node's own `T`; the spike of the step before is not carried from call to call.

    As in the node, an input of fewer dims broadcasts with the gates, `[C, 1, 1]`, and with the carried membrane, which a
    change of shape does not reset.
    """

    def forward(self, *inputs: Tensor, **named: Any) -> Tensor | tuple[Tensor, ...]:
        self._check_inputs(inputs)
        conduct = self.core.conduct  # type: ignore[attr-defined]  # the core is a GatedLIF
        steps = conduct.view(conduct.shape[0], 1, -1, 1, 1).sigmoid()
        x = inputs[0][: conduct.shape[0]]
        carried = self.states[:1] if self.states is not None else []
        shape = torch.broadcast_shapes(x.shape[1:], steps.shape[1:], *(v.shape for v in carried))
        x = x.reshape(x.shape[0], *(1,) * (len(shape) - x.dim() + 1), *x.shape[1:]).expand(-1, *shape)
        if carried:
            v = carried[0].expand(shape)
            self.states = [v, torch.zeros_like(v)]
        outputs = super().forward(x, steps, **named)
        if self.states is not None:
            self.states = type(self.states)([self.states[0]] * 2)  # type: ignore[call-arg]  # the node's `u` is its `v`
        return outputs


class RecurrentNeuron(SpikingJellyNeuron):
    """As the recurrent container it stands for; its states are those of the node that it held, then `y`. `reset()` forgets all of them."""

    @staticmethod
    def memories(node: Any) -> tuple[dict[str, Any], Sequence[float]]:
        held = node_of(node)
        return {**held._memories, **node._memories}, (*held._memories_rv.values(), 0.0)

    def start_states(self, *inputs: Tensor) -> list[Tensor | None]:
        return [inputs[0].new_full(self.state_shape(inputs[0]), start, dtype=self.start_dtype(*inputs)) for start in self.start]

    def state_shape(self, x: Tensor) -> torch.Size:
        return self.core.state_shape(x.shape[self.step_mode == "m" :])  # type: ignore[attr-defined]  # the core is a Recurrent

    def _settled(self, x: Tensor) -> list[Tensor]:
        """The carried states; numbers are filled in, and those of another shape refused, as `y` is there."""
        shape = self.state_shape(x)
        if other := [v.shape for v in self.states or () if v.dim() and v.shape != shape]:
            raise StateMismatchError(
                f"a converted {self.old_name} carries states of shape {list(other[0])}, and the input needs {list(shape)}",
                hint="Call `functional.reset_net(net)` before a sequence of another shape.",
            )
        return [v if v.dim() else v.to(x.device, x.dtype).expand(shape) for v in self.states or ()]


class ConvertedFlexSN(FlexSN):
    """SpikingJelly's `FlexSN` as flexsn's: the same core and counts; `static_inputs` are its params."""

    def __init__(self, node: Any, step_mode: str, backend: str):
        super().__init__(
            node.core, node._num_inputs, node.num_states, node._num_outputs, params=node.static_inputs, step_mode=step_mode,
            backend=backend, store_state_seqs=node.store_state_seqs,
        )  # fmt: skip
        states = list(node.states)
        self.states = None if any(v is None for v in states) else states
        self.train(node.training)

    @property
    def static_inputs(self) -> tuple[Tensor, ...]:
        return tuple([getattr(self.params, name) for name in self.param_names])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """State dicts from before the conversion number the static inputs."""
        for k, name in enumerate(self.param_names):
            if (key := f"{prefix}_static_input_{k}") in state_dict:
                state_dict[f"{prefix}params.{name}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_neuron(module: nn.Module) -> bool:
    """Whether a module keeps states, or comes from SpikingJelly's package of neurons: some of those (PSN) keep none."""
    return isinstance(module, base.MemoryModule) or any(c.__module__.startswith(f"{neuron.__name__}.") for c in type(module).__mro__)


def replace(node: Any, backend: str, step_mode: str | None) -> FlexSN:
    """The flexsn neuron for a node.

    Raises:
        LeaveAlone: the kind is not known, or does not fuse.
    """
    if isinstance(node, neuron.GatedLIFNode) and step_mode == "s":
        raise LeaveAlone("takes sequences alone")
    if getattr(node, "_neuron_precision", None) is not None:
        raise LeaveAlone("has a precision of its own (`_neuron_precision`)")
    kind = type(node)
    if isinstance(node, _RECURRENT):
        return recurrent(node, backend, step_mode)
    made: FlexSN
    if issubclass(kind, neuron.FlexSN):
        if own := _own(kind, neuron.FlexSN):
            raise LeaveAlone(f"defines {', '.join(sorted(own))}; flexsn can take a subclass of FlexSN with a constructor alone")
        made = ConvertedFlexSN(node, step_mode or node.step_mode, backend)
        check_fuses(made)
        return made
    core = core_for(node)
    gated = isinstance(core, GatedLIF)
    made = (GatedNeuron if gated else SpikingJellyNeuron)(core, node, step_mode or node.step_mode, backend)
    check_fuses(made, (2, node.conduct[0].numel(), 2, 2) if gated else None)
    return made


def recurrent(container: Any, backend: str, step_mode: str | None) -> FlexSN:
    """The flexsn neuron for a recurrent container and the node that it holds.

    Raises:
        LeaveAlone: it holds something else, or the step of both does not fuse.
    """
    if type(container) not in _RECURRENT:
        raise LeaveAlone("a subclass of a container; what is in it is looked at by itself")
    for module in container.modules():
        check_plain(module)
    node, held = node_of(container), core_for(node_of(container))
    if isinstance(container.sub_module, nn.Sequential):
        held = nn.Sequential(*list(container.sub_module)[:-1], held)
    linear = isinstance(container, layer.LinearRecurrentContainer)
    core = (LinearRecurrent if linear else Recurrent)(container, held)
    made = RecurrentNeuron(core, container, step_mode or container.step_mode, backend)
    if linear:
        step = torch.Size([2, container.rc.out_features])
        check_recurs(made, step, core.state_shape(step))
    else:
        check_fuses(made)
    made.train(node.training)
    return made


def node_of(container: Any) -> Any:
    """The node that a recurrent container holds, by itself or, in a linear one, after linear layers.

    Raises:
        LeaveAlone: it holds something else.
    """
    held, *before = [container.sub_module]
    if isinstance(held, nn.Sequential) and len(held) and isinstance(container, layer.LinearRecurrentContainer):
        *before, held = held
    plain = isinstance(held, neuron.BaseNode | neuron.SimpleBaseNode) and not isinstance(held, neuron.GatedLIFNode)
    if not plain or not all(type(m) in (nn.Linear, layer.Linear) for m in before):
        what = "linear layers and a node" if isinstance(container, layer.LinearRecurrentContainer) else "a node"
        raise LeaveAlone(f"a container of something else than {what}; what is in it is looked at by itself")
    if held.step_mode == "m" or getattr(held, "store_v_seq", False):
        raise LeaveAlone("its node takes sequences, or stores `v_seq`: set both back first")
    return held


def core_for(node: Any) -> nn.Module:
    """The step of a node as a core.

    Raises:
        LeaveAlone: the kind is not known, or its states do not start as numbers.
    """
    core = _core_of(type(node))(node)
    for name, value in node._memories_rv.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LeaveAlone(f"its memory `{name}` starts as {type(value).__name__}, and flexsn's states start as numbers")
    return core


def _own(kind: type, theirs: type) -> set[str]:
    """The methods that a user's class adds to SpikingJelly's."""
    own = {name for c in kind.__mro__[: kind.__mro__.index(theirs)] for name, value in vars(c).items() if callable(value)}
    return own - {"__init__", "extra_repr", "__repr__"}


def _core_of(kind: type) -> type[nn.Module]:
    """The core for a class of nodes; a subclass may define a constructor, a step of its own and what that calls."""
    theirs = next(c for c in kind.__mro__ if c.__module__.startswith("spikingjelly."))
    own = _own(kind, theirs)
    if issubclass(theirs, neuron.SimpleBaseNode):
        if changed := {name for name in own if hasattr(theirs, name)} - {*EQUATIONS, "single_step_forward"}:
            raise LeaveAlone(f"defines {', '.join(sorted(changed))}; flexsn calls {', '.join(EQUATIONS)} by itself")
        if positional_names(kind.single_step_forward)[1] != 2:  # type: ignore[attr-defined]  # a SimpleBaseNode has it
            raise LeaveAlone("its step takes several inputs")
        return OwnEquations
    if STEP in own and issubclass(theirs, neuron.BaseNode):
        if getattr(kind, MULTI_STEP) is not base.MemoryModule.multi_step_functional_forward:
            raise LeaveAlone(f"over sequences SpikingJelly runs the step of {theirs.__name__}, not the one that it defines")
        if changed := {name for name in own if hasattr(theirs, name)} - {STEP}:
            raise LeaveAlone(f"defines {', '.join(sorted(changed))} beside `{STEP}`; flexsn calls its step by itself")
        return OwnStep
    if ignored := own.intersection(EQUATIONS):
        raise LeaveAlone(
            f"defines {', '.join(sorted(ignored))}, which SpikingJelly 2.0 does not call in a {theirs.__name__}: derive it from "
            f"SimpleBaseNode, or define `{STEP}`"
        )
    if issubclass(theirs, layer.Dropout | layer.DropConnectLinear):
        raise NoNeuron("keeps a mask from step to step")
    if issubclass(theirs, PARALLEL):
        raise LeaveAlone("mixes time steps: its output at a step is a learned sum over the inputs of several")
    if theirs not in CORES:
        container = "Container" in theirs.__name__
        raise LeaveAlone("a container; what is in it is looked at by itself" if container else "not among those that flexsn converts")
    if own:
        raise LeaveAlone(f"defines {', '.join(sorted(own))}; flexsn can take a subclass that defines `{STEP}` alone")
    return CORES[theirs]


STEP, MULTI_STEP = "single_step_functional_forward", "multi_step_functional_forward"
EQUATIONS = ("neuronal_charge", "neuronal_fire", "neuronal_reset")  # of a SimpleBaseNode


SEQUENCES = '`functional.set_step_mode(model, "m")`, and call the model with sequences [T, *shape] in place of the loop over time'


def takes(node: Any) -> str:
    """By its step mode; some have one alone."""
    return getattr(node, "step_mode", None) or node.supported_step_mode()[0]


def loops(module: nn.Module) -> bool:
    """Whether a container calls what it holds at every step."""
    return isinstance(module, _LOOPS)


_RECURRENT = (layer.ElementWiseRecurrentContainer, layer.LinearRecurrentContainer)
_LOOPS = (layer.MultiStepContainer, layer.TLastMultiStepContainer, layer.StepModeContainer, *_RECURRENT)


def finish(model: nn.Module, swapped: list[tuple[nn.Module, FlexSN]]) -> None:
    """SpikingJelly remembers which modules `reset_net(model)` resets."""
    for module in model.modules():
        functional.invalidate_reset_cache(module)
