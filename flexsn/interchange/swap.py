"""What the converters of the three libraries share: a neuron kept under its old name, and the test that it fuses.

First what a call of a module runs beside the forward of its class, hooks and functions set on the instance: none of it would be kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._capture.signature import core_name, make_signature
from .._capture.trace import Meta
from .._program.cache import Source, program_for
from .._runtime.backends import backend_of
from .._torch.compiling import is_optimized_module
from .._viz.monitor import watches
from ..errors import BackendUnavailableError, CannotFuseError, FlexSNError, InterchangeError, as_shown
from ..module import FlexSN

_SET_WEIGHTS = (BasePruningMethod, WeightNorm, SpectralNorm)  # pre-hooks that compute a weight, and leave the input as it is


def check_calls(model: nn.Module) -> None:
    """A graph holds layers, and has no place for what else their calls run.

    Raises:
        InterchangeError: a module has a forward of its own or hooks, other than those that set its weights and flexsn's monitors.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if found := _beside(module):
            raise InterchangeError(f"`{name}` ({kind}): {found[0]}" if name else f"the model ({kind}): {found[0]}", hint=found[1])


def _beside(module: nn.Module) -> tuple[str, str] | None:
    """What stands in the way, and what to do."""
    if is_optimized_module(module):
        return "is compiled", "Give the model that was given to `torch.compile`."
    if isinstance(module, LazyModuleMixin):
        return "has no weights yet", "Call the model once: a lazy layer makes them then."
    if "forward" in vars(module):
        was = type(module).__name__
        return "has a `forward` of its own on the instance; NIR has no place for it", f"`del layer.forward` brings back that of {was}."
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not isinstance(hook, _SET_WEIGHTS) and not watches(hook):
            hint = "Take it off, `handle.remove()`, or make what it does a layer."
            return f"has the hook `{core_name(hook)}`; NIR has no place for it", hint
    return None


def set_weights(module: nn.Module) -> None:
    """What a call does first: weights that are pruned or normalised by hooks are those of the last call before."""
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, _SET_WEIGHTS):
                hook(part, ())


class LeaveAlone(Exception):
    """Why a neuron is not converted."""


class NoNeuron(LeaveAlone):
    """A layer that stands among the library's neurons, and is none: no report counts it."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_plain(module: nn.Module) -> None:
    """What a neuron computes is what its class says: a replacement knows nothing else.

    Raises:
        LeaveAlone: it has hooks, methods of its own on the instance, or parametrizations.
    """
    if any(getattr(module, name) for name in _HOOKS):
        raise LeaveAlone("has hooks, which would be lost; register them after the conversion")
    for name, value in vars(module).items():
        if callable(value) and callable(getattr(type(module), name, None)):
            raise LeaveAlone(f"has a `{name}` of its own on the instance, which would be lost")
    if parametrize.is_parametrized(module):
        raise LeaveAlone("has parametrizations; take them off, and register them on its `core` after the conversion")


def keep(core: nn.Module, source: nn.Module, *names: str) -> None:
    """Give `core` these tensors of `source`, in the order they have there: the same `Parameter` objects, the same buffers.

    Raises:
        LeaveAlone: a buffer is the result of a computation, with a graph behind it (the `C` of a Lapicque that learns `beta`).
    """
    for name, parameter in source.named_parameters(recurse=False):
        if name in names:
            core.register_parameter(name, parameter)
    for name, buffer in source.named_buffers(recurse=False):
        if name in names:
            if not buffer.is_leaf:
                raise LeaveAlone(
                    f"its `{name}` was computed once, from what is learned: no optimizer step reaches it, and a second backward fails; "
                    "make a neuron that computes it at every step (of a Lapicque: `Leaky(beta, learn_beta=True)`)"
                )
            core.register_buffer(name, buffer)


class Attribute:
    """An attribute of the old neuron, by the name that it had there.

    On the class: were there a `__getattr__` instead, `torch.compile` would drop what is assigned to `states`.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, neuron: Any, kind: type | None = None) -> Any:
        return self if neuron is None else neuron.read(self.name)

    def __set__(self, neuron: Any, value: Any) -> None:
        neuron.write(self.name, value)


