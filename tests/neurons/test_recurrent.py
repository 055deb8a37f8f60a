"""`flexsn.Recurrent`: a neuron that also takes what it gave at the step before."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import flexsn
from flexsn.errors import ArgumentError, FallbackWarning, ShapeMismatchError

f64 = torch.float64


@pytest.fixture(autouse=True)
def no_fallback():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def by_hand(layer, x, outputs=1):
    """The equation, step by step: `y[t] = neuron(x[t] + mixing(y[t - 1]))`."""
    neuron, y, found = layer.neuron, torch.zeros_like(x[0]), []
    states = [x.new_zeros(x[0].shape) if v is None else v for v in neuron.start_states(x)]
    for step in x.unbind(0):
        returned = neuron.core(step + layer.mixing(y), *states)
        y, states = returned[0], returned[outputs:]
        found.append(y)
    return torch.stack(found)


def layer_of(neuron=None, **options):
    return flexsn.Recurrent(neuron or flexsn.LIF(learn_tau=True), nn.Linear(6, 6), **options)


def sequence(*shape, T=9):
    return torch.randn(T, *(shape or (3, 6))) * 2


LAYERS = {
    "lif": lambda: layer_of(),
    "alif": lambda: layer_of(flexsn.ALIF(tau=4.0)),
    "from its leak": lambda: layer_of(flexsn.LIF(v_leak=0.3, v_reset=0.3)),
    "no bias": lambda: flexsn.Recurrent(flexsn.LIF(), nn.Linear(6, 6, bias=False)),
    "a function": lambda: flexsn.Recurrent(flexsn.LIF(), lambda y: y.roll(1, -1)),
    "low rank": lambda: flexsn.Recurrent(flexsn.LIF(), nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6))),
    "a core": lambda: flexsn.Recurrent(lambda x, v: (torch.tanh(v + x), 0.5 * v + x), nn.Linear(6, 6), num_states=1),
    "per channel": lambda: layer_of(flexsn.LIF(learn_tau=True, per_channel=6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_as_by_hand(name):
    if name == "low rank":  # whose second product takes what the first gives, and no state
        warnings.simplefilter("ignore", FallbackWarning)
    layer, x = LAYERS[name]().double(), sequence().double().requires_grad_()
    leaves, cotangent = [x, *layer.parameters()], torch.randn(9, 3, 6, dtype=f64)
    got, want = layer(x), by_hand(layer, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert [v.shape for v in layer.states] == [(3, 6)] * layer.num_states
    assert torch.equal(layer.states[-1], got[-1])
    grads = [torch.autograd.grad(y, leaves, cotangent, allow_unused=True) for y in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_convolution():
    layer, x = flexsn.Recurrent(flexsn.LIF(), nn.Conv2d(2, 2, 3, padding=1)).double(), sequence(1, 2, 5, 5, T=4).double()
    got, want = layer(x), by_hand(layer, x)
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.sum(), layer.mixing.weight) for y in (got, want)]
    torch.testing.assert_close(*grads)


def test_names_of_parameters():
    layer = layer_of()
    assert list(layer.state_dict()) == ["neuron.tau", "mixing.weight", "mixing.bias"]
    assert [name for name, _ in layer.named_parameters()] == ["neuron.tau", "mixing.weight", "mixing.bias"]


def with_function():
    w, b = nn.Parameter(torch.randn(6, 6)), torch.randn(6)
    return flexsn.Recurrent(flexsn.LIF(learn_tau=True, stateful=False), lambda y: y @ w + b), w


def test_tensors_of_a_function_are_the_layers_own():
    """As those of a core are a neuron's: in its cells, defaults and partial arguments."""
    (layer, w), x = with_function(), sequence()
    assert list(layer.state_dict()) == ["neuron.tau", "mixing.w", "mixing.b"]
    assert [*layer.parameters()] == [layer.neuron.tau, w]
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.1), layer(x)
    grads = torch.autograd.grad(by_hand(layer, x).square().sum(), [*layer.parameters()])
    before.square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(grads))
    optimizer.step()
    assert not torch.equal(layer(x), before)
    torch.testing.assert_close(layer(x), by_hand(layer, x))
    layer.double()
    torch.testing.assert_close(layer(x.double()), by_hand(layer, x.double()))
    assert layer(x.double()).dtype is f64

    partial = flexsn.Recurrent(flexsn.LIF(), functools.partial(nn.functional.linear, weight=nn.Parameter(torch.randn(6, 6))))
    default = flexsn.Recurrent(flexsn.LIF(), lambda y, w=w: y @ w)
    assert list(partial.state_dict()) == ["mixing.weight"] and list(default.state_dict()) == ["mixing.w"]


