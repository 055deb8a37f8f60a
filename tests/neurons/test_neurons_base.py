"""`Neuron`: arguments, learned and per channel, initial states, attributes, copies, compiled calls."""

import copy
import inspect
import io
import math
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import flexsn
from flexsn import neurons, surrogate
from flexsn.errors import ArgumentError

X = 2 * torch.rand(9, 3, 4, generator=torch.Generator().manual_seed(0))
EAGER = {"backend": "torch"}  # where the kernel is not the point: that is tests/neurons/test_neurons_fused.py


def test_arguments_are_those_of_the_core():
    parameters = inspect.signature(flexsn.LIF).parameters
    core = inspect.signature(neurons.lif).parameters
    assert [n for n in core if n not in ("x", "v")] == list(parameters)[: len(core) - 2]
    assert parameters["tau"].default == 2.0 and parameters["learn"].kind is inspect.Parameter.KEYWORD_ONLY
    neuron = flexsn.LIF(3.0, v_reset=None)
    assert neuron.arguments == {n: p.default for n, p in core.items() if p.default is not p.empty} | {"tau": 3.0, "v_reset": None}
    assert neuron.state_names == ("v",) and "tau=3.0, v_threshold=1.0, v_reset=None" in repr(neuron)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", [n for n in neurons.__all__ if isinstance(getattr(neurons, n), type) and n not in ("Neuron", "Bounded")])
def test_bools_are_spikes(name, backend):
    """Of neurons with several inputs each may be."""
    neuron = getattr(neurons, name)(backend=backend, stateful=False)
    spikes = [torch.rand(6, 3) < 0.5 for _ in range(neuron.num_inputs)]
    want = neuron(*[x.float() for x in spikes])
    assert torch.equal(neuron(*spikes), want) and want.dtype == torch.float32
    assert torch.equal(neuron.to(torch.float64)(*spikes), neuron(*[x.float() for x in spikes]))
    if neuron.num_inputs > 1:
        assert torch.equal(neuron(spikes[0], *[x.double() for x in spikes[1:]]), neuron(*[x.double() for x in spikes]))


@pytest.mark.parametrize(("given", "here"), [("beta", "tau"), ("threshold", "v_threshold"), ("spike_grad", "surrogate")])
def test_arguments_that_other_libraries_call_otherwise(given, here):
    with pytest.raises(ArgumentError, match=given) as caught:
        flexsn.LIF(**{given: 0.9})
    assert f"`{here}" in str(caught.value)


def test_a_decay_is_a_time_constant():
    """As the error for `beta` says."""
    beta, v, want = 0.75, torch.zeros(3, 4), []
    for x in X:
        v = beta * v + x
        want.append((v >= 1.0).float())
        v = v - want[-1]
    tau = 1 / (1 - beta)
    assert torch.equal(flexsn.LIF(tau=tau, r=tau, v_reset=None)(X), torch.stack(want))


def test_what_is_shown_of_a_neuron():
    """Its values, however they came to it."""
    for neuron in (flexsn.LIF(), pickle.loads(pickle.dumps(flexsn.LIF())), flexsn.LIF(v_leak=0, r=1)):
        assert repr(neuron).startswith("LIF(tau=2.0, v_threshold=1.0, v_reset=0.0, step_mode=")
    assert "v_leak=0.5, step_mode=" in repr(flexsn.LIF(v_leak=0.5))


def test_the_module_is_the_core():
    want = flexsn.scan(neurons.lif, [X], [None], [torch.tensor(3.0), torch.tensor(0.5)], backend="torch").outputs[0]
    assert torch.equal(flexsn.LIF(tau=3.0, v_threshold=0.5)(X), want) and 0 < want.mean() < 1


