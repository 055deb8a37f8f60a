"""What a multi-step kernel knows about its step: how many of what, under which names, of which dtypes and shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._capture.trace import Meta
from .._ir.roles import Kind, Role, roles
from ..errors import GraphCaptureError, ShapeMismatchError
from .graphs import output_values

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StepLayout:
    """Dtypes and shapes of a step as it was traced: of its arguments, and of the kernel's returns."""

    args: tuple[Meta, ...]
    returns: tuple[Meta, ...]

    @functools.cached_property
    def step(self) -> Shape:
        """The shape to which arguments and returns broadcast."""
        return tuple(torch.broadcast_shapes(*[m.shape for m in (*self.args, *self.returns)]))

    @functools.cached_property
    def is_larger(self) -> bool:
        """Whether what the core captures made its returns larger than its arguments."""
        return self.step != tuple(torch.broadcast_shapes(*[m.shape for m in self.args]))


class StepRoles(NamedTuple):
    """What a step takes and returns, by role (`_ir/roles.py`).

    Attributes:
        takes: roles of its arguments, in order.
        returns: roles of its results, in order; None for one that is of no use.
        carried: what goes to the next step, and the result that it is made of, in a dtype of its own.
    """

    takes: Sequence[Role]
    returns: Sequence[Role | None]
    carried: Mapping[Role, Role]


class _Fields(NamedTuple):
    num_inputs: int
    num_outputs: int
    num_states: int
    fwd_core_args: list[str]
    fwd_core_returns: list[str]
    fwd_core_recipients: list[str]
    fwd_kernel_returns: list[str]
    num_fwd_kernel_returns: int
    c2k_return_mapping: list[int]


class FlexSNInfo(_Fields):
    """How the values of a forward step graph become those of a multi-step kernel.

    Attributes:
        num_inputs: of the core.
        num_outputs: of the core.
        num_states: of the core.
        fwd_core_args: names of the step's arguments: inputs, then states.
        fwd_core_returns: names of all that it returns: outputs, new states, intermediates.
        fwd_core_recipients: the kernel's variable for each of these: `s0..`, `v0..`, `res0_f..`; `_` for an intermediate that
            repeats an earlier return.
        fwd_kernel_returns: the recipients without `_`.
        num_fwd_kernel_returns: how many these are.
        c2k_return_mapping: for every intermediate, its index in `fwd_kernel_returns`.
        layout: dtypes and shapes as traced, beside the fields; None for an info made by hand: kernels then go by their operands.
    """

    layout: StepLayout | None = None

    @property
    def num_returns(self) -> int:
        """Outputs and states."""
        return self.num_outputs + self.num_states

    def num_stored(self, kind: str) -> int:
        """Return how many sequences a kernel of this kind stores: all returns but for inference."""
        return {"inference": self.num_returns, "inference_final_state": self.num_outputs}.get(kind, self.num_fwd_kernel_returns)

    # --- roles in the graphs and plans of kernels: those of `_plan/plan.py`, with all that a kernel returns as outputs -----------
    @property
    def states(self) -> list[Role]:
        return [*roles(Kind.STATE, self.num_states)]

    @property
    def args(self) -> list[Role]:
        """Inputs and states."""
        return [*roles(Kind.INPUT, self.num_inputs), *self.states]

    @property
    def returns(self) -> list[Role]:
        """Outputs, state sequences, intermediates."""
        return [*roles(Kind.OUTPUT, self.num_fwd_kernel_returns)]

    @property
    def saved(self) -> list[Role]:
        """What the backward reads, in the order of `c2k_return_mapping`: its inputs."""
        return [Role(Kind.INPUT, self.num_inputs + m) for m, _ in enumerate(self.c2k_return_mapping)]

    def cotangents(self, *, final: bool) -> list[Role]:
        """Return the roles of cotangents: of outputs, and of final states (so also at one step) or of state sequences."""
        return [*roles(Kind.OUTPUT_GRAD, self.num_outputs), *roles(Kind.STATE_GRAD if final else Kind.STATES_GRAD, self.num_states)]

    def forward_roles(self) -> StepRoles:
        """Return the roles of a forward step."""
        stored = iter(self.returns)
        returns = [next(stored) if name != "_" else None for name in self.fwd_core_recipients]
        return StepRoles(self.args, returns, {v: self.returns[self.num_outputs + k] for k, v in enumerate(self.states)})

    def backward_roles(self, names: Sequence[str]) -> StepRoles:
        """Return the roles of a backward step with arguments of these names: after the saved values all cotangents, or those that it names
        `grad_k`, of return k."""
        given, every = list(names)[len(self.saved) :], self.cotangents(final=True)
        by_name = dict(zip(given, every, strict=True) if len(given) == len(every) else ((f"grad_{k}", r) for k, r in enumerate(every)))
        if not all(name in by_name for name in given):
            raise GraphCaptureError(
                f"a backward step of {len(self.saved)} saved values and cotangents {given}, for {len(every)} returns",
                hint="A step that lacks some cotangents names the others `grad_k`, of return k.",
            )
        returns = [r.grad for r in self.args]
        return StepRoles([*self.saved, *(by_name[name] for name in given)], returns, {v.grad: v.grad for v in self.states})

    # --- a call ----------------------------------------------------------------------------------------------------------------
    def dtypes(self, given: Mapping[Role, torch.dtype]) -> dict[Role, torch.dtype]:
        """Return dtypes in memory by role, of arguments, returns, saved values and gradients.

        Args:
            given: those of the call's operands, for what the info does not know.
        """
        known = [*self.args, *self.returns]
        if self.layout is not None:
            found = {r: m.dtype for r, m in zip(known, (*self.layout.args, *self.layout.returns), strict=True)}
            given = {}
        else:
            default = next((d for r, d in given.items() if r == Role(Kind.INPUT, 0) or r.kind.is_grad), torch.float32)
            found = {}
            for r in known:
                alike = (r, r.grad, r.to(Kind.STATES_GRAD)) if r.kind is Kind.STATE else (r, r.grad)
                found[r] = next((given[role] for role in alike if role in given), default)
            found |= {Role(Kind.OUTPUT, self.num_outputs + k): found[v] for k, v in enumerate(self.states)}
        saved = {r: given.get(r, found[Role(Kind.OUTPUT, j)]) for r, j in zip(self.saved, self.c2k_return_mapping, strict=True)}
        return found | saved | {r.grad: found[r] for r in known}

    def step_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the step shape of operands of these step shapes; what the core captures may make it larger.

        Raises:
            ShapeMismatchError: they do not broadcast.
        """
        larger = [self.layout.step] if self.layout is not None and self.layout.is_larger else []
        try:
            return shapes[0] if all(s == shapes[0] for s in (*shapes, *larger)) else tuple(torch.broadcast_shapes(*shapes, *larger))
        except RuntimeError:
            raise ShapeMismatchError(f"one-step shapes do not broadcast: {[list(s) for s in shapes]}") from None

    def check_shapes(self, given: Sequence[Shape | None], step: Shape) -> None:
        """Raise where an argument is larger than its example along a dim in which a return follows that example."""
        if self.layout is None or len(self.layout.step) != len(step):
            return
        for d in range(-len(step), 0):
            if self.layout.step[d] == 1 or all(_size(m.shape, d) != 1 for m in self.layout.returns):
                continue
            for name, meta, shape in zip(self.fwd_core_args, self.layout.args, given, strict=False):
                if _size(meta.shape, d) == 1 and _size(shape or (), d) != 1:
                    raise ShapeMismatchError(
                        f"operand `{name}` has steps of shape {list(shape or ())}, but its example was {list(meta.shape)}, "
                        "and so are results",
                        hint="Build the kernel from examples of the shapes that it is to take.",
                    )

    def return_shape(self, index: int, step: Shape) -> Shape:
        """Return the step shape of a kernel's return: smaller than `step` along the dims in which the traced one was."""
        if self.layout is None or len(self.layout.step) != len(step):
            return step
        own, whole = self.layout.returns[index].shape, self.layout.step
        return tuple([1 if own[d] == 1 and whole[d] != 1 else step[d] for d in range(-len(own), 0)])


