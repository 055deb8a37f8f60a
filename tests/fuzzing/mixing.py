"""Random cores with calls that mix neurons (`s @ w`, `linear(s)`, `conv1d(s)`, `s.mean(-1)`, `layer_norm`, `cat`, `chunk`), of inputs and states, judged in float64.

What such a call gives is PyTorch's to rounding, so results are compared within it; values are kept from growing, and thresholds are as
unlikely to be met within rounding as two random numbers are to be equal. A case is data, as any other: it prints itself as a script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from helpers import assert_same_grads, assert_same_values

import flexsn
from flexsn._operator.fallback import unsaid
from flexsn._plan.plan import KernelPlan
from flexsn._program import cache as caching
from flexsn._runtime.backends import BACKENDS
from flexsn._runtime.cpp_kernel import values
from flexsn.errors import FallbackWarning

from . import batch
from .case import LAYOUTS, Case, Line, Operand
from .check import fused

T_VALUES = (1, 2, 3, 5, 8, 16, 17, 33)
WIDTHS = (1, 2, 3, 5, 8, 16, 17, 33)
BATCHES = ((), (1,), (3,), (9,), (2, 3))
# Calls that mix neurons, of rows [*batch, H] and of images [B, C, *sizes]: text over the operand and its params; shapes of these
OF_ROWS = {
    "@": ("{0} @ {1}", "ho"), "@ transposed": ("{0} @ {1}.t()", "oh"), "matmul": ("torch.matmul({0}, {1})", "ho"),
    "linear": ("F.linear({0}, {1})", "oh"), "linear with bias": ("F.linear({0}, {1}, {2})", "oh o"),
    "computed weights": ("{0} @ (0.5 * {1} * {1}.tanh())", "ho"),
    "norm": ("0.5 * F.layer_norm({0} @ {1}, {1}.shape[1:], eps=0.1)", "ho"),
    "norm with weights": ("F.layer_norm(F.linear({0}, {1}), {2}.shape, {2}, {3}, 0.1)", "oh o o"),
    "part of joined": ("torch.cat([{0}, {0} @ {1}], -1)[..., {1}.shape[0] :]", "ho"),
    "gates": ("torch.mul(*torch.cat([{0} @ {1}, {0} @ {2}], -1).chunk(2, -1))", "ho ho"),
}  # fmt: skip
WITHIN = {  # which give what broadcasts with their operand, of rows and images alike
    "mean over the last dim": "{0}.mean(-1, keepdim=True)", "mean": "{0}.mean()", "largest": "{0}.amax(-1, keepdim=True)",
    "roll": "{0}.roll(1, -1)", "flip": "{0}.flip(-1)", "softmax": "{0}.softmax(-1)", "running sum": "0.25 * {0}.cumsum(-1)",
}  # fmt: skip
OF_IMAGES = {
    "conv": ("F.conv{n}d({0}, {1}, padding=1)", "oi3"), "conv with bias": ("F.conv{n}d({0}, {1}, {2}, padding=1)", "oi3 o"),
    "dilated conv": ("F.conv{n}d({0}, {1}, padding=2, dilation=2)", "oi3"), "conv of one": ("F.conv{n}d({0}, {1})", "oi1"),
}  # fmt: skip
UNARY = ("torch.tanh({0})", "torch.sigmoid({0})", "torch.sin({0})", "0.5 * {0}", "-{0}", "flexsn.surrogate.atan({0} - 0.3)", "{0}.abs()")
BINARY = ("0.5 * ({0} + {1})", "{0} * {1}", "{0} - {1}", "torch.where({0} > {1}, {0}, 0.5 * {1})", "torch.maximum({0}, {1})")


def generate(label: str) -> Case:
    """The case of a label: the first one drawn in which results depend on a call that mixes a state."""
    with torch.device("cpu"):
        drawn = (_Draw(label, attempt).case() for attempt in range(100))
        return next(case for case in drawn if any(line.op and line.args[0].startswith("v") for line in case.lines))


class _Draw:
    def __init__(self, label: str, attempt: int):
        self.label, self.r = label, random.Random(f"{label}/{attempt}")
        self.generator = torch.Generator().manual_seed(self.r.getrandbits(48))
        self.lines: list[Line] = []
        self.params: list[Operand] = []
        self.values: list[str] = []  # that depend on time and have the step's shape, or broadcast to it

    def case(self) -> Case:
        r = self.r
        T, batch, dims = r.choice(T_VALUES), r.choice(BATCHES), r.choice((0, 0, 0, 1, 2))  # of images, 0: rows
        width, sizes = r.choice(WIDTHS) if not dims else r.randint(1, 4), tuple(r.randint(3, 6) for _ in range(dims))
        batch = batch[:1] if dims else batch
        step, self.dims = (*batch, width, *sizes), dims
        others = r.random() < 0.5  # the input has another width than the states
        x_width = r.choice([w for w in WIDTHS[:6] if w != width]) if others else width
        inputs = [self.operand("x0", (T, *batch, x_width, *sizes))] + [self.operand("x1", (T, *step))] * (r.random() < 0.3)
        states = [self.operand(f"v{k}", step) for k in range(r.randint(1, 3))]
        fixed = [self.operand(f"c{k}", r.choice(((), step[-1:], step))) for k in range(r.randint(0, 2))]
        for at, o in enumerate((*inputs, *states)):
            if at or not others:
                self.values.append(o.name)
        if others or r.random() < 0.3:
            self.mix("x0", x_width, width, whole=others or r.random() < 0.5)
        mixed = [r.choice(states).name for _ in range(r.randint(1, 4))]
        for name in mixed:
            self.mix(name, width, width, whole=r.random() < 0.7)
        unused = self.values[-len(mixed) :]
        self.values += [o.name for o in fixed]
        for _ in range(r.randint(1, 8)):
            text = r.choice(UNARY) if r.random() < 0.4 else r.choice(BINARY)
            first = unused.pop() if unused and r.random() < 0.7 else self.value()
            self.add(text, first, *[self.value()] * ("{1}" in text))
        new = [self.new_state(o.name, [s.name for s in states]) for o in states]
        outputs = [r.choice((self.value(), self.value(), *new, *mixed)) for _ in range(r.randint(1, 2))]
        outputs = [self.add("{0} + 0.0 * {1}", y, states[0].name) for y in outputs]  # the step's shape, and dependent on time
        loss = tuple(r.random() < 0.8 for _ in (*outputs, *new))
        made = Case(self.label, tuple(inputs), tuple(states), (*self.params, *fixed), tuple(self.lines), tuple(outputs), tuple(new), loss)
        return made.change(sequences=r.random() < 0.3)

    def operand(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> Operand:
        layout = self.r.choices(tuple(LAYOUTS), (8, 1, 1, 1, 1))[0] if shape else "plain"
        values = torch.randn((1, *shape[1:]) if layout == "expanded" else shape, generator=self.generator, dtype=torch.float64)
        return Operand(name, (scale * values).expand(shape).contiguous(), layout, self.r.random() < 0.8)

    def add(self, text: str, *args: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(Line(name, text.replace("{n}", str(self.dims)), args))
        self.values.append(name)
        return name

    def mix(self, name: str, width: int, out: int, whole: bool) -> None:
        """A call that mixes `name`; `whole`: of the step's shape for sure."""
        if not whole:
            word = self.r.choice(list(WITHIN))
            self.lines.append(Line(f"t{len(self.lines)}", WITHIN[word], (name,), word))
        else:
            table = OF_IMAGES if self.dims else OF_ROWS
            word = self.r.choice(list(table))
            text, shapes = table[word]
            lengths = {"h": [width], "o": [out], "i": [width], "3": [3] * self.dims, "1": [1] * self.dims}
            made = []
            for letters in shapes.split():
                scale = 0.7 / (width * 3 ** (self.dims * ("3" in letters))) ** 0.5
                made.append(self.operand(f"w{len(self.params)}", tuple(n for a in letters for n in lengths[a]), scale))
                self.params.append(made[-1])
            text = text.replace("{n}", str(self.dims))
            self.lines.append(Line(f"t{len(self.lines)}", text, (name, *(o.name for o in made)), word))
        self.values.append(self.lines[-1].name)

    def value(self) -> str:
        """One of the values, rather a recent one."""
        return self.values[max(self.r.randrange(len(self.values)), self.r.randrange(len(self.values)))]

    def new_state(self, name: str, states: list[str]) -> str:
        """What has the step's shape and stays small; at times a state as it is, delayed or kept."""
        if self.r.random() < 0.15:
            return self.r.choice(states)
        text = self.r.choice(("0.5 * {1} + 0.5 * torch.tanh({0})", "torch.sin({0} + 0.25 * {1})", "{1} + 0.3 * (torch.tanh({0}) - {1})"))
        return self.add(text, self.value(), name)


