"""`FlexSN`: a core as a stateful `nn.Module`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._capture.arguments import (
    InitialStates,
    Start,
    Stateful,
    as_tuple,
    check_count,
    check_output_examples,
    check_start,
    check_step_mode,
    checked_start,
    gradient_flags,
    operand_counts,
    output_examples,
    param_names,
    without_outputs,
    without_steps,
    wrong_call,
)
from ._capture.signature import check_core, core_name, not_a_tensor, positional_names
from ._captured.core_owner import CoreOwner, Tensors, free_names
from ._captured.uneven import Ends, over_packed, takes_one_step
from ._operator.checkpointed import Within, enter, starts_anew
from ._operator.dispatch import run_core
from ._operator.library import carry
from ._over_time.walks import walking
from ._runtime.backends import NAMES as BACKEND_NAMES
from ._runtime.backends import check_backend
from ._torch.autograd import current_backward
from ._torch.tensors import broadcast_shapes
from ._torch.transforms import is_wrapped, transforms_active
from ._torch_compile.core_scan import compile_core, run_uneven
from ._torch_compile.dynamo import exporting, refuse_carried
from .errors import ArgumentError, OperandCountError, SequenceLengthError, ShapeMismatchError, StaleStateError


class FlexSN(CoreOwner):
    """A spiking neuron from its one-step function, run over whole sequences by one fused kernel.

    Call it with one sequence `[T, *shape]` per input; it returns one sequence per output, a tensor if there is one
    output and a tuple otherwise. States are carried from call to call in `states` until `reset()`, unless `stateful=False`.

    Args:
        core: `core(*inputs_t, *states, *params) -> (*outputs_t, *new_states)`: any callable or `nn.Module`.
        num_inputs: number of input sequences; by default what the core's signature leaves after states and params.
        num_states: number of states; needed unless `num_inputs` settles it.
        num_outputs: number of outputs, at least 1; by default what the core returns before its states.
        params: tensors passed to every step after the states, registered by the name that the core gives them: a
            `Parameter` `w` as parameter `params.w`, any other tensor as buffer `params.w`.
        example_inputs: one-step examples `[*inputs, *states]`; they are only counted.
        example_outputs: one-step examples `[*shape]` of the outputs, one each: at `T == 0` outputs have their shapes, and the core
            is not looked at. Device and, of floating ones, dtype are those of the call's inputs.
        requires_grad: one flag per input and state, or one for all: False cuts the graph at that operand. By default
            gradients go to whatever requires them.
        step_mode: `"m"`: calls take `[T, *shape]`; `"s"`: calls take one step `[*shape]`.
        backend: `"auto"`, `"cpp"`, `"triton"` (also named `"inductor"`), `"torch"` (the eager loop) or `"hop"`; see `scan`.
        store_state_seqs: keep the states of every step of the last call in `state_seqs`.
        strict: make `"auto"` raise where it would fall back to the eager loop.
        exact: with False, few neurons over many steps may run parts of time side by side; see `scan`.
        stateful: carry states from call to call. `"detached"`: their values only, so that a backward ends where its call
            began (truncated BPTT), and no graph outlives its backward. With False every call starts anew, and there is nothing to
            reset. Under `torch.compile` both train faster than True: a graph that returns states with gradients is given zeros for
            those that nobody uses.
        initial_states: where the states start after `reset()`, one entry per state: a number, or None for zeros of the
            shape and dtype that the core returns; or a function of the inputs of the call that returns such a list, in
            which a tensor, broadcastable to one step, may stand too. By default zeros.

    Attributes:
        states: list of carried states `[*shape]`, or None after `reset()`.
        state_seqs: list of `[T, *shape]`, if `store_state_seqs`.
        supported_backends: what `backend` may be set to; not all run everywhere.
        core: what was given; an `nn.Module` is a submodule. Tensors in the cells, defaults and partial arguments of a function
            are this module's own, under their names (`neuron.tau`): `parameters()`, `state_dict()`, `.to()`, copies and files
            take them. What a bound method or a module holds stays with it; globals are neither registered, copied nor moved.
    """

    runs_sequences = True  # no core of another
    supported_backends = BACKEND_NAMES

    def __init__(
        self,
        core: Callable[..., Any],
        num_inputs: int | None = None,
        num_states: int | None = None,
        num_outputs: int | None = None,
        example_inputs: Sequence[Any] | None = None,
        example_outputs: Sequence[Tensor] | Tensor | None = None,
        requires_grad: Sequence[bool] | bool | None = None,
        step_mode: str = "m",
        backend: str = "auto",
        store_state_seqs: bool = False,
        *,
        params: Sequence[Tensor] | Tensor = (),
        strict: bool = False,
        exact: bool = True,
        stateful: Stateful = True,
        initial_states: InitialStates | None = None,
    ):
        check_core(core)
        super().__init__(core)
        name = core_name(core)
        check_step_mode(step_mode, stateful, name)
        check_backend(backend, name)
        check_count("num_outputs", num_outputs, name)
        params = as_tuple("params", params, name)
        examples = None if example_inputs is None else len(as_tuple("example_inputs", example_inputs, name))
        self.num_outputs = num_outputs
        self.example_outputs = output_examples(example_outputs, num_outputs, name)
        self.num_inputs, self.num_states = operand_counts(core, num_inputs, num_states, len(params), examples)
        names = param_names(core, params, self.num_inputs + self.num_states)
        self.num_params, self.param_names = len(params), free_names(names)
        self.params = Tensors() if params else None
        for param_name, param in zip(self.param_names, params, strict=True):
            self.params.register(param_name, param)  # type: ignore[union-attr]  # there are params, so there is a holder
        self.requires_grad_flags = gradient_flags(requires_grad, self.num_inputs, self.num_states, name)
        self.step_mode, self.backend, self.store_state_seqs, self.strict = step_mode, backend, store_state_seqs, strict
        self.exact = exact
        self.stateful = stateful
        self.initial_states = checked_start(initial_states, self.num_states, name)
        self.states: Sequence[Tensor] | None = None  # a tuple while exporting: values of that trace, not of an earlier call
        self.state_seqs: list[Tensor] | None = None
        self._first: bool | None = None  # whether the last call started anew
        self._left: weakref.ref[Tensor] | None = None  # the first of the states that it left
        self._within: Within | None = None
        self._watchers = 0  # monitors that are on
        self._asked: tuple[int, bool] | None = None  # how many of them ask for the states of every step, and whether it kept them before
        self.recapture()

    # --- calls ------------------------------------------------------------------------------------------------------
    @staticmethod
    def init_states(num_states: int, step_mode: str, *inputs: Tensor) -> list[Tensor | None]:
        """Initial states of a call after `reset()`: None stands for zeros of the shape and dtype that the core returns.

        Override it to start elsewhere; `inputs` are those of the call.
        """
        return [None] * num_states

    def start_states(self, *inputs: Tensor) -> list[Tensor | None]:
        """States of the first call after `reset()`, as `initial_states` says; `inputs` are those of the call."""
        given = self.initial_states
        if given is None:
            return self.init_states(self.num_states, self.step_mode, *inputs)
        if callable(given):
            given = given(*inputs)
            check_start(given, "a number, None or a tensor", core_name(self.core))
        return self.filled(given, inputs)

    def start_dtype(self, *inputs: Tensor) -> torch.dtype:
        """The floating dtype that the inputs and the tensors of this module come to."""
        dtype = inputs[0].dtype
        own = (*self.parameters(), *self.buffers()) if self._parameters or self._buffers or self._modules else ()
        for tensor in (*inputs[1:], *own):
            dtype = torch.promote_types(dtype, tensor.dtype) if tensor.dim() else dtype
        return dtype if dtype.is_floating_point else torch.get_default_dtype()

    def filled(self, values: Sequence[Start], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Numbers as states of one step, of the shape of the inputs together; zeros are None. Tensors stay as they are."""
        if not any([isinstance(value, Tensor) or value for value in values]):
            return [None] * len(values)
        steps = [x.shape if self.step_mode == "s" else x.shape[1:] for x in inputs]
        try:
            shape = steps[0] if len(steps) == 1 else broadcast_shapes(*steps)
        except RuntimeError:  # which the call itself refuses, by name
            return [None] * len(values)
        dtype = self.start_dtype(*inputs)
        found: list[Tensor | None] = []
        for value in values:
            if isinstance(value, Tensor):
                if self.step_mode == "m" and value.dim() and any([value.shape == x.shape for x in inputs]):
                    raise ShapeMismatchError(
                        f"initial_states gives a tensor of shape {list(value.shape)}, that of the sequence; a step is {list(shape)}",
                        core=core_name(self.core), hint="Leave out the dim of time: `torch.full_like(x[0], 0.5)`.",
                    )  # fmt: skip
                found.append(value)
            else:
                found.append(inputs[0].new_full(shape, value, dtype=dtype) if value else None)
        return found

    def forward(
        self, *inputs: Tensor, lengths: Tensor | None = None, resets: Tensor | None = None, **named: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the sequence(s); see the class for shapes.

        `lengths`, `resets`: where sequences of a batch `[T, B, *shape]` end and start anew, as of `flexsn.scan`; or a `PackedSequence`.
        Carried states are those at the ends; a sequence starts anew where a call after `reset()` does.
        """
        if (uneven := lengths is not None or resets is not None) and self._takes_one_step():
            raise takes_one_step(core_name(self.core))
        if named or len(inputs) != self.num_inputs:
            raise wrong_call(core_name(self.core), (self.num_inputs, self.num_states, self.num_params), len(inputs), [*named])
        if not torch.compiler.is_dynamo_compiling() and walking.now is not None:
            return walking.now.neuron(self, inputs)
        exported = exporting() if torch.compiler.is_dynamo_compiling() else torch.compiler.is_exporting()
        if exported and isinstance(self.states, list):
            refuse_carried(core_name(self.core))
        for x in inputs:
            if not isinstance(x, Tensor) or not (x.dim() or self.step_mode == "s"):
                given: Any = x
                if isinstance(given, PackedSequence) and not self._takes_one_step():
                    return over_packed(self, inputs, core_name(self.core), uneven)
                self._check_inputs(inputs)
        if torch.compiler.is_dynamo_compiling() or not self.stateful or (self._within is None and current_backward() < 0):
            anew = not self.stateful or self.states is None
        else:
            anew = starts_anew(self)
        states = self.start_states(*inputs) if anew or self.states is None else self.states
        if type(states) is not list or len(states) != self.num_states:
            self._check_states(states)
        if self.step_mode == "s":
            inputs = tuple(x.unsqueeze(0) for x in inputs)
        ends = Ends(lengths, resets, states if anew or resets is None else self.start_states(*inputs)) if uneven else None
        run = self.run if self.example_outputs is None else self._run_checked
        outputs, finals, sequences = run(inputs, states, self.store_state_seqs, ends)
        if not outputs:
            raise without_outputs(self.num_states, core_name(self.core))
        if self.stateful == "detached":
            finals = [v.detach() for v in finals]
        if torch.compiler.is_dynamo_compiling():
            self._carry_compiled(finals, sequences, exported)
        else:
            self._carry((tuple(finals) if exported else finals) if self.stateful else None, sequences, anew)
        if self.step_mode == "s":
            outputs = [y.squeeze(0) for y in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _run_checked(self, inputs: tuple[Tensor, ...], states: Sequence[Tensor | None], sequences: bool, ends: Ends | None) -> Any:
        """Return what `run` does, of the shapes of `example_outputs`."""
        examples, name = self.example_outputs, core_name(self.core)
        if examples is not None and inputs[0].shape[0] == 0:
            check_step_mode(self.step_mode, self.stateful, name)
            own = without_steps(examples, inputs, states, self.start_dtype(*inputs), name)
            return own if sequences else (*own[:2], None)
        found = self.run(inputs, states, sequences, ends)
        if examples is not None:
            check_output_examples(examples, found[0], name)
        return found

    def _takes_one_step(self) -> bool:
        """Return whether inputs of a call are steps, as `step_mode="s"` says, or a network that `flexsn.over_time` runs."""
        return self.step_mode == "s" or (not torch.compiler.is_dynamo_compiling() and walking.now is not None)

    def multi_step_forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run sequences, whatever `step_mode` says."""
        return self._forward_as("m", inputs)

    def single_step_forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run one step, whatever `step_mode` says."""
        return self._forward_as("s", inputs)

    def _forward_as(self, step_mode: str, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        own, self.step_mode = self.step_mode, step_mode
        try:
            return self.forward(*inputs)
        finally:
            self.step_mode = own

    def supported_step_mode(self) -> tuple[str, str]:
        """What `step_mode` may be set to."""
        return "s", "m"

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        """What `scan` cannot check, since tensors are reshaped before."""
        for k, x in enumerate(inputs):
            if isinstance(x, Tensor) and (x.dim() or self.step_mode == "s"):
                continue
            name = (positional_names(self.core)[0][k : k + 1] or (f"arg{k}",))[0]
            if not isinstance(x, Tensor):
                raise not_a_tensor(f"input `{name}`", x, core_name(self.core))
            what = f"input `{name}` is 0-dimensional; inputs are sequences of shape [T, *shape]"
            raise SequenceLengthError(what, core=core_name(self.core))

    def _check_states(self, states: Any) -> None:
        if not isinstance(states, (list, tuple)):
            raise ArgumentError(f"`states` must be a list of tensors, not a {type(states).__name__}", core=core_name(self.core))
        if len(states) != self.num_states:
            raise OperandCountError(f"carries {len(states)} states, but was made for {self.num_states} states", core=core_name(self.core))

    def run(
        self, inputs: tuple[Tensor, ...], states: Sequence[Tensor | None], sequences: bool, ends: Ends | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
        """Outputs, final states and, if `sequences`, the states of every step, from given states (None: zeros), of sequences that end
        and start anew as `ends` says; nothing is carried."""
        mode, stateful = self.step_mode, self.stateful  # either may have been set since the module was made
        if mode not in ("m", "s") or (mode == "s" and not stateful) or stateful not in (True, False, "detached"):
            check_step_mode(mode, stateful, core_name(self.core))
        if self.requires_grad_flags is not None:
            operands = [
                t if flag or t is None else t.detach() for t, flag in zip((*inputs, *states), self.requires_grad_flags, strict=True)
            ]
            inputs, states = tuple(operands[: self.num_inputs]), operands[self.num_inputs :]  # type: ignore[arg-type]  # inputs are there
        params = tuple([getattr(self.params, name) for name in self.param_names]) if self.param_names else ()
        if ends is not None or torch.compiler.is_dynamo_compiling():
            call, own = (self.core, self, inputs, tuple(states), params), {"num_outputs": self.num_outputs, "exact": self.exact}
            options: dict[str, Any] = {"backend": self.backend, "strict": self.strict, "sequences": sequences, **own}
            finals, trail, outputs = compile_core(*call, **options) if ends is None else run_uneven(*call, ends, **options)
        else:
            seen = self.captured_values()
            finals, trail, outputs = run_core(
                self._looked_at, seen, inputs, tuple(states), params, backend=self.backend, strict=self.strict,
                sequences=sequences, num_outputs=self.num_outputs, exact=self.exact,
            )  # fmt: skip
        return outputs, finals, trail if sequences else None

    def reset(self) -> None:
        """Forget the carried states; the next call starts where `start_states` says."""
        if not torch.compiler.is_dynamo_compiling():
            backward = current_backward()
            if backward >= 0 and self.stateful:
                enter(self, backward).anew = False
            else:
                self.__dict__["_within"] = None
        self._carry(None, None)

    def _carry(self, states: Sequence[Tensor] | None, sequences: list[Tensor] | None, first: bool | None = None) -> None:
        """Past `nn.Module.__setattr__`, which looks for parameters and takes microseconds.

        Args:
            first: whether what left them started anew; None after `reset()`.
        """
        own = self.__dict__
        own["states"], own["state_seqs"] = states, sequences
        if torch.compiler.is_dynamo_compiling():
            return
        if self._within is None:
            own["_first"], own["_left"] = first, weakref.ref(states[0]) if states else None
        else:
            self._within.left = states

    def _carry_compiled(self, finals: list[Tensor], sequences: list[Tensor] | None, exported: bool) -> None:
        """As `_carry` after a call, where Dynamo traces: assignments take microseconds in compiled code."""
        if self._watchers:  # a function that was compiled without the hooks of monitors is compiled again
            pass
        if self.stateful:
            carried = tuple(finals) if exported else [carry(v) for v in finals]  # no CUDA graph owns those of an export
            object.__setattr__(self, "states", carried)  # without the guards that `nn.Module.__setattr__` takes
        elif self.states is not None:
            self.states = None
        if sequences is not None or self.state_seqs is not None:  # PyTorch 2.11 compares no lists by `is`
            self.state_seqs = sequences

    def states_are_left(self) -> bool:
        """Whether the carried states are those that the last call left: nobody set them since."""
        return bool(self.states) and self._left is not None and self.states[0] is self._left()  # type: ignore[index]  # there are some

    def _refuse_stale(self) -> None:
        """What a transform left has no values to detach, copy or cast."""
        if torch.compiler.is_dynamo_compiling() or self.states is None or transforms_active():
            return
        if any(map(is_wrapped, self.states)):
            raise StaleStateError(
                "carries states that were left by a transform that has ended, and have no values", core=core_name(self.core),
                hint="Call `reset()` on the module (`flexsn.reset_net(model)` on all of a network) after transforming it.",
            )  # fmt: skip

    def detach_states(self) -> None:
        """Cut the graph at the carried states (truncated BPTT)."""
        self._refuse_stale()
        if self.states is not None:
            left = not torch.compiler.is_dynamo_compiling() and self.states_are_left()
            self.states = type(self.states)([v.detach() for v in self.states])  # type: ignore[call-arg]  # of a list or a tuple
            if left:
                self._left = weakref.ref(self.states[0])

    detach = detach_states  # the name that SpikingJelly's `functional.detach_net` calls

    def _apply(self, fn: Callable, recurse: bool = True) -> FlexSN:
        self._refuse_stale()
        super()._apply(fn, recurse)
        if self.states is not None:
            self.states = [fn(v) for v in self.states]
        self.state_seqs = None if self.state_seqs is None else [fn(v) for v in self.state_seqs]
        return self

    def __deepcopy__(self, memo: dict) -> FlexSN:
        self._refuse_stale()
        state = self._state()
        for key in ("states", "state_seqs"):  # tensors of a graph cannot be copied; their values can
            state[key] = None if state[key] is None else [v.detach() for v in state[key]]
        return self._copy(state, memo)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_within": None, "_left": None, "_watchers": 0, "_asked": None}
        if self._asked is not None:  # a monitor has it store the states of every step
            state["store_state_seqs"], state["state_seqs"] = self._asked[1], self.state_seqs if self._asked[1] else None
        return state

    def extra_repr(self) -> str:
        numbers = f"{core_name(self.core)}, num_inputs={self.num_inputs}, num_states={self.num_states}"
        return f"{numbers}, step_mode={self.step_mode!r}, backend={self.backend!r}"
