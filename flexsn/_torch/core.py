"""Private names of PyTorch, each with the versions in which it was seen: 2.11, 2.13. Those of its tracers are in `_torch/tracing.py`,
those of `torch.func` in `transforms.py`, those that only its compiler has in `_torch_compile/`."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator  # 2.11, 2.13
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13

try:
    from torch._subclasses.fake_tensor import (  # 2.11, 2.13
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.utils._python_dispatch import _disable_current_modes as disable_modes  # 2.11, 2.13
except ImportError:  # `interfaces.require` says so before a core is captured; isinstance() is False meanwhile

    class DataDependentOutputException(Exception): ...  # type: ignore[no-redef]  # stands in for the missing one

    class DynamicOutputShapeException(Exception): ...  # type: ignore[no-redef]  # stands in for the missing one

    class FakeTensor: ...  # type: ignore[no-redef]  # stands in for the missing one

    class FakeTensorMode: ...  # type: ignore[no-redef]  # stands in for the missing one

    class UnsupportedFakeTensorException(Exception): ...  # type: ignore[no-redef]  # stands in for the missing one

    class UnsupportedOperatorException(Exception): ...  # type: ignore[no-redef]  # stands in for the missing one

    disable_modes = contextlib.nullcontext  # type: ignore[assignment]  # likewise: there are no modes to disable

try:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode  # 2.11, 2.13
except ImportError:  # `backend="hop"` is then a call that no trace knows

    class ProxyTorchDispatchMode(TorchDispatchMode): ...  # type: ignore[no-redef]  # stands in for the missing one


# the names that are only passed on
__all__ = [
    "DYNAMIC_SHAPE_ERRORS", "FakeTensor", "FakeTensorMode", "HigherOrderOperator", "ProxyTorchDispatchMode", "TorchDispatchMode",
    "disable_modes",
]  # fmt: skip

DYNAMIC_SHAPE_ERRORS = (DynamicOutputShapeException, DataDependentOutputException)


def lacks_fake(func: Any, error: RuntimeError) -> bool:
    """Whether `func` failed on fake tensors for want of a fake kernel, or may have: custom operators say so in words only. The one of
    shifts refuses bools, which the real ones take (2.13)."""
    known = isinstance(error, (UnsupportedFakeTensorException, UnsupportedOperatorException)) or "an integral dtype" in str(error)
    return known or func.namespace not in ("aten", "prims")


@functools.cache
def start_autograd() -> None:
    """Let autograd count the devices, which it does once, before a fake mode does away with the count.

    In a build with CUDA, on a machine without a GPU, fake modes put eight imaginary ones there (2.11). Autograd would start a
    thread for each, and then refuse every `backward` in forked children.
    """
    if torch.backends.cuda.is_built() and torch.cuda.device_count() == 0:  # `is_available` would keep forks from using GPUs
        with torch.inference_mode(False), torch.enable_grad(), no_modes():
            torch.ones((), device="cpu", requires_grad=True).clone().backward()


def records_gradients() -> bool:
    """Whether autograd follows what happens now: inference mode does without it, also where gradients are enabled inside."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While inside, fake tensors do not log the errors that flexsn turns into its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # 2.13
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def decomposition_table() -> dict[Any, Any]:
    """ATen overload -> Python decomposition; imported on use (it pulls in much of PyTorch)."""
    import torch._refs  # noqa: F401  registers the decompositions  (2.11, 2.13)
    from torch._decomp import decomposition_table as table  # 2.11, 2.13

    return table


def promoted(values: Sequence[Any], *, to_float: bool) -> torch.dtype:
    """The dtype of the result of an elementwise op on tensors and numbers; `to_float`: integers become floats."""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes  # 2.11, 2.13

    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.INT_TO_FLOAT if to_float else ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(*values, type_promotion_kind=kind)[1]


