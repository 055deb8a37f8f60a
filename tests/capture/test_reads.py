"""Captured tensors and values: found by name, differentiable, read afresh at every call."""

import argparse
import ast
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import importlib
import io
import itertools
import logging
import operator
import random
import re
import sys
import threading
import time
import types
import typing
import weakref

import numpy
import pytest
import torch
from helpers import check
from torch import nn
from torch.nn.utils import parametrize

import flexsn
from flexsn import surrogate
from flexsn._capture.reads_code import taken_whole
from flexsn._capture.reads_look import look
from flexsn.errors import CannotFuseError, CapturedTensorError, ParamGradientError, RandomOpError, SideEffectError

kept = importlib.import_module("flexsn.scan").look  # the package's `scan` is the function
GLOBAL_W = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
GLOBAL_GAIN = 2.0
SETTINGS = {"gain": 2.0, "w": torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64, requires_grad=True)}
f64 = torch.float64


def x_and_v(T=18, shape=(4, 3)):
    return torch.randn(T, *shape, dtype=f64), torch.randn(shape, dtype=f64)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=f64) * 0.3)


def output(core, backend="cpp", seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, 3, dtype=f64, generator=generator)
    return flexsn.scan(core, [x], [None], backend=backend).outputs[0]


def assert_follows(core):
    torch.testing.assert_close(output(core), output(core, "torch"), rtol=1e-12, atol=1e-12)


# --- where a tensor may be ------------------------------------------------------------------------------------------------
def test_closure():
    w, b = parameter(3), parameter(4, 1)

    def core(x, v):
        v = v * w + x
        return v * b, v

    check(core, *([t] for t in x_and_v()), captured={"w": w, "b": b}, sequences=True)


def global_core(x, v):
    v = v * GLOBAL_W + x * GLOBAL_GAIN
    return v * v, v


def settings_core(x, v):
    v = v * SETTINGS["w"] + x * SETTINGS["gain"]
    return v * v, v


def test_global():
    check(global_core, *([t] for t in x_and_v()), captured={"w": GLOBAL_W})


def test_global_dict():
    check(settings_core, *([t] for t in x_and_v()), captured={"w": SETTINGS["w"]})


def test_partial():
    def core(x, v, w, *, b):
        v = v * w + x
        return v * b, v

    w, b = parameter(3), parameter()
    check(functools.partial(core, w=w, b=b), *([t] for t in x_and_v()), captured={"w as bound": w, "b": b})


def test_default_arguments():
    w = parameter(3)

    def core(x, v, *, w=w):
        v = v * w + x
        return v * v, v

    check(core, *([t] for t in x_and_v()), captured={"w": w})


class Inner:
    def __init__(self):
        self.b = parameter(4, 1)


class Neuron:
    def __init__(self):
        self.w, self.gain = parameter(3), 2.0
        self.inner = Inner()

    def step(self, x, v):
        v = v * self.w + x * self.gain
        return v * self.inner.b, v

    def __call__(self, x, v):
        return self.step(x, v)


def test_bound_method():
    neuron = Neuron()
    check(neuron.step, *([t] for t in x_and_v()), captured={"w": neuron.w, "b": neuron.inner.b})
    neuron.gain = 3.0
    assert_follows(neuron.step)
    neuron.w = parameter(3)
    check(neuron.step, *([t] for t in x_and_v()), captured={"w": neuron.w})


def test_callable_object():
    neuron = Neuron()
    check(neuron, *([t] for t in x_and_v()), captured={"w": neuron.w, "b": neuron.inner.b})
    neuron.gain = 5.0
    assert_follows(neuron)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = parameter(3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0], dtype=f64))
        self.loose = torch.tensor(0.25, dtype=f64)
        self.gain = 2.0

    def forward(self, x):
        return torch.tanh(x * self.w * self.scale + self.loose) * self.gain


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.gates = nn.ModuleList([Gate(), Gate()])
        self.weights = nn.ParameterList([parameter(3), parameter()])

    def forward(self, x, v):
        v = v * self.weights[1] + self.gate(x)
        for gate in self.gates:
            v = 0.5 * gate(v)
        return v * self.weights[0], v


def test_module_core_with_submodules():
    core = Core()
    check(core, *([t] for t in x_and_v()), captured=dict(core.named_parameters()), exact=False, sequences=True)


def test_module_in_a_closure():
    gate, act = Gate(), nn.Sequential(nn.Sigmoid(), nn.Softplus())

    def core(x, v):
        v = 0.5 * v + gate(x)
        return act(v), v

    check(core, *([t] for t in x_and_v()), captured=dict(gate.named_parameters()), exact=False)


def test_lists_and_dicts_of_tensors():
    ws = [parameter(3), (parameter(), {"deep": parameter(4, 1)})]

    def core(x, v):
        v = v * ws[0] + x * ws[1][0]
        return v * ws[1][1]["deep"], v

    check(core, *([t] for t in x_and_v()), captured={"0": ws[0], "1": ws[1][0], "2": ws[1][1]["deep"]})
    ws[0] = parameter(3)
    check(core, *([t] for t in x_and_v()), captured={"0": ws[0]})


def test_helper_functions_are_looked_into():
    w = parameter(3)

    def helper(v):
        return v * w * GLOBAL_W

    def core(x, v):
        v = helper(v) + x
        return v, v

    check(core, *([t] for t in x_and_v()), captured={"w": w, "global": GLOBAL_W})


def test_one_tensor_by_two_names():
    w = parameter(3)
    again = w

    def core(x, v):
        v = v * w + x
        return v * again, v

    check(core, *([t] for t in x_and_v()), captured={"w": w})


def test_a_tensor_that_is_captured_and_a_param():
    w = parameter(3)

    def core(x, v, p):
        v = v * w + x
        return v * p, v

    x, v = x_and_v()
    grads = []
    for backend in ("cpp", "torch"):
        y = flexsn.scan(core, [x], [v], [w], backend=backend).outputs[0]
        grads.append(torch.autograd.grad(y.sum(), [w])[0])
    torch.testing.assert_close(*grads)


def test_views_of_parameters():
    w = parameter(2, 3)

    def core(x, v):
        v = v * w[0] + x * w[1, 2]
        return v, v

    check(core, *([t] for t in x_and_v()), captured={"w": w})


def test_a_tensor_that_no_name_leads_to():
    opaque = {parameter(3)}  # no place in a set has a name

    def core(x, v):
        return x * next(iter(opaque)), v

    with pytest.raises(CapturedTensorError, match="core `core`") as caught:
        flexsn.scan(core, [x_and_v()[0]], [None], backend="cpp")
    assert "next(iter(opaque))" in caught.value.line and "params" in caught.value.hint


# --- looked at afresh --------------------------------------------------------------------------------------------------------
def test_new_values_without_recompiling(counts):
    core = Core()
    optimizer = torch.optim.SGD(core.parameters(), lr=0.1)
    before = output(core)
    programs = counts.programs
    for _ in range(3):
        optimizer.zero_grad()
        output(core).square().sum().backward()
        assert all(p.grad is not None for p in core.parameters())
        optimizer.step()
        assert_follows(core)
    assert not torch.equal(output(core), before)
    other = Core()
    core.load_state_dict(other.state_dict())
    torch.testing.assert_close(output(core), output(other, "torch"))
    other = Core()
    core.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(output(core), output(other, "torch"))
    assert_follows(core)
    assert counts.programs == programs == 1


