"""NIR's neurons and convolutions and flexsn's, in one another's terms.

NIR's equations are in continuous time, with `tau` and `dt` in seconds; flexsn's are steps, with `tau` in steps. Between
them lies one forward Euler step of length `dt`:

    LI, LIF       tau dv/dt = (v_leak - v) + r x        h = v + (r x - (v - v_leak)) / (tau / dt)
    CubaLI, -LIF  tau_syn di/dt = -i + w_in x           i = i + (w_in x - i) / (tau_syn / dt), then LI with x = i
    IF            dv/dt = r x                           h = v + (r dt) x

So `r`, `w_in`, `v_leak`, `v_threshold` and `v_reset` stay as they are, `tau` is divided by `dt`, and the `r` of IF is
multiplied by it. A neuron without `decay_input` (`h = v - (v - v_leak) / tau + r x`) is one with `tau` times the `r`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations

from .. import neurons
from ..errors import InterchangeError
from ..module import FlexSN
from ..neurons.recurrent import MixingModule, Recurrent

Described = tuple[str, dict[str, Any]]  # NIR's name, and the arguments of flexsn's neuron

KINDS: dict[str, type[neurons.Neuron]] = {  # NIR's name: flexsn's class
    "IF": neurons.IF,
    "LI": neurons.LeakyIntegrator,
    "LIF": neurons.LIF,
    "CubaLI": neurons.CubaLI,
    "CubaLIF": neurons.CubaLIF,
}
_NAMES = {"tau_mem": "tau"}  # where flexsn calls it otherwise
SPIKING = ("IF", "LIF", "CubaLIF")


def to_arguments(kind: str, fields: dict[str, Tensor], dt: float) -> dict[str, Tensor]:
    """The arguments of flexsn's neuron from the fields of a NIR node."""
    arguments = {_NAMES.get(name, name): value for name, value in fields.items()}
    for name in ("tau", "tau_syn"):
        if name in arguments:
            arguments[name] = arguments[name] / dt
    if kind == "IF":
        arguments["r"] = arguments["r"] * dt
    return arguments


def described(neuron: FlexSN) -> Described:
    """NIR's name for a neuron, and flexsn's arguments for it.

    Raises:
        InterchangeError: NIR has no such neuron.
    """
    if isinstance(neuron, Recurrent):
        return described(neuron.neuron)
    own = type_before_parametrizations(neuron)  # as with bounds
    for kind, cls in KINDS.items():
        if own is cls and isinstance(neuron, cls):
            return kind, neuron.arguments
    if own is neurons.ParametricLIF and isinstance(neuron, own):
        return "LIF", {**neuron.arguments, "tau": neuron.tau}
    describe = getattr(neuron.core, "describe", None)  # a converted neuron of another library
    if describe is None:
        raise InterchangeError(f"NIR has no primitive for {_called(neuron)}", hint=f"It has {', '.join(KINDS)}.")
    return describe()


def mixing_of(neuron: FlexSN) -> Any:
    """What brings its output of the step before back to it, or None."""
    mixing = neuron.mixing if isinstance(neuron, Recurrent) else getattr(neuron.core, "recurrent", None)
    return mixing.core if isinstance(mixing, MixingModule) else mixing


def _called(neuron: FlexSN) -> str:
    own = type(neuron) is FlexSN
    return f"the core `{getattr(neuron.core, '__name__', type(neuron.core).__name__)}`" if own else f"`{type(neuron).__name__}`"


def to_fields(kind: str, arguments: dict[str, Any], dt: float, shape: tuple[int, ...], channels: bool) -> dict[str, Any]:
    """The fields of a NIR node of this shape from flexsn's arguments.

    Args:
        channels: tensors among the arguments lie along the first dim of `shape`.

    Raises:
        InterchangeError: a soft reset, no reset, or arguments of another shape.
    """
    values = {n: expanded(n, v, shape, channels) for n, v in _with_hard_reset(kind, arguments).items()}
    for name, value in values.items():
        if not bool(torch.as_tensor(value).isfinite().all()):
            raise InterchangeError(f"`{name}` is not finite everywhere")
    if kind == "IF":
        return {**values, "r": values["r"] / dt}
    tau, tau_syn = values.pop("tau"), values.pop("tau_syn", None)
    if not arguments.get("decay_input", True):
        values["r"] = values["r"] * tau
        if tau_syn is not None:
            values["w_in"] = values["w_in"] * tau_syn
    if tau_syn is None:
        return {**values, "tau": tau * dt}
    return {**values, "tau_mem": tau * dt, "tau_syn": tau_syn * dt}


