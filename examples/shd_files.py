"""Spike times and units in the format of the Spiking Heidelberg Digits: what `shd_like.py` reads, or makes when it has no other data.

A sample is two arrays, the times of its spikes in seconds and the unit (0 to 699) of each; a file holds them as `spikes/times` and
`spikes/units`, beside `labels` (Cramer et al., 2022: 20 classes, the digits in two languages).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNITS, CLASSES, STEPS, SECONDS = 700, 20, 100, 1.4
RIDGES, GRID = 3, 200  # in a pattern, and the points of time at which it is known


class Samples(NamedTuple):
    """Spike times in seconds and units, an array per sample, and labels."""

    times: Sequence[np.ndarray]
    units: Sequence[np.ndarray]
    labels: np.ndarray


def read(path: Path) -> Samples:
    """Those of an HDF5 file of SHD."""
    try:
        import h5py
    except ImportError:
        raise SystemExit("--data reads HDF5 files, which needs h5py: pip install h5py") from None
    with h5py.File(path) as file:
        return Samples(list(file["spikes/times"]), list(file["spikes/units"]), np.asarray(file["labels"], dtype=np.int64))


def patterns(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ridges of every class, `[class, ridge, GRID]`: which unit they are at, and how strong, both smooth in time.

    The second half of the classes is the first one backwards: who only counts the spikes of each unit cannot tell these apart.
    """
    t = np.linspace(0.0, 1.0, GRID)
    waves = np.cos(np.pi * np.arange(4)[:, None] * t)  # slow ones
    shape = (CLASSES // 2, RIDGES, 1)
    bend, swell = rng.normal(size=(2, *shape[:2], len(waves))) / np.arange(1, len(waves) + 1)
    units = rng.uniform(100, UNITS - 100, shape) + 90 * bend @ waves
    strengths = np.exp(1.5 * swell @ waves)
    return tuple(np.concatenate([p, p[..., ::-1]]) for p in (units, strengths))


def make(count: int, seed: int) -> Samples:
    """Samples of random classes: the pattern of the class at another speed, pitch and loudness, every spike jittered, among stray ones."""
    units, strengths = patterns(np.random.default_rng(0))  # the classes are the same ones for every seed
    rng, found_times, found_units = np.random.default_rng(seed), [], []
    labels = rng.integers(0, CLASSES, count)
    for label in labels:
        spikes, stray = rng.poisson((1500, 300))
        weights = (strengths[label] * rng.lognormal(0.0, 0.4, (RIDGES, 1))).ravel()
        chosen = rng.choice(weights.size, spikes, p=weights / weights.sum())
        times = rng.uniform(0.0, 0.3) + rng.uniform(0.6, 1.0) * (chosen % GRID) / GRID + rng.normal(0.0, 0.02, spikes)
        at = units[label].ravel()[chosen] + rng.normal(0.0, 25.0) + rng.normal(0.0, 12.0, spikes)
        times = np.concatenate([times, rng.uniform(0.0, SECONDS, stray)])
        at = np.concatenate([at, rng.uniform(0, UNITS, stray)]).round()
        order = [k for k in times.argsort() if times[k] >= 0 and 0 <= at[k] < UNITS]
        found_times.append(times[order].astype(np.float32))
        found_units.append(at[order].astype(np.uint16))
    return Samples(found_times, found_units, labels)


def binned(samples: Samples) -> tuple[Tensor, Tensor]:
    """Spikes per step and unit, `[STEPS, B, UNITS]` in bytes, and labels `[B]`; what comes after `SECONDS` is left out."""
    counts = torch.zeros(STEPS, len(samples.labels), UNITS, dtype=torch.uint8)
    for k, (times, units) in enumerate(zip(samples.times, samples.units, strict=True)):
        steps = (np.asarray(times, dtype=np.float64) * (STEPS / SECONDS)).astype(np.int64)
        inside = steps < STEPS
        flat = np.bincount(steps[inside] * UNITS + units[inside], minlength=STEPS * UNITS)
        counts[:, k] = torch.from_numpy(flat.clip(max=255).reshape(STEPS, UNITS))
    return counts, torch.as_tensor(samples.labels)
