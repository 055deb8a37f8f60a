"""What `flexsn.plot` is given, as arrays and numbers that can be drawn, or an error that says what to give."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._capture.signature import check_core, core_name, make_signature
from ..errors import PictureError
from ..module import FlexSN

if TYPE_CHECKING:
    import numpy


# --- sequences --------------------------------------------------------------------------------------------------------------
def array(values: Any, what: str) -> numpy.ndarray:
    """`[T, ...]`: a tensor, an array, nested lists of numbers, or a list of tensors, one per step."""
    import numpy as np

    if isinstance(values, (list, tuple)) and values and all(isinstance(v, Tensor) for v in values):
        if len({v.shape for v in values}) > 1:
            raise PictureError(f"{what}: the tensors of a list differ in shape", hint="Give one tensor, [T, ...].")
        values = torch.stack([v.detach() for v in values])
    if isinstance(values, Tensor):
        if values.is_meta or values.layout is not torch.strided:
            raise PictureError(f"{what} draws dense tensors with values", hint="Call `.to_dense()` on a sparse one.")
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
    try:
        found = np.asarray(values)
    except ValueError:
        raise PictureError(f"{what}: the rows of a list differ in length", hint="Pad them to one tensor, [T, ...].") from None
    if found.dtype.kind not in "biuf":
        raise PictureError(f"{what} draws real numbers, and was given {_kind(values, found)}", hint="Give a tensor, [T, ...].")
    return found


def _kind(values: Any, found: numpy.ndarray) -> str:
    return (
        str(values.dtype)
        if isinstance(values, Tensor)
        else f"numbers of {found.dtype}"
        if found.dtype.kind == "c"
        else f"a {type(values).__name__}"
    )


def steps_of(values: Any, what: str, takes: str, dims: Sequence[int], hint: str) -> numpy.ndarray:
    """A sequence with one of so many dimensions, of at least one step and one neuron."""
    found = array(values, what)
    if found.ndim not in dims:
        raise PictureError(f"{what} draws {takes}, not {list(found.shape)}", hint=hint)
    if not found.size:
        raise PictureError(f"{what} has nothing to draw: {list(found.shape)}", hint="T and the number of neurons have to be above 0.")
    return found


def rows(values: Any, what: str) -> numpy.ndarray:
    """`[T, n]`."""
    hint = "Choose a sample and flatten what is left: `spikes[:, 0].flatten(1)`."
    found = steps_of(values, what, "one sample, [T, n]", (1, 2), hint)
    return found[:, None] if found.ndim == 1 else found


def spikes_of(found: numpy.ndarray, what: str) -> numpy.ndarray:
    """Where there is one: whatever is not 0."""
    import numpy as np

    if found.dtype.kind == "f" and (unknown := int(np.isnan(found).sum())):
        hint = "Look for where it begins: `flexsn.plot.traces` of the membrane."
        raise PictureError(f"{what} draws spikes, and {unknown} of {found.size} values are NaN", hint=hint)
    return found != 0


def counts_of(found: numpy.ndarray, what: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """How many spikes there are, float64 (3 are three spikes of a step), and where there is one."""
    import numpy as np

    fired = spikes_of(found, what)
    if endless := int(np.isinf(found).sum()):
        raise PictureError(f"{what} draws rates, and {endless} of {found.size} values are infinite")
    return found.astype(float), fired


def same(found: numpy.ndarray, like: numpy.ndarray, name: str) -> numpy.ndarray:
    if found.shape != like.shape:
        raise PictureError(f"`{name}` is {list(found.shape)} but the membrane is {list(like.shape)}")
    return found


def level(given: Any, v: numpy.ndarray, name: str) -> numpy.ndarray | None:
    """A line for every trace, `[T, n]`."""
    import numpy as np

    if given is None:
        return None
    if isinstance(given, str):
        raise PictureError(f"`{name}` must be a number, one per neuron or [T, n], not {given!r}", hint=f"`{name}=None` draws none.")
    found = array(given, f"`{name}`").astype(float)
    try:
        return np.broadcast_to(found, v.shape)
    except ValueError:
        raise PictureError(f"`{name}` {list(found.shape)} does not fit a membrane of {list(v.shape)}") from None


# --- options ----------------------------------------------------------------------------------------------------------------
def number(value: Any, name: str, *, above: float = -math.inf) -> float:
    """A finite number."""
    fine = hasattr(value, "__float__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0
    if not fine or not above < float(value) < math.inf:
        what = "a finite number" if above == -math.inf else f"a number above {above:g}"
        raise PictureError(f"`{name}` must be {what}, not {value!r}")
    return float(value)


def whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise PictureError(f"`{name}` must be an int, {least} or above, not {value!r}")
    return int(value)


def length(dt: Any) -> float:
    """Of a step, in the unit of the time axis."""
    return 1.0 if dt is None else number(dt, "dt", above=0.0)


def names_of(labels: Any, count: int, name: str) -> list[str]:
    if isinstance(labels, str) or not isinstance(labels, Sequence) or len(labels) != count:
        raise PictureError(f"`{name}` must be a list of {count} names, not {labels!r}")
    return [str(label) for label in labels]


def color_of_each(color: Any, count: int) -> list[Any] | None:
    """One color per neuron, or None where one is for all."""
    from matplotlib.colors import is_color_like

    if is_color_like(color):
        return None
    if isinstance(color, Sequence) and len(color) == count and all(map(is_color_like, color)):
        return list(color)
    raise PictureError(f"`color` must be a color of matplotlib, or a list of {count}, one per neuron; not {color!r}")


def span_of(given: Any, name: str) -> tuple[float, float]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise PictureError(f"`{name}` must be a range (low, high), not {given!r}")
    low, high = number(given[0], name), number(given[1], name)
    if not low < high:
        raise PictureError(f"`{name}` must be a range (low, high), low below high, not {given!r}")
    return low, high


def points_of(given: Any, name: str) -> list[tuple[float, float]]:
    if not isinstance(given, (tuple, list)) or any(not isinstance(p, (tuple, list)) or len(p) != 2 for p in given):
        raise PictureError(
            f"`{name}` must be a list of pairs, one value for each state, not {given!r}", hint=f"Write `{name}=[(0.0, 0.0)]`."
        )
    return [(number(a, name), number(b, name)) for a, b in given]


# --- surrogates --------------------------------------------------------------------------------------------------------------
def by_name(functions: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    if callable(functions):
        functions = [functions]
    if not isinstance(functions, (Mapping, list, tuple)) or not functions:
        raise PictureError(f"surrogate_curves draws functions `x -> spike`, one or several, not {functions!r}")
    named = functions if isinstance(functions, Mapping) else _numbered(functions)
    for name, function in named.items():
        if not callable(function):
            raise PictureError(f"surrogate_curves draws functions `x -> spike`, and `{name}` is a {type(function).__name__}")
    return dict(named)


def _numbered(functions: Sequence[Any]) -> dict[str, Any]:
    """By their names, told apart by a number where they are the same."""
    named: dict[str, Any] = {}
    for function in functions:
        plain = _label(function)
        name, k = plain, 2
        while name in named:
            name, k = f"{plain} {k}", k + 1
        named[name] = function
    return named


def _label(function: Callable[..., Any]) -> str:
    """Its name, and the settings that it was given: `atan(alpha=3)`."""
    if not isinstance(function, functools.partial):
        return core_name(function)
    settings = [*map(_short, function.args), *(f"{name}={_short(value)}" for name, value in function.keywords.items())]
    return f"{core_name(function)}({', '.join(settings)})" if settings else core_name(function)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():g}" if value.numel() == 1 else str(list(value.shape))
    if isinstance(value, float):
        return f"{value:g}"
    return core_name(value) if callable(value) else repr(value)


# --- neurons of two states ----------------------------------------------------------------------------------------------------
class TwoStates:
    """A core of two states, in the eager loop and with its inputs held fixed.

    Attributes:
        names: of the states.
    """

    def __init__(self, core: Callable[..., Any], inputs: Any, params: Sequence[Tensor]):
        if isinstance(core, nn.Module) and not isinstance(core, FlexSN) and any(isinstance(m, FlexSN) for m in core.modules()):
            raise PictureError("a phase plane is that of one neuron, not of a network", hint="Give one of its `FlexSN`s, `net[1]`.")
        if isinstance(core, FlexSN) and params:
            raise PictureError("a module has its own params", hint="Leave out `params=`.")
        if not isinstance(params, (tuple, list)):
            raise PictureError(f"`params` must be a list of tensors, not {type(params).__name__}", hint="Write `params=[p]`.")
        count = core.num_inputs if isinstance(core, FlexSN) else 1
        inputs = (0.0,) * count if inputs is None else inputs
        if not isinstance(inputs, (tuple, list)):
            raise PictureError(f"`inputs` must be a list of numbers, one for each input, not {inputs!r}", hint="Write `inputs=[0.5]`.")
        self.inputs = [number(value, "inputs") for value in inputs]
        self.neuron = self._of_module(core) if isinstance(core, FlexSN) else self._of_core(core, params)
        self.names = make_signature(self.neuron.core, len(inputs), 2, self.neuron.num_params).state_names

    def _of_core(self, core: Any, params: Sequence[Tensor]) -> FlexSN:
        check_core(core)
        make_signature(core, len(self.inputs), 2, len(params))
        return FlexSN(core, len(self.inputs), 2, params=params, backend="torch")

    def _of_module(self, neuron: FlexSN) -> FlexSN:
        name = core_name(neuron)
        if neuron.num_states != 2:
            raise PictureError(f"has {neuron.num_states} states, and a phase plane shows two", core=name)
        if len(self.inputs) != neuron.num_inputs:
            raise PictureError(f"`inputs` has {len(self.inputs)} values for {neuron.num_inputs} inputs", core=name)
        for key, tensor in (*neuron.named_parameters(), *neuron.named_buffers()):
            if tensor.numel() > 1:
                hint = "Make one with the values of the neuron that you want to see."
                raise PictureError(f"is many neurons: `{key}` is {list(tensor.shape)}", core=name, hint=hint)
        twin = copy.copy(neuron)  # which shares all but its settings
        twin.backend = "torch"
        return twin

    def run(self, first: Sequence[Tensor], steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and states of every step from given states, `[steps, *shape]`."""
        device = next((t.device for t in (*self.neuron.parameters(), *self.neuron.buffers())), torch.device("cpu"))
        first = [v.to(device) for v in first]
        held = tuple([first[0].new_full((steps, *first[0].shape), value) for value in self.inputs])
        with torch.no_grad():
            outputs, _, sequences = self.neuron.run(held, first, True)
        return outputs, sequences or []