def test_functional_call(counts):
    core = Core()
    other = {n: (p.detach() * 2).requires_grad_() for n, p in core.named_parameters()}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = core

        def forward(self, x, backend):
            return flexsn.scan(self.neuron, [x], [None], backend=backend).outputs[0]

    net, x = Net(), x_and_v()[0]
    swapped = {f"neuron.{n}": p for n, p in other.items()}
    net(x, "cpp")
    programs = counts.programs
    got = torch.func.functional_call(net, swapped, (x, "cpp"))
    want = torch.func.functional_call(net, swapped, (x, "torch"))
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got.sum(), list(other.values())), torch.autograd.grad(want.sum(), list(other.values())), strict=True
    ):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(net(x, "cpp"), net(x, "torch"))
    assert counts.programs == programs


class Positive(nn.Module):
    def forward(self, w):
        return nn.functional.softplus(w)


def test_parametrize():
    core = Core()
    before = output(core)
    parametrize.register_parametrization(core.gate, "w", Positive())
    original = core.gate.parametrizations.w.original
    check(core, *([t] for t in x_and_v()), captured={"original": original}, exact=False)
    with torch.no_grad():
        original.add_(1.0)
    assert_follows(core)
    parametrize.remove_parametrizations(core.gate, "w")
    assert_follows(core)
    assert not torch.equal(before, output(core))


def test_changed_python_values_are_captured_again(counts):
    gate = Gate()
    gain = 2.0

    def core(x, v):
        v = 0.5 * v + gate(x) * gain
        return v, v

    seen = [output(core)]
    gate.gain = 3.0
    assert_follows(core)
    seen.append(output(core))
    gain = 4.0
    assert_follows(core)
    seen.append(output(core))
    assert counts.programs == 3
    gain = 2.0
    gate.gain = 2.0
    assert torch.equal(output(core), seen[0]) and counts.programs == 3
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_changed_globals(monkeypatch):
    before = output(global_core)
    monkeypatch.setitem(globals(), "GLOBAL_GAIN", 3.0)
    assert_follows(global_core)
    assert not torch.equal(before, output(global_core))
    monkeypatch.setitem(SETTINGS, "gain", -1.0)
    assert_follows(settings_core)
    monkeypatch.setitem(globals(), "GLOBAL_W", torch.tensor(0.125, dtype=f64))
    assert_follows(global_core)


def test_changed_helper_function(monkeypatch):
    box = types.SimpleNamespace(act=torch.tanh)

    def core(x, v):
        return box.act(x), v

    assert_follows(core)
    box.act = torch.sigmoid
    assert_follows(core)
    box.act = lambda x: x * 2
    assert_follows(core)
    box.act = lambda x: x * 3
    assert_follows(core)


def test_rebinding_a_closure_tensor(counts):
    w = parameter(3)

    def core(x, v):
        return x * w, v

    output(core)
    w = parameter(3)
    check(core, *([t] for t in x_and_v()), captured={"w": w})
    programs = counts.programs
    w = parameter(3)
    assert_follows(core)
    assert counts.programs == programs
    w = parameter(4, 1)
    assert_follows(core)
    w = torch.randn(3)
    assert_follows(core)
    w = 0.5
    assert_follows(core)
    w = None
    with pytest.raises(TypeError):
        output(core)


def test_requires_grad_toggles():
    w = parameter(3)

    def core(x, v):
        v = v * w + x
        return v, v

    assert output(core).requires_grad
    w.requires_grad_(False)
    assert not output(core).requires_grad
    w.requires_grad_(True)
    check(core, *([t] for t in x_and_v()), captured={"w": w})
    w.requires_grad_(False)
    check(core, *([t] for t in x_and_v()), captured={"w": w})


def test_training_flag():
    act = nn.Dropout(0.5).eval()
    module = nn.Identity()

    def core(x, v):
        return (x * 2 if module.training else x * 3), act(v)

    assert_follows(core)
    module.eval()
    assert_follows(core)
    module.train()
    assert_follows(core)


def test_namespaces_of_the_standard_library():
    """`argparse.Namespace` and `SimpleNamespace` are how many programs keep their settings."""
    for kind in (types.SimpleNamespace, argparse.Namespace):
        settings = kind(gain=2.0, w=parameter(3))

        def core(x, v, settings=settings):
            return x * settings.gain + settings.w, v

        assert_follows(core)
        settings.gain = 3.0
        assert_follows(core)
        settings.w = parameter(3)
        check(core, *([t] for t in x_and_v()), captured={"w": settings.w})


def test_dataclass_settings():
    @dataclasses.dataclass
    class Settings:
        gain: float
        shift: float = 1.0

    settings = Settings(2.0)

    def core(x, v):
        return x * settings.gain + settings.shift, v

    for name, value in (("gain", 3.0), ("shift", -1.0)):
        assert_follows(core)
        setattr(settings, name, value)
        assert_follows(core)


def test_changed_class_attribute():
    class Settings:
        gain = 2.0

    settings = Settings()

    def core(x, v):
        return x * settings.gain, v

    def core_of_class(x, v):
        return x * Settings.gain + 1, v

    assert_follows(core)
    assert_follows(core_of_class)
    Settings.gain = 3.0
    assert_follows(core)
    assert_follows(core_of_class)


@dataclasses.dataclass
class Named:
    name: str = "n"


@dataclasses.dataclass(slots=True)
class SlotsBesideADict(Named):
    gain: float = 1.0


class PrivateSlot:
    __slots__ = ("__gain",)

    def __init__(self, gain):
        self.__gain = gain

    @property
    def gain(self):
        return self.__gain


class ModuleWithASlot(nn.Module):
    __slots__ = ("gain",)


class ConfigOfAClass:
    class config:
        gain = 1.0

    @property
    def gain(self):
        return self.config.gain


class ModuleOfAClass:
    act = nn.LeakyReLU(0.1)

    @property
    def gain(self):
        return self.act.negative_slope


class QueueOfAClass:
    gains: typing.ClassVar = collections.deque([1.0])

    @property
    def gain(self):
        return getattr(self, "gains")[0]  # noqa: B009  by a text


class NamedItems(typing.NamedTuple):
    factor: float

    @property
    def gain(self):
        return self.factor * ConfigOfAClass.config.gain


class Listed(list):
    gain = 1.0


class WrittenAlike(float):
    def __repr__(self):
        return "a number"


def changing(holder, name, make):
    """Sets `holder.name` and returns what `make` makes."""
    return lambda gain: setattr(holder, name, gain) or make()


def listed(gain):
    made = Listed()
    made.gain = gain
    return made


def module_with_a_slot(gain):
    made = ModuleWithASlot()
    made.gain = gain
    return made


PLACES = {
    "slots beside a dict": lambda gain: SlotsBesideADict(gain=gain),
    "private slot": PrivateSlot,
    "slot of a module": module_with_a_slot,
    "class of a class": changing(ConfigOfAClass.config, "gain", ConfigOfAClass),
    "module of a class": changing(ModuleOfAClass.act, "negative_slope", ModuleOfAClass),
    "queue of a class": lambda gain: QueueOfAClass.gains.__setitem__(0, gain) or QueueOfAClass(),
    "property of a named tuple": changing(ConfigOfAClass.config, "gain", lambda: NamedItems(1.0)),
    "attribute of a list": listed,
    "attribute of a partial": lambda gain: changing(made := functools.partial(abs), "gain", lambda: made)(gain),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_places_of_settings(place):
    """Objects that share their classes are told apart, and what changes in one is seen."""
    for gain in (1.0, 3.0, 2.0):
        settings = place(gain)
        assert settings.gain == gain
        assert_follows(lambda x, v: (x * settings.gain, v))


def test_numbers_that_are_written_alike():
    for gain in (WrittenAlike(1.0), WrittenAlike(2.0)):
        assert_follows(lambda x, v: (x * float(gain), v))


def test_a_scheduler_of_learning_rates():
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([torch.ones(1)], lr=1.0), gamma=0.5)
    for _ in range(3):
        assert_follows(lambda x, v: (x * scheduler.get_last_lr()[0], v))
        scheduler.optimizer.step()
        scheduler.step()


