"""Where the recurrences of a core lie that mixes neurons, and in which pieces the core runs.

States and mixing calls that are computed from one another, over one step or several, are a recurrence: a strongly connected component of
the graph of what is computed from what. What mixes in none runs once, on the whole sequence; elementwise states between mixing calls are a
core of their own; a recurrence that mixes is a loop over stages.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..._capture.inner import MIXES
from ..._capture.signature import Signature
from ..._capture.trace import Meta, recording, trace
from ..._ir.components import strongly_connected
from ..._ir.identifiers import assigned_name
from ...errors import FlexSNError, NotElementwiseError
from .mixing_calls import NOTHING, Answering, Mixing, Place, Segment, name_of
from .precision import in_its_dtype, tensors_in

_MOST = 32  # calls that mix neurons


@dataclass(frozen=True)
class AtOnce:
    """Mixing call `call` runs once, on the whole sequence."""

    call: int


@dataclass(frozen=True)
class Scan:
    """A segment runs as any core."""

    segment: Segment


@dataclass(frozen=True)
class Stage:
    """Part of a step: segments, then mixing calls, which take what those give."""

    segments: tuple[Segment, ...]
    calls: tuple[int, ...]


@dataclass(frozen=True)
class Recurrence:
    """A loop over time: at every step its stages; the segments of the last one advance the states."""

    stages: tuple[Stage, ...]

    @property
    def calls(self) -> tuple[int, ...]:
        return tuple([j for stage in self.stages for j in stage.calls])

    @property
    def states(self) -> tuple[int, ...]:
        return tuple([k for segment in self.stages[-1].segments for k in segment.states])

    def own(self, mixing: Sequence[Mixing]) -> set[Place]:
        """Return what it takes of itself: its states before a step, results of its calls, and their operands."""
        found = {("v", k, 0) for k in self.states} | {("m", j, i) for j in self.calls for i in range(len(mixing[j].results))}
        return found | {p for stage in self.stages[:-1] for segment in stage.segments for p in segment.gives}

    def taken(self, mixing: Sequence[Mixing]) -> set[Place]:
        """Return what it takes of other pieces."""
        found = {p for stage in self.stages for segment in stage.segments for p in segment.takes}
        return found.union(*[mixing[j].operands for j in self.calls]) - self.own(mixing)


Piece = AtOnce | Scan | Recurrence


class Links(NamedTuple):
    """What a recurrence takes and gives.

    Attributes:
        own, taken: what it takes of itself and of other pieces.
        results_of, mixed: results of its mixing calls, by their number; all of them.
        asked: operands of these that are computed.
        gives: what its last segments give.
        fed: states that a mixing call, or a segment beside their own, takes.
    """

    own: frozenset[Place]
    taken: tuple[Place, ...]
    results_of: dict[int, list[Place]]
    mixed: list[Place]
    asked: list[Place]
    gives: list[Place]
    fed: frozenset[int]

    @classmethod
    def of(cls, piece: Recurrence, mixing: Sequence[Mixing]) -> Links:
        """Return those of a recurrence of a core with these mixing calls."""
        results_of = {j: [("m", j, i) for i in range(len(mixing[j].results))] for j in piece.calls}
        given = [[p for segment in stage.segments for p in segment.gives] for stage in piece.stages]
        takes = {p for stage in piece.stages for segment in stage.segments for p in segment.takes}
        fed = frozenset(k for kind, k, _ in takes.union(*[mixing[j].operands for j in piece.calls]) if kind == "v")
        return cls(
            frozenset(piece.own(mixing)), tuple(sorted(piece.taken(mixing))), results_of, [p for ps in results_of.values() for p in ps],
            [p for places in given[:-1] for p in places], given[-1], fed,
        )  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A core in pieces, in the order in which they run. As what wraps a core, it leaves it as it is: its segments wrap it.

    Attributes:
        same: outputs that are what a piece gives or takes, as it is.
        shared: what pieces take of others.
        outputs, calls: how many there are, of PyTorch's functions all.
        needs, lines: of all that is computed: from which inputs, states and results of mixing calls, and on which of the user's lines.
        names: the user's, of operands of mixing calls that have a name.
    """

    sig: Signature
    metas: tuple[Meta, ...]
    mixing: tuple[Mixing, ...]
    pieces: tuple[Piece, ...]
    same: tuple[tuple[Place, Place], ...]
    shared: frozenset[Place]
    outputs: int
    calls: int
    needs: Mapping[Place, frozenset[Place]] = field(compare=False, repr=False)
    lines: Mapping[Place, frozenset[str]] = field(compare=False, repr=False)
    names: Mapping[Place, str] = field(compare=False, repr=False)

    def __call__(self, core: Callable) -> Callable:
        return core

    @functools.cached_property
    def links(self) -> dict[int, Links]:
        """Of its recurrences, by their number among the pieces."""
        return {n: Links.of(piece, self.mixing) for n, piece in enumerate(self.pieces) if isinstance(piece, Recurrence)}

    @property
    def segments(self) -> list[Segment]:
        stages = [stage for piece in self.pieces if isinstance(piece, Recurrence) for stage in piece.stages]
        return [*[p.segment for p in self.pieces if isinstance(p, Scan)], *[segment for stage in stages for segment in stage.segments]]

    @property
    def main(self) -> Segment:
        """The segment that advances states of the last recurrence; of the last scan if there is none."""
        loops = [piece.stages[-1].segments[-1] for piece in self.pieces if isinstance(piece, Recurrence)]
        return [*[piece.segment for piece in self.pieces if isinstance(piece, Scan)], *loops][-1]


