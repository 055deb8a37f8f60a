"""Multi-step kernels that save intermediates: from the source of one step, or from a core.

Both go through the planner, the renderers and the launches of `flexsn.scan`; what they save is another: the intermediates that a backward
reads, of every step, in place of states every few steps. `get_*` take the source of a step, in Triton. `build_*` take a core: such a kernel
runs where its operands are, in C++ on the CPU and in Triton on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.signature import DTYPES, core_name
from .._ir.graph import Graph
from .._ir.roles import Kind, Role, of_kind
from .._plan import plan
from .._runtime.backends import BACKENDS, Backend, backend_of
from ..errors import BackendError, GraphCaptureError, OperandCountError, OperandTypeError, StateMismatchError, UnsupportedDtypeError
from .graphs import generate_forward_and_backward_graph, generate_inference_graph
from .info import FlexSNInfo, StepLayout, extract_info
from .source import ClosedStep, compile_triton_code_str, complete, example_device
from .written import FUNCTION, WrittenStep

Dtypes = Mapping[Role, torch.dtype]


class StepKernel:
    """A kernel over all of T. The functions `flexsn_*` run it.

    Attributes:
        kind: `inference` (outputs and state sequences), `inference_final_state` (outputs and final states), `forward` (outputs, state
            sequences and intermediates) or `backward`.
        info: of its step.
        core: name of its step.
    """

    _backend: str | None = None  # the only one that it runs on
    _hint: str | None = None  # where that refuses
    _source = ""  # what stands before the text of the kernel

    def __init__(self, kind: str, info: FlexSNInfo, core: str, names: Sequence[str]):
        """`names`: of the step's arguments."""
        self.kind, self.info, self.core = kind, info, core
        self._roles = info.backward_roles(names) if kind == "backward" else info.forward_roles()
        self._loaded: dict[tuple, Any] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} of {self.core}>"

    def __deepcopy__(self, memo: dict) -> StepKernel:
        return self  # it does not change

    def load(self, device: torch.device, given: Dtypes, present: tuple[str, ...] = ()) -> Any:
        """Return the loaded kernel (with its `plan`) for operands of these dtypes, by role.

        Args:
            present: backward: which cotangents there are, `gy*` of outputs and `gs*` of state sequences.
        """
        storage = self.info.dtypes(given)
        key = (device.type, tuple(storage.values()), present)
        if key not in self._loaded:  # threads that meet here get one and the same
            self._loaded.setdefault(key, self._load(device, storage, present))
        return self._loaded[key]

    def params(self, device: torch.device) -> dict[Role, Tensor]:
        """Return what the kernel reads beside its operands, by role."""
        return {}

    def _step(self, device: torch.device, storage: Dtypes) -> Graph:
        raise NotImplementedError

    def _load(self, device: torch.device, storage: Dtypes, present: tuple[str, ...]) -> Any:
        backend = BACKENDS[self._backend or backend_of(device)]
        refused = backend.refuses(device)
        if refused is not None:
            raise BackendError(refused, core=self.core, hint=self._hint)
        return backend.load(*self._render(backend, self._step(device, storage), storage, present))

    def _render(self, backend: Backend, step: Graph, storage: Dtypes, present: Sequence[str]) -> tuple[plan.KernelPlan, str]:
        """Plan the walk over T, and write it. A backward reads what was saved of every step: it needs no checkpoints."""
        storage = {**storage, **{r: step.inputs[r].dtype for r in of_kind(step.inputs, Kind.PARAM)}}
        ops = len(step.nodes) or self._source.count("\n")  # about an op per line
        chunk = backend.chunk(self.info.num_inputs, self.info.num_states, ops, 4, self.kind == "backward")
        if self.kind == "backward":
            made = plan.plan_backward(step, storage, chunk=chunk, wanted=list(step.outputs), cotangents=present)
        else:
            stored = step.select([*self.info.returns[: self.info.num_stored(self.kind)], *self.info.states])
            made = plan.plan_forward(stored, storage, chunk=chunk, checkpoint=False, sequences=False)
        return made, self._source + backend.render(made)


