"""All steps of a network at once: its forward is called with tensors that look like one step, and hold the sequence.

What PyTorch is asked to do to such a tensor is done to the whole sequence: elementwise functions and those that take a batch (`linear`,
`conv2d`, `max_pool2d`) take it as it is, time folded into the batch; any other function is mapped over time by `torch.vmap`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function

from .._operator.mixing.cpp_walk import by_spikes
from .._torch.tensors import unwatched
from ..errors import StaleStateError, StepByStepError
from .walks import Walk, begins, ends, walking

_OF_A_STEP = {
    *[getattr(Tensor, name).__get__ for name in ("shape", "ndim")],
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
}  # fmt: skip
_OPERATORS = "add eq ge gt le lt mul ne neg pow radd rmul rsub rtruediv sub truediv"
_ELEMENTWISE = {f"__{name}__" for name in _OPERATORS.split()} | set(
    "abs add clamp clone contiguous detach div dropout elu eq exp float double gelu ge gt half hardtanh layer_norm le leaky_relu lerp "
    "linear log lt mul ne neg pow relu rsub sigmoid silu softplus sqrt square sub tanh to true_divide type_as where".split()
)
_TAKES_A_BATCH = {"batch_norm": 0, "group_norm": 0} | {
    f"{name}{dims}d": dims + 1
    for dims in (1, 2, 3)
    for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "dropout")
}  # how many dims an input without batch has; 0: there is none
_DRAWS = set("rand randn randint randperm normal bernoulli multinomial poisson rand_like randn_like randint_like gumbel_softmax".split())
_DROPOUT = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_BATCH_NORM = list(inspect.signature(F.batch_norm).parameters)


class Step(Tensor):
    """A tensor of one step, to the network's forward; a tensor without memory, to PyTorch.

    Attributes:
        whole: its values at all steps, `[T, *shape]`.
    """

    whole: Tensor

    def at_all_steps(self, function: Callable[[Tensor], Tensor]) -> Step:
        """Return what an elementwise function that autograd is told the gradient of makes of it."""
        walk = walking.now
        if not isinstance(walk, AllSteps):
            raise _stale()
        return walk.step_of(function(whole_of_step(self)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_A_STEP:
            return super().__torch_function__(func, types, args, kwargs)
        raise _stale()


def _stale() -> StaleStateError:
    return StaleStateError(
        "a tensor of one step of `flexsn.over_time` was used after its call",
        hint="Return it from the network's forward: a sequence comes out.",
    )  # fmt: skip


def step_of(whole: Tensor) -> Step:
    """Return what stands for one step of a sequence; it requires grad as that does, so that autograd takes it as one."""
    step = torch.empty(whole.shape[1:], dtype=whole.dtype, device="meta", requires_grad=whole.requires_grad).as_subclass(Step)
    step.whole = whole
    return step


def whole_of_step(step: Step) -> Tensor:
    """Return the sequence that a step stands for.

    Raises:
        StepByStepError: it came out of a function of the user's with a backward, which autograd knows for a step alone.
    """
    whole = getattr(step, "whole", None)
    with unwatched():
        if whole is None or isinstance(step.grad_fn, BackwardCFunction):
            raise StepByStepError("a step calls a `torch.autograd.Function`, whose backward is of one step")
    return whole


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of tuples, lists and dicts, its leaves changed."""
    if isinstance(tree, (tuple, list)):
        values = [mapped(change, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return {key: mapped(change, value) for key, value in tree.items()} if isinstance(tree, dict) else change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree."""
    if isinstance(tree, (tuple, list, dict)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


def _tensors(values: Sequence[Any], kind: type) -> list[Any]:
    """Return the tensors of a kind among the leaves of values, most of which are leaves."""
    found = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += [leaf for leaf in leaves(value) if isinstance(leaf, kind)]
    return found


def whole_of(tree: Any) -> Any:
    """Return the sequences in place of the steps that stand for them."""
    return mapped(lambda leaf: whole_of_step(leaf) if isinstance(leaf, Step) else leaf, tree)


class AllSteps(TorchFunctionMode, Walk):
    """While inside, functions of PyTorch take tensors of one step, and neurons whole sequences.

    Args:
        T: how many steps.
        counts: buffers that count the calls of batch norms.
        neurons: of the network; what they carry is not to be read before the end.
    """

    def __init__(self, T: int, counts: Sequence[Tensor], neurons: Sequence[Any]):
        super().__init__()
        self.T, self.counts = T, {id(t) for t in counts}
        self.normed = set[int]()  # statistics of batch norms that were called
        self.made: list[weakref.ref[Step]] = []
        self.carried = {neuron: (neuron.states, neuron.state_seqs) for neuron in neurons}
        self.left: dict[Any, tuple[bool, Sequence[Tensor], list[Tensor] | None]] = {}
        self.watched: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        for neuron in neurons:
            self.hide(neuron)

    def neuron(self, neuron: Any, inputs: Sequence[Tensor]) -> Any:
        if neuron in self.left or neuron not in self.carried:
            what = "called twice in a step" if neuron in self.left else "no module of the network"
            raise StepByStepError(f"a {type(neuron).__name__} is {what}")
        return handle_torch_function(_run_neuron, (), self, neuron, *inputs)

    def hide(self, neuron: Any) -> None:
        """Have reads of what a neuron carries raise; of one that carries nothing, which other threads may call, nothing is written."""
        own = neuron.__dict__
        own["states"] = _NotYet() if neuron.stateful else own["states"]
        own["state_seqs"] = _NotYet() if neuron.store_state_seqs else own["state_seqs"]

    def show(self, neuron: Any) -> None:
        """Put back what a neuron carried."""
        if neuron.stateful and type(neuron.__dict__["states"]) is not _NotYet:
            raise StepByStepError("a step resets a neuron, or sets its states")
        states, sequences = self.carried[neuron]
        neuron.__dict__.update({"states": states} if neuron.stateful else {})
        neuron.__dict__.update({"state_seqs": sequences} if neuron.store_state_seqs else {})

    def step_of(self, whole: Tensor) -> Step:
        """Return what stands for one step of a sequence."""
        step = step_of(whole)
        self.made.append(weakref.ref(step))
        return step

    def _step_or_value(self, leaf: Any) -> Any:
        return self.step_of(leaf) if isinstance(leaf, Tensor) else leaf

    def kept(self, results: Any) -> bool:
        """Return whether something beside the results holds a tensor of one step."""
        returned = {id(leaf) for leaf in leaves(results)} | {id(output) for output, _ in self.watched}
        return any((step := ref()) is not None and id(step) not in returned for ref in self.made)

    def finish(self) -> None:
        """Have the neurons carry their states."""
        for neuron in self.carried:
            self.show(neuron)
            if neuron in self.left:
                ends(neuron, *self.left[neuron])
        for output, see in self.watched:
            see(self.sequence(output))

    def watch(self, record: Any, output: Tensor, see: Callable[[Tensor], None]) -> None:
        self.watched.append((output, see))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_A_STEP:
            return func(*args, **kwargs)
        if func is _run_neuron:
            with self.on(None):
                return mapped(self._step_or_value, _run_neuron(self, args[1], *[self.sequence(x) for x in args[2:]]))
        steps = _tensors((*args, *kwargs.values()), Step)
        name = getattr(func, "__name__", "")
        if not steps:
            return self._without_steps(func, name, args, kwargs)
        if name == "__get__" and not isinstance(value := func(*whole_of(args)), Tensor):
            return value
        if name in ("is_floating_point", "is_complex", "get_device", "is_contiguous"):
            return func(*whole_of(args), **kwargs)
        if name == "batch_norm" and dict(zip(_BATCH_NORM, args, strict=False)).get("training", kwargs.get("training")):
            statistics = dict(zip(_BATCH_NORM, args, strict=False)).get("running_mean", kwargs.get("running_mean"))
            if statistics is not None and id(statistics) in self.normed:
                raise StepByStepError("a batch norm is called twice in a step, in training")
            self.normed.add(id(statistics))
            rows = whole_of_step(steps[0]).unbind(0)  # each with its own statistics, which the running ones follow step by step
            return self.step_of(torch.stack([func(row, *args[1:], **kwargs) for row in rows]))
        if (rank := _TAKES_A_BATCH.get(name)) is not None and len(steps) == 1 and args and args[0] is steps[0]:
            return mapped(self._step_or_value, _in_the_batch(func, steps[0], rank, args[1:], kwargs))
        if func in (torch.flatten, Tensor.flatten) and args and args[0] is steps[0] and steps[0].dim():
            dims = after_time(*args[1:], **kwargs)
            if min(dims) >= -steps[0].dim():
                return self.step_of(whole_of_step(steps[0]).flatten(*dims))
        if name in _ELEMENTWISE and _aligned(name, args, kwargs):
            whole, options = whole_of(args), whole_of(kwargs)
            found = linear_by_spikes(*whole, **options) if func is F.linear else None
            return mapped(self._step_or_value, func(*whole, **options) if found is None else found)
        return self._over_time(func, args, kwargs, steps)

    def sequence(self, x: Tensor) -> Tensor:
        """Return a tensor at all steps."""
        if isinstance(x, Step):
            return whole_of_step(x)
        if x.is_meta:
            raise StepByStepError("a step calls what cannot be seen, as a scripted function")
        return x.expand(self.T, *x.shape)

    def _without_steps(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of what is the same at all steps."""
        if name == "add_" and id(args[0]) in self.counts:
            return func(args[0], args[1] * self.T)
        if name in _DRAWS or (name in _DROPOUT and kwargs.get("training", args[2] if len(args) > 2 else True)):
            raise StepByStepError(f"`{name}` draws random numbers that no tensor of the step leads to")
        if "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i"):
            raise StepByStepError(f"`{name}` writes to a tensor that is the same at all steps")
        return func(*args, **kwargs)

    def _over_time(self, func: Any, args: tuple, kwargs: dict[str, Any], steps: Sequence[Step]) -> Any:
        """Map a function over time."""

        if isinstance(func, torch.jit.ScriptFunction):
            raise StepByStepError("a step calls a scripted function")
        returned: Any = None

        def at_one_step(*given: Tensor) -> tuple[Tensor, ...]:
            nonlocal returned
            values = iter(given)
            args_, kwargs_ = mapped(lambda leaf: next(values) if isinstance(leaf, Step) else leaf, (args, kwargs))
            result = func(*args_, **kwargs_)
            returned = args_[0] if result is None else result  # of `x[:, 0] = y`
            return tuple([leaf for leaf in leaves(returned) if isinstance(leaf, Tensor)])

        results = iter(torch.vmap(at_one_step, randomness="different")(*map(whole_of_step, steps)))
        return mapped(lambda leaf: self.step_of(next(results)) if isinstance(leaf, Tensor) else leaf, returned)


class _NotYet(list):
    """In place of what a neuron carries, while all steps run at once."""

    def _read(self, *args: Any) -> Any:
        raise StepByStepError("a step reads the states of a neuron")

    __getitem__ = __iter__ = __len__ = __bool__ = _read


def _run_neuron(walk: AllSteps, neuron: Any, *inputs: Tensor) -> Any:
    """Run a neuron over sequences."""
    walk.show(neuron)
    anew, states = begins(neuron, inputs)
    outputs, finals, sequences = walk.run(neuron, inputs, states)
    walk.left[neuron] = anew, finals, sequences
    walk.hide(neuron)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _in_the_batch(func: Any, step: Step, rank: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that takes a batch, time folded into it."""
    whole = whole_of_step(step)
    if step.dim() == rank:  # a step has no batch
        return func(whole, *args, **kwargs)
    return mapped(lambda y: y.unflatten(0, whole.shape[:2]), func(whole.flatten(0, 1), *args, **kwargs))


def after_time(start_dim: int = 0, end_dim: int = -1) -> tuple[int, ...]:
    """Return dims of a step as those of a sequence."""
    return tuple([dim + (dim >= 0) for dim in (start_dim, end_dim)])


def linear_by_spikes(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Return what a linear layer, whose arguments these are, makes of all steps; None where it is not worth to look at spikes alone."""
    return by_spikes(input, weight.T, bias)


def _aligned(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the dims of all tensors, from the last one on, are those of one step."""
    tensors = _tensors((*args, *kwargs.values()), Tensor)
    if name in ("linear", "layer_norm"):  # of the last dims, by tensors that are the same at all steps
        least = 1 if name == "linear" else len(args[1] if len(args) > 1 else kwargs["normalized_shape"])
        if tensors[0].dim() < least:  # `vmap` would take time for one of them
            raise StepByStepError(f"a step has fewer dims than `{name}` takes")
        return isinstance(tensors[0], Step) and not any(isinstance(t, Step) for t in tensors[1:])
    ranks = {t.dim() for t in tensors if isinstance(t, Step)}
    return len(ranks) == 1 and all(t.dim() <= min(ranks) for t in tensors)