def test_mistakes():
    with pytest.raises(TypeError, match=r"LIF has no argument \['taux'\]; it takes tau, v_threshold"):
        flexsn.LIF(taux=2.0)
    with pytest.raises(TypeError, match=r"\['tau'\] twice"):
        flexsn.LIF(2.0, tau=2.0)
    with pytest.raises(TypeError, match="takes 5 arguments but was given 6"):
        flexsn.IF(1, 2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match="tau must be positive"):
        flexsn.LIF(tau=0.0)
    with pytest.raises(ValueError, match="cannot learn"):
        flexsn.LIF(learn=("v",))
    with pytest.raises(ValueError, match="v_reset=None is not a number"):
        flexsn.LIF(v_reset=None, learn=("v_reset",))
    with pytest.raises(ValueError, match="nothing is learned"):
        flexsn.LIF(per_channel=4)
    with pytest.raises(ValueError, match=r"takes a number or a tensor \[4\]"):
        flexsn.LIF(tau=torch.ones(3), per_channel=4)
    with pytest.raises(ValueError, match='"never"'):
        flexsn.LIF(v_reset="nope")
    for wrong in (
        {"tau": "2"},
        {"tau": None},
        {"tau": float("nan")},
        {"v_threshold": [1.0]},
        {"detach_reset": "no"},
        {"surrogate": "atan"},
    ):
        with pytest.raises(flexsn.errors.ArgumentError, match=f"LIF: {next(iter(wrong))} must be"):
            flexsn.LIF(**wrong)
    with pytest.raises(flexsn.errors.ArgumentError, match="no time constant"):
        flexsn.IF(learn_tau=True)
    neuron = flexsn.LIF(learn="tau")
    assert [*dict(neuron.named_parameters())] == ["tau"]
    with pytest.raises(flexsn.errors.ArgumentError, match="v_threshold must be"):
        neuron.v_threshold = "high"
    with pytest.raises(flexsn.errors.ShapeMismatchError, match="per_channel=4, but an input has steps of shape"):
        flexsn.LIF(learn_tau=True, per_channel=4)(torch.rand(20, 4, 6))
    for x, error in (
        (torch.rand(5, 3).numpy(), "OperandTypeError"),
        ([1.0], "OperandTypeError"),
        (torch.tensor(1.0), "SequenceLengthError"),
    ):
        with pytest.raises(getattr(flexsn.errors, error)):
            flexsn.LIF()(x)


NUMBERS = [numpy.float32(3.0), numpy.float64(3.0), numpy.int64(3), numpy.array(3.0)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: type(n).__name__)
def test_numbers_of_numpy_are_numbers(number):
    want = flexsn.LIF(tau=3.0, **EAGER)(X)
    neuron = flexsn.LIF(**EAGER)
    neuron.tau = number
    assert type(neuron.tau) in (int, float) and torch.equal(neuron(X), want) and want.any()
    assert torch.equal(flexsn.LIF(tau=number, **EAGER)(X), want)
    assert torch.equal(flexsn.LIF(tau=number, learn_tau=True, **EAGER)(X), want)
    assert torch.equal(flexsn.ParametricLIF(tau=number, **EAGER)(X), flexsn.ParametricLIF(tau=3.0, **EAGER)(X))


def test_an_array_is_told_to_become_a_tensor():
    for make in (flexsn.LIF, flexsn.ParametricLIF):
        with pytest.raises(
            ArgumentError, match=r"tau must be a number or a tensor.*\n  Pass `torch.as_tensor\(tau, dtype=torch.float32\)`"
        ):
            make(tau=numpy.full(4, 2.0))
    with pytest.raises(ArgumentError, match="v_reset must be a number, a tensor"):
        flexsn.LIF(v_reset=numpy.zeros(4))


BAD_TAU = [
    0,
    0.0,
    -1.0,
    float("nan"),
    torch.tensor(0.0),
    torch.tensor([2.0, -1.0]),
    torch.tensor([2.0, float("nan")]),
    "2",
    None,
    True,
    [2.0],
    2j,
    torch.tensor(2j),
]


@pytest.mark.parametrize("bad", BAD_TAU, ids=repr)
def test_a_time_constant_is_positive_from_the_start_and_ever_after(bad):
    for make in (flexsn.LIF, flexsn.ParametricLIF):
        with pytest.raises(ArgumentError, match=f"{make.__name__}: tau must be"):
            make(tau=bad)
    neuron = flexsn.LIF()
    with pytest.raises(ArgumentError, match="LIF: `tau` is a constant" if isinstance(bad, torch.Tensor) else "LIF: tau must be"):
        neuron.tau = bad
    assert neuron.tau == 2.0


