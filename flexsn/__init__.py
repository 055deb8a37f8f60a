"""flexsn: write one time step of a spiking neuron in plain PyTorch, get one fused kernel for the whole sequence."""

import importlib
from typing import TYPE_CHECKING

from . import errors, neurons, surrogate
from ._over_time.network import over_time
from ._torch_compile.export import decompose
from ._version import __version__
from ._viz import plot
from ._viz.monitor import monitor
from .interchange import Delay, PerStep, convert, from_nir, to_nir
from .module import FlexSN
from .neurons import (
    ALIF,
    IF,
    KLIF,
    LIF,
    AdEx,
    AdLIF,
    CubaLI,
    CubaLIF,
    ExponentialIF,
    GatedLIF,
    HodgkinHuxley,
    Izhikevich,
    LeakyIntegrator,
    ParametricLIF,
    QuadraticIF,
    RefractoryLIF,
    ResonateAndFire,
    Synaptic,
    TwoCompartmentLIF,
)
from .neurons.network import detach_states, get_states, reset_net, set_states
from .neurons.recurrent import Recurrent
from .scan import ScanResult, scan

if TYPE_CHECKING:
    from . import lowlevel
    from ._cli.build import build
    from ._operator.dtensor import neuron_parallel
    from ._report import explain

__all__ = [
    "ALIF", "IF", "KLIF", "LIF", "AdEx", "AdLIF", "CubaLI", "CubaLIF", "Delay", "ExponentialIF", "FlexSN", "GatedLIF",
    "HodgkinHuxley", "Izhikevich", "LeakyIntegrator", "ParametricLIF", "PerStep", "QuadraticIF", "Recurrent", "RefractoryLIF",
    "ResonateAndFire", "ScanResult", "Synaptic", "TwoCompartmentLIF", "__version__", "build", "convert", "decompose",
    "detach_states", "errors", "explain", "from_nir", "get_states", "lowlevel", "monitor", "neuron_parallel", "neurons",
    "over_time", "plot", "reset_net", "scan", "set_states", "surrogate", "to_nir",
]  # fmt: skip


_LATE = {"build": "._cli.build", "explain": "._report", "neuron_parallel": "._operator.dtensor"}


def __getattr__(name: str) -> object:
    """What is imported when it is used first."""
    if name == "lowlevel":
        return importlib.import_module(".lowlevel", __name__)
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
