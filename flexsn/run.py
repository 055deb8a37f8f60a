"""Run a program on tensors: one forward kernel, one backward kernel, prologue and epilogue around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .blueprint import Shapes, rescale
from .compile import Program
from .graph import HALF
from .memory import empty
from .plan import Plan


class Call:
    """Everything about calls with operands of the same kinds but the tensors themselves: made once, used by each of them.

    Attributes:
        program: what runs.
        shapes: step shapes of this call.
        T: steps.
        statics: names of the params and captured tensors, in the order in which they are passed.
        sequences: whether the states of every step are returned too.
        differentiable: whether autograd records the call.
        kinds: shape and dtype of every operand as given, None for a default state.
        roles: of inputs and initial states, in order.
        checkpoints: how many rows of states the forward stores for the backward.
    """

    def __init__(self, program: Program, shapes: Shapes, T: int, statics: tuple[str, ...], sequences: bool, differentiable: bool,
                 tensors: Sequence[Tensor | None]):  # fmt: skip
        self.program, self.shapes, self.T, self.statics = program, shapes, T, statics
        self.sequences, self.differentiable = sequences, differentiable
        self.kinds = [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]
        self.needs = tuple([t is not None and t.requires_grad for t in tensors])
        sig = program.sig
        self.num_inputs, self.num_operands = sig.num_inputs, sig.num_inputs + sig.num_states
        self.roles = tuple([f"x{k}" for k in range(sig.num_inputs)] + [f"v{k}" for k in range(sig.num_states)])
        self.checkpoints = program.checkpoints(T)
        self._launches: dict[tuple, Any] = {}

    def forward_launch(self, inputs: Sequence[Tensor], save: bool) -> Any:
        key = ("forward", save)
        if key not in self._launches:
            flags = tuple([x.dtype for x in inputs]), save, self.sequences
            self._launches[key] = self._launch("forward", flags)
            if save and self.program.backend.lazy and inputs[0].device.type == "cuda":
                self._expect_backward(inputs)
        return self._launches[key]

    def _launch(self, direction: str, flags: tuple) -> Any:
        return Launch(self.program.kernel(direction, *flags), self.T, self.shapes.step, self.checkpoints)

    def _expect_backward(self, inputs: Sequence[Tensor]) -> None:
        """Start to build the backward, supposing that every output gets a cotangent."""
        vjp = self.program.vjp
        present = tuple(sorted(f"gy{k}" for k in range(self.program.num_outputs) if vjp.differentiable[k]))
        wanted, statics = self.wanted(self.needs)
        launch, _ = self.backward_launch(inputs, wanted, present, statics)
        if launch.writes and launch.numel:
            launch.kernel.expect(launch.numel, inputs[0].device.index)

    def wanted(self, needs: Sequence[bool]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
        """Roles of the gradients that operands need, and which statics need one, in the order of the VJP."""
        vjp = self.program.vjp
        roles = tuple([f"g{r}" for r, need in zip(self.roles, needs, strict=False) if need and f"g{r}" in vjp.graph.outputs])
        by_name = dict(zip(self.statics, needs[self.num_operands :], strict=True))
        return roles, tuple([by_name[name] for name in (*self.program.sig.param_names, *vjp.captured)])

    def backward_launch(
        self, inputs: Sequence[Tensor], wanted: tuple[str, ...], present: tuple[str, ...], statics: tuple[bool, ...]
    ) -> tuple[Any, dict[str, tuple[int, ...]]]:
        """For the gradients of inputs and states `wanted`, of `statics`, from the cotangents `present`; and the step shapes
        of the sums over time (`gp*`) that the epilogue takes."""
        key = ("backward", wanted, present, statics)
        if key not in self._launches:
            vjp = self.program.vjp
            _, sums = vjp.epilogue(statics)
            launch = self._launch("backward", (tuple([x.dtype for x in inputs]), (*wanted, *sums), present))
            steps = {r: rescale(tuple(vjp.frontier[r].meta["val"].shape), self.program.step, self.shapes.step) for r in sums}
            self._launches[key] = launch, steps
        return self._launches[key]


class Launch:
    """A kernel at given sizes: which arrays it takes, and which are allocated for it.

    Attributes:
        reads: roles, in the order of the kernel's arguments.
        params: those of them that the prologue computes.
        writes: role, shape and dtype of every array to allocate.
    """

    def __init__(self, kernel: Any, T: int, step: tuple[int, ...], checkpoints: int):
        self.kernel, self.T, self.step, self.numel = kernel, T, step, math.prod(step)
        self.reads = [a.role for a in kernel.plan.reads]
        self.params = [a.role for a in kernel.plan.reads if a.kind == "param"]
        self.writes = written_arrays(kernel.plan, T, step, checkpoints)

    def __call__(self, arrays: dict[str, Tensor | None], params: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Run; returns what was written, by role."""
        dims: list[int] = []
        for role in self.params:
            tensor, inner, count = _by_index(params[role].to(device), self.step)  # a number may be a tensor on the CPU
            arrays[role] = tensor
            dims += (inner, count)
        written = {role: empty(shape, dtype, device) for role, shape, dtype in self.writes}
        self.kernel([arrays.get(r) for r in self.reads] + list(written.values()), dims, self.T, self.numel)
        return written