# --- judged -----------------------------------------------------------------------------------------------------------------------
def runs(case: Case, backend: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Results and gradients, and results without gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        results, grads = fused(case, backend)
        with torch.no_grad():
            operands = [[o.tensor() for o in part] for part in (case.inputs, case.states, case.params)]
            found = flexsn.scan(case.core(), *operands, store_state_seqs=case.sequences, backend=backend)
    return results, grads, dict(zip(results, (*found.outputs, *found.states), strict=True))


def complaint(case: Case) -> str:
    """What is wrong with a case, and a script that shows it; empty if nothing is."""
    try:
        results, grads, inferred = runs(case, "auto")
        want, want_grads, _ = runs(case, "torch")
        for found in (results, inferred):
            assert_same_values(found, want, exact=False, tolerance=1e-11)
        assert_same_grads(grads, want_grads, scale=10)
    except Exception as error:  # whatever it is, it is the case's verdict
        return f"{case.label}: {type(error).__name__}: {error}\n{case.script('auto')}"
    return ""


def complaints(cases: Sequence[Case], flags: Sequence[str] = batch.FAST_BUILD) -> list[str]:
    """What is wrong with the cases, whose kernels are built in one library."""
    before, programs = BACKENDS["cpp"], caching.PROGRAMS
    try:
        caching.PROGRAMS = caching.Programs()  # for kernels that are not there yet
        BACKENDS["cpp"] = dataclasses.replace(before, start=None)
        with batch.deferred() as kernels:
            for case in cases:
                with contextlib.suppress(Exception), unsaid():  # judged later, when it is raised again
                    runs(case, "auto")
        batch.build(kernels, flags)
        built = {(k.source, *values(k.plan)): k.kernel for k in kernels}

        def load(plan: KernelPlan, source: str) -> Any:
            return built.get((source, *values(plan))) or before.load(plan, source)

        caching.PROGRAMS = caching.Programs()
        BACKENDS["cpp"] = dataclasses.replace(before, load=load, start=None)
        return [said for case in cases if (said := complaint(case))]
    finally:
        BACKENDS["cpp"], caching.PROGRAMS = before, programs