def test_a_module_of_python_that_an_object_holds():
    config = types.ModuleType("config")
    settings = types.SimpleNamespace(config=config)
    for gain in (1.0, 3.0):
        config.gain = gain
        assert_follows(lambda x, v: (x * settings.config.gain, v))


def test_a_counter_of_a_class_is_refused():
    class Warm:
        calls = types.SimpleNamespace(n=0)

        def __call__(self, x, v):
            self.calls.n += 1
            return (x if self.calls.n > 4 else v), v

    with pytest.raises(SideEffectError):
        flexsn.FlexSN(Warm(), num_inputs=1, num_states=1, backend="cpp")(torch.rand(5, 3))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules(register):
    class Core(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.act = nn.Tanh()
            if factor:
                getattr(self.act, register)(lambda module, *grads: (grads[0][0] * factor,))

        def forward(self, x, v):
            h = 0.8 * v + self.act(x)
            return h, h

    x, found = torch.rand(4, 3, requires_grad=True), []
    for factor in (0.0, 0.5, 0.25):
        core = Core(factor)
        grads = [torch.autograd.grad(flexsn.scan(core, [x], [None], backend=b).outputs[0].sum(), x)[0] for b in ("cpp", "torch")]
        torch.testing.assert_close(*grads)
        found.append(grads[0])
    torch.testing.assert_close(found[2], found[0] * 0.25)


def test_sizes_of_containers():
    weights = [1.0, 2.0]

    def core(x, v):
        for w in weights:
            x = x * w
        return x, v

    assert_follows(core)
    weights.append(3.0)
    assert_follows(core)
    weights[0] = 7.0
    assert_follows(core)
    del weights[1]
    assert_follows(core)


def test_new_attributes_and_keys():
    table, box = {}, Inner()

    def core(x, v):
        return x * table.get("gain", 1.0) * getattr(box, "gain", 1.0), v

    assert_follows(core)
    table["gain"] = 2.0
    assert_follows(core)
    box.gain = 3.0
    assert_follows(core)


def test_a_core_with_attributes_of_its_own():
    """What flexsn keeps on a function is no change of the function."""

    def core(x, v):
        return x * core.gain, v

    core.gain = 2.0
    x = torch.rand(3, 4)
    for gain in (2.0, 3.0):
        core.gain = gain
        assert torch.equal(flexsn.FlexSN(core, 1, 1, strict=True)(x), x * gain)
        assert kept(core) is kept(core)


def test_changed_code_of_a_class():
    class Act:
        def scale(self, x):
            return x * 2

    act = Act()

    def core(x, v):
        return act.scale(x), v

    assert_follows(core)
    Act.scale = lambda self, x: x * 5
    assert_follows(core)


def test_look_is_cheap_to_repeat_and_current():
    w, gain = parameter(3), 2.0

    def core(x, v):
        return x * w * gain, v

    seen = look(core)
    assert set(seen.objects) == {"w"} and seen.current() and seen.fingerprint == look(core).fingerprint
    gain = 3.0
    assert not seen.current() and look(core).fingerprint != seen.fingerprint


# --- gradients of what is computed from captured tensors -----------------------------------------------------------------------
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.round()

    @staticmethod
    def backward(ctx, grad):
        return 3.0 * grad


def matrix(w):
    return (w.view(1, 3) @ torch.arange(9, dtype=f64).reshape(3, 3)).view(3)


PROLOGUES = {
    "detach": lambda w: w.detach() * w,
    "straight-through": lambda w: w + (w.round() - w).detach(),
    "autograd.Function": lambda w: Round.apply(w),
    "softplus": nn.functional.softplus,
    "softmax": lambda w: torch.softmax(w, 0),
    "matmul": matrix,
    "view": lambda w: w.view(1, -1),
    "view then permute": lambda w: w.view(1, -1, 1).permute(0, 2, 1),
    "norm": lambda w: w / w.norm(),
    "sum": lambda w: w.sum(),
    "mean and square": lambda w: (w - w.mean()) ** 2,
    "clamp": lambda w: w.clamp(-0.25, 0.25),
    "cat": lambda w: torch.cat([w[:1], w[1:] * 2]),
    "sigmoid of power": lambda w: torch.sigmoid(w) ** 3,
    "where": lambda w: torch.where(w > 0, w, 0.1 * w),
    "max": lambda w: w.max(),
    "expand": lambda w: w.expand(4, 3),
    "outer": lambda w: torch.outer(w.new_ones(4), w),
    "stack": lambda w: torch.stack([w, w * w]).sum(0),
    "exp of scalar": lambda w: torch.exp(-1.0 / w[0].abs()),
    "einsum": lambda w: torch.einsum("i,ij->j", w, torch.ones(3, 3, dtype=f64)),
    "linear": lambda w: nn.functional.linear(w, torch.eye(3, dtype=f64) * 2, w),
    "layer_norm": lambda w: nn.functional.layer_norm(w, (3,)),
    "sort": lambda w: w.sort().values,
    "diagonal": lambda w: torch.outer(w, w).diagonal(),
    "max along a dim": lambda w: torch.outer(w, w).max(0).values,
    "median": lambda w: torch.outer(w, w).median(0).values,
    "topk": lambda w: torch.outer(w, w).topk(1, 0).values[0],
    "conv1d": lambda w: torch.conv1d(w[None, None], w[None, None, :2], padding=1)[0, 0, :3],
    "avg_pool1d": lambda w: nn.functional.avg_pool1d(w[None], 3, 1, 1)[0],
    "interpolate": lambda w: nn.functional.interpolate(w[None, None], size=6)[0, 0, ::2],
}  # fmt: skip


@pytest.mark.parametrize("name", PROLOGUES)
def test_prologue_gradients_are_eagers_own(name):
    prologue = PROLOGUES[name]
    w, b = parameter(3), parameter(3)

    def core(x, v):
        v = v * prologue(w) * 0.3 + x
        return v + b, v

    check(core, *([t] for t in x_and_v()), captured={"w": w, "b": b}, exact=False)


RARE = {
    "cumsum": lambda w: w.cumsum(0),
    "flip": lambda w: w.flip(0) + w[[0, 0, 1]],
    "prod": lambda w: w.prod(),
    "index_select": lambda w: torch.index_select(w, 0, torch.tensor([2, 1, 0])),
    "gather": lambda w: torch.gather(w, 0, torch.tensor([2, 2, 0])),
    "pad": lambda w: nn.functional.pad(w[:2], (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", RARE)
def test_rare_prologues_are_right_or_refused(name):
    w = parameter(3)

    def core(x, v):
        v = v * RARE[name](w) * 0.3 + x
        return v, v

    operands = [[t] for t in x_and_v()]
    try:
        output(core)
    except CannotFuseError as error:
        assert error.core == "core"
    else:
        check(core, *operands, captured={"w": w}, exact=False)


@pytest.mark.parametrize("name", ["softplus", "straight-through", "matmul", "view", "norm", "detach"])
def test_prologues_of_explicit_params(name):
    prologue = PROLOGUES[name]

    def core(x, v, w):
        v = v * prologue(w) * 0.3 + x
        return v, v

    x, v = x_and_v()
    check(core, [x], [v], [torch.randn(3, dtype=f64)], exact=False)


def test_no_grad_prologue():
    w = parameter(3)

    def core(x, v):
        with torch.no_grad():
            frozen = w * 2
        v = v * frozen + x * w
        return v, v

    check(core, *([t] for t in x_and_v()), captured={"w": w})


def test_no_grad_in_the_step():
    w = parameter(3)

    def core(x, v):
        with torch.no_grad():
            h = v * w
        return x * w + h, h + x

    check(core, *([t] for t in x_and_v()), captured={"w": w})


class Clipped(torch.autograd.Function):
    """Its backward is not linear in the cotangent."""

    @staticmethod
    def forward(ctx, w):
        return w * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.125, 0.125)


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.sign() + 1.0


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad + 1.0


@pytest.mark.parametrize("function", [Clipped, Signed, Shifted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3,), (), (4, 3), (4, 1)], ids=str)
def test_backward_that_is_not_linear(function, shape):
    """The eager loop applies it at every step; a kernel that sums over time first would give a wrong number."""
    w = parameter(*shape)

    def core(x, v):
        v = 0.5 * v + x * function.apply(w)
        return v, v

    x, _ = x_and_v()
    want = torch.autograd.grad(flexsn.scan(core, [x], [None], backend="torch").outputs[0].sum(), [w])[0]
    try:
        got = torch.autograd.grad(flexsn.scan(core, [x], [None], backend="cpp").outputs[0].sum(), [w])[0]
    except ParamGradientError as error:
        assert error.core == "core"
    else:
        torch.testing.assert_close(got, want)


def test_decorated_functions_of_libraries_are_told_apart():
    """Surrogates share the code of their decorator."""
    kinds = [surrogate.atan, surrogate.sigmoid, surrogate.atan(alpha=3.0), surrogate.atan(alpha=3.0), surrogate.atan]

    def core_of(spike):
        return lambda x, v: (spike(x + v), v)

    prints = [look(core_of(spike)).fingerprint for spike in kinds]
    assert [prints.index(p) for p in prints] == [0, 1, 2, 2, 0]
    x = torch.randn(3, 5)
    grads = []
    for spike in kinds[:3]:
        leaf = x.clone().requires_grad_()
        flexsn.LIF(surrogate=spike, backend="cpp")(leaf).sum().backward()
        grads.append(leaf.grad)
    assert not torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


# --- places of a value, in a class, a tuple, a module -----------------------------------------------------------------------
def test_a_wrapped_function_of_a_library_is_the_users_own():
    gain = 1.0
    bias = parameter(3)

    @functools.wraps(flexsn.neurons.lif)  # which copies the name of its module
    def core(x, v):
        return flexsn.neurons.lif(gain * x + bias, v, v_threshold=0.2)

    before = output(core)
    gain = 3.0
    assert not torch.equal(output(core), before)
    assert_follows(core)
    assert list(flexsn.FlexSN(core, 1, 1).parameters()) == [bias]


class Steep:
    spike = surrogate.sigmoid(alpha=1.0)
    options = types.SimpleNamespace(gain=1.0)
    bias = parameter()

    def __call__(self, x, v):
        v = v * 0.5 + x * self.options.gain + self.bias
        return type(self).spike(v - 1), v


@pytest.mark.parametrize("name, value", [("spike", surrogate.sigmoid(alpha=8.0)), ("options", types.SimpleNamespace(gain=3.0))])
def test_changed_objects_of_a_class(monkeypatch, name, value):
    core, x = Steep(), torch.randn(5, 7, dtype=f64, requires_grad=True)

    def gradient(backend):
        return torch.autograd.grad(flexsn.scan(core, [x], [None], backend=backend).outputs[0].sum(), x)[0]

    before = gradient("cpp")
    monkeypatch.setattr(Steep, name, value)
    assert not torch.equal(gradient("cpp"), before)
    torch.testing.assert_close(gradient("cpp"), gradient("torch"), rtol=1e-12, atol=1e-12)


def test_tensors_of_a_class_are_captured():
    x, neuron = torch.randn(5, 7, dtype=f64) + 1, flexsn.FlexSN(Steep(), 1, 1, strict=True)
    assert list(neuron.parameters()) == [Steep.bias]
    own, looped = (
        torch.autograd.grad(flexsn.scan(Steep(), [x], [None], backend=b).outputs[0].sum(), Steep.bias)[0] for b in ("cpp", "torch")
    )
    torch.testing.assert_close(own, looped, rtol=1e-12, atol=1e-12)


def test_a_class_may_lead_anywhere():
    class Core:
        State = tuple[torch.Tensor, list[int]]
        rows = (object(), object())
        network = None
        log = logging.getLogger(__name__)

        def __call__(self, x, v):
            v = v * 0.5 + x
            return v * 1, v

    neuron = flexsn.FlexSN(Core(), 1, 1, stateful=False, strict=True)
    Core.network = nn.Sequential(nn.Linear(3, 3), neuron)
    x = torch.randn(5, 3)
    Core.network(x)
    reads = neuron.look()[0]
    Core.network(x)
    assert neuron.look()[0] is reads and len(list(Core.network.modules())) == 3 and not list(neuron.parameters())


class Around(contextlib.ContextDecorator):
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.autocast("cpu", enabled=False), Around(), torch.compiler.disable])
def test_decorators_of_libraries_do_not_hide_the_users_function(decorate):
    gain, bias = 1.0, torch.ones(3, dtype=f64)

    @decorate
    def drive(scale):
        return bias * (gain * scale)

    def core(x, v):
        v = v * 0.5 + x * drive(2.0)
        return v * 1, v

    assert [b for _, b in flexsn.FlexSN(core, 1, 1).named_buffers()] == [bias]
    before = output(core)
    gain = 3.0
    assert not torch.equal(output(core), before)
    bias = bias + 1
    assert_follows(core)


