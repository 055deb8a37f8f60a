"""A blueprint as a string, and back: what a compiled or exported graph carries, so that it means the same in any process.

The string is JSON. A graph is a list of nodes `[name, op, args, kwargs, meta]`; in arguments a recorded node is
`{"node": name}`, and what JSON lacks is `{"dtype": ...}`, `{"layout": ...}`, `{"memory_format": ...}`, `{"device": ...}`.
The device of the operands is `{"device": ""}`: the string names none. Reading it back imports and runs nothing but
lookups of PyTorch operators by name; one that writes to its operands, or reaches files or other processes, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.graph_writer import getitem
from .._capture.signature import Signature
from .._capture.trace import Meta, Trace
from .._version import __version__
from ..errors import ProgramTextError
from .captured import Blueprint

FORMAT = 3
OPERATORS = 3  # counts the changes of what the kernel operators return

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_THINGS = {kind: {n: t for n, t in vars(torch).items() if isinstance(t, of)} for kind, of in _NAMED.items()}
_OUTSIDE = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem", "debugprims", "profiler", "inductor", "flexsn"}


# --- writing ----------------------------------------------------------------------------------------------------------------
def write(blueprint: Blueprint, *, vjp: bool) -> str:
    """The text of a blueprint, with its VJP (which must have been recorded) or without.

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
        "metas": [_meta(m) for m in blueprint.metas],
        "outputs": [_meta(m) for m in blueprint.outputs],
        "step": list(blueprint.step),
        "free_dims": sorted(blueprint.free_dims),
        "forward": _trace(blueprint.forward),
        "vjp": _trace(blueprint.vjp) if vjp and blueprint.vjp is not None else None,
    }
    if blueprint.ops is not None:
        data["ops"] = blueprint.ops
    return json.dumps(data, separators=(",", ":"))


def _meta(meta: Meta) -> list:
    return [list(meta.shape), _word(meta.dtype)]


def _word(thing: Any) -> str:
    return str(thing).removeprefix("torch.")


def _trace(recorded: Trace) -> dict[str, Any]:
    def names(nodes: Sequence[Any]) -> list[str | None]:
        return [None if n is None else n.name for n in nodes]

    live, stack = set[fx.Node](), [n for n in (*recorded.returns, *recorded.grads) if n is not None]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return {
        "nodes": [_node(n) for n in recorded.graph.nodes if n in live or n.op == "placeholder"],
        "operands": names(recorded.operands),
        "cotangents": names(recorded.cotangents),
        "returns": names(recorded.returns),
        "grads": names(recorded.grads),
        "flows": [names(nodes) for nodes in recorded.flows],
        "captured": {path: n.name for path, n in recorded.captured.items()},
        "constants": {name: [_word(t.dtype), list(t.shape), t.flatten().tolist()] for name, t in recorded.constants.items()},
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
    if isinstance(value, torch.device):
        return {"device": ""}
    for word, kind in _NAMED.items():
        if isinstance(value, kind):
            return {word: _word(value)}
    return value


# --- reading ----------------------------------------------------------------------------------------------------------------
def read(text: str, device: torch.device) -> Blueprint:
    """The blueprint that a text describes, for operands on `device`.

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
    sig = Signature(data["core"], inputs, states, params, tuple(data["names"]))
    metas, outputs = [_read_meta(m) for m in data["metas"]], tuple(_read_meta(m) for m in data["outputs"])
    forward, vjp = _read_trace(data["forward"], device), _read_trace(data["vjp"], device) if data["vjp"] else None
    return Blueprint(sig, metas, outputs, tuple(data["step"]), frozenset(data["free_dims"]), forward, vjp, data.get("ops"))


def _read_meta(data: list) -> Meta:
    return Meta(tuple(data[0]), _named("dtype", data[1]))


def _named(kind: str, word: str) -> Any:
    if word not in _THINGS[kind]:
        raise ValueError(f"{word!r} is no {kind}")
    return _THINGS[kind][word]


def _read_trace(data: dict[str, Any], device: torch.device) -> Trace:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, word),) = value.items()
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
        node.meta["val"] = None if val is None else torch.empty(val[0], dtype=_named("dtype", val[1]), device="meta")
        nodes[name] = node

    def find(names: list[str | None]) -> list[Any]:
        return [None if n is None else nodes[n] for n in names]

    constants = {
        n: torch.tensor(values, dtype=_named("dtype", d)).reshape(shape).to(device) for n, (d, shape, values) in data["constants"].items()
    }
    captured = {path: nodes[n] for path, n in data["captured"].items()}
    return Trace(
        graph, find(data["operands"]), find(data["cotangents"]), find(data["returns"]), find(data["grads"]),
        [find(names) for names in data["flows"]], captured, constants,
    )  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return getitem
    namespace, packet, overload = name.split(".")
    if namespace in _OUTSIDE or (namespace, packet) == ("aten", "from_file"):
        raise ValueError(f"{name!r} does more than compute")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name!r} is no operator")
    if found._schema.is_mutable:
        raise ValueError(f"{name!r} writes to its operands")
    return found
