"""Runs calls on DTensors: how a neuron may lie on a device mesh, and what is reduced.

A neuron works elementwise on one step, so every dim of the step shape may be sharded and the kernel runs on the local part,
without communication: an operand that has the sharded dim is sharded with it, one that broadcasts along it is replicated.
Time may not be sharded: a step needs the one before. What depends on params alone stays ordinary DTensor ops around the
kernel (`_operator/call.py`), so the sum over a sharded dim that ends in the gradient of a param is a DTensor's partial sum, and comes
back in the param's own layout, reduced.

The rules below are what `flexsn::forward` and `flexsn::backward` do with DTensors. They are registered at the first call that
has one: `torch.distributed.tensor` takes longer to import than flexsn.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._capture.signature import Signature
from .._ir.roles import Role
from ..errors import ShardingError
from .library import LIBRARY, leading_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Tensors = Sequence[Tensor | None]


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensor(tensors: Tensors) -> bool:
    return "torch.distributed.tensor" in sys.modules and any(map(is_dtensor, tensors))


# --- which step dim lies on which dim of the mesh -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ShardLayout:
    """For every dim of the mesh: the sharded dim of the step shape, counted from the last (-1), or None for replicas."""

    mesh: DeviceMesh
    dims: tuple[int | None, ...]

    def placements(self, shape: Sequence[int], step: Sequence[int]) -> list[Placement]:
        """Return those of a tensor that broadcasts to the step shape in its last dims."""
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate() if d is None or len(shape) + d < 0 or shape[d] != step[d] else Shard(len(shape) + d) for d in self.dims]


def layout_of(operands: Sequence[tuple[DTensor, int]], step: Sequence[int]) -> ShardLayout:
    """Return where a call runs: every dim of the mesh as the first operand that is sharded along it.

    Args:
        operands: DTensors, each with the number of its dims in front of the step's.
    """
    mesh = operands[0][0].device_mesh
    dims: list[int | None] = [None] * mesh.ndim
    for tensor, leading in operands:
        for i, placement in enumerate(tensor.placements):
            if dims[i] is None and placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]  # a shard has it
                d = dim - tensor.dim()
                if dim >= leading and tensor.shape[d] == step[d] != 1:
                    dims[i] = d
    return ShardLayout(mesh, tuple(dims))


# --- before a call: operands that the rules can take --------------------------------------------------------------------------------
def check_layouts(sig: Signature, inputs: Sequence[Tensor], states: Tensors, statics: Sequence[Tensor]) -> None:
    """Raise `ShardingError` for layouts that have no meaning for a neuron."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    named = [*zip(sig.input_names, inputs, strict=True), *zip(sig.state_names, states, strict=True)]
    present = [t for t in (*inputs, *states, *statics) if is_dtensor(t)]
    mesh = present[0].device_mesh
    for name, tensor in named:
        if tensor is not None and not is_dtensor(tensor):
            raise ShardingError(
                f"`{name}` is a plain tensor while others of this call are DTensors", core=sig.core,
                hint=f"Say how it lies on the mesh: `DTensor.from_local({name}, mesh, placements)`. Params that FSDP has sharded are whole "
                "only inside the forward of the module that it wraps.",
            )  # fmt: skip
    for tensor in present:
        if tensor.device_mesh != mesh:
            raise ShardingError(f"operands lie on different meshes: {mesh} and {tensor.device_mesh}", core=sig.core)
        for placement in tensor.placements:
            if type(placement) not in (Shard, Replicate, Partial):
                raise ShardingError(f"placement {placement} is not one of Shard, Replicate and Partial", core=sig.core)
    for name, x in zip(sig.input_names, inputs, strict=True):
        if is_dtensor(x) and any(p.is_shard(0) for p in x.placements):
            shape = list(x.shape)
            raise ShardingError(
                f"input `{name}` is sharded in time (dim 0 of {shape}), but a step needs the states of the step before", core=sig.core,
                hint=f"Shard a dim of the step (batch, channel, space): `{name}.redistribute(placements=[Shard(1)])`, or run the "
                "sequence in pieces, one after the other.",
            )  # fmt: skip


