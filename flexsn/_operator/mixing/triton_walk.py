"""What a recurrence does in one step, as one Triton kernel over all of time: the ops that `cpp_walk.py` writes for C++, written as Triton.

A program walks over time for some columns of a few sequences: their states, and these columns of the weights, stay in registers. What a
product takes goes through the GPU's cache, where the programs of the same sequences meet. So a recurrence is one launch, where a step takes
longer to launch than to run.

What it gains, on an H100, 1,000 steps of 64 sequences of 256 recurrent LIF, beside a plain loop: inference is 45 times as fast, training
63 times (`python benchmarks/recurrent.py --device cuda`, 2026-11-27).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._codegen.language import values
from ..._codegen.triton_walk import WalkSource
from ..._ir.roles import Kind, Role
from ..._program.replay import Fresh, Launcher
from ..._runtime import triton_kernel
from ..._runtime.launch import Launch
from ..._torch.cuda import current_stream, triton_launch
from ..call import Call
from .cpp_walk import BEFORE, OTHER_SLOT, SLOT, Array, CannotWalk, Rows, static_operands


class WholeRows(Array):
    """Where a value lies, all of which is in the registers of one program."""

    def part(self, at: int, width: int) -> Array:
        if at == 0 and width == self.width:
            return self
        raise CannotWalk("a part of a value is used")


class TritonWalk(Rows):
    """A list of ops, written one after the other; as `cpp_walk.Walk`."""

    array = WholeRows

    def __init__(self, device: torch.device, T: int, lead: Sequence[int], dtype: torch.dtype, fresh: Fresh = operator.call):
        super().__init__(T, lead, dtype, device, fresh)
        self.source, self.widths = WalkSource(), set[int]()
        if dtype is not torch.float32:
            raise CannotWalk("values are not float32")

    def kept(self, start: Tensor) -> tuple[Array, Array, Tensor]:
        """Return where a state lies before every step and after it, of which the former are kept, and the final one."""
        two, before = self.turns(start, 0), self.new(start.shape[-1], self.T)
        self.copy(two, before)
        return before, Array(two.tensor, OTHER_SLOT), two.tensor[self.T & 1]

    # --- ops ------------------------------------------------------------------------------------------------------------------
    def kernel(
        self, call: Call, launch: Any, prologue: Any, operands: Sequence[Tensor], reads: Mapping[Role, Array], writes: Mapping[Role, Array]
    ) -> None:
        """Run one step of a segment; arguments as of `cpp_walk.Walk.kernel`."""
        if not isinstance(launch, Launch) or not isinstance(launch.kernel, triton_kernel.Kernel):
            raise CannotWalk("a part of it is no kernel of Triton's")
        static, dims = static_operands(self.lead, call, launch, prologue, operands)
        plan, width, given = launch.kernel.plan, call.shapes.step[-1], list[str]()
        for inner, count in zip(dims[::2], dims[1::2], strict=True):
            if count != 1 and (count != width or inner != 1):
                raise CannotWalk("a param is neither one number nor one per neuron")
        for role in plan.step.inputs:
            if role.kind is Kind.PARAM:
                given.append(self.source.param(static[role]))
            elif role in reads:
                given.append(self.read(reads[role]))
            else:
                raise CannotWalk("a kernel takes what is not there")
        if any(array.width != width for array in (*reads.values(), *writes.values())):
            raise CannotWalk("a kernel takes values of another width")
        found = self.source.step(plan, given, values(plan))
        for role, array in writes.items():
            if role not in found:
                raise CannotWalk("a kernel gives what it does not compute")
            self.write(array, found[role])

    def read(self, array: Array) -> str:
        """Return the variable of a value at this step."""
        self.widths.add(array.width)
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
        self.widths.add(array.width)
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
        bias = None if bias is None else bias.detach().contiguous()
        scratch = self.new(source.width, 2).tensor
        found = self.source.product(self.read(source), scratch, w.detach().contiguous(), bias)
        self.write(target, self.source.sum(self.read(target), found) if adds else found)

    def copy(self, source: Array, target: Array, *, adds: bool = False) -> None:
        """Copy rows to the target, or add them."""
        self.write(target, self.source.sum(self.read(target), self.read(source)) if adds else self.read(source))

    def by_rows(self, op: int, arrays: Sequence[Array], *tensors: Tensor | None) -> None:
        """Refuse an op on rows."""
        raise CannotWalk("a norm, or a softmax, has no op there")

    def total(self, source: Array, target: Array, by: float) -> None:
        """Write the sum of a row over `by` to the target, at every place of it: a product with weights that are equal."""
        self.product(source, target, torch.full((source.width, source.width), 1.0 / by, dtype=self.dtype, device=self.device))

    def kernel_of(self, *, back: bool) -> tuple[list[Tensor | None], Launcher]:
        if len(self.widths) > 1:
            raise CannotWalk("values differ in width")
        (width,), arguments = self.widths, list(self.source.arguments.values())
        places = [n for n, value in enumerate(arguments) if isinstance(value, Tensor)]
        taken: list[Tensor | None] = [arguments[n] for n in places]
        others, device = [None if isinstance(value, Tensor) else value for value in arguments], self.device
        tile = tile_for(self.sequences, width, _processors(device))
        function = _function(self.source.text("recurrence", back=back))
        constants = width, _padded(width), min(128, _padded(width)), tile.rows, tile.columns, tile.parts
        options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False, "launch_cooperative_grid": tile.parts > 1}
        sizes = self.T, self.sequences
        built: dict[int, tuple] = {}  # by the number of products, for aligned tensors: what launches, and first arguments

        def launch(tensors: Sequence[Tensor | None]) -> None:
            given, products = [*others], 3 if _as_tf32() else 6
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


def _as_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Tile(NamedTuple):
    """How a walk is cut for the GPU: sequences and columns of a program, and how many programs there are for either."""

    rows: int
    columns: int
    groups: int
    parts: int


_WIDEST = 512  # columns: weights of more do not fit into the registers of programs of 16 columns


def tile_for(sequences: int, width: int, processors: int) -> Tile:
    """Return how a walk is cut on a GPU of so many multiprocessors, each of which takes one program, as all must run at once.

    Raises:
        CannotWalk: there are too many sequences, or columns.
    """
    padded = _padded(width)
    columns = padded if not processors else 32 if padded <= _WIDEST // 2 else 16
    tile = Tile(16, columns, -(-sequences // 16), -(-width // columns))
    if processors and (padded > _WIDEST or tile.groups * tile.parts > processors):
        raise CannotWalk(f"{sequences} sequences of {width} neurons are more than this GPU runs at once")
    return tile


def _padded(width: int) -> int:
    """Return the size of a block of this width: Triton multiplies blocks of at least 16, and of powers of two."""
    return max(16, 1 << (width - 1).bit_length())


def takes(device: torch.device) -> bool:
    """Return whether walks run on tensors of a device: on GPUs that multiply bfloat16, outside of CUDA graphs, and in the
    interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) and not torch.cuda.is_current_stream_capturing()
    return device.type == "cpu" and triton_kernel.interpreted()
