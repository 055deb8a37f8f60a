"""flexsn: write one time step of a spiking neuron in plain PyTorch, get one fused kernel for the whole sequence."""

from . import errors, surrogate
from ._version import __version__
from .decomposed import decompose
from .module import FlexSN, detach_states, reset_net
from .report import explain
from .scan import ScanResult, scan

__all__ = [
    "FlexSN",
    "ScanResult",
    "__version__",
    "decompose",
    "detach_states",
    "errors",
    "explain",
    "reset_net",
    "scan",
    "surrogate",
]
