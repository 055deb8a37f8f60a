"""Every neuron of the zoo: the fused kernel gives what the eager loop gives, forward and backward, and every argument can be learned."""

import copy
import inspect
import math

import pytest
import torch
from helpers import assert_same_grads, assert_same_values

import flexsn
from flexsn import neurons

ZOO = {n: c for n, c in vars(neurons).items() if isinstance(c, type) and n not in ("Bounded", "Neuron", "Synaptic")}
SPIKING = [n for n, c in ZOO.items() if "v_reset" in c.defaults]
RUNAWAY = {"AdEx", "Izhikevich", "ExponentialIF", "QuadraticIF"}  # to infinity, without a hard reset
RESETS = [(n, {"detach_reset": True}) for n in SPIKING] + [
    (n, {"v_reset": r}) for n in SPIKING if n not in RUNAWAY for r in (None, "never")
]
DRIVE = {"AdEx": 8000.0, "Izhikevich": 60.0, "HodgkinHuxley": 800.0}  # in the units of the neuron; 2 for all others
# The kernel has the bits of the loop but where a neuron takes exp, tanh or sigmoid of its states
EXACT = {"IF", "LIF", "LeakyIntegrator", "KLIF", "CubaLIF", "CubaLI", "ALIF", "AdLIF", "QuadraticIF", "Izhikevich", "ResonateAndFire", "RefractoryLIF", "TwoCompartmentLIF", "GatedLIF", "ParametricLIF"}  # fmt: skip


def drive(name, T=40, shape=(37,)):
    x = DRIVE.get(name, 2.0) * torch.rand(T, *shape, generator=torch.Generator().manual_seed(3))
    return x.double() if name == "HodgkinHuxley" else x  # whose spike is a crossing: float32 rounds it to another step


def run(neuron, backend, xs):
    """Values and gradients by name, of inputs and parameters."""
    neuron = copy.deepcopy(neuron).to(xs[0].dtype)
    neuron.backend, neuron.store_state_seqs = backend, True
    leaves = {f"input {k}": x.clone().requires_grad_() for k, x in enumerate(xs)}
    y = neuron(*leaves.values())
    values = {"output": y} | {f"sequence {n}": v for n, v in zip(neuron.state_names, neuron.state_seqs, strict=True)}
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(v.shape, generator=generator).to(v) / (1.0 + v.detach().abs().max()) for v in values.values()]
    leaves |= dict(neuron.named_parameters())
    total = sum((w * v).sum() for w, v in zip(weights, values.values(), strict=True))
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {n: v.detach() for n, v in values.items()}, dict(zip(leaves, grads, strict=True))


def check(name, neuron, xs, backend="cpp"):
    want_values, want_grads = run(neuron, "torch", xs)
    values, grads = run(neuron, backend, xs)
    assert_same_values(values, want_values, exact=name in EXACT)
    assert all(g is None or g.isfinite().all() for g in grads.values())
    assert_same_grads(grads, want_grads)
    return values, grads


def test_the_zoo_is_whole():
    assert len(ZOO) == 18 and {c.step for c in ZOO.values()} == {
        f for f in vars(neurons).values() if inspect.isfunction(f) and f is not neurons.reset
    }
    for cls in ZOO.values():
        assert cls.step.__doc__ and "Source:" in cls.step.__doc__


@pytest.mark.parametrize("name", ZOO)
def test_fused_as_eager(name):
    neuron = ZOO[name]()
    xs = [drive(name)] * neuron.num_inputs
    values, grads = check(name, neuron, xs)
    assert 0 < values["output"].abs().mean() < 1e3, "drive it so that it spikes"
    assert grads["input 0"].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), RESETS, ids=str)
def test_resets_fused_as_eager(name, options):
    neuron = ZOO[name](**options)
    check(name, neuron, [drive(name)] * neuron.num_inputs)


