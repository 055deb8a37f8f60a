"""`flexsn.to_nir`: a network of flexsn neurons and PyTorch layers as a NIR graph.

The model's forward runs once on `Signal`s: each knows what the sample came to, which NIR nodes it comes from, and how many
of its dims are time and batch. So a forward may fold time into the batch around a convolution, and add branches.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InterchangeError
from ..module import FlexSN
from ..neurons.recurrent import Recurrent
from .describe import array, check_start, described, expanded, mixing_of, readable_kernel, to_fields
from .layers import Delay, PerStep, Scale, SumPool2d, Threshold
from .network import NIRNetwork
from .nir_in import DT, checked_dt, numbers, the_nir
from .surrogates import no_step, spikes_at_threshold
from .swap import check_calls, set_weights


@dataclass
class Signal:
    """A value on its way through the model.

    Attributes:
        value: what the sample came to.
        sources: NIR nodes whose outputs it sums.
        leading: how many dims are time and batch: `[T, B, *shape]`, or folded `[T * B, *shape]`.
    """

    value: Tensor
    sources: tuple[str, ...]
    leading: int

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def step(self) -> tuple[int, ...]:
        return tuple(self.value.shape[self.leading :])


def to_nir(model: nn.Module, sample_input: Tensor, *, dt: float | None = None) -> Any:
    """A network as a `nir.NIRGraph`; `nir.write(path, graph)` stores it.

    Args:
        model: layers of PyTorch (Linear, Conv1d, Conv2d, Flatten, AvgPool2d, and LPPool2d of norm 1) and neurons: `flexsn.IF`,
            `LIF`, `LeakyIntegrator`, `CubaLIF`, `CubaLI`, a `Recurrent` of one of these whose mixing is a Linear, Conv1d, Conv2d
            or `interchange.Scale`, what `convert` made of those of other libraries, what `from_nir` made. Dropout and Identity
            are passed over. Branches may be added, and time be folded into the batch. Hooks that set weights (pruning, the old
            `weight_norm` and `spectral_norm`) run before a layer is written; no other may be there.
        sample_input: `[T, B, *shape]`, or `[B, *shape]` if the model's neurons take single steps; its values do not matter.
        dt: length of a step in seconds; by default that of the network that `from_nir` made, else 1e-4. It is written to
            `graph.metadata["dt"]`, and the dtype of the parameters to `graph.metadata["dtype"]`; a neuron that spikes at
            `v >= v_threshold`, which NIR cannot say, has `metadata["inclusive"]`. `from_nir` reads these.

    Raises:
        InterchangeError: a layer or neuron that NIR does not have (a soft reset, `initial_states`, and spikes other than 0 and 1
            among them), or one with a hook or a `forward` of its own; the message names it. A sample without a batch. A graph that
            `nir.read` would refuse: it is read back here.
        ImportError: the package `nir` is missing.
    """
    nir = the_nir()
    _check(model, sample_input)
    dts = {m.dt for m in model.modules() if isinstance(m, NIRNetwork)}
    dt = checked_dt(dt if dt is not None else dts.pop() if len(dts) == 1 else DT)
    dtype = _dtype(model, sample_input)
    within = {id(m.neuron) for m in model.modules() if isinstance(m, Recurrent)}  # which their layer does not call
    neurons = [m for m in model.modules() if isinstance(m, FlexSN) and id(m) not in within]
    leading = 1 if neurons and all(m.step_mode == "s" for m in neurons) else 2
    if sample_input.dim() <= leading:
        dims, alone = (
            ("[T, B, *shape]", "a batch of one: `sample_input.unsqueeze(1)`") if leading == 2 else ("[B, *shape]", "a batch of one")
        )
        raise InterchangeError(
            f"sample_input has shape {list(sample_input.shape)}, which leaves no dims for one step: it must be `{dims}`",
            hint=f"Give it {alone}.",
        )
    writer = Writer(nir, dt, single=leading == 1)
    sample = sample_input if dtype is None else sample_input.to(dtype)
    signal = Signal(sample, (writer.put("input", nir.Input(_sizes(sample.shape[leading:])), ()),), leading)
    with torch.no_grad():
        result = _graph(model, writer, signal) if isinstance(model, NIRNetwork) else _trace(model, writer, signal)
    if not isinstance(result, Signal):
        raise InterchangeError(f"the model returns a {type(result).__name__}; NIR takes one tensor")
    writer.put("output", nir.Output(_sizes(result.step)), result.sources)
    metadata = {"dt": dt} if dtype is None else {"dt": dt, "dtype": str(dtype).removeprefix("torch.")}
    graph = nir.NIRGraph(writer.nodes, writer.edges, metadata=metadata, type_check=False)
    _read_back(nir, graph)
    return graph


def _read_back(nir: Any, graph: Any) -> None:
    """Nobody can use a file that `nir.read` refuses: it computes the shapes of all nodes anew, by formulas of its own."""
    file = io.BytesIO()
    try:
        nir.write(file, graph, compression=None)
        nir.read(file)
    except Exception as error:  # whatever h5py and the checks of NIR raise
        hint = "Leave the layer that it names out of the model, and run it beside the graph."
        raise InterchangeError(f"`nir.read` would refuse the graph: {type(error).__name__}: {error}", hint=hint) from error


def _check(model: Any, sample_input: Any) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InterchangeError(f"to_nir takes a module, not {what}", hint="A function is the forward of a module.")
    if not isinstance(sample_input, Tensor):
        raise InterchangeError(f"sample_input must be a tensor, not a {type(sample_input).__name__}")
    check_calls(model)


def _dtype(model: nn.Module, sample_input: Tensor) -> torch.dtype | None:
    """That of all parameters; without parameters that of the sample; None if several."""
    found = {p.dtype for p in model.parameters()} or {sample_input.dtype}
    return found.pop() if len(found) == 1 and all(d.is_floating_point for d in found) else None


def _graph(network: NIRNetwork, writer: Writer, signal: Signal) -> Signal:
    """A network that was a graph before: node by node, with its cycles."""
    signals: dict[str, Signal] = {}
    for name in network.order:
        arriving = [signal] if name == network.first else [signals[a] for a in network.into[name]]
        arriving += [Signal(last(signal.value[:1]), (), 2) for (_, b), last in network.feedback.items() if b == name]
        x = Signal(arriving[0].value, tuple(s for a in arriving for s in a.sources), 2)
        module = network.nodes[name]
        signals[name] = x if isinstance(module, nn.Identity) else writer.module(name, module, x)
    writer.edges += [(source, b) for a, b in network.feedback for source in signals[a].sources]
    return signals[network.last]


def _trace(model: nn.Module, writer: Writer, signal: Signal) -> Any:
    if _is_leaf(model):
        return writer.module(type(model).__name__.lower(), model, signal)
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # whatever the model's forward meets on symbolic values
        raise InterchangeError(
            f"the forward of {type(model).__name__} cannot be traced: {error}", hint="It must not loop over time or branch on values."
        ) from error
    return _Run(fx.GraphModule(model, graph), writer).run(signal)


def _is_leaf(module: nn.Module) -> bool:
    theirs = type(module).__module__.split(".")[0] in ("spikingjelly", "snntorch", "norse")
    return theirs or isinstance(module, FlexSN | NIRNetwork | PerStep | Scale | Threshold)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Without hooks: those that are left are a monitor's, which looks at values."""
        return super().call_module(m, m.forward, args, kwargs)