def test_what_a_formula_divides_by_is_positive():
    found = 0
    for make in vars(neurons).values():
        for argument in getattr(make, "defaults", {}) if isinstance(make, type) else ():
            if argument.startswith("tau") or argument in ("c_m", "delta_t", "dt"):
                found += 1
                with pytest.raises(ArgumentError, match=f"{make.__name__}: {argument} must be positive"):
                    make(**{argument: 0.0})
    assert found > 25


def test_on_the_meta_device_values_are_not_asked():
    with torch.device("meta"):
        assert flexsn.LIF(tau=torch.ones(3), learn_tau=True).tau.is_meta and flexsn.ParametricLIF(tau=3.0).w.is_meta


def test_parametric_lif_takes_tau_in_place_of_w():
    parameters = inspect.signature(flexsn.ParametricLIF).parameters
    assert [*parameters][:2] == ["tau", "v_threshold"] and parameters["learn_tau"].default is True
    for options in ({}, {"learn_tau": True}, {"learn": "tau"}, {"learn": ("tau", "v_threshold")}):
        neuron = flexsn.ParametricLIF(tau=3.0, **options)
        names = {n for n, _ in neuron.named_parameters()}
        assert names == {"w"} | ({"v_threshold"} if "v_threshold" in options.get("learn", ()) else set())
        torch.testing.assert_close(neuron.tau, torch.tensor(3.0))
    with pytest.raises(ArgumentError, match="makes its own `w`"):
        flexsn.ParametricLIF(w=0.0)
    for value in (3.0, nn.Parameter(torch.tensor(3.0))):
        with pytest.raises(ArgumentError, match="`tau` follows from the parameter `w`"):
            neuron.tau = value


def test_options_that_are_no_options():
    for wrong in ("4", 0, -1, 4.0, True):
        with pytest.raises(ArgumentError, match="per_channel must be the number of channels"):
            flexsn.LIF(learn_tau=True, per_channel=wrong)
    for wrong in (5, True, None, [3], {"tau": True}):
        with pytest.raises(ArgumentError, match="learn must be names"):
            flexsn.LIF(learn=wrong)
    with pytest.raises(ArgumentError, match="surrogate must be a function"):
        flexsn.LIF(surrogate=nn.Sigmoid)
    with pytest.raises(ArgumentError, match=r"ParametricLIF learns its time constant in any case\n.*`flexsn.LIF\(tau=...\)`"):
        flexsn.ParametricLIF(learn_tau=False)


@pytest.mark.parametrize("channels", [numpy.int64(4), numpy.int32(4), numpy.array(4)], ids=lambda n: type(n).__name__)
def test_channels_may_be_a_number_of_numpy(channels):
    neuron = flexsn.LIF(learn_tau=True, per_channel=channels, **EAGER)
    assert type(neuron.per_channel) is int and neuron(torch.rand(5, 2, 4, 3)).shape == (5, 2, 4, 3)


def test_what_is_counted_is_not_learned():
    for options in ({"learn": "refractory"}, {"learn": ("tau", "refractory")}, {"refractory": nn.Parameter(torch.tensor(2.0))}):
        with pytest.raises(ArgumentError, match="RefractoryLIF cannot learn `refractory`: no spike has a gradient by it"):
            flexsn.RefractoryLIF(**options)
    neuron = flexsn.RefractoryLIF(refractory=torch.tensor([1.0, 2.0, 3.0]), per_channel=3, learn_tau=True, **EAGER)
    assert {n for n, _ in neuron.named_parameters()} == {"tau"}


@pytest.mark.parametrize("k", [0, 0.0, torch.tensor(0.0), torch.tensor([0.5, 0.0])], ids=repr)
def test_a_gain_of_nothing_is_refused(k):
    """The membrane would be `relu(0 h)`, whose gradient by `k` is 0 too; with `scale_reset`, NaN."""
    for scale_reset in (False, True):
        with pytest.raises(ArgumentError, match="KLIF: k must not be 0"):
            flexsn.KLIF(k=k, scale_reset=scale_reset)
    assert flexsn.KLIF(k=-0.5).k == -0.5


def test_an_integer_tensor_that_is_learned_becomes_a_float():
    neuron = flexsn.LIF(tau=torch.tensor(3), learn_tau=True, **EAGER)
    assert neuron.tau.dtype is torch.get_default_dtype() and neuron.tau.requires_grad
    assert torch.equal(neuron(X), flexsn.LIF(tau=3.0, **EAGER)(X))
    assert flexsn.LIF(tau=torch.tensor(3), **EAGER).tau.dtype is torch.int64


