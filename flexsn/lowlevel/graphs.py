"""One step as flat ATen graphs, by AOTAutograd: forward alone, or forward and backward with what is saved between them.

`flexsn.scan` recomputes the forward inside the backward and traces by itself (`_capture/trace.py`); this is the other policy,
which saves intermediates, for the kernels of `flexsn.lowlevel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.signature import core_name
from .._captured.captured_values import lock  # AOTAutograd swaps what belongs to the whole process, and puts it back
from .._torch.aot_autograd import aot_graph, load_aot, min_cut
from .._torch.availability import KERNELS, LOWLEVEL, require
from .._torch.capture import start_autograd
from .._torch.fake_tensors import FakeTensorMode, fake_errors_unlogged
from ..errors import FlexSNError, GraphCaptureError

aten = torch.ops.aten


def generate_inference_graph(fn: Callable[..., Any], example_inputs: Sequence[Any]) -> fx.Graph:
    """Return the flat ATen graph of `fn`: one placeholder per example, no `detach`, nothing in place.

    Args:
        fn: returns a tensor, or a list or tuple of tensors.
        example_inputs: give shapes, dtypes and devices, and are left as they are; what is not a tensor goes to `fn` as it is.

    Returns:
        The graph. Tensors that `fn` captured are attributes of `graph.owning_module`.

    Raises:
        ValueError: nothing could be captured.
    """
    traced = _Traced(fn, example_inputs)
    with _capturing(traced, [False] * len(traced.examples)) as tensors:
        module = aot_graph(traced, tensors, joint=False)
    _clean(module.graph, len(traced.differentiable))
    _pass_through(module.graph, traced.examples)
    return _finished(module)


def generate_forward_and_backward_graph(
    fn: Callable[..., Any], example_inputs: Sequence[Any], requires_grad: Sequence[bool] | None = None
) -> tuple[fx.Graph, fx.Graph]:
    """Return `fn` and its backward as two flat ATen graphs, cut such that little is saved between them.

    Args:
        fn: returns a tensor, or a list or tuple of tensors.
        example_inputs: as for `generate_inference_graph`.
        requires_grad: one flag per example; by default every floating tensor is differentiated. Integers and bools never are.

    Returns:
        The forward graph, `fn`'s arguments to `[*returns, *intermediates]`, and the backward graph, `[*intermediates,
        *cotangents]` to one gradient per example (None where there is none). Cotangents exist for differentiable returns
        alone; `grad_k` is that of return k.

    Raises:
        ValueError: the graph could not be captured, the number of flags is not that of the examples, `fn` returns something
            else than a tensor, list or tuple, or nothing that it returns is differentiable.
    """
    traced = _Traced(fn, example_inputs)
    flags = [True] * len(traced.examples) if requires_grad is None else [bool(flag) for flag in requires_grad]
    if len(flags) != len(traced.examples):
        raise GraphCaptureError(f"{len(flags)} flags in `requires_grad` for {len(traced.examples)} examples", core=traced.name)
    with _capturing(traced, flags) as tensors:
        traced(*tensors)
        returned = traced.differentiable
        if not any(returned):
            raise GraphCaptureError("returns nothing that is differentiable in its examples", core=traced.name)
        joint = aot_graph(traced, tensors, joint=True)
        _clean(joint.graph, len(returned))
        forward, backward = min_cut(joint, len(returned))
    _name_cotangents(backward.graph, [k for k, differentiable in enumerate(returned) if differentiable])
    _pass_through(forward.graph, traced.examples)
    _pass_back(backward.graph, traced.examples)
    return _finished(forward), _finished(backward)


def output_values(graph: fx.Graph) -> list[fx.Node | None]:
    """Return what a graph returns, as a list."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


class _Traced:
    """`fn` as a function of the tensors among its examples, which it cannot write into nor return."""

    def __init__(self, fn: Callable[..., Any], example_inputs: Sequence[Any]):
        self.fn, self.name, self.examples = fn, core_name(fn), list(example_inputs)
        self.differentiable: list[bool] = []  # of the returns, at the latest call

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        returned = self.fn(*[next(given).clone() if isinstance(e, Tensor) else e for e in self.examples])
        if not isinstance(returned, (Tensor, tuple, list)):
            raise GraphCaptureError(f"returned {type(returned).__name__}, not a tensor, list or tuple", core=self.name)
        values = (returned,) if isinstance(returned, Tensor) else tuple(returned)
        for k, value in enumerate(values):
            if not isinstance(value, Tensor):
                raise GraphCaptureError(f"return value {k} is {type(value).__name__}, not a tensor", core=self.name)
        copies = tuple([value.clone() for value in values])
        self.differentiable = [copy.requires_grad for copy in copies]
        return copies


@contextlib.contextmanager
def _capturing(traced: _Traced, flags: Sequence[bool]) -> Iterator[list[Tensor]]:
    """Give fake tensors like the examples, in the surroundings in which a core is traced."""
    require(LOWLEVEL)
    require(KERNELS)
    load_aot()
    start_autograd()
    autocasts = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with lock, fake_errors_unlogged(), torch.inference_mode(False), torch.enable_grad(), autocasts[0], autocasts[1]:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                tensors = [_like(e, flag) for e, flag in zip(traced.examples, flags, strict=True) if isinstance(e, Tensor)]
                if not tensors:
                    raise GraphCaptureError("was given no example that is a tensor", core=traced.name)
                yield tensors
        except FlexSNError:
            raise
        except Exception as error:  # whatever the function or the tracer raises
            raise GraphCaptureError(f"could not be captured: {type(error).__name__}: {error}", core=traced.name) from error


def _like(example: Tensor, differentiate: bool) -> Tensor:
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
    return made.requires_grad_(differentiate and (made.is_floating_point() or made.is_complex()))


def _clean(graph: fx.Graph, num_returns: int) -> None:
    """Remove what is no computation: `detach`, assertions, and the copies that `_Traced` makes."""
    copies = {n for n in output_values(graph)[:num_returns] if n is not None and n.target is aten.clone.default}
    for node in list(graph.nodes):
        of_example = node.target is aten.clone.default and node.args[0].op == "placeholder"
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node in copies or of_example or node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _name_cotangents(graph: fx.Graph, returns: Sequence[int]) -> None:
    placeholders = graph.find_nodes(op="placeholder")
    for node, k in zip(placeholders[len(placeholders) - len(returns) :], returns, strict=True):
        node._rename(f"grad_{k}")
        node.target = node.name


def _pass_through(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Give every example a placeholder, used or not."""
    placeholders = graph.find_nodes(op="placeholder")
    after = next(n for n in graph.nodes if n.op != "placeholder")
    for k, example in enumerate(examples):
        if not isinstance(example, Tensor):
            with graph.inserting_before(placeholders[k] if k < len(placeholders) else after):
                placeholders.insert(k, graph.placeholder(f"constant_{k}"))


def _pass_back(graph: fx.Graph, examples: Sequence[Any]) -> None:
    """Return a gradient, or None, for every example."""
    (output,) = graph.find_nodes(op="output")
    found = iter(output_values(graph))
    output.args = ([next(found) if isinstance(e, Tensor) else None for e in examples],)


def _finished(module: fx.GraphModule) -> fx.Graph:
    module.graph.lint()
    module.recompile()
    return module.graph