def test_only_what_may_change_is_looked_at_in_every_call():
    places = [slot.path for slot, _ in flexsn.neurons.LIF().look()[0].watched]
    arguments = [f"core.{name}" for name in flexsn.neurons.LIF.defaults]
    assert [p for p in places if p not in arguments] == ["core"] * 3 and places.count("core.surrogate") == 4  # functions: code and defaults


def test_calls_of_a_neuron_that_its_core_leads_to_change_nothing_that_is_read():
    """What a module remembers of its calls is no setting of the core."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = 0.5
            self.neuron = flexsn.FlexSN(lambda x, v: (v * self.gain + x, v + x), 1, 1, store_state_seqs=True)

    net, x = Network(), torch.randn(3, 4)
    net.neuron(x)
    first = net.neuron.look()[0]
    for _ in range(3):
        net.neuron(x)
        assert net.neuron.look()[0] is first
    net.neuron.reset()
    assert net.neuron.look()[0] is first


def test_a_module_of_python_in_a_closure():
    settings = types.ModuleType("settings_of_a_test")
    settings.gain = 1.0

    def core(x, v):
        return v + x * settings.gain, v + x

    before = output(core)
    settings.gain = 3.0
    assert not torch.equal(output(core), before)
    assert_follows(core)


Weights = collections.namedtuple("Weights", "gain decay")


def in_a_closure(gain, decay):
    weights = (gain, (decay,))
    return lambda x, v: (x * weights[0] + v, v * weights[1][0] + x)


def in_a_namedtuple(gain, decay):
    weights = Weights(gain, decay)
    return lambda x, v: (x * weights.gain + v, v * weights.decay + x)


def in_a_partial(gain, decay):
    return functools.partial(lambda gain, decay, x, v: (x * gain + v, v * decay + x), gain, decay)


def in_defaults(gain, decay):
    def core(x, v, gain=gain, decay=decay):
        return x * gain + v, v * decay + x

    return core


@pytest.mark.parametrize("make", [in_a_closure, in_a_namedtuple, in_a_partial, in_defaults])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_copies_of_a_module_whose_core_holds_a_tuple_of_tensors(make, backend):
    x = torch.randn(6, 3, dtype=f64)
    neuron = flexsn.FlexSN(make(parameter(3), torch.tensor(0.5, dtype=f64)), 1, 1, backend=backend, stateful=False)
    before, other = neuron(x), copy.deepcopy(neuron)
    with torch.no_grad():
        next(other.parameters()).fill_(2.0)
    torch.testing.assert_close(other(x), make(2.0, 0.5)(x, _before(x, 0.5))[0])
    assert torch.equal(neuron(x), before)
    assert other.float()(x.float()).dtype is torch.float32
    reads = neuron.look()[0]
    other(x[:5].float())
    assert neuron.look()[0] is reads  # what the copy had put in place is gone: the very objects are back


def _before(x, decay):
    """The state before each step of those cores."""
    states = [torch.zeros_like(x[0])]
    for x_t in x[:-1]:
        states.append(states[-1] * decay + x_t)
    return torch.stack(states)


attribute_or_global = torch.ones(3, requires_grad=True)


def test_an_attribute_of_the_name_of_a_global_is_no_global():
    """Else `.double()` or `requires_grad_(False)` on a neuron would act on a tensor that its core never reads."""
    config = types.SimpleNamespace(attribute_or_global=0.5)
    neuron = flexsn.FlexSN(lambda x, v: (x, v * config.attribute_or_global + x), 1, 1)
    assert not list(neuron.named_parameters()) and not neuron.state_dict()
    reader = flexsn.FlexSN(lambda x, v: (x, [v * attribute_or_global + x for _ in range(1)][0]), 1, 1)  # noqa: RUF015  code inside code
    assert list(reader.state_dict()) == ["captured.attribute_or_global"]


def test_a_parametrization_while_its_cache_is_on():
    """The cache holds what the parameter was when it was read last; a program reads it at every call."""

    def fresh(shift):
        core = Core()
        parametrize.register_parametrization(core.gate, "w", Positive())
        with torch.no_grad():
            core.gate.parametrizations.w.original.add_(shift)
        return core

    core = fresh(0.0)
    for again in range(3):
        with parametrize.cached():
            if again != 1:
                assert core.gate.w is core.gate.w
            assert_follows(core)
            assert type(core.gate.w) is torch.Tensor
        with torch.no_grad():
            core.gate.parametrizations.w.original.add_(1.0)
    assert_follows(core)
    with torch.no_grad(), parametrize.cached():
        assert_follows(fresh(3.0))
    with parametrize.cached():
        check(fresh(0.5), *([t] for t in x_and_v()), exact=False)


def test_context_variables_and_views_of_dicts():
    variable, values = contextvars.ContextVar("decay", default=0.5), {"gain": 2.0, "w": torch.tensor(0.5, dtype=f64)}
    view = types.MappingProxyType(values)

    def core(x, v):
        h = v * variable.get() + x * view["gain"] * view["w"]
        return h, h

    assert_follows(core)
    token = variable.set(torch.tensor(0.75, dtype=f64))
    assert_follows(core)
    variable.set(torch.tensor(0.25, dtype=f64))
    assert_follows(core)
    values["gain"] = 3.0
    assert_follows(core)
    values["w"] = torch.tensor(0.125, dtype=f64)
    assert_follows(core)
    neuron, x = flexsn.FlexSN(core, num_states=1, stateful=False), torch.randn(6, 4, 3, dtype=f64)
    before, twin = neuron(x), copy.deepcopy(neuron)
    values["w"].mul_(2.0)
    assert torch.equal(twin(x), before) and not torch.equal(neuron(x), before)
    variable.reset(token)


def test_the_cache_of_parametrizations_of_another_thread():
    """A capture meanwhile neither leaves it on nor brings back what it held."""

    def other(before, within):
        time.sleep(before)
        with parametrize.cached():
            time.sleep(within)

    def core(x, v):
        sleep(0.4)
        return x + v, x + v

    sleep, (x, v) = time.sleep, x_and_v()
    threads = [threading.Thread(target=other, args=times) for times in ((0.0, 0.3), (0.3, 0.8))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    torch.testing.assert_close(flexsn.scan(core, [x], [v]).outputs[0], x.cumsum(0) + v)
    for thread in threads:
        thread.join()
    layer = nn.Linear(5, 5)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    before = layer.weight.clone()
    with torch.no_grad():
        layer.parametrizations.weight.original.add_(1.0)
    assert not torch.equal(layer.weight, before) and parametrize._cache == {}


def test_a_core_that_caches_parametrizations_itself():
    core = Core()
    parametrize.register_parametrization(core.gate, "w", Positive())

    def cached(x, v):
        with parametrize.cached():
            return core(x, v)

    with torch.no_grad(), parametrize.cached():
        assert core.gate.w is core.gate.w
        assert_follows(cached)
    with torch.no_grad():
        core.gate.parametrizations.w.original.add_(1.0)
    assert_follows(cached)


ALIAS = tuple[int, float]


def test_an_alias_of_types():
    def core(x, v):
        h = typing.cast(ALIAS, v) * 0.5 + x
        return h, h

    assert_follows(core)


class Holder:
    gain = 1.0


def test_views_of_dicts_and_weak_references():
    values, holder = {"a": 1.0, "b": 2.0}, Holder()
    view, reference = values.values(), weakref.ref(holder)

    def core(x, v):
        h = v * 0.5 + x * sum(view) * reference().gain
        return h, h

    assert_follows(core)
    values["a"] = 3.0
    assert_follows(core)
    holder.gain = 4.0
    assert_follows(core)


class Answering:
    """Knows no name, and says so in words of its own."""

    def __getattr__(self, name):
        raise KeyError(name)


class Odd(nn.Module):
    answers = Answering()

    def forward(self, x, v):
        return x + v, v * 0.5 + x


def test_an_attribute_of_a_class_that_raises_what_it_likes():
    assert_follows(Odd())


@pytest.mark.parametrize("shorten", [lambda kept: kept.pop(), lambda kept: kept.clear()], ids=["pop", "clear"])
@pytest.mark.parametrize("kind", [list, collections.deque])
def test_a_core_that_shortens_a_container(kind, shorten):
    kept = kind([1.0, 2.0, 3.0])

    def core(x, v):
        shorten(kept)
        return x * len(kept), v

    with pytest.raises(SideEffectError, match="core"):
        flexsn.scan(core, [torch.ones(2, 3)], [None], backend="cpp")
    assert list(kept) == [1.0, 2.0, 3.0]


class Stepping(nn.Module):
    """Writes to what it holds: what it wrote once or twice is what a trace must not keep."""

    def __init__(self, step):
        super().__init__()
        self.step, self.even, self.sign, self.pair, self.line = step, True, -1.0, [1.0, 2.0], collections.deque()

    def forward(self, x, v):
        return x * self.step(self) + v, v * 0.5 + x


def alternates(self):
    self.even = not self.even
    return 0.5 if self.even else 1.0


def changes_sign(self):
    self.sign *= -1.0
    return self.sign


def turns(self):
    self.pair.append(self.pair.pop(0))
    return self.pair[0]


def grows(self):
    self.line.append(1.0)
    return float(len(self.line))


class Slotted:
    __slots__ = ("kept",)


def remembers(self, kept=Slotted()):  # noqa: B008  # one object for all calls
    kept.kept = getattr(kept, "kept", 0.0) + 1.0
    return kept.kept


def counts_itself(self):
    counts_itself.calls = getattr(counts_itself, "calls", 0.0) + 1.0
    return counts_itself.calls


def counts_globally(self):
    global calls_of_all
    calls_of_all = globals().get("calls_of_all", 0.0) + 1.0
    return calls_of_all


@pytest.mark.parametrize("step", [alternates, changes_sign, turns, grows, remembers, counts_itself, counts_globally])
def test_a_core_that_leaves_something_for_the_next_step(step):
    """Also where two traces leave all as it was, or where nothing stood before."""

    def forget():
        vars(counts_itself).pop("calls", None)
        globals().pop("calls_of_all", None)
        if hasattr(remembers.__defaults__[0], "kept"):
            del remembers.__defaults__[0].kept

    x, want, v = torch.rand(6, 3, dtype=f64), [], torch.zeros(3, dtype=f64)
    forget()
    core = Stepping(step)
    for x_t in x:
        s, v = core(x_t, v)
        want.append(s)
    forget()
    core = Stepping(step)
    with pytest.raises(SideEffectError):
        flexsn.scan(core, [x], [None], backend="cpp")
    with pytest.warns(flexsn.errors.FallbackWarning):
        assert torch.equal(flexsn.scan(core, [x], [None]).outputs[0], torch.stack(want))


def halves():
    while True:
        yield 0.5


class Counting:
    ids = itertools.count(1)

    def __init__(self):
        self.gains = {"of": (iter([1.0, 2.0, 3.0]),)}

    def by_class(self, x, v):
        return x * next(self.ids), v

    def by_item(self, x, v):
        return x * sum(itertools.islice(self.gains["of"][0], 1)), v

    def beside(self, x, v):
        return x + v, v + 1


DRAWN = [
    *map(iter, ([1.0, 2.0, 3.0], (1.0, 2.0, 3.0), {1.0: 0, 2.0: 0}, "123")),
    itertools.count(1.0),
    itertools.cycle([1.0, 2.0]),
    halves(),
]
DRAWN += [map(float, range(1, 9)), zip([1.0, 2.0], strict=True), enumerate([1.0, 2.0]), io.StringIO("1\n2\n3\n")]


@pytest.mark.parametrize("iterator", DRAWN, ids=lambda it: type(it).__name__)
def test_what_is_drawn_from_an_iterator_is_not_frozen(iterator):
    """A kernel refuses the core, and nothing is taken; the eager loop draws at every step."""

    def core(x, v):
        drawn = next(iterator)
        return x * float(drawn[-1] if isinstance(drawn, tuple) else drawn), v

    x = torch.ones(2, 3)
    with pytest.raises(SideEffectError, match="draws from the iterator `iterator`"):
        flexsn.scan(core, [x], [None], backend="cpp")
    first, second = flexsn.scan(core, [x], [None], backend="torch").outputs[0][:, 0].tolist()
    assert (first, second) in {(1.0, 2.0), (0.5, 0.5), (1.0, 0.0)}


def test_an_iterator_may_stand_anywhere_and_need_not_be_drawn_from():
    x, holder = torch.ones(2, 3), Counting()
    for core, place in ((holder.by_class, "self.type.ids"), (holder.by_item, "self.gains.of.0")):
        with pytest.raises(SideEffectError, match=f"the iterator `{re.escape(place)}`"):
            flexsn.scan(core, [x], [None], backend="cpp")
    assert next(holder.ids) == 1 and list(holder.gains["of"][0]) == [1.0, 2.0, 3.0]
    assert flexsn.scan(holder.beside, [x], [None], backend="cpp").outputs[0].tolist() == [[1.0] * 3, [2.0] * 3]


class Numbered(nn.Module):
    """Draws a number when it is made."""

    new = itertools.count().__next__

    def __init__(self):
        super().__init__()
        self.next_id = itertools.count().__next__
        self.id = self.next_id()

    def forward(self, x, v):
        return x + v, v + 1


def test_a_core_that_merely_leads_to_an_iterators_method():
    x = torch.ones(2, 3)
    assert flexsn.scan(Numbered(), [x], [None], backend="cpp").outputs[0].tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_core_that_catches_what_an_iterator_says():
    iterator = iter([1.0, 2.0])

    def core(x, v):
        with contextlib.suppress(Exception):
            next(iterator)
        return x + v, v

    with pytest.raises(SideEffectError, match="draws from the iterator"):
        flexsn.scan(core, [torch.ones(2, 3)], [None], backend="cpp")


def test_methods_of_lists_dicts_and_tensors_are_told_from_each_other():
    """By what they are bound to."""

    def follow(core, change=lambda: None):
        x = torch.ones(2, 3)
        for _ in range(2):
            assert torch.equal(flexsn.scan(core, [x], [None], backend="cpp").outputs[0][0], core(x[0], torch.zeros(3))[0])
            change()

    for value in (1.0, 7.0):
        times, get, d = torch.full((3,), value).mul, {"k": value}.get, {"k": value}
        follow(lambda x, v, times=times: (times(x) + v, v))
        follow(lambda x, v, get=get: (x * get("k"), v))
        follow(lambda x, v, get=d.get: (x * get("k"), v), lambda d=d: d.update(k=d["k"] + 1))


@pytest.mark.parametrize("draw", [itertools.count(1).__next__, [3.0, 2.0, 1.0].pop], ids=["next", "pop"])
def test_methods_that_change_what_they_are_bound_to(draw):
    with pytest.raises(SideEffectError):
        flexsn.scan(lambda x, v: (x * draw(), v), [torch.ones(2, 3)], [None], backend="cpp")
    assert draw() in (1, 1.0)


def test_a_generator_behind_its_method():
    draw = random.Random(0).random
    with pytest.raises(RandomOpError):
        flexsn.scan(lambda x, v: (x * draw(), v), [torch.ones(2, 3)], [None], backend="cpp")


@pytest.mark.parametrize(
    "hold", [lambda t: t.mul, lambda t: functools.partial(lambda held, x: x * next(iter(held)), {t})], ids=["method", "set"]
)
def test_a_number_as_a_tensor_that_no_name_leads_to(hold):
    """Its value is read at every call."""
    x, t = torch.ones(3, 2), torch.tensor(2.0)
    times = hold(t)
    core = lambda x, v: (times(x) + v, v)
    for value in (2.0, 5.0):
        t.fill_(value)
        assert flexsn.scan(core, [x], [None], backend="cpp").outputs[0][0, 0].item() == value


def test_tensors_of_one_number_hold_what_their_dtype_holds():
    def core(x, v):
        decay = torch.full_like(x, 0.1).double()  # float32's
        n, flag = torch.full((), 2.7, dtype=torch.int64), torch.full((), 0.3, dtype=torch.int64)
        return v * decay, x * n.item(), (x if flag else -x), x + torch.full_like(x, 16777217.0).long(), v

    x, v = torch.ones(1, 1), torch.ones(1, dtype=f64)
    got, want = (flexsn.scan(core, [x], [v], backend=backend).outputs for backend in ("cpp", "torch"))
    assert [y.item() for y in got] == [y.item() for y in want] == [0.1 + 1.4901161138336505e-09, 2.0, -1.0, 16777216.0]


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5))

    def forward(self, x, v):
        h = v * torch.sigmoid(self.w) + x
        return torch.relu(h), h * 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_a_scripted_module(inside):
    scripted = torch.jit.script(Leaky())
    core = (lambda x, v: scripted(x, v)) if inside else scripted
    x, v = torch.randn(7, 3, 5), torch.zeros(3, 5)
    for _ in range(2):
        grads = []
        for backend in ("cpp", "torch"):
            scripted.zero_grad()
            flexsn.scan(core, [x], [v], backend=backend).outputs[0].sum().backward()
            grads.append(scripted.w.grad.clone())
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            scripted.w.add_(1.0)


def rectangle(h: torch.Tensor):
    return torch.where(h >= 0, torch.ones_like(h), torch.zeros_like(h)) + torch.full_like(h, 0.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_numbers_that_are_made_past_pytorchs_functions():
    """By TorchScript, and of numpy's numbers."""
    scripted = torch.jit.script(rectangle)

    def core(x, v):
        h = torch.from_numpy(numpy.array(0.5)) * v + x
        return scripted(h - 1.0), h

    assert_follows(core)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, nn.ParameterDict], ids=["dict", "OrderedDict", "ParameterDict"])
