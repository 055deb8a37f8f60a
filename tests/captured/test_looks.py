"""Cores that are modules, or methods of modules: looked at once, again when something changes, and never kept alive by that."""

import gc
import types
import weakref

import pytest
import torch
from torch import nn

import flexsn
from flexsn._captured import captured_values


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
