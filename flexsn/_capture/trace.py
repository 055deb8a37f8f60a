"""Capture: run a core once on fake tensors and write down every ATen op, with the user's source line.

One dispatch mode records both step graphs: the core alone (`forward`), and the core followed by
`torch.autograd.grad` of it (`vjp`). Every node of the result has a kind:

- `static`: does not depend on time (params, captured tensors and what is computed from them): the prologue;
- `step`: depends on an input, a state or a cotangent, element by element: the kernel;
- `reduced` (vjp only): a linear function of sums over neurons, on the way to the gradient of a param: the epilogue.

The mode sees what a replay of the graph would get wrong, and refuses it: random numbers, `.item()`, Python control
flow on values, writes into operands or captured tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch.autograd import saved_tensors_hooks_there
from .._torch.capture import start_autograd, uncached_parametrizations, without_compiled_autograd
from .._torch.fake_tensors import LightFakeMode, fake_errors_unlogged
from ..errors import SideEffectError
from .recorder import mapped
from .restrictions import ValueReads, run_refusing
from .signature import Signature, check_returns, check_values
from .vjp_recorder import VjpRecorder


class Meta(NamedTuple):
    """Shape and dtype of an operand at one step."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass
class Trace:
    """A recorded core: an ATen graph whose nodes carry `kind`, `val` (fake) and `line`."""

    graph: fx.Graph
    operands: list[fx.Node]  # inputs, states, params
    cotangents: list[fx.Node | None]  # one per return; None where the return is not differentiable
    returns: list[fx.Node]  # outputs, then new states
    grads: list[fx.Node | None]  # vjp: one per operand, then one per captured tensor
    flows: list[list[fx.Node]] = field(default_factory=list)  # vjp: of each return, to which of these autograd's graph leads from it
    captured: dict[str, fx.Node] = field(default_factory=dict)  # captured tensors that the core used, by path
    constants: dict[str, Tensor] = field(default_factory=dict)  # tensors that the core made from Python values
    shapes_read: tuple[tuple[int, ...], ...] = ()  # of tensors that depend on time, of which the core, or then its VJP, read a size
    ranks_read: tuple[int, ...] = ()  # of such tensors whose number of dims it read

    def metas(self) -> list[Meta]:
        return [Meta(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in self.returns]

    def text(self) -> str:
        """Everything that a kernel depends on, without shapes: equal texts, equal kernels."""
        lines = []
        for node in self.graph.nodes:
            args = [node.args, sorted(node.kwargs.items())] if node.op == "call_function" else []
            if "uniform" in node.meta and all(user.meta.get("kind", node.meta["kind"]) == "step" for user in node.users):
                args = [node.meta["uniform"], node.meta.get("of")]  # a number in the kernel, whatever its shape
            lines.append(f"{node.name} {node.meta.get('kind')} {node.target} {args} {getattr(node.meta.get('val'), 'dtype', '')}")
        lines += [f"{name} {tensor.tolist()}" for name, tensor in self.constants.items()]
        return "\n".join(lines) + f"\n{self.returns} {self.grads} {self.cotangents}"


class SelfDifferentiating:
    """A core that differentiates another inside."""

    recorder: Any = None  # what writes down the run

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run one step."""
        raise NotImplementedError

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """While inside, ops are those of a backward, which may sum over neurons."""
        before = self.recorder.in_backward, self.recorder.trains_params
        self.recorder.in_backward = self.recorder.trains_params = True
        try:
            yield
        finally:
            self.recorder.in_backward, self.recorder.trains_params = before


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing of the caller's sees the trace: saved-tensor hooks, anomaly mode, compiled autograd, the cache of parametrizations."""
    anomaly = torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(False)
    hidden = saved_tensors_hooks_there()  # `torch.func.grad` inside the core allows none
    hiding = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hidden else contextlib.nullcontext()
    try:
        with hiding, without_compiled_autograd(), uncached_parametrizations():
            yield
    finally:
        torch.autograd.set_detect_anomaly(anomaly, torch.is_anomaly_check_nan_enabled())


@contextlib.contextmanager
def _settings_kept(sig: Signature) -> Iterator[None]:
    """Refuse a core that changes PyTorch's settings, and undo it."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        changed = ["the default dtype"] * (torch.get_default_dtype() != dtype) + ["the grad mode"] * (torch.is_grad_enabled() != grad)
        if changed:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
    if changed:
        raise SideEffectError(f"changes {' and '.join(changed)} of PyTorch", core=sig.core, hint="Do that outside the core.")


_now = threading.local()


def recording() -> VjpRecorder:
    """Return what writes down the core that runs on this thread."""
    return _now.recorder


@contextlib.contextmanager
def _recorded_by(recorder: VjpRecorder) -> Iterator[None]:
    before = getattr(_now, "recorder", None)
    _now.recorder = recorder
    try:
        yield
    finally:
        _now.recorder = before


def _let_go(graph: fx.Graph) -> None:
    """The values of a trace forget autograd's graph and what they are views of, which hold the captured tensors of the caller."""
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = mapped(node.meta["val"], lambda t: t.detach() if t.requires_grad or t._is_view() else t)


def trace(
    core: Callable, sig: Signature, metas: Sequence[Meta], device: torch.device, captured: dict[str, Tensor], *, vjp: bool,
    num_outputs: int | None = None,
) -> Trace:  # fmt: skip
    """Record one step of `core` for operands of the given metas (inputs, states, params).

    Args:
        captured: real tensors that the core may meet, by path.
        vjp: also differentiate, with one cotangent per differentiable return.

    Raises:
        FlexSNError: what the core does cannot be recorded faithfully; the class says what.
    """
    start_autograd()
    fake = LightFakeMode()
    recorder = VjpRecorder(sig, fake, device, captured, vjp)
    with fake_errors_unlogged(), _undisturbed(), fake, torch.inference_mode(False), torch.set_grad_enabled(vjp):
        operands = []
        for i, meta in enumerate(metas):
            static = i >= sig.num_inputs + sig.num_states
            operand = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            operand.requires_grad_(vjp and (meta.dtype.is_floating_point or meta.dtype.is_complex))
            recorder.placeholder(operand, sig.names[i], "static" if static else "step")
            operands.append(operand)
        if isinstance(core, SelfDifferentiating):
            core.recorder = recorder
        with _recorded_by(recorder), recorder, ValueReads(recorder), _settings_kept(sig):
            returned = run_refusing(core, operands, recorder)
        values = check_returns(sig, returned, num_outputs)
        check_values(sig, values, device)
        returns = [recorder.node_of(v) for v in values]
        grads: list[fx.Node | None] = []
        cotangents: list[fx.Node | None] = [None] * len(values)
        if vjp:
            grads = recorder.differentiate(values, operands, cotangents)
            recorder.raise_refusals()
        _let_go(recorder.graph)
    recorder.graph.output((returns, grads))
    operand_nodes = list(recorder.graph.nodes)[: len(operands)]
    return Trace(
        recorder.graph, operand_nodes, cotangents, returns, grads, recorder.flows, recorder.captured_nodes, recorder.constants,
        tuple(recorder.shapes_read), tuple(recorder.ranks_read),
    )  # fmt: skip
