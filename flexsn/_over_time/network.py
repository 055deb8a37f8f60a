"""`flexsn.over_time`: a network whose forward is one step, as a module that takes sequences."""

from __future__ import annotations

import gc
import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._captured.uneven import check_lengths, cleared
from .._operator.fallback import warn_once
from .._torch.autograd import current_backward
from .._torch.compiling import outside_dynamo
from ..errors import ArgumentError, SequenceLengthError, StaleStateError, StepByStepError
from .chains import BATCH_NORMS, chain, run_chain
from .steps import AllSteps, leaves, mapped
from .walks import PlainLoop, walking

_INTERNAL = nn.Module().__dict__.keys()


class OverTime(nn.Module):
    """A network whose forward is one step, as a module that takes sequences; `flexsn.over_time` makes one.

    Attributes:
        network: what was given.
        reason: why its last call ran step by step; None if it did not.
    """

    def __init__(self, network: nn.Module, strict: bool):
        super().__init__()
        self.network, self.strict = network, strict
        self.reason: str | None = None
        self._reasons: dict[tuple[bool, ...], StepByStepError] = {}  # by which modules train

    @outside_dynamo("flexsn.over_time calls the network with tensors that stand for one step: compile what lies around it")
    def forward(self, *inputs: Any, lengths: Tensor | None = None, **named: Any) -> Any:
        """`[T, *shape]` of each input to `[T, *shape]` of each output.

        Args:
            lengths: int32 or int64 `[B]`: how many steps each sequence has, of inputs `[T, B, *]`. Neurons stop there, as of `flexsn.scan`,
                inputs and outputs `[T, B, *]` are zero after it; other layers, a batch norm in training among them, see all steps.
        """
        if isinstance(walking.now, AllSteps):
            raise StepByStepError("a step calls another `over_time`")
        if lengths is not None:
            if "lengths" in inspect.signature(self.network.forward).parameters:
                raise ArgumentError("over_time takes `lengths`, and so does the network", hint="Give it another name there.")
            check_lengths(lengths, [x for x in leaves((inputs, named)) if isinstance(x, Tensor)])
            inputs, named = mapped(lambda x: cleared(x, lengths) if isinstance(x, Tensor) else x, (inputs, named))
        results = self._run(inputs, named, lengths)
        return results if lengths is None else mapped(lambda y: cleared(y, lengths) if isinstance(y, Tensor) else y, results)

    def _run(self, inputs: tuple[Any, ...], named: dict[str, Any], lengths: Tensor | None) -> Any:
        """Run the network; outputs past the lengths may be anything."""
        if len(inputs) == 1 and not named and (chained := self._chained(inputs[0], lengths)) is not None:
            if self.reason is not None:
                self.reason = None
            return chained
        T, given = _length((inputs, named)), (inputs, named)
        modules = list(self.network.modules())
        training = tuple([m.training for m in modules])
        why = self._reasons.get(training) or _refused(modules)
        if why is None:
            before, versions = _Before(modules), _versions(given)
            try:
                results = self._at_once(T, given, modules, before, lengths)
            except Exception as error:  # whatever it is: the loop raises what the user's own step does
                before.restore()
                if current_backward() >= 0:  # an activation checkpoint runs the call again, and stops it when it has what it needs
                    raise
                if isinstance(error, StaleStateError) or _versions(given) != versions:  # a loop would go on from what is written
                    raise
                why = error if isinstance(error, StepByStepError) else StepByStepError(_told(error))
                results = self._step_by_step(T, given, why, lengths)
                self._reasons[training] = why
        else:
            results = self._step_by_step(T, given, why, lengths)
        self.reason = None if why is None else why.reason
        return results

    def _chained(self, x: Any, lengths: Tensor | None) -> Tensor | None:
        """Return what a chain of layers makes of a sequence; None where the network is none, or a layer raises: what is said of it then
        comes from a call with steps."""
        if type(x) is not Tensor or not x.dim() or x.dtype is torch.bool or (layers := chain(self.network)) is None:
            return None
        try:
            return run_chain(layers, x, lengths)
        except Exception:  # whatever it is, the call with steps raises it anew
            if current_backward() >= 0:  # an activation checkpoint runs the call again, and stops it when it has what it needs
                raise
            return None

    def _at_once(self, T: int, given: Any, modules: Sequence[nn.Module], before: _Before, lengths: Tensor | None) -> Any:
        counts = [m.num_batches_tracked for m in modules if isinstance(m, BATCH_NORMS) and m.training and m.num_batches_tracked is not None]
        walk = AllSteps(T, counts, [m for m in modules if _is_neuron(m)])
        walk.lengths = lengths
        with walk, walk.on(walk):
            inputs, named = mapped(lambda x: walk.step_of(x) if isinstance(x, Tensor) else x, given)
            results = self.network(*inputs, **named)
            del inputs, named
        if any(not isinstance(y, Tensor) and y is not None for y in leaves(results)):
            raise StepByStepError("a step returns something else than tensors")
        if (written := before.written()) is not None:
            raise StepByStepError(f"a step writes to `{written}`")
        sequences = mapped(lambda y: walk.sequence(y) if isinstance(y, Tensor) else y, results)
        if walk.kept(results) and (gc.collect(), walk.kept(results))[1]:  # no frame of an error that was caught, but the user
            raise StaleStateError(
                "a step of `flexsn.over_time` keeps a tensor outside of the network's modules, where it is not found again",
                hint="Keep it in an attribute of a module, or make it a state of a `flexsn.FlexSN`.",
            )  # fmt: skip
        walk.finish()
        return sequences

    def _step_by_step(self, T: int, given: Any, why: StepByStepError, lengths: Tensor | None) -> Any:
        if self.strict:
            raise why
        if not T:
            raise SequenceLengthError("over_time runs this network step by step, and there is no step", hint=f"Because {why.reason}.")
        walk = PlainLoop()
        try:
            steps = []
            with walk.on(walk):
                for t in range(T):
                    walk.lengths = None if lengths is None else lengths - t
                    inputs, named = _at(t, given)
                    steps.append(self.network(*inputs, **named))
        except BaseException:  # whatever ends the call, it has carried nothing
            walk.undo()
            raise
        walk.finish()
        warn_once("a network step by step", why)
        columns = [list(column) for column in zip(*map(leaves, steps), strict=True)]
        if odd := [y for column in columns for y in column if not isinstance(y, Tensor) and y is not None]:
            raise ArgumentError(f"over_time: the network returned a {type(odd[0]).__name__}", hint="It returns tensors, or tuples of them.")
        joined = iter([None if column[0] is None else torch.stack(column) for column in columns])
        return mapped(lambda _: next(joined), steps[0])

    def extra_repr(self) -> str:
        return "strict=True" if self.strict else ""


