"""The gradients of a core, written down as autograd computes them, op by op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch.capture import run_backward, without_tensor_hooks
from .._torch.fake_tensors import disable_modes
from ..errors import FlexSNError, InPlaceError, ParamGradientError, UnsupportedOpError
from .recorder import Recorder, behind, is_nil
from .restrictions import ValueReads


class VjpRecorder(Recorder):
    """Writes down what a core does, and then its gradients: the VJP of one step."""

    def differentiate(self, values: Sequence[Tensor], operands: list[Tensor], cotangents: list[fx.Node | None]) -> list[fx.Node | None]:
        for tensor in _trained(values, [t for t, _ in self.real.values() if t.requires_grad]):
            self.node_of(tensor)  # one that nothing but a backward may read has met no op yet
        sources = list(operands) + list(self.captured_tensors.values())
        wanted = [t for t in sources if t.requires_grad]
        self.trains_params = any(self.node_of(t).meta["kind"] == "static" for t in wanted)
        self.flows = [[self.node_of(t) for t in _trained([value], wanted)] for value in values]
        given = {}
        for i, value in enumerate(values):
            if value.requires_grad:
                given[i] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                cotangents[i] = self.placeholder(given[i], f"grad_{i}", "step")
                self.cotangents.add(cotangents[i])
        if not given or not wanted:
            return [None] * len(sources)
        self.in_backward = True
        with self, ValueReads(self), without_tensor_hooks(wanted):
            found = iter(self.gradients(values, wanted, given, cotangents))
        per_source = [next(found) if t.requires_grad else None for t in sources]
        if self.inner is not None:  # one part for every value of a param
            per_source = [None if g is None else self.inner.whole(g) for g in per_source]
        grads = [None if g is None else self.pairs.summed(self.node_of(g)) for g in per_source]
        for source, grad in zip(sources, grads, strict=True):
            if grad is not None:
                self.check_gradient(self.node_of(source), grad)
        return grads

    def check_gradient(self, source: fx.Node, grad: fx.Node) -> None:
        """A kernel gives the gradients of inputs and states neuron by neuron, and those of params as sums over time."""
        kinds = source.meta["kind"], grad.meta["kind"]
        if kinds == ("step", "reduced"):
            reduced = [n for n in behind([grad]) if n.meta["kind"] == "reduced"]
            first = next(n for n in reduced if not any(a in reduced for a in n.all_input_nodes))
            raise self.mixing(first.target, first.meta["line"], f", and the gradient of `{self.operand_names[source]}` depends on it")
        if kinds == ("static", "static") and not is_nil(grad) and not self.zeros(grad):
            raise ParamGradientError(
                f"the gradient of `{source.meta['role']}` depends on no cotangent: it would be added once, and not at every step",
                core=self.sig.core, line=grad.meta.get("line"),
                hint="Put that term into the loss, or add it to the gradient after the backward.",
            )  # fmt: skip

    def zeros(self, node: fx.Node) -> bool:
        """Whether a node is a tensor of zeros that the core made of Python values."""
        with disable_modes():
            return node.name in self.constants and not self.constants[node.name].any()

    def gradients(
        self, values: Sequence[Tensor], wanted: list[Tensor], given: dict[int, Tensor], cotangents: list[fx.Node | None]
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """As autograd gives them. Where PyTorch lacks the derivative of all that the core returns, nothing is differentiable; where it
        lacks some, which ones a call needs is not known here."""

        def grad(roots: list[int], sources: list[Tensor]) -> Sequence[Tensor | None] | RuntimeError:
            outs, cots = [values[i] for i in roots], [given[i] for i in roots]
            try:
                return run_backward(outs, cots, sources)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):  # eager may need no gradient of what was
                    hint = "Use the form without the underscore."
                    raise InPlaceError("writes in place into what its gradient needs", core=self.sig.core, hint=hint) from None
                if isinstance(error, FlexSNError) or "is not implemented" not in str(error):
                    raise
                return error

        def there(found: Sequence[Tensor | None] | RuntimeError) -> bool:
            return not isinstance(found, RuntimeError) and any(g is not None for g in found)

        error = found = grad(list(given), wanted)
        if not isinstance(found, RuntimeError):
            return found
        if any(there(grad([i], [source])) for i in given for source in wanted):
            raise UnsupportedOpError(
                f"cannot be differentiated whole: {error}", core=self.sig.core,
                hint="Detach what that op takes (`h.detach()`), or use a surrogate (`flexsn.surrogate`).",
            )  # fmt: skip
        for i in list(given):
            del given[i]
            cotangents[i] = None
        return [None] * len(wanted)

    stops = (differentiate.__code__,)  # autograd's frames are none of the user's


def _trained(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of `tensors`, leaves, that autograd's graph of `values` leads to."""
    leaves = {id(t): t for t in tensors}
    found, seen, stack = [leaves[id(v)] for v in values if id(v) in leaves], set[Any](), [v.grad_fn for v in values]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [before for before, _ in node.next_functions]
        tensor = leaves.get(id(getattr(node, "variable", None)))
        if tensor is not None:
            found.append(tensor)
    return found
