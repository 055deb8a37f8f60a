"""What a core captures: the contract of the README, sentence by sentence, in plain, compiled, exported and transformed calls."""

import argparse
import contextvars
import copy
import dataclasses
import enum
import functools
import pickle
import threading
import types
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import flexsn
from flexsn import FlexSN
from flexsn._captured.captured_values import look
from flexsn.errors import CapturedValueWarning, RandomOpError, SideEffectError, UnsupportedValueError

GAIN, WEIGHT = 0.5, torch.tensor(3.0)
NAMESPACE = types.ModuleType("settings_of_a_user")
NAMESPACE.gain = 2.0


@dataclasses.dataclass
class Config:
    tau: float = 2.0
    threshold: float = 1.0


class Reset(enum.Enum):
    HARD, SOFT = "hard", "soft"


class Constants:
    GAIN = 2.0
    TAPS = (torch.tensor(1.0), torch.tensor(2.0))


class Window(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = 2.0

    def forward(self, x):
        return torch.sigmoid(self.alpha * x)


def helper(x):
    return x * GAIN * WEIGHT


class Net(nn.Module):
    """A network whose neuron's core is a method of it, and reads settings of every kind."""

    def __init__(self, backend="auto"):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("b", torch.tensor(0.2))
        self.config, self.window, self.flag, self.reset = Config(), Window(), True, Reset.HARD
        self.taps = nn.ParameterList([nn.Parameter(torch.tensor(float(i))) for i in range(3)])
        self.listed = [torch.tensor(1.0), torch.tensor(2.0)]
        self.by_name = {"gain": 1.5}
        self.big = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
        self.neuron = FlexSN(self.core, num_states=1, stateful=False, strict=backend == "auto", backend=backend)

    def scaled(self, x):
        return x * self.by_name["gain"]

    def core(self, x, v):
        if self.flag:
            x = x * 2
        for tap in self.taps:
            x = x + tap
        h = v * self.w.sigmoid() + self.scaled(x) + self.b + self.listed[0] / self.config.tau
        s = self.window(h - self.config.threshold) * Constants.GAIN * Constants.TAPS[1] * NAMESPACE.gain
        left = h * (1 - s) if self.reset is Reset.HARD else h - s
        return s, left + helper(x) * 0.01

    def forward(self, x):
        return self.neuron(x)


def set_first(net):
    net.listed[0] = torch.tensor(9.0)


CHANGES = {
    "a field of a dataclass": (lambda net, patch: setattr(net.config, "threshold", 0.5), True),
    "a number of a module inside": (lambda net, patch: setattr(net.window, "alpha", 5.0), True),
    "a flag": (lambda net, patch: setattr(net, "flag", False), True),
    "an enum": (lambda net, patch: setattr(net, "reset", Reset.SOFT), True),
    "a value of a dict": (lambda net, patch: net.by_name.update(gain=3.0), True),
    "a tensor in a list": (lambda net, patch: set_first(net), False),
    "one more tensor in a list": (lambda net, patch: net.taps.append(nn.Parameter(torch.tensor(1.0))), True),
    "eval": (lambda net, patch: net.eval(), True),
    "a global": (lambda net, patch: patch.setitem(globals(), "GAIN", 0.1), True),
    "a global tensor": (lambda net, patch: patch.setitem(globals(), "WEIGHT", torch.tensor(5.0)), False),
    "an attribute of a class": (lambda net, patch: patch.setattr(Constants, "GAIN", 3.0), True),
    "an attribute of a module of Python": (lambda net, patch: patch.setattr(NAMESPACE, "gain", 3.0), True),
    "a function": (lambda net, patch: patch.setitem(globals(), "helper", lambda x: x), True),
    "a method": (lambda net, patch: patch.setattr(Net, "scaled", lambda self, x: x * 0.5), True),
    "a parameter": (lambda net, patch: setattr(net, "w", nn.Parameter(torch.tensor(-1.0))), False),
    "a config": (lambda net, patch: setattr(net, "config", Config(tau=5.0)), True),
}


# --- 1: what is captured, and compared or read anew ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "way"),
    [
        *((change, "plain") for change in CHANGES),
        # Dynamo, by itself, takes the methods of a class as they were when it compiled
        *(pytest.param(change, "compiled", marks=pytest.mark.slow) for change in CHANGES if change != "a method"),
    ],
)
def test_changes_are_seen(change, way, monkeypatch):
    make, captures_again = CHANGES[change]
    net, x = Net(), torch.rand(5, 3)
    run = torch.compile(net, backend="aot_eager") if way == "compiled" else net
    run(x)
    seen = net.neuron.captured_values()
    make(net, monkeypatch)
    assert seen.valid() != captures_again
    net.neuron.backend = "torch"
    want = net(x)
    net.neuron.backend = "auto"
    torch.testing.assert_close(run(x), want)


