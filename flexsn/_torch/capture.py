"""Private names of PyTorch, each with the versions in which it was seen: what runs a core on fake tensors, unseen by the caller's modes."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .fake_tensors import disable_modes


@functools.cache
def start_autograd() -> None:
    """Let autograd count the devices, which it does once, before a fake mode does away with the count.

    In a build with CUDA, on a machine without a GPU, fake modes put eight imaginary ones there (2.11). Autograd would start a
    thread for each, and then refuse every `backward` in forked children.
    """
    if torch.backends.cuda.is_built() and torch.cuda.device_count() == 0:  # `is_available` would keep forks from using GPUs
        with torch.inference_mode(False), torch.enable_grad(), no_modes():
            torch.ones((), device="cpu", requires_grad=True).clone().backward()


def decomposition_table() -> dict[Any, Any]:
    """ATen overload -> Python decomposition; imported on use (it pulls in much of PyTorch)."""
    import torch._refs  # noqa: F401  registers the decompositions  (2.11, 2.14)
    from torch._decomp import decomposition_table as table  # 2.11, 2.14

    return table


def run_backward(
    outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], create_graph: bool = False
) -> Any:
    """`torch.autograd.grad` that keeps the graph and gives None for what nothing leads to; function modes see what custom backwards
    and hooks call, which the public function hides from them."""
    from torch.autograd.graph import _engine_run_backward  # 2.11, 2.14

    with torch.autograd.set_multithreading_enabled(False):  # a thread of a GPU counts its ops anew: their order would change
        return _engine_run_backward(tuple(outputs), tuple(cotangents), True, create_graph, tuple(sources), True, accumulate_grad=False)


def without_compiled_autograd() -> contextlib.AbstractContextManager:
    """While inside, `torch._dynamo.config.compiled_autograd` is as if it were off."""
    loaded: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    on = getattr(loaded, "compiled_autograd_enabled", False)  # 2.11, 2.14
    return loaded._disable() if on else contextlib.nullcontext()  # 2.11, 2.14: what it sets is the process's, so only where need be


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
    hidden, loaded._cache = loaded._cache, (mine := _OfOthers(loaded._cache))  # 2.11, 2.14
    try:
        yield
    finally:
        if loaded._cache is mine:  # else the last `cached()` ended meanwhile, and what it held is out of date
            loaded._cache = hidden


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """While inside, no mode sees calls of PyTorch's functions but the one of the default device."""
    from torch.overrides import _pop_mode, _push_mode  # 2.11, 2.14
    from torch.utils._device import DeviceContext  # 2.11, 2.14

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
    from torch._dispatch.python import no_python_dispatcher  # 2.11, 2.14
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11, 2.14
    from torch._guards import tracing  # 2.11, 2.14

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
def without_tensor_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks of `Tensor.register_hook` rest: they are for real gradients."""
    resting = [(hooks, dict(hooks)) for t in tensors if (hooks := t._backward_hooks)]  # 2.11, 2.14: the dict that the engine reads
    for hooks, _ in resting:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in resting:
            hooks.update(kept)


def made_under_modes(constants: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, made again where a dispatch mode sees it."""
    with disable_modes():
        values = [(t.tolist(), t.dtype, t.device) for t in constants]
    return [torch.tensor(v, dtype=dtype, device=device) for v, dtype, device in values]