def functional_overload(func: Any) -> Any | None:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; by argument types, since names differ (`pow_.Scalar` -> `pow.Tensor_Scalar`)."""
    base = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, base.removesuffix("_"), None) if base.endswith("_") else None
    if packet is None:
        return None
    names = sorted(packet.overloads(), key=lambda name: name != func._overloadname)  # its own name first
    wanted = _argument_types(func)
    return next((overload for name in names if _argument_types(overload := getattr(packet, name)) == wanted), None)


def _argument_types(func: Any) -> list[str]:
    """Of what a functional op takes; a view has none of it."""
    return [] if is_view(func) else [str(argument.type) for argument in func._schema.arguments]


def is_view(func: Any) -> bool:
    """Whether the results of a functional op may lie in the memory of its first operand."""
    schema = func._schema
    return schema.name == "aten::_unsafe_view" or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def apply(function: type[torch.autograd.Function], first: Any, tensors: Sequence[torch.Tensor | None]) -> Any:
    """`function.apply(first, *tensors)` without transforms, past most of the Python in it."""
    alive = [t if t is None else torch._C._functorch.unwrap_if_dead(t) for t in tensors]  # 2.11, 2.13: as there
    return super(torch.autograd.Function, function).apply(first, *alive)  # type: ignore[misc]  # a method of its base, in C++


def forward_ad_level() -> int:
    """-1 outside of `torch.autograd.forward_ad.dual_level()`."""
    return torch.autograd.forward_ad._current_level  # 2.11, 2.13


def saved_tensors_hooks_there() -> bool:
    """Whether saved-tensor hooks are active and see what autograd saves from here on."""
    return not saved_tensors_hooks_off() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # 2.11, 2.13


def saved_tensors_hooks_off() -> bool:
    """Whether saved-tensor hooks, and so checkpointing, are refused here, as inside `torch.func.grad`."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None  # 2.11, 2.13


def without_compiled_autograd() -> contextlib.AbstractContextManager:
    """While inside, `torch._dynamo.config.compiled_autograd` is as if it were off."""
    loaded: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    on = getattr(loaded, "compiled_autograd_enabled", False)  # 2.11, 2.13
    return loaded._disable() if on else contextlib.nullcontext()  # 2.11, 2.13: what it sets is the process's, so only where need be


class _OfOthers(dict):
    """A cache of parametrizations that is there for other threads: this one finds and leaves nothing in it."""

    def __init__(self, cache: dict):
        super().__init__()
        self.cache, self.thread = cache, threading.get_ident()

    def get(self, key: Any, default: Any = None) -> Any:
        return default if threading.get_ident() == self.thread else self.cache.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        if threading.get_ident() != self.thread:
            self.cache[key] = value


@contextlib.contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """While inside, `torch.nn.utils.parametrize.cached()` gives and takes nothing on this thread."""
    loaded: Any = sys.modules.get("torch.nn.utils.parametrize")
    if loaded is None:
        yield
        return
    hidden, loaded._cache = loaded._cache, (mine := _OfOthers(loaded._cache))  # 2.11, 2.13
    try:
        yield
    finally:
        if loaded._cache is mine:  # else the last `cached()` ended meanwhile, and what it held is out of date
            loaded._cache = hidden


def autocast_on() -> bool:
    """Whether autocast is on for CPUs or GPUs: the public calls, which read a name each, where it is on for anything."""
    return _any_autocast() and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # 2.11, 2.13


def current_stream(device: int) -> int:
    """The CUDA stream that PyTorch uses now, as a number; the public call makes an object first."""
    return torch._C._cuda_getCurrentRawStream(device)  # 2.11, 2.13


def current_device() -> int:
    return torch._C._cuda_getDevice()  # 2.11, 2.13


def gpu_allocator() -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """`torch.empty_strided` by shape, strides and dtype on the current GPU, in the quickest way that PyTorch has."""
    make = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # 2.11, 2.13
    return make or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"))