def test_a_constant_that_comes_back_builds_nothing(counts):
    net, x = Net(), torch.rand(5, 3)
    net(x)
    made = counts.programs
    net.config.threshold = 0.5
    net(x)
    assert counts.programs == made + 1
    net.config.threshold = 1.0
    net(x)
    assert counts.programs == made + 1


def test_an_equal_number_keeps_what_is_known_of_calls():
    net, x = Net(), torch.rand(5, 3)
    net(x)
    calls = net.neuron.captured_values().calls
    net.config.threshold = float("1.0")
    assert net.neuron.captured_values().calls is calls


def test_a_core_captures_what_its_code_names_alone():
    """The network's other sixty layers are none of it."""
    names = {name.split(".")[1] for name in Net().neuron.captured_values().tensors() if name.startswith("self.")}
    assert names == {"w", "b", "taps", "listed"}


@pytest.mark.parametrize("kind", [types.SimpleNamespace, argparse.Namespace])
def test_namespaces_hold_settings(kind):
    settings, x = kind(gain=2.0, w=torch.tensor(0.5, requires_grad=True)), torch.rand(5, 3)
    core = lambda x, v: (x * settings.gain + settings.w + v, v)
    for gain in (2.0, 3.0):
        settings.gain = gain
        for backend in ("auto", "torch"):
            y = flexsn.scan(core, [x], [torch.zeros(3)], backend=backend, strict=backend == "auto").outputs[0]
            (grad,) = torch.autograd.grad(y.sum(), settings.w)
            torch.testing.assert_close(y, x * gain + 0.5)
            assert grad == 15.0


@pytest.mark.parametrize("name", ["mul", "__mul__", "split"])  # builtin methods, and one that PyTorch wrote in Python
def test_bound_methods_of_tensors_captured(name):
    for value in (1.0, 7.0):
        held = torch.full((3,), value, requires_grad=True)
        bound = getattr(held, name)
        core = lambda x, v, bound=bound: ((bound(x) if name != "split" else bound(3)[0] * x) + v, v)
        y = flexsn.scan(core, [torch.ones(2, 3)], [torch.zeros(3)], strict=name != "split").outputs[0]
        assert torch.equal(y, torch.full((2, 3), value)) and torch.autograd.grad(y.sum(), held)[0].sum() == 6.0


@pytest.mark.parametrize("kind", ["object", "module"])
@pytest.mark.parametrize("name", ["threshold", "leak", "decay", "limit"])
def test_what_is_set_on_a_class_before_what_it_inherits_is_seen(kind, name):
    """A number, a method, a static and a class method."""

    class Base:
        threshold = 1.0

        def leak(self, v):
            return v * 0.5

        @staticmethod
        def decay(v):
            return v * 0.5

        @classmethod
        def limit(cls):
            return cls.threshold

        def forward(self, x, v):
            h = self.leak(v) + self.decay(v) + x
            return (h > self.threshold) * 1.0 + self.limit() * h, h

    Own = type("Own", (Base, nn.Module) if kind == "module" else (Base,), {})
    core = Own() if kind == "module" else Own().forward
    x = torch.rand(5, 3)
    call = lambda backend: flexsn.scan(core, [x], [torch.zeros(3)], backend=backend).outputs[0]
    neuron = FlexSN(core, num_states=1, stateful=False, strict=True)
    before = neuron(x)
    new = {
        "threshold": 2.0,
        "leak": lambda self, v: v * 0.9,
        "decay": staticmethod(lambda v: v * 0.9),
        "limit": classmethod(lambda cls: 3.0),
    }
    setattr(Own, name, new[name])
    assert torch.equal(neuron(x), call("torch")) and not torch.equal(neuron(x), before)


def test_what_is_set_on_a_class_of_a_closure_is_seen():
    class Base:
        gain = 2.0

    class Own(Base):
        pass

    neuron, x = FlexSN(lambda x, v: (x * Own.gain, v), num_states=1, stateful=False, strict=True), torch.ones(2, 3)
    assert torch.equal(neuron(x), 2.0 * x)
    Own.gain = 3.0
    assert torch.equal(neuron(x), 3.0 * x)
    del Own.gain
    assert torch.equal(neuron(x), 2.0 * x)


# --- 2: what is taken as it is, and what is refused ---------------------------------------------------------------------------
class WithSlots:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 2.0