def written_arrays(plan: Plan, T: int, step: tuple[int, ...], checkpoints: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Role, shape and dtype of every array that a kernel writes."""
    rows = {"sequence": (T,), "checkpoint": (checkpoints,), "row": ()}
    return [(a.role, (*rows[a.kind], *step), a.storage) for a in plan.writes]


@dataclass
class Forward:
    """What a forward pass gives: `[T, *shape]` outputs and state sequences, final states, checkpoints to save."""

    outputs: list[Tensor]
    finals: list[Tensor]
    sequences: list[Tensor]
    checkpoints: dict[str, Tensor]


def forward(call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor | None], statics: dict[str, Tensor], save: bool) -> Forward:
    """Run all T steps.

    Args:
        inputs: rows as `rows()` gives them.
        states: initial states as `rows()` gives them, or None for zeros.
        save: also write checkpoints for a backward.
    """
    launch, shapes, T = call.forward_launch(inputs, save), call.shapes, call.T
    arrays: dict[str, Tensor | None] = dict(zip(call.roles, (*inputs, *states), strict=True))
    written = launch(arrays, call.program.prologue(statics), inputs[0].device)
    if T == 0:
        for k, state in enumerate(states):
            final = written[f"v{k}"]
            final.zero_() if state is None else final.copy_(state)
    outputs = [_narrow(written[f"y{k}"], (T, *s), 1) for k, s in enumerate(shapes.outputs)]
    finals = [_narrow(written[f"v{k}"], s, 0) for k, s in enumerate(shapes.states)]
    sequences = [_narrow(written[f"s{k}"], (T, *s), 1) for k, s in enumerate(shapes.states)] if call.sequences else []
    return Forward(outputs, finals, sequences, {r: t for r, t in written.items() if r[0] == "c"})


def backward(
    call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor | None], statics: dict[str, Tensor],
    checkpoints: dict[str, Tensor], cotangents: dict[str, Tensor], wanted: tuple[str, ...], wanted_statics: tuple[bool, ...],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:  # fmt: skip
    """Walk back over all T steps.

    Args:
        cotangents: those that exist, `gy*` (outputs), `gs*` (state sequences), `gv*` (final states).
        wanted: `gx*` and `gv*` to compute.
        wanted_statics: which params and captured tensors (in the order of the VJP) need a gradient.

    Returns:
        Gradients of inputs and initial states by role, and gradients of the statics.
    """
    vjp, step = call.program.vjp, call.shapes.step
    present = tuple(sorted([r for r in cotangents if r[:2] != "gv"]))
    launch, sums = call.backward_launch(inputs, wanted, present, wanted_statics)
    if not launch.writes:  # no operand that needs a gradient has one
        return {}, [None] * len(wanted_statics)
    arrays: dict[str, Tensor | None] = dict(zip(call.roles, (*inputs, *states), strict=True))
    arrays |= checkpoints
    for role, grad in cotangents.items():
        arrays[role] = _widen(grad, step, 0 if role[:2] == "gv" else 1)
    written = launch(arrays, vjp.prologue(statics), inputs[0].device)
    if call.T == 0:
        for role, grad in written.items():
            final = arrays.get(role)
            grad.zero_() if final is None else grad.copy_(final)
    if not any(wanted_statics):
        return written, [None] * len(wanted_statics)
    found = vjp.epilogue(wanted_statics)[0](statics, [unbroadcast(written[r], s, 0) for r, s in sums.items()])
    return {r: written[r] for r in wanted}, [found.get(str(k)) for k in range(len(wanted_statics))]


def rows(tensor: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    """An operand broadcast to the step shape after `leading` dims, contiguous: rows of N neurons."""
    tensor = _plain(tensor)
    target = (*tensor.shape[:leading], *step)
    if tensor.shape != target:
        missing = len(target) - tensor.dim()
        tensor = tensor.reshape(*tensor.shape[:leading], *([1] * missing), *tensor.shape[leading:]).expand(target)
    return tensor.contiguous()


def _plain(tensor: Tensor) -> Tensor:
    """With memory of its own and no lazy sign: kernels read what a pointer leads to."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def unbroadcast(grad: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """The gradient of an operand from the gradient of its rows."""
    step = shape[leading:]
    return grad if grad.shape == shape else _sum_steps(grad, step, leading).reshape(shape)


def _sum_steps(grad: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    missing = grad.dim() - leading - len(step)
    dims = list(range(leading, leading + missing))
    dims += [d + leading + missing for d, n in enumerate(step) if n == 1 and grad.shape[d + leading + missing] != 1]
    return grad.sum(dims) if dims else grad


def _by_index(param: Tensor, step: tuple[int, ...]) -> tuple[Tensor, int, int]:
    """A param whose broadcast dims lie outside one solid block needs no copy; any other is expanded."""
    param = _plain(param)
    shape = (1,) * (len(step) - param.dim()) + tuple(param.shape)
    solid = [d for d, n in enumerate(shape) if n != 1]
    if not solid:
        return param, max(1, math.prod(step)), 1
    block = range(solid[0], solid[-1] + 1)
    if all(shape[d] == step[d] for d in block):
        return param.contiguous(), math.prod(step[block.stop :]), math.prod(shape)
    return param.expand(step).contiguous(), 1, math.prod(step)


def _narrow(full: Tensor, shape: tuple[int, ...], leading: int) -> Tensor:
    """What the core returns at a smaller shape is constant along the dims it lacks."""
    if full.shape == shape:
        return full
    missing = full.dim() - len(shape)
    for _ in range(missing):
        full = full.select(leading, 0)
    for d, n in enumerate(shape):
        if n == 1 and full.shape[d] != 1:
            full = full.narrow(d, 0, 1)
    return full.clone(memory_format=torch.contiguous_format)  # its own memory, not the whole block


def _widen(grad: Tensor, step: tuple[int, ...], leading: int) -> Tensor:
    """The adjoint of `_narrow`."""
    grad = _plain(grad)  # that of `sgn` has no memory
    target = (*grad.shape[:leading], *step)
    if grad.shape == target:
        return grad.contiguous()
    full = grad.new_zeros(target)
    part = full
    for _ in range(len(target) - grad.dim()):
        part = part.select(leading, 0)
    for d, n in enumerate(grad.shape):
        if n == 1 and part.shape[d] != 1:
            part = part.narrow(d, 0, 1)
    part.copy_(grad)
    return full


def upcast(tensor: Tensor) -> Tensor:
    """16-bit floats are computed in float32."""
    return tensor.float() if tensor.dtype in HALF else tensor
