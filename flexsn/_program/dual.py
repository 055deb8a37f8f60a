"""The dual core: a core and its derivative along tangents as one more core, from which forward mode and second derivatives are made.

The derivative along tangents `u` comes from two gradients: with `g(c)` the gradient for cotangents `c`, it is the gradient of `<g(c), u>`
in `c`. So whatever autograd differentiates twice has one, surrogates and the user's own backwards among them.

What it gains: the Hessian of three parameters of a Hodgkin-Huxley neuron over 1,000 steps takes 0.055 s by `torch.func.hessian` and 0.033 s
by `create_graph=True`, where the eager loop takes 15.4 s and 7.5 s (`python benchmarks/derivatives.py`, two CPU cores, 2026-11-26).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._capture.recorder import behind
from .._capture.signature import Signature
from .._capture.trace import Meta, SelfDifferentiating
from .._captured.captured_values import lock
from .._runtime.backends import backend_of
from .._torch.capture import no_modes, run_backward
from ..errors import DoubleBackwardError
from .captured import Shapes, draw
from .compiled import Program

_MOST = 64  # programs of one dual core: one for each shape of its operands
Source = Callable[[], tuple[Callable, dict[str, Tensor]]]  # gives a core on stand-ins of what it captures, and these by path


class Dual(SelfDifferentiating):
    """`core(*x, *dx, *v, *dv, *params, *dparams) -> (*y, *dy, *v, *dv)`; `dparams`: of params and captured tensors.

    Args:
        statics: names of its params and of the captured tensors that calls pass.
        moving: of inputs, states and statics, whether they have a tangent.

    Attributes:
        moving: places of the operands that have one.
    """

    core: Callable  # on stand-ins of what it captures
    captured: dict[str, Tensor]  # these, by path

    def __init__(self, backend: str, sig: Signature, num_outputs: int, statics: Sequence[str], moving: Sequence[bool]):
        self.backend, self.given, self.statics = backend, sig, statics
        self.moving = [k for k, there in enumerate(moving) if there]
        i, n = sig.num_inputs, sig.num_inputs + sig.num_states
        self.groups = [k for k in self.moving if k < i], [k for k in self.moving if i <= k < n], [k for k in self.moving if k >= n]
        tangents = [[f"tangent_{k}" for k in group] for group in self.groups]
        names = *sig.input_names, *tangents[0], *sig.state_names, *tangents[1], *sig.param_names, *tangents[2]
        sizes = i + len(tangents[0]), n - i + len(tangents[1]), sig.num_params + len(tangents[2])
        self.sig, self.num_outputs = Signature(f"{sig.core}, differentiated", *sizes, names), num_outputs
        self._programs: dict[tuple, Program] = {}

    def on(self, source: Source) -> Dual:
        """Return the same dual core over a core that can run. What programs keep of it leads to nothing of the user's."""
        made = copy.copy(self)
        made.core, made.captured = source()
        return made

    def program(self, source: Source, metas: Sequence[Meta | None], device: torch.device, trains: bool) -> tuple[Program, Shapes]:
        """Return the program for operands of these metas, with its VJP if it `trains`; captured from `source`, if it is new."""
        key = (tuple(metas), device)
        with lock, no_modes():
            found = self._programs.get(key)
            if found is None or (trains and found.blueprint.vjp is None):
                dual = self.on(source)
                found = found or Program(self.backend, draw(dual, self.sig, metas, device, dual.captured), device)
                if trains:
                    found.differentiate(dual, dual.captured)
                self._programs[key] = found
                while len(self._programs) > _MOST:
                    del self._programs[next(iter(self._programs))]
        shapes = found.blueprint.shapes([m.shape for m in metas[: self.sig.num_inputs + self.sig.num_states] if m is not None])
        assert shapes is not None, "it was made for them"
        return found, shapes

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run one step."""
        if isinstance(self.core, SelfDifferentiating):
            self.core.recorder = self.recorder
        sig, given = self.given, iter(operands)
        sizes = sig.num_inputs, sig.num_states, sig.num_params
        own, tangents = list[Tensor](), dict[int, Tensor]()
        for size, group in zip(sizes, self.groups, strict=True):
            own += [next(given) for _ in range(size)]
            tangents |= {k: next(given) for k in group}
        with torch.enable_grad():
            own = [t if t.requires_grad or not (t.is_floating_point() or t.is_complex()) else t.detach().requires_grad_() for t in own]
            everything = [*own, *[self.captured[name] for name in self.statics[sig.num_params :]]]
            returned = self.core(*own)
            returned = (returned,) if isinstance(returned, Tensor) else tuple(returned)
            moved = self._derivatives(returned, {k: everything[k] for k in self.moving}, tangents)
        if not torch.is_grad_enabled():
            returned, moved = [t.detach() for t in returned], [t.detach() for t in moved]
        outs = self.num_outputs
        carried = [moved[outs + k - sig.num_inputs] for k in self.groups[1]]
        outputs = [t for y, t in zip(returned[:outs], moved, strict=False) if y.is_floating_point()]
        return *returned[:outs], *outputs, *returned[outs:], *carried

    def _derivatives(self, returned: Sequence[Tensor], leaves: dict[int, Tensor], tangents: dict[int, Tensor]) -> list[Tensor]:
        """Return the derivatives of what the core returned."""
        there = [k for k, y in enumerate(returned) if y.requires_grad]
        cotangents = [returned[k].detach().clone().requires_grad_() for k in there]  # any, since gradients are linear in them
        found: dict[int, Tensor | None] = {}
        if there and leaves:
            with self.in_backward():
                grads = run_backward([returned[k] for k in there], cotangents, list(leaves.values()), create_graph=True)
                pairs = [(g, tangents[k].to(g.dtype)) for k, g in zip(leaves, grads, strict=True) if g is not None and g.requires_grad]
                if pairs:
                    moved = run_backward([g for g, _ in pairs], [u for _, u in pairs], cotangents, create_graph=True)
                    nodes = map(self.recorder.node_of, [t for t in moved if t is not None])
                    if not {*map(self.recorder.node_of, cotangents)}.isdisjoint(behind([*nodes])):
                        raise DoubleBackwardError(
                            "is differentiated twice, or in forward mode, but a backward of its own is not linear in the gradient that it "
                            "is given", core=self.given.core, hint='Use backend="torch", the eager loop.',
                        )  # fmt: skip
                    found = dict(zip(there, moved, strict=True))
        return [torch.zeros_like(y) if (t := found.get(k)) is None else t for k, y in enumerate(returned)]


def dual_of(program: Program, statics: Sequence[str], moving: Sequence[bool]) -> Dual:
    """Return the dual core of a program along tangents of what is `moving`, made on first use."""
    with lock:
        key = (*statics, *moving)
        if key not in program.duals:
            program.duals[key] = Dual(backend_of(program.device), program.sig, program.num_outputs, statics, moving)
        return program.duals[key]
