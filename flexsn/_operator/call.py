"""What calls with operands of the same kinds share: one record per kind, in which everything is decided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._capture.signature import broadcasts
from .._ir.graph import HALF
from .._ir.roles import Kind, Role, roles
from .._program.captured import Shapes, rescale
from .._program.compiled import Program
from .._program.static_parts import StaticModule
from .._runtime.launch import Launch
from .._runtime.layout import Order, by_index, memory_order, narrow, same_shape, unbroadcast, widen
from .._runtime.layout import rows as as_rows
from .._torch.autograd import transformed
from ..errors import ShapeMismatchError

Tensors = Sequence[Tensor | None]  # None for a state that starts at zero


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
        needs: of every operand, whether it requires grad.
        roles: of inputs and initial states, in order.
        absent: those of states that start at zero.
        checkpoints: how many rows of states the forward stores for the backward.
        saved: roles of these rows.
        results: roles of outputs, final states and, if asked for, state sequences: the order of results and cotangents.
        result_shapes: their shapes, and how many dims stand before those of the step.
        returned_whole: whether all results have the step shape.
        bounds: where in `results` the final states begin, and end.
        around: a context for what runs, if it needs one.
        source: gives the core that its gradient is differentiated with; None of a program that was read from a text.
        keep: gives what graphs of autograd keep alive for that, if anything.
        expects: of `results`, which have cotangents in the backward that is built beside the forward; None: the outputs. Empty: none is.

    Attributes that `compile` sets:
        order: the order in which the step's dims lie in memory, in every array; None if it is their own.
        in_place: whether the kernel reads all inputs and states where they lie.
        clones: whether some are of inference mode, which autograd does not save.
        launch: runs the forward.
        places: of `results`, and of what is saved, in what `launch` writes.
        prologue: computes the params of `launch`; None if there are none, or they are operands as they are.
        runs_ops: whether ops of PyTorch, which autocast and gradient modes change, run beside the kernel of the forward.
        backwards: how backwards run, by the needed gradients and the types of the cotangents.
    """

    around: Callable[[], AbstractContextManager] | None = None
    source: Any = None
    keep: Callable[[], Any] | None = None
    expects: Sequence[bool] | None = None

    def __init__(self, program: Program, shapes: Shapes, T: int, statics: tuple[str, ...], sequences: bool, differentiable: bool,
                 tensors: Tensors):  # fmt: skip
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
        self.saved = () if type(self.checkpoints) is int and not self.checkpoints else roles(Kind.CHECKPOINT, sig.num_states)
        self.results = (*roles(Kind.OUTPUT, program.num_outputs), *program.states, *roles(Kind.STATES, sig.num_states if sequences else 0))
        self.bounds = program.num_outputs, program.num_outputs + sig.num_states
        states = [(s, 0) for s in shapes.states]
        self.result_shapes = [((T, *s), 1) for s in shapes.outputs] + states + [((T, *s), 1) for s in shapes.states if sequences]
        self.returned_whole = all(same_shape(shape[leading:], shapes.step) for shape, leading in self.result_shapes)
        self.order: Order | None = None
        self.in_place = self.clones = self.runs_ops = False
        self.backwards: dict[tuple, Backward] = {}
        self._saved_kinds: list[tuple | None] = []  # shape, dtype and layout, None where that is of no matter

    # --- compile ------------------------------------------------------------------------------------------------------------
    def compile(self, tensors: Tensors) -> None:
        """Decide all about calls with operands like `tensors`, and load the kernel of their forward."""
        n = self.num_operands
        self.order = self.order_of(tensors)
        laid_out = self.laid_out(tensors)
        self.in_place = all([a is b for a, b in zip(laid_out, tensors, strict=True)])
        self.clones = self.differentiable and any([t is not None and t.is_inference() for t in laid_out])
        self._indices = [self._index(t, explicit=k < self.program.sig.num_params) for k, t in enumerate(tensors[n:])]
        self._prepare_forward()
        read = [True] * n + [index is not None for index in self._indices]  # where it lies
        self._saved_kinds = [
            None if t is None else (tuple(t.shape), t.dtype, _layout(t) if where else None) for t, where in zip(laid_out, read, strict=True)
        ]
        if self.differentiable:
            places = [self.launch.places[role] for role in self.saved]
            self._saved_kinds += [(*self.launch.writes[place][1:], self.launch.strides[place]) for place in places]

    def _prepare_forward(self) -> None:
        """Set what a forward looks up."""
        self.constant = self._constant() if self.differentiable else ()
        self.launch = self.forward_launch(self.differentiable)
        self.prologue = self.program.prologue if self.launch.params else None
        self.runs_ops = self.prologue is not None or (any(self.needs) and not self.differentiable)
        kept = (*self.results, *self.saved) if self.differentiable else self.results
        self.places = [self.launch.places[role] for role in kept]

    def order_of(self, tensors: Tensors) -> Order | None:
        """The order of the step's dims in memory: that of the first input."""
        first = tensors[0]
        assert first is not None, "inputs are there"
        return memory_order(first) if same_shape(first.shape[1:], self.shapes.step) else None

    def _index(self, param: Tensor | None, *, explicit: bool) -> tuple[int, int] | None:
        """How a kernel reads a param or captured tensor where it lies: two sizes (`by_index`); None if it cannot."""
        assert param is not None
        if param.device != self.program.device or param.is_neg() or param._is_zerotensor() or (explicit and param.dtype in HALF):
            return None
        if not broadcasts(param.shape, self.shapes.step):  # the prologue computes with it
            return None
        found, inner, count = by_index(param.detach(), self.shapes.step, self.order)
        return (inner, count) if found.data_ptr() == param.data_ptr() else None

    def _passed(self, prologue: StaticModule, params: Sequence[Role]) -> tuple[list[Role | None], list[int]] | None:
        """Of every static, as which param a kernel reads it, and two sizes for each of `params`; None if some must be computed."""
        names = prologue.passed(params)
        if names is None or len(set(names)) < len(names):
            return None
        indices = [self._indices[self.statics.index(name)] for name in names]
        if None in indices:
            return None
        by_name = dict(zip(names, params, strict=True))
        return [by_name.get(name) for name in self.statics], [size for index in indices for size in index or ()]

    def forward_launch(self, save: bool) -> Any:
        """The kernel of the forward at these sizes; `save`: one that also writes checkpoints for a backward."""
        trains = save and self.expects != () and self.program.device.type in self.program.backend.devices
        if trains and not self.program.backend.lazy:
            self._expect_backward()  # its compiler runs beside that of the forward
        launch = self._launch("forward", (self._input_dtypes(), save, self.sequences), (), self.program.prologue)
        if trains and self.program.backend.lazy:
            self._expect_backward()
        return launch

    def _input_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple([kind[1] for kind in self.kinds[: self.num_inputs] if kind is not None])

    def _launch(self, direction: str, flags: tuple, others: tuple[Role, ...], prologue: StaticModule) -> Any:
        """`others`: roles of what is passed after operands and statics."""
        kernel = self.program.kernel(self.T, direction, *flags)
        params = [a.role for a in kernel.plan.reads if a.kind == "param"]
        statics, dims = self._passed(prologue, params) or ([None] * len(self.statics), [])
        there = (*[None if role in self.absent else role for role in self.roles], *statics, *others)
        return Launch(kernel, self.program.device, self.T, self.shapes.step, self.checkpoints, there, self.order, dims)

    def _constant(self) -> tuple[bool, ...]:
        """Of `results`, which do not require grad; empty if all do."""
        everything = transformed()  # a level of a transform does not show what another one differentiates
        names = (*range(self.num_operands), *self.statics)
        needed = [name for name, need in zip(names, self.needs, strict=True) if need or everything]
        found = self.program.vjp.requiring_grad(needed, self.T if type(self.T) is int else None)[: len(self.results)]
        return () if all(found) else tuple([not flag for flag in found])

    # --- forward --------------------------------------------------------------------------------------------------------------
    def laid_out(self, tensors: Tensors) -> list[Tensor | None]:
        """Inputs and states as kernels take them, rows of neurons in one order of memory; the rest as it is."""
        order, step = self.order_of(tensors), self.shapes.step
        n, i = self.num_operands, self.num_inputs
        found = [None if t is None else as_rows(t, step, int(k < i), order) for k, t in enumerate(tensors[:n])]
        return [*found, *tensors[n:]]

    def dense(self, tensors: Tensors) -> Tensors:
        """Return operands with those of the step shape in dense memory, by ops that autograd records: what is saved leads to them."""
        if self.in_place:
            return tensors
        order, step, found = self.order_of(tensors), self.shapes.step, list(tensors)
        for k, t in enumerate(tensors[: self.num_operands]):
            leading = int(k < self.num_inputs)
            if t is not None and same_shape(t.shape[leading:], step):
                found[k] = as_rows(t, step, leading, order)
        return found

    def forward(self, laid_out: Tensors) -> list[Tensor]:
        """Run all T steps; returns `results`, then what was `saved`, if the call is differentiable. Without recording gradients."""
        if self.prologue is not None:
            params = self.prologue(self.named(laid_out))
            laid_out = [*laid_out, *map(params.__getitem__, self.launch.params)]
        written = self.launch.run(laid_out)
        found = list(map(written.__getitem__, self.places))
        if not self.returned_whole:
            found[: len(self.result_shapes)] = [
                narrow(t, shape, leading) for t, (shape, leading) in zip(found, self.result_shapes, strict=False)
            ]
        return found

    def named(self, tensors: Tensors) -> dict[str, Tensor]:
        """Static tensors by name; params (not captured tensors) are upcast, as the core was traced."""
        explicit, statics = self.program.sig.num_params, tensors[self.num_operands : len(self.kinds)]
        values = [t.detach() for t in statics if t is not None]  # none is absent
        return {n: upcast(t) if k < explicit else t for k, (n, t) in enumerate(zip(self.statics, values, strict=True))}

    # --- backward -------------------------------------------------------------------------------------------------------------
    def _as_it_was(self, tensor: Tensor | None, kind: tuple | None) -> Tensor | None:
        """Return a tensor that was saved as it was: laid out again, and cast back.

        Raises:
            ShapeMismatchError: another shape came back.
        """
        if tensor is None or kind is None:
            return None
        shape, dtype, layout = kind
        if tensor.shape != shape:
            raise ShapeMismatchError(
                f"had saved a tensor of shape {list(shape)} for its backward, which now has the shape {list(tensor.shape)}",
                core=self.program.sig.core,
                hint="What hooks of saved tensors unpack must equal what they packed, and `.data` of an operand keep its shape.",
            )
        if layout is None or layout is True:
            return tensor.to(dtype).resolve_neg().contiguous()
        return torch.empty_strided(shape, layout, dtype=dtype, device=tensor.device).copy_(tensor)

    def _usual_cotangents(self) -> list[bool]:
        """Of every output, and of nothing else; or those that are expected."""
        expects = self.expects or [k < self.program.num_outputs for k in range(len(self.results))]
        return [there and not (self.constant and self.constant[k]) for k, there in enumerate(expects)]

    def usual_backward(self) -> Backward:
        """The backward for the usual cotangents."""
        return self.backward_for((False, *self.needs), [Tensor if flag else type(None) for flag in self._usual_cotangents()])

    def _expect_backward(self) -> None:
        """Start to build the backward."""
        if not self.program.backend.lazy:
            *_, flags = self._gradients(self.needs, self._usual_cotangents())
            if flags is not None:
                self.program.expect(self.T, "backward", *flags)
            return
        launch = self.usual_backward().launch
        if launch is not None and launch.numel:
            launch.expect()

    def backward_for(self, needs: tuple[bool, ...], cotangents: Sequence[type]) -> Backward:
        """How the backward runs, its kernel built.

        Args:
            needs: whether a gradient is needed: of the call, which has none, then of every operand and static.
            cotangents: types of the cotangents of `results`, that of None where there is none.
        """
        key = (needs, *cotangents)
        if key not in self.backwards:
            self.backwards[key] = self._backward(needs[1:], [kind is not type(None) for kind in cotangents])
        return self.backwards[key]

    def needed_statics(self, needs: Sequence[bool]) -> tuple[bool, ...]:
        """Which params and captured tensors need a gradient, in the order of the VJP; `needs`: of every operand and static."""
        by_name = dict(zip(self.statics, needs[self.num_operands :], strict=True))
        return tuple([by_name[name] for name in (*self.program.sig.param_names, *self.program.vjp.captured)])

    def _gradients(self, needs: Sequence[bool], present: Sequence[bool]) -> tuple[list, tuple, tuple, tuple, tuple | None]:
        """Which gradients a backward gives: roles of inputs and states, None for those that it does not; which statics have one; which
        cotangents there are; sums over time; flags of its kernel, None if there is none."""
        vjp = self.program.vjp
        wanted = [r.grad if need and r.grad in vjp.graph.outputs else None for r, need in zip(self.roles, needs, strict=False)]
        statics = self.needed_statics(needs)
        given = tuple([r.grad for r, there in zip(self.results, present, strict=True) if there])
        _, sums = vjp.epilogue(statics, given)
        written = (*[role for role in wanted if role is not None], *sums)
        cotangents = tuple(sorted([r for r in given if r.kind is not Kind.STATE_GRAD]))
        return wanted, statics, given, sums, (self._input_dtypes(), written, cotangents) if given and written else None

    def _backward(self, needs: Sequence[bool], present: Sequence[bool]) -> Backward:
        vjp = self.program.vjp
        wanted, statics, given, sums, flags = self._gradients(needs, present)
        if flags is None:  # no operand that needs a gradient has one
            return Backward(None, None, (), None, ())
        launch = self._launch("backward", flags, (*self.saved, *given), vjp.prologue)
        if not launch.writes:
            return Backward(None, None, (), None, ())
        broadcast = []
        for k, (role, kind) in enumerate(zip(wanted, self.kinds, strict=False)):
            whole = (self.T, *self.shapes.step) if k < self.num_inputs else self.shapes.step
            if role is not None and kind is not None and not same_shape(kind[0], whole):
                broadcast.append((k, kind[0], int(k < self.num_inputs)))
        prologue = vjp.prologue_of(launch.params) if launch.params else None
        places = [-1 if role is None else launch.places[role] for role in wanted]  # -1: a None that stands behind what is written
        after = self._epilogue(launch, statics, given, sums) if any(statics) else None
        return Backward(launch, prologue, places, after, broadcast)

    def _epilogue(self, launch: Any, wanted: tuple[bool, ...], given: tuple[Role, ...], sums: tuple[Role, ...]) -> Epilogue:
        vjp = self.program.vjp
        names = (*self.program.sig.param_names, *vjp.captured)
        results = {name: str(k) for k, (name, asked) in enumerate(zip(names, wanted, strict=True)) if asked}
        dtypes = [kind[1] for kind in self.kinds[self.num_operands :] if kind is not None]  # none is absent
        steps = [rescale(vjp.sum_shape(role), self.program.step, self.shapes.step) for role in sums]
        return Epilogue(
            vjp.epilogue(wanted, given)[0], [(launch.places[role], shape) for role, shape in zip(sums, steps, strict=True)],
            [(results.get(name), dtype) for name, dtype in zip(self.statics, dtypes, strict=True)],
        )  # fmt: skip

    def backward(self, back: Backward, saved: Tensors, cotangents: Tensors, order: Order | None) -> list[Tensor | None]:
        """Walk back over all T steps.

        Args:
            back: of `backward_for`.
            saved: inputs, states and statics as in `forward`, then its checkpoints.
            cotangents: of `results`, None where absent.

        Returns:
            Gradients of inputs, initial states and statics.

        Raises:
            ShapeMismatchError: something saved came back in another shape.
        """
        if back.launch is None:
            return [None] * len(self.kinds)
        for tensor, kind in zip(saved, self._saved_kinds, strict=False):
            if tensor is None or kind is None:
                continue
            shape, dtype, layout = kind  # hooks of saved tensors, `.data` or a cast may have made something else of it
            lies = layout is None or (tensor.is_contiguous() if layout is True else tensor.stride() == layout)
            if not lies or tensor.shape != shape or tensor.dtype is not dtype:
                saved = [self._as_it_was(t, k) for t, k in zip(saved, self._saved_kinds, strict=True)]
                break
        given, step = [*saved], self.shapes.step
        as_they_lie = order is None and self.returned_whole
        for k, grad in enumerate(cotangents):
            if grad is None:
                continue
            if not as_they_lie or not grad.is_contiguous() or grad.is_neg() or grad._is_zerotensor():
                grad = widen(grad, step, self.result_shapes[k][1], order)
            given.append(grad)
        if back.prologue is not None:
            given += map(back.prologue(self.named(saved)).__getitem__, back.launch.params)
        written = [*back.launch.run(given), None]
        found = list(map(written.__getitem__, back.places))
        for k, shape, leading in back.broadcast:
            found[k] = unbroadcast(found[k], shape, leading)
        if back.epilogue is None:
            return found + [None] * len(self.statics)
        return found + back.epilogue(self.named(saved), written)


