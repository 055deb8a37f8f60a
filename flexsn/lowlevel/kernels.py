"""Multi-step kernels that save intermediates: from the source of one step, or from a core.

`get_*` take the source of a step and loop over it in Triton. `build_*` take a core: its graphs, closed, go through the plan,
render and launch of `flexsn.scan`; such a kernel runs where its operands are, in C++ on the CPU and in Triton on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.signature import DTYPES, core_name
from .._ir.graph import Graph
from .._plan import plan
from .._runtime import triton_kernel as launch_triton
from .._runtime.backends import BACKENDS
from ..errors import BackendError, GraphCaptureError, OperandCountError, OperandTypeError, UnsupportedDtypeError
from . import render as step_render
from .graphs import generate_forward_and_backward_graph, generate_inference_graph
from .info import FlexSNInfo, dtypes, extract_info
from .render import cotangent_roles, saved_roles
from .source import Closed, compile_triton_code_str, complete, example_device

Dtypes = Mapping[str, torch.dtype]


class StepKernel:
    """A kernel over all of T. The functions `flexsn_*` run it.

    Attributes:
        kind: `inference` (outputs and state sequences), `final` (outputs and final states), `forward` (those of `inference`,
            and intermediates) or `backward`.
        info: of its step.
        core: name of its step.
    """

    def __init__(self, kind: str, info: FlexSNInfo, core: str):
        self.kind, self.info, self.core = kind, info, core
        self._loaded: dict[tuple, Any] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} of {self.core}>"

    def __deepcopy__(self, memo: dict) -> StepKernel:
        return self  # it does not change

    @property
    def num_returns(self) -> int:
        """How many sequences a forward kernel stores."""
        info = self.info
        return {"inference": info.num_returns, "final": info.num_outputs}.get(self.kind, info.num_fwd_kernel_returns)

    def load(self, device: torch.device, given: Dtypes, present: tuple[str, ...] = ()) -> Any:
        """The loaded kernel (with its `plan`) for operands of these dtypes, by role.

        Args:
            present: backward: which cotangents there are, `gy*` of outputs and `gs*` of state sequences.
        """
        storage = dtypes(self.info, given)
        if self.kind == "backward":
            roles = zip(saved_roles(self.info), self.info.c2k_return_mapping, strict=True)
            storage |= {role: given[role] if self.info.layout is None else storage[f"y{j}"] for role, j in roles}
        key = (device.type, tuple(storage.values()), present)
        if key not in self._loaded:  # threads that meet here get one and the same
            self._loaded.setdefault(key, self._load(device, storage, present))
        return self._loaded[key]

    def params(self, device: torch.device) -> dict[str, Tensor]:
        """What the kernel reads beside its operands, by role."""
        return {}

    def _load(self, device: torch.device, storage: Dtypes, present: tuple[str, ...]) -> Any:
        raise NotImplementedError


# --- from the source of a step ---------------------------------------------------------------------------------------------------
class SourceKernel(StepKernel):
    """A Triton loop over a given step function."""

    def __init__(self, kind: str, core_str: str, core_name: str, info: FlexSNInfo, verbose: bool):
        super().__init__(kind, info, core_name)
        self._function = compile_triton_code_str(core_str, core_name)  # the table of them is weak: this keeps it
        self._source = complete(core_str)
        self._cotangents = _cotangents(self._function, info) if kind == "backward" else []
        if verbose:
            print(self.render()[1])

    def render(self, present: Sequence[str] | None = None) -> tuple[plan.Plan, str]:
        """Plan and text for the dtypes of the info, by default with every cotangent."""
        storage = dtypes(self.info, {})
        saved = zip(saved_roles(self.info), self.info.c2k_return_mapping, strict=True)
        every = [r.replace("gv", "gs") for r in cotangent_roles(self.info)]
        return self._render({**storage, **{role: storage[f"y{j}"] for role, j in saved}}, every if present is None else present)

    def _render(self, storage: Dtypes, present: Sequence[str]) -> tuple[plan.Plan, str]:
        if self.kind == "backward":
            read = [r for r in present if r[:2] == "gs" or r in self._cotangents]
            made = step_render.backward_plan(self.core, self.info, storage, read)
            return made, self._source + step_render.backward_text(made, self.info, self._cotangents, storage)
        made = step_render.forward_plan(self.core, self.info, storage, self.num_returns)
        return made, self._source + step_render.forward_text(made, self.info)

    def _load(self, device: torch.device, storage: Dtypes, present: tuple[str, ...]) -> Any:
        refused = launch_triton.check_device(device)
        if refused is not None:
            raise BackendError(refused, core=self.core, hint="Kernels that `build_*` makes of a core run on the CPU too.")
        return launch_triton.load(*self._render(storage, present))


def _cotangents(function: Any, info: FlexSNInfo) -> list[str]:
    """Roles of the cotangents that a backward step function takes: all of them, or those that it names `grad_k`."""
    names = list(function.arg_names)[len(info.c2k_return_mapping) :]
    roles = cotangent_roles(info)
    if len(names) == len(roles):
        return roles
    by_name = {f"grad_{k}": role for k, role in enumerate(roles)}
    if not all(name in by_name for name in names):
        raise GraphCaptureError(
            f"a backward step of {len(info.c2k_return_mapping)} saved values and cotangents {names}, for {len(roles)} returns",
            hint="A step that lacks some cotangents names the others `grad_k`, of return k.",
        )
    return [by_name[name] for name in names]


def get_flexsn_inference_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """A kernel of outputs and state sequences, for `flexsn_inference`; one launch for all of T, one binary for every T.

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
    """The same for `flexsn_inference_final_state`: outputs and final states."""
    return SourceKernel("final", core_str, core_name, info, verbose)


