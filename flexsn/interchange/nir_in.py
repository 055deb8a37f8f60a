"""`flexsn.from_nir`: a NIR graph as a network of flexsn neurons and PyTorch layers."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import surrogate as surrogates
from ..errors import InterchangeError
from ..neurons import Neuron
from ..neurons.recurrent import Recurrent
from .describe import KINDS, SPIKING, to_arguments
from .layers import Delay, PerStep, Scale, SumPool2d, Threshold
from .network import NIRNetwork
from .surrogates import above, at

DT = 1e-4


def the_nir() -> Any:
    """The `nir` package, which flexsn needs for this alone."""
    try:
        import nir
    except ImportError:
        raise ImportError("flexsn.to_nir and flexsn.from_nir need the package `nir`: pip install nir") from None
    return nir


def from_nir(
    graph: Any, *, dt: float | None = None, surrogate: Callable[[Tensor], Tensor] = surrogates.atan, dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> NIRNetwork:  # fmt: skip
    """A NIR graph as a module: sequences `[T, B, *shape]` to `[T, B, *shape]`.

    IF, LI, LIF, CubaLI and CubaLIF become `flexsn.IF`, `LeakyIntegrator`, `LIF`, `CubaLI` and `CubaLIF`, by one forward
    Euler step per `dt`; they spike where `v > v_threshold`, as NIR says (where `v >= v_threshold` if `to_nir` wrote so into the
    node's `metadata["inclusive"]`), and start at rest. Affine, Linear, Conv1d, Conv2d,
    Scale, Flatten, AvgPool2d and SumPool2d become PyTorch layers, Delay a `Delay`, subgraphs part of the graph. Several edges
    into a node add up. A neuron whose output comes back to it through one Affine, Linear, Conv1d, Conv2d or Scale becomes a
    `flexsn.Recurrent`. Any other cycle runs step by step: the edge that closes it carries the step before.

    Args:
        graph: a `nir.NIRGraph`, or the path of a file that `nir.write` made.
        dt: length of a step in seconds; by default the graph's `metadata["dt"]`, which `to_nir` writes, else 1e-4.
        surrogate: gradient of the spikes.
        dtype: of weights and constants; by default the graph's `metadata["dtype"]`, which `to_nir` writes, else PyTorch's
            default dtype.
        backend: of the neurons, as for `FlexSN`.

    Raises:
        InterchangeError: a node that flexsn does not have; the message names it. Or a file that is not there, or not NIR's.
        ImportError: the package `nir` is missing.
    """
    nir = the_nir()
    if isinstance(graph, str | os.PathLike):
        graph = _read(nir, graph)
    if not isinstance(graph, nir.NIRGraph):
        raise InterchangeError(f"from_nir takes a nir.NIRGraph or a path, not {type(graph).__name__}")
    dt = checked_dt(graph.metadata.get("dt", DT) if dt is None else dt)
    dtype = _checked_dtype(dtype) or getattr(torch, str(graph.metadata.get("dtype")), None) or torch.get_default_dtype()
    nodes, edges = flat(nir, graph)
    reader = _Reader(dt, surrogate, dtype, backend)
    shapes = {name: tuple(node.r.shape) for name, node in nodes.items() if type(node).__name__ in KINDS}
    modules, edges = fed_back({name: reader.module(name, node) for name, node in nodes.items()}, edges)
    return NIRNetwork(modules, edges, shapes, dt)


def fed_back(modules: dict[str, nn.Module], edges: list[tuple[str, str]]) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """A neuron whose output comes back to it through one layer, on no other way, as a `Recurrent`, which runs whole sequences."""
    found, rest = dict(modules), list(edges)
    for name, module in modules.items():
        mixing = module.module if isinstance(module, PerStep) else module
        before, after = {a for a, b in edges if b == name}, {b for a, b in edges if a == name}
        neuron = found[next(iter(before))] if len(before) == 1 and before == after else None
        if isinstance(neuron, Neuron) and isinstance(mixing, nn.Linear | nn.Conv1d | nn.Conv2d | Scale):
            found[before.pop()] = Recurrent(neuron, mixing)
            del found[name]
            rest = [edge for edge in rest if name not in edge]
    return found, rest


def checked_dt(dt: Any) -> float:
    """A number of seconds.

    Raises:
        InterchangeError: it is none above 0.
    """
    try:
        seconds = float(dt)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise InterchangeError(f"dt is the length of a step in seconds, not {dt!r}")
    return seconds


def _checked_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InterchangeError(f"dtype must be a floating dtype such as torch.float32, not {dtype!r}")
    return dtype


_TRIES = 40


def _read(nir: Any, path: str | os.PathLike[str]) -> Any:
    name = repr(os.fspath(path))
    if not os.path.exists(path):
        raise InterchangeError(f"there is no file {name}")
    try:
        for left in reversed(range(_TRIES)):
            try:
                return nir.read(path, type_check=False)
            except BlockingIOError:  # HDF5's lock of a file just written: a compiler started meanwhile holds it until it runs
                if not left:
                    raise
                time.sleep(0.05)
    except (OSError, KeyError) as error:  # h5py's: no HDF5 file, or nothing of NIR in it
        raise InterchangeError(f"{name} is no NIR file that can be read: {error}", hint="`nir.write` makes them.") from error


def flat(nir: Any, graph: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Nodes and edges with subgraphs dissolved: their nodes are named `subgraph.node`, and their Input and Output are gone."""
    nodes, edges = dict(graph.nodes), list(dict.fromkeys(map(tuple, graph.edges)))
    for name in [n for n, node in nodes.items() if isinstance(node, nir.NIRGraph)]:
        inner, inner_edges = flat(nir, nodes.pop(name))
        doors = {f"{name}.{n}" for n, node in inner.items() if isinstance(node, nir.Input | nir.Output)}
        nodes |= {f"{name}.{n}": node for n, node in inner.items()}
        edges += [(f"{name}.{a}", f"{name}.{b}") for a, b in inner_edges]
        entry, leave = (_only(nir, name, inner, kind) for kind in (nir.Input, nir.Output))
        edges = [(leave if a == name else a, entry if b == name else b) for a, b in edges]
        for door in doors:
            sources, targets = [a for a, b in edges if b == door], [b for a, b in edges if a == door]
            edges = [e for e in edges if door not in e] + [(a, b) for a in sources for b in targets]
            del nodes[door]
    return nodes, edges


def _only(nir: Any, name: str, nodes: dict[str, Any], kind: type) -> str:
    found = [n for n, node in nodes.items() if isinstance(node, kind)]
    if len(found) != 1:
        raise InterchangeError(f"subgraph `{name}` has {len(found)} {kind.__name__} nodes; flexsn takes one")
    return f"{name}.{found[0]}"


class _Reader:
    """Nodes as modules."""

    def __init__(self, dt: float, spike: Callable[[Tensor], Tensor], dtype: torch.dtype, backend: str):
        self.dt, self.surrogate, self.dtype, self.backend = dt, spike, dtype, backend

    def module(self, name: str, node: Any) -> nn.Module:
        kind = type(node).__name__
        read = functools.partial(self.neuron, kind) if kind in KINDS else getattr(self, f"read_{kind.lower()}", None)
        if read is None:
            raise InterchangeError(f"node `{name}`: flexsn has nothing for nir.{kind}")
        try:
            return read(node)
        except InterchangeError as error:
            raise InterchangeError(f"node `{name}` (nir.{kind}): {error.reason}", hint=error.hint) from None

    def tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=self.dtype).clone()

    def spike(self, node: Any) -> Callable[[Tensor], Tensor]:
        return (at if node.metadata.get("inclusive") else above)(self.surrogate)

    def neuron(self, kind: str, node: Any) -> nn.Module:
        """Its arguments are computed in float64 and rounded once."""
        given = {n: v for n, v in vars(node).items() if n not in ("input_type", "output_type", "metadata")}
        fields = {n: torch.as_tensor(v, dtype=torch.float64) for n, v in given.items()}
        for name in ("tau", "tau_mem", "tau_syn"):
            if name in fields and not bool((fields[name] > 0).all()):
                raise InterchangeError(f"{name} must be positive; its smallest value is {fields[name].min().item()}")
        arguments: dict[str, Any] = {n: self.tensor(v) for n, v in to_arguments(kind, fields, self.dt).items()}
        if kind in SPIKING:
            arguments["surrogate"] = self.spike(node)
        return KINDS[kind](**arguments, backend=self.backend)

    def read_input(self, node: Any) -> nn.Module:
        return nn.Identity()

    read_output = read_input

    def read_affine(self, node: Any) -> nn.Module:
        weight = self.tensor(node.weight)
        if weight.dim() != 2:
            raise InterchangeError(f"weight has shape {list(weight.shape)}; flexsn takes a matrix")
        layer = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=hasattr(node, "bias"), dtype=self.dtype)
        return self.filled(layer, node)

    read_linear = read_affine

    def filled(self, layer: nn.Module, node: Any) -> nn.Module:
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(self.tensor(getattr(node, name)))
        return layer

    def read_conv1d(self, node: Any) -> nn.Module:
        return self.conv(nn.Conv1d, node, 1)

    def read_conv2d(self, node: Any) -> nn.Module:
        return self.conv(nn.Conv2d, node, 2)

    def conv(self, kind: type, node: Any, dims: int) -> nn.Module:
        weight, groups = self.tensor(node.weight), int(node.groups)
        padding = node.padding.decode() if isinstance(node.padding, bytes) else node.padding
        layer = nn.utils.skip_init(
            kind, weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]), stride=numbers(node.stride, dims),
            padding=padding if isinstance(padding, str) else numbers(padding, dims), dilation=numbers(node.dilation, dims), groups=groups,
            bias=node.bias is not None, dtype=self.dtype,
        )  # fmt: skip
        return PerStep(self.filled(layer, node), dims + 1)

    def read_scale(self, node: Any) -> nn.Module:
        return Scale(self.tensor(node.scale))

    def read_threshold(self, node: Any) -> nn.Module:
        return Threshold(self.tensor(node.threshold), self.spike(node))

    def read_flatten(self, node: Any) -> nn.Module:
        start, end = int(node.start_dim), int(node.end_dim)
        return nn.Flatten(start + 2 if start >= 0 else start, end + 2 if end >= 0 else end)

    def read_avgpool2d(self, node: Any) -> nn.Module:
        return self.pool(nn.AvgPool2d, node)

    def read_sumpool2d(self, node: Any) -> nn.Module:
        return self.pool(SumPool2d, node)

    def pool(self, kind: type, node: Any) -> nn.Module:
        return PerStep(kind(numbers(node.kernel_size, 2), numbers(node.stride, 2), numbers(node.padding, 2)), 3)

    def read_delay(self, node: Any) -> nn.Module:
        delay = torch.as_tensor(node.delay, dtype=torch.float64)
        steps = torch.round(delay / self.dt)
        if bool((steps < 0).any()) or not torch.allclose(steps * self.dt, delay, rtol=1e-6, atol=1e-6 * self.dt):
            raise InterchangeError(f"delays must be whole numbers of steps of {self.dt} s", hint="Choose another `dt`.")
        return Delay(steps)


def numbers(value: Any, count: int) -> tuple[int, ...]:
    """A NIR number or array as `count` Python integers."""
    found = [int(v) for v in torch.as_tensor(value).reshape(-1)]
    return tuple(found * count if len(found) == 1 else found)
