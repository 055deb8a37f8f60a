"""What a recording refuses: values read into Python, control flow on them, random numbers; raised also if the core catches it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._ir.graph import HALF
from ..errors import (
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
from .decompositions import CELLS
from .graph_writer import Tape, run_core

aten = torch.ops.aten

_VALUE_READS = {
    "item", "__bool__", "__float__", "__int__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__format__", "__repr__",
}  # fmt: skip
# What Python may decide by, and the kernel could not at another size. (A trace at one other size would not tell `n > 4`.)
_SHAPE, _NBYTES, _NDIM = (getattr(Tensor, name).__get__ for name in ("shape", "nbytes", "ndim"))
_SIZE_READS = (
    _SHAPE, _NBYTES, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, Tensor.is_same_size, torch.numel,
    torch.is_same_size, aten.size, aten.sym_size, aten.numel, aten.sym_numel, aten.stride, aten.sym_stride, aten.is_same_size,
)  # fmt: skip
_RANK_READS = (_NDIM, Tensor.dim, Tensor.ndimension, aten.dim)
_SET = {getattr(Tensor, name).__set__: name for name in ("data", "grad")}  # never reach the dispatcher
_LOOKERS = tuple(os.path.join(os.path.dirname(torch.__file__), *path) for path in (("utils", "checkpoint.py"), ("_functorch", "")))
_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_OF_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad)
_CONTROL_FLOW = {"__bool__", "aten::is_nonzero"}
_OF_ONE_DTYPE = ("mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm")
_NEW_STATE = "What changes from step to step is a state: take it as an argument and return its new value."
_NORM = "A batch norm in training updates its statistics: apply it to the whole sequence, in front of the neuron."
_STATISTICS = ("num_batches_tracked", "running_mean", "running_var")
_TO_COMPUTE = "Keep it a tensor: 0-dimensional tensors broadcast like numbers."
_TO_SHOW = "To look at a state at every step, ask for `store_state_seqs=True`; return any other value as one more output."


class Refusing(Tape):
    """A tape that refuses what a replay would get wrong.

    Attributes:
        vjp: whether the core is differentiated, too.
        error: to be raised after the core ran.
        refused: was raised inside the core, which may have caught it.
        user_op: the op that the user wrote, while it is being decomposed.
        calling: the name of the function of PyTorch that the user's code is calling; empty while PyTorch differentiates.
        shapes_read: shapes of tensors that depend on time, of which the core read a size, in order.
        ranks_read: how many dims such tensors have whose number of dims it read.
        inner: values with an inner dim, of a core that may have some.
    """

    def __init__(self, *args: Any, vjp: bool):
        super().__init__(*args)
        self.vjp = vjp
        self.error: FlexSNError | None = None
        self.refused: FlexSNError | None = None
        self.user_op: Any = None
        self.calling = ""
        self.shapes_read: list[tuple[int, ...]] = []
        self.ranks_read: list[int] = []
        self.inner: Any = None  # an `Inner`

    def raise_refusals(self) -> None:
        for error in (self.refused, self.error):
            if error is not None:
                raise error

    def refuse_read(self, how: str, tensor: Tensor) -> None:
        node = self.node_of(self.of_neurons(tensor))
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

    def refuse_random(self, func: Any, args: tuple, kwargs: dict) -> None:
        arguments = func._schema.arguments
        given = {a.name: a.default_value for a in arguments} | dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        if given.get("dropout_p") == 0.0:  # of attention
            return
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

    def of_neurons(self, tensor: Any) -> Any:
        """Of a value with an inner dim, its first part; any other as it is."""
        parts = self.inner.of(tensor) if self.inner is not None else None
        return tensor if parts is None else parts[0]

    def shapes_of(self, tensors: Any) -> Iterator[tuple[int, ...]]:
        """Of a tensor or several, those that depend on time."""
        for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            _, node = self.tracked.get(id(self.of_neurons(tensor)), (None, None))
            if node is not None and node.meta["kind"] != "static":
                yield tuple(node.meta["val"].shape)

    def note_shape(self, tensors: Any) -> None:
        """What happens next may depend on the sizes of these."""
        self.shapes_read += self.shapes_of(tensors)

    def note_rank(self, tensors: Any) -> None:
        """What happens next may depend on how many dims these have."""
        self.ranks_read += map(len, self.shapes_of(tensors))

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the first refusal; what PyTorch itself would raise the core may catch."""
        try:
            yield
        except FlexSNError as error:
            if not isinstance(error, CoreError) and self.user_op is None:
                self.refused = self.refused or error
            raise

    def refuse_mixed_dtypes(self, func: Any, nodes: list[fx.Node]) -> None:
        """Refuse a product of two dtypes, as PyTorch does, but for fake tensors. Those of 16 bits are cast where the call runs."""
        dtypes = list(dict.fromkeys([n.meta["val"].dtype for n in nodes]))
        if op_name(func) in _OF_ONE_DTYPE and len(dtypes) > 1 and not {*HALF} & {*dtypes}:
            raise CoreError(
                f"`{op_name(func)}` is given {' and '.join([str(dtype)[6:] for dtype in dtypes])}, and multiplies values of one dtype",
                core=self.sig.core, line=self.line(),
                hint="Cast the sequence (`x.to(weight.dtype)`) or the weights (`module.to(x.dtype)`). States that are not given have the "
                "dtype of the first input.",
            )  # fmt: skip

    def untraceable(self, func: Any) -> FlexSNError:
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

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in CELLS:  # whose own kernel writes in place
            with self:
                return CELLS[func](*args, **(kwargs or {}))
        before, self.recorder.calling = self.recorder.calling, getattr(func, "__name__", "a function")
        try:
            return self.call(func, args, kwargs or {})
        finally:
            self.recorder.calling = before

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = self.recorder.calling
        if name in _VALUE_READS and args and isinstance(args[0], Tensor):
            with self.recorder.remembering():
                self.recorder.refuse_read(name, args[0])
        if (what := _SET.get(func)) and (what == "data" or id(args[0]) in self.recorder.own):
            with self.recorder.remembering():
                if id(args[0]) in self.recorder.own:
                    self.recorder.refuse_write(args[0], f"sets `.{what}` of")
                raise InPlaceError(
                    f"sets `.{what}` of a tensor", core=self.recorder.sig.core, line=self.recorder.line(),
                    hint="Compute a new one: `h = h.clamp(0, 1)`, not `h.data = h.data.clamp(0, 1)`.",
                )  # fmt: skip
        asked = getattr(func, "overloadpacket", func)
        note = self.recorder.note_shape if asked in _SIZE_READS else self.recorder.note_rank if asked in _RANK_READS else None
        if note is not None and not sys._getframe(2).f_code.co_filename.startswith(_LOOKERS):  # who decide nothing by them
            note(args)
        if func in _OF_GRADIENTS and not self.recorder.vjp and not args[0].requires_grad:  # nor has the core a gradient in this trace
            return RemovableHandle(OrderedDict())
        if func in _AUTOGRAD:  # which run unseen what custom functions do backward
            self.recorder.note_shape(args[0])
            with self.recorder.remembering():
                return self.recorder.differentiating(func, args, kwargs)
        return func(*args, **kwargs)


def op_name(func: Any) -> str:
    """`add.Tensor` is `add`."""
    return str(func).removeprefix("aten.").rpartition(".")[0] or str(func)