@pytest.mark.parametrize(
    ("held", "kind"),
    [(numpy.full(3, 2.0, dtype=numpy.float32), "ndarray"), ({2.0}, "set"), (WithSlots(), "float")],
    ids=["array", "set", "slots"],
)
def test_what_is_taken_as_it_is(held, kind):
    def core(x, v):
        k = held.k if isinstance(held, WithSlots) else max(held) if isinstance(held, set) else float(held[0])
        return x * k, v

    neuron, x = FlexSN(core, num_states=1, stateful=False, strict=True), torch.ones(2, 3)
    with pytest.warns(CapturedValueWarning, match=rf"core `core` captures `held(.k)?`, a {kind}, .*`recapture"):
        assert torch.equal(neuron(x), 2.0 * x)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        neuron(x)
    frozen = [(o.name, o.dtype) for o in flexsn.explain(neuron, x).operands if o.kind == "frozen"]
    assert frozen == [("held.k" if isinstance(held, WithSlots) else "held", kind)]
    for value in (3.0, 4.0, 2.0):
        before, other = neuron(x), FlexSN(core, num_states=1, stateful=False, strict=True)
        if isinstance(held, set):
            held.clear(), held.add(value)
        elif isinstance(held, WithSlots):
            held.k = value
        else:
            held[0] = value
        assert torch.equal(neuron(x), before)
        neuron.recapture()
        assert torch.equal(neuron(x), value * x) and torch.equal(other(x), value * x)  # another takes it as it is at its own capture


def test_a_look_again_at_what_is_taken_as_it_is_builds_nothing(counts):
    held, x = numpy.full(3, 2.0), torch.ones(2, 3)
    neuron = FlexSN(lambda x, v: (x * float(held[0]), v), num_states=1, stateful=False, strict=True)
    with pytest.warns(CapturedValueWarning):
        neuron(x)
    built = counts.builds
    neuron.recapture()
    assert torch.equal(neuron(x), 2.0 * x) and counts.builds == built


ITERATOR, VARIABLE = iter([1.0, 2.0]), contextvars.ContextVar("variable", default=2.0)
REFUSED = {
    "an iterator": (lambda x, v: (x * next(ITERATOR), v), SideEffectError, "draws from the iterator `ITERATOR`"),
    "a context variable": (lambda x, v: (x * VARIABLE.get(), v), UnsupportedValueError, "reads the context variable `VARIABLE`"),
    "a generator of numpy": (lambda x, v: (x * RNG.random(), v), RandomOpError, "draws from `RNG`, a generator of numpy"),
}
RNG = numpy.random.default_rng(0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name):
    core, error, words = REFUSED[name]
    before = RNG.bit_generator.state
    with pytest.raises(error, match=words):
        flexsn.scan(core, [torch.ones(2, 3)], [None], strict=True)
    assert RNG.bit_generator.state == before and next(iter([ITERATOR.__length_hint__()])) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own
def test_a_scripted_module_is_refused_by_name():
    scripted = torch.jit.script(nn.Sigmoid())
    with pytest.raises(UnsupportedValueError, match="captures `scripted`, a ScriptModule"):
        flexsn.scan(lambda x, v: (scripted(x), v), [torch.ones(2, 3)], [None], strict=True)


# --- 3: stand-ins -----------------------------------------------------------------------------------------------------------------
class LearnedOrFixed(nn.Module):
    """The usual idiom for "learned or fixed": the core asks what its tensor is."""

    def __init__(self, backend="auto"):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7))
        self.alias = self.w
        self.neuron = FlexSN(self.core, num_states=1, stateful=False, backend=backend)

    def core(self, x, v):
        asked = type(self.w).__name__ == "Parameter" and self.w is self.alias and len(list(self.parameters())) == 1
        d = self.w.sigmoid() if asked and isinstance(self.w, nn.Parameter) else self.w
        return v * d + x, v * d + x

    def forward(self, x):
        return self.neuron(x)


