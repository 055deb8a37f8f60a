"""Run a program on tensors: one forward kernel, one backward kernel, prologue and epilogue around them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._ir.graph import HALF
from .._ir.roles import Kind, Role, roles
from .._plan.plan import Array, KernelPlan, Plan
from .._program.captured import Shapes, rescale
from .._program.compiled import Program
from .._program.static_parts import StaticModule
from .._runtime.layout import Order, by_index, memory_order, narrow, same_shape, strides_of, unbroadcast, widen
from .._runtime.memory import allocator
from .._torch.cuda import current_device
from .._torch.transforms import transforms_active
from ..errors import DeviceMismatchError

Rows = Sequence[Any]  # tensors; None for a state that starts at zero


class Call:
    """Everything about calls with operands of the same kinds but the tensors themselves: made once, used by each of them.

    Attributes:
        program: what runs.
        shapes: step shapes of this call.
        T: steps.
        statics: names of the params and captured tensors, in the order in which they are passed.
        captured: of them, those of the captured tensors.
        sequences: whether the states of every step are returned too.
        differentiable: whether autograd records the call.
        kinds: shape and dtype of every operand as given, None for a default state.
        roles: of inputs and initial states, in order.
        absent: those of states that start at zero.
        checkpoints: how many rows of states the forward stores for the backward.
        saved: roles of these rows.
        whole: whether inputs and states are given at the step shape.
        results: roles of outputs, final states and, if asked for, state sequences: the order of results and cotangents.
        around: a context for what runs, if it needs one.
    """

    around: Callable[[], AbstractContextManager] | None = None

    def __init__(self, program: Program, shapes: Shapes, T: int, statics: tuple[str, ...], sequences: bool, differentiable: bool,
                 tensors: Sequence[Tensor | None]):  # fmt: skip
        self.program, self.shapes, self.T, self.statics = program, shapes, T, statics
        self.sequences, self.differentiable = sequences, differentiable
        self.kinds = [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]
        self.needs = tuple([t is not None and t.requires_grad for t in tensors])
        sig = program.sig
        self.num_inputs, self.num_operands = sig.num_inputs, sig.num_inputs + sig.num_states
        self.captured = statics[sig.num_params :]
        self.roles = (*roles(Kind.INPUT, sig.num_inputs), *roles(Kind.STATE, sig.num_states))
        self.absent = {role for role, kind in zip(self.roles, self.kinds, strict=False) if kind is None}
        self.checkpoints = program.checkpoints(T)
        none = type(self.checkpoints) is int and not self.checkpoints
        self.saved = () if none else roles(Kind.CHECKPOINT, sig.num_states)
        trail = roles(Kind.STATES, sig.num_states) if sequences else ()
        self.results = (*roles(Kind.OUTPUT, program.num_outputs), *program.states, *trail)
        states = [(s, 0) for s in shapes.states]
        self._shapes = [((T, *s), 1) for s in shapes.outputs] + states + [((T, *s), 1) for s in shapes.states if sequences]
        wholes = [(T, *shapes.step)] * sig.num_inputs + [shapes.step] * sig.num_states
        self.whole = all(kind is None or same_shape(kind[0], whole) for kind, whole in zip(self.kinds, wholes, strict=False))
        self._returned_whole = all(same_shape(shape[leading:], shapes.step) for shape, leading in self._shapes)
        self._launches: dict[Any, Any] = {}
        self._pullbacks: dict[Any, Pullback] = {}
        self._wanted: dict[Sequence[bool], tuple[tuple[Role, ...], tuple[bool, ...]]] = {}
        self.saved_dtypes: tuple[torch.dtype, ...] | None = None  # of checkpoints, from the first forward on

    def named(self, statics: Sequence[Tensor]) -> dict[str, Tensor]:
        """Static tensors by name; params (not captured tensors) are upcast, as the core was traced."""
        if not statics:
            return {}
        explicit = self.program.sig.num_params
        return {n: upcast(t.detach()) if k < explicit else t.detach() for k, (n, t) in enumerate(zip(self.statics, statics, strict=True))}

    def as_returned(self, results: list[Tensor]) -> list[Tensor]:
        """Results of the step shape at the shapes that the core returns."""
        if self._returned_whole:
            return results
        return [narrow(t, shape, leading) for t, (shape, leading) in zip(results, self._shapes, strict=True)]

    def forward_launch(self, inputs: Sequence[Tensor], save: bool, order: Order | None = None) -> Any:
        """`order`: in which the step's dims lie in memory, if not in their own."""
        launch = self._launches.get((save, order))
        if launch is None:
            flags = tuple([x.dtype for x in inputs]), save, self.sequences
            launch = self._launches[save, order] = self._launch("forward", flags, self.roles, order)
            if save and self.program.backend.lazy and inputs[0].device.type in self.program.backend.devices:
                self._expect_backward(inputs)
        return launch

    def _launch(self, direction: str, flags: tuple, roles: tuple[Role, ...], order: Order | None) -> Any:
        there = tuple([None if role in self.absent else role for role in roles])
        program, step = self.program, self.shapes.step
        return Launch(program.kernel(self.T, direction, *flags), program.device, self.T, step, self.checkpoints, there, order)

    @functools.cached_property
    def constant(self) -> tuple[bool, ...]:
        """Of `results`, which do not require grad; empty if all do."""
        everything = transforms_active()  # a level of a transform does not show what another one differentiates
        names = (*range(self.num_operands), *self.statics)
        needed = [name for name, need in zip(names, self.needs, strict=True) if need or everything]
        found = self.program.vjp.requiring_grad(needed, self.T if type(self.T) is int else None)[: len(self.results)]
        return () if all(found) else tuple([not flag for flag in found])

    def usual_backward(self, inputs: Sequence[Tensor]) -> Any:
        """The backward for cotangents of every output and of nothing else."""
        every = enumerate(roles(Kind.OUTPUT_GRAD, self.program.num_outputs))
        given = tuple([r for k, r in every if not (self.constant and self.constant[k])])
        return self.backward_launch(inputs, *self.wanted(self.needs), given)[0]

    def _expect_backward(self, inputs: Sequence[Tensor]) -> None:
        """Start to build the backward."""
        launch = self.usual_backward(inputs)
        if launch.writes and launch.numel:
            launch.kernel.expect(launch.numel, inputs[0].device.index)

    def wanted(self, needs: Sequence[bool]) -> tuple[tuple[Role, ...], tuple[bool, ...]]:
        """Roles of the gradients that operands need, and which statics need one, in the order of the VJP."""
        found = self._wanted.get(needs)
        if found is None:
            vjp = self.program.vjp
            grads = tuple([r.grad for r, need in zip(self.roles, needs, strict=False) if need and r.grad in vjp.graph.outputs])
            by_name = dict(zip(self.statics, needs[self.num_operands :], strict=True))
            found = self._wanted[needs] = grads, tuple([by_name[name] for name in (*self.program.sig.param_names, *vjp.captured)])
        return found

    def backward_launch(
        self, inputs: Sequence[Tensor], wanted: tuple[Role, ...], statics: tuple[bool, ...], given: tuple[Role, ...],
        order: Order | None = None,
    ) -> tuple[Any, dict[Role, tuple[int, ...]]]:  # fmt: skip
        """For the gradients of inputs and states `wanted`, of `statics`, from the cotangents `given`; and the step shapes
        of the sums over time (`gp*`) that the epilogue takes."""
        key = (wanted, statics, given, order)
        if key not in self._launches:
            vjp = self.program.vjp
            _, sums = vjp.epilogue(statics, given)
            present = tuple(sorted([r for r in given if r.kind is not Kind.STATE_GRAD]))
            flags = tuple([x.dtype for x in inputs]), (*wanted, *sums), present
            launch = self._launch("backward", flags, (*self.roles, *self.saved, *given), order)
            steps = {r: rescale(vjp.sum_shape(r), self.program.step, self.shapes.step) for r in sums}
            self._launches[key] = launch, steps
        return self._launches[key]

    def pullback(self, inputs: Sequence[Tensor], needs: Sequence[bool], present: tuple[bool, ...], order: Order | None) -> Pullback:
        """The way back for `needs`, one flag per operand and static, from the cotangents that are `present`, of `results`."""
        key = (needs, present, order)
        found = self._pullbacks.get(key)
        if found is None:
            wanted, statics = self.wanted(needs)
            results = [r for r, there in zip(self.results, present, strict=True) if there]
            given = tuple([r.grad for r in results])
            launch, sums = self.backward_launch(inputs, wanted, statics, given, order)
            places = tuple([launch.places.get(r.grad) if need else None for r, need in zip(self.roles, needs, strict=False)])
            runs = bool(given and launch.writes)  # else no operand that needs a gradient has one
            leading = tuple([0 if r.kind is Kind.STATE else 1 for r in results])
            prologue = self.program.vjp.prologue_of(launch.params) if runs else None
            after = self._epilogue(launch, statics, given, sums) if runs and any(statics) else None
            found = self._pullbacks[key] = Pullback(launch if runs else None, prologue, given, leading, places, after)
        return found

    def _epilogue(self, launch: Any, wanted: tuple[bool, ...], given: tuple[Role, ...], sums: dict[Role, tuple[int, ...]]) -> Epilogue:
        vjp = self.program.vjp
        names = (*self.program.sig.param_names, *vjp.captured)
        results = {name: str(k) for k, (name, asked) in enumerate(zip(names, wanted, strict=True)) if asked}
        dtypes = [kind[1] for kind in self.kinds[self.num_operands :] if kind is not None]  # none is absent
        return Epilogue(
            vjp.epilogue(wanted, given)[0], [(launch.places[role], shape) for role, shape in sums.items()],
            [(results.get(name), dtype) for name, dtype in zip(self.statics, dtypes, strict=True)],
        )  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """From what the launch of a way back has written, the gradients of params and captured tensors.

    Attributes:
        module: computes them.
        sums: where the sums over time lie that it takes, and at which shapes.
        results: of each static, which of the module's results is its gradient, if any, and its dtype.
    """

    module: StaticModule
    sums: list[tuple[int, tuple[int, ...]]]
    results: list[tuple[str | None, torch.dtype]]

    def __call__(self, statics: dict[str, Tensor], written: Sequence[Tensor]) -> list[Tensor | None]:
        found = self.module(statics, [unbroadcast(written[place], shape, 0) for place, shape in self.sums])
        return [None if key is None or (grad := found.get(key)) is None else grad.to(dtype) for key, dtype in self.results]