def check_start(neuron: FlexSN, kind: str, arguments: dict[str, Any]) -> None:
    """NIR's neurons start at rest (IF: at `v_reset`), with no current.

    Raises:
        InterchangeError: this one starts elsewhere.
    """
    given = (neuron.neuron if isinstance(neuron, Recurrent) else neuron).initial_states
    if given is None:
        return
    rest = [arguments.get(s, _DEFAULTS.get(s)) if isinstance(s, str) else s for s in KINDS[kind].start]
    if callable(given) or not all(bool((torch.as_tensor(r) == (g or 0.0)).all()) for r, g in zip(rest, given, strict=True)):
        rests = "`v_reset`" if kind == "IF" else "`v_leak`" if len(rest) == 1 else "`v_leak`, with no current"
        raise InterchangeError(
            f"starts from initial_states={given!r}; NIR has no initial state: its {kind} starts at {rests}",
            hint="Write it without `initial_states`, and set these where it is read.",
        )


def array(tensor: Tensor) -> Any:
    """A copy for numpy, which has no bfloat16; in float32 its values are the same."""
    value = tensor.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()


def readable_kernel(module: Any) -> tuple[Tensor, Any]:
    """Weight and padding of the same convolution with one group and a square kernel, filled up with zeros.

    `nir.read` takes the height of a kernel for its width too, and the second dim of the weight for the input's channels.
    """
    weight, padding, groups = module.weight.detach(), module.padding, module.groups
    if groups > 1:
        blocks = weight.unflatten(0, (groups, -1))
        dense = blocks.new_zeros(groups, blocks.shape[1], groups, *blocks.shape[2:])
        each = torch.arange(groups)
        dense[each, :, each] = blocks
        weight = dense.flatten(2, 3).flatten(0, 1)
    if weight.dim() == 3 or padding == "same" or weight.shape[2] == weight.shape[3]:
        return weight, padding
    missing = [max(weight.shape[2:]) - n for n in weight.shape[2:]]
    if any(n % 2 for n in missing):
        raise InterchangeError(
            f"has a kernel of {weight.shape[2]} x {weight.shape[3]}, which `nir.read` takes for a square one",
            hint="It has an equivalent where height and width are both odd or both even: zeros on both sides make it square.",
        )
    sides = [n // 2 for n in missing]
    given = (0, 0) if padding == "valid" else padding
    wider = tuple(p + n * d for p, n, d in zip(given, sides, module.dilation, strict=True))
    return F.pad(weight, (sides[1], sides[1], sides[0], sides[0])), wider


_DEFAULTS = {"r": 1.0, "w_in": 1.0, "v_leak": 0.0}
_FIELDS = {
    "IF": ("r", "v_threshold", "v_reset"),
    "LI": ("tau", "r", "v_leak"),
    "LIF": ("tau", "r", "v_leak", "v_threshold", "v_reset"),
    "CubaLI": ("tau", "tau_syn", "r", "v_leak", "w_in"),
    "CubaLIF": ("tau", "tau_syn", "r", "v_leak", "w_in", "v_threshold", "v_reset"),
}


def _with_hard_reset(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    values = {name: arguments.get(name, _DEFAULTS.get(name)) for name in _FIELDS[kind]}
    if kind in SPIKING and (values["v_reset"] is None or isinstance(values["v_reset"], str)):
        what = "soft reset (v_reset=None)" if values["v_reset"] is None else f"v_reset={values['v_reset']!r}"
        raise InterchangeError(f"NIR's neurons reset to v_reset; it cannot say {what}", hint="Use a number for `v_reset`.")
    return values


def expanded(name: str, value: Any, shape: tuple[int, ...], channels: bool = False) -> Any:
    """An argument at every neuron; in float64 if it is a number, since NIR keeps what it is given."""
    if not isinstance(value, Tensor):
        return torch.full(shape, float(value), dtype=torch.float64).numpy()
    laid = value.view(-1, *[1] * (len(shape) - 1)) if channels and value.dim() == 1 else value
    try:
        return array(torch.broadcast_to(laid, shape))
    except RuntimeError:
        raise InterchangeError(
            f"`{name}` has shape {list(value.shape)}, which is not that of one step {list(shape)}",
            hint="Steps are those of the sample, `[T, B, *shape]`, without time and batch.",
        ) from None
