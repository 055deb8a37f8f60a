"""Private names of `torch.func`, each with the versions in which it was seen: which transforms run, what they wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .availability import TRANSFORMS, moved
from .compiling import unseen_by_dynamo
from .tensors import has_storage


@unseen_by_dynamo
def transforms_active() -> bool:
    """Whether `torch.func` transforms are active (`grad`, `vmap`, `jvp`, ...) other than `functionalize`."""
    return bool(active_transforms())


@unseen_by_dynamo
def active_transforms() -> list[str]:
    """Active transforms, but for `functionalize`, by name (`"grad"`, `"vmap"`, ...), the outermost first."""
    levels = torch._C._functorch.get_interpreter_stack() or ()  # 2.11, 2.14
    return [name for level in levels if (name := level.key().name.lower()) != "functionalize"]


def transforms_or_modes_active() -> bool:
    """Whether `torch.func` or a dispatch mode is active: tensors may then lack memory."""
    return torch._C._functorch.get_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0  # 2.13


def is_plain(tensor: torch.Tensor) -> bool:
    """Not wrapped by a functorch transform, not fake, not functional: its memory can be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.device.type == "meta":
        return False
    return not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch transform, perhaps one that has ended, keeps the values."""
    functorch = torch._C._functorch
    wrapped = functorch.maybe_get_level(tensor) != -1  # 2.11, 2.14
    while wrapped and not moved(TRANSFORMS) and functorch.is_gradtrackingtensor(tensor) and not transforms_active():
        tensor = functorch.get_unwrapped(tensor)  # 2.11, 2.14: of a `grad` that has ended, ops look inside
        wrapped = functorch.maybe_get_level(tensor) != -1
    return wrapped


def has_tangent(tensor: torch.Tensor) -> bool:
    while is_wrapped(tensor) and torch._C._functorch.maybe_get_bdim(tensor) != -1:  # 2.11, 2.14: a batch: `unpack_dual` has no rule
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


Tensors = Sequence[torch.Tensor | None]


def over_batch(function: Callable[..., Tensors], given: Tensors) -> Tensors:
    """Run a function of tensors of which some may be batches that `torch.autograd.grad(..., is_grads_batched=True)` passes: wrappers
    without memory, of a `vmap` older than `torch.func`."""
    if transforms_active() or all(t is None or has_storage(t) for t in given):
        return function(*given)
    add, remove = torch._add_batch_dim, torch._remove_batch_dim  # 2.11, 2.14
    dims = [None if t is None or has_storage(t) else 0 for t in given]
    values = [t if t is None or dim is None else remove(t, 1, 0, 0) for t, dim in zip(given, dims, strict=True)]
    there: list[bool] = []

    def run(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        found = function(*tensors)
        there[:] = [t is not None for t in found]
        return tuple([t for t in found if t is not None])

    found = iter(torch.func.vmap(run, in_dims=tuple(dims))(*values))
    return [add(next(found), 0, 1) if flag else None for flag in there]


def left_by_an_ended_vmap(tensor: torch.Tensor) -> bool:
    """Whether a `vmap` that has ended keeps the values, and none over as many runs in its place."""
    if moved(TRANSFORMS):
        return False
    functorch = torch._C._functorch  # 2.11, 2.14
    running = {level.level(): level for level in functorch.get_interpreter_stack() or ()}
    while (number := functorch.maybe_get_level(tensor)) != -1:
        inside, dim = functorch.get_unwrapped(tensor), functorch.maybe_get_bdim(tensor)
        if dim != -1:
            level = running.get(number)
            if level is None or level.key().name != "Vmap" or functorch.CVmapInterpreterPtr(level).batchSize() != inside.shape[dim]:
                return True
        tensor = inside
    return False