def test_the_order_of_keys(make):
    held = make({"fast": nn.Parameter(torch.tensor(0.1)), "slow": nn.Parameter(torch.tensor(0.9))})

    def core(x, v):
        for k, w in enumerate(held.values()):
            v = v * w + x * (k + 1)
        return v, v

    assert_follows(core)
    held["fast"] = held.pop("fast")
    assert_follows(core)


def test_the_order_of_modules():
    stages = nn.ModuleDict({"a": nn.LeakyReLU(0.5), "b": nn.Tanh()})

    def core(x, v):
        for stage in stages.values():
            v = stage(v + x)
        return v, v

    assert_follows(core)
    stages["a"] = stages.pop("a")
    assert_follows(core)


class Halves:
    def __call__(self, v):
        return v * 0.5


class Keeps(Halves):
    def __call__(self, v):
        return v * 0.9


@pytest.mark.parametrize("holder, other", [(Halves(), Keeps), (nn.ReLU(), nn.Tanh)], ids=["object", "module"])
def test_another_class_of_an_object(holder, other):
    core = lambda x, v: (holder(v + x), holder(v) + x)
    assert_follows(core)
    holder.__class__ = other
    assert_follows(core)


def test_settings_of_distributions():
    normal = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0), validate_args=False)
    affine = torch.distributions.AffineTransform(0.0, 2.0)
    core = lambda x, v: (normal.cdf(x + v), affine(v) * 0.2 + x)
    assert_follows(core)
    normal.scale, affine.scale = torch.tensor(0.1), 3.0
    assert_follows(core)


