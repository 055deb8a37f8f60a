"""What a recording refuses: values read into Python, control flow on them, random numbers; raised also if the core catches it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import (
    CapturedMutationError,
    ControlFlowError,
    CoreError,
    FlexSNError,
    InPlaceError,
    OperandMutationError,
    RandomOpError,
    ScalarReadError,
    UnsupportedOpError,
)
from .tape import Tape, run_core

_VALUE_READS = {
    "item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__format__", "__repr__",
}  # fmt: skip
# What Python may decide by, and the kernel could not at another size. (A trace at one other size would not tell `n > 4`.)
_SHAPE, _NBYTES, _NDIM = (getattr(Tensor, name).__get__ for name in ("shape", "nbytes", "ndim"))
_SIZE_READS = (_SHAPE, _NBYTES, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)
_RANK_READS = (_NDIM, Tensor.dim, Tensor.ndimension)
_SET = {getattr(Tensor, name).__set__: name for name in ("data", "grad")}  # never reach the dispatcher
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_CONTROL_FLOW = {"__bool__", "aten::is_nonzero"}
_NEW_STATE = "What changes from step to step is a state: take it as an argument and return its new value."
_NORM = "A batch norm in training updates its statistics: apply it to the whole sequence, in front of the neuron."
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")
_TO_COMPUTE = "Keep it a tensor: 0-dimensional tensors broadcast like numbers."
_TO_SHOW = "To look at a state at every step, ask for `store_state_seqs=True`; return any other value as one more output."


class Refusing(Tape):
    """A tape that refuses what a replay would get wrong.

    Attributes:
        error: to be raised after the core ran.
        refused: was raised inside the core, which may have caught it.
        user_op: the op that the user wrote, while it is being decomposed.
        calling: the name of the function of PyTorch that the user's code is calling; empty while PyTorch differentiates.
        shapes_read: shapes of tensors that depend on time, of which the core read a size.
        ranks_read: how many dims such tensors have whose number of dims it read.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.error: FlexSNError | None = None
        self.refused: FlexSNError | None = None
        self.user_op: Any = None
        self.calling = ""
        self.shapes_read: set[tuple[int, ...]] = set()
        self.ranks_read: set[int] = set()

    def raise_refusals(self) -> None:
        for error in (self.refused, self.error):
            if error is not None:
                raise error

    def refuse_read(self, how: str, tensor: Tensor) -> None:
        node = self.node_of(tensor)
        what = "a time-dependent tensor" if node.meta["kind"] == "step" else f"tensor `{node.meta.get('role', node.name)}`"
        if "uniform" in node.meta:
            return
        if how in _CONTROL_FLOW:
            raise ControlFlowError(
                f"Python control flow depends on the value of {what}", core=self.sig.core, line=self.line(),
                hint="Use `torch.where(condition, a, b)`, which decides neuron by neuron.",
            )  # fmt: skip
        call = how.removeprefix("aten::")
        raise ScalarReadError(
            f"`{call}` reads the value of {what} into Python, where it would be frozen into the kernel", core=self.sig.core,
            line=self.line(), hint=_TO_SHOW if call in ("__repr__", "__format__") else _TO_COMPUTE,
        )  # fmt: skip

    def differentiating(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`torch.autograd` called by the core: operands require no grad here, whatever they do outside."""
        try:
            return func(*args, **kwargs)
        except FlexSNError:
            raise
        except RuntimeError as error:
            raise UnsupportedOpError(
                f"differentiates by `{func.__name__}` inside the core: {error}", core=self.sig.core, line=self.line(),
                hint="Write the derivative out, or put it in the backward of a `torch.autograd.Function`.",
            ) from None  # fmt: skip

    def refuse_random(self, func: Any) -> None:
        raise RandomOpError(
            f"draws random numbers (`{op_name(func)}`)", core=self.sig.core, line=self.line(),
            hint="Draw the noise outside, for the whole sequence, and pass it as one more input [T, *shape].",
        )  # fmt: skip

    def refuse_write(self, target: Tensor, does: str, how: str = "") -> None:
        """Refuse what changes an operand or a captured tensor."""
        node = self.node_of(target)
        if node in self.operand_names:
            raise OperandMutationError(
                f"{does} operand `{self.operand_names[node]}`{how}", core=self.sig.core, line=self.line(),
                hint="Write `v = v + x`, not `v += x`.",
            )  # fmt: skip
        if id(target) in self.real or node in self.captured_nodes.values():
            role = node.meta["role"]
            raise CapturedMutationError(
                f"{does} captured tensor `{role}`", core=self.sig.core, line=self.line(),
                hint=_NORM if role.endswith(_STATISTICS) else _NEW_STATE,
            )  # fmt: skip

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the first refusal; what PyTorch itself would raise the core may catch."""
        try:
            yield
        except FlexSNError as error:
            if not isinstance(error, CoreError) and self.user_op is None:
                self.refused = self.refused or error
            raise

    def untraceable(self, func) -> FlexSNError:
        return UnsupportedOpError(
            f"`{op_name(self.user_op or func)}` cannot be traced: it has no fake kernel that takes these operands", core=self.sig.core,
            line=self.line(), hint="Do this outside the core, or register one (`torch.library.register_fake`).",
        )  # fmt: skip


def run_refusing(core: Callable, operands: list[Tensor], recorder: Refusing) -> Any:
    """`run_core`, but no refusal is lost in a `try` of the core."""
    try:
        returned = run_core(core, operands)
    except Exception as error:  # whatever the core makes of a refusal; raised again
        if recorder.refused in (None, error):
            raise
        raise recorder.refused from error
    recorder.raise_refusals()
    return returned


class ValueReads(TorchFunctionMode):
    """Catches what never reaches the dispatcher: `.tolist()`, `.numpy()`, `.shape`, and tells `if t:` from `.item()`."""

    def __init__(self, recorder: Refusing):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before, self.recorder.calling = self.recorder.calling, getattr(func, "__name__", "a function")
        try:
            return self.call(func, args, kwargs or {})
        finally:
            self.recorder.calling = before

    def call(self, func, args, kwargs):
        name = self.recorder.calling
        if name in _VALUE_READS and args and isinstance(args[0], Tensor):
            with self.recorder.remembering():
                self.recorder.refuse_read(name, args[0])
        if what := _SET.get(func):
            with self.recorder.remembering():
                self.recorder.refuse_write(args[0], f"sets `.{what}` of")
                raise InPlaceError(
                    f"sets `.{what}` of a tensor", core=self.recorder.sig.core, line=self.recorder.line(),
                    hint="Compute a new one: `h = h.clamp(0, 1)`, not `h.data = h.data.clamp(0, 1)`.",
                )  # fmt: skip
        if func in _SIZE_READS or func in _RANK_READS:
            self.note_shape(func, args[0])
        if func in _AUTOGRAD:
            with self.recorder.remembering():
                return self.recorder.differentiating(func, args, kwargs)
        return func(*args, **kwargs)

    def note_shape(self, func: Any, tensor: Tensor) -> None:
        _, node = self.recorder.tracked.get(id(tensor), (None, None))
        if node is not None and node.meta["kind"] == "step":
            shape = tuple(node.meta["val"].shape)
            if func in _SIZE_READS:
                self.recorder.shapes_read.add(shape)
            else:
                self.recorder.ranks_read.add(len(shape))


def op_name(func: Any) -> str:
    """`add.Tensor` is `add`."""
    return str(func).removeprefix("aten.").rpartition(".")[0] or str(func)