def _layout(tensor: Tensor) -> bool | tuple[int, ...]:
    """True if contiguous, else the strides: two tensors of a shape with equal ones lie alike."""
    return True if tensor.is_contiguous() else tensor.stride()


@dataclass(frozen=True, slots=True)
class Epilogue:
    """From what the launch of a backward has written, the gradients of params and captured tensors.

    Attributes:
        module: computes them.
        sums: where the sums over time lie that it takes, and at which shapes.
        results: of each static, which of the module's results is its gradient, if any, and its dtype.
    """

    module: StaticModule
    sums: list[tuple[int, tuple[int, ...]]]
    results: list[tuple[str | None, torch.dtype]]

    def __call__(self, statics: dict[str, Tensor], written: Sequence[Any]) -> list[Tensor | None]:
        found = self.module(statics, [unbroadcast(written[place], shape, 0) for place, shape in self.sums])
        return [None if key is None or (grad := found.get(key)) is None else grad.to(dtype) for key, dtype in self.results]


@dataclass(frozen=True, slots=True)
class Backward:
    """How the backward of a kind of call runs, for needed gradients and given cotangents.

    Attributes:
        launch: what runs; None if nothing has a gradient.
        prologue: computes the params of `launch`; None if there are none, or they are operands as they are.
        places: of the gradient of every input and state in what the launch writes; -1 where there is none.
        epilogue: gives the gradients of params and captured tensors; None if none is needed.
        broadcast: place, shape and leading dims of the inputs and states that were broadcast.
    """

    launch: Any
    prologue: StaticModule | None
    places: Sequence[int]
    epilogue: Epilogue | None
    broadcast: Sequence[tuple[int, tuple[int, ...], int]]


def upcast(tensor: Tensor) -> Tensor:
    """16-bit floats are computed in float32."""
    return tensor.float() if tensor.dtype in HALF else tensor
