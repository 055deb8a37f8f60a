"""Draws a case: a random core over the vocabulary, its operands, T and shapes. Everything follows from a label.

Dtypes and shapes of values are PyTorch's own: every line runs on a small tensor while it is drawn, and one that PyTorch
refuses is drawn anew.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from flexsn._ir.graph import HALF

from .case import _GLOBALS, Case, Line, Operand
from .vocabulary import CLOSED, COMPOSITES, GUARDS, Word

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
T_VALUES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65)  # checkpoints are 16, 32 or 64 steps apart
_T_WEIGHTS = (1, 6, 6, 6, 4, 3, 2, 2, 4, 5, 5, 1, 1, 2, 0.4, 0.4, 0.4, 0.4, 0.4)
SHAPES = ((), (1,), (5,), (17,), (64,), (65,), (2, 3), (3, 1), (4, 17), (2, 3, 4), (1, 3, 1, 5), (130,), (0,), (2, 0))
_SHAPE_WEIGHTS = (2, 1, 4, 4, 4, 4, 4, 1, 4, 3, 1, 1, 0.3, 0.2)
_SPECIALS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 1e-3, 88.5, 104.0, 2.0**23 + 0.5, 1e10, -1e10, float("inf"), float("-inf"), float("nan"))


def generate(label: str, depth: int = 30) -> Case:
    """The case of a label; `depth`: the most lines of its core, guards and conversions not counted."""
    with torch.device("cpu"):
        return _Draw(label, depth).case()


class _Draw:
    def __init__(self, label: str, depth: int):
        self.label, self.r, self.depth = label, random.Random(label), depth
        self.generator = torch.Generator().manual_seed(self.r.getrandbits(48))
        self.lines: list[Line] = []
        self.small: dict[str, Tensor] = {}  # one step of every value, as the core computes it
        self.given: dict[str, Tensor] = {}  # and as it is on operands of 16 bits, where there are any
        self.hard = self.r.choice((0.0, 0.0, 0.02, 0.2))  # share of special values

    # --- operands -----------------------------------------------------------------------------------------------------
    def case(self) -> Case:
        r = self.r
        step = r.choices(SHAPES, _SHAPE_WEIGHTS)[0]
        T = r.choices(T_VALUES, _T_WEIGHTS)[0]
        palette = r.choices((*FLOATS, *HALF, *INTS, torch.bool), (8, 4, 1, 1, 1, 1, 0.7, 0.7, 0.7, 1), k=r.choice((1, 1, 2, 3)))
        if not any(d.is_floating_point for d in palette) and r.random() < 0.8:
            palette.append(r.choice(FLOATS))
        self.has_half = any(d in HALF for d in palette)
        count = (
            r.choices((1, 2, 3, 4), (6, 4, 2, 1))[0],
            r.choices((0, 1, 2, 3, 4), (2, 6, 4, 2, 1))[0],
            r.choices((0, 1, 2, 3), (6, 4, 2, 1))[0],
        )
        inputs = [self.operand(f"x{k}", palette, (T, *(step if k == 0 else self.part(step)))) for k in range(count[0])]
        states = [self.state(f"v{k}", palette, step) for k in range(count[1])]
        params = [self.operand(f"p{k}", palette, self.of_param(step)) for k in range(count[2])]
        for o in (*inputs, *states, *params):
            assert o.values is not None
            self.remember(
                o.name, o.values[:1].reshape(o.values.shape[1:]) if o in inputs and T else o.values.new_zeros(o.values.shape[o in inputs :])
            )
        for _ in range(min(r.randint(1, self.depth), r.randint(1, self.depth))):
            self.line()
        outputs = [self.pick_output() for _ in range(r.choices((1, 2, 3, 4), (6, 4, 2, 1))[0])]
        new_states = [self.new_state(o, step) for o in states]
        states = [Operand(o.name, None) if self.may_default(o, inputs, step) else o for o in states]
        loss = tuple(r.random() < 0.85 for _ in (*outputs, *new_states))
        made = Case(self.label, tuple(inputs), tuple(states), tuple(params), tuple(self.lines), tuple(outputs), tuple(new_states), loss)
        return made.change(sequences=r.random() < 0.3)

    def operand(self, name: str, palette: list[torch.dtype], shape: tuple[int, ...]) -> Operand:
        r, dtype = self.r, self.r.choice(palette)
        layout = r.choices(("plain", "transposed", "every other", "shifted", "expanded"), (8, 2, 2, 2, 1))[0]
        if layout == "expanded" and not shape:
            layout = "plain"
        values = self.fill((1, *shape[1:]) if layout == "expanded" else shape, dtype)
        if layout == "expanded":
            values = values.expand(shape).contiguous()
        return Operand(name, values, layout, dtype.is_floating_point and r.random() < 0.8)

    def state(self, name: str, palette: list[torch.dtype], step: tuple[int, ...]) -> Operand:
        made = self.operand(name, palette, step)
        return made if made.layout != "expanded" else Operand(name, made.values, "plain", made.grad)

    def may_default(self, operand: Operand, inputs: list[Operand], step: tuple[int, ...]) -> bool:
        """A default state is zeros of the dtype that the core settles on: only the input's own dtype is sure to be that."""
        x = inputs[0].values
        return (
            operand.values is not None
            and x is not None
            and operand.values.dtype == x.dtype
            and x.shape[1:] == step
            and self.r.random() < 0.3
        )

    def part(self, step: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to the step shape."""
        shape = tuple(1 if self.r.random() < 0.15 else n for n in step)
        return shape[self.r.randint(0, len(shape)) :] if self.r.random() < 0.15 else shape

    def of_param(self, step: tuple[int, ...]) -> tuple[int, ...]:
        kept = self.r.randint(0, len(step))
        shape = tuple(n if self.r.random() < 0.7 else 1 for n in step)
        return self.r.choice(((), shape[kept:], shape, (*(1,) * kept, *step[kept:])))

    def fill(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        r, g = self.r, self.generator
        if dtype is torch.bool:
            return torch.rand(shape, generator=g) < 0.5
        if not dtype.is_floating_point:
            info = torch.iinfo(dtype)
            low = max(info.min, -9)
            values = torch.randint(low, 10, shape, generator=g).to(dtype)
            special = torch.tensor([info.max, info.min, info.max - 1, info.min + 1, 0, 1, 31, 64, 100], dtype=dtype)
        else:
            info = torch.finfo(dtype)
            values = (torch.randn(shape, generator=g, dtype=torch.float64) * r.choice((0.5, 1.0, 1.0, 3.0, 30.0))).to(dtype)
            more = [info.tiny, -info.tiny / 8, info.smallest_normal / 3, info.max, info.min, 1 + info.eps, 1 - info.eps / 2, info.eps]
            special = torch.tensor([*_SPECIALS, *more], dtype=dtype)
        at = torch.randint(0, len(special), shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < self.hard, special[at], values)

    # --- lines --------------------------------------------------------------------------------------------------------
    def remember(self, name: str, value: Tensor) -> None:
        self.given[name] = torch.ones_like(value)
        self.small[name] = torch.ones(value.shape, dtype=torch.float32 if value.dtype in HALF else value.dtype)

    def add(self, text: str, args: tuple[str, ...], op: str | None = None) -> str | None:
        """A new value; None if PyTorch refuses."""
        code = compile(text.format(*args), "<line>", "eval")
        try:
            value = eval(code, _GLOBALS, self.small)
            given = eval(code, _GLOBALS, self.given) if self.has_half else value
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError):
            return None
        known = (*FLOATS, *HALF, *INTS, torch.bool)
        if not isinstance(value, Tensor) or value.dtype not in known or given.dtype not in known:
            return None
        name = f"t{len(self.lines)}"
        self.lines.append(Line(name, text, args, op))
        self.small[name], self.given[name] = torch.ones_like(value), torch.ones_like(given)
        return name

    def line(self) -> None:
        for _ in range(12):
            words = CLOSED if self.r.random() < 0.6 else COMPOSITES
            word = self.r.choice(list(words.values()))
            before = len(self.lines)
            if self.spell(word) is not None:
                return
            for line in self.lines[before:]:
                del self.small[line.name], self.given[line.name]
            del self.lines[before:]

    def spell(self, word: Word) -> str | None:
        if word.name == "convert":
            return self.convert(self.value(word.kinds), self.r.choice((*FLOATS, *FLOATS, *INTS, torch.bool)))
        args = [self.value("b" if word.name == "where" else word.kinds)]
        for _ in range(word.arity - 1):
            like = self.small[args[-1]].dtype if word.name != "where" or len(args) > 1 else None
            args.append(self.value(word.kinds, like if self.r.random() < 0.8 else None))
        for at, guard in word.guards:
            needed = self.small[args[at]].dtype.is_floating_point == (guard != "divisor")
            if needed:
                args[at] = self.add(self.r.choice(GUARDS[guard]), (args[at],)) or args[at]
        if word.guards and word.guards[0][1] == "divisor" and any(self.small[a].dtype is torch.bool for a in args):
            return None
        if word.detached:
            args = [self.add("{0}.detach()", (a,)) or a for a in args]
        return self.add(word.text, tuple(args), word.op)

    def convert(self, name: str, dtype: torch.dtype) -> str | None:
        if self.small[name].dtype.is_floating_point and not dtype.is_floating_point and dtype is not torch.bool:
            info, most = torch.iinfo(dtype), int(torch.finfo(self.small[name].dtype).max)
            bits = min(info.bits, 53) - 1
            low, high = max(info.min, -(2**bits), -most), min(info.max, 2**bits - 128, most)
            text = GUARDS["in range"][0].replace("{low}", str(low)).replace("{high}", str(high))
            name = self.add(text, (name,)) or name
        return self.add(f"{{0}}.to({dtype})", (name,), "convert")

    def value(self, kinds: str, like: torch.dtype | None = None) -> str:
        """A value of one of the kinds, rather a recent one; made by a conversion if there is none."""
        names = [n for n, t in self.small.items() if _kind(t.dtype) in kinds]
        same = [n for n in names if self.small[n].dtype is like]
        names = same or names
        if names:
            return names[max(self.r.randrange(len(names)), self.r.randrange(len(names)))]
        source = self.r.choice(list(self.small))
        wanted = {"f": torch.float32, "i": torch.int32, "b": torch.bool}[kinds[0]]
        return self.convert(source, wanted) or source

    def pick_output(self) -> str:
        if not self.lines or self.r.random() < 0.04:
            return self.r.choice(list(self.small))
        return self.lines[-min(self.r.randrange(len(self.lines)), self.r.randrange(len(self.lines))) - 1].name

    def new_state(self, state: Operand, step: tuple[int, ...]) -> str:
        """A value with the state's shape and dtype on any operands: the dtype that the state is given in."""
        assert state.values is not None
        name, dtype = self.pick_output(), state.values.dtype
        if self.small[name].dtype != dtype or self.given[name].dtype != dtype:
            name = self.convert(name, dtype) or state.name
        if self.small[name].shape != step:
            name = self.add("torch.where({1} == {1}, {0}, {1})", (name, state.name)) or state.name
        if self.small[name].dtype != dtype:
            name = self.convert(name, dtype) or state.name
        return name


def _kind(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype is torch.bool else "i"
