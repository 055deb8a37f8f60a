"""`flexsn.decompose`: an exported program in PyTorch's own operators, for whoever runs it without flexsn.

Tracing an exported program again dissolves `flexsn::scan` into its prologue, in ATen ops, and `flexsn::forward`
(`_operator/autograd.py`). The decomposition here writes the latter as PyTorch's `scan` operator, whose body is the step graph in ATen
ops, or as one copy of that body per step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ir.graph import Graph, Node
from .._ir.ops import OPS
from .._ir.roles import Kind, Role, roles
from .._operator.eager_loop import over_time
from .._operator.library import IN_ONNX
from .._program.cache import program_from
from .._torch.tensors import is_symbolic, memory_of
from .._torch.tracing import torch_scan_node
from ..errors import DecomposeError

Tensors = Sequence[Tensor]
Body = Callable[[Tensors, Tensors, Tensors], tuple[list[Tensor], list[Tensor]]]  # one step; params are its last argument


def decompose(program: torch.export.ExportedProgram, loop: str = "scan") -> torch.export.ExportedProgram:
    """Return an exported program without flexsn's operators, for inference: what `torch.onnx.export` and others take.

    It computes what the kernels do: 16-bit floats in float32, default states from zeros. No gradient flows through its
    neurons: surrogate gradients are gone, and autograd would find others in their place. Nor does a tangent of
    forward mode.

    Args:
        program: from `torch.export.export` or `torch.export.load`.
        loop: `"scan"`: one `torch.ops.higher_order.scan` per call of a neuron, for any T of at least 1; ONNX has an operator
            for it. `"unroll"`: one copy of the step per time step, in ATen ops alone; T must be a number.

    Returns:
        A new program, in which what did not come from flexsn is as it was.

    Raises:
        DecomposeError: `"unroll"` and T is dynamic.
        ValueError: an unknown `loop`.
        TypeError: `program` is no exported program.
    """
    loops = {"scan": _scan, "unroll": _unroll}
    if loop not in loops:
        raise ValueError(f"unknown loop {loop!r}; there are {', '.join(map(repr, loops))}")
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError(f"`program` must be what `torch.export.export(model, inputs)` returns, not {type(program).__name__}")
    try:
        return program.run_decompositions({torch.ops.flexsn.forward.default: functools.partial(_forward, loops[loop])})
    except DecomposeError as error:
        error.args = (error.args[0].partition("\n\nWhile executing")[0],)  # PyTorch adds the node, with a neuron's whole program
        raise


def _forward(
    loop: Callable, text: str, inputs: Tensors, states: Sequence[Tensor | None], params: Tensors, step: Sequence[int], checkpoints: int,
    save: bool, sequences: bool,
) -> list[Tensor]:  # fmt: skip
    """Return what `flexsn::forward` does, by a loop."""
    made = program_from(text, inputs[0].device)
    graph, outs, n = made.graph, made.num_outputs, made.sig.num_states
    if save:
        raise DecomposeError("stores checkpoints for a backward; only programs for inference are decomposed", core=made.sig.core)
    after = roles(Kind.STATE, n)
    carried = [graph.outputs[v].dtype for v in after]
    inputs, params = [x.detach() for x in inputs], [p.detach().to(inputs[0].device) for p in params]
    zeros = inputs[0].new_zeros
    first = [zeros(tuple(step), dtype=d) if v is None else _expand(v.detach(), step).to(d) for v, d in zip(states, carried, strict=True)]
    xs = [_expand(x, (x.shape[0], *step)) for x in inputs]

    def body(steps: Tensors, current: Tensors, params: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Return new states, and what is kept of every step: outputs, and states if asked for."""
        operands = ((Kind.INPUT, steps), (Kind.STATE, current), (Kind.PARAM, params))
        found = run_step(graph, {Role(kind, k): t for kind, ts in operands for k, t in enumerate(ts)}, steps[0])
        new = [found[v] for v in after]
        kept = {r: found[r] for r in (*roles(Kind.OUTPUT, outs), *(after if sequences else ()))}
        results = _distinct([*new, *[t.to(made.storage[role]) for role, t in kept.items()]], besides=[*steps, *current, *params])
        return results[:n], results[n:]

    if n:
        owned = _distinct([*first, *params])
        finals, kept = loop(body, owned[:n], _distinct(xs), owned[n:], made.sig.core)
    else:
        finals, kept = body(xs, [], params)  # nothing is carried: all steps at once
    results = dict(zip((*roles(Kind.OUTPUT, outs), *roles(Kind.STATES, n)), kept, strict=False))
    results |= {v: final.to(made.storage[v]) for v, final in zip(after, finals, strict=True)}
    plan = made.forward_plan([x.dtype for x in inputs], False, sequences)
    return [results[a.role] for a in plan.writes]


