"""The only driver: core -> program, through capture, lower, plan, render and launch, with everything cached.

A `Program` is a blueprint (one core at one layout of operands: dtypes, ranks, which dims broadcast) for one backend. It
holds no sizes: T and the step shape are arguments of its kernels. What the core computes from params alone is the
`prologue`, what turns summed cotangents into gradients of params is the `epilogue`; both are ATen graphs that PyTorch
runs once per call.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from .._capture.graph_writer import getitem
from .._capture.reads import Reads, lock
from .._capture.side_effects import no_side_effects
from .._capture.signature import Signature, noting_default_states
from .._capture.trace import Meta, Trace
from .._ir.graph import Graph, exists, vanishes
from .._ir.lowering import lower
from .._ir.roles import Kind, Role, of_kind, roles
from .._plan import plan
from .._runtime.backends import BACKENDS
from .._runtime.kernel import Kernel, NoKernel
from .._torch.availability import require
from .._torch.capture import made_under_modes, no_modes
from .._torch.tensors import is_symbolic, is_view
from .._torch.transforms import transforms_or_modes_active
from ..errors import CannotFuseError
from .captured import Blueprint, Shapes, draw

_CACHE_SIZE = 512
_MOST_CANDIDATES = 64  # programs of one layout: cores that depend on sizes need one per size


class Program:
    """A blueprint, compiled by one backend for one device."""

    def __init__(self, backend: str, blueprint: Blueprint, device: torch.device):
        self.backend, self.blueprint = BACKENDS[backend], blueprint
        self.sig, self.num_outputs, self.step = blueprint.sig, blueprint.num_outputs, blueprint.step
        self.device = device
        self.states = roles(Kind.STATE, self.sig.num_states)
        self._plans: dict[tuple, plan.Plan] = {}
        self._kernels: dict[tuple, Kernel] = {}
        self.graph, self.params = self._lower_forward()
        self.prologue = _static_module(blueprint.forward, self.params, {})
        sig = self.sig
        itemsize = max(m.dtype.itemsize for m in blueprint.metas[: sig.num_inputs])
        self.ops = blueprint.ops or len(self.graph.nodes)
        sizes = (sig.num_inputs, sig.num_states, self.ops, itemsize)
        self.chunk, self.inference_chunk = (self.backend.chunk(*sizes, checkpoint) for checkpoint in (True, False))
        self._vjp: Vjp | None = None
        self._refused: CannotFuseError | None = None  # why there is none
        self.kept: list[object] = []  # objects that the cache key names by id()
        self.storage = self._storage()

    # --- lowering ---------------------------------------------------------------------------------------------------
    def _leaves(self, recorded: Trace) -> dict[Role, fx.Node]:
        return dict(zip((*roles(Kind.INPUT, self.sig.num_inputs), *self.states), recorded.operands, strict=False))

    def _lower_forward(self) -> tuple[Graph, dict[Role, fx.Node]]:
        recorded = self.blueprint.forward
        outputs = dict(zip((*roles(Kind.OUTPUT, self.num_outputs), *self.states), recorded.returns, strict=True))
        return lower(self.sig.core, self._leaves(recorded), outputs, self._carried(), self.device)

    def _carried(self) -> dict[Role, torch.dtype]:
        """Dtypes in which states go from step to step."""
        return {v: m.dtype for v, m in zip(self.states, self.blueprint.computed[self.sig.num_inputs :], strict=False)}

    def differentiate(self, core: Callable, captured: dict[str, Tensor], reads: Reads | None = None) -> Vjp:
        """The VJP, traced on first use; `core` is the one that this program was made from, or its equal.

        Args:
            reads: what the core reads, which a backward of the user's must not write to.
        """
        with lock:
            if self._refused is not None:
                raise copy.copy(self._refused)
            if self.blueprint.vjp is None:
                try:
                    with no_side_effects(reads or Reads(), self.sig.core, core) as anew:
                        self.blueprint.differentiate(anew, captured, self.device)
                except CannotFuseError as error:
                    self.blueprint.vjp, self._refused = None, copy.copy(error)
                    raise
            return self.vjp

    def fits(self, metas: Sequence[Meta | None]) -> bool:
        """Whether it serves operands of these shapes."""
        ins = self.sig.num_inputs + self.sig.num_states
        return self.blueprint.shapes([m.shape for m in metas[:ins] if m is not None]) is not None

    @property
    def vjp(self) -> Vjp:
        """Lowered on first use; there is none before the blueprint is differentiated."""
        if self._vjp is None:
            with lock:
                assert self.blueprint.vjp is not None, "differentiate() comes first"
                with no_modes():
                    self._vjp = self._vjp or Vjp(self, self.blueprint.vjp)
        return self._vjp

    def _storage(self) -> dict[Role, torch.dtype]:
        storage = {r: n.dtype for r, n in self.graph.inputs.items()} | {r: n.dtype for r, n in self.graph.outputs.items()}
        storage |= {v: m.dtype for v, m in zip(self.states, self.blueprint.states, strict=True)}
        return storage | {Role(Kind.OUTPUT, k): m.dtype for k, m in enumerate(self.blueprint.outputs)}

    # --- kernels ------------------------------------------------------------------------------------------------------
    def checkpoints(self, T: int) -> int:
        """Rows of states that a forward stores: exact where T is a number, an upper bound where it is symbolic."""
        if is_symbolic(T):
            return T // self.chunk + 2  # never 0 or 1, which PyTorch would make a case of its own
        return plan.checkpoints(T, self.backend.chunk_for(self.chunk, T), self.chunk)

    def plan_of(self, direction: str, *flags: Any) -> plan.Plan:
        """`forward_plan(*flags)` or `backward_plan(*flags)`."""
        return self.forward_plan(*flags) if direction == "forward" else self.backward_plan(*flags)

    def forward_plan(self, inputs: Sequence[torch.dtype], checkpoint: bool, sequences: bool) -> plan.Plan:
        """For many steps."""
        storage = self.storage | {Role(Kind.INPUT, k): d for k, d in enumerate(inputs)}
        chunk = self.chunk if checkpoint else self.inference_chunk
        return plan.plan_forward(self.graph, storage, chunk=chunk, checkpoint=checkpoint, sequences=sequences)

    def backward_plan(self, inputs: Sequence[torch.dtype], wanted: Sequence[str], cotangents: Sequence[str]) -> plan.Plan:
        """For many steps."""
        storage = self.storage | {Role(Kind.INPUT, k): d for k, d in enumerate(inputs)}
        vjp = self.vjp.graph
        storage |= {r: vjp.inputs[r].dtype for r in of_kind(vjp.inputs, Kind.PARAM)}
        return plan.plan_backward(vjp, storage, chunk=self.chunk, wanted=wanted, cotangents=cotangents)

    def for_steps(self, T: int, made: plan.Plan) -> plan.Plan:
        """A plan for T steps."""
        return dataclasses.replace(made, chunk=self.backend.chunk_for(made.chunk, T), longest=made.chunk)

    def kernel(self, T: int, direction: str, *flags: Any) -> Kernel:
        """The loaded kernel for T steps of `forward_plan(*flags)` or `backward_plan(*flags)`."""
        key = (direction, *flags)
        if key not in self._plans:
            self._plans[key] = self.plan_of(*key)
        made = self.for_steps(T, self._plans[key])
        key = (made.chunk, *key)
        if key not in self._kernels:
            self._kernels[key] = self.backend.load(made, self.backend.render(made)) if made.writes else NoKernel(made)
        return self._kernels[key]


class Vjp:
    """The VJP of a program (with the new states: one graph, one set of params), its prologue and its epilogue."""

    def __init__(self, program: Program, recorded: Trace):
        sig, outs = program.sig, program.num_outputs
        ins, states = sig.num_inputs, sig.num_states
        self.recorded = recorded
        cotangents = recorded.cotangents
        self.differentiable = tuple(c is not None for c in cotangents)
        leaves = program._leaves(recorded)
        of_returns = (*roles(Kind.OUTPUT_GRAD, outs), *roles(Kind.STATE_GRAD, states))
        leaves |= {role: c for role, c in zip(of_returns, cotangents, strict=True) if c is not None}
        self.roles = {leaf.name: role for role, leaf in leaves.items()}
        sources: dict[fx.Node, int | str] = {n: k for k, n in enumerate(recorded.operands[: ins + states])}
        sources |= dict(zip(recorded.operands[ins + states :], sig.param_names, strict=True)) | {n: k for k, n in recorded.captured.items()}
        self.flows = [
            frozenset([sources[n] for n in nodes]) if there else frozenset()
            for nodes, there in zip(recorded.flows, self.differentiable, strict=True)
        ]
        self._first_state, self._outs = ins, outs
        grads = recorded.grads
        outputs = {Role(Kind.INPUT_GRAD, k): g for k, g in enumerate(grads[:ins]) if g is not None}
        # a carried cotangent is an output even where no gradient flows through the state: it is zero then
        zero = recorded.graph.call_function(torch.ops.aten.full.default, ([], 0.0))
        for k in range(states):
            node, operand, role = grads[ins + k], recorded.operands[ins + k], Role(Kind.STATE_GRAD, k)
            if node is None and role in leaves:
                zero.meta.update(kind="step", val=operand.meta["val"], uniform=0.0, line=None)
                node = zero
            if node is not None:
                outputs[role] = node
        self.static_grads = grads[ins + states :]  # params, then captured tensors
        self.captured = list(recorded.captured)[: len(self.static_grads) - sig.num_params]
        frontier = _frontier(self.static_grads)
        self.frontier = {Role(Kind.PARAM_GRAD, k): n for k, n in enumerate(frontier)}
        outputs |= self.frontier
        outputs |= dict(zip(program.states, recorded.returns[outs:], strict=True))
        carried = program._carried()
        self.graph, params = lower(sig.core, leaves, outputs, {v.grad: d for v, d in carried.items()} | carried, program.device)
        self.params = params
        self.prologue = _static_module(recorded, params, {})
        self._prologues: dict[tuple[Role, ...], StaticModule] = {}
        self._epilogues: dict[tuple, tuple[StaticModule, tuple[Role, ...]]] = {}

    def requiring_grad(self, needed: Collection[int | str], T: int | None) -> list[bool]:
        """Which outputs, final states and state sequences require grad, as in eager: those from which autograd's graph leads to an
        operand that does.

        Args:
            needed: these operands; inputs and states by place, params and captured tensors by name.
            T: how many steps; None if that is a symbol. Empty sequences are as after one.
        """
        states = range(self._first_state, self._first_state + len(self.flows) - self._outs)
        fixed, carried = {k for k in needed if k not in states}, {k for k in needed if k in states}
        ever = [False] * len(self.flows)
        for t in itertools.count() if T is None else range(T or 1):
            now = [not flow.isdisjoint(fixed | carried) for flow in self.flows]
            ever = [a or b for a, b in zip(ever, now, strict=True)]
            if T == 0:
                break
            before, carried = carried, {k for k, flag in zip(states, now[self._outs :], strict=True) if flag}
            if before == carried:  # as from now on
                break
            if T is None and t > len(states):  # it changes from step to step
                carried = {k for k, flag in zip(states, ever[self._outs :], strict=True) if flag}
                break
        return [*ever[: self._outs], *[k in carried for k in states], *ever[self._outs :]]

    def prologue_of(self, roles: tuple[Role, ...]) -> StaticModule:
        """The part of the prologue that one kernel reads. PyTorch may refuse another part, of gradients that nobody wants."""
        if roles not in self._prologues:
            self._prologues[roles] = _static_module(self.recorded, {r: self.params[r] for r in roles}, {})
        return self._prologues[roles]

    def epilogue(self, wanted: tuple[bool, ...], given: tuple[Role, ...] | None = None) -> tuple[StaticModule, tuple[Role, ...]]:
        """The module that gives the wanted gradients of params and captured tensors, and the sums (`gp*`) it takes, where
        the cotangents `given` exist (by default all)."""
        if (wanted, given) not in self._epilogues:
            rest = {} if given is None else self._rest(given)
            grads = [None if g is None else rest.get(g, g) for g in self.static_grads]
            nodes = {str(k): g for k, (g, w) in enumerate(zip(grads, wanted, strict=True)) if w and g is not None}
            used = set(_frontier(list(nodes.values()), rest))
            roles = tuple(r for r, n in self.frontier.items() if n in used)
            made = _static_module(self.recorded, nodes, {self.frontier[r]: r for r in roles}, rest, apart=True)
            self._epilogues[wanted, given] = made, roles
        return self._epilogues[wanted, given]

    def _rest(self, given: Sequence[Role]) -> dict[fx.Node, fx.Node | None]:
        """What nodes of the epilogue come to where some outputs have no cotangent: nothing, or what is left of a sum. As in
        autograd, nothing flows back from there, not even zeros (which an infinite derivative would make NaN)."""
        left = self.graph.for_cotangents(given).outputs
        sums = {n: r for r, n in self.frontier.items()}
        rest: dict[fx.Node, fx.Node | None] = {}
        for node, role in sums.items():
            before = self.graph.outputs[role]
            if left[role].op == "const" and (before.op != "const" or vanishes(before, given)):
                rest[node] = None
        for node in self.recorded.graph.nodes:
            made_of = [self.roles[name] for name in node.meta.get("of", ()) if node.meta["kind"] == "static"]
            if made_of and not any(exists(role, given) for role in made_of):
                rest[node] = None
        for node in self.recorded.graph.nodes if rest else ():
            if node in rest or node.meta.get("kind") not in ("static", "reduced"):
                continue
            terms = [n for n in node.all_input_nodes if n in sums or n in rest or n.meta["kind"] == "reduced" or "nil" in n.meta]
            live = [n for n in (rest.get(n, n) for n in terms) if n is not None]
            if terms and not live:
                rest[node] = None
            elif len(live) < len(terms):
                if node.target is not torch.ops.aten.add.Tensor or live[0].meta["val"].shape != node.meta["val"].shape:
                    return {}  # zeros serve
                rest[node] = live[0]
        return rest


def _frontier(grads: Sequence[fx.Node | None], rest: Mapping[fx.Node, fx.Node | None] = MappingProxyType({})) -> list[fx.Node]:
    """Step values from which the gradients of params are computed: what the kernel sums over time."""
    found: dict[fx.Node, None] = {}
    stack = [g for g in reversed(grads) if g is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.meta["kind"] == "step":
            found[node] = None
        elif node.meta["kind"] == "reduced":
            stack.extend(n for n in (rest.get(n, n) for n in reversed(node.all_input_nodes)) if n is not None)
    return list(found)


class StaticModule:
    """A graph that PyTorch runs once per call, prologue or epilogue; its results have names."""

    def __init__(self, module: Callable | None, operands: Sequence[str], constants: Sequence[Tensor], results: Sequence[str]):
        self.module, self.operands, self.constants, self.results = module, operands, constants, results

    @property
    def nodes(self) -> list[fx.Node]:
        """Its ops, in order."""
        graph = getattr(self.module, "__self__", None)  # `module` is the `forward` of a `GraphModule`
        return [] if graph is None else [n for n in graph.graph.nodes if n.op == "call_function"]

    def passed(self, results: Sequence[str]) -> list[str] | None:
        """Names of the operands that these results are, if nothing is computed for them."""
        if not results:
            return []
        graph = self.module.__self__.graph  # type: ignore[union-attr]  # as in `nodes`
        names = dict(zip(graph.find_nodes(op="placeholder"), self.operands, strict=False))  # constants and sums come after these
        found = dict(zip(self.results, graph.output_node().args[0], strict=True))
        return [names[found[role]] for role in results] if all(found[role] in names for role in results) else None

    def __call__(self, statics: dict[str, Tensor], sums: Sequence[Tensor] = ()) -> dict[Any, Tensor]:
        if self.module is None:
            return {}
        constants = made_under_modes(self.constants) if transforms_or_modes_active() else self.constants
        values = self.module(*[statics[name] for name in self.operands], *constants, *sums)
        return dict(zip(self.results, values, strict=True))


def _static_module(
    recorded: Trace, results: Mapping[Any, fx.Node], sums: Mapping[fx.Node, Role],
    rest: Mapping[fx.Node, fx.Node | None] = MappingProxyType({}), *, apart: bool = False,
) -> StaticModule:  # fmt: skip
    """Cut the part of a recorded graph that computes `results` from params, captured tensors and sums over time, with
    `rest[node]` in place of a node.

    Args:
        apart: results share no memory with each other or with what they are computed from.
    """
    if not results:
        return StaticModule(None, (), (), ())
    live: set[fx.Node] = set()
    stack = list(results.values())
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            if node not in sums:
                stack.extend(n for n in (rest.get(n, n) for n in node.all_input_nodes) if n is not None)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = [n for n in recorded.graph.nodes if n in live and n.op == "placeholder" and n not in sums]
    named = [n for n in placeholders if n.meta["role"] not in recorded.constants]
    constants = [n for n in placeholders if n.meta["role"] in recorded.constants]
    for i, node in enumerate([*named, *constants, *sums]):
        copies[node] = graph.placeholder(f"a{i}")
    for node in recorded.graph.nodes:
        if node in live and node not in copies and node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[rest.get(n) or n])
            if node.target is torch.ops.aten.view.default:  # what the trace took for one may lie otherwise in a call
                copies[node].target = torch.ops.aten.reshape.default
    found = [copies[n] for n in results.values()]
    graph.output(tuple(_apart(graph, found, [copies[n] for n in sums]) if apart else found))
    module = fx.GraphModule(torch.nn.Module(), graph)
    values = [recorded.constants[n.meta["role"]] for n in constants]
    return StaticModule(module.forward, [n.meta["role"] for n in named], values, list(results))


def _apart(graph: fx.Graph, values: Sequence[fx.Node], sums: Sequence[fx.Node]) -> list[fx.Node]:
    """Each in memory of its own, since autograd adds to a gradient in place. It copies what two tensors have for their gradient, but
    sees no view of it."""
    holders: dict[fx.Node, fx.Node] = {}
    found = list[fx.Node]()
    for value in values:
        memory = value
        while memory.op == "call_function" and (memory.target is getitem or is_view(memory.target)):
            memory = memory.all_input_nodes[0]
        lent = memory.op == "placeholder" and memory not in sums
        own = holders.setdefault(memory, value) is value and not lent
        found.append(value if own else graph.call_function(torch.ops.aten.clone.default, (value,)))
    return found


def program_of(
    backend: str, core: Callable, sig: Signature, metas: Sequence[Meta | None], device: torch.device, captured: dict[str, Tensor],
    num_outputs: int | None = None,
) -> Program:  # fmt: skip
    """Capture and lower, past every cache."""
    return Program(backend, draw(core, sig, metas, device, captured, num_outputs), device)


# --- the cache of programs ------------------------------------------------------------------------------------------------
_exact: OrderedDict[tuple, tuple[Program, Shapes]] = OrderedDict()
_by_layout: OrderedDict[tuple, list[Program]] = OrderedDict()
_refused: OrderedDict[tuple, CannotFuseError] = OrderedDict()


def program_for(
    backend: str, core: Callable, reads: Reads, sig: Signature, metas: Sequence[Meta | None], device: torch.device,
    captured: dict[str, Tensor], num_outputs: int | None,
) -> tuple[Program, Shapes]:  # fmt: skip
    """The compiled program for a call, and the call's shapes.

    Args:
        metas: of inputs, states (None: default states) and params.
        captured: captured tensors by path.
    """
    first: dict[int, str] = {}  # a tensor under two names is one to the trace
    statics = tuple(
        (path, first.setdefault(id(t), path), tuple(t.shape), tuple(t.stride()), t.dtype, t.requires_grad) for path, t in captured.items()
    )
    base = (backend, reads.fingerprint, sig, num_outputs, device, statics, torch.get_default_dtype())
    exact = (*base, tuple(metas))
    with lock:
        if exact in _exact and _exact[exact][0].fits(metas):
            _exact.move_to_end(exact)
            return _exact[exact]
        if exact in _refused:
            raise copy.copy(_refused[exact])
        ins = sig.num_inputs + sig.num_states
        layout = (*base, *(_pattern(m) for m in metas[:ins]), *metas[ins:])
        given = [m.shape for m in metas[:ins] if m is not None]
        candidates = _by_layout.setdefault(layout, [])
        for program in candidates:
            shapes = program.blueprint.shapes(given)
            if shapes is not None:
                break
        else:
            require("fused kernels")
            try:
                states = metas[sig.num_inputs : ins]
                dtype = metas[0].dtype  # type: ignore[union-attr]  # an input is there
                with noting_default_states(sig, states, dtype), no_side_effects(reads, sig.core, core) as anew:
                    program = program_of(backend, anew, sig, metas, device, captured, num_outputs)
                program.kept = reads.opaque
            except CannotFuseError as error:
                _refused[exact] = copy.copy(error)  # which holds no frames, as `error` does
                raise
            shapes = program.blueprint.shapes(given)
            assert shapes is not None
            candidates.append(program)
            del candidates[:-_MOST_CANDIDATES]
        _exact[exact] = (program, shapes)
        for cache in (_exact, _by_layout, _refused):
            while len(cache) > _CACHE_SIZE:
                cache.popitem(last=False)
        return program, shapes


def _pattern(meta: Meta | None) -> tuple | None:
    return None if meta is None else (tuple(n == 1 for n in meta.shape), meta.dtype)