@dataclass(frozen=True)
class Pullback:
    """A way back over all steps.

    Attributes:
        launch: what runs; None if nothing has a gradient.
        prologue: computes the params that it takes.
        given: roles of the cotangents that are there.
        leading: of each, dims in front of the step.
        places: of the gradient of every input and state in what the launch writes; None where there is none.
        epilogue: gives the gradients of params and captured tensors; None if none is needed.
    """

    launch: Any
    prologue: Any
    given: tuple[Role, ...]
    leading: tuple[int, ...]
    places: tuple[int | None, ...]
    epilogue: Epilogue | None


class Launch:
    """A kernel at given sizes on a device: which arrays it takes, and which are allocated for it.

    Attributes:
        order: in which the step's dims lie in memory, in every array, if not in their own.
        params: roles of the arrays that the prologue computes.
        writes: role, shape and dtype of every array to allocate.
        places: of `writes` by role, in order.
    """

    def __init__(
        self, kernel: Any, device: torch.device, T: int, step: tuple[int, ...], checkpoints: int, roles: Sequence[Role | None],
        order: Order | None = None,
    ):  # fmt: skip
        """`checkpoints`: how many rows; `roles` of the operands, in the order in which calls pass them, None where nothing is passed."""
        self.kernel, self.T, self.step, self.numel, self.order = kernel, T, step, math.prod(step), order
        self.params = tuple([a.role for a in kernel.plan.reads if a.kind == "param"])
        self.checkpoints = checkpoints
        self.writes = arrays_of(allocated(kernel.plan, checkpoints), T, step, checkpoints)
        self._results = [(shape, strides_of(shape, len(shape) - len(step), order), dtype) for _, shape, dtype in self.writes]
        self.places = {role: place for place, (role, _, _) in enumerate(self.writes)}
        self._given, self._device, self._gpu = roles, device, device.index if device.type == "cuda" else None
        given = {role: place for place, role in enumerate((*roles, *self.params))}
        self._reads = [given[a.role] for a in kernel.plan.reads if a.role in given]
        present = [a.role in given for a in kernel.plan.reads] + [a.role in self.places for a in kernel.plan.writes]
        self._make, self._run = allocator(device), kernel.bind(present, T, self.numel)

    def __call__(self, operands: Sequence[Tensor | None], params: Mapping[Role, Tensor]) -> list[Tensor]:
        """Run; returns what was written, in the order of `writes`."""
        return self.run([*operands, *[params[role] for role in self.params]] if self.params else operands)

    def run(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """The same; `given`: the operands, then the params as the prologue left them, in the order of `params`."""
        if self._gpu is not None and self._gpu != current_device():
            with torch.cuda.device(self._gpu):
                return self._run_here(given)
        return self._run_here(given)

    def _run_here(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        operands, dims = self._with_indexed(given) if self.params else (given, ())
        make = self._make
        written = [make(shape, strides, dtype) for shape, strides, dtype in self._results]
        if self.T == 0:
            _copy_over_no_time(dict(zip(self.places, written, strict=True)), dict(zip(self._given, operands, strict=False)))
        reads = [operands[place] for place in self._reads]
        for t in reads:  # kernels take pointers
            if t is not None and t.device != self._device:
                raise self._is_elsewhere(t)
        self._run(reads + written, dims)
        return written

    def fixed(self, given: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor | None]], list[Tensor]] | None:
        """Return what `run` does for operands that lie in every call as these do, decided once, on the current device; None where a
        param must be laid out anew in each."""
        operands, dims = self._with_indexed(given) if self.params else (given, ())
        pairs = [(a, b) for a, b in zip(given, operands, strict=True) if a is not None and b is not None]
        if self.T == 0 or any(a.device != b.device or a.data_ptr() != b.data_ptr() for a, b in pairs):
            return None
        make, results, reads, device, launch = self._make, self._results, self._reads, self._device, self._run

        def run(given: Sequence[Tensor | None]) -> list[Tensor]:
            arrays: list[Any] = [given[place] for place in reads]
            for t in arrays:
                if t is not None and t.device != device:
                    raise self._is_elsewhere(t)
            written = [make(shape, strides, dtype) for shape, strides, dtype in results]
            launch(arrays + written, dims)
            return written

        return run

    def _is_elsewhere(self, tensor: Tensor) -> DeviceMismatchError:
        return DeviceMismatchError(
            f"runs its {self.kernel.plan.direction} on {self._device}, and a tensor that it reads is on {tensor.device}",
            core=self.kernel.plan.core, hint="Hooks of saved tensors must unpack where they packed, as those of `save_on_cpu` do.",
        )  # fmt: skip

    def _with_indexed(self, given: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """The operands, then the params as the kernel takes them; two sizes per param."""
        found, dims = [*given], list[int]()
        for place in range(len(given) - len(self.params), len(given)):
            param = given[place]
            assert param is not None
            found[place], inner, count = by_index(param.to(self._device), self.step, self.order)  # a number may be a tensor on the CPU
            dims += (inner, count)
        return found, dims


def _copy_over_no_time(written: dict[Role, Tensor], given: dict[Role | None, Tensor | None]) -> None:
    """Without steps nothing runs: what is left at one end of time is what came in at the other."""
    for role, end in written.items():
        if role.kind in (Kind.STATE, Kind.STATE_GRAD):
            start = given.get(role)
            end.zero_() if start is None else end.copy_(start)
        elif role.kind.is_grad:
            end.zero_()


def allocated(plan: KernelPlan | Plan, checkpoints: Any) -> list[Array]:
    """What a call returns of what its kernel writes: no array of checkpoints where there are none. (Where their number depends on a
    symbolic T, it is a bound of at least one.)"""
    none = type(checkpoints) is int and not checkpoints
    return [a for a in plan.writes if not (none and a.kind == "checkpoint")]


def arrays_of(arrays: Sequence[Array], T: int, step: tuple[int, ...], checkpoints: int) -> list[tuple[Role, tuple[int, ...], torch.dtype]]:
    """Role, shape and dtype of arrays that a kernel takes, params at full size."""
    rows = {"sequence": (T,), "checkpoint": (checkpoints,), "row": (), "param": ()}
    return [(a.role, (*rows[a.kind], *step), a.storage) for a in arrays]


def forward(call: Call, operands: Rows, statics: dict[str, Tensor], save: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Run all T steps.

    Args:
        operands: inputs and initial states as `rows()` gives them; a state may be None for zeros.
        save: also write checkpoints for a backward.

    Returns:
        Outputs, final states and state sequences (`call.results`); checkpoints (`call.saved`).
    """
    launch = call.forward_launch(operands[: call.num_inputs], save, memory_order(operands[0]))
    written, places = launch(operands, call.program.prologue(statics) if launch.params else {}), launch.places
    results = call.as_returned([written[places[r]] for r in call.results])
    if not save:
        return results, []
    checkpoints = [written[places[r]] for r in call.saved]
    if call.saved_dtypes is None:
        call.saved_dtypes = tuple([t.dtype for t in checkpoints])
    return results, checkpoints


def backward(
    call: Call, operands: Rows, statics: dict[str, Tensor], checkpoints: Sequence[Tensor],
    cotangents: Sequence[Tensor | None], needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Walk back over all T steps.

    Args:
        operands: as in `forward`.
        checkpoints: those of the forward.
        cotangents: of its results, None where absent.
        needs: which operands and statics need a gradient.

    Returns:
        Gradients of inputs and initial states, at the step shape, then of the statics.
    """
    step, order = call.shapes.step, memory_order(operands[0])
    back = call.pullback(operands[: call.num_inputs], needs, tuple([g is not None for g in cotangents]), order)
    launch = back.launch
    if launch is None:
        return [None] * len(call.kinds)
    grads = [widen(g, step, leading, order) for g, leading in zip([g for g in cotangents if g is not None], back.leading, strict=True)]
    written = launch((*operands, *checkpoints, *grads), back.prologue(statics) if launch.params else {})
    of_statics = [None] * len(call.statics) if back.epilogue is None else back.epilogue(statics, written)
    return [*[None if place is None else written[place] for place in back.places], *of_statics]


def upcast(tensor: Tensor) -> Tensor:
    """16-bit floats are computed in float32."""
    return tensor.float() if tensor.dtype in HALF else tensor