def take_apart(
    core: Callable, sig: Signature, metas: Sequence[Meta], device: torch.device, captured: dict[str, Tensor], num_outputs: int | None
) -> Cut:
    """Return the pieces of a core that mixes neurons.

    Args:
        core: on stand-ins of what it captures.
        metas: of inputs, states and params.
        captured: these stand-ins.

    Raises:
        NotElementwiseError: it has too many calls that mix neurons, or one that gives no tensors.
        FlexSNError: what else no kernel can do of the core.
    """
    ins, mixing, calls = sig.num_inputs + sig.num_states, list[Mixing](), 0
    place_of, node_of = dict[fx.Node, Place](), dict[Place, fx.Node]()
    placed = dict[int, Tensor]()  # by `id`: what is an operand, or a result, itself. An alias of one may be detached, or a Function's

    def looking(*operands: Tensor) -> Any:
        recorder = recording()
        places = [*[("x", k, 0) for k in range(sig.num_inputs)], *[("v", k, 0) for k in range(sig.num_states)]]
        place_of.update(zip([recorder.node_of(t) for t in operands[:ins]], places, strict=True))
        placed.update({id(t): t for t in operands[:ins]})

        def answer(number: int, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            before = recorder.error
            result = in_its_dtype(func, args, kwargs, None)
            why, recorder.error = recorder.error, before
            if why is before:
                return result
            tensors = list(tensors_in((args, kwargs)))
            try:
                nodes = [recorder.node_of(t) for t in tensors]
            except FlexSNError:  # they are of a transform inside the core
                nodes = []
            moving = tuple([k for k, n in enumerate(nodes) if n.meta["kind"] == "step"])
            results = (result,) if isinstance(result, Tensor) else tuple(result) if isinstance(result, (tuple, list)) else ()
            fits = isinstance(why, NotElementwiseError) and MIXES in why.reason and moving and results
            if fits and any(not y.numel() for y in results if isinstance(y, Tensor)) and all(tensors[k].numel() for k in moving):
                fits = False  # a slice is empty, and has no cotangents
            if why is None or not fits or not all(isinstance(y, Tensor) for y in results) or len(mixing) == _MOST:
                recorder.error = before or why
                return result
            j, operands_of = len(mixing), list[Place]()
            for i, k in enumerate(moving):
                operands_of.append((id(tensors[k]) in placed and place_of.get(nodes[k])) or ("a", j, i))
                node_of[operands_of[-1]] = nodes[k]
            place_of.update({recorder.node_of(y): ("m", j, i) for i, y in enumerate(results)})
            placed.update({id(y): y for y in results if torch.is_grad_enabled()})
            metas_of = tuple([Meta(tuple(y.shape), y.dtype) for y in results])
            mixing.append(
                Mixing(
                    number,
                    name_of(func),
                    moving,
                    tuple(operands_of),
                    metas_of,
                    operator.itemgetter(0) if isinstance(result, Tensor) else type(result),
                    why.line or "",
                )
            )
            return result

        nonlocal calls
        with torch.enable_grad(), Answering(answer) as answering:  # so that a core which disables it is seen
            returned = core(*operands)
        calls = answering.count + 1
        own.extend(id(y) in placed for y in ((returned,) if isinstance(returned, Tensor) else returned))
        return returned

    own = list[bool]()  # of what is returned, whether it is a result itself
    recorded = trace(looking, sig, metas, device, captured, vjp=False, num_outputs=num_outputs)
    outs = len(recorded.returns) - sig.num_states
    same = list[tuple[Place, Place]]()
    for k, node in enumerate(recorded.returns):
        place = ("y", k, 0) if k < outs else ("n", k - outs, 0)
        node_of[place] = node
        if k < outs and own[k] and node in place_of and place_of[node][0] != "v":
            same.append((place, place_of[node]))
    computed = {place: node for place, node in node_of.items() if place[0] in "nya"}
    needs, lines = dict[Place, frozenset[Place]](), dict[Place, frozenset[str]]()
    for place, node in computed.items():
        needs[place], lines[place] = _needs(node, place_of)
    operands_of = [(place, node) for place, node in computed.items() if place[0] == "a"]
    names = {place: name for place, node in operands_of if (name := _name(node, mixing[place[1]].line))}
    shapes = {place: tuple(node.meta["val"].shape) for place, node in computed.items()}
    maker = _Maker(sig, tuple(metas[:ins]), tuple(mixing), needs, shapes, {place for place, _ in same})
    pieces = maker.pieces()
    shared = {place for _, place in same}.union(*[_taken(piece, mixing) for piece in pieces])
    return Cut(sig, tuple(metas[:ins]), tuple(mixing), tuple(pieces), tuple(same), frozenset(shared), outs, calls, needs, lines, names)


def _taken(piece: Piece, mixing: Sequence[Mixing]) -> set[Place]:
    """Return what a piece takes of others."""
    if isinstance(piece, AtOnce):
        return set(mixing[piece.call].operands)
    return set(piece.segment.takes) if isinstance(piece, Scan) else piece.taken(mixing)


def _needs(node: fx.Node, place_of: dict[fx.Node, Place]) -> tuple[frozenset[Place], frozenset[str]]:
    """Return what a value is computed from, inputs, states and results of mixing calls, and on which lines."""
    seen, todo, found = set[fx.Node](), [node], set[Place]()
    while todo:
        now = todo.pop()
        if now in place_of:
            found.add(place_of[now])
        elif now not in seen:
            seen.add(now)
            todo += now.all_input_nodes
    return frozenset(found), frozenset([line for now in seen if now.meta["kind"] == "step" and (line := now.meta.get("line"))])


def _name(node: fx.Node, call: str) -> str | None:
    """Return the user's name of an operand: of the last value of a line of its own, not that of the call."""
    line = node.meta.get("line")
    return None if line == call or any(user.meta.get("line") == line for user in node.users) else assigned_name(node)


class _Maker:
    """Makes the pieces of a core.

    Args:
        needs, shapes: of all that is computed.
        done: outputs that need no piece.
    """

    def __init__(
        self, sig: Signature, metas: tuple[Meta, ...], mixing: tuple[Mixing, ...], needs: dict[Place, frozenset[Place]],
        shapes: dict[Place, tuple[int, ...]], done: set[Place],
    ):  # fmt: skip
        self.sig, self.metas, self.mixing, self.needs, self.shapes = sig, metas, mixing, needs, shapes
        self.known = {("x", k, 0) for k in range(sig.num_inputs)}
        self.todo = [p for p in needs if p[0] in "ya" and p not in done]

    def pieces(self) -> list[Piece]:
        """Return them, in an order in which they can run."""
        made_of = {("v", k, 0): self._of_nodes(self.needs["n", k, 0]) for k in range(self.sig.num_states)}
        for j, call in enumerate(self.mixing):
            made_of["m", j, 0] = self._of_nodes([q for p in call.operands for q in self.needs.get(p, {p})])
        components = strongly_connected(made_of)
        home, level = dict[Place, int](), list[int]()
        for c, members in enumerate(components):
            home |= dict.fromkeys(members, c)
            before = {home[p] for member in members for p in made_of[member]} - {c}
            level.append(max([level[d] + (self._breaks(components[d], members)) for d in before], default=0))
        found = list[Piece]()
        for now in range(max(level, default=0) + 1):
            here = [members for c, members in enumerate(components) if level[c] == now]
            states: dict[tuple[int, ...], list[int]] = {}
            for members in here:
                if not _mixes(members):
                    for _, k, _ in members:
                        states.setdefault(self.shapes["n", k, 0], []).append(k)
            for shape, own in states.items():
                found.append(Scan(self.segment(own, self.ready(shape, {("v", k, 0) for k in own}))))
            found += self.without_states()
            for members in here:
                if _mixes(members):
                    found += self.mixed(members, looped=len(members) > 1 or members[0] in made_of[members[0]])
                    found += self.without_states()
        if self.todo:
            raise NotElementwiseError("returns an output that depends on nothing that a step takes", core=self.sig.core)
        return found

    def _of_nodes(self, places: Iterable[Place]) -> set[Place]:
        return {(kind, k, 0) for kind, k, _ in places if kind in "vm"}

    def _breaks(self, earlier: Sequence[Place], later: Sequence[Place]) -> bool:
        """Return whether two components cannot be parts of one kernel."""
        if _mixes(earlier):
            return True
        shapes = [self.shapes["n", k, 0] for kind, k, _ in (*earlier, *later) if kind == "v"]
        return not _mixes(later) and len(set(shapes)) > 1

    def segment(self, states: Sequence[int], gives: Sequence[Place]) -> Segment:
        """Return what advances states and gives values; what it takes is known then."""
        own = {("v", k, 0) for k in states}
        gives = gives or [("n", states[0], 0)]
        takes = set[Place]().union(*[self.needs[p] for p in (*gives, *[("n", k, 0) for k in states])]) - own
        takes = takes or {NOTHING}
        self.known |= {*own, *gives}
        self.todo = [p for p in self.todo if p not in gives]
        return Segment(self.sig, self.metas, self.mixing, tuple(sorted(takes)), tuple(sorted(states)), tuple(gives))

    def ready(self, shape: tuple[int, ...], own: set[Place]) -> list[Place]:
        """Return what can be computed beside what is a segment's own."""
        return [p for p in self.todo if self.shapes[p] == shape and self.needs[p] & own and self.needs[p] <= self.known | own]

    def without_states(self) -> list[Piece]:
        """Return segments for what can be computed of what is known, one for every shape."""
        by_shape: dict[tuple[int, ...], list[Place]] = {}
        for place in self.todo:
            if self.needs[place] and self.needs[place] <= self.known:
                by_shape.setdefault(self.shapes[place], []).append(place)
        return [Scan(self.segment((), gives)) for gives in by_shape.values()]

    def mixed(self, members: Sequence[Place], *, looped: bool) -> list[Piece]:
        """Return the piece of a component that mixes."""
        calls = sorted(j for kind, j, _ in members if kind == "m")
        if not looped:
            self.known |= {("m", calls[0], i) for i in range(len(self.mixing[calls[0]].results))}
            return [AtOnce(calls[0])]
        states = sorted(k for kind, k, _ in members if kind == "v")
        own = {("v", k, 0) for k in states}
        self.known |= own
        stages, left = list[Stage](), calls
        while left:
            ready = {p for j in left for p in self.mixing[j].operands if p[0] == "a" and p in self.todo and self.needs[p] <= self.known}
            by_shape: dict[tuple[int, ...], list[Place]] = {}
            for place in sorted(ready):
                by_shape.setdefault(self.shapes[place], []).append(place)
            segments = tuple([self.segment((), gives) for gives in by_shape.values()])
            now = [j for j in left if set(self.mixing[j].operands) <= self.known]
            if not now:
                raise NotElementwiseError("mixes what cannot be computed before it", core=self.sig.core, line=self.mixing[left[0]].line)
            self.known |= {("m", j, i) for j in now for i in range(len(self.mixing[j].results))}
            stages.append(Stage(segments, tuple(now)))
            left = [j for j in left if j not in now]
        by_shape_of: dict[tuple[int, ...], list[int]] = {}
        for k in states:
            by_shape_of.setdefault(self.shapes["n", k, 0], []).append(k)
        inner = own | {("m", j, i) for j in calls for i in range(len(self.mixing[j].results))}
        rests = [self.segment(ks, self.ready(shape, inner)) for shape, ks in by_shape_of.items()]
        return [Recurrence((*stages, Stage(tuple(rests), ())))]


def _mixes(members: Sequence[Place]) -> bool:
    return any(kind == "m" for kind, _, _ in members)