def triton_launch(binary: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the function and those of `binary.run`."""
    run = binary.run
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if triton_version()[:2] == (3, 6) and not scratch:  # past a Python function that looks for scratch memory
        return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run, ()


def triton_function(binary: Any | None) -> tuple[int, int, int] | None:
    """The CUDA function of a compiled kernel, its threads per program, and its bytes of shared memory; None if it is launched in another
    way than with the arguments of its source and, after them, two pointers to scratch memory that it does not use."""
    if binary is None or triton_version()[:2] != (3, 6):
        return None
    run, metadata = binary.run, binary.metadata
    others = (getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"))
    if any(others) or metadata.num_ctas != 1:
        return None
    return binary.function, 32 * metadata.num_warps, metadata.shared


@functools.cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def under_modes(constants: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, made again where a dispatch mode sees it."""
    with disable_modes():
        values = [(t.tolist(), t.dtype, t.device) for t in constants]
    return [torch.tensor(v, dtype=dtype, device=device) for v, dtype, device in values]


def below_autograd() -> bool:
    """Whether autograd has had its turn: inside the rule of an operator for what comes after it."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)  # 2.11, 2.13


def skipping_autograd() -> contextlib.AbstractContextManager:
    """While inside, operators go past autograd."""
    return torch._C._AutoDispatchBelowAutograd()  # 2.11, 2.13


# Which backward runs on this thread: a number, or -1 for none; -1 where this name has moved, of which `_torch/availability.py` warns
current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # 2.11, 2.13


def after_backward(call: Callable[[], None]) -> None:
    """Called when the backward that runs on this thread ends."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # 2.11, 2.13


def run_backward(outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
    """`torch.autograd.grad` that keeps the graph and gives None for what nothing leads to; function modes see what custom backwards
    and hooks call, which the public function hides from them."""
    from torch.autograd.graph import _engine_run_backward  # 2.11, 2.13

    return _engine_run_backward(tuple(outputs), tuple(cotangents), True, False, tuple(sources), True, accumulate_grad=False)


def exiting() -> bool:
    """Whether the interpreter ends, and waits only for what threads of a pool have still to do."""
    return concurrent.futures.thread._shutdown  # Python 3.11, 3.12


def has_storage(tensor: torch.Tensor) -> bool:
    """Not so of what `torch.autograd.grad(..., is_grads_batched=True)` passes."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def overrides_operators(cls: type) -> bool:
    """Whether a tensor class has a `__torch_function__` of its own."""
    function = cls.__torch_function__  # type: ignore[attr-defined]  # of tensor classes alone, which `type` does not say
    own = getattr(function, "__func__", function)
    return own not in (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]  # bound, 2.13


def has_pointer(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is memory: not sparse, not a lazy zero, not left wrapped by a transform."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # 2.11, 2.13
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor._is_zerotensor()  # 2.11, 2.13


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones too."""
    return tensor.untyped_storage()._cdata  # 2.11, 2.13


def size_of(tensor: torch.Tensor, dim: int) -> int:
    """A size, unseen by modes."""
    with torch._C.DisableTorchFunction():  # 2.11, 2.13
        return tensor.shape[dim]


def is_symbolic(size: Any) -> bool:
    """Whether a size is an unknown of a trace."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None  # 2.11, 2.13


def hint(size: Any) -> int:
    """The number that a symbolic size has in this trace, which is not bound to it. (Bound where PyTorch knows none.)"""
    found = size.node.hint  # 2.11, 2.13
    return int(size) if found is None else int(found)


def symbol(size: Any) -> str:
    """The expression of a symbolic size; equal ones are written alike."""
    return str(size.node.expr)  # 2.11, 2.13


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """While inside, no mode sees calls of PyTorch's functions but the one of the default device."""
    from torch.overrides import _pop_mode, _push_mode  # 2.11, 2.13
    from torch.utils._device import DeviceContext  # 2.11, 2.13

    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
    try:
        for mode in kept:
            _push_mode(mode)
        yield
    finally:
        for _ in range(torch._C._len_torch_function_stack()):
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """While inside, nothing traces, transforms or casts: a core can be captured. The default device stays."""
    from torch._dispatch.python import no_python_dispatcher  # 2.11, 2.13
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11, 2.13
    from torch._guards import tracing  # 2.11, 2.13

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(None))
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(disable_modes())
        stack.enter_context(no_python_dispatcher())
        stack.enter_context(_no_function_modes())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks of `Tensor.register_hook` rest: they are for real gradients."""
    resting = [(hooks, dict(hooks)) for t in tensors if (hooks := t._backward_hooks)]  # 2.11, 2.13: the dict that the engine reads
    for hooks, _ in resting:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in resting:
            hooks.update(kept)


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function: where it runs inside a compiled region, Dynamo compiles neither it nor what it calls."""
    try:
        from torch._C._dynamo import eval_frame  # 2.11, 2.13

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):  # `interfaces.require` says so before a neuron is compiled
        pass
    return function


def break_graph(reason: str) -> None:
    """End the graph that Dynamo is tracing: what follows runs as it is; where there must be one graph, `reason` is the error."""
    torch._dynamo.graph_break(msg=reason)  # 2.13


def is_compiled(module: torch.nn.Module) -> bool:
    """Made by `torch.compile(module)`, or after `module.compile()`."""
    return is_optimized_module(module) or module._compiled_call_impl is not None  # 2.13


def is_optimized_module(module: torch.nn.Module) -> bool:
    """Made by `torch.compile(module)`."""
    return hasattr(module, "_orig_mod")  # 2.13


def outside_dynamo(reason: str) -> Callable[[Callable], Callable]:
    """A decorator: inside a compiled region the call breaks the graph and runs as it is. (`torch.compiler.disable` imports Dynamo.)"""

    def mark(function: Any) -> Callable:
        function._torchdynamo_disable = True  # 2.11, 2.13
        function._torchdynamo_disable_msg = reason  # 2.11, 2.13
        return unseen_by_dynamo(function)

    return mark
