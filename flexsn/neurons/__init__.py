"""The zoo: neurons as pure one-step functions, and each as a module. docs/neurons.md lists equations and arguments."""

from .adaptive import ALIF, AdLIF, adlif, alif
from .base import Neuron
from .bounds import Bounded
from .exponential import AdEx, ExponentialIF, Izhikevich, QuadraticIF, adex, exponential_if, izhikevich, quadratic_if
from .hodgkin_huxley import HodgkinHuxley, hodgkin_huxley
from .integrate import (
    IF,
    KLIF,
    LIF,
    GatedLIF,
    LeakyIntegrator,
    ParametricLIF,
    gated_lif,
    integrate_and_fire,
    klif,
    leaky_integrator,
    lif,
    parametric_lif,
)
from .refractory import RefractoryLIF, refractory_lif
from .reset import reset
from .synaptic import CubaLI, CubaLIF, Synaptic, cuba_li, cuba_lif
from .two_variables import ResonateAndFire, TwoCompartmentLIF, resonate_and_fire, two_compartment_lif

__all__ = [
    "ALIF", "IF", "KLIF", "LIF", "AdEx", "AdLIF", "Bounded", "CubaLI", "CubaLIF", "ExponentialIF", "GatedLIF", "HodgkinHuxley",
    "Izhikevich", "LeakyIntegrator", "Neuron", "ParametricLIF", "QuadraticIF", "RefractoryLIF", "ResonateAndFire", "Synaptic",
    "TwoCompartmentLIF", "adex", "adlif", "alif", "cuba_li", "cuba_lif", "exponential_if", "gated_lif", "hodgkin_huxley",
    "integrate_and_fire", "izhikevich", "klif", "leaky_integrator", "lif", "parametric_lif", "quadratic_if", "refractory_lif", "reset",
    "resonate_and_fire", "two_compartment_lif",
]  # fmt: skip
