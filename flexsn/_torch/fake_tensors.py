"""Private names of PyTorch's fake tensors, on which a core runs at its capture, each with the versions in which it was seen."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .compiling import unseen_by_dynamo
from .tensors import broadcast_shapes, unwatched

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager  # 2.11, 2.13
    from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13
    from torch.utils._python_dispatch import _disable_current_modes as disable_modes  # 2.11, 2.13
except ImportError:  # `interfaces.require` says so before a core is captured; isinstance() is False meanwhile

    class FakeTensor: ...  # type: ignore[no-redef]  # stands in for the missing one

    class FakeTensorMode: ...  # type: ignore[no-redef]  # stands in for the missing one

    class TorchDispatchMode: ...  # type: ignore[no-redef]  # stands in for the missing one

    disable_modes = contextlib.nullcontext  # type: ignore[assignment]  # likewise: there are no modes to disable

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "disable_modes"]  # the names that are only passed on


def depends_on_values(error: RuntimeError) -> bool:
    """Whether an operator failed on fake tensors since its result, or that of an operator inside it, depends on values."""
    tags = getattr(error.args[0], "tags", ()) if len(error.args) == 1 else ()
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(tags)


def lacks_fake_kernel(func: Any, error: RuntimeError) -> bool:
    """Whether `func` failed on fake tensors for want of a fake kernel, or may have: the error then says no more than the operator, or has
    a `reason` (2.11, 2.13); custom operators say so in words only. The one of shifts refuses bools, which the real ones take (2.13)."""
    return error.args == (func,) or hasattr(error, "reason") or "an integral dtype" in str(error) or func.namespace not in ("aten", "prims")


@contextlib.contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """While inside, fake tensors do not log the errors that flexsn turns into its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # 2.13
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


_UNTAGGED = frozenset("_to_copy empty_like floor_divide full_like masked_fill ones_like rsub where zeros_like".split())  # elementwise, too
_PRODUCTS = frozenset({"addmm", "bmm", "mm"})
_SHAPE_AT = {"full": 0, "ones": 0, "zeros": 0, "new_empty": 1, "new_full": 1, "new_ones": 1, "new_zeros": 1}
_IN_CPP = frozenset({  # their meta kernels
    "alias", "detach", "empty", "empty_strided", "expand", "permute", "select", "select_backward", "slice", "slice_backward", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "view_as_complex", "view_as_real",
})  # fmt: skip


class LightFakeMode(FakeTensorMode):
    """A `FakeTensorMode(allow_non_fake_inputs=True)` that does without `torch._dynamo` and sympy until an op needs them.

    Their import takes most of a second, and PyTorch's meta kernels of elementwise ops, written in Python, import them. Here the results
    of such ops, of factories, sums and views have the shape that follows from the operands, and the dtype of the op on CPU tensors without
    elements. At the first op that is another, mixes devices or layouts, or fails, this becomes the whole mode, and goes on with the tensors
    made so far. `benchmarks/first_call.py` measures what it gains.
    """

    whole = False

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)  # and of what the whole mode has, what its tensors and its `__enter__` ask for
        self._mode_key, self._dispatch_key = FakeTensor._mode_key, None
        self._allow_unsafe_data_ptr_access = self.allow_meta = True
        self.in_kernel_invocation, self.enter_stack, self.shape_env = False, [], None

    def __getattr__(self, name: str) -> Any:
        if self.whole:
            raise AttributeError(name)
        self.complete()
        return getattr(self, name)

    def complete(self) -> None:
        """Become the whole mode."""
        mine = vars(self) | {"whole": True}
        with disable_modes(), unwatched():
            super().__init__(allow_non_fake_inputs=True)
        vars(self).update(mine)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to have it skipped, PyTorch imports it

    @unseen_by_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.whole:
            try:
                made = self.light(func, args, kwargs)
            except Exception:  # whatever it is: the whole mode fails so too, in its own words
                made = NotImplemented
            if made is not NotImplemented:
                return made
            self.complete()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def light(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of an op that needs no more; NotImplemented of any other."""
        if func is torch.ops.prim.device.default:
            return args[0].device
        if func is torch.ops.aten.can_cast.default:
            return func(*args)
        name = func._schema.name.removeprefix("aten::")
        tensors = [a for a in (args[0] if name == "stack" else args) if isinstance(a, torch.Tensor)]
        devices = {t.device for t in tensors}
        device = kwargs.get("device") or next(iter(devices), torch.device("cpu"))
        plain = all(isinstance(t, FakeTensor) for t in tensors) and not any(isinstance(v, torch.Tensor) for v in kwargs.values())
        if func.namespace != "aten" or func._schema.is_mutable or not plain or devices | {device} != {device}:
            return NotImplemented
        if name in _IN_CPP:
            with in_kernel_invocation_manager(self):
                made = func(*args, **kwargs | ({} if tensors else {"device": "meta"}))
            faked = [m if isinstance(m, FakeTensor) else FakeTensor(self, m, device) for m in (made if isinstance(made, list) else [made])]
            return faked if isinstance(made, list) else faked[0]
        shape = _shape(func, name, args, tensors)
        ordered = name in _PRODUCTS or all(map(_in_order, tensors))  # of a product all dims but two, and the result, are
        if shape is None or not ordered or kwargs.get("layout") not in (None, torch.strided):
            return NotImplemented
        given = [list(map(_empty, a)) if name == "stack" and a is args[0] else _empty(a) for a in args]
        if name in _SHAPE_AT:
            given[_SHAPE_AT[name]] = [0]
        empty = func(*given, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))
        parts = empty if isinstance(empty, tuple) else (empty,)
        made = [FakeTensor(self, torch.empty(shape, dtype=part.dtype, device="meta"), device) for part in parts]
        return tuple(made) if isinstance(empty, tuple) else made[0]


def _empty(arg: Any) -> Any:
    """Return a CPU tensor without elements for a fake one; anything else as it is."""
    return torch.ones([0] * arg.dim(), dtype=arg.dtype, device="cpu") if isinstance(arg, torch.Tensor) else arg


def _in_order(tensor: torch.Tensor) -> bool:
    """Whether strides fall from dim to dim, those of expanded dims apart: then those of an elementwise result do."""
    strides = [stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and stride]
    return strides == sorted(strides, reverse=True)


def _shape(func: Any, name: str, args: tuple, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Of the result of a factory, a sum or an elementwise op; None of any other op."""
    if name in _SHAPE_AT:
        return tuple(args[_SHAPE_AT[name]])
    if name == "stack":
        at = range(tensors[0].dim() + 1)[(*args, 0)[1]]
        return tuple([*tensors[0].shape[:at], len(tensors), *tensors[0].shape[at:]]) if len({t.shape for t in tensors}) == 1 else None
    if name in ("sum", "mean"):
        (x, dims, keep), rank = (*args, None, False)[:3], args[0].dim()
        summed = {d % rank for d in dims or range(rank)}
        return tuple([1 if d in summed else n for d, n in enumerate(x.shape) if keep or d not in summed])
    if name in _PRODUCTS:
        a, b = tensors[-2:]
        fits = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2]
        bias = tuple(tensors[0].shape) if len(tensors) == 3 else (1,)
        return (*a.shape[:-1], b.shape[-1]) if fits and bias in ((1,), b.shape[-1:]) else None
    if tensors and (torch.Tag.pointwise in func.tags or name in _UNTAGGED):
        return broadcast_shapes(*[t.shape for t in tensors])
    return () if name == "scalar_tensor" else None
