"""What a recurrence does in one step, as one Triton kernel over all of time: the ops that `cpp_walk.py` writes for C++, written as Triton.

A program walks over time for some columns of a few sequences. Their states stay in registers, these columns of the weights on the chip if
they fit; else they are read at every step. What a product takes goes through the GPU's cache, where the programs of the same sequences
meet, but for few neurons, of which one program has all. So a recurrence is one launch, where a step takes longer to launch than to run.

What it gains, on an H100, 1,000 steps of 64 sequences of 256 recurrent LIF, beside a plain loop: inference is 70 times as fast, training
101 times; beside that loop in a CUDA graph 8.2 and 8.7 times (`python benchmarks/recurrent.py --device cuda`, 2026-11-28).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._codegen.language import values
from ..._codegen.triton_walk import WalkSource
from ..._ir.roles import Kind, Role
from ..._runtime.launch import Launch
from ..._runtime.triton import kernel as triton_kernel
from ..._torch.cuda import current_stream, triton_launch
from ..call import Call
from .cpp_walk import BEFORE, OTHER_SLOT, SLOT, Array, CannotWalk, Launcher, Rows, fresh, static_operands


@dataclass(eq=False)
class Columns(Array):
    """Where a value lies that is as wide as a state, or several times as wide: then its parts, as wide as a state, are values."""

    parts: dict[int, Columns] = field(default_factory=dict)

    def part(self, at: int, width: int) -> Columns:
        """Return a part of the rows, the same one each time."""
        if (at, width) == (0, self.width):
            return self
        if at % width or any(other.width != width for other in self.parts.values()):
            raise CannotWalk("parts of a value are not as wide as a state")
        if at not in self.parts:
            self.parts[at] = Columns(self.tensor[..., at : at + width], self.kind)
        return self.parts[at]


class TritonWalk(Rows):
    """A list of ops, written one after the other; as `cpp_walk.Walk`.

    Args:
        unit: the width of states, in which all other widths are counted.
        autocast: the dtype that products have; None: that of values.
    """

    array = Columns

    def __init__(
        self, device: torch.device, autocast: torch.dtype | None, T: int, lead: Sequence[int], dtype: torch.dtype, unit: int
    ):  # fmt: skip
        super().__init__(T, lead, dtype, device, unit)
        self.source, self.takes_autocast = WalkSource(rounds=autocast is not None), autocast is torch.bfloat16
        if dtype is not torch.float32:
            raise CannotWalk("values are not float32")

    def kept(self, start: Tensor) -> tuple[Array, Array, Tensor]:
        """Return where a state lies before every step and after it, of which the former are kept, and the final one."""
        two, before = self.turns(start, 0), self.new(start.shape[-1], self.T)
        self.copy(two, before)
        return before, Array(two.tensor, OTHER_SLOT), two.tensor[self.T & 1]

    def parts_of(self, array: Array) -> list[Array]:
        """Return the parts of a value that are as wide as a state."""
        if array.width % self.unit:
            raise CannotWalk("a value is not as wide as a state, or several times as wide")
        return [array] if array.width == self.unit else [array.part(at, self.unit) for at in range(0, array.width, self.unit)]

    # --- ops ------------------------------------------------------------------------------------------------------------------
    def kernel(
        self, call: Call, launch: Any, prologue: Any, operands: Sequence[Tensor], reads: Mapping[Role, Array], writes: Mapping[Role, Array]
    ) -> None:
        """Run one step of a segment; arguments as of `cpp_walk.Walk.kernel`."""
        if not isinstance(launch, Launch) or not isinstance(launch.kernel, triton_kernel.Kernel):
            raise CannotWalk("a part of it is no kernel of Triton's")
        static, dims = static_operands(self.lead, call, launch, prologue, operands)
        plan, width = launch.kernel.plan, call.shapes.step[-1]
        for inner, count in zip(dims[::2], dims[1::2], strict=True):
            if count != 1 and (count != width or inner != 1):
                raise CannotWalk("a param is neither one number nor one per neuron")
        if any(array.width != width for array in (*reads.values(), *writes.values())):
            raise CannotWalk("a kernel takes values of another width")
        for role in plan.step.inputs:
            if role.kind is not Kind.PARAM and role not in reads:
                raise CannotWalk("a kernel takes what is not there")
        given = {role: self.parts_of(array) for role, array in reads.items()}
        taken = {role: self.parts_of(array) for role, array in writes.items()}
        for n in range(width // self.unit):
            variables = [
                self.source.param(self.of_part(static[role], n)) if role.kind is Kind.PARAM else self.read(given[role][n])
                for role in plan.step.inputs
            ]
            found = self.source.step(plan, variables, values(plan))
            for role, arrays in taken.items():
                if role not in found:
                    raise CannotWalk("a kernel gives what it does not compute")
                self.write(arrays[n], found[role])

    def of_part(self, param: Tensor | None, n: int) -> Tensor:
        """Return what a part of a value takes of a param of one number, or of one per neuron."""
        assert param is not None
        return param if param.numel() <= self.unit else param[..., n * self.unit : (n + 1) * self.unit]

    def read(self, array: Array) -> str:
        """Return the variable of a value at this step."""
        if array.kind in (SLOT, OTHER_SLOT):
            found = self.source.carried(array.tensor, other=array.kind == OTHER_SLOT)
            if found is None:
                raise CannotWalk("a state is read before it is computed")
            return found
        if array.kind == BEFORE:
            assert array.first is not None
            return self.source.before(array, array.tensor, array.first)
        return self.source.row(array, array.tensor)

    def write(self, array: Array, variable: str) -> None:
        """Note what a value is at this step."""
        if array.kind in (SLOT, OTHER_SLOT):
            self.source.carry(array.tensor, variable, other=array.kind == OTHER_SLOT)
        else:
            self.source.set(array, array.tensor, variable, stored=array.tensor.shape[0] >= self.T)

    def product(self, source: Array, target: Array, w: Tensor, bias: Tensor | None = None, *, adds: bool = False) -> None:
        """Write `source @ w + bias` to the target, or add it."""
        if w.shape != (source.width, target.width) or (bias is not None and bias.shape != w.shape[1:]):
            raise CannotWalk("weights or a bias have other shapes than a product's")
        if any(t is not None and t.dtype is not self.dtype for t in (w, bias)):
            raise CannotWalk("weights are of another dtype than values")
        sources, targets = self.parts_of(source), self.parts_of(target)
        variables = list(map(self.read, sources))
        scratch, w = self.new(3 * source.width, 2, torch.bfloat16).tensor, w.detach().contiguous()
        parts = fresh(self.device, (3, *w.shape), torch.bfloat16)
        biases = [None if bias is None else self.of_part(bias.detach().contiguous(), n) for n in range(len(targets))]
        for part, found in zip(targets, self.source.product(variables, scratch, w, parts, biases), strict=True):
            self.write(part, self.source.sum(self.read(part), found) if adds else found)

    def copy(self, source: Array, target: Array, *, adds: bool = False) -> None:
        """Copy rows to the target, or add them."""
        for one, other in zip(self.parts_of(source), self.parts_of(target), strict=True):
            self.write(other, self.source.sum(self.read(other), self.read(one)) if adds else self.read(one))

    def total(self, source: Array, target: Array, by: float) -> None:
        """Write the sum of a row over `by` to the target, at every place of it."""
        found = self._sum(self.variable(source))
        self.write(target, found if by == 1 else self.source.let(f"{found} / {by}"))

    def variable(self, array: Array) -> str:
        """Return the variable of a value that an op takes row by row."""
        if array.width != self.unit:
            raise CannotWalk("an op takes rows that are wider than a state")
        return self.read(array)

    def _sum(self, variable: str, *, largest: bool = False) -> str:
        """Return the variable of the sum of a row, or of its largest value."""
        return self.source.total(variable, self.new(self.unit, 2).tensor, largest=largest)

    def _mean(self, variable: str) -> str:
        """Return the variable of the mean of a row."""
        return self.source.let(f"{self._sum(variable)} / {float(self.unit)}")

    def _standard(self, source: Array, eps: float) -> tuple[str, str]:
        """Return the variables of a row, of mean 0 and variance 1, and of what it was multiplied by for that."""
        row, let = self.variable(source), self.source.let
        centred = let(f"{row} - {self._mean(row)}")
        scale = let(f"1.0 / tl.sqrt_rn({self._mean(f'{centred} * {centred}')} + {eps})")
        return let(f"{centred} * {scale}"), scale

    def norm(self, source: Array, target: Array, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        found, _ = self._standard(source, eps)
        found = found if weight is None else self.source.let(f"{found} * {self.source.param(weight.detach().contiguous())}")
        self.write(target, found if bias is None else self.source.sum(found, self.source.param(bias.detach().contiguous())))

    def norm_back(self, source: Array, grad: Array, target: Array, weight: Tensor | None, eps: float) -> None:
        row, scale = self._standard(source, eps)
        own, let = self.variable(grad), self.source.let
        own = own if weight is None else let(f"{own} * {self.source.param(weight.detach().contiguous())}")
        self.write(target, let(f"({own} - {self._mean(own)} - {row} * {self._mean(f'{own} * {row}')}) * {scale}"))

    def softmax(self, source: Array, target: Array) -> None:
        row, let = self.variable(source), self.source.let
        power = let(f"libdevice.exp({row} - {self._sum(row, largest=True)})")
        self.write(target, let(f"{power} / {self._sum(power)}"))

    def softmax_back(self, result: Array, grad: Array, target: Array) -> None:
        row, own = self.variable(result), self.variable(grad)
        self.write(target, self.source.let(f"{row} * ({own} - {self._sum(f'{own} * {row}')})"))

    def kernel_of(self, *, back: bool) -> tuple[list[Tensor | None], Launcher]:
        source, width, arguments = self.source, self.unit, list(self.source.arguments.values())
        places = [n for n, value in enumerate(arguments) if isinstance(value, Tensor)]
        taken: list[Tensor | None] = [arguments[n] for n in places]
        others, device = [None if isinstance(value, Tensor) else value for value in arguments], self.device
        products = [(len(p.sources), len(p.found)) for p in source.products]
        tile = tile_for(self.sequences, width, products, _processors(device), _shared_memory(device), parts=1 if source.rounds else 3)
        self.cut = f" ({tile.in_words(width, mixes=bool(products))})"
        function = _function(source.text("recurrence", back=back, held=tile.held, alone=tile.alone))
        constants = width, _padded(width), tile.block, tile.rows, tile.columns, tile.parts
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": 1 if tile.held else _STAGES}
        options |= {"enable_fp_fusion": False, "launch_cooperative_grid": tile.parts > 1}
        sizes = self.T, self.sequences
        built: dict[int, tuple] = {}  # by the number of products, for aligned tensors: what launches, and first arguments

        def launch(tensors: Sequence[Tensor | None]) -> None:
            given, products = [*others], 1 if source.rounds else 3 if _as_tf32() else 6
            for n, tensor in zip(places, tensors, strict=True):
                given[n] = tensor
            with _on(device):
                given += [torch.zeros(32 * tile.groups, dtype=torch.int32, device=device), *sizes, *constants, products]
                aligned = device.type == "cuda" and not any(t.data_ptr() % 16 for t in tensors if t is not None)
                if aligned and products in built:
                    run, kernel, *first = built[products]  # past Triton's look at all arguments
                    run(tile.groups, tile.parts, 1, current_stream(device.index), kernel, *first, *given)
                    return
                binary = function[tile.groups, tile.parts](*given, **options)
                if aligned:
                    run, between = triton_launch(binary)
                    built[products] = run, binary.function, *between, binary.packed_metadata, None, None, None

        return taken, launch


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Return what makes a GPU the current one, or lets this thread use the interpreter."""
    if device.type != "cuda":
        return triton_kernel.interpreting()
    return contextlib.nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