def over_time(network: nn.Module, *, strict: bool = False) -> OverTime:
    """Return a module that runs `network`, whose forward is one step, over whole sequences: `[T, *shape]` to `[T, *shape]`.

    It holds the network: no copy is made, parameters are shared. Every flexsn neuron inside takes one step for each step of the
    sequence, whatever its `step_mode` says; states start, are carried, reset and detached as each neuron says.

    All steps run at once: the network's forward is called once, with tensors that look like one step. Neurons run their fused
    kernels over the sequence; linear, convolutional and pooling layers take time folded into the batch; what else the forward does is
    mapped over time. A batch norm in training has the statistics of each step, and its running ones are as after T steps; dropout
    draws for every step. `flexsn.monitor`, and neurons that store states, see whole sequences.

    A network that cannot be run so is run step by step, a neuron's kernel at a time, and a `FallbackWarning` says why: its forward
    writes to an attribute of a module or to a buffer, reads values or the states of a neuron, calls a neuron twice, draws random numbers
    that have no step (a dropout of weights); a layer has hooks, or is a batch norm in training without momentum. What a forward keeps
    elsewhere in Python (a global counter, `random.random()`) is not seen.

    Args:
        network: takes and returns tensors of one step, or tuples, lists or dicts of them. What is the same at all steps is no input:
            hold it in an attribute.
        strict: raise where it would run step by step.

    Returns:
        A module with attributes `network`, and `reason`: why the last call ran step by step. `torch.compile` breaks its graph there,
        and the kernels run as they do in eager mode.

    Raises:
        ArgumentError: `network` is no module.
        SequenceLengthError: inputs of different lengths.
        StepByStepError: of a call, with `strict`: all steps cannot run at once.
        StaleStateError: of a call: a step keeps a tensor outside of the network's modules.
    """
    if not isinstance(network, nn.Module):
        raise ArgumentError(f"over_time takes a module, not a {type(network).__name__}", hint="Its forward is one step.")
    return OverTime(network, strict)