WAYS = {
    "plain": lambda net, x: net(x),
    "make_fx": lambda net, x: torch.fx.experimental.proxy_tensor.make_fx(net)(x)(x),
    "vmap": lambda net, x: torch.vmap(net)(x.expand(2, *x.shape))[1],
    "grad": lambda net, x: torch.func.vjp(net, x)[0],
    "compiled": lambda net, x: torch.compile(net, backend="aot_eager")(x),
    "exported": lambda net, x: torch.export.export(net, (x,)).module()(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_captured_tensor_is_what_it_is_in_every_trace(way):
    x, net = torch.ones(9, 5), LearnedOrFixed()
    want = LearnedOrFixed("torch")(x)
    torch.testing.assert_close(WAYS[way](net, x), want, rtol=0, atol=0)
    torch.testing.assert_close(net(x), want, rtol=0, atol=0)


def counting():
    count = 0

    def core(x, v):
        nonlocal count
        count += 1
        return x * count, v

    return core, lambda: count


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.even, self.log, self.seen, self.write = True, [], {}, write

    def forward(self, x, v):
        self.write(self)
        return x, v


WRITES = {
    "an attribute": lambda m: setattr(m, "even", not m.even),
    "a new attribute": lambda m: setattr(m, "other", 1),
    "a list": lambda m: m.log.append(1),
    "a dict": lambda m: m.seen.update(a=1),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_core_that_writes_to_what_it_captures_is_refused_and_writes_nothing(way):
    core = Writing(WRITES[way])
    before = {k: copy.copy(v) for k, v in vars(core).items()}
    with pytest.raises(SideEffectError, match=r"core `Writing`: changes `.*` while it runs"):
        flexsn.scan(core, [torch.ones(2, 3)], [None], strict=True)
    assert {k: v for k, v in vars(core).items() if k in before} == before and "other" not in vars(core)


def test_a_variable_of_the_enclosing_function_is_not_written():
    core, count = counting()
    with pytest.raises(SideEffectError, match="changes `count`"):
        flexsn.scan(core, [torch.ones(2, 3)], [None], strict=True)
    assert count() == 0 and not vars(core)


class Beside(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.a, self.k = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.neuron = FlexSN(self.step, num_states=1, backend=backend, stateful=False)

    def step(self, x, v):
        return x * self.k + v, v


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_while_a_copy_runs_or_is_captured_the_original_is_untouched(backend):
    original = Beside(backend)
    twin, x = copy.deepcopy(original), torch.rand(2, 4)
    with torch.no_grad():
        twin.a.weight.add_(100.0)
        want, wrong = original.a(x), []

    def call():
        with torch.no_grad():
            wrong.extend(not torch.equal(original.a(x), want) for _ in range(1000))

    thread = threading.Thread(target=call)
    thread.start()
    n = 0
    while thread.is_alive():
        n += 1
        twin.neuron(torch.rand(20, 1 + n % 7, 4))
    thread.join()
    assert len(wrong) == 1000 and not any(wrong)


# --- 4: what the neuron owns --------------------------------------------------------------------------------------------------------
def owning(**options):
    tau, bias = nn.Parameter(torch.tensor(2.0)), torch.tensor(1.0)
    return FlexSN(lambda x, v: (x * tau + bias, v), num_states=1, stateful=False, **options), tau, bias


def test_tensors_in_cells_are_the_neurons_own_under_their_names():
    neuron, tau, bias = owning()
    assert list(neuron.state_dict()) == ["tau", "bias"] and neuron.tau is tau and neuron.bias is bias
    neuron.double()
    assert bias.dtype is torch.float32 and neuron.bias.dtype is torch.float64
    for backend in ("auto", "torch"):
        neuron.backend = backend
        assert neuron(torch.ones(2, 1, dtype=torch.float64)).dtype is torch.float64


def test_names_that_a_module_has_already():
    states = nn.Parameter(torch.tensor(2.0))
    neuron = FlexSN(lambda x, v: (x * states, v), num_states=1)
    assert list(neuron.state_dict()) == ["states_"] and neuron.states is None
    assert torch.equal(neuron(torch.ones(2, 1)), torch.full((2, 1), 2.0))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_operands_are_read_from_where_they_are_registered(backend):
    neuron, x = owning(backend=backend)[0], torch.ones(2, 1)
    assert torch.equal(torch.func.functional_call(neuron, {"tau": torch.tensor(9.0)}, (x,)), 10.0 * x)
    neuron.load_state_dict({"tau": torch.tensor(4.0), "bias": torch.tensor(0.0)}, assign=True)
    assert torch.equal(neuron(x), 4.0 * x)
    neuron.load_state_dict({"captured.tau": torch.tensor(3.0), "captured.bias": torch.tensor(0.0)})  # of 0.1.0
    assert torch.equal(neuron(x), 3.0 * x)


def test_a_variable_of_the_core_that_holds_another_parameter():
    """Saved, loaded and averaged are those that calls read, each at its place."""
    first, second = (nn.Parameter(torch.tensor(v)) for v in (1.0, 2.0))
    neuron, x = FlexSN(lambda x, v: (x * first - second, v), num_states=1, stateful=False, strict=True), torch.ones(2, 1)
    average = torch.optim.swa_utils.AveragedModel(neuron)
    first = nn.Parameter(torch.tensor(5.0))
    assert neuron.state_dict()["first"] == 5.0 and [*neuron.parameters()] == [first, second]
    first = nn.Parameter(torch.tensor(6.0))
    neuron.load_state_dict({"first": torch.tensor(7.0), "second": torch.tensor(3.0)})
    assert first == 7.0 and torch.equal(neuron(x), 4.0 * x)
    average.update_parameters(neuron)
    assert {name: p.item() for name, p in average.module.named_parameters()} == {"first": 7.0, "second": 3.0}


def test_a_variable_of_the_core_that_holds_a_number_now():
    """What it held before is the module's no longer; a tensor again is."""
    scale, x = torch.tensor(2.0), torch.ones(2, 1)
    neuron = FlexSN(lambda x, v: (x * scale, v), num_states=1, stateful=False, strict=True)
    assert [*neuron.state_dict()] == ["scale"] and torch.equal(neuron(x), 2.0 * x)
    scale = 3.0
    assert not neuron.state_dict() and torch.equal(neuron(x), 3.0 * x)
    scale = nn.Parameter(torch.tensor(4.0))
    assert torch.equal(neuron(x), 4.0 * x) and [*neuron.parameters()] == [scale] and neuron.scale is scale


class Half(nn.Module):
    def forward(self, w):
        return 0.5 * w


def test_learned_constants_of_the_zoo_are_found_under_their_names():
    x = 2 * torch.rand(9, 5)
    neuron = flexsn.LIF(tau=6.0, learn_tau=True, stateful=False)
    assert list(neuron.state_dict()) == ["tau"] and [n for n, _ in neuron.named_parameters()] == ["tau"]
    parametrize.register_parametrization(neuron, "tau", Half())
    assert neuron.tau == 3.0 and torch.equal(neuron(x), flexsn.LIF(tau=torch.tensor(3.0), stateful=False)(x))
    pruned = flexsn.LIF(tau=torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0]), learn=["tau"], stateful=False)
    prune.identity(pruned, "tau")
    assert sorted(pruned.state_dict()) == ["tau_mask", "tau_orig"]
    torch.testing.assert_close(pruned(x), flexsn.LIF(tau=torch.tensor(3.0), stateful=False)(x))


def test_a_module_in_a_cell_keeps_what_it_holds():
    gate = nn.PReLU()
    neuron = FlexSN(lambda x, v: (gate(x), v), num_states=1)
    assert not neuron.state_dict()
    neuron(torch.rand(3, 2) - 0.5).sum().backward()
    assert gate.weight.grad is not None


# --- 5: copies ------------------------------------------------------------------------------------------------------------------------
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Parameter(torch.ones(1))
        self.closure = FlexSN(lambda x, v: (x * self.k, v), num_states=1, stateful=False)
        self.method = FlexSN(self.step, num_states=1, stateful=False)

    def step(self, x, v):
        return x * self.k * 10, v

    def forward(self, x):
        return self.closure(x) + self.method(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: torch.optim.swa_utils.AveragedModel(net).module], ids=["deepcopy", "EMA"])
def test_a_copied_network_runs_on_its_own_tensors(copied):
    net, x = Both(), torch.ones(2, 1)
    twin = copied(net)
    with torch.no_grad():
        twin.k.fill_(3.0)
    assert torch.equal(net(x), 11 * x) and torch.equal(twin(x), 33 * x)
    net(x).sum().backward()
    assert net.k.grad is not None and twin.k.grad is None
    assert torch.equal(torch.func.functional_call(net, {"k": torch.tensor([2.0])}, (x,)), 22 * x)


def test_a_copy_of_a_neuron_owns_copies():
    neuron, tau, _ = owning()
    twin, x = copy.deepcopy(neuron), torch.ones(2, 1)
    with torch.no_grad():
        twin.tau.fill_(5.0)
    assert neuron.tau is tau and torch.equal(neuron(x), 3 * x) and torch.equal(twin(x), 6 * x)


def scaled(x, v, gain):
    return x * gain, v


def test_a_pickled_neuron_takes_what_it_owns_along():
    neuron, x = FlexSN(functools.partial(scaled, gain=nn.Parameter(torch.tensor(2.0))), num_states=1, stateful=False), torch.ones(2, 1)
    with torch.no_grad():
        neuron.gain.fill_(4.0)
    assert torch.equal(pickle.loads(pickle.dumps(neuron))(x), 4.0 * x)


# --- looks of `flexsn.scan` -----------------------------------------------------------------------------------------------------------------
def test_a_look_is_kept_while_nothing_changes():
    gain = 2.0

    def core(x, v):
        return x * gain, v

    first = look(core)
    assert look(core) is first
    gain = 3.0
    assert look(core) is not first and not vars(core)
