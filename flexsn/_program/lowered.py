"""A captured core, lowered: the closed graph of one step, and what PyTorch computes around it. This is what programs are made from and
what their texts hold; lowering happens once, at the capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .._capture.signature import Signature
from .._capture.trace import Meta, Trace
from .._ir.graph import Graph
from .._ir.lowering import lower
from .._ir.roles import Kind, Role, roles
from .._torch.capture import no_modes
from .static_parts import StaticGraph, frontier, static_graph


@dataclass
class LoweredStep:
    """One step of a core.

    Attributes:
        graph: `x* v* p* -> y* v*`.
        statics: what its params are computed from.
        captured: names of the captured tensors that were recorded, in order.
    """

    graph: Graph
    statics: StaticGraph
    captured: tuple[str, ...]


@dataclass
class LoweredVjp(LoweredStep):
    """The VJP of one step, with the new states: one graph, `x* v* p* gy* gv* -> gx* gv* gp* v*`.

    Attributes:
        differentiable: of each output and new state, whether it has a cotangent.
        flows: of each, the operands to which autograd's graph leads from it: inputs and states by place, params and captured
            tensors by name.
    """

    differentiable: tuple[bool, ...]
    flows: list[frozenset[int | str]]


def lower_step(sig: Signature, recorded: Trace, num_outputs: int, states: Sequence[Meta], device: torch.device) -> LoweredStep:
    """Lower a recorded core.

    Args:
        states: metas of the states as they go from step to step.
        device: whose eager rules hold.
    """
    outputs = dict(zip((*roles(Kind.OUTPUT, num_outputs), *_states(sig)), recorded.returns, strict=True))
    with no_modes():
        graph, params = lower(sig.core, _leaves(sig, recorded), outputs, _carried(sig, states), device)
    return LoweredStep(graph, static_graph(recorded, params), tuple(recorded.captured))


def lower_vjp(sig: Signature, recorded: Trace, num_outputs: int, states: Sequence[Meta], device: torch.device) -> LoweredVjp:
    """Lower a core that was recorded with its VJP; arguments as for `lower_step`."""
    ins = sig.num_inputs + sig.num_states
    returns = (*roles(Kind.OUTPUT_GRAD, num_outputs), *roles(Kind.STATE_GRAD, sig.num_states))
    leaves = _leaves(sig, recorded)
    leaves |= {role: c for role, c in zip(returns, recorded.cotangents, strict=True) if c is not None}
    grads = recorded.grads
    outputs = {Role(Kind.INPUT_GRAD, k): g for k, g in enumerate(grads[: sig.num_inputs]) if g is not None}
    # a carried cotangent is an output even where no gradient flows through the state: it is zero then
    zero = recorded.graph.call_function(torch.ops.aten.full.default, ([], 0.0))
    for k, role in enumerate(roles(Kind.STATE_GRAD, sig.num_states), sig.num_inputs):
        node = grads[k]
        if node is None and role in leaves:
            zero.meta.update(kind="step", val=recorded.operands[k].meta["val"], uniform=0.0, line=None)
            node = zero
        if node is not None:
            outputs[role] = node
    outputs |= {Role(Kind.PARAM_GRAD, k): n for k, n in enumerate(frontier(grads[ins:]))}
    outputs |= dict(zip(_states(sig), recorded.returns[num_outputs:], strict=True))
    carried = _carried(sig, states)
    with no_modes():
        graph, params = lower(sig.core, leaves, outputs, {v.grad: d for v, d in carried.items()} | carried, device)
    statics = static_graph(recorded, params, grads[ins:], {leaf.name: role for role, leaf in leaves.items()})
    differentiable = tuple(c is not None for c in recorded.cotangents)
    return LoweredVjp(graph, statics, tuple(recorded.captured), differentiable, _flows(sig, recorded, differentiable))


def _states(sig: Signature) -> tuple[Role, ...]:
    return roles(Kind.STATE, sig.num_states)


def _leaves(sig: Signature, recorded: Trace) -> dict[Role, fx.Node]:
    return dict(zip((*roles(Kind.INPUT, sig.num_inputs), *_states(sig)), recorded.operands, strict=False))


def _carried(sig: Signature, states: Sequence[Meta]) -> dict[Role, torch.dtype]:
    return {v: m.dtype for v, m in zip(_states(sig), states, strict=True)}


def _flows(sig: Signature, recorded: Trace, differentiable: Sequence[bool]) -> list[frozenset[int | str]]:
    ins = sig.num_inputs + sig.num_states
    sources: dict[fx.Node, int | str] = {n: k for k, n in enumerate(recorded.operands[:ins])}
    sources |= dict(zip(recorded.operands[ins:], sig.param_names, strict=True))
    sources |= {n: name for name, n in recorded.captured.items()}
    return [_named(sources, nodes) if there else frozenset() for nodes, there in zip(recorded.flows, differentiable, strict=True)]


def _named(sources: Mapping[fx.Node, int | str], nodes: Sequence[fx.Node]) -> frozenset[int | str]:
    return frozenset([sources[n] for n in nodes])
