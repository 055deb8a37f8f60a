"""What a multi-step kernel knows about its step: how many of what, under which names, of which dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._capture.trace import Meta
from ..errors import GraphCaptureError, ShapeMismatchError
from .graphs import output_values

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Dtypes and shapes of a step as it was traced: of its arguments, and of the kernel's returns."""

    args: tuple[Meta, ...]
    returns: tuple[Meta, ...]

    @property
    def step(self) -> Shape:
        return tuple(torch.broadcast_shapes(*[m.shape for m in (*self.args, *self.returns)]))

    def step_of(self, common: Shape) -> Shape:
        """The step shape of a call whose operands broadcast to `common`; what the core captures may make it larger."""
        if self.step == tuple(torch.broadcast_shapes(*[m.shape for m in self.args])):
            return common
        return tuple(torch.broadcast_shapes(common, self.step))

    def narrow(self, step: Shape) -> set[int]:
        """Dims, from the last (-1), along which a return was smaller than the step that was traced."""
        if len(self.step) != len(step):
            return set()
        dims = range(-len(step), 0)
        return {d for d in dims if self.step[d] != 1 and any(-d > len(m.shape) or m.shape[d] == 1 for m in self.returns)}

    def return_shape(self, index: int, step: Shape) -> Shape:
        """Of a return, at step shape `step`: smaller along the dims in which the traced one was."""
        own, whole = self.returns[index].shape, self.step
        if len(whole) != len(step):
            return step
        offset = len(whole) - len(own)
        return tuple([1 if n == 1 and whole[d + offset] != 1 else step[d + offset] for d, n in enumerate(own)])


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

    layout: Layout | None = None

    @property
    def num_returns(self) -> int:
        """Outputs and states."""
        return self.num_outputs + self.num_states


def extract_info(fwd_graph: fx.Graph, num_inputs: int = 1, num_states: int = 0, num_outputs: int = 1) -> FlexSNInfo:
    """The info of a forward graph, `[*inputs, *states]` to `[*outputs, *states, *intermediates]`.

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
    core_args, core_returns = [n.name for n in args], [n.name for n in returned]
    info = FlexSNInfo(
        num_inputs, num_outputs, num_states, core_args, core_returns, recipients, kernel_returns, len(kernel_returns), mapping
    )
    if all(isinstance(n.meta.get("val"), Tensor) for n in (*args, *kept)):
        info.layout = Layout(tuple(map(meta_of, args)), tuple(map(meta_of, kept)))
    return info


def meta_of(node: fx.Node) -> Meta:
    """Shape and dtype of a node's value; of one that has none, those of a float32 example."""
    val: Any = node.meta.get("val")
    return Meta(tuple(val.shape), val.dtype) if isinstance(val, Tensor) else Meta((2, 3), torch.float32)


# --- a call ------------------------------------------------------------------------------------------------------------------
def dtypes(info: FlexSNInfo, given: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Dtypes in memory by role: `x*` inputs, `v*` states, `y*` the kernel's returns.

    Args:
        given: those of the call's operands, for what the info does not know.
    """
    default = next((d for r, d in given.items() if r == "x0" or r[0] == "g"), torch.float32)
    ins = [f"x{k}" for k in range(info.num_inputs)] + [f"v{k}" for k in range(info.num_states)]
    outs = [f"y{k}" for k in range(info.num_fwd_kernel_returns)]
    if info.layout is not None:
        return {r: m.dtype for r, m in zip((*ins, *outs), (*info.layout.args, *info.layout.returns), strict=True)}
    found = {}
    for r in (*ins, *outs):
        alike = (r, f"g{r}", f"gs{r[1:]}") if r[0] == "v" else (r, f"g{r}")
        found[r] = next((given[role] for role in alike if role in given), default)
    return found | {f"y{info.num_outputs + k}": found[f"v{k}"] for k in range(info.num_states)}


def step_shape(info: FlexSNInfo, shapes: Sequence[Shape]) -> Shape:
    """The step shape of operands of these step shapes.

    Raises:
        ShapeMismatchError: they do not broadcast.
    """
    first = shapes[0]
    try:
        common = first if all(s == first for s in shapes) else tuple(torch.broadcast_shapes(*shapes))
        return common if info.layout is None else info.layout.step_of(common)
    except RuntimeError:
        listed = ", ".join(str(list(s)) for s in shapes)
        raise ShapeMismatchError(f"one-step shapes do not broadcast: {listed}") from None


def check_narrow(info: FlexSNInfo, given: Sequence[Shape | None], step: Shape) -> None:
    """Raise where an operand is larger than its example along a dim in which a return follows that example."""
    if info.layout is None:
        return
    for d in info.layout.narrow(step):
        for name, meta, shape in zip(info.fwd_core_args, info.layout.args, given, strict=False):
            traced, now = (1 if s is None or -d > len(s) else s[d] for s in (meta.shape, shape))
            if traced == 1 and now != 1:
                raise ShapeMismatchError(
                    f"operand `{name}` has steps of shape {list(shape or ())}, but its example was {list(meta.shape)}, and so are results",
                    hint="Build the kernel from examples of the shapes that it is to take.",
                )


def return_shape(info: FlexSNInfo, index: int, step: Shape) -> Shape:
    """The step shape of a kernel's return."""
    return step if info.layout is None else info.layout.return_shape(index, step)
