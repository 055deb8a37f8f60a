"""Models to and from other libraries: `convert`, `to_nir`, `from_nir`."""

from .convert import Report, convert
from .layers import Delay, PerStep, Scale, SumPool2d, Threshold
from .network import NIRNetwork
from .nir_in import from_nir
from .nir_out import to_nir

__all__ = ["Delay", "NIRNetwork", "PerStep", "Report", "Scale", "SumPool2d", "Threshold", "convert", "from_nir", "to_nir"]