class _Run(fx.Interpreter):
    """The traced forward, on signals."""

    def __init__(self, traced: fx.GraphModule, writer: Writer):
        super().__init__(traced)
        self.writer, self.extra_traceback = writer, False  # torch.fx adds the line of its graph to the text of an error

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        module = self.fetch_attr(target)
        if len(args) != 1 or kwargs or not isinstance(args[0], Signal):
            raise InterchangeError(f"`{target}` ({type(module).__name__}) is called with more than one tensor")
        return self.writer.module(target, module, args[0])

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        signals = [a for a in args if isinstance(a, Signal)]
        if not signals or (target is getattr and args[1] in ("shape", "ndim")):
            return super().call_function(target, args, kwargs) if not signals else getattr(args[0].value, args[1])
        name = getattr(target, "__name__", str(target))
        if target in (operator.add, operator.iadd, torch.add) and len(signals) == 2 and not kwargs:
            return _add(*signals)
        if target is torch.flatten:
            return self.writer.flatten("flatten", *_dims(*args[1:], **kwargs), args[0])
        raise InterchangeError(f"the forward calls `{name}`, which has no place in a NIR graph", hint="Make it a layer, or leave it out.")

    def call_method(self, target: Any, args: tuple, kwargs: dict) -> Any:
        signal, *rest = args
        if not isinstance(signal, Signal):
            return super().call_method(target, args, kwargs)
        if target in ("size", "dim"):
            return getattr(signal.value, target)(*rest, **kwargs)
        if target in ("add", "add_") and not kwargs and isinstance(rest[0], Signal):
            return _add(signal, rest[0])
        if target == "flatten":
            return self.writer.flatten("flatten", *_dims(*rest, **kwargs), signal)
        if target == "unflatten" and signal.leading == 1 and rest[0] == 0:
            return Signal(signal.value.unflatten(*rest), signal.sources, len(rest[1]))
        raise InterchangeError(
            f"the forward calls `.{target}`, which has no place in a NIR graph", hint="Make it a layer, or leave it out."
        )