def test_what_takes_the_place_of_a_functions_tensors():
    """A copy, a loaded state, other dtypes and `functional_call`; also where the layer is the neuron of another."""
    (layer, _), x = with_function(), sequence()
    new = {name: 1.5 * t for name, t in layer.state_dict().items()}
    want = torch.func.functional_call(layer, new, (x,))
    made = copy.deepcopy(layer)
    made.load_state_dict(new, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(made(x), want)
        assert not torch.equal(layer(x), want)
        outer = flexsn.Recurrent(layer, nn.Linear(6, 6), strict=False).double()
        assert outer(x.double()).dtype is f64


MODELS = {
    "linear": lambda: layer_of(flexsn.LIF(learn_tau=True, v_threshold=0.3)),
    "function": lambda: with_function()[0],
    "network": lambda: nn.Sequential(nn.Linear(6, 6), layer_of(flexsn.ALIF(v_threshold=0.3, stateful=False)), nn.Linear(6, 2)),
    "convolution": lambda: flexsn.Recurrent(flexsn.LIF(v_threshold=0.3), nn.Conv1d(3, 3, 3, padding=1)),
}


@pytest.mark.parametrize("each", [False, True], ids=["one input", "an input each"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_at_once_are_as_one_after_the_other(kind, each):
    """`torch.vmap` over stacked weights: values, gradients inside of it and through it. A copy of what was called holds no dead tensors."""
    warnings.simplefilter("ignore", FallbackWarning)
    models, base = [MODELS[kind]().double() for _ in range(3)], MODELS[kind]().double()
    stacked, x = torch.func.stack_module_state(models), sequence(3, 3, 6).double() if each else sequence().double()
    dims = (0, 0, 1 if each else None)

    def run(net, params, buffers, x):
        return torch.func.functional_call(net, (params, buffers), (x,))

    def loss(*operands):
        return run(base, *operands).square().sum()

    results = [model(x[:, k] if each else x) for k, model in enumerate(models)]
    grads = [torch.autograd.grad(y.square().sum(), [*model.parameters()]) for y, model in zip(results, models, strict=True)]
    want = dict(zip(stacked[0], map(torch.stack, zip(*grads, strict=True)), strict=True))
    assert all(g.abs().sum() > 0 for g in want.values())
    meta = copy.deepcopy(base).to("meta")  # which lends its code alone
    y = torch.vmap(lambda *operands: run(meta, *operands), dims)(*stacked, x)
    torch.testing.assert_close(y, torch.stack(results))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [*stacked[0].values()]), tuple(want.values()))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss), dims)(*stacked, x), want)
    flexsn.reset_net(base)
    again = copy.deepcopy(base)
    again.load_state_dict(models[0].state_dict())
    torch.testing.assert_close(again(x[:, 0] if each else x), results[0])


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_takes_their_place_in_compiled_code(fullgraph):
    (layer, _), x = with_function(), sequence()
    copied, torch_compile = copy.deepcopy(layer), functools.partial(torch.compile, backend="aot_eager", fullgraph=fullgraph)
    compiled = torch_compile(layer)
    with torch.no_grad():
        compiled(x)
        for t in copied.state_dict().values():
            t.mul_(1.5)
        torch.testing.assert_close(torch_compile(copied)(x), copied(x))
        for change in (lambda: layer.load_state_dict(copied.state_dict(), assign=True), layer.double):
            change()
            x = x.to(layer.mixing.w.dtype)
            y = compiled(x)
            torch.testing.assert_close(y, layer(x))


def test_copies_are_their_own():
    layer, x = layer_of(), sequence()
    with torch.no_grad():
        y = layer(x)
        for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            made.reset()
            assert torch.equal(made(x), y) and made.mixing is not layer.mixing and made.neuron is not layer.neuron
            made.mixing.weight.mul_(-3)
            made.reset()
            layer.reset()
            assert torch.equal(layer(x), y)
            torch.testing.assert_close(made(x), by_hand(made, x))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.neuron, "v_threshold", 0.3),
        lambda layer: layer.mixing.weight.data.mul_(3),
        lambda layer: setattr(layer, "mixing", nn.Linear(6, 6)),
        lambda layer: layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()}),
        lambda layer: layer.double().float(),
    ],
    ids=["a constant", "weights", "the mixing", "a state dict", "dtypes"],
)
def test_what_changes_between_calls(change):
    layer, x = layer_of(), sequence()
    with torch.no_grad():
        layer(x)
        change(layer)
        layer.reset()
        assert torch.equal(layer(x), by_hand(layer, x))


def test_states_go_on_from_call_to_call():
    layer, x = layer_of(), sequence()
    with torch.no_grad():
        whole = layer(x)
        layer.reset()
        assert torch.equal(torch.cat([layer(x[:4]), layer(x[4:])]), whole)
        layer.reset()
        layer.step_mode = "s"
        assert torch.equal(torch.stack([layer(step) for step in x]), whole)
    flexsn.reset_net(nn.Sequential(layer))
    assert layer.states is None
    once = layer_of(stateful=False)
    with torch.no_grad():
        assert torch.equal(once(x), once(x)) and once.states is None