@pytest.mark.parametrize("shapes", [((9, 2, 4, 5), (9, 2, 4)), ((9, 2, 4), (9, 2, 4, 5)), ((9,), (9, 2, 4, 4))], ids=str)
def test_inputs_of_a_layer_per_channel_have_as_many_dims(shapes):
    neuron = flexsn.TwoCompartmentLIF(learn_tau=True, per_channel=4, **EAGER)
    x, x_dend = map(torch.rand, shapes)
    with pytest.raises(flexsn.errors.ShapeMismatchError, match=r"per_channel=4, but inputs have steps of shapes .*\n.*as many dimensions"):
        neuron(x, x_dend)
    assert neuron(torch.rand(9, 2, 4, 5), torch.rand(9, 2, 4, 1)).shape == (9, 2, 4, 5)


def test_learned_arguments():
    neuron = flexsn.LIF(tau=3.0, learn_tau=True, learn=("v_threshold",), **EAGER)
    assert {n: p.shape for n, p in neuron.named_parameters()} == {"tau": (), "v_threshold": ()}
    assert isinstance(neuron.tau, nn.Parameter) and neuron.tau.item() == 3.0
    neuron(X).sum().backward()
    assert neuron.tau.grad != 0 and neuron.v_threshold.grad != 0
    assert {n for n, _ in flexsn.CubaLIF(learn_tau=True, **EAGER).named_parameters()} == {"tau", "tau_syn"}


def test_a_tensor_is_a_buffer_and_a_parameter_stays_itself():
    tau, threshold = torch.full((4,), 3.0), nn.Parameter(torch.full((3, 1), 0.5))
    neuron = flexsn.LIF(tau=tau, v_threshold=threshold, **EAGER)
    assert neuron.v_threshold is threshold and dict(neuron.named_buffers()).keys() == {"tau"}
    assert torch.equal(neuron(X), flexsn.LIF(tau=3.0, v_threshold=0.5, **EAGER)(X))


@pytest.mark.parametrize("shape", [(7, 4), (7, 2, 4), (7, 2, 4, 3), (7, 2, 4, 3, 5)], ids=str)
@pytest.mark.parametrize("step_mode", ["m", "s"])
def test_per_channel_is_dim_1_of_a_step(shape, step_mode):
    backend = "cpp" if len(shape) == 4 and step_mode == "m" else "torch"
    x, tau = 2 * torch.rand(shape), torch.linspace(1.5, 4.0, 4)
    layer = flexsn.LIF(tau=tau, learn_tau=True, per_channel=4, v_leak=0.25, step_mode=step_mode, backend=backend)
    got = torch.stack([layer(row) for row in x]) if step_mode == "s" else layer(x)
    axis = 1 if len(shape) == 2 else 2
    for c in range(4):
        one = flexsn.LIF(tau=tau[c].item(), v_leak=0.25, **EAGER)
        assert torch.equal(got.select(axis, c), one(x.select(axis, c).contiguous()))
    got.sum().backward()
    assert layer.tau.grad.shape == (4,) and layer.tau.grad.all()


