"""What depends on what: from a step graph to its drawing, where values without a name of their own are folded into those that have one,
and from a core that mixes neurons to its pieces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence

from .._capture.signature import Signature
from .._ir.graph import Node
from .._ir.roles import Kind, Role, roles
from .._operator.mixing.cut import AtOnce, Cut, Recurrence, Scan
from .._operator.mixing.mixing_calls import Place, Segment
from .._program.compiled import Program
from .hoisted import label_of
from .model import Drawing, Piece


def drawing_of(program: Program, sig: Signature) -> Drawing:
    """Boxes for operands, for values that the user named, and for what a step returns; edges where one needs the other."""
    drawing, step = Drawing(), program.graph
    behind: dict[Node, tuple[str, ...]] = {}  # keys of the boxes from which a value comes: its own, or the nearest
    for role, node in step.inputs.items():
        behind[node] = (role,)
        drawing.boxes[role] = _operand(program, sig, role)
    for role, name in zip(roles(Kind.STATE, sig.num_states), sig.state_names, strict=True):  # the step need not read them all
        drawing.boxes.setdefault(role, (name, "state"))
    for node in step.nodes:
        behind[node] = tuple(dict.fromkeys(key for arg in node.args for key in behind.get(arg, ())))
        label = _users_name(node)
        if label is not None:
            key = f"n:{node.name}"
            drawing.boxes[key] = (label, "value")
            drawing.edges += [(source, key) for source in behind[node]]
            behind[node] = (key,)
    for role, node in step.outputs.items():
        drawing.boxes[f"out:{role}"] = _returned(program, sig, role)
        drawing.edges += [(source, f"out:{role}") for source in behind.get(node, ())]  # a constant comes from nowhere
    return drawing


def _operand(program: Program, sig: Signature, role: Role) -> tuple[str, str]:
    if role.kind is Kind.PARAM:
        return label_of(program.params[role]), "param"
    names, kind = (sig.input_names, "input") if role.kind is Kind.INPUT else (sig.state_names, "state")
    return names[role.number], kind


def _returned(program: Program, sig: Signature, role: Role) -> tuple[str, str]:
    if role.kind is Kind.STATE:
        return sig.state_names[role.number], "next"
    return "output" if program.num_outputs == 1 else f"output {role.number}", "output"


def _users_name(node: Node) -> str | None:
    """What the user calls a value; in a graph names are told apart by a number at the end, and from words of C++ by `_`."""
    if re.fullmatch(r"t\d+(_\d+)?", node.name):
        return None
    base = re.sub(r"_\d+$", "", node.name)
    for name in (node.name, base, base.removesuffix("_")):
        if found := re.search(rf": ({re.escape(name)}\s*[:=].*)", node.line or ""):
            return None if _of_several(found[1]) else name
    return node.name


def _of_several(statement: str) -> bool:
    """Whether it gives one name to several values, as `gates = [...]` does: which of them a node is cannot be told."""
    try:
        (parsed,) = ast.parse(statement).body
    except (SyntaxError, ValueError):
        return False
    value = getattr(parsed, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("dict", "list", "tuple"):
        return True
    return isinstance(value, (ast.Dict, ast.DictComp, ast.GeneratorExp, ast.List, ast.ListComp, ast.Tuple))


# --- the pieces of a core that mixes neurons ----------------------------------------------------------------------------------------
Part = int | Segment  # a mixing call, by its number, or a kernel


def pieces_of(cut: Cut, ran: Mapping[int, str]) -> list[Piece]:
    """What every piece of a core does, and why it is there; `ran`: how the loops over time run, by the place of the piece."""
    teller, found = _Teller(cut), list[Piece]()
    for n, piece in enumerate(cut.pieces, 1):
        if isinstance(piece, Recurrence):
            how = f" {ran[n - 1]}" if n - 1 in ran else ""
            text = f"A loop over time{how} advances {teller.names([('n', k, 0) for k in piece.states])}. At every step it runs:"
            found.append(Piece(f"{n}", text=text, parts=[teller.part(f"{n}.{i}", part, piece) for i, part in enumerate(_parts(piece), 1)]))
        else:
            found.append(teller.part(f"{n}", _parts(piece)[0], None))
    return found


def _parts(piece: AtOnce | Scan | Recurrence) -> list[Part]:
    if not isinstance(piece, Recurrence):
        return [piece.call if isinstance(piece, AtOnce) else piece.segment]
    found = list[Part]()
    for stage in piece.stages:
        found += [*stage.segments, *stage.calls]
    return found


_ONCE = "runs once, on the whole sequence, and gives"


class _Teller:
    """Knows the number of the piece that gives a value; of a state before a step, of the one that advances it."""

    def __init__(self, cut: Cut):
        self.cut, self.giver = cut, dict[Place, str]()
        for n, piece in enumerate(cut.pieces, 1):
            for i, part in enumerate(_parts(piece), 1):
                given = self.results(part) if isinstance(part, int) else (*part.gives, *[("v", k, 0) for k in part.states])
                self.giver |= dict.fromkeys(given, f"{n}.{i}" if isinstance(piece, Recurrence) else f"{n}")

    def part(self, number: str, part: Part, loop: Recurrence | None) -> Piece:
        if isinstance(part, int):
            call, gives = self.cut.mixing[part], self.results(part)
            gives += [y for y, source in self.cut.same if source in gives]
            takes, name, lines = call.operands, call.name, [call.line]
            text = f"`{name}` of {self.names(takes, 'what is computed for it')} {'gives' if loop else _ONCE} {self.names(gives)}."
            why = self.recurs(part, loop) if loop else "It lies in no recurrence: nothing that it takes is computed from it."
        else:
            new: list[Place] = [("n", k, 0) for k in part.states]
            gives, takes, name = [p for p in part.gives if self.name(p) not in map(self.name, new)], part.takes, ""
            found = set[str]().union(*[self.cut.lines[place] for place in (*part.gives, *new)])
            lines = sorted(found, key=lambda line: (len(line.partition(": ")[0]), line))  # line 9 before line 10
            does = [f"{verb} {self.names(of)}" for verb, of in (("takes", takes), ("advances", new), ("gives", gives)) if of]
            text = f"A kernel {'of one step' if loop else 'over the whole sequence'} {', '.join(does[:-1])}, and {does[-1]}."
            text += " It is the one that is shown below." if part is self.cut.main else ""
            why = f"No call that mixes neurons lies in the loop of {self.names(new)} from step to step." if new else "It advances no state."
            if loop:
                why = f"The next step starts from {self.names(new)}." if new else "A call of the same step takes what it gives."
        outputs = tuple([self.name((kind, k, i)).removeprefix("the ") for kind, k, i in gives if kind == "y"])
        given = dict.fromkeys((self.name(p), self.giver.get(p, "")) for p in takes)
        return Piece(number, name, text, why, tuple(filter(None, lines)), tuple(given), outputs)

    def results(self, j: int) -> list[Place]:
        return [("m", j, i) for i in range(len(self.cut.mixing[j].results))]

    def names(self, places: Iterable[Place], computed: str = "") -> str:
        names = list(dict.fromkeys(self.name(p, computed) for p in places))
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def name(self, place: Place, computed: str = "") -> str:
        """What a value is called. `computed`: an operand without a name."""
        (kind, k, i), sig = place, self.cut.sig
        if kind == "a":
            name = self.cut.names.get(place)
            return f"`{name}`" if name else computed or f"what `{self.cut.mixing[k].name}` takes"
        if kind == "m":
            return f"`mixed_{k}_{i}`" if len(self.cut.mixing[k].results) > 1 else f"`mixed_{k}`"
        if kind == "y":
            return "the output" if self.cut.outputs == 1 else f"output {k}"
        return f"`{sig.names[k]}`" if kind == "x" else f"`{sig.state_names[k]}`" + (" of the step before" if kind == "v" else "")

    def recurs(self, j: int, loop: Recurrence) -> str:
        """Why a call lies in a recurrence: the states from which it is computed within a step, and those computed from it."""
        operands, result = self.cut.mixing[j].operands, ("m", j)
        behind, states = self.behind(operands), sorted(loop.states, key=lambda k: ("v", k, 0) not in operands)
        before = [k for k in states if ("v", k, 0) in behind]
        after = [k for k in states if result in {p[:2] for p in self.behind([("n", k, 0)])}]
        k = next((k for k in before if k in after), before[0])
        state, when = self.name(("n", k, 0)), "" if k in after else " at a later step"
        return f"It lies in a recurrence: it is computed from {state} of the step before, and {state} from it{when}."

    def behind(self, places: Sequence[Place]) -> set[Place]:
        """All from which values are computed within a step."""
        todo, found = list(places), set[Place]()
        while todo:
            if (now := todo.pop()) not in found:
                found.add(now)
                todo += self.cut.mixing[now[1]].operands if now[0] == "m" else self.cut.needs.get(now, ())
        return found