def numbers(cls):
    return [n for n, v in cls.defaults.items() if isinstance(v, float) and n not in cls.never]


@pytest.mark.parametrize("name", ZOO)
def test_every_number_can_be_learned(name):
    """In the eager loop; below per channel and fused."""
    cls = ZOO[name]
    if name == "ParametricLIF":
        neuron = cls(learn=[n for n in numbers(cls) if n != "w"])
    else:
        neuron = cls(learn=numbers(cls))
    neuron.backend = "torch"
    x = drive(name, 100, (6,)).requires_grad_()
    y = neuron.double()(*[x.double() if k == 0 else 0.5 * x.double() for k in range(neuron.num_inputs)])
    (y.sum() + sum(v.sum() for v in neuron.states)).backward()
    for argument in numbers(cls):
        grad = getattr(neuron, argument).grad
        assert grad is not None and grad.isfinite().all(), argument
        assert grad != 0, f"{argument} has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_learned_per_channel_fused_as_eager(name):
    cls = ZOO[name]
    learn = [n for n in numbers(cls) if n != "w" or name != "ParametricLIF"]
    neuron = cls(learn=learn, per_channel=3)
    assert all(p.shape == (3,) for p in neuron.parameters()) and len(list(neuron.parameters())) == len(numbers(cls))
    xs = [drive(name, 20, (2, 3, 5)).double()] * neuron.num_inputs
    want_values, want_grads = run(neuron, "torch", xs)
    values, grads = run(neuron, "cpp", xs)
    assert_same_values(values, want_values, exact=False, tolerance=1e-9)
    assert_same_grads(grads, want_grads, scale=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_triton_as_eager(name):
    neuron = ZOO[name]()
    check(name, neuron, [drive(name, 18)] * neuron.num_inputs, backend="triton")


@pytest.mark.parametrize("name", ZOO)
def test_cores_run_by_themselves(name):
    """With the defaults of their arguments, through `flexsn.scan`; from where the module starts."""
    neuron = ZOO[name](backend="torch")
    if name in ("ParametricLIF", "KLIF", "GatedLIF"):
        neuron = ZOO[name](backend="torch").double()
    xs = [drive(name, 15).double()] * neuron.num_inputs
    start = [torch.zeros(37, dtype=torch.float64) if v is None else v for v in neuron.start_states(*xs)]
    y = neuron(*xs)
    got = flexsn.scan(ZOO[name].step, xs, start, backend="torch")
    torch.testing.assert_close(got.outputs[0], y.detach(), rtol=1e-6, atol=1e-9)


def test_hodgkin_huxley_rests_at_its_start():
    neuron = flexsn.HodgkinHuxley(store_state_seqs=True, backend="torch")
    assert neuron(torch.zeros(500, 1, dtype=torch.float64)).sum() == 0
    for seq, start in zip(neuron.state_seqs, flexsn.HodgkinHuxley.start, strict=True):
        torch.testing.assert_close(seq[-1], torch.full((1,), start, dtype=torch.float64), rtol=1e-3, atol=1e-3)


def test_hodgkin_huxley_gates_are_smooth_where_their_formula_is_not():
    from flexsn.neurons.hodgkin_huxley import rates

    v = torch.tensor([-40.0, -55.0, -40.0 + 1e-9, -55.0 - 1e-9, 5e2, -5e2], dtype=torch.float64, requires_grad=True)
    (m, _), _, (n, _) = rates(v)
    assert m[0] == 1.0 and abs(m[2].item() - 1.0) < 1e-9 and n[1].item() == pytest.approx(0.1)
    (slope,) = torch.autograd.grad(m[0] + n[1], v)
    assert slope[0].item() == pytest.approx(0.05) and slope[1].item() == pytest.approx(0.005)
    assert all(torch.isfinite(r).all() for pair in rates(v) for r in pair)
    assert torch.autograd.gradcheck(lambda v: tuple(r for pair in rates(v) for r in pair), v[:4].detach().requires_grad_())


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("drive", [-300.0, -550.0, -1e5, 1e5])
def test_hodgkin_huxley_stays_finite_however_it_is_driven(drive, backend):
    x = torch.full((300, 2), drive, requires_grad=True)
    neuron = flexsn.HodgkinHuxley(dt=0.1, backend=backend)
    (neuron(x).sum() + sum(v.sum() for v in neuron.states)).backward()
    assert all(v.isfinite().all() for v in neuron.states) and x.grad.isfinite().all() and x.grad.any()
    assert (neuron.states[0] < -840).all() == (drive < 0), "where rates are those at -840 mV"


def test_hodgkin_huxley_rates_are_finite():
    from flexsn.neurons.hodgkin_huxley import rates

    v = torch.cat([torch.linspace(-2000, 2000, 4001), torch.tensor([-1e30, -930.0, -840.0, 1e30])]).requires_grad_()
    (grad,) = torch.autograd.grad(sum(r.sum() for pair in rates(v) for r in pair), v)
    assert all(r.isfinite().all() for pair in rates(v) for r in pair) and grad.isfinite().all()


def test_parametric_lif_learns_its_time_constant():
    neuron = flexsn.ParametricLIF(tau=3.0)
    assert neuron.tau.item() == pytest.approx(3.0) and neuron.w.item() == pytest.approx(-math.log(2.0))
    neuron(drive("LIF")).sum().backward()
    assert neuron.w.grad != 0
    channels = flexsn.ParametricLIF(tau=torch.tensor([1.5, 2.0, 4.0]), per_channel=3)
    torch.testing.assert_close(channels.tau, torch.tensor([1.5, 2.0, 4.0]))
    with pytest.raises(ValueError, match="above 1 step"):
        flexsn.ParametricLIF(tau=1.0)


def test_refractory_lif_is_silent_for_its_period():
    y = flexsn.RefractoryLIF(refractory=4.0, backend="torch")(torch.full((30, 1), 5.0)).flatten()
    times = y.nonzero().flatten()
    assert len(times) == 6 and (times.diff() == 5).all()


def test_adaptation_slows_the_spikes():
    for neuron in (flexsn.ALIF(beta=0.5, backend="torch"), flexsn.AdLIF(b=0.5, backend="torch")):
        intervals = neuron(torch.full((100, 1), 2.0)).flatten().nonzero().flatten().diff()
        assert intervals[-1] > intervals[0] and (intervals.diff() >= -1).all()


def test_alif_is_that_of_e_prop_but_for_the_scale_of_beta():
    """Bellec et al. 2020: the threshold is `A = v_th + beta a`, then `a = rho a + z`."""
    rho, beta, x = 1.0 - 1.0 / 20.0, 0.5, drive("ALIF").double()
    v, a, spikes = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
    for row in x:
        h = v + (row - v) / 4.0
        z = (h >= 1.0 + beta * a).double()
        v, a = h * (1.0 - z), rho * a + z
        spikes.append(z)
    spikes = torch.stack(spikes)
    neuron = flexsn.ALIF(tau=4.0, tau_adapt=20.0, beta=beta / rho, backend="torch")
    assert torch.equal(neuron(x), spikes) and 0 < spikes.mean() < 1
    torch.testing.assert_close(neuron.states[1], a, rtol=1e-12, atol=1e-12)
    assert not torch.equal(flexsn.ALIF(tau=4.0, tau_adapt=20.0, beta=beta, backend="torch")(x), spikes)


def test_the_dendrite_drives_the_soma():
    quiet, loud = torch.zeros(200, 1), torch.full((200, 1), 6.0)
    neuron = flexsn.TwoCompartmentLIF(backend="torch")
    assert neuron(quiet, loud).sum() > 0
    alone = flexsn.TwoCompartmentLIF(g=0.0, backend="torch")
    assert alone(quiet, loud).sum() == 0