def test_per_channel_start():
    leak = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    layer = flexsn.LeakyIntegrator(v_leak=leak, per_channel=4, **EAGER)
    y = layer(torch.zeros(3, 2, 4, 5))
    assert torch.equal(y, leak.view(4, 1).expand(3, 2, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_channel", [None, 3])
def test_learned_start(dtype, per_channel):
    neuron = flexsn.LeakyIntegrator(v_leak=0.5, learn=("v_leak",), per_channel=per_channel, backend="torch")
    y = neuron(torch.zeros(4, 2, 3, dtype=dtype))
    assert y.dtype is (dtype if per_channel is None else torch.promote_types(dtype, torch.float32)) and (y == 0.5).all()
    y.sum().backward()
    assert torch.equal(neuron.v_leak.grad, torch.tensor(24.0) if per_channel is None else torch.full((3,), 8.0))


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_neurons_start_at_rest(backend):
    silence = torch.zeros(4, 3)
    for neuron in (flexsn.LIF(v_leak=-0.5, v_reset=-0.7), flexsn.CubaLIF(v_leak=-0.5), flexsn.IF(v_reset=-0.5), flexsn.CubaLI(v_leak=-0.5)):
        neuron.backend = backend
        for _ in range(2):
            neuron(silence)
            assert torch.equal(neuron.states[0], torch.full((3,), -0.5)), neuron
            neuron.reset()
    for reset in (None, "never"):
        neuron = flexsn.IF(v_reset=reset, backend=backend)
        neuron(silence)
        assert torch.equal(neuron.states[0], torch.zeros(3))
    neuron = flexsn.LIF(v_leak=-0.5, initial_states=[0.5], backend=backend)
    neuron(silence)
    assert torch.equal(neuron.states[0], torch.full((3,), -0.5 + 2.0**-4))


def test_resets():
    drive = torch.full((6, 1), 0.75)
    for v_reset, membrane in ((0.0, [0.75, 0, 0.75, 0, 0.75, 0]), (0.25, [1.0 - 1.0 + 0.25] * 6), (None, [0.75, 0.5, 0.25, 0, 0.75, 0.5])):
        neuron = flexsn.IF(v_reset=v_reset, store_state_seqs=True, **EAGER)
        neuron(drive)
        assert neuron.state_seqs[0].flatten().tolist() == membrane
    neuron = flexsn.IF(v_reset="never", store_state_seqs=True, **EAGER)
    assert neuron(drive).flatten().tolist() == [0, 1, 1, 1, 1, 1] and neuron.state_seqs[0][-1] == 4.5


def test_detached_reset_changes_the_gradient_alone():
    grads = []
    for detach in (False, True):
        x = X.clone().requires_grad_()
        y = flexsn.LIF(detach_reset=detach, **EAGER)(x)
        y.sum().backward()
        grads.append((y, x.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and not torch.equal(grads[0][1], grads[1][1])


def test_attributes_can_be_set():
    neuron = flexsn.LIF(tau=3.0, learn_tau=True, **EAGER)
    twin = copy.deepcopy(neuron)
    neuron.v_threshold = 0.25
    assert torch.equal(neuron(X), flexsn.LIF(tau=3.0, v_threshold=0.25, **EAGER)(X)) and twin.v_threshold == 1.0
    assert torch.equal(twin(X), flexsn.LIF(tau=3.0, **EAGER)(X))
    for value in (2.0, torch.tensor(2.0), "2"):
        with pytest.raises(ArgumentError, match=r"`tau` is a tensor of this neuron\n  Write into it, .*neuron.tau.copy_"):
            neuron.tau = value
    for value, instead in ((torch.ones(4), r"LIF\(v_threshold=...\)"), (nn.Parameter(torch.ones(4)), 'learn="v_threshold"')):
        with pytest.raises(ArgumentError, match=f"`v_threshold` is a constant of this neuron\n  Make a neuron .*{instead}"):
            neuron.v_threshold = value
    with pytest.raises(ArgumentError, match="`surrogate` is a constant"):
        neuron.surrogate = nn.Identity()
    assert neuron.surrogate is surrogate.atan and neuron.v_threshold == 0.25
    with pytest.raises(ArgumentError, match="tau must be positive"):
        neuron.tau = nn.Parameter(torch.tensor(-2.0))
    neuron.tau = nn.Parameter(torch.tensor(2.5))  # as of any module
    neuron.reset()
    assert torch.equal(neuron(X), flexsn.LIF(tau=2.5, v_threshold=0.25, **EAGER)(X)) and [*neuron.parameters()] == [neuron.tau]
    with torch.no_grad():
        neuron.tau.copy_(1.5)
    neuron.reset()
    assert torch.equal(neuron(X), flexsn.LIF(tau=1.5, v_threshold=0.25, **EAGER)(X))


def test_copies_pickles_and_state_dicts():
    neuron = flexsn.LIF(tau=3.0, learn_tau=True, per_channel=3, v_leak=0.1, **EAGER)
    want = neuron(X.transpose(1, 2))
    other = flexsn.LIF(learn_tau=True, per_channel=3, v_leak=0.1, **EAGER)
    other.load_state_dict(neuron.state_dict())
    buffer = io.BytesIO()
    torch.save(neuron, buffer)
    buffer.seek(0)
    for twin in (other, copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron)), torch.load(buffer, weights_only=False)):
        twin.reset()
        assert torch.equal(twin(X.transpose(1, 2)), want) and twin.tau is not neuron.tau
    double = copy.deepcopy(neuron).double()
    double.reset()
    assert double.tau.dtype is torch.float64 and double(X.transpose(1, 2).double()).dtype is torch.float64


def test_a_module_as_surrogate_is_a_submodule():
    class Spike(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return surrogate.atan(x / self.width)

    neuron = flexsn.LIF(surrogate=Spike(), **EAGER)
    neuron(X).sum().backward()
    assert {n for n, _ in neuron.named_parameters()} == {"surrogate.width"} and neuron.surrogate.width.grad != 0


@pytest.mark.filterwarnings(  # PyTorch's own
    "ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated", "ignore:.*should not be instantiated"
)
@pytest.mark.parametrize("backend", ["cpp", pytest.param("torch", marks=pytest.mark.slow)])
def test_compiled(backend):
    for options in ({"v_leak": 0.5, "v_reset": None}, {"tau": 3.0, "learn_tau": True, "per_channel": 3, "v_leak": 0.25}):
        if backend == "torch":  # PyTorch's scan takes no number that was another one in an earlier compilation
            torch._dynamo.reset()
        neuron = flexsn.LIF(**options, backend=backend)
        compiled, x = torch.compile(neuron, fullgraph=True, backend="aot_eager"), X.transpose(1, 2)
        got = [compiled(x), compiled(x)]
        neuron.reset()
        assert torch.equal(got[0], neuron(x)) and torch.equal(got[1], neuron(x))


def test_equal_neurons_share_a_kernel(counts):
    flexsn.LIF(tau=7.0, backend="cpp")(X)
    flexsn.LIF(tau=7.0, backend="cpp")(X)
    assert counts.programs == 1


def test_network_helpers_reach_neurons():
    net = nn.Sequential(flexsn.LIF(**EAGER), flexsn.CubaLIF(**EAGER))
    first = net(X)
    flexsn.reset_net(net)
    assert torch.equal(net(X), first)
    flexsn.detach_states(net)
    assert not net[1].states[0].requires_grad


def test_one_tensor_for_two_arguments():
    made = lambda: flexsn.CubaLI(tau=(tau := torch.tensor(2.5)), tau_syn=tau, stateful=False)
    want, eight = flexsn.CubaLI(tau=8.0, tau_syn=8.0, stateful=False)(X), torch.tensor(8.0)
    torch.testing.assert_close(torch.func.functional_call(made(), {"tau": eight}, (X,)), want)
    assigned, cast = made(), copy.deepcopy(made()).double().float()
    assigned.load_state_dict({"tau": eight}, assign=True)
    cast.tau.fill_(8.0)
    for neuron in (assigned, cast):
        torch.testing.assert_close(neuron(X), want)
        assert neuron.tau_syn is neuron.tau
    with pytest.raises(ArgumentError, match="`tau_syn` is a tensor of this neuron"):
        cast.tau_syn = 3.0


def test_a_neuron_keeps_its_core():
    neuron = flexsn.LIF()
    with pytest.raises(ArgumentError, match=r"LIF has a core of its own(.|\n)*flexsn\.FlexSN"):
        neuron.core = lambda x, v: (x, v)
    assert "tau=2.0" in repr(neuron)


def test_arguments_set_inside_a_compiled_function_hold_at_once():
    layer, x = flexsn.LIF(stateful=False), 2.5 * torch.rand(20, 4, 8)

    @torch.compile(fullgraph=True, backend="eager")
    def step(x):
        layer.v_threshold = layer.v_threshold / 2
        return layer(x)

    for threshold in (0.5, 0.25, 0.125):
        y = step(x)
        assert layer.v_threshold == threshold
        assert torch.equal(y, flexsn.LIF(v_threshold=threshold, stateful=False)(x))


def test_arguments_are_properties_of_subclasses_too():
    class Bounded(flexsn.LIF):
        @flexsn.LIF.v_threshold.setter
        def v_threshold(self, value):
            flexsn.LIF.v_threshold.fset(self, min(value, 2.0))

    layer = Bounded()
    layer.v_threshold = 5.0
    assert layer.v_threshold == 2.0 and layer.core.keywords["v_threshold"] == 2.0


# --- bounds --------------------------------------------------------------------------------------------------------------------
PAIRS = [(1.0, None), (None, 5.0), (1.0, 5.0)]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.Adam])
def test_a_bounded_constant_stays_between_its_bounds_and_comes_back(made, pair):
    """Driven against a bound, and then away from it: its gradient is never zero."""
    low, high = pair[0] or -math.inf, pair[1] or math.inf
    for bound, towards in ((low, -1.0), (high, 1.0)):
        neuron = flexsn.LIF(tau=3.0, learn_tau=True, bounds={"tau": pair})
        (z,) = neuron.parameters()
        optimizer = made([z], lr=0.3)
        for direction, steps in ((towards, 100), (-towards, 200)):
            for _ in range(steps if math.isfinite(bound) else 0):
                optimizer.zero_grad()
                (-10.0 * direction * neuron.tau).backward()
                assert z.grad.abs() > 0
                optimizer.step()
                assert low <= neuron.tau <= high
            if direction == towards and math.isfinite(bound):
                assert abs(neuron.tau - bound) < 0.1
        assert abs(neuron.tau - bound) > 1.9


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_gradients_of_bounds(pair):
    bounded = neurons.Bounded(*pair)
    value = torch.tensor([1.001, 2.0, 4.9], dtype=torch.float64)
    z = bounded.right_inverse(value)
    torch.testing.assert_close(bounded(z), value)
    assert torch.autograd.gradcheck(bounded, (z.requires_grad_(),))
    for extreme in (-60.0, 17.0, 60.0):  # where a sigmoid in float32 is 0 or 1
        z = torch.tensor(extreme, requires_grad=True)
        assert torch.autograd.grad(bounded(z), z)[0] != 0


def test_a_conductance_cannot_become_negative():
    """A fit of a Hodgkin-Huxley neuron to a voltage that pulls the leak down: without bounds its conductance becomes negative, and the
    fit is lost."""
    x, ends = torch.full((40, 2), 5.0), []
    for bounds in (None, {"g_leak": (0.0, None)}):
        neuron = flexsn.HodgkinHuxley(learn="g_leak", bounds=bounds, stateful=False, store_state_seqs=True, dt=0.05)
        optimizer = torch.optim.SGD(neuron.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            neuron(x)
            neuron.state_seqs[0].mean().backward()
            optimizer.step()
        ends.append(neuron.g_leak.item())
    assert not ends[0] > 0 and 0 < ends[1] < 0.3  # the first is NaN by now


def test_bounded_neurons_are_neurons():
    """Copies, state dicts, kernels, compiled calls, exports, transforms."""

    def make():
        return flexsn.LIF(tau=3.0, learn=("tau", "v_leak"), bounds={"tau": (1.0, None)}, stateful=False, strict=True)

    neuron, plain = make(), flexsn.LIF(tau=3.0, learn=("tau", "v_leak"), stateful=False)
    assert torch.equal(neuron(X), plain(X)) and "tau=3 (learned)" in repr(neuron)
    assert dict(neuron.named_parameters()).keys() == {"v_leak", "parametrizations.tau.original"}
    neuron.tau = torch.tensor(4.0)
    twin, loaded = copy.deepcopy(neuron), make()
    loaded.load_state_dict(neuron.state_dict())
    want = flexsn.LIF(tau=4.0, stateful=False)(X)
    for other in (neuron, twin, loaded, torch.export.export(neuron, (X,)).module()):
        torch.testing.assert_close(other(X), want)
    with torch.no_grad():
        twin.parametrizations.tau.original.fill_(0.0)
    assert abs(neuron.tau - 4.0) < 1e-5 and abs(twin.tau - 1.6931) < 1e-3
    params = dict(neuron.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(neuron, p, (X,)).mean())(params)
    neuron(X).mean().backward()
    for name, p in params.items():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")  # of a module that Inductor imports
@pytest.mark.slow
def test_a_compiled_neuron_with_bounds():
    found = []
    for run in (lambda net: net, lambda net: torch.compile(net, fullgraph=True)):
        neuron = flexsn.LIF(tau=3.0, learn_tau=True, bounds={"tau": (1.0, 9.0)}, stateful=False)
        run(neuron)(X).mean().backward()
        found += [p.grad for p in neuron.parameters()]
    torch.testing.assert_close(*found)


def test_per_channel_bounds():
    neuron = flexsn.LIF(tau=torch.tensor([2.0, 3.0, 4.0, 5.0]), learn_tau=True, per_channel=4, bounds={"tau": (1, 10)})
    want = flexsn.LIF(tau=torch.tensor([2.0, 3.0, 4.0, 5.0]), per_channel=4)
    torch.testing.assert_close(neuron(X), want(X))


def test_mistakes_with_bounds():
    for message, arguments in (
        (r"bounds are of what is learned, and \['tau'\] are not\n.*learn=\('tau',\)", {"bounds": {"tau": (1, None)}}),
        ("bounds must be pairs by name", {"learn_tau": True, "bounds": {"tau": 1.0}}),
        ("bounds must be pairs by name", {"learn_tau": True, "bounds": [1.0, None]}),
        ("low < high", {"learn_tau": True, "bounds": {"tau": (3.0, 1.0)}}),
        (r"not \(None, None\)", {"learn_tau": True, "bounds": {"tau": (None, None)}}),
        ("2.0 is not between the bounds 2.0 and inf", {"learn_tau": True, "bounds": {"tau": (2.0, None)}}),
    ):
        with pytest.raises(ArgumentError, match=message):
            flexsn.LIF(**arguments)
    neuron = flexsn.LIF(learn_tau=True, bounds={"tau": (1.0, None)})
    with pytest.raises(ArgumentError, match="is not between"):
        neuron.tau = torch.tensor(0.5)
    with pytest.raises(ArgumentError, match=r"torch\.full_like"):
        neuron.tau = 3.0


# --- rest ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in neurons.__all__ if isinstance(getattr(neurons, n), type) and n not in ("Neuron", "Bounded")])
def test_a_call_from_rest_is_the_first_call(name):
    for step_mode, dtype in (("m", torch.float32), ("s", torch.float32), ("m", torch.float64)):
        neuron = getattr(neurons, name)(backend="torch", step_mode=step_mode).to(dtype)
        xs = [2 * torch.rand(5, 3, 4, dtype=dtype) for _ in range(neuron.num_inputs)]
        want = neuron(*xs)
        states = neuron.rest(*(xs[0].shape if step_mode == "s" else xs[0].shape[1:]))
        assert len(states) == len(neuron.state_names) and {v.shape for v in states} == {v.shape for v in neuron.states}
        neuron.states = [v.to(dtype) for v in states]
        assert torch.equal(neuron(*xs), want)


def test_rest_is_where_the_neuron_starts():
    (v,) = flexsn.LIF(v_leak=-65.0).rest()
    assert v.shape == () and v == -65.0 and v.dtype == torch.float32
    assert all(torch.equal(a, torch.zeros(3, 2)) for shape in ([3, 2], (3, 2), torch.Size([3, 2])) for a in flexsn.LIF().rest(shape))
    (v,) = flexsn.LIF(v_leak=torch.tensor([1.0, 2.0]), per_channel=2, learn="v_leak").double().rest(3, 2, 4)
    assert v.shape == (3, 2, 4) and v.dtype == torch.float64 and v.requires_grad and v[0, :, 0].tolist() == [1.0, 2.0]
    v, a = flexsn.ALIF(initial_states=[0.5, None]).rest(3)
    assert v.tolist() == [0.5] * 3 and a.tolist() == [0.0] * 3
    assert flexsn.LIF(initial_states=lambda x: [x[0] + 0.25]).rest(2)[0].tolist() == [0.25] * 2
    v, *gates = flexsn.HodgkinHuxley().rest(2)
    assert v.tolist() == [-65.0] * 2 and [round(g[0].item(), 3) for g in gates] == [0.053, 0.596, 0.318]
    v.add_(1.0)
    assert flexsn.HodgkinHuxley().rest(2)[0].tolist() == [-65.0] * 2


def test_a_core_of_ones_own_is_bounded():
    w = nn.Parameter(torch.tensor(0.5))
    neuron = flexsn.FlexSN(lambda x, v: (x * w + v, v * w), num_states=1, stateful=False)
    want = neuron(X)
    parametrize.register_parametrization(neuron, "w", neurons.Bounded(0.0, 1.0))
    assert torch.equal(neuron(X), want) and abs(neuron.parametrizations.w.original) < 1e-6