def get_flexsn_forward_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """The same for `flexsn_forward`: everything in `info.fwd_kernel_returns`."""
    return SourceKernel("forward", core_str, core_name, info, verbose)


def get_flexsn_backward_kernel(core_str: str, core_name: str, info: FlexSNInfo, verbose: bool = False) -> StepKernel:
    """The same for `flexsn_backward`: gradients of input sequences and initial states.

    The step takes `[*intermediates, *cotangents]` and returns one gradient per argument of the forward step. It may leave out
    cotangents of returns that are not differentiable if it names the others `grad_k`, of return k.
    """
    return SourceKernel("backward", core_str, core_name, info, verbose)


# --- from a core -------------------------------------------------------------------------------------------------------------------
class GraphKernel(StepKernel):
    """A step graph, planned and rendered for the device of the operands."""

    def __init__(self, kind: str, core: str, info: FlexSNInfo, graph: fx.Graph):
        super().__init__(kind, info, core)
        self._graph = graph
        self._closed: dict[str, Closed] = {}
        self.closed(example_device(graph))

    def closed(self, device: torch.device) -> Closed:
        """The step over the closed op set, by the eager rules of a device."""
        if device.type not in self._closed:
            self._closed[device.type] = self._close(device)
        return self._closed[device.type]

    def _close(self, device: torch.device) -> Closed:
        info, storage = self.info, dtypes(self.info, {})
        ins = [*(f"x{k}" for k in range(info.num_inputs)), *(f"v{k}" for k in range(info.num_states))]
        states = [f"v{k}" for k in range(info.num_states)]
        if self.kind == "backward":
            names = {f"grad_{k}": role for k, role in enumerate(cotangent_roles(info))}
            found = self._graph.find_nodes(op="placeholder")[len(info.c2k_return_mapping) :]
            roles = [*saved_roles(info), *(names[n.name] for n in found)]
            closed = Closed(self._graph, self.core, roles, [f"g{r}" for r in ins], {f"g{v}": storage[v] for v in states}, device)
            for v in states:
                if f"g{v}" not in closed.graph.outputs:
                    closed.zero(f"g{v}", storage[v])
            return closed
        kept = iter(range(info.num_fwd_kernel_returns))
        results = [f"y{next(kept)}" if name != "_" else f"_{k}" for k, name in enumerate(info.fwd_core_recipients)]
        closed = Closed(self._graph, self.core, ins, results, {v: storage[v] for v in states}, device)
        for k, v in enumerate(states):
            closed.carry(v, f"y{info.num_outputs + k}", storage[v])
        return closed

    def params(self, device: torch.device) -> dict[str, Tensor]:
        return {role: t.to(device) for role, t in self.closed(device).params().items()}

    def _load(self, device: torch.device, storage: Dtypes, present: tuple[str, ...]) -> Any:
        name = "cpp" if device.type == "cpu" else "triton"
        backend, graph = BACKENDS[name], self.closed(device).graph
        refused = backend.refuses(device)
        if refused is not None:
            raise BackendError(refused, core=self.core)
        storage = {**storage, **{r: n.dtype for r, n in graph.inputs.items() if r[0] == "p"}}
        chunk = backend.chunk(self.info.num_inputs, self.info.num_states, len(graph.nodes), 4, self.kind == "backward")
        made = self._plan(graph, storage, chunk, present)
        return backend.load(made, backend.render(made))

    def _plan(self, graph: Graph, storage: Dtypes, chunk: int, present: tuple[str, ...]) -> plan.Plan:
        if self.kind == "backward":
            return plan.plan_backward(graph, dict(storage), chunk=chunk, wanted=list(graph.outputs), cotangents=present)
        wanted = [*(f"y{j}" for j in range(self.num_returns)), *(f"v{k}" for k in range(self.info.num_states))]
        return plan.plan_forward(graph.select(wanted), dict(storage), chunk=chunk, checkpoint=False, sequences=False)