class _InOnnx:
    """The operators in an export to ONNX: PyTorch's scan, which ONNX has."""

    forward = staticmethod(functools.partial(_forward, lambda *args: _scan(*args)))

    @staticmethod
    def backward(*_: Any) -> Any:
        raise DecomposeError("is exported to ONNX with a gradient", hint="Export the model for inference.")


IN_ONNX.append(_InOnnx)


# --- loops ----------------------------------------------------------------------------------------------------------------
def _scan(body: Body, first: list[Tensor], xs: list[Tensor], params: list[Tensor], core: str) -> tuple[list[Tensor], list[Tensor]]:
    T, n, m = xs[0].shape[0], len(first), len(first) + len(xs)
    if not is_symbolic(T) and T == 0:
        return _unroll(body, first, xs, params, core)

    def combine(*operands: Any) -> list[Tensor]:
        new, kept = body(operands[n:m], operands[:n], operands[m : m + len(params)])
        return [*new, *kept]

    sizes = [size for size in first[0].shape if is_symbolic(size)]  # Inductor finds symbols only among the operands
    done = torch_scan_node()(combine, first, xs, (*params, *sizes))
    return list(done[:n]), list(done[n:])


def _unroll(body: Body, first: list[Tensor], xs: list[Tensor], params: list[Tensor], core: str) -> tuple[list[Tensor], list[Tensor]]:
    T = xs[0].shape[0]
    if is_symbolic(T):
        raise DecomposeError("has a dynamic T, and cannot be unrolled", core=core, hint='Export it with a fixed T, or use loop="scan".')
    if T == 0:
        _, kept = body([x.new_zeros(x.shape[1:]) for x in xs], first, params)
        return first, [y.new_empty((0, *y.shape)) for y in kept]
    return over_time(lambda now, states: body(now, states, params), ([x.select(0, t) for x in xs] for t in range(T)), first)


# --- one step -------------------------------------------------------------------------------------------------------------
_TAKES_NUMBER = frozenset("add sub mul div pow eq ne lt le gt ge".split())  # as second argument


def run_step(graph: Graph, given: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Run a step graph in ATen ops; return results by role, in the shape of `like`."""
    env = {node: given[role].to(node.dtype) for role, node in graph.inputs.items()}

    def get(node: Node, as_number: bool = False) -> Any:
        if node.op != "const":
            return env[node]
        return node.value if as_number else torch.full((), node.value, dtype=node.dtype, device=like.device)

    for node in graph.nodes:
        args = [get(a, as_number=k == 1 and node.op in _TAKES_NUMBER) for k, a in enumerate(node.args)]
        env[node] = args[0].to(node.dtype) if node.op == "convert" else OPS[node.op].eager(*args)
    return {role: _expand(get(node), like.shape) for role, node in graph.outputs.items()}


def _expand(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor if tuple(tensor.shape) == tuple(shape) else tensor.expand(tuple(shape)).clone(memory_format=torch.contiguous_format)


def _distinct(tensors: Sequence[Tensor], besides: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return copies in place of what shares memory: a scan neither takes nor returns the same memory twice, nor returns what it takes."""
    seen, found = {memory_of(t) for t in besides}, []
    for tensor in tensors:
        found.append(tensor.clone() if memory_of(tensor) in seen else tensor)
        seen.add(memory_of(tensor))
    return found