@functools.lru_cache(256)
def _function(text: str) -> Any:
    return triton_kernel.define(text, "walk")


def _processors(device: torch.device) -> int:
    """Return how many programs run at once; 0 in the interpreter, which runs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10) if device.type == "cuda" else 0


def _as_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Tile(NamedTuple):
    """How a walk is cut for the GPU.

    Attributes:
        rows, columns: sequences and columns of a program.
        groups, parts: how many programs there are for either.
        held: whether a program keeps its columns of the weights; else it reads them at every step.
        block: rows of weights that it multiplies with at a time.
        alone: whether it has all columns, of which none goes through memory then.
    """

    rows: int
    columns: int
    groups: int
    parts: int
    held: bool
    block: int
    alone: bool = False

    def in_words(self, width: int, *, mixes: bool) -> str:
        """Return how the work on `width` neurons is divided; `mixes`: whether there are weights."""
        neurons = f"all {width}" if self.parts == 1 else f"{self.columns} of {width}"
        weights = ", and keeps their weights" if self.held else ", and reads their weights at every step"
        return f"a program has {neurons} neurons of {self.rows} sequences{weights if mixes else ''}"

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4 if self.rows == _FEWEST and (self.columns <= 32 or not self.held) else 8


_FEWEST = 16  # sequences of a program
_HELD = 200 << 10  # bytes of weights that a program keeps, at most
_READ = 1 << 26  # bytes of weights that all programs read at a step, at most: CUDA graphs are faster beyond that
_CACHED = 1 << 24  # bytes of weights that are read from the cache at every step, at most: likewise
_STAGES = 3  # blocks of weights that are on their way while one is multiplied with, and that one
_ALONE = 128  # the widest state of which a program has all columns: of wider ones each has too much to do
_SHAPES = (16, 32), (16, 64), (32, 32), (32, 64), (64, 32), (64, 16)  # sequences and columns of a program, the fastest first


def tile_for(sequences: int, width: int, products: Sequence[tuple[int, int]], processors: int, shared: int, *, parts: int) -> Tile:
    """Return how a walk is cut on a GPU of so many multiprocessors, each of which takes one program, as all must run at once.

    Args:
        products: how many times as wide as a state what each takes is, and what it gives.
        shared: bytes of shared memory of a multiprocessor.
        parts: in how many bfloat16 a weight is multiplied.

    Raises:
        CannotWalk: there are too many sequences, or columns.
    """
    padded, size = _padded(width), 2 * parts
    held = size * padded * len(products) if {*products} <= {(1, 1)} else math.inf  # bytes of a column of the weights

    def cut(rows: int, columns: int, held: bool, block: int) -> Tile:
        return Tile(rows, columns, -(-sequences // rows), -(-width // columns), held, min(block, padded))

    alone = cut(_FEWEST, padded, True, padded)._replace(alone=True)
    if padded <= _ALONE and held * padded <= _HELD and (not processors or alone.groups <= processors):
        return alone
    if not processors:
        return cut(_FEWEST, padded, held * padded <= _HELD, 128 if held * padded <= _HELD else 16)
    for rows, columns in _SHAPES:
        found = cut(rows, columns, True, 256 if (rows, columns) == _SHAPES[0] else 128)
        most = min(_HELD, shared - size * rows * found.block)
        if found.groups * found.parts <= processors and held * columns <= most:
            return found
    read = size * width * width * sum(a * b for a, b in products)
    for rows, columns in _SHAPES[:4]:
        found = cut(rows, columns, False, 128)
        while found.block > 16 and (_STAGES - 1) * size * found.block * (rows + columns * max(b for _, b in products)) > 2 * shared // 3:
            found = found._replace(block=found.block // 2)
        if found.groups * found.parts <= processors and read <= _CACHED and found.groups * read <= _READ:
            return found
    raise CannotWalk(f"{sequences} sequences of {width} neurons are more than this GPU runs at once")


def _padded(width: int) -> int:
    """Return the size of a block of this width: Triton multiplies blocks of at least 16, and of powers of two."""
    return max(16, 1 << (width - 1).bit_length())


def takes(device: torch.device) -> bool:
    """Return whether walks run on tensors of a device: on GPUs that multiply bfloat16, and in the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and triton_kernel.interpreted()
