"""From a flat ATen graph to the closed op set, and to the text of one step in Triton.

An ATen graph is replayed as a core: recorded, decomposed and lowered by the stages of `flexsn.scan`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from .._capture.signature import Signature
from .._capture.trace import Meta, trace
from .._codegen.language import safe
from .._codegen.triton_frame import render_step
from .._codegen.triton_values import IMPORTS
from .._ir.graph import Builder
from .._ir.lowering import lower
from .._ir.roles import Kind, Role, roles
from .._program.static_parts import cut, static_graph
from .._runtime.triton.kernel import define
from .._torch.availability import KERNELS, require
from ..errors import CannotFuseError, UnsupportedOpError
from .graphs import output_values
from .info import StepRoles, meta_of


class ClosedStep:
    """A step graph over the closed op set.

    Attributes:
        graph: inputs and outputs by role; what depends on captured tensors alone comes in as `p*`.
    """

    def __init__(
        self, graph: fx.Graph, name: str, roles: StepRoles, dtypes: Mapping[Role, torch.dtype], device: torch.device | None = None,
        numbers: bool = False,
    ):  # fmt: skip
        """Close an ATen graph.

        Args:
            roles: of its arguments and returns. What is carried and made of a return of None is zero; another one is no output.
            dtypes: of what is carried.
            device: whose eager rules hold; by default that of the first argument.
            numbers: write captured tensors of one element as numbers, and refuse others.

        Raises:
            UnsupportedOpError: an op that no kernel expresses, by name.
            BackendUnavailableError: an internal interface of PyTorch has moved.
        """
        require(KERNELS)
        self._constants = {str(n.target): _attribute(graph, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        leaves = graph.find_nodes(op="placeholder")
        names = [*(n.name for n in leaves), *(f"captured_{target}" for target in self._constants)]
        sig = Signature(name, len(leaves), 0, len(self._constants), tuple(names))
        metas = [*map(meta_of, leaves), *(Meta(tuple(t.shape), t.dtype) for t in self._constants.values())]
        self._names = names[len(leaves) :]
        values = output_values(graph)
        gives = {role: k for k, role in enumerate(roles.returns) if role is not None}
        gives |= {role: gives[source] for role, source in roles.carried.items()}
        found = {role: node for role, k in gives.items() if (node := values[k]) is not None}
        carried = {role: dtypes[role] for role in roles.carried}
        device = device or example_device(graph)

        def replay(*operands: Tensor) -> list[Tensor]:
            run = _Replay(graph, dict(zip(self._constants, operands[len(leaves) :], strict=True)))
            returned = run.run(*operands[: len(leaves)])
            returned = returned if isinstance(returned, (tuple, list)) else [returned]
            return [returned[gives[role]] for role in found]

        try:
            recorded = trace(replay, sig, metas, device, {}, vjp=False)
            ins = dict(zip(roles.takes, recorded.operands, strict=False))
            outs = dict(zip(found, recorded.returns, strict=True))
            self.graph, statics = lower(name, ins, outs, carried, device)
            static = static_graph(recorded, statics)
            self._prologue = cut(static, static.params)
            if numbers and statics:
                for role, param in self.params().items():
                    statics[role].meta["uniform"] = _number(param, name)
                self.graph, _ = lower(name, ins, outs, carried, device)
        except CannotFuseError as error:
            if isinstance(error, UnsupportedOpError):
                raise
            raise UnsupportedOpError(error.reason, core=name, hint=error.hint) from error
        for role, dtype in carried.items():
            self.graph.outputs.setdefault(role, Builder(name).const(0, dtype))

    def params(self) -> dict[Role, Tensor]:
        """Return the values of `p*`, computed from the captured tensors as they are now."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return self._prologue(dict(zip(self._names, [t.detach() for t in self._constants.values()], strict=True)))


def example_device(graph: fx.Graph) -> torch.device:
    """Return the device of the examples that a graph was captured with."""
    vals = [n.meta.get("val") for n in graph.find_nodes(op="placeholder")]
    return next((v.device for v in vals if isinstance(v, Tensor)), torch.device("cpu"))


def _attribute(graph: fx.Graph, target: str) -> Tensor:
    value: Any = functools.reduce(lambda module, part: getattr(module, part, None), target.split("."), cast(Any, graph.owning_module))
    if not isinstance(value, Tensor):
        raise UnsupportedOpError(f"the graph reads `{target}`, which is no tensor of its module")
    return value


class _Replay(fx.Interpreter):
    """Runs a graph node by node, with other tensors in place of those of its module."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Tensor]):
        super().__init__(graph.owning_module or torch.nn.Module(), graph=graph)
        self.extra_traceback, self._constants = False, constants  # errors as they are

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Tensor:
        return self._constants[str(target)]


def _number(value: Tensor, name: str) -> Any:
    if value.numel() != 1:
        raise UnsupportedOpError(
            f"reads a captured tensor of shape {list(value.shape)}, and the source of a step holds numbers only", core=name,
            hint="Pass it as an input or a state, or build kernels from the core.",
        )  # fmt: skip
    return value.item()


# --- text ------------------------------------------------------------------------------------------------------------------------
def generate_triton_code_str(graph: fx.Graph, fn_name: str) -> tuple[str, str]:
    """Return the source of one step as a `@triton.jit` function: of values of a block of neurons, the graph's arguments to its returns.

    16-bit floats are computed in float32 and rounded after every op, as in eager. A returned None is a zero.

    Returns:
        The source, and the name of its function: `fn_name` and a hash of the source.

    Raises:
        UnsupportedOpError: an op outside the closed set, by name; a `NotImplementedError`.
    """
    name = safe(fn_name).replace(".", "_")
    name = name if name.isidentifier() else f"core_{name}"
    takes = roles(Kind.INPUT, len(graph.find_nodes(op="placeholder")))
    gives = roles(Kind.OUTPUT, len(output_values(graph)))
    closed = ClosedStep(graph, fn_name, StepRoles(takes, gives, {}), {}, numbers=True).graph
    results = [role if role in closed.outputs else None for role in gives]
    unique = f"{name}_{hashlib.sha256(render_step(closed, name, takes, results).encode()).hexdigest()[:12]}"
    return render_step(closed, unique, takes, results), unique


_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # as the standard library does
_loaded: MutableMapping[tuple[str, str], Any] = weakref.WeakValueDictionary()


def compile_triton_code_str(source: str, kernel_name: str) -> Any:
    """Return the function `kernel_name` of a source, loaded; the same source gives the same object, while that is held.

    Raises:
        ValueError: the source defines no such function.
        BackendUnavailableError: triton is not installed; a `RuntimeError`.
    """
    key = (source, kernel_name)
    with _lock:
        function = _loaded.get(key)
        if function is None:
            if not re.search(rf"^def {re.escape(kernel_name)}\(", source, re.MULTILINE):
                raise ValueError(f"the source defines no function `{kernel_name}`")
            function = _loaded[key] = define(complete(source), kernel_name)
        return function


def complete(source: str) -> str:
    """Return a source with the imports of generated ones, if it has none of its own."""
    return source if re.search(r"^(import|from) ", source, re.MULTILINE) else "\n".join([*IMPORTS, "", "", source])
