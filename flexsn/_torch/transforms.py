"""Private names of `torch.func`, each with the versions in which it was seen: which transforms run, what they wrapped."""

from __future__ import annotations

import torch

from .compiling import unseen_by_dynamo


@unseen_by_dynamo
def transforms_active() -> bool:
    """Whether `torch.func` transforms are active (`grad`, `vmap`, `jvp`, ...) other than `functionalize`."""
    return bool(active_transforms())


@unseen_by_dynamo
def active_transforms() -> list[str]:
    """Active transforms, but for `functionalize`, by name (`"grad"`, `"vmap"`, ...), the outermost first."""
    functorch = torch._C._functorch  # 2.11, 2.13
    levels = functorch.get_interpreter_stack() or ()
    return [level.key().name.lower() for level in levels if level.key() != functorch.TransformType.Functionalize]


def transforms_or_modes_active() -> bool:
    """Whether `torch.func` or a dispatch mode is active: tensors may then lack memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0  # 2.13


def is_plain(tensor: torch.Tensor) -> bool:
    """Not wrapped by a functorch transform, not fake, not functional: its memory can be read."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.device.type == "meta":
        return False
    return not is_wrapped(tensor)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch transform, perhaps one that has ended, keeps the values."""
    functorch = torch._C._functorch  # 2.11, 2.13
    while functorch.is_gradtrackingtensor(tensor) and not transforms_active():  # of a `grad` that has ended: ops look inside
        tensor = functorch.get_unwrapped(tensor)
    return functorch.is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_batchedtensor(tensor):  # 2.11, 2.13: `unpack_dual` has no rule for it
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def left_by_an_ended_vmap(tensor: torch.Tensor) -> bool:
    """Whether a `vmap` that has ended keeps the values, and none over as many runs in its place."""
    functorch = torch._C._functorch  # 2.11, 2.13
    running = {level.level(): level for level in functorch.get_interpreter_stack() or ()}
    while functorch.is_functorch_wrapped_tensor(tensor):
        inside = functorch.get_unwrapped(tensor)
        if functorch.is_batchedtensor(tensor):
            level = running.get(functorch.maybe_get_level(tensor))
            if level is None or level.key() != functorch.TransformType.Vmap:
                return True
            if functorch.CVmapInterpreterPtr(level).batchSize() != inside.shape[functorch.maybe_get_bdim(tensor)]:
                return True
        tensor = inside
    return False
