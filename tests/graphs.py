"""Nodes of NIR graphs with values, and the comparison of spikes."""

import numpy as np
import torch
from loaded_peers import nir

T, B = 20, 3
f64 = torch.float64


def full(size, value):
    return np.full(size, value)


def affine(fan_out, fan_in, gain=1.0):
    generator = np.random.default_rng(fan_out * 100 + fan_in)
    return nir.Affine(gain * generator.standard_normal((fan_out, fan_in)), generator.standard_normal(fan_out))


def lif(n, **fields):
    return nir.LIF(**{k: full(n, v) for k, v in {"tau": 3e-4, "r": 1.0, "v_leak": 0.0, "v_threshold": 0.5, **fields}.items()})


def cuba_lif(n, **fields):
    given = {"tau_syn": 2e-4, "tau_mem": 5e-4, "r": 5.0, "v_leak": 0.0, "w_in": 2.0, "v_threshold": 1.0, **fields}
    return nir.CubaLIF(**{k: full(n, v) for k, v in given.items()})


def loop(model, x):
    """The spikes of a model that takes a step and its state."""
    state, out = None, []
    for step in x:
        y, state = model(step, state)
        out.append(y)
    return torch.stack(out)


def assert_spikes(got, want, atol=0.0):
    assert got.shape == want.shape and want.any() and not want.all()
    assert (got - want).abs().max() <= atol, f"{int((got != want).sum())} of {want.numel()} differ"
