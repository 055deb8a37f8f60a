"""The zoo: neurons as pure one-step functions, and each as a module. docs/neurons.md lists equations and arguments."""

from .base import Neuron
from .integrate import IF, LIF, LeakyIntegrator, integrate_and_fire, leaky_integrator, lif
from .reset import reset
from .synaptic import CubaLI, CubaLIF, Synaptic, cuba_li, cuba_lif

__all__ = [
    "IF",
    "LIF",
    "CubaLI",
    "CubaLIF",
    "LeakyIntegrator",
    "Neuron",
    "Synaptic",
    "cuba_li",
    "cuba_lif",
    "integrate_and_fire",
    "leaky_integrator",
    "lif",
    "reset",
]
