"""The zoo beside SpikingJelly, snnTorch and Norse: spikes equal, states and gradients to rounding, in float64.

The peers run step by step in plain PyTorch. Where a peer orders its step otherwise, the test says how it is set up to mean the same.
"""

import functools
import warnings

import pytest
import snntorch
import torch
from snntorch import surrogate as snn_surrogate
from spikingjelly.activation_based import neuron as sj
from spikingjelly.activation_based import surrogate as sj_surrogate

import flexsn
from flexsn import surrogate

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".torch.jit")  # Norse uses TorchScript
    import norse.torch as nf
    from norse.torch.functional.izhikevich import IzhikevichParameters, IzhikevichState, izhikevich_feed_forward_step
    from norse.torch.functional.lif_refrac import LIFRefracFeedForwardState, LIFRefracParameters, lif_refrac_feed_forward_step

T, N = 60, 33
EXACT = 1e-12  # of states and gradients, relative to the largest; spikes must be equal


def drive(scale=1.6, shape=(T, N)):
    return scale * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compare(ours, theirs, x, states, *, tolerance=EXACT):
    """`theirs(x)` gives the output and a dict of state sequences; `states` names them in the order of ours."""
    ours.store_state_seqs, ours.backend = True, "torch"  # tests/neurons/test_neurons_fused.py: kernels give what this loop gives
    found = []
    for run in (lambda x: (ours(x), dict(zip(states, ours.state_seqs, strict=True))), theirs):
        leaf = x.clone().requires_grad_()
        y, trail = run(leaf)
        weights = torch.rand(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        grad = torch.autograd.grad((weights * y).sum(), leaf)[0]
        found.append((y, trail, grad))
    (y, trail, grad), (want, want_trail, want_grad) = found
    assert (
        torch.equal(y, want.to(y)) if set(want.unique().tolist()) <= {0.0, 1.0} else torch.allclose(y, want, rtol=tolerance, atol=tolerance)
    )
    assert want.abs().mean() > 0 and want.std() > 0, "the test drives it too little or too much to tell anything"
    assert set(want_trail) == set(states)
    for name, state in want_trail.items():
        size = state.abs().max().item()
        torch.testing.assert_close(trail[name], state, rtol=tolerance, atol=tolerance * size, msg=lambda m, n=name: f"state {n}: {m}")
    assert want_grad.abs().max() > 0
    torch.testing.assert_close(grad, want_grad, rtol=tolerance, atol=tolerance * want_grad.abs().max().item())


# --- SpikingJelly -------------------------------------------------------------------------------------------------------------
def spikingjelly(node, *extra):
    """Its state sequences by name; `v` is the membrane after the reset."""
    node.step_mode = "s"
    node.to(torch.float64)

    def run(x):
        outputs, trail = [], {n: [] for n in ("v", *extra)}
        for row in x:
            outputs.append(node(row))
            for name, seq in trail.items():
                seq.append(getattr(node, name))
        return torch.stack(outputs), {n: torch.stack(seq) for n, seq in trail.items()}

    return run


@pytest.mark.parametrize("v_reset", [0.0, -0.2, None])
@pytest.mark.parametrize("detach", [False, True])
def test_if_of_spikingjelly(v_reset, detach):
    theirs = sj.IFNode(v_reset=v_reset, detach_reset=detach, surrogate_function=sj_surrogate.ATan())
    compare(flexsn.IF(v_reset=v_reset, detach_reset=detach), spikingjelly(theirs), drive(0.9), ["v"])


@pytest.mark.parametrize("v_reset", [0.0, -0.2, None])
@pytest.mark.parametrize("decay_input", [True, False])
def test_lif_of_spikingjelly(v_reset, decay_input):
    """Its membrane leaks towards `v_reset`, ours towards `v_leak`."""
    theirs = sj.LIFNode(tau=3.0, decay_input=decay_input, v_reset=v_reset, surrogate_function=sj_surrogate.Sigmoid())
    ours = flexsn.LIF(tau=3.0, decay_input=decay_input, v_reset=v_reset, v_leak=v_reset or 0.0, surrogate=surrogate.sigmoid)
    compare(ours, spikingjelly(theirs), drive(3.0 if decay_input else 1.0), ["v"])


@pytest.mark.parametrize("decay_input", [True, False])
def test_parametric_lif_of_spikingjelly(decay_input):
    theirs = sj.ParametricLIFNode(init_tau=3.0, decay_input=decay_input, surrogate_function=sj_surrogate.ATan())
    ours = flexsn.ParametricLIF(tau=3.0, decay_input=decay_input).double()
    with torch.no_grad():
        ours.w.copy_(theirs.w)
    compare(ours, spikingjelly(theirs), drive(3.0 if decay_input else 1.0), ["v"])


@pytest.mark.parametrize("scale_reset", [False, True])
@pytest.mark.parametrize("v_reset", [0.0, None])
def test_klif_of_spikingjelly(scale_reset, v_reset):
    theirs = sj.KLIFNode(scale_reset=scale_reset, v_reset=v_reset, surrogate_function=sj_surrogate.ATan())
    with torch.no_grad():
        theirs.k.fill_(0.8)
    ours = flexsn.KLIF(k=torch.tensor(0.8).double().float(), scale_reset=scale_reset, v_reset=v_reset).double()
    compare(ours, spikingjelly(theirs), drive(3.0) - 0.3, ["v"])


def test_gated_lif_of_spikingjelly():
    """With one conductance for all time steps. It keeps the membrane of the last step: that of each is its last one, of a run that ends there."""
    T, C = 20, 3
    theirs = sj.GatedLIFNode(T=T, inplane=C, surrogate_function=sj_surrogate.ATan()).double()
    with torch.no_grad():
        theirs.conduct.copy_(torch.randn(C).expand(T, C))
        for p in (theirs.alpha, theirs.beta, theirs.gamma):
            p.normal_()
    names = {"alpha": "alpha", "beta": "beta", "gamma": "gamma", "tau": "w_decay", "v_threshold": "w_threshold"}
    names |= {"linear_decay": "w_linear", "v_subreset": "w_reset"}
    values = {ours: getattr(theirs, name).detach() for name, ours in names.items()}
    ours = flexsn.GatedLIF(**values, w_conduct=theirs.conduct[0].detach(), per_channel=C)
    x = drive(0.8, (T, 2, C, 4, 4))

    def run(x):
        membranes = []
        for end in range(1, T + 1):
            theirs.reset()
            theirs.T = end
            y = theirs(x[:end])
            membranes.append(theirs.v)
        return y, {"v": torch.stack(membranes), "s": y}

    compare(ours, run, x, ["v", "s"])


def test_cuba_lif_of_spikingjelly():
    theirs = sj.CUBALIFNode(c_decay=0.5, v_decay=0.75, surrogate_function=sj_surrogate.ATan())
    ours = flexsn.CubaLIF(tau=4.0, tau_syn=2.0, v_threshold=0.5, decay_input=False)
    compare(ours, spikingjelly(theirs, "c"), drive(0.25), ["v", "c"])


@pytest.mark.parametrize("v_reset", [-0.1, None])
def test_quadratic_and_exponential_if_of_spikingjelly(v_reset):
    """They start at `v_reset`, ours at rest."""
    start = [v_reset]
    for theirs, ours, scale in (
        (sj.QIFNode, flexsn.QuadraticIF, 2.0 if v_reset else 1.2),
        (sj.EIFNode, flexsn.ExponentialIF, 1.6 if v_reset else 1.0),
    ):
        node = theirs(v_reset=v_reset, surrogate_function=sj_surrogate.ATan())
        compare(ours(v_reset=v_reset, initial_states=start), spikingjelly(node), drive(scale), ["v"])


@pytest.mark.parametrize("v_reset", [0.0, None])
def test_resonate_and_fire_of_spikingjelly(v_reset):
    theirs = sj.RAFNode(v_reset=v_reset, surrogate_function=sj_surrogate.ATan())
    compare(flexsn.ResonateAndFire(v_reset=v_reset), spikingjelly(theirs, "u"), drive(), ["v", "u"])


# --- snnTorch -------------------------------------------------------------------------------------------------------------------
def snntorch_steps(neuron, states):
    def run(x):
        carried = [torch.zeros_like(x[0])] * len(states)
        outputs, trail = [], []
        for row in x:
            y, *carried = neuron(row, *carried)
            outputs.append(y)
            trail.append(carried)
        return torch.stack(outputs), {n: torch.stack(seq) for n, seq in zip(states, zip(*trail, strict=True), strict=True)}

    return run


MECHANISMS = {"subtract": None, "zero": 0.0, "none": "never"}
ABOVE = functools.partial(surrogate.fast_sigmoid, inclusive=False)
SINGLE = 2e-6  # snnTorch's spikes, and what is computed from them, are float32


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_leaky_of_snntorch(mechanism):
    """`beta = 1 - 1 / tau`, no decay of the input, and the reset at once (`reset_delay=False`); by default snnTorch resets one step late.
    Driven so that a soft reset leaves no membrane above threshold, which snnTorch would not count as another spike."""
    theirs = snntorch.Leaky(0.75, reset_mechanism=mechanism, spike_grad=snn_surrogate.fast_sigmoid(), reset_delay=False)
    ours = flexsn.LIF(tau=4.0, v_reset=MECHANISMS[mechanism], decay_input=False, surrogate=ABOVE)
    x = drive(0.9) if mechanism != "none" else drive(0.55)
    compare(ours, snntorch_steps(theirs, ["v"]), x, ["v"], tolerance=SINGLE)


@pytest.mark.parametrize("mechanism", ["subtract", "zero"])
def test_synaptic_of_snntorch(mechanism):
    theirs = snntorch.Synaptic(0.5, 0.75, reset_mechanism=mechanism, spike_grad=snn_surrogate.fast_sigmoid(), reset_delay=False)
    ours = flexsn.Synaptic(tau=4.0, tau_syn=2.0, v_reset=MECHANISMS[mechanism], decay_input=False, surrogate=ABOVE)

    def run(x):
        y, trail = snntorch_steps(theirs, ["i", "v"])(x)
        return y, {"v": trail["v"], "i": trail["i"]}

    compare(ours, run, drive(0.4), ["v", "i"], tolerance=SINGLE)


# --- Norse ----------------------------------------------------------------------------------------------------------------------
SUPER = functools.partial(surrogate.fast_sigmoid, slope=1.0, inclusive=False)  # Norse leaves its `alpha` unused


def norse(step, state, parameters, **names):
    """Norse's step with `dt=1`; `names`: what a state of ours is called there."""

    def run(x):
        outputs, trail, s = [], {n: [] for n in names}, state(torch.zeros_like(x[0]))
        for row in x:
            y, s = step(row, s, parameters, dt=1.0)
            outputs.append(y)
            for name, seq in trail.items():
                seq.append(getattr(s, names[name]))
        return torch.stack(outputs), {n: torch.stack(seq) for n, seq in trail.items()}

    return run


def test_current_based_lif_of_norse():
    """Its current jumps by the input and is stored after its decay, `i = (1 - 1 / tau_syn) (i + x)`: `w_in = tau_syn` here, and ours is the
    current before the decay."""
    p = nf.LIFParameters(tau_mem_inv=0.25, tau_syn_inv=0.5, v_leak=0.0, v_th=1.0, v_reset=-0.1, alpha=100.0)
    theirs = norse(nf.lif_feed_forward_step, lambda z: nf.LIFFeedForwardState(z, z), p, v="v", i="i")
    ours = flexsn.CubaLIF(tau=4.0, tau_syn=2.0, v_reset=-0.1, w_in=2.0, surrogate=SUPER)

    def run(x):
        y, trail = theirs(x)
        return y, {"v": trail["v"], "i": 2.0 * trail["i"]}

    compare(ours, run, drive(1.6), ["v", "i"])


def test_current_based_integrator_of_norse():
    theirs = norse(
        nf.li_feed_forward_step, lambda z: nf.LIState(z, z), nf.LIParameters(tau_mem_inv=0.25, tau_syn_inv=0.5, v_leak=0.1), v="v", i="i"
    )

    def run(x):  # which starts at 0, not at `v_leak`
        y, trail = theirs(x)
        return y, {"v": trail["v"], "i": 2.0 * trail["i"]}

    compare(flexsn.CubaLI(tau=4.0, tau_syn=2.0, w_in=2.0, v_leak=0.1, initial_states=[None, None]), run, drive(1.6), ["v", "i"])


def test_lif_without_synapse_of_norse():
    p = nf.LIFBoxParameters(tau_mem_inv=0.25, v_leak=0.0, v_th=1.0, v_reset=0.0, alpha=100.0)
    theirs = norse(nf.lif_box_feed_forward_step, lambda z: nf.LIFBoxFeedForwardState(z), p, v="v")
    compare(flexsn.LIF(tau=4.0, surrogate=SUPER, detach_reset=False), theirs, drive(4.0), ["v"])


def test_lsnn_of_norse():
    """`tau_syn = 1`: the current is the input of the step before. `b = v_th + beta a`."""
    p = nf.LSNNParameters(tau_syn_inv=1.0, tau_mem_inv=0.25, tau_adapt_inv=0.0625, v_leak=0.0, v_th=1.0, v_reset=0.0, beta=0.4, alpha=100.0)
    theirs = norse(nf.lsnn_feed_forward_step, lambda z: nf.LSNNFeedForwardState(v=z, i=z, b=torch.ones_like(z)), p, v="v", b="b")

    def run(x):
        y, trail = theirs(torch.cat([x, x[:1]]))
        return y[1:], {"v": trail["v"][1:], "a": (trail["b"][1:] - 1.0) / 0.4}

    compare(flexsn.ALIF(tau=4.0, tau_adapt=16.0, beta=0.4, surrogate=SUPER), run, drive(5.0), ["v", "a"])


def test_exponential_lif_of_norse():
    """Its exponential takes off at the threshold."""
    p = nf.LIFExParameters(delta_T=0.5, tau_syn_inv=1.0, tau_mem_inv=0.25, v_leak=0.0, v_th=1.0, v_reset=0.0, alpha=100.0)
    theirs = norse(nf.lif_ex_feed_forward_step, lambda z: nf.LIFExFeedForwardState(z, z), p, v="v")
    compare(flexsn.ExponentialIF(tau=4.0, delta_t=0.5, v_rh=1.0, v_reset=0.0, surrogate=SUPER), theirs, drive(3.0), ["v"])


def test_adaptive_exponential_lif_of_norse():
    p = nf.LIFAdExParameters(
        adaptation_current=0.5, adaptation_spike=0.3, delta_T=0.5, tau_ada_inv=0.125, tau_syn_inv=1.0, tau_mem_inv=0.25, v_leak=0.0, v_th=1.0,
        v_reset=0.0, alpha=100.0,
    )  # fmt: skip
    theirs = norse(nf.lif_adex_feed_forward_step, lambda z: nf.LIFAdExFeedForwardState(z, z, z), p, v="v", w="a")
    ours = flexsn.AdEx(
        c_m=4.0,
        g_leak=1.0,
        v_leak=0.0,
        v_rh=1.0,
        delta_t=0.5,
        tau_w=8.0,
        a=0.5,
        b=0.3,
        v_threshold=1.0,
        v_reset=0.0,
        dt=1.0,
        surrogate=SUPER,
    )
    compare(ours, theirs, drive(4.0), ["v", "w"])


def test_izhikevich_of_norse():
    p = IzhikevichParameters(a=0.02, b=0.2, c=-65.0, d=8.0, tau_inv=0.5)
    theirs = norse(izhikevich_feed_forward_step, lambda z: IzhikevichState(z - 65.0, z - 13.0), p, v="v", u="u")
    compare(flexsn.Izhikevich(dt=0.5, surrogate=SUPER), theirs, drive(30.0, (300, N)), ["v", "u"], tolerance=1e-10)


def test_refractory_lif_of_norse():
    """Its counter of refractory steps is detached: gradients of Norse's also flow through it."""
    p = LIFRefracParameters(nf.LIFParameters(tau_mem_inv=0.25, tau_syn_inv=1.0, v_leak=0.0, v_th=1.0, v_reset=0.0, alpha=100.0), 3.0)

    def run(x):
        zero = torch.zeros_like(x[0])
        s, outputs, trail = LIFRefracFeedForwardState(nf.LIFFeedForwardState(zero, zero), zero), [], {"v": [], "q": []}
        for row in x:
            y, s = lif_refrac_feed_forward_step(row, s, p, dt=1.0)
            s = s._replace(rho=s.rho.detach())
            outputs.append(y)
            trail["v"].append(s.lif.v)
            trail["q"].append(s.rho)
        return torch.stack(outputs), {n: torch.stack(seq) for n, seq in trail.items()}

    compare(flexsn.RefractoryLIF(tau=4.0, refractory=3.0, surrogate=SUPER), run, drive(5.0), ["v", "q"])