class Swapped(FlexSN):
    """A neuron of another library as a `FlexSN`.

    The attributes of the old neuron are read and written by their old names: states are those carried here, and what its
    step reads (time constants, thresholds, the surrogate) is what the core reads. What the core has no place for can be
    read, and raises an `InterchangeError` when it is written.

    It loads state dicts from before the conversion: the keys of the old neuron's tensors are those of the core's, and
    what only the old neuron kept (states as buffers, flags) is passed over.

    Args:
        core: one step; an `nn.Module` that holds the old neuron's parameters by their names.
        old: the neuron it stands for.
        state_names: of the states that the core takes.
        step_mode, backend, num_inputs: as for `FlexSN`.
    """

    renamed: ClassVar[dict[str, str]] = {}  # attributes of the old neuron that the core calls otherwise

    def __init__(self, core: nn.Module, old: nn.Module, state_names: tuple[str, ...], step_mode: str, backend: str, num_inputs: int = 1):
        super().__init__(core, num_inputs=num_inputs, num_states=len(state_names), step_mode=step_mode, backend=backend)
        self.state_names = state_names
        self.old_name = type(old).__name__
        self.old_keys = tuple(old.state_dict())
        values = {n: v for n, v in _public(old).items() if not self._has_own(n)}
        self.places = {n: self.renamed.get(n, n) for n in values if hasattr(self.holder, self.renamed.get(n, n))}
        self.fixed = {n: v if isinstance(v, _PLAIN) else None for n, v in values.items() if n not in (*self.places, *state_names)}
        self._lend_attributes()
        self.train(old.training)

    # --- the attributes of the old neuron -----------------------------------------------------------------------------
    @property
    def holder(self) -> Any:
        """What holds the constants of the step."""
        return self.core

    def _has_own(self, name: str) -> bool:
        """Whether this module, or its class, has a meaning of its own for a name."""
        own = type(self).__mro__[: type(self).__mro__.index(FlexSN) + 1]
        known = [vars(c)[name] for c in own if name in vars(c)]
        return name in vars(self) or name in self._modules or any(not isinstance(v, Attribute) for v in known)

    def _lend_attributes(self) -> None:
        for name in (*self.state_names, *self.places, *self.fixed):
            if not self._has_own(name):
                setattr(type(self), name, Attribute(name))

    def read(self, name: str) -> Any:
        if name in self.state_names:
            return self.state(name)
        if name in self.places:
            return getattr(self.holder, self.places[name])
        if name in self.fixed:
            return self.fixed[name]
        if name in vars(self):  # the attribute is lent to another neuron of this class
            return vars(self)[name]
        raise AttributeError(f"a converted {self.old_name} has no attribute `{name}`")

    def write(self, name: str, value: Any) -> None:
        if name in self.state_names:
            self.set_state(name, value)
        elif name in self.places:
            setattr(self.holder, self.places[name], value)
        elif name in self.fixed:
            self.refuse(name)
        else:
            vars(self)[name] = value

    def refuse(self, name: str) -> None:
        raise InterchangeError(
            f"`{name}` of a converted {self.old_name} cannot be changed: the step that flexsn runs has no place for it",
            hint="Change it before `flexsn.convert`.",
        )

    def state(self, name: str) -> Any:
        raise NotImplementedError

    def set_state(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """`nn.Module` would register a parameter or a module here, under the name of what the core has."""
        if isinstance(getattr(type(self), name, None), Attribute):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lend_attributes()

    # --- the rest -----------------------------------------------------------------------------------------------------
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in self.old_keys:
            if prefix + key in state_dict:
                value = state_dict.pop(prefix + key)
                own = self.state_dict().keys()
                for place in (f"core.{key}", f"core.node.{key}"):  # the latter where the core calls the old neuron
                    if place in own:
                        state_dict[prefix + place] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"was {self.old_name}, {super().extra_repr()}"


_PLAIN = (int, float, str, Tensor)


def _public(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its class made, without private ones."""
    found = {n: v for n, v in vars(module).items() if n not in vars(nn.Module())}
    found |= module._parameters | module._buffers | module._modules
    return {n: v for n, v in found.items() if not n.startswith("_")}


def check_fuses(neuron: FlexSN, step: tuple[int, ...] | None = None) -> None:
    """Capture the core and its gradient on stand-ins; nothing is built.

    Args:
        step: the shape of one step; by default a batch of what the core's tensors broadcast to. Where the core does not run on that,
            because it views its tensors as channels, a batch of images.

    Raises:
        LeaveAlone: one kernel cannot express it, or PyTorch cannot run it.
    """
    seen, params = neuron.captured_values(), [getattr(neuron.params, name) for name in neuron.param_names]
    try:
        core, captured = seen.stand_ins(neuron.core, torch.empty_like)
    except CannotFuseError as error:
        raise _cannot_fuse(error) from error
    floats = [t for t in (*captured.values(), *params) if t.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.get_default_dtype()
    device = floats[0].device if floats else torch.device("cpu")
    sig = make_signature(neuron.core, neuron.num_inputs, neuron.num_states, len(params))
    reason = ""
    for shape in [step] if step else _steps([tuple(t.shape) for t in floats]):
        metas = [Meta(shape, dtype)] * (neuron.num_inputs + neuron.num_states) + [Meta(tuple(p.shape), p.dtype) for p in params]
        try:
            program = program_for(backend_of(device), Source(core, captured, seen, sig, device), metas)[0]
            program.differentiate(core, captured, seen)
            return
        except CannotFuseError as error:
            raise _cannot_fuse(error) from error
        except FlexSNError as error:
            reason = reason or f"does not run on one step of shape {list(shape)}: {error.reason}"
    raise LeaveAlone(reason)


def check_recurs(neuron: FlexSN, step: tuple[int, ...], state: tuple[int, ...]) -> None:
    """Call a neuron whose step mixes neurons on one step of zeros: kernels are chosen, and built, as for a sequence.

    Args:
        step, state: the shapes of its input and of its states at one step.

    Raises:
        LeaveAlone: kernels, in turns with what mixes neurons, cannot express it, or PyTorch cannot run it.
    """
    own = next(t for t in (*neuron.parameters(), *neuron.buffers()) if t.is_floating_point())
    given = neuron.strict, neuron.backend
    neuron.strict, neuron.backend = True, "auto"
    try:
        with torch.enable_grad():
            x = own.new_zeros((1, *step), requires_grad=True)
            neuron.run((x,), [own.new_zeros(state, requires_grad=True) for _ in range(neuron.num_states)], False)
    except BackendUnavailableError:
        return  # no compiler: the eager loop takes what there is
    except CannotFuseError as error:
        raise _cannot_fuse(error) from error
    except FlexSNError as error:
        raise LeaveAlone(f"does not run on one step of shape {list(step)}: {error.reason}") from error
    finally:
        neuron.strict, neuron.backend = given


def _cannot_fuse(error: CannotFuseError) -> LeaveAlone:
    return LeaveAlone(f"cannot be fused: {error.reason}{f', at {as_shown(error.line)}' if error.line else ''}")


def _steps(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of one step that tensors of these shapes may be made for."""
    channels = max((n for shape in shapes for n in shape), default=1)
    images = (2, channels, 2, 2)
    try:
        return [(2, *torch.broadcast_shapes((1,), *shapes)), images]
    except RuntimeError:  # they meet after a `view`
        return [images]
