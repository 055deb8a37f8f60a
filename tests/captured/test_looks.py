"""Cores that are modules, or methods of modules: looked at once, again when something changes, and never kept alive by that."""

import gc
import types
import weakref

import pytest
import torch
from torch import nn

import flexsn
from flexsn._captured import captured_values
from flexsn.errors import FallbackWarning


class Cell(nn.Module):
    gain = 1.0

    def __init__(self, tau=2.0):
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(tau))

    def read(self, h):
        return h * 2.0

    def forward(self, x, v):
        h = v + (x - v) / self.tau + self.gain
        return self.read(h), h


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.mixing = Cell(), nn.Linear(3, 3)

    def forward(self, x, v):
        return self.inner(x + self.mixing(v), v)


def core_of(module, how):
    return module if how == "module" else module.forward


def run(core):
    return flexsn.scan(core, (torch.ones(2, 3),), (torch.zeros(3),)).outputs[0].sum().item()


HOW = pytest.mark.parametrize("how", ["module", "method"])


@HOW
@pytest.mark.parametrize("make", [Cell, Recurrent])
def test_one_look_serves_all_calls(make, how, monkeypatch):
    module = make()
    first = run(core_of(module, how))
    looks = []
    monkeypatch.setattr(captured_values, "Walk", lambda *args: looks.append(args))
    assert run(core_of(module, how)) == first
    assert not looks


def with_a_method_of_itself():
    module = Cell()
    module.again = module.read
    return module


def with_a_hook_that_leads_back():
    module = Recurrent()
    module.mixing.register_forward_hook(lambda *_, of=module: None)
    return module


@HOW
@pytest.mark.parametrize("make", [Cell, Recurrent, with_a_method_of_itself, with_a_hook_that_leads_back])
def test_a_look_keeps_no_module_alive(make, how):
    module = make()
    run(core_of(module, how))
    alive = weakref.ref(module)
    del module
    gc.collect()
    gc.collect()  # what finalizers of the first pass let go
    assert alive() is None


@pytest.mark.parametrize("how", ["module", "method", "neuron"])
def test_what_is_set_on_a_module_later_stands_before_its_class(how):
    """An attribute that its class has, too, had gone unseen by a neuron."""
    module = Cell()
    neuron = flexsn.FlexSN(module, num_states=1)

    def result():
        if how != "neuron":
            return run(core_of(module, how))
        neuron.reset()
        return neuron(torch.ones(2, 3)).sum().item()

    before = result()
    module.read = types.MethodType(lambda self, h: h * 4.0, module)
    assert result() == 2 * before
    del module.read
    assert result() == before
    module.gain = 5.0
    assert result() == 82.5
    del module.gain
    module.forward = lambda x, v: (100.0 * x, v)
    assert result() == 600.0


@HOW
def test_another_class_is_seen(how):
    class Doubled(Cell):
        def forward(self, x, v):
            y, h = super().forward(x, v)
            return y * 2.0, h

    module = Cell()
    before = run(core_of(module, how))
    module.__class__ = Doubled
    assert run(core_of(module, how)) == 2 * before


FACTOR = 1.0


def set_factor(value):
    global FACTOR
    FACTOR = value


class Scaled:
    """A hook that is an object, with a method that is one."""

    def __init__(self):
        self.by = 1.0

    def __call__(self, module, args, y):
        return y * self.by

    def hook(self, module, args, y):
        return y * self.by


def of_a_cell():
    by = 1.0

    def hook(module, args, y):
        return y * by

    def change():
        nonlocal by
        by = 3.0

    return hook, change


def of_a_list():
    by = [1.0]
    return lambda module, args, y: y * by[0], lambda: by.__setitem__(0, 3.0)


def of_a_global():
    set_factor(1.0)
    return lambda module, args, y: y * FACTOR, lambda: set_factor(3.0)


def of_an_object():
    scaled = Scaled()
    return scaled, lambda: setattr(scaled, "by", 3.0)


def of_a_method():
    scaled = Scaled()
    return scaled.hook, lambda: setattr(scaled, "by", 3.0)


@pytest.mark.parametrize("how", ["module", "method", "neuron"])
@pytest.mark.parametrize("make", [of_a_cell, of_a_list, of_a_global, of_an_object, of_a_method])
def test_what_a_hook_reads_is_compared_at_every_call(make, how):
    """It had been taken as it was at the first call, without a word."""
    module = Recurrent()
    hook, change = make()
    module.mixing.register_forward_hook(hook)
    neuron = flexsn.FlexSN(module, num_states=1, stateful=False)
    x, rest = torch.rand(3, 2, 3), torch.zeros(2, 3)
    for _ in range(2):
        got = neuron(x) if how == "neuron" else flexsn.scan(core_of(module, how), (x,), (rest,)).outputs[0]
        torch.testing.assert_close(got, flexsn.scan(module, (x,), (rest,), backend="torch").outputs[0])
        change()


def test_a_hook_that_records_gets_what_a_loop_computes():
    """A capture had left its stand-ins in the user's list."""
    module, seen = Recurrent(), []
    module.mixing.register_forward_hook(lambda module, args, y: seen.append(y))
    with pytest.warns(FallbackWarning, match=r"changes `mixing\._forward_hooks\.0\.seen` while it runs"):
        flexsn.scan(module, (torch.rand(3, 2, 3),), (torch.zeros(2, 3),))
    assert [type(y) for y in seen] == [torch.Tensor] * 3 and all(y.shape == (2, 3) for y in seen)
