"""A captured core as a string, and back: what a compiled or exported graph carries, so that it means the same in any process.

The string is JSON. A step is its closed graph, whose nodes are `[name, op, args, dtype, line]` (an argument is a name, or
`[value, dtype, roles of the cotangents it was made from]`), and the ATen graph of what PyTorch computes around it, whose nodes are
`[name, op, args, kwargs, meta]`; in arguments a node is `{"node": name}`, and what JSON lacks is `{"dtype": ...}`, `{"layout": ...}`,
`{"memory_format": ...}`, `{"device": ...}`, `{"complex": [real, imaginary]}`. The device of the operands is `{"device": ""}`: the
string names none. Reading it back captures and lowers nothing; it imports and runs nothing but lookups of PyTorch operators by name;
one that writes to its operands, or reaches files or other processes, is refused, and so is a name that is no identifier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.graph_writer import getitem
from .._capture.signature import Signature
from .._capture.trace import Meta
from .._ir.graph import Builder, Graph, Node, Shape, elementwise, shape_of, verify
from .._ir.identifiers import is_identifier
from .._ir.roles import Role
from .._torch.tensors import OpOverload
from .._version import __version__
from ..errors import ProgramTextError
from .captured import Blueprint
from .lowered import LoweredStep, LoweredVjp
from .static_parts import StaticGraph

FORMAT = 4
OPERATORS = 3  # counts the changes of what the kernel operators return

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_THINGS = {kind: {n: t for n, t in vars(torch).items() if isinstance(t, of)} for kind, of in _NAMED.items()}
_OUTSIDE = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem", "debugprims", "profiler", "inductor", "flexsn"}


# --- writing ----------------------------------------------------------------------------------------------------------------
def write(blueprint: Blueprint, *, vjp: bool) -> str:
    """Return the text of a blueprint, with its VJP (which must have been recorded) or without.

    Equal cores at equal layouts give equal texts in every process.
    """
    sig = blueprint.sig
    data = {
        "format": FORMAT,
        "flexsn": __version__,  # not read, as the next; PyTorch's compile caches miss when they change
        "operators": OPERATORS,
        "core": sig.core,
        "counts": [sig.num_inputs, sig.num_states, sig.num_params],
        "names": list(sig.names),
        **({} if sig.exact else {"exact": False}),
        "metas": [_meta(m) for m in blueprint.metas],
        "outputs": [_meta(m) for m in blueprint.outputs],
        "step": list(blueprint.step),
        "free_dims": sorted(blueprint.free_dims),
        "forward": _step(blueprint.forward),
        "vjp": None,
    }
    if vjp and blueprint.vjp is not None:
        flows = [sorted(flow, key=lambda operand: (isinstance(operand, str), operand)) for flow in blueprint.vjp.flows]
        data["vjp"] = _step(blueprint.vjp) | {"differentiable": list(blueprint.vjp.differentiable), "flows": flows}
    if blueprint.ops is not None:
        data["ops"] = blueprint.ops
    return json.dumps(data, separators=(",", ":"))


def _meta(meta: Meta) -> list:
    return [list(meta.shape), _word(meta.dtype)]


def _word(thing: Any) -> str:
    return str(thing).removeprefix("torch.")


def _step(lowered: LoweredStep) -> dict[str, Any]:
    return {"graph": _graph(lowered.graph), "statics": _statics(lowered.statics), "captured": list(lowered.captured)}


def _graph(graph: Graph) -> dict[str, Any]:
    def argument(node: Node) -> Any:
        return [node.value, _word(node.dtype), sorted(node.of)] if node.op == "const" else node.name

    return {
        "inputs": [[role, n.name, _word(n.dtype)] for role, n in graph.inputs.items()],
        "nodes": [[n.name, n.op, [argument(a) for a in n.args], _word(n.dtype), n.line] for n in graph.nodes],
        "outputs": {role: argument(n) for role, n in graph.outputs.items()},
    }


def _statics(static: StaticGraph) -> dict[str, Any]:
    def names(nodes: Mapping[Any, fx.Node]) -> dict[Any, str]:
        return {key: n.name for key, n in nodes.items()}

    return {
        "nodes": [_node(n) for n in static.graph.nodes],
        "operands": names(static.operands),
        "constants": {n.name: [_word(t.dtype), list(t.shape), _argument(t.flatten().tolist())] for n, t in static.constants.items()},
        "sums": names(static.sums),
        "params": names(static.params),
        "grads": [None if n is None else n.name for n in static.grads],
    }


def _node(node: fx.Node) -> list:
    val = node.meta["val"]
    meta = {k: node.meta[k] for k in ("kind", "role", "uniform", "of", "nil", "line") if node.meta.get(k) is not None}
    meta["val"] = _meta(Meta(tuple(val.shape), val.dtype)) if isinstance(val, Tensor) else None
    op = None if node.op == "placeholder" else "getitem" if node.target is getitem else str(node.target)
    return [node.name, op, _argument(node.args), _argument(node.kwargs), meta]


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (tuple, list)):
        return [_argument(v) for v in value]
    if isinstance(value, dict):
        return {k: _argument(v) for k, v in value.items()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": ""}
    for word, kind in _NAMED.items():
        if isinstance(value, kind):
            return {word: _word(value)}
    return value


# --- reading ----------------------------------------------------------------------------------------------------------------
def read(text: str, device: torch.device) -> Blueprint:
    """Return the blueprint that a text describes, for operands on `device`.

    Raises:
        ProgramTextError: the text was not written by this version of flexsn, or names an operator that is not loaded.
    """
    try:
        return _read(json.loads(text), device)
    except ProgramTextError:
        raise
    except Exception as error:  # whatever a text that `write` did not write leads to
        raise ProgramTextError(f"{type(error).__name__}: {error}") from error


def _read(data: dict[str, Any], device: torch.device) -> Blueprint:
    if data["format"] != FORMAT:
        raise ProgramTextError(f"its format is version {data['format']}; this flexsn reads version {FORMAT}")
    inputs, states, params = data["counts"]
    sig = Signature(data["core"], inputs, states, params, tuple(data["names"]), data.get("exact", True))
    metas, outputs = [_read_meta(m) for m in data["metas"]], tuple(_read_meta(m) for m in data["outputs"])
    forward = LoweredStep(*_read_step(sig.core, data["forward"], device))
    vjp = None
    if data["vjp"] is not None:
        flows = [frozenset(flow) for flow in data["vjp"]["flows"]]
        vjp = LoweredVjp(*_read_step(sig.core, data["vjp"], device), tuple(data["vjp"]["differentiable"]), flows)
    return Blueprint(sig, metas, outputs, tuple(data["step"]), frozenset(data["free_dims"]), forward, vjp, ops=data.get("ops"))


def _read_meta(data: list) -> Meta:
    return Meta(tuple(data[0]), _named("dtype", data[1]))


def _named(kind: str, word: str) -> Any:
    if word not in _THINGS[kind]:
        raise ValueError(f"{word!r} is no {kind}")
    return _THINGS[kind][word]


def _read_step(core: str, data: dict[str, Any], device: torch.device) -> tuple[Graph, StaticGraph, tuple[str, ...]]:
    return _read_graph(core, data["graph"]), _read_statics(data["statics"], device), tuple(data["captured"])


def _read_graph(core: str, data: dict[str, Any]) -> Graph:
    """Return the graph of a text. Names stand in generated code, so they must be plain identifiers."""
    nodes: dict[str, Node] = {}

    def made(name: str, op: str, args: tuple[Node, ...], dtype: str, line: str | None, shape: Shape) -> Node:
        if not is_identifier(name) or name in nodes:
            raise ValueError(f"{name!r} is no name for a value")
        nodes[name] = Node(op, args, _named("dtype", dtype), name, line=line, shape=shape)
        return nodes[name]

    def argument(given: Any) -> Node:
        if isinstance(given, str):
            return nodes[given]
        value, dtype, of = given
        if type(value) not in (bool, int, float):
            raise ValueError(f"{value!r} is no number")
        return constants.const(value, _named("dtype", dtype), frozenset(map(Role.of, of)))

    constants = Builder(core)
    inputs = {Role.of(role): made(name, "input", (), dtype, None, shape_of(Role.of(role))) for role, name, dtype in data["inputs"]}
    body = []
    for name, op, given, dtype, line in data["nodes"]:
        args = tuple(map(argument, given))
        body.append(made(name, op, args, dtype, line, elementwise(args)))
    graph = Graph(core, inputs, {Role.of(role): argument(given) for role, given in data["outputs"].items()}, body)
    verify(graph)
    return graph


def _read_statics(data: dict[str, Any], device: torch.device) -> StaticGraph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, word),) = value.items()
        if kind == "complex":
            return complex(*word)
        return nodes[word] if kind == "node" else device if kind == "device" else _named(kind, word)

    for name, op, args, kwargs, meta in data["nodes"]:
        if op is None:
            node = graph.placeholder(name)
        else:
            node = graph.create_node(
                "call_function", _operator(op), tuple(map(argument, args)), {k: argument(v) for k, v in kwargs.items()}
            )
        node.name = name
        val = meta.pop("val")
        node.meta.update({"line": None, **meta})
        if "of" in meta:
            node.meta["of"] = [Role.of(role) for role in meta["of"]]
        node.meta["val"] = None if val is None else torch.empty(val[0], dtype=_named("dtype", val[1]), device="meta")
        nodes[name] = node
    constants = {
        nodes[n]: torch.tensor(argument(values), dtype=_named("dtype", d)).reshape(shape).to(device)
        for n, (d, shape, values) in data["constants"].items()
    }
    sums, params = [{Role.of(role): nodes[n] for role, n in data[key].items()} for key in ("sums", "params")]
    operands, grads = {name: nodes[n] for name, n in data["operands"].items()}, [None if n is None else nodes[n] for n in data["grads"]]
    return StaticGraph(graph, operands, constants, sums, params, grads)


def _operator(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return getitem
    namespace, packet, overload = name.split(".")
    if namespace in _OUTSIDE or (namespace, packet) == ("aten", "from_file"):
        raise ValueError(f"{name!r} does more than compute")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"{name!r} is no operator")
    if found._schema.is_mutable:
        raise ValueError(f"{name!r} writes to its operands")
    return found
