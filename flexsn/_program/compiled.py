"""A program: a captured core, compiled by one backend for one device.

It holds no sizes: T and the step shape are arguments of its kernels. What the core computes from params alone is the `prologue`,
what turns summed cotangents into gradients of params is the `epilogue`; both are ATen graphs that PyTorch runs once per call
(`static_parts.py`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.signature import Signature
from .._capture.trace import Meta
from .._captured.captured_values import CapturedValues, lock
from .._captured.side_effects import no_side_effects
from .._ir.ends import end_of, stopping
from .._ir.roles import Kind, Role, of_kind, roles
from .._plan import parallel_time, plan
from .._runtime.backends import BACKENDS, Kernel, NoKernel
from .._runtime.cpp_kernel import Later
from .._torch.tensors import is_symbolic
from ..errors import CannotFuseError
from .captured import Blueprint, draw
from .lowered import LoweredVjp
from .static_parts import StaticModule, cut, parts_of_one, without_cotangents


class Program:
    """A blueprint, compiled by one backend for one device."""

    def __init__(self, backend: str, blueprint: Blueprint, device: torch.device):
        self.backend, self.blueprint = BACKENDS[backend], blueprint
        self.sig, self.num_outputs, self.step = blueprint.sig, blueprint.num_outputs, blueprint.step
        self.device = device
        self.states = roles(Kind.STATE, self.sig.num_states)
        self._plans: dict[tuple, plan.Plan] = {}
        self._kernels: dict[tuple, Kernel] = {}
        self._expected: dict[tuple, str] = {}  # sources of those that are being built
        self.graph, self.params = blueprint.forward.graph, blueprint.forward.statics.params
        self.end = end_of(self.graph)
        self.prologue = cut(blueprint.forward.statics, self.params)
        sig = self.sig
        itemsize = max(m.dtype.itemsize for m in blueprint.metas[: sig.num_inputs])
        self.ops = blueprint.ops or len(self.graph.nodes)
        sizes = (sig.num_inputs, sig.num_states - (self.end is not None), self.ops, itemsize)
        self.chunk, self.inference_chunk = (self.backend.chunk(*sizes, checkpoint) for checkpoint in (True, False))
        self._vjp: Vjp | None = None
        self.duals: dict[tuple, Any] = {}  # of `dual.py`
        self._refused: CannotFuseError | None = None  # why there is none
        self.kept: list[object] = []  # objects that the cache key names by id()
        self.storage = self._storage()

    def differentiate(self, core: Callable, captured: dict[str, Tensor], seen: CapturedValues | None = None) -> Vjp:
        """Return the VJP, captured on first use; `core` is the one that this program was made from, or its equal.

        Args:
            seen: what the core captures, which a backward of the user's must not write to.
        """
        with lock:
            if self._refused is not None:
                raise copy.copy(self._refused)
            if self.blueprint.vjp is None:
                try:
                    with no_side_effects(seen, self.sig.core) if seen is not None else contextlib.nullcontext():
                        self.blueprint.differentiate(core, captured, self.device)
                except CannotFuseError as error:
                    self.blueprint.vjp, self._refused = None, copy.copy(error)
                    raise
            return self.vjp

    def fits(self, metas: Sequence[Meta | None]) -> bool:
        """Return whether it serves operands of these shapes."""
        ins = self.sig.num_inputs + self.sig.num_states
        return self.blueprint.shapes([m.shape for m in metas[:ins] if m is not None]) is not None

    @property
    def vjp(self) -> Vjp:
        """The VJP; there is none before the captured core is differentiated."""
        if self._vjp is None:
            with lock:
                assert self.blueprint.vjp is not None, "differentiate() comes first"
                self._vjp = self._vjp or Vjp(self.sig, self.num_outputs, self.blueprint.vjp, self.end)
        return self._vjp

    def _storage(self) -> dict[Role, torch.dtype]:
        storage = {r: n.dtype for r, n in self.graph.inputs.items()} | {r: n.dtype for r, n in self.graph.outputs.items()}
        storage |= {v: m.dtype for v, m in zip(self.states, self.blueprint.states, strict=True)}
        return storage | {Role(Kind.OUTPUT, k): m.dtype for k, m in enumerate(self.blueprint.outputs)}

    # --- kernels ------------------------------------------------------------------------------------------------------
    def checkpoints(self, T: int) -> int:
        """Return the rows of states that a forward stores: exact where T is a number, an upper bound where it is symbolic."""
        if is_symbolic(T):
            return T // self.chunk + 2  # never 0 or 1, which PyTorch would make a case of its own
        T = int(T)  # which a trace may have found to be a number
        return plan.checkpoints(T, self.backend.chunk_for(self.chunk, T), self.chunk)

    def plan_of(self, direction: str, *flags: Any) -> plan.Plan:
        """Return the plan of `forward_plan(*flags)` or `backward_plan(*flags)`, for many steps."""
        key = (direction, *flags)
        if key not in self._plans:
            kernel = self.forward_plan(*flags) if direction == "forward" else self.backward_plan(*flags)
            self._plans[key] = plan.Plan((kernel,))
        return self._plans[key]

    def forward_plan(self, inputs: Sequence[torch.dtype], checkpoint: bool, sequences: bool) -> plan.KernelPlan:
        """Return the forward kernel for many steps."""
        storage = self.storage | {Role(Kind.INPUT, k): d for k, d in enumerate(inputs)}
        chunk = self.chunk if checkpoint else self.inference_chunk
        made = plan.plan_forward(self.graph, storage, chunk=chunk, checkpoint=checkpoint, sequences=sequences)
        return plan.with_parts(plan.with_end(made, None if sequences else self.end), parts_of_one(self.params))

    def backward_plan(self, inputs: Sequence[torch.dtype], wanted: Sequence[str], cotangents: Sequence[str]) -> plan.KernelPlan:
        """Return the backward kernel for many steps."""
        storage = self._storage_of(inputs)
        made = plan.plan_backward(self.vjp.graph, storage, chunk=self.chunk, wanted=wanted, cotangents=cotangents)
        ends = not any(Role.of(r).kind is Kind.STATES_GRAD for r in cotangents)  # these flow past the end, too
        return plan.with_parts(plan.with_end(made, self.end if ends else None), parts_of_one(self.vjp.params))

    def _storage_of(self, inputs: Sequence[torch.dtype]) -> dict[Role, torch.dtype]:
        """Return the dtypes in memory of what a backward reads and writes."""
        vjp = self.vjp.graph
        storage = self.storage | {Role(Kind.INPUT, k): d for k, d in enumerate(inputs)}
        return storage | {r: vjp.inputs[r].dtype for r in of_kind(vjp.inputs, Kind.PARAM)}

    def for_steps(self, T: int, made: plan.KernelPlan) -> plan.KernelPlan:
        """Return the plan of a kernel for T steps."""
        return dataclasses.replace(made, chunk=self.backend.chunk_for(made.chunk, T), longest=made.chunk)

    def kernel(self, T: int, direction: str, *flags: Any) -> Kernel:
        """Return the loaded kernel for T steps of `plan_of(direction, *flags)`, whose steps are elementwise: it has one kernel."""
        key, made = self._planned(T, direction, *flags)
        if key not in self._kernels:
            source = self._expected.pop(key, None) or self.backend.render(made)
            kernel = self.backend.load(made, source) if made.writes else NoKernel(made)
            serving = self._parallel_in_time(kernel, *flags)
            if isinstance(kernel, Later):
                return serving
            self._kernels[key] = serving
        return self._kernels[key]

    def _parallel_in_time(self, kernel: Kernel, inputs: Sequence[torch.dtype], *flags: Any) -> Kernel:
        """Return the kernel that may walk parts of time side by side, where the backend and the step allow it: a backward, whose bits are
        its own; and a forward that need not be exact."""
        back, chunk = kernel.plan.direction == "backward", kernel.plan.chunk
        if not kernel.plan.writes or not (back or not self.sig.exact):
            return kernel
        if back:
            wanted, cotangents = flags
            storage, params = self._storage_of(inputs), self.vjp.params
            plans = parallel_time.parallel_backward(self.vjp.graph, storage, chunk=chunk, wanted=wanted, cotangents=cotangents)
        else:
            checkpoint, sequences = flags
            storage, params = self.storage | {Role(Kind.INPUT, k): d for k, d in enumerate(inputs)}, self.params
            plans = parallel_time.parallel_forward(self.graph, storage, chunk=chunk, checkpoint=checkpoint, sequences=sequences)
        if plans is None:
            return kernel
        matrix, walk = (plan.with_parts(made, parts_of_one(params)) for made in plans)
        return self.backend.parallel_in_time(kernel, matrix, walk, lambda made: self.backend.load(made, self.backend.render(made)))

    def expect(self, T: int, direction: str, *flags: Any) -> None:
        """Start to build a kernel that `kernel` is asked for soon, where the backend can."""
        key, made = self._planned(T, direction, *flags)
        if self.backend.start is not None and made.writes and key not in self._kernels and key not in self._expected:
            self._expected[key] = self.backend.render(made)
            self.backend.start(made, self._expected[key])

    def _planned(self, T: int, direction: str, *flags: Any) -> tuple[tuple, plan.KernelPlan]:
        (made,) = self.plan_of(direction, *flags).kernels
        made = self.for_steps(T, made)
        return (made.chunk, direction, *flags), made


class Vjp:
    """The VJP of a program (with the new states: one graph, one set of params), its prologues and its epilogues."""

    def __init__(self, sig: Signature, num_outputs: int, lowered: LoweredVjp, end: Role | None):
        self.graph = lowered.graph if end is None else stopping(lowered.graph, end)
        self.statics, self.differentiable, self.flows = lowered.statics, lowered.differentiable, lowered.flows
        self.params = self.statics.params
        self.captured = lowered.captured[: max(0, len(self.statics.grads) - sig.num_params)]  # those that have gradients come first
        self._first_state, self._outs = sig.num_inputs, num_outputs
        self.prologue = cut(self.statics, self.params)
        self._prologues: dict[tuple[Role, ...], StaticModule] = {}
        self._epilogues: dict[tuple, StaticModule] = {}

    def requiring_grad(self, needed: Collection[int | str], T: int | None) -> list[bool]:
        """Return which outputs, final states and state sequences require grad, as in eager: those from which autograd's graph leads to an
        operand that does.

        Args:
            needed: these operands; inputs and states by place, params and captured tensors by name.
            T: how many steps; None if that is a symbol. Empty sequences are as after one.
        """
        states = range(self._first_state, self._first_state + len(self.flows) - self._outs)
        fixed, carried = {k for k in needed if k not in states}, {k for k in needed if k in states}
        ever = [False] * len(self.flows)
        for t in itertools.count() if T is None else range(T or 1):
            now = [not flow.isdisjoint(fixed | carried) for flow in self.flows]
            ever = [a or b for a, b in zip(ever, now, strict=True)]
            if T == 0:
                break
            before, carried = carried, {k for k, flag in zip(states, now[self._outs :], strict=True) if flag}
            if before == carried:  # as from now on
                break
            if T is None and t > len(states):  # it changes from step to step
                carried = {k for k, flag in zip(states, ever[self._outs :], strict=True) if flag}
                break
        return [*ever[: self._outs], *[k in carried for k in states], *ever[self._outs :]]

    def prologue_of(self, params: tuple[Role, ...]) -> StaticModule:
        """Return the part of the prologue that one kernel reads. PyTorch may refuse another part, of gradients that nobody wants."""
        if params not in self._prologues:
            self._prologues[params] = cut(self.statics, {r: self.params[r] for r in params})
        return self._prologues[params]

    def epilogue(self, wanted: tuple[bool, ...], given: tuple[Role, ...] | None = None) -> tuple[StaticModule, tuple[Role, ...]]:
        """Return the module that gives the wanted gradients of params and captured tensors, and the sums (`gp*`) it takes, where
        the cotangents `given` exist (by default all)."""
        if (wanted, given) not in self._epilogues:
            replaced = {} if given is None else without_cotangents(self.statics, self.graph, given)
            grads = [None if g is None else replaced.get(g, g) for g in self.statics.grads]
            results = {str(k): g for k, (g, w) in enumerate(zip(grads, wanted, strict=True)) if w and g is not None}
            self._epilogues[wanted, given] = cut(self.statics, results, replaced, apart=True)
        module = self._epilogues[wanted, given]
        return module, module.sums

    def sum_shape(self, role: Role) -> tuple[int, ...]:
        """Return the step shape of a sum over time, at the step shape of the capture."""
        return tuple(self.statics.sums[role].meta["val"].shape)


def program_of(
    backend: str, core: Callable, sig: Signature, metas: Sequence[Meta | None], device: torch.device, captured: dict[str, Tensor],
    num_outputs: int | None = None,
) -> Program:  # fmt: skip
    """Return a program of `core`, captured and lowered past every cache."""
    return Program(backend, draw(core, sig, metas, device, captured, num_outputs), device)