def test_a_module_named_like_one_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "sndhdr.py").write_text(
        "import torch\nTAU, W = 0.5, torch.tensor(0.5)\ndef core(x, v):\n    return x * TAU * W, v * 0.5 + x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sndhdr", raising=False)
    own = importlib.import_module("sndhdr")
    try:
        assert_follows(own.core)
        own.TAU = 0.25
        assert_follows(own.core)
        own.W = torch.tensor(3.0)
        assert_follows(own.core)
    finally:
        del sys.modules["sndhdr"]


class Recording:
    """Its neuron's core is a method of its own, which the neuron thus leads to."""

    def record(self):
        self.mask, self.spikes, self.neuron = None, [], flexsn.FlexSN(self.core, num_states=1)
        return self

    def core(self, x, v):
        h = 0.5 * v + (x if self.mask is None else x * self.mask)
        s = surrogate.atan(h - 1.0)
        return s, h * (1.0 - s)


class RecordingModule(nn.Module, Recording):
    pass


@pytest.mark.parametrize("make", [Recording, RecordingModule])
def test_tensors_that_come_to_the_owner_of_a_method(make):
    net, x = make().record(), torch.rand(5, 3, 8)
    for scale in (1.0, 0.5, 2.0):
        net.neuron.reset()
        net.spikes.append(net.neuron(x))
        assert torch.equal(net.spikes[-1], flexsn.scan(net.core, [x], [torch.zeros(3, 8)], backend="torch").outputs[0])
        net.mask = torch.full((8,), scale)


