"""What `flexsn.monitor` has seen of one layer: sums that stay on the device until they are read, and the sequences asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import MonitorError


@dataclass
class Limits:
    """From where on a layer is reported; rates are spikes per neuron and step."""

    silent: float = 1e-3  # a layer of a lower rate
    saturated: float = 0.9  # a layer of a higher rate, and a neuron that counts as saturated
    vanishing: float = 1e-3  # a gradient smaller than this times the largest one among the layers


@dataclass
class Norm:
    """Root mean square, over calls, of a gradient's L2 norm; sums stay on the device until they are read."""

    squares: Any = 0.0
    calls: int = 0

    def add(self, grad: Tensor | None) -> None:
        if grad is None:  # the backward passed by: a later call reached back through the carried states alone
            return
        norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float64)
        self.squares, self.calls = self.squares + norm * norm, self.calls + 1

    def value(self) -> float | None:
        return math.sqrt(float(self.squares) / self.calls) if self.calls else None


@dataclass
class LayerRecord:
    """What one layer did.

    Of its output, or of the first where there are several, dims 0 and 1 are time and batch, or dim 0 alone is the batch from a
    layer that is called once per step; what is left are its neurons. A sequence of two dims has no batch.

    Attributes:
        name: as in `model.named_modules()`; `kind`: the class.
        calls: how often it was called.
        spikes, states: the whole sequences of the last `keep` calls, detached copies, if asked for: a list, and a dict of
            lists by the name of the state. Of a layer that is no `FlexSN` a state is what its attribute was after each call.
    """

    name: str
    kind: str
    limits: Limits
    calls: int = 0
    spikes: Any = None
    states: dict[str, Any] = field(default_factory=dict)
    _total: Any = 0.0
    _count: int = 0
    _counts: Any = 0.0  # spikes per neuron; None once calls differ in their shape
    _binary: Any = True
    _output: Norm = field(default_factory=Norm)
    _params: dict[str, Norm] = field(default_factory=dict)

    # --- read -------------------------------------------------------------------------------------------------------
    @property
    def rate(self) -> float | None:
        """Mean of the output: spikes per neuron and step; None before the first call."""
        return float(self._total) / self._count if self._count else None

    @property
    def rates(self) -> Tensor | None:
        """Mean of every neuron `[*shape]`, float64; None before the first call and where calls differ in shape."""
        return self._counts / (self._count / self._counts.numel()) if isinstance(self._counts, Tensor) and self._count else None

    @property
    def spiking(self) -> bool:
        """Whether every output was 0 or 1."""
        return bool(self._binary)

    @property
    def silent(self) -> float | None:
        """Fraction of neurons that never gave anything but 0."""
        return None if self.rates is None else float((self.rates == 0).double().mean())

    @property
    def saturated(self) -> float | None:
        """Fraction of neurons that spike at more than `limits.saturated` of all steps; None if they do not spike."""
        return None if self.rates is None or not self.spiking else float((self.rates > self.limits.saturated).double().mean())

    @property
    def gradient_norm(self) -> float | None:
        """L2 norm of the loss' gradient by this layer's output (root mean square over calls); None if there was none."""
        return self._output.value()

    @property
    def param_gradient_norms(self) -> dict[str, float]:
        """The same by each parameter of the layer that got a gradient, by name (root mean square over backward passes)."""
        values = {name: norm.value() for name, norm in self._params.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def param_gradient_norm(self) -> float | None:
        """The L2 norm over all of them; None if there was none."""
        norms = self.param_gradient_norms.values()
        return math.sqrt(sum(n * n for n in norms)) if norms else None

    # --- written by the hooks ---------------------------------------------------------------------------------------
    def see(self, output: Tensor, states: dict[str, Tensor], leading: int) -> None:
        """Count what a call returned; `leading`: how many dims are time and batch."""
        y = output.detach()
        neurons = y.shape[min(leading, max(0, y.dim() - 1)) :]
        counts = y.sum(dim=list(range(y.dim() - len(neurons))), dtype=torch.float64) if neurons != y.shape else y.double()
        self._counts = self._counts + counts if not self.calls or _shape(self._counts) == counts.shape else None
        self._total, self._count = self._total + counts.sum(), self._count + y.numel()
        self._binary = self._binary & ((y == 0) | (y == 1)).all()
        self.calls += 1
        if self.spikes is not None:
            self.spikes.append(y.clone())
        for name, sequence in states.items():
            self.states[name].append(sequence.detach().clone())
        self.follow(output)

    def follow(self, output: Tensor) -> None:
        """Take the norm of the gradient that comes back to what a call returned."""
        if output.requires_grad:
            output.register_hook(self._output.add)


def _shape(counts: Any) -> torch.Size | None:
    return counts.shape if isinstance(counts, Tensor) else None


class States(dict[str, Any]):
    """Sequences by the name of the state."""

    def __missing__(self, name: Any) -> Any:
        raise MonitorError(
            f"the state {name!r} was not kept", hint=f"Kept are {list(self)}; ask for it: `flexsn.monitor(model, states=[{name!r}])`."
        )