def _length(inputs: Any) -> int:
    lengths = {x.shape[0] if x.dim() else None for x in leaves(inputs) if isinstance(x, Tensor)}
    if len(lengths) == 1 and None not in lengths:
        return next(iter(lengths))  # type: ignore[return-value]  # it is not None
    told = "no tensor" if not lengths else "a tensor without dims" if None in lengths else f"sequences of lengths {sorted(lengths)}"  # type: ignore[type-var]  # they are numbers
    raise SequenceLengthError(f"over_time was given {told}", hint="Its inputs are sequences of one length, [T, *shape].")


_READS = ("data-dependent", "data pointer", ".item()")  # PyTorch's words


def _told(error: Exception) -> str:
    text = str(error)
    if "TorchScript" in text:
        return "a step calls a scripted function"
    return "a step reads values into Python" if any(words in text for words in _READS) else f"{type(error).__name__}: {text}"


def _versions(tree: Any) -> list[int]:
    """Return how often inputs have been written to."""
    return [x._version for x in leaves(tree) if isinstance(x, Tensor) and not x.is_inference()]


def _at(t: int, inputs: Any) -> Any:
    """Return step `t` of sequences."""
    return mapped(lambda x: x[t] if isinstance(x, Tensor) else x, inputs)


def _is_neuron(module: nn.Module) -> bool:
    return getattr(module, "runs_sequences", False)


def _refused(modules: Sequence[nn.Module]) -> StepByStepError | None:
    """Return why not all steps can run at once, as far as that is known beforehand."""
    for module in modules:
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not getattr(hook, "takes_steps", False):
                return StepByStepError(f"a {type(module).__name__} has a hook, which sees one step")
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            return StepByStepError("a SyncBatchNorm in training exchanges statistics at every step")
        if isinstance(module, BATCH_NORMS) and module.training and module.momentum is None:
            return StepByStepError(
                f"a {type(module).__name__} in training has no momentum: its running statistics depend on the number of steps"
            )
    return None


class _Before:
    """What a network was before a call: to find what the call wrote to, and to put it back."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.attributes = [(m, m.__dict__.copy(), m._buffers.copy()) for m in modules]
        own = [(m, [(key, value) for key, value in m.__dict__.items() if key not in _INTERNAL]) for m in modules if not _is_neuron(m)]
        self.own = [(m, found) for m, found in own if found]
        held = [(m, key, value) for m, found in self.own for key, value in found if isinstance(value, (list, deque, dict))]
        self.containers = [(m, key, value, list(_items(value))) for m, key, value in held]
        norms = [m for m in modules if isinstance(m, BATCH_NORMS) and m.training]
        self.statistics = [(b, b.clone()) for m in norms for b in m.buffers(recurse=False)]

    def written(self) -> str | None:
        """Return the name of an attribute that is another now, of a module that is no neuron."""
        for module, before, buffers in self.attributes:
            if len(module.__dict__) != len(before) and not _is_neuron(module):
                return f"{type(module).__name__}.{next(key for key in module.__dict__ if key not in before)}"
            for key, buffer in buffers.items():
                if module._buffers.get(key) is not buffer:
                    return f"{type(module).__name__}.{key}"
        for module, found in self.own:
            for key, value in found:
                if module.__dict__.get(key) is not value:
                    return f"{type(module).__name__}.{key}"
        for module, key, value, items in self.containers:
            after = list(_items(value))
            if len(after) != len(items) or any(a is not b for a, b in zip(after, items, strict=True)):
                return f"{type(module).__name__}.{key}"
        return None

    def restore(self) -> None:
        for module, own, buffers in self.attributes:
            module.__dict__.clear()
            module.__dict__.update(own)
            module._buffers.clear()
            module._buffers.update(buffers)
        for _, _, value, items in self.containers:
            value.clear()
            value.update(zip(items[::2], items[1::2], strict=True)) if isinstance(value, dict) else value.extend(items)
        with torch.no_grad():
            for buffer, values in self.statistics:
                buffer.copy_(values)


def _items(value: Any) -> Iterator[Any]:
    """Yield what a container holds; of a dict keys and values."""
    if isinstance(value, dict):
        for pair in value.items():
            yield from pair
    else:
        yield from value