class Gained(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = [2.0]

    def scaled(self, x):
        return x * self.gains[0]

    @property
    def gain(self):
        return self.gains[0]

    @staticmethod
    def of(module):
        return module.gains[0]


class Through(Gained):
    def scaled(self, x):
        return super().scaled(x)


class Forward(Gained):
    def forward(self, x):
        return x * self.gains[0]


class Called(Gained):
    def __call__(self, x):
        return x * self.gains[0]


class Checked(nn.InstanceNorm1d):
    """PyTorch's `forward` calls what it overrides."""

    def __init__(self):
        super().__init__(3)
        self.gains = [2.0]

    def _check_input_dim(self, x):
        raise ValueError(self.gains[0])


class OfClass(Gained):
    """Reads what a class, of which nobody knows where it leads, holds."""

    class Holder:
        pass

    holder = Holder()

    def __init__(self):
        super().__init__()
        self.holder.gains = self.gains

    def of_class(self, x):
        return x * self.holder.gains[0]


class Gotten(Gained):
    gain = property(operator.attrgetter("gains"))


class OfGained:
    def __init__(self, module):
        self.gain = module.gains[0]


def read_in_a_check(m, x):
    try:
        return m(x)
    except ValueError as error:
        return x * error.args[0]


# of a module and `x`: each multiplies by the first of the module's gains
GAINED = {
    "an attribute": (Gained, lambda m, x: x * m.gains[0]),
    "a computed name": (Gained, lambda m, x: x * getattr(m, "".join(("ga", "ins")))[0]),
    "vars": (Gained, lambda m, x: x * vars(m)["".join(("ga", "ins"))][0]),
    "__dict__": (Gained, lambda m, x: x * m.__dict__["".join(("ga", "ins"))][0]),
    "attrgetter": (Gained, lambda m, x: x * operator.attrgetter("".join(("ga", "ins")))(m)[0]),
    "a method": (Gained, lambda m, x: m.scaled(x)),
    "a method of the class": (Gained, lambda m, x: Gained.scaled(m, x)),
    "a partial": (Gained, lambda m, x: functools.partial(m.scaled, x)()),
    "a method that a method names": (Through, lambda m, x: m.scaled(x)),
    "a property": (Gained, lambda m, x: x * m.gain),
    "a static method": (Gained, lambda m, x: x * m.of(m)),
    "forward": (Forward, lambda m, x: m(x)),
    "__call__": (Called, lambda m, x: m(x)),
    "what a library calls": (Checked, read_in_a_check),
    "a method of a computed name": (OfClass, lambda m, x: getattr(m, "".join(("of_", "class")))(x)),
    "a property of C": (Gotten, lambda m, x: x * m.gain[0]),
    "an object that is made": (Gained, lambda m, x: x * OfGained(m).gain),
}


@pytest.mark.parametrize("by", GAINED)
def test_attributes_of_a_module_are_read_by_any_way(by):
    module, read = GAINED[by][0](), GAINED[by][1]
    core = lambda x, v: (read(module, x) + v, 0.5 * v + x)
    for gain in (2.0, 3.0, torch.tensor(0.5, dtype=f64)):
        module.gains[0] = gain
        assert_follows(core)
        assert torch.equal(output(core), output(lambda x, v, gain=gain: (x * gain + v, 0.5 * v + x)))


class Logging(nn.Module):
    """A network with two neurons, and what a training loop keeps of it; a core that can reach all of it reads one number."""

    def __init__(self, closure):
        super().__init__()
        self.linear, self.gain, self.last, self.log, self.calls = nn.Linear(4, 4), 2.0, None, [], 0
        self.first = flexsn.LIF()
        self.neuron = flexsn.FlexSN((lambda x, v: self.core(x, v)) if closure else self.core, num_inputs=1, num_states=1)

    def core(self, x, v):
        return x * self.gain + v, v * 0.5

    def forward(self, x):
        self.last = h = self.linear(x)
        self.calls += 1
        self.log.append(h.detach())
        return self.neuron(self.first(h))


@pytest.mark.parametrize("closure", [False, True], ids=["method", "closure"])
def test_what_a_core_can_reach_and_does_not_read_stays_the_networks(closure):
    net, seen = Logging(closure), []
    for batch in (2, 3):
        net(torch.randn(5, batch, 4)).sum().backward()
        seen += [weakref.ref(net.last), weakref.ref(net.log[-1]), weakref.ref(net.first.states[0])]
        assert set(net.state_dict()) == {"linear.weight", "linear.bias"} and not list(net.buffers())
        flexsn.reset_net(net)
    Logging(closure).load_state_dict(net.state_dict())
    before = net.neuron._reads
    net(torch.randn(5, 3, 4))
    assert net.neuron._reads is before  # nobody looked again
    states = [v.clone() for v in net.first.states]
    net.load_state_dict(net.state_dict())
    assert all(map(torch.equal, states, net.first.states))
    net.last = None
    net.log.clear()
    flexsn.reset_net(net)
    assert [ref() for ref in seen] == [None] * len(seen)
    net.gain = 3.0
    x = torch.randn(5, 2, 4)
    expected = flexsn.scan(lambda x, v: (x * 3.0 + v, v * 0.5), [net.first(net.linear(x))], [None]).outputs[0]
    flexsn.reset_net(net)
    assert torch.equal(net(x), expected)


def test_a_set_that_changes():
    flags = {"a", 2}

    def core(x, v):
        return (x * 2.0 if "a" in flags else x) + (v if 2 in flags else 0.0 * v), 0.5 * v + x

    for change in (
        lambda: None,
        lambda: flags.remove("a"),
        lambda: flags.add("b"),
        lambda: flags.remove(2),
        flags.clear,
        lambda: flags.add("a"),
    ):
        change()
        assert_follows(core)


def test_a_core_that_adds_to_a_set():
    seen = set()

    def core(x, v):
        seen.add("step")
        return x + v, 0.5 * v + x

    with pytest.raises(SideEffectError, match="changes `set`"):
        flexsn.scan(core, [torch.randn(3, 2)], [None], strict=True)
    assert seen == set()


class Settings:
    def __init__(self, tau):
        self.tau = tau


class Dispatching(nn.Module):
    """A network whose neuron's core is a method of its own and reads `self.kept` (`[2.0]`) by some way."""

    def __init__(self):
        super().__init__()
        self.kept, self.kind, self.table = [2.0], "soft", {"w": torch.full((3,), 2.0, dtype=f64)}
        self.made()
        self.neuron = flexsn.FlexSN(self.core, num_inputs=1, num_states=1, stateful=False)

    def made(self):
        pass

    def core(self, x, v):
        return x + v, 0.5 * v + self.scaled(x)

    def forward(self, x, v=None):
        return self.neuron(x) if v is None else x * self.kept[0]

    def change(self):
        self.kept[0] += 1.0


class ByName(Dispatching):
    settings = Settings(2.0)

    def scaled(self, x):
        return getattr(self, f"scaled_{self.kind}")(x)

    def scaled_soft(self, x):
        return x * self.settings.tau

    def change(self):
        type(self).settings.tau += 1.0


class ByComputedName(Dispatching):
    def scaled(self, x):
        return x * getattr(self, "".join(("ke", "pt")))[0]


class ByNamespace(Dispatching):
    def scaled(self, x):
        return x * self.__dict__["".join(("ke", "pt"))][0]


class ByCall(Dispatching):
    def scaled(self, x):
        return self(x, 0)


class BySuper(Dispatching):
    def scaled(self, x):
        return super().__call__(x, 0)


class ByMap(Dispatching):
    def scaled(self, x):
        return next(map(functools.partial(self, v=0), [x]))


class ByForward(Dispatching):
    def scaled(self, x):
        return self.forward(x, 0)


class ByAlias(Dispatching):
    def scaled(self, x):
        me = self
        return read(me, "".join(("ke", "pt")))[0] * x


read = getattr


class ByMatch(Dispatching):
    def scaled(self, x):
        match self:
            case nn.Module(kept=[gain]):
                return x * gain


class ByGetter(Dispatching):
    def made(self):
        self.get = operator.attrgetter("kept")

    def scaled(self, x):
        return x * self.get(self)[0]


class ByBoundGetter(Dispatching):
    def made(self):
        self.get = self.__getattribute__

    def scaled(self, x):
        return x * self.get("".join(("ke", "pt")))[0]


class ByOwnNamespace(Dispatching):
    def made(self):
        self.view = self.__dict__

    def scaled(self, x):
        return x * self.view["".join(("ke", "pt"))][0]


class BySet(Dispatching):
    def made(self):
        self.functions = {lambda x: x * self.kept[0]}

    def scaled(self, x):
        for function in self.functions:
            x = function(x)
        return x


class ByVisitor(Dispatching):
    class Visitor(ast.NodeVisitor):
        def __init__(self, net):
            self.net = net

        def visit_Constant(self, node):
            return self.net.kept[0]

    def made(self):
        self.visitor, self.tree = self.Visitor(self), ast.parse("1", mode="eval").body

    def scaled(self, x):
        return x * self.visitor.visit(self.tree)


class ByFormat(Dispatching):
    def made(self):
        self.words = "{0.kept[0]}"

    def scaled(self, x):
        return x * float(self.words.format(self))


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (lambda m, x: x * m.w + m.step(x, m.tab["k"]), {"x"}), (lambda m: [m.w[i] for i in range(3)], {"i", "range"}), (lambda m: m(1), {"m"}),
        (lambda m: GLOBAL_GAIN * m.w, {"GLOBAL_GAIN"}), (lambda m, n: m.w(n), {"n"}), (lambda m: m.__dict__, {"m"}),
        (lambda m: m.parameters(), {"m"}), (lambda m: f"{m}", {"m"}), (lambda m: (lambda: m.w)(), set()), (lambda m: (lambda: m)(), {"m"}),
    ],
)  # fmt: skip
def test_what_a_function_does_more_with_than_read_attributes(function, whole):
    assert taken_whole(function.__code__) - {".0"} == whole


