"""AdEx, Izhikevich and Hodgkin-Huxley beside Brian2 (numpy code generation), which integrates the published equations with its own
step, in float64: spikes at the same steps, states to rounding."""

import functools
import warnings

import pytest
import torch

import flexsn
from flexsn import surrogate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    import brian2 as b2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore:.*:SyntaxWarning")
ABOVE = functools.partial(surrogate.atan, inclusive=False)  # `v > threshold`, as written below
N = 5


def currents(low, high, steps):
    """A step of another height for every neuron, on after a tenth of the time."""
    x = torch.linspace(low, high, N, dtype=torch.float64).expand(steps, N).clone()
    x[: steps // 10] = 0
    return x


def brian(equations, method, x, dt, start, states, *, threshold, reset, refractory=False):
    """Spikes `[T, N]` and state sequences after each step; `x` enters as `x(t, i)`, all without units."""
    b2.prefs.codegen.target = "numpy"
    b2.start_scope()
    clock = b2.Clock(dt=dt * b2.ms)
    namespace = {"drive": b2.TimedArray(x.numpy(), dt=dt * b2.ms), "ms": b2.ms}
    group = b2.NeuronGroup(
        N, equations, method=method, clock=clock, threshold=threshold, reset=reset, refractory=refractory, namespace=namespace
    )  # fmt: skip
    for name, value in start.items():
        setattr(group, name, value)
    spikes = b2.SpikeMonitor(group)
    trail = b2.StateMonitor(group, list(states), record=True, clock=clock, when="end")
    b2.Network(group, spikes, trail).run(len(x) * dt * b2.ms)
    raster = torch.zeros(len(x), N, dtype=torch.float64)
    raster[(spikes.t / (dt * b2.ms)).round().astype(int), spikes.i[:]] = 1.0
    return raster, {n: torch.from_numpy(getattr(trail, n).T.copy()) for n in states}


def compare(neuron, x, raster, trail, tolerance):
    neuron.store_state_seqs, neuron.backend = True, "cpp"
    y = neuron(x)
    assert (raster.sum(0) > 0).sum() >= 3 and raster.sum() > 10
    assert torch.equal(y, raster), f"{int((y != raster).sum())} of {int(raster.sum())} spikes differ"
    for name, got in zip(neuron.state_names, neuron.state_seqs, strict=True):
        want = trail[name]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


def test_adex():
    """Brette & Gerstner's equations, forward Euler of 0.1 ms."""
    equations = """
    dv/dt = (drive(t, i) - w - 30.0 * (v + 70.6) + 30.0 * 2.0 * exp((v + 50.4) / 2.0)) / (281.0 * ms) : 1
    dw/dt = (4.0 * (v + 70.6) - w) / (144.0 * ms) : 1
    """
    x = currents(500.0, 1500.0, 3000)
    raster, trail = brian(
        equations, "euler", x, 0.1, {"v": -70.6, "w": 0.0}, ("v", "w"), threshold="v > -40.4", reset="v = -70.6; w += 80.5"
    )  # fmt: skip
    compare(flexsn.AdEx(surrogate=ABOVE), x, raster, trail, 1e-9)


@pytest.mark.parametrize("cell", ["regular spiking", pytest.param("chattering", marks=pytest.mark.slow)])
def test_izhikevich(cell):
    """Forward Euler of 0.25 ms."""
    c, d = {"regular spiking": (-65.0, 8.0), "chattering": (-50.0, 2.0)}[cell]
    equations = """
    dv/dt = (0.04 * v**2 + 5.0 * v + 140.0 - u + drive(t, i)) / ms : 1
    du/dt = 0.02 * (0.2 * v - u) / ms : 1
    """
    x = currents(4.0, 14.0, 2000)
    raster, trail = brian(
        equations, "euler", x, 0.25, {"v": c, "u": 0.2 * c}, ("v", "u"), threshold="v > 30.0", reset=f"v = {c}; u += {d}"
    )  # fmt: skip
    compare(flexsn.Izhikevich(v_reset=c, d=d, dt=0.25, surrogate=ABOVE), x, raster, trail, 1e-9)


def test_hodgkin_huxley():
    """Brian2's own exponential Euler step of 0.01 ms; one spike per crossing, by its refractoriness."""
    equations = """
    dv/dt = (drive(t, i) - 120.0 * m**3 * h * (v - 50.0) - 36.0 * n**4 * (v + 77.0) - 0.3 * (v + 54.387)) / ms : 1
    dm/dt = (am * (1.0 - m) - bm * m) / ms : 1
    dh/dt = (ah * (1.0 - h) - bh * h) / ms : 1
    dn/dt = (an * (1.0 - n) - bn * n) / ms : 1
    am = 1.0 / exprel(-(v + 40.0) / 10.0) : 1
    bm = 4.0 * exp(-(v + 65.0) / 18.0) : 1
    ah = 0.07 * exp(-(v + 65.0) / 20.0) : 1
    bh = 1.0 / (1.0 + exp(-(v + 35.0) / 10.0)) : 1
    an = 0.1 / exprel(-(v + 55.0) / 10.0) : 1
    bn = 0.125 * exp(-(v + 65.0) / 80.0) : 1
    """
    x = currents(2.0, 30.0, 6000)
    neuron = flexsn.HodgkinHuxley(surrogate=ABOVE)
    start = dict(zip(neuron.state_names, flexsn.HodgkinHuxley.start, strict=True))
    raster, trail = brian(
        equations, "exponential_euler", x, 0.01, start, ("v", "m", "h", "n"), threshold="v > 0.0", reset="", refractory="v > 0.0"
    )  # fmt: skip
    compare(neuron, x, raster, trail, 1e-8)


@pytest.mark.slow
def test_hodgkin_huxley_converges():
    """Spike times come nearer to those of a step of 1 us in proportion to the step."""
    x, fine_steps = currents(10.0, 30.0, 3000), 10
    fine = flexsn.HodgkinHuxley(dt=0.001)(x.repeat_interleave(fine_steps, 0))
    errors = []
    for dt, drive in ((0.02, x[::2]), (0.01, x)):
        coarse = flexsn.HodgkinHuxley(dt=dt)(drive)
        assert torch.equal(coarse.sum(0), fine.sum(0)) and coarse.sum() >= 10
        errors.append(max((coarse[:, i].nonzero() * dt - fine[:, i].nonzero() * 0.001).abs().max().item() for i in range(N)))
    assert errors[1] < 0.2 and 1.5 < errors[0] / errors[1] < 3.0
