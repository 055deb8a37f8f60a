"""The walks over time on a GPU, in CUDA graphs: what the Python loop launches for 32, 16, ... 1 steps is recorded once, and played again.

A step takes Python longer to launch than the GPU to run. A walk is recorded over buffers, into which every call copies what it is given
(sequences 32 steps at a time) and out of which it copies what it finds. So a new T records at most what is left of 32 steps in powers of
two, and a changed param or captured tensor records nothing.

What it gains, on an H200, 100 steps, batch 64, width 256, beside a plain loop: an LSTM written as a core trains 11.5 times as fast, a norm
inside the recurrence 10.8 times (`python benchmarks/steps.py --device cuda`, 2026-11-27).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .mixing_calls import Place

Tensors = dict[Any, Tensor]
_Walk = Callable[[Any, Tensors, Tensors], tuple[Tensors, Tensors]]  # of a loop, sequences and the rest: what it finds, what it carries on

MOST = 32  # steps of a graph
_KINDS = 8  # of walks of a core that stay recorded: each holds buffers of so many steps
_SUM = "sum"  # what is no sequence, but a sum over the steps


def forward(loop: Any, *, keeps: bool) -> tuple[Tensors, dict[int, Tensor]] | None:
    """Walk over time as `Loop.forward` does; None if that cannot be recorded."""

    def walk(still: Any, sequences: Tensors, rest: Tensors) -> tuple[Tensors, Tensors]:
        del rest  # of which the loop knows
        still.known = {p: t for (_, p), t in sequences.items()}
        found, after = still.walk(keeps=keeps)
        return found, {("state", k): v for k, v in after.items()}

    sequences = {("known", p): t for p, t in loop.known.items()}
    states = {("state", k): v for k, v in loop.start.items()}
    played = _play(loop, ("forward", keeps), walk, sequences, states, range(loop.T), lambda t: {})
    if played is None:
        if loop.device.type == "cuda":
            loop.note("in Python (not in CUDA graphs: a call waits for the GPU, or a graph of yours records it)")
        return None
    loop.note(loop.noted.replace("in Python", "in CUDA graphs"))
    found, carried = played
    return found, {k: carried["state", k] for k in loop.start}


def backward(
    loop: Any, computed: Mapping[Place, Tensor], trail: Mapping[int, Tensor], grads: Mapping[Place, Tensor | None],
    ends: Mapping[int, Tensor | None], trails: Mapping[int, Tensor | None],
) -> tuple[Tensors, dict[int, Tensor]] | None:  # fmt: skip
    """Walk back over time as `Loop.backward` does; None if that cannot be recorded."""
    groups: dict[str, Mapping[Any, Tensor | None]] = {
        "known": loop.known, "computed": computed, "trail": trail, "grad": grads, "trails": trails,
    }  # fmt: skip
    keys = {kind: tuple(group) for kind, group in groups.items()}
    sequences = {(kind, key): t for kind, group in groups.items() for key, t in group.items() if t is not None}
    states: Tensors = {("state", k): v for k, v in loop.start.items()}
    states |= {("end", k): torch.zeros_like(v) if (g := ends[k]) is None else g for k, v in loop.start.items() if v.is_floating_point()}

    def walk(still: Any, sequences: Tensors, rest: Tensors) -> tuple[Tensors, Tensors]:
        given = {kind: {key: sequences.get((kind, key)) for key in group} for kind, group in keys.items()}
        still.known = given["known"]
        still.of_fixed.clear()
        ends = {k: rest.get(("end", k)) for k in still.start}
        found, fed, ends = still.walk_back(given["computed"], given["trail"], given["grad"], ends, given["trails"])
        found |= {("fed", k): by[: still.T] for k, by in fed.items()} | {(_SUM, *key): g for key, g in still.of_fixed.items()}
        return found, {("end", k): g for k, g in ends.items() if g is not None}

    def before(t: int) -> Tensors:
        return {("state", k): trail[k][t - 1] if t else v for k, v in loop.start.items()}

    kind = ("backward", tuple([tuple(loop.needs[j]) for j in loop.piece.calls]), loop.taken_over and frozenset(loop.taken_over))
    played = _play(loop, kind, walk, sequences, states, range(loop.T - 1, -1, -1), before)
    if played is None:
        return None
    found, _ = played
    loop.of_fixed = {key[1:]: g for key, g in found.items() if key[0] == _SUM}
    return found, {k: torch.cat([found["fed", k], v.new_zeros((1, *v.shape))]) for k, v in loop.start.items() if ("fed", k) in found}


def _play(
    loop: Any, kind: tuple, walk: _Walk, sequences: Tensors, states: Tensors, order: range, before: Callable[[int], Tensors]
) -> tuple[Tensors, Tensors] | None:
    """Return what a walk finds, and its states after the last step; None where it cannot be recorded.

    Args:
        kind: what of the walk its operands do not tell.
        sequences, states: what it reads of every step, and what it carries or is to find before its first step.
        order: of the steps.
        before: states to put before a part of the walk, whose rows begin at a step.
    """
    if not _records(loop.device):
        return None
    given = loop.given
    rest = states | loop.fixed_tensors()
    kinds: list[tuple] = [(key, t.shape[1:], t.dtype) for key, t in sequences.items()]
    kinds += [(key, t.shape, t.dtype, t.stride(), t.requires_grad) for key, t in rest.items()]
    key = (loop.number, *kind, given.backend, given.autocast, loop.device, *_switches(), *kinds)
    known = given.look.over_parts.setdefault("graphs", {})
    if (walks := known.get(key)) is None:
        if len(known) >= _KINDS:
            known.clear()
        walks = known[key] = _Walks(Recorder(loop.device), loop, walk, sequences, rest)
    return walks.play(loop, sequences, rest, order, before)


def _switches() -> tuple:
    """Return the switches that products on a GPU follow."""
    precisions = [b.fp32_precision for b in (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cudnn.conv)]  # type: ignore[attr-defined]  # `conv`
    return *precisions, torch.are_deterministic_algorithms_enabled()


class Recorder:
    """Records CUDA graphs, which share their memory, and lets one call at a time play them.

    Attributes:
        refused: whether something could not be recorded.
    """

    def __init__(self, device: torch.device):
        self.device, self.refused = device, False
        self.pool, self.lock = torch.cuda.graph_pool_handle(), threading.Lock()
        with torch.cuda.device(device):
            self.stream, self.done = torch.cuda.Stream(), torch.cuda.Event()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While inside, no other call, on another stream either, uses what was recorded."""
        with self.lock, torch.cuda.device(self.device):
            self.done.wait()
            try:
                yield
            finally:  # what was launched before an error still uses the buffers
                self.done.record()

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors] | None:
        """Return what plays what a function does, and its results, which that writes; None if it cannot be recorded."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with _one_at_a_time(), torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                results = run()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own
            self.refused = True  # a function of PyTorch waits for what the GPU computes, say
            return None
        return graph.replay, results


_recording = threading.Lock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """While inside, no other thread records, and no cycles are collected: a graph among them could not be given back now."""
    with _recording:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _records(device: torch.device) -> bool:
    """Whether a walk on a device can be recorded now."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class _Walks:
    """Walks of one kind, recorded for several numbers of steps.

    Attributes:
        sequences, rest: buffers that they read; what they carry from step to step they write there, too.
        still: a `Loop` over these.
        recorded: by the number of steps, what plays it and what that finds.
    """

    def __init__(self, recorder: Recorder, loop: Any, walk: _Walk, sequences: Tensors, rest: Tensors):
        self.recorder, self.walk = recorder, walk
        self.recorded: dict[int, tuple[Callable[[], None], Tensors] | None] = {}
        with torch.inference_mode(False), torch.no_grad():
            self.sequences = {key: torch.empty((MOST, *t.shape[1:]), dtype=t.dtype, device=t.device) for key, t in sequences.items()}
            self.rest = {key: torch.empty_like(t).requires_grad_(t.requires_grad) for key, t in rest.items()}
            self.still = loop.over(self.rest, {}, 0)
            if loop.taken_over is not None:
                self.still.take_over(loop.taken_over)

    def play(
        self, loop: Any, sequences: Tensors, rest: Tensors, order: range, before: Callable[[int], Tensors]
    ) -> tuple[Tensors, Tensors] | None:
        """Walk in the `order` of steps."""
        with torch.inference_mode(False), torch.no_grad(), self.recorder.alone():
            _copy(rest, self.rest)
            found: Tensors = {}
            for steps in _parts(len(order)):
                ends, order = (order[0], order[steps - 1]), order[steps:]
                rows = slice(min(ends), max(ends) + 1)
                _copy({key: t[rows] for key, t in sequences.items()}, self._rows(steps))
                _copy(before(rows.start), self.rest)
                if (recorded := self._recorded(steps)) is None:
                    return None
                replay, gives = recorded
                replay()
                for key, t in gives.items():
                    if key not in found:
                        found[key] = torch.zeros_like(t) if key[0] == _SUM else t.new_empty((loop.T, *t.shape[1:]))
                    if key[0] == _SUM:
                        found[key] += t
                    else:
                        found[key][rows] = t
            loop.views |= self.still.views
            return found, {key: self.rest[key].clone() for key in rest if key[0] == "state"}

    def _rows(self, steps: int) -> Tensors:
        return {key: t[:steps] for key, t in self.sequences.items()}

    def _recorded(self, steps: int) -> tuple[Callable[[], None], Tensors] | None:
        """Return what plays a number of steps, and what that finds; None if they cannot be recorded."""
        if steps not in self.recorded and not self.recorder.refused:
            if not self.recorded:  # one step, which builds what is not built yet
                self._walked(1)
            self.recorded[steps] = self.recorder.record(lambda: self._steps(steps))
        return self.recorded.get(steps)

    def _steps(self, steps: int) -> Tensors:
        """Walk, and carry on where this ends; return what is found."""
        found, carried = self._walked(steps)
        _copy({key: t.clone() for key, t in carried.items()}, self.rest)
        return found

    def _walked(self, steps: int) -> tuple[Tensors, Tensors]:
        self.still.T = steps
        with _without_kept_casts():
            return self.walk(self.still, self._rows(steps), self.rest)


@contextlib.contextmanager
def _without_kept_casts() -> Iterator[None]:
    """While inside, autocast keeps no casts of weights: those of other weights would be played."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _copy(sources: Tensors, targets: Tensors) -> None:
    for key, t in sources.items():
        targets[key].copy_(t)


def _parts(T: int) -> Iterator[int]:
    """Yield numbers of steps that are recorded, which make `T`."""
    yield from [MOST] * (T // MOST)
    yield from [MOST >> k for k in range(1, MOST.bit_length()) if T % MOST & MOST >> k]