class Decorated:
    def __init__(self, function):
        self.function = function

    def __get__(self, net, cls):
        return functools.partial(self.function, net)


class ByDescriptor(Dispatching):
    @Decorated
    def scaled(self, x):
        return self(x, 0)


class ByNeuron(Dispatching):
    def scaled(self, x):
        core = self.neuron.core
        return x * getattr(core.__self__, "".join(("ke", "pt")))[0] if hasattr(core, "__self__") else self(x, 0)


class ByFactory(Dispatching):
    @dataclasses.dataclass
    class Made:
        tau: float = 2.0

        def __post_init__(self):
            self.twice = self.tau * self.base.tau

        base = Settings(1.0)

    def made(self):
        self.settings = self.Made()

    def scaled(self, x):
        return x * dataclasses.replace(self.settings, tau=4.0).twice

    def change(self):
        self.Made.base.tau += 1.0


class ByModules(Dispatching):
    def scaled(self, x):
        for module in self.modules():
            if hasattr(module, "kept"):
                x = x * module.kept[0]
        return x


class ByTable(Dispatching):
    def scaled(self, x):
        return x * self.table["w"]

    def change(self):
        self.table["w"] = self.table["w"] + 1.0


class ByAttributeHook(Dispatching):
    def __getattr__(self, name):
        return self.kept[0] if name == "gain" else super().__getattr__(name)

    def scaled(self, x):
        return x * self.gain


class ByParameters(Dispatching):
    def made(self):
        self.listed = nn.ParameterList([torch.ones(3, dtype=f64), (2.0,)])

    def scaled(self, x):
        return x * self.listed[0] * self.listed[1][0]

    def change(self):
        self.listed[1] = (self.listed[1][0] + 1.0,)


@pytest.mark.parametrize("kind", Dispatching.__subclasses__(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("closure", [False, True], ids=["method", "closure"])
def test_what_a_core_reads_of_its_network_in_any_way(kind, closure):
    net, x = kind(), torch.randn(6, 4, 3, dtype=f64)
    if closure:
        net.neuron = flexsn.FlexSN(lambda x, v: net.core(x, v), num_inputs=1, num_states=1, stateful=False)
    found = []
    for _ in range(3):
        found.append(net(x))
        assert torch.equal(found[-1], flexsn.scan(net.core, [x], [None], backend="torch").outputs[0])
        net.change()
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