# --- from the source of a step ---------------------------------------------------------------------------------------------------
class SourceKernel(StepKernel):
    """A kernel of a given step function in Triton."""

    _backend, _hint = "triton", "Kernels that `build_*` makes of a core run on the CPU too."

    def __init__(self, kind: str, core_str: str, core_name: str, info: FlexSNInfo, verbose: bool):
        self._function = compile_triton_code_str(core_str, core_name)  # the table of them is weak: this keeps it
        super().__init__(kind, info, core_name, self._function.arg_names)
        # The text of a kernel goes on in a module of its own, since Triton takes functions of one name in one module for one function.
        self._source = f"{complete(core_str)}\n\n{FUNCTION}, __name__ = {core_name}, __name__ + '.kernel'\n\n"
        if verbose:
            print(self.render()[1])

    def render(self, present: Sequence[str] | None = None) -> tuple[plan.KernelPlan, str]:
        """Return plan and text for the dtypes of the info, by default with every cotangent."""
        storage, every = self.info.dtypes({}), self.info.cotangents(final=False)
        return self._render(BACKENDS["triton"], self._step(torch.device("cuda"), storage), storage, every if present is None else present)

    def _step(self, device: torch.device, storage: Dtypes) -> Graph:
        return WrittenStep(self.core, self._roles, storage)


def get_flexsn_inference_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """Return a kernel of outputs and state sequences, for `flexsn_inference`; one launch for all of T, one binary for every T.

    Args:
        core_str: source of the step, `core(*inputs, *states)` to all that `info` lists (`generate_triton_code_str`).
        core_name: name of its function.
        verbose: print the kernel's source.

    Raises:
        ValueError: the source defines no such function.
        BackendUnavailableError: triton is not installed; a `RuntimeError`.
    """
    return SourceKernel("inference", core_str, core_name, info, verbose)


def get_flexsn_inference_final_state_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """Return the same for `flexsn_inference_final_state`: outputs and final states."""
    return SourceKernel("inference_final_state", core_str, core_name, info, verbose)


def get_flexsn_forward_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """Return the same for `flexsn_forward`: everything in `info.fwd_kernel_returns`."""
    return SourceKernel("forward", core_str, core_name, info, verbose)


def get_flexsn_backward_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """Return the same for `flexsn_backward`: gradients of input sequences and initial states.

    The step takes `[*intermediates, *cotangents]` and returns one gradient per argument of the forward step. It may leave out
    cotangents of returns that are not differentiable if it names the others `grad_k`, of return k.
    """
    return SourceKernel("backward", core_str, core_name, info, verbose)


# --- from a core -------------------------------------------------------------------------------------------------------------------
class GraphKernel(StepKernel):
    """A kernel of a step graph, in the language of the operands' device."""

    def __init__(self, kind: str, core: str, info: FlexSNInfo, graph: fx.Graph):
        super().__init__(kind, info, core, [n.name for n in graph.find_nodes(op="placeholder")])
        self._graph = graph
        self._closed: dict[str, ClosedStep] = {}
        self._close(example_device(graph))

    def _step(self, device: torch.device, storage: Dtypes) -> Graph:
        return self._close(device).graph

    def params(self, device: torch.device) -> dict[Role, Tensor]:
        return self._close(device).params()

    def _close(self, device: torch.device) -> ClosedStep:
        """Return the step over the closed op set, by the eager rules of a device."""
        if device.type not in self._closed:
            self._closed[device.type] = ClosedStep(self._graph, self.core, self._roles, self.info.dtypes({}), device)
        return self._closed[device.type]


def build_inference_kernel(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None
) -> tuple[StepKernel, FlexSNInfo]:
    """Return the kernel of a core for `flexsn_inference`, and its info.

    Args:
        core_fn: `core(*inputs, *states) -> (*outputs, *new_states)`, one time step; what it captures is read at every launch.
        example_inputs: `[*inputs, *states]` at one step, left as they are; by default float32 with distinct dims, on the default
            device.

    Raises:
        ValueError: a wrong number of examples or returns, or a core that cannot be captured.
        UnsupportedOpError: an op that no kernel expresses; a `NotImplementedError`.
        TypeError: an example that is no real, dense tensor.
    """
    graph, info, _ = _settled(core_fn, num_inputs, num_states, num_outputs, example_inputs)
    return GraphKernel("inference", core_name(core_fn), info, graph), info


def build_inference_final_state_kernel(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None
) -> tuple[StepKernel, FlexSNInfo]:
    """Return the same for `flexsn_inference_final_state`."""
    graph, info, _ = _settled(core_fn, num_inputs, num_states, num_outputs, example_inputs)
    return GraphKernel("inference_final_state", core_name(core_fn), info, graph), info