def test_a_layer_in_a_network():
    net, x = nn.Sequential(nn.Linear(4, 6), layer_of(), nn.Linear(6, 2)), torch.randn(9, 3, 4)
    with flexsn.monitor(net) as records:
        net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters()) and list(records) == ["1"]
    states = flexsn.get_states(net)
    assert list(states) == ["1"] and len(states["1"]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of what Inductor imports; of Dynamo's guards
def test_compiled():
    net, x = nn.Sequential(nn.Linear(4, 6), layer_of()), torch.randn(9, 3, 4)
    want = net(x)
    grads = torch.autograd.grad(want.sum(), list(net.parameters()))
    flexsn.reset_net(net)
    got = torch.compile(net)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), list(net.parameters())), grads)


def test_spikes_of_other_dtypes():
    """Integers and bools are spikes; 16-bit layers run as any 16-bit core: computed in float32, in the eager loop."""
    layer = layer_of(flexsn.LIF())
    spikes = torch.rand(9, 3, 6) < 0.4
    want = layer(spikes.float())
    for dtype in (torch.bool, torch.int64, torch.uint8):
        layer.reset()
        assert torch.equal(layer(spikes.to(dtype)), want)
    warnings.simplefilter("ignore", FallbackWarning)
    half = layer_of(flexsn.LIF()).bfloat16()
    y = half(spikes.bfloat16())
    y.sum().backward()
    assert y.dtype is torch.bfloat16 and half.mixing.weight.grad is not None


def test_names_and_nesting():
    core = lambda x, y: (torch.tanh(y + x), torch.tanh(y + x))
    assert flexsn.Recurrent(core, nn.Linear(6, 6), num_states=1)(sequence()).shape == (9, 3, 6)
    warnings.simplefilter("ignore", FallbackWarning)  # two products in a row, of which the second takes no state
    assert flexsn.Recurrent(layer_of(), nn.Linear(6, 6))(sequence()).shape == (9, 3, 6)


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="the mixing returned a tuple, not a tensor"):
        flexsn.Recurrent(flexsn.LIF(), lambda y: (y, y))(sequence())
    with pytest.raises(ShapeMismatchError, match=r"the mixing returned \[3, 5\], and a step of the input is \[3, 6\]"):
        flexsn.Recurrent(flexsn.LIF(), nn.Linear(6, 5))(sequence())
    with pytest.raises(ArgumentError, match="must be a module or a function: it is Tensor"):
        flexsn.Recurrent(flexsn.LIF(), torch.eye(6))
    with pytest.raises(ArgumentError, match="must be a module or a function: Linear is a class"):
        flexsn.Recurrent(flexsn.LIF(), nn.Linear)
    with pytest.raises(RuntimeError) as raised:
        flexsn.Recurrent(flexsn.LIF(), nn.Linear(6, 6))(torch.rand(4, 2, 5))
    assert raised.value.__notes__ == ["The mixing was called with `y` of shape [2, 5], that of one step of the input."]
    with pytest.raises(ArgumentError, match="num_states=2, but the neuron has 1"):
        flexsn.Recurrent(flexsn.LIF(), nn.Linear(6, 6), num_states=2)
    with pytest.raises(ArgumentError, match="has `params`"):
        flexsn.Recurrent(flexsn.FlexSN(lambda x, v, p: (x, v * p), 1, 1, params=[torch.ones(6)]), nn.Linear(6, 6))
    with pytest.raises(ArgumentError, match="takes no neuron with bounds"):
        layer_of(flexsn.LIF(learn_tau=True, bounds={"tau": (1.0, 5.0)}))


def test_compiled_layers_see_other_numbers_and_mixings():
    """At once where the graph may break; else the layer is refused until a plain call has seen them."""
    layer, x = flexsn.Recurrent(flexsn.LIF(), nn.Linear(4, 4), stateful=False), 2 * torch.rand(6, 3, 4)
    run = torch.compile(layer, backend="aot_eager")
    for name, of, value in (("v_threshold", layer.neuron, 0.3), ("mixing", layer, nn.Linear(4, 4)), ("v_threshold", layer.neuron, 1.5)):
        before = run(x)
        setattr(of, name, value)
        found = [run(x), run(x)]
        want = layer(x)
        assert not torch.equal(want, before) and all(torch.equal(y, want) for y in found)
    torch._dynamo.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    whole(x)
    layer.neuron.v_threshold = 0.3
    with pytest.raises(torch._dynamo.exc.Unsupported, match="was replaced since the last call"):
        whole(x)
    assert torch.equal(layer(x), whole(x))