def build_inference_kernel(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None
) -> tuple[StepKernel, FlexSNInfo]:
    """The kernel of a core for `flexsn_inference`, and its info.

    Args:
        core_fn: `core(*inputs, *states) -> (*outputs, *new_states)`, one time step; what it captures is read at every launch.
        example_inputs: `[*inputs, *states]` at one step, left as they are; by default float32 with distinct dims, on the default
            device.

    Raises:
        ValueError: a wrong number of examples or returns, or a core that cannot be captured.
        UnsupportedOpError: an op that no kernel expresses; a `NotImplementedError`.
        TypeError: an example that is no real, dense tensor.
    """
    return _build_inference("inference", core_fn, num_inputs, num_states, num_outputs, example_inputs)


def build_inference_final_state_kernel(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None
) -> tuple[StepKernel, FlexSNInfo]:
    """The same for `flexsn_inference_final_state`."""
    return _build_inference("final", core_fn, num_inputs, num_states, num_outputs, example_inputs)


def _build_inference(kind: str, core_fn, num_inputs: int, num_states: int, num_outputs: int, example_inputs):
    name = core_name(core_fn)
    examples = _examples(name, num_inputs, num_states, example_inputs)
    graph = generate_inference_graph(core_fn, examples)
    info = _info(name, graph, num_inputs, num_states, num_outputs)
    return GraphKernel(kind, name, info, graph), info


def build_training_kernels(
    core_fn: Callable[..., Any], num_inputs: int, num_states: int, num_outputs: int, example_inputs: Sequence[Tensor] | None = None,
    requires_grad: Sequence[bool] | None = None,
) -> tuple[StepKernel, StepKernel, FlexSNInfo]:  # fmt: skip
    """The kernels of a core for `flexsn_forward` and `flexsn_backward`, and their info.

    Args:
        core_fn: as for `build_inference_kernel`. What it captures gets no gradient.
        example_inputs: likewise.
        requires_grad: one flag per example; by default every floating one is differentiated. Integers and bools never are.

    Raises:
        ValueError: as `build_inference_kernel`; a wrong number of flags; no output that is differentiable.
    """
    name = core_name(core_fn)
    examples = _examples(name, num_inputs, num_states, example_inputs)
    step = torch.broadcast_shapes(*[e.shape for e in examples])
    whole = [e if e.shape == step else e.expand(step) for e in examples]  # a sum over neurons is not the kernel's
    forward, backward = generate_forward_and_backward_graph(core_fn, whole, requires_grad)
    returns = num_outputs + num_states
    num_saved = sum(n.name[:5] != "grad_" for n in backward.find_nodes(op="placeholder"))
    info = _info(name, forward, num_inputs, num_states, num_outputs, returns + num_saved)
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


def _info(name: str, graph: fx.Graph, num_inputs: int, num_states: int, num_outputs: int, num_returns: int | None = None) -> FlexSNInfo:
    info = extract_info(graph, num_inputs, num_states, num_outputs)
    if len(info.fwd_core_returns) != (num_outputs + num_states if num_returns is None else num_returns):
        raise GraphCaptureError(f"returns another number of values than {num_outputs} outputs + {num_states} states", core=name)
    assert info.layout is not None
    for meta in info.layout.returns:
        if meta.dtype not in DTYPES:
            raise UnsupportedDtypeError(f"a value of the step has dtype {meta.dtype}", core=name)
    return info