def _size(shape: Shape, d: int) -> int:
    """Return the size of a dim counted from the last, 1 where the shape has no such dim."""
    return shape[d] if -d <= len(shape) else 1


def extract_info(fwd_graph: fx.Graph, num_inputs: int = 1, num_states: int = 0, num_outputs: int = 1) -> FlexSNInfo:
    """Return the info of a forward graph, `[*inputs, *states]` to `[*outputs, *states, *intermediates]`.

    Raises:
        ValueError: the graph has another number of arguments, or too few returns.
    """
    args = list(fwd_graph.find_nodes(op="placeholder"))
    values = output_values(fwd_graph)
    returned = [n for n in values if isinstance(n, fx.Node)]
    if min(num_inputs, num_states, num_outputs) < 0 or len(args) != num_inputs + num_states:
        raise GraphCaptureError(f"the graph takes {len(args)} arguments, not {num_inputs} inputs + {num_states} states")
    if len(returned) != len(values):
        raise GraphCaptureError("the graph returns values that it does not compute")
    if len(returned) < num_outputs + num_states:
        raise GraphCaptureError(f"the graph returns {len(returned)} values, fewer than {num_outputs} outputs + {num_states} states")
    recipients = [*(f"s{k}" for k in range(num_outputs)), *(f"v{k}" for k in range(num_states))]
    kept = returned[: len(recipients)]
    for node in returned[len(recipients) :]:
        recipients.append("_" if node in kept else f"res{len(kept) - num_outputs - num_states}_f")
        kept += [] if node in kept else [node]
    kernel_returns = [r for r in recipients if r != "_"]
    mapping = [kept.index(n) for n in returned[num_outputs + num_states :]]
    names = [n.name for n in args], [n.name for n in returned]
    info = FlexSNInfo(num_inputs, num_outputs, num_states, *names, recipients, kernel_returns, len(kernel_returns), mapping)
    if all(isinstance(n.meta.get("val"), Tensor) for n in (*args, *kept)):
        info.layout = StepLayout(tuple(map(meta_of, args)), tuple(map(meta_of, kept)))
    return info


def meta_of(node: fx.Node) -> Meta:
    """Return shape and dtype of a node's value; of one that has none, those of a float32 example."""
    val: Any = node.meta.get("val")
    return Meta(tuple(val.shape), val.dtype) if isinstance(val, Tensor) else Meta((2, 3), torch.float32)