def _dims(start_dim: int = 0, end_dim: int = -1) -> tuple[int, int]:
    return start_dim, end_dim


def _add(a: Signal, b: Signal) -> Signal:
    """Edges into one node add up, so an addition is no node."""
    if set(a.sources) & set(b.sources):
        raise InterchangeError(f"{sorted(set(a.sources) & set(b.sources))} is added to itself; NIR has one edge between two nodes")
    return Signal(a.value + b.value, a.sources + b.sources, a.leading)


class Writer:
    """Nodes and edges so far.

    Attributes:
        single: the neurons take single steps, and so does the model.
    """

    def __init__(self, nir: Any, dt: float, *, single: bool):
        self.nir, self.dt, self.single = nir, dt, single
        self.nodes: dict[str, Any] = {}
        self.edges: list[tuple[str, str]] = []
        self.used: set[int] = set()

    def put(self, name: str, node: Any, sources: tuple[str, ...], out: tuple[int, ...] | None = None) -> str:
        name = name.replace("/", "_")  # a folder in the file
        while name in self.nodes:
            name += "_"
        self.nodes[name] = node
        self.edges += [(source, name) for source in sources]
        if out is not None:
            node.output_type = {"output": _sizes(out)}
        return name

    def module(self, name: str, module: nn.Module, x: Signal) -> Signal:
        """Add the node(s) for a module, and say what it makes of `x`."""
        if isinstance(module, nn.Identity | nn.Dropout | nn.Dropout1d | nn.Dropout2d):
            return x
        if (inner := _inside(module)) is not None:
            return self.folded(name, inner, x)
        if isinstance(module, nn.Flatten):
            return self.flatten(name, module.start_dim, module.end_dim, x)
        set_weights(module)
        try:
            if isinstance(module, FlexSN):
                return self.neuron(name, module, x)
            node = self.layer(module, x)
        except InterchangeError as error:
            raise InterchangeError(f"`{name}` ({type(module).__name__}): {error.reason}", hint=error.hint) from None
        y = module.forward(x.value)  # no call: hooks that set weights ran, and a monitor's need not
        return Signal(y, (self.put(name, node, x.sources, tuple(y.shape[x.leading :])),), x.leading)

    def folded(self, name: str, modules: list[nn.Module], x: Signal) -> Signal:
        leading = x.value.shape[: x.leading]
        y = Signal(x.value.flatten(0, x.leading - 1), x.sources, 1)
        for module in modules:
            y = self.module(name, module, y)
        return Signal(y.value.unflatten(0, leading), y.sources, x.leading)

    def neuron(self, name: str, neuron: FlexSN, x: Signal) -> Signal:
        if id(neuron) in self.used:
            raise InterchangeError("is called twice; its states would be those of two nodes")
        if x.leading == 2 and neuron.step_mode == "s":
            raise InterchangeError("takes single steps, and is called with a sequence", hint='Set its `step_mode = "m"`.')
        if x.leading == 1 and neuron.step_mode == "m":
            raise InterchangeError("is called with time folded into the batch")
        self.used.add(id(neuron))
        if isinstance(neuron, Delay):
            node = self.nir.Delay(expanded("steps", neuron.steps.double() * self.dt, x.step))
        else:
            kind, arguments = described(neuron)
            channels = getattr(neuron.neuron if isinstance(neuron, Recurrent) else neuron, "per_channel", None) is not None
            node = getattr(self.nir, kind)(**to_fields(kind, arguments, self.dt, x.step, channels))
            check_start(neuron, kind, arguments)
            self.mark(node, arguments.get("surrogate"), x)
        y = Signal(x.value, (self.put(name, node, x.sources),), x.leading)
        if (mixing := mixing_of(neuron)) is not None:
            self.feed_back(mixing, y)
        return y

    def feed_back(self, mixing: Any, y: Signal) -> None:
        """Close a cycle: an edge back to a neuron carries what it gave at the step before."""
        if not isinstance(mixing, nn.Linear | nn.Conv1d | nn.Conv2d | Scale):
            what = f"the mixing is a {type(mixing).__name__}"
            raise InterchangeError(f"{what}; NIR has Linear, Conv1d, Conv2d and flexsn's `interchange.Scale` on the way back")
        node, step = self.layer(mixing, y), y.value[0] if y.leading == 2 else y.value
        mixed = mixing.forward(step)
        if mixed.shape != step.shape:
            raise InterchangeError(f"the mixing returns {list(mixed.shape[1:])} for {y.step}; NIR's edges add what has one shape")
        self.edges.append((self.put(f"{y.sources[0]}_mixing", node, y.sources, y.step), y.sources[0]))

    def mark(self, node: Any, spike: Any, x: Signal) -> None:
        """NIR's neurons spike above the threshold alone, by 1."""
        if spike is None:
            return
        if (found := no_step(spike, x.value.device)) is not None:
            raise InterchangeError(
                f"has spikes of {found[1]:.3g} at a distance of {found[0]:g} to the threshold; NIR's are 0 or 1",
                hint="Its surrogate must give 0 below the threshold and 1 above it.",
            )
        if spikes_at_threshold(spike, x.value.device):
            node.metadata["inclusive"] = True

    def flatten(self, name: str, start: int, end: int, x: Signal) -> Signal:
        rank = x.value.dim()
        start, end = start % rank, end % rank
        y = x.value.flatten(start, end)
        if (start, end) == (0, x.leading - 1):
            return Signal(y, x.sources, 1)
        if start < x.leading:
            raise InterchangeError(f"`{name}` flattens time or batch together with the rest")
        node = self.nir.Flatten(_sizes(x.step), start - x.leading, end - x.leading)
        return Signal(y, (self.put(name, node, x.sources, tuple(y.shape[x.leading :])),), x.leading)

    def layer(self, module: nn.Module, x: Signal) -> Any:
        nir = self.nir
        if isinstance(module, nn.Linear):
            if len(x.step) != 1:
                alone = "The neurons take single steps, so the sample must be `[B, *shape]`, no sequence. " if self.single else ""
                raise InterchangeError(f"acts on the last dim of steps {list(x.step)}; NIR's take vectors", hint=f"{alone}Flatten first.")
            weight = array(module.weight)
            return nir.Linear(weight) if module.bias is None else nir.Affine(weight, array(module.bias))
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            return self.conv(module, x)
        if isinstance(module, nn.AvgPool2d | nn.LPPool2d):
            return self.pool(module, x)
        if isinstance(module, Scale):
            return nir.Scale(expanded("scale", module.scale, x.step))
        if isinstance(module, Threshold):
            node = nir.Threshold(expanded("threshold", module.threshold, x.step))
            self.mark(node, module.spike, x)
            return node
        norm = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
        raise InterchangeError("NIR has no such node", hint="Fold it into the convolution or the linear layer before it." if norm else None)

    def conv(self, module: Any, x: Signal) -> Any:
        if module.padding_mode != "zeros":
            raise InterchangeError(f"padding_mode={module.padding_mode!r}; NIR pads with zeros")
        flat = isinstance(module, nn.Conv1d)
        _check_rank(x, 2 if flat else 3)
        weight, padding = readable_kernel(module)
        node = (self.nir.Conv1d if flat else self.nir.Conv2d)(
            input_shape=None, weight=array(weight), stride=module.stride[0] if flat else module.stride,
            padding=padding[0] if flat and not isinstance(padding, str) else padding,
            dilation=module.dilation[0] if flat else module.dilation, groups=1,
            bias=array(module.bias) if module.bias is not None else array(module.weight.new_zeros(module.out_channels)),
        )  # fmt: skip
        node.input_shape = x.step[1] if flat else tuple(x.step[1:])
        node.input_type = {"input": _sizes(x.step)}
        return node

    def pool(self, module: Any, x: Signal) -> Any:
        _check_rank(x, 3)
        summed = isinstance(module, SumPool2d | nn.LPPool2d)
        if isinstance(module, nn.LPPool2d) and module.norm_type != 1:
            raise InterchangeError(f"LPPool2d of norm {module.norm_type}; NIR has sums (norm 1) and means")
        padding = getattr(module, "padding", 0)
        cut = any(numbers(padding, 2)) and not module.count_include_pad
        if module.ceil_mode or getattr(module, "divisor_override", None) is not None or cut:
            raise InterchangeError("ceil_mode, divisor_override and count_include_pad=False have no place in a NIR pool")
        stride = module.kernel_size if module.stride is None else module.stride
        sizes = [_sizes(numbers(v, 2)) for v in (module.kernel_size, stride, padding)]
        node = (self.nir.SumPool2d if summed else self.nir.AvgPool2d)(*sizes)
        node.input_type = {"input": _sizes(x.step)}
        return node


def _check_rank(x: Signal, rank: int) -> None:
    if len(x.step) != rank:
        raise InterchangeError(
            f"takes steps of {rank} dims beside the batch, and the sample comes to steps of shape {list(x.step)}",
            hint="A sample is `[T, B, *shape]`: without its batch, `sample_input.unsqueeze(1)` adds one.",
        )


def _inside(module: nn.Module) -> list[nn.Module] | None:
    """The modules that this one applies to every step: flexsn's wrapper, SpikingJelly's and Norse's."""
    name = type(module).__name__
    if isinstance(module, PerStep) or name in ("Lift", "SeqToANNContainer"):
        return list(module.children())
    if isinstance(module, nn.Flatten) and getattr(module, "step_mode", "s") == "m":  # SpikingJelly's counts dims of one step
        return [nn.Flatten(module.start_dim, module.end_dim)]
    return None


def _sizes(shape: Sequence[int]) -> Any:
    return torch.tensor(tuple(shape), dtype=torch.long).numpy()