def settled(tensors: Tensors) -> list[Tensor | None]:
    """Return operands as DTensors of one mesh without partial sums, whose gradients come back in their own layouts.

    Plain ones among them (params, captured tensors) are the same on every rank: replicas.
    """
    from torch.distributed.tensor import Replicate

    mesh = next(t.device_mesh for t in tensors if is_dtensor(t))
    found: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and not is_dtensor(tensor):
            tensor = replica(tensor, mesh)
        elif tensor is not None:
            lies = [Replicate() if p.is_partial() or _of_one(tensor, p) else p for p in tensor.placements]
            if tensor.requires_grad:
                tensor = _InOwnLayout.apply(tensor, lies)
            elif lies != list(tensor.placements):
                tensor = tensor.redistribute(placements=lies)
        found.append(tensor)
    return found


def settled_groups(*groups: Tensors) -> list[Any]:
    """Return what `settled` does, group by group; the groups as they are, if none holds a DTensor."""
    tensors: Tensors = [t for group in groups for t in group]
    if not any_dtensor(tensors):
        return list(groups)
    laid = iter(settled(tensors))
    return [tuple([next(laid) for _ in group]) for group in groups]


def _of_one(tensor: Tensor, placement: Placement) -> bool:
    """Return whether a dim of size 1 is sharded: it lies on one rank, and may broadcast."""
    return placement.is_shard() and tensor.shape[placement.dim] == 1  # type: ignore[attr-defined]  # a shard has it