def build_training_kernels(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None,
    requires_grad: Sequence[bool] | None = None,
) -> tuple[StepKernel, StepKernel, FlexSNInfo]:  # fmt: skip
    """Return the kernels of a core for `flexsn_forward` and `flexsn_backward`, and their info.

    Args:
        core_fn: as for `build_inference_kernel`. What it captures gets no gradient.
        example_inputs: likewise.
        requires_grad: one flag per example; by default every floating one is differentiated. Integers and bools never are.

    Raises:
        ValueError: as `build_inference_kernel`; a wrong number of flags; no output that is differentiable.
    """
    name, returns = core_name(core_fn), num_outputs + num_states
    _, settled, examples = _settled(core_fn, num_inputs, num_states, num_outputs, example_inputs)
    whole = torch.broadcast_tensors(*examples)  # a sum over neurons is not the kernel's
    forward, backward = generate_forward_and_backward_graph(core_fn, whole, requires_grad)
    num_saved = sum(n.name[:5] != "grad_" for n in backward.find_nodes(op="placeholder"))
    info = _info(name, forward, num_inputs, num_states, num_outputs, returns + num_saved)
    assert info.layout is not None and settled.layout is not None
    given = settled.layout.returns  # the shapes that inference gives
    info.layout = StepLayout(settled.layout.args, (*given, *info.layout.returns[returns:]))
    return GraphKernel("forward", name, info, forward), GraphKernel("backward", name, info, backward), info


def _examples(name: str, num_inputs: int, num_states: int, given: Sequence[Tensor] | None) -> list[Tensor]:
    if num_inputs < 1 or num_states < 0:
        raise OperandCountError(f"{num_inputs} inputs and {num_states} states: at least one input is needed", core=name)
    if given is None:
        device = torch.get_default_device()
        if torch.cuda.is_available() and device.type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())
        return [torch.zeros(2, 3, 5, dtype=torch.float32, device=device) for _ in range(num_inputs + num_states)]
    if len(given) != num_inputs + num_states:
        raise OperandCountError(f"{len(given)} examples for {num_inputs} inputs + {num_states} states", core=name)
    for k, example in enumerate(given):
        if not isinstance(example, Tensor) or example.layout is not torch.strided:
            raise OperandTypeError(f"example {k} is no dense tensor", core=name)
        if example.dtype not in DTYPES:
            raise UnsupportedDtypeError(f"example {k} has dtype {example.dtype}", core=name)
    return list(given)


def _settled(
    core_fn: Callable, num_inputs: int, num_states: int, num_outputs: int, given: Sequence[Tensor] | None
) -> tuple[fx.Graph, FlexSNInfo, list[Tensor]]:  # fmt: skip
    """Return graph and info of a step, and its examples, with states of the shapes that they come to: a core may broadcast them to more."""
    name, args = core_name(core_fn), None
    examples = _examples(name, num_inputs, num_states, given)
    while True:
        graph = generate_inference_graph(core_fn, examples)
        info = _info(name, graph, num_inputs, num_states, num_outputs)
        assert info.layout is not None
        args = args or info.layout.args
        returned, states = info.layout.returns[num_outputs:], examples[num_inputs:]
        try:
            shapes = [torch.broadcast_shapes(v.shape, m.shape) for v, m in zip(states, returned, strict=True)]
        except RuntimeError:
            raise StateMismatchError(f"states come back as {[list(m.shape) for m in returned]}, for other sizes", core=name) from None
        if shapes == [v.shape for v in states]:
            info.layout = StepLayout(args, info.layout.returns)
            return graph, info, examples
        examples[num_inputs:] = map(Tensor.expand, states, shapes)


def _info(name: str, graph: fx.Graph, num_inputs: int, num_states: int, num_outputs: int, num_returns: int | None = None) -> FlexSNInfo:
    info = extract_info(graph, num_inputs, num_states, num_outputs)
    if len(info.fwd_core_returns) != (num_outputs + num_states if num_returns is None else num_returns):
        raise GraphCaptureError(f"returns another number of values than {num_outputs} outputs + {num_states} states", core=name)
    assert info.layout is not None
    for meta in info.layout.returns:
        if meta.dtype not in DTYPES:
            raise UnsupportedDtypeError(f"a value of the step has dtype {meta.dtype}", core=name)
    return info
