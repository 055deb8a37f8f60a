"""Fuses the pointwise ops that stand before a neuron in a compiled network, such as a batch norm, into the neuron's kernel.

Inductor cannot fuse into a kernel that it did not write, so the graph is rewritten before it. Where a short chain of pointwise
ops makes an input from one tensor of its size, and from smaller ones that are the same at every step, the kernel takes that
tensor: the chain becomes part of the program, and the smaller tensors are params of it. The core sees the numbers that eager
PyTorch would compute, rounded at the same places.

The gain: 5 to 10% of a training step of a compiled spiking VGG-11 (T = 4 and 16, batch 128, one H200), and the memory of the batch
norms' results. `python benchmarks/network.py --output FILE --only relu_compiled flexsn_stateless_compiled`, with `--without-fusion` and
without it, measures it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._capture.signature import Signature
from .._capture.trace import Meta
from .._ir.graph import HALF, Node
from .._ir.identifiers import identifier
from .._ir.lowering import Lowering
from .._ir.roles import Kind, Role
from .._operator.library import KERNEL_OPERATORS
from .._program.cache import program_from
from .._program.captured import Blueprint
from .._program.lowered import LoweredStep
from .._program.serialize import read, write
from .._torch.availability import FUSION, moved
from .._torch.tensors import is_symbolic, size_expression

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_ARITHMETIC = [getattr(getattr(aten, op), kind) for op in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")]
_OPS = {_CAST, aten.neg.default, *_ARITHMETIC}
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_FLOATS = {*HALF, torch.float32, torch.float64}
_LONGEST = 12  # ops of a chain, which a backward computes twice
DEVICES = {"cuda"}  # where that is faster: on a CPU, spreading params over a tile takes longer than the pass over memory


class ValueAt(NamedTuple):
    """An earlier value of a chain by its place: the source, then the smaller tensors, then the results of the steps."""

    place: int


class Step(NamedTuple):
    op: Any
    args: tuple[Any, ...]  # numbers, and `ValueAt` for tensors
    dtype: torch.dtype


class Chain(NamedTuple):
    """The ops that make an input from its source."""

    smaller: tuple[Meta, ...]
    steps: tuple[Step, ...]


# --- in the compiled graph --------------------------------------------------------------------------------------------------------
@functools.cache
def register() -> None:
    """Rewrite graphs before Inductor takes them, from now on; not where this PyTorch lacks a name for it."""
    if not moved(FUSION):
        from .._torch.inductor import rewrite

        for operator in KERNEL_OPERATORS:
            rewrite(operator, lambda node: fuse(node))


def fuse(node: Any) -> None:
    """Rewrite a call of `flexsn::forward` or `flexsn::backward`, where a chain makes one of its inputs."""
    for k, made in enumerate(list(node.args[1])):
        found = _chain_of(made)
        if found is None:
            continue
        chain, source, smaller = found
        device = made.meta["val"].device
        program, inputs, states, params, *others = node.args
        rewritten = with_chain(program, k, chain, program_from(program, device).ops, device)
        if rewritten is None:
            continue
        longer, names = rewritten
        backward = node.target is torch.ops.flexsn.backward.default
        before, after = [list(_params(p, device, backward).values()) for p in (program, longer)]
        given = dict(zip([n.name for n in before], params, strict=True))
        with node.graph.inserting_before(node):
            own = {name: _without_time(q, made) for name, q in zip(names, smaller, strict=True)}
            inputs = [*inputs[:k], _as_sequence(source, made), *inputs[k + 1 :]]
        node.args = (longer, inputs, states, [(given | own)[n.name] for n in after], *others)
        _erase_unused(made)


def _params(program: str, device: torch.device, backward: bool) -> dict[Role, fx.Node]:
    made = program_from(program, device)
    return made.vjp.params if backward else made.params


def _chain_of(made: Any) -> tuple[Chain, Any, list[Any]] | None:
    """Return the chain that makes an input, its source and the smaller tensors; None unless a chain makes it, for this neuron alone."""
    last = _behind_views(made)
    if last is None or last.target not in _OPS or made.meta["val"].device.type not in DEVICES:
        return None
    whole = last.meta["val"].shape
    nodes, smaller, source, stack = set[Any](), list[Any](), None, [last]
    while stack:
        node = stack.pop()
        if node in nodes or node in smaller or node is source:
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.device != made.meta["val"].device:
            return None
        if not _equal(value.shape, whole):
            if value.dtype in HALF or not _same_at_every_step(value.shape, whole):
                return None
            smaller.append(node)
        elif node.target in _OPS and _of_numbers(node) and len(nodes) < _LONGEST:
            nodes.add(node)
            stack += node.all_input_nodes
        elif source is None:
            source = node
        else:
            return None
    if source is None or source.meta["val"].dtype != made.meta["val"].dtype or not _dense(source.meta["val"]):
        return None
    ordered = [n for n in made.graph.nodes if n in nodes]
    places = {n: ValueAt(i) for i, n in enumerate([source, *smaller, *ordered])}
    steps = [Step(n.target, tuple([places.get(a, a) for a in n.args]), n.meta["val"].dtype) for n in ordered]
    metas = [Meta(tuple(q.meta["val"].shape[max(0, q.meta["val"].dim() - len(whole) + 1) :]), q.meta["val"].dtype) for q in smaller]
    return Chain(tuple(metas), tuple(steps)), source, smaller


def _behind_views(made: Any) -> Any:
    """Return what an input is a view of, as a sequence of steps; None if anything else reads it."""
    node = made
    while len(node.users) == 1:
        twice = node.target is aten.neg.default and node.args[0].target is aten.neg.default  # of `inductor.remade`
        if twice and len(node.args[0].users) == 1:
            node = node.args[0].args[0]
        elif node.target in _VIEWS:
            node = node.args[0]
        else:
            break
    else:
        return None
    shape, inner = made.meta["val"].shape, node.meta["val"].shape[1:]
    split = len(shape) - len(inner)
    fits = isinstance(node.meta["val"], Tensor) and split > 0 and _equal(shape[split:], inner)
    return node if fits and _equal([math.prod(shape[:split])], node.meta["val"].shape[:1]) else None


def _equal(a: Iterable[Any], b: Iterable[Any]) -> bool:
    return list(map(_written, a)) == list(map(_written, b))


def _written(size: Any) -> str:
    """Return how a size is written: equal ones are written alike."""
    return size_expression(size) if is_symbolic(size) else str(int(size))


def _same_at_every_step(shape: Iterable[Any], whole: Iterable[Any]) -> bool:
    """Return whether a shape broadcasts, with sizes that are numbers, and over the first dim."""
    sizes, dims = list(shape), list(whole)
    sizes = [1] * (len(dims) - len(sizes)) + sizes
    return sizes[:1] == [1] and all([type(n) is int and (n == 1 or _equal([n], [m])) for n, m in zip(sizes, dims, strict=True)])


def _dense(value: Tensor) -> bool:
    """Return whether the kernel could read it as it lies: steps one after the other, in the order of the dims or with channels last."""
    dims = list(range(value.dim()))
    for order in (dims, [*dims[:1], *dims[2:], *dims[1:2]]):
        strides, expected, inside = [], [], 1
        for d in reversed(order):
            n, stride = value.shape[d], value.stride(d)
            if type(n) is not int or n != 1:
                strides.append(stride)
                expected.append(inside)
            inside = inside * n
        if _equal(strides, expected):
            return True
    return False


def _of_numbers(node: Any) -> bool:
    return not node.kwargs and all([isinstance(a, (fx.Node, torch.dtype)) or type(a) in (int, float) for a in node.args])


def _as_sequence(source: Any, made: Any) -> Any:
    """Return the source with the shape of the input."""
    if _equal(source.meta["val"].shape, made.meta["val"].shape):
        return source
    view = made
    while view.target not in _VIEWS:
        view = view.args[0]
    return _call(aten.view.default, (source, view.args[1]), source.meta["val"].view(made.meta["val"].shape))


def _without_time(smaller: Any, made: Any) -> Any:
    """Return it without its first dim, which stands for time, if it has one for every dim of the input."""
    value = smaller.meta["val"]
    return _call(aten.squeeze.dim, (smaller, 0), value.squeeze(0)) if value.dim() == made.meta["val"].dim() else smaller


def _call(op: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
    graph = next(a for a in args if isinstance(a, fx.Node)).graph
    node = graph.call_function(op, args)
    node.meta["val"] = value
    return node


def _erase_unused(node: Any) -> None:
    if node.op == "call_function" and not node.users:
        before = node.all_input_nodes
        node.graph.erase_node(node)
        for one in before:
            _erase_unused(one)


# --- in the program ---------------------------------------------------------------------------------------------------------------
def with_chain(program: str, k: int, chain: Chain, ops: int, device: torch.device) -> tuple[str, tuple[str, ...]] | None:
    """Return a program that takes the source of a chain in place of its input `k`, which the chain makes, and the smaller tensors as
    further params. Its gradients are those of what the chain makes.

    Args:
        ops: `Program.ops` of the program.
        device: of the input, whose eager rules the chain follows.

    Returns:
        Its text, and the names of the further params; None where the program does not fit.
    """
    blueprint = read(program, device)
    step, sig = blueprint.step, blueprint.sig
    fixed = {len(step) - len(m.shape) + d: n for m in chain.smaller for d, n in enumerate(m.shape) if n != 1}
    if blueprint.metas[k].shape != step or any(d < 0 or step[d] != n for d, n in fixed.items()):
        return None
    steps = [lowered for lowered in (blueprint.forward, blueprint.vjp) if lowered is not None]
    taken = {*sig.names, *[n.name for lowered in steps for n in lowered.statics.graph.nodes]}
    stem = f"before_{k}"
    while any(name.startswith(stem) for name in taken):
        stem += "_"
    names = tuple([f"{stem}_{j}" for j in range(len(chain.smaller))])
    for lowered in steps:
        _put_before(lowered, k, chain, names, step, device)
    if blueprint.vjp is not None:
        blueprint.vjp.statics.grads[sig.num_params : sig.num_params] = [None] * len(names)
    longer = Blueprint(
        Signature(sig.core, sig.num_inputs, sig.num_states, sig.num_params + len(names), (*sig.names, *names), sig.exact),
        [*blueprint.metas, *chain.smaller], blueprint.outputs, step, blueprint.free_dims - set(fixed),
        blueprint.forward, blueprint.vjp, ops=ops,
    )  # fmt: skip
    return write(longer, vjp=longer.vjp is not None), names


def _put_before(
    lowered: LoweredStep, k: int, chain: Chain, names: tuple[str, ...], step: tuple[int, ...], device: torch.device
) -> None:  # fmt: skip
    """Make input `k` of a step from what a chain makes it from: its source, under the input's role, and params `names`."""
    graph, statics, role = lowered.graph, lowered.statics, Role(Kind.INPUT, k)
    if role not in graph.inputs:
        return
    low = Lowering(graph.core, device)
    copies = {node: low.b.input(r, node.dtype, node.name) for r, node in graph.inputs.items()}
    source = copies[graph.inputs[role]]
    recorded = fx.Graph()
    values = [_recorded(recorded.placeholder("source"), source.dtype, step)]
    low.env[values[0]] = source
    for name, meta in zip(names, chain.smaller, strict=True):
        param = Role(Kind.PARAM, len(statics.params))
        statics.operands[name] = statics.params[param] = statics.graph.placeholder(name)
        statics.params[param].meta.update(kind="static", role=name, line=None, val=torch.empty(meta.shape, dtype=meta.dtype, device="meta"))
        values.append(_recorded(recorded.placeholder(name), meta.dtype, meta.shape))
        low.env[values[-1]] = low.b.input(param, meta.dtype, identifier(name) or "p")
    line = f"compiled graph: makes {source.name}"  # a comment of the kernel, where lines of the core have theirs
    for op, args, dtype in chain.steps:
        given = tuple([values[a.place] if isinstance(a, ValueAt) else a for a in args])
        made = (
            recorded.call_function(aten._to_copy.default, given[:1], {"dtype": dtype}) if op is _CAST else recorded.call_function(op, given)
        )
        values.append(_recorded(made, dtype, step, line))
        low.add(values[-1])
    copies[graph.inputs[role]] = low.b.convert(low.node(values[-1]), source.dtype)

    def copied(node: Node) -> Node:
        return low.b.const(node.value, node.dtype, node.of) if node.op == "const" else copies[node]

    for node in graph.nodes:
        copies[node] = low.b.copy(node, tuple([copied(a) for a in node.args]))
    lowered.graph = low.b.graph({r: copied(node) for r, node in graph.outputs.items()})


def _recorded(node: fx.Node, dtype: torch.dtype, shape: tuple[int, ...], line: str | None = None) -> fx.Node:
    """Return a node that `Lowering` takes for a recorded one."""
    node.meta.update(kind="step", line=line, val=torch.empty(shape, dtype=dtype, device="meta"))
    return node