def replica(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a plain tensor, the same on every rank, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Replicating(TorchFunctionMode):
    """While inside, plain tensors that meet DTensors are replicas: params, default states and what a core makes itself."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        mesh = _mesh_among((args, tuple(kwargs.values())))
        if mesh is not None:
            args, kwargs = _replicas(args, mesh), {name: _replicas(value, mesh) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _mesh_among(value: Any) -> DeviceMesh | None:
    if isinstance(value, (tuple, list)):
        return next((mesh for v in value if (mesh := _mesh_among(v)) is not None), None)
    return value.device_mesh if is_dtensor(value) else None


def _replicas(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_replicas(v, mesh) for v in value]) if type(value) in (tuple, list) else value
    return replica(value, mesh) if type(value) in (Tensor, torch.nn.Parameter) else value


class _InOwnLayout(torch.autograd.Function):
    """The tensor, laid out anew; its gradient is redistributed to where the tensor lies: partial sums are reduced. (The gradient of a
    partial sum's terms is that of the sum, on every rank.)"""

    @staticmethod
    def forward(ctx: Any, tensor: Any, lies: Any) -> Any:
        from torch.distributed.tensor import Replicate

        ctx.placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor) if lies == list(tensor.placements) else tensor.detach().redistribute(placements=lies)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple:
        return None if grad is None else grad.redistribute(placements=ctx.placements), None


# --- the rules of the operators -----------------------------------------------------------------------------------------------------
def _local(tensor: Tensor | None, layout: ShardLayout, step: Sequence[int]) -> Tensor | None:
    """Return the part of an operand that this rank's kernel reads."""
    if tensor is None or not is_dtensor(tensor):
        return tensor
    cut: Any = tensor.detach() if tensor.requires_grad else tensor  # below autograd; PyTorch 2.11 would do it in place, and cannot
    return cut.redistribute(placements=layout.placements(tensor.shape, step)).to_local()


def _local_step(layout: ShardLayout, step: Sequence[int], operands: Sequence[tuple[Tensor, int]], locals_: Tensors) -> list[int]:
    """Return the step shape of this rank's part; where it is not sharded, as it is."""
    sizes = list(step)
    for d in {d for d in layout.dims if d is not None}:
        sizes[d] = next(
            part.shape[d]
            for (tensor, leading), part in zip(operands, locals_, strict=True)
            if part is not None and tensor.dim() - leading + d >= 0 and tensor.shape[d] == step[d]
        )
    return sizes


def _whole(part: Tensor, layout: ShardLayout, step: Sequence[int]) -> Tensor:
    """Return a result, which has the step shape in its last dims, from this rank's part."""
    from torch.distributed.tensor import DTensor

    shape = (*part.shape[: part.dim() - len(step)], *step)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, layout.mesh, layout.placements(shape, step), run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _sharded(
    groups: Sequence[Sequence[tuple[Tensor | None, int]]], step: Sequence[int], call: Callable[[list[list[Any]], list[int]], list[Tensor]]
) -> list[Tensor]:
    """Redistribute the operands, run a call on their local parts, and return its results as DTensors.

    Args:
        groups: operands, each with the number of its dims in front of the step's.
    """
    flat = [(t, n) for group in groups for t, n in group if t is not None and is_dtensor(t)]
    layout = layout_of(flat, step)
    parts = [[_local(t, layout, step) for t, _ in group] for group in groups]
    flat_parts = [p for group, part in zip(groups, parts, strict=True) for (t, _), p in zip(group, part, strict=True) if is_dtensor(t)]
    return [_whole(t, layout, step) for t in call(parts, _local_step(layout, step, flat, flat_parts))]


def _single_rows(tensors: Tensors) -> list[tuple[Tensor | None, int]]:
    return [(t, 0) for t in tensors]


def _sequences(tensors: Tensors) -> list[tuple[Tensor | None, int]]:
    return [(t, 1) for t in tensors]


def _forward_rule(cls: Any, func: Any, types: Any, args: tuple, kwargs: Any) -> list[Tensor]:
    program, inputs, states, params, step, *flags = args
    groups = [_sequences(inputs), _single_rows(states), _single_rows(params)]
    return _sharded(groups, step, lambda parts, local: func(program, *parts, local, *flags))


def _backward_rule(cls: Any, func: Any, types: Any, args: tuple, kwargs: Any) -> list[Tensor]:
    program, inputs, states, params, checkpoints, cotangents, given, wanted, step = args
    grads = [(t, leading_dims(Role.of(role))) for t, role in zip(cotangents, given, strict=True)]
    groups = [_sequences(inputs), _single_rows(states), _single_rows(params), _sequences(checkpoints), grads]
    return _sharded(groups, step, lambda parts, local: func(program, *parts, given, wanted, local))


def _carry_rule(cls: Any, func: Any, types: Any, args: tuple, kwargs: Any) -> Tensor:
    return args[0].clone()


RULES: dict[str, Callable] = {"forward": _forward_rule, "backward": _backward_rule, "carry": _carry_rule}  # `autograd.py` adds "scan"


@functools.cache
def ready() -> None:
    """Register the rules, once."""
    from torch.distributed.tensor import DTensor

    for name, rule in RULES.items():
        torch.library.register_torch_dispatch(f"flexsn::{name}", DTensor, rule, lib=LIBRARY)


# --- parallelize_module -------------------------------------------------------------------------------------------------------------
def neuron_parallel(layout: Placement | None = None) -> Any:
    """Return a `ParallelStyle` of `parallelize_module` for a `FlexSN` between sharded layers: its params become replicas on the mesh.

    Inputs and outputs are this rank's parts as plain tensors, as `ColwiseParallel` gives and `RowwiseParallel` takes them; inside
    they are DTensors, so the gradients of params are reduced over the mesh. States are carried as DTensors.

    Args:
        layout: how the inputs lie on the mesh, by default `Shard(-1)` (the last dim, channels); `Shard(0)` is time and refused.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    lies = Shard(-1) if layout is None else layout

    class NeuronParallel(ParallelStyle):
        def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
            def inside(module: torch.nn.Module, inputs: tuple, mesh: Any) -> tuple:
                return tuple(x if is_dtensor(x) else DTensor.from_local(x, mesh, [_from_front(lies, x)], run_check=False) for x in inputs)

            def outside(module: torch.nn.Module, outputs: Any, mesh: Any) -> Any:
                given: tuple[Any, ...] = (outputs,) if isinstance(outputs, Tensor) else outputs
                parts = tuple(y.to_local() for y in given)
                return parts[0] if isinstance(outputs, Tensor) else parts

            return distribute_module(module, device_mesh, None, inside, outside)  # type: ignore[arg-type]  # what they return is taken

    return NeuronParallel()


def _from_front(layout: Placement, tensor: Tensor) -> Placement:
    """Return a layout that counts dims from the front: `Shard(tensor.dim() - 1)` for `Shard(-1)`."""
    from torch.distributed.tensor import Shard

    return Shard(layout.dim % tensor.dim()) if isinstance(layout, Shard) else layout
