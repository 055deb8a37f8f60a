"""Event files in N-MNIST's format, made of scikit-learn's digits: what `events_tonic.py` reads when it has no other data.

An image is moved in three saccades before a sensor, as those of N-MNIST were (Orchard et al., 2015), and every pixel whose
brightness has changed by a step sends an event.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CORNERS = np.array([(4, 4), (7, 9), (10, 4), (4, 4)])  # where the image is, before and after each saccade
STEP = 0.25  # of brightness


def saccades(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Events `[n, (x, y, t, p)]`, t in µs over 300 ms, of an 8 × 8 image three times as large on a sensor of 34 × 34."""
    large, level, events = np.kron(image, np.ones((3, 3))), np.zeros((34, 34)), []
    for t in range(60):
        leg, part = divmod(t, 20)
        y, x = np.round(CORNERS[leg] + (CORNERS[leg + 1] - CORNERS[leg]) * part / 20).astype(int)[::-1] - 3
        view = np.zeros((34, 34))
        view[y : y + 24, x : x + 24] = large
        change = view - level
        rows, columns = np.nonzero(np.abs(change) > STEP)
        level[rows, columns] = view[rows, columns]
        times = 5000 * t + rng.integers(0, 5000, len(rows))
        events.append(np.stack([columns, rows, times, change[rows, columns] > 0], axis=1))
    return (joined := np.concatenate(events))[joined[:, 2].argsort(kind="stable")]


def write(events: np.ndarray, path: Path) -> None:
    """N-MNIST's format: 40 bits an event: x (8), y (8), polarity (1), t in µs (23)."""
    x, y, t, p = events.T
    raw = np.stack([x, y, (p << 7) | (t >> 16), (t >> 8) & 255, t & 255], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw.astype(np.uint8).tobytes())


def make(folder: Path, count: int, seed: int) -> None:
    """A quarter of the digits goes to `Test`; the folders are those of N-MNIST, one per class."""
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    for k, i in enumerate(rng.permutation(len(images))[:count]):
        part = "Test" if k < count // 4 else "Train"
        write(saccades(images[i].reshape(8, 8) / 16, rng), folder / "NMNIST" / part / str(labels[i]) / f"{i:05}.bin")
