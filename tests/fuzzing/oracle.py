"""The eager loop, made comparable to the bit.

Functions such as `exp` are not the same to the bit in PyTorch's maths library and in flexsn's, and one ulp can become anything
after a comparison. So the oracle runs the core in PyTorch, op by op, except for those functions: their values come from
flexsn, one op at a time, after they were compared with PyTorch's own on the same arguments. Whatever else is different is a
defect: the fused kernel must give the bits of its ops one by one.

Gradients are sums that may be taken in another order. `Bounds` follows the backward of the eager loop and computes beside
every gradient a bound of its rounding error: the magnitudes of all terms times the unit roundoff, op by op.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._ir.graph import HALF, Builder, Graph
from flexsn._ir.ops import OPS
from flexsn._plan import plan
from flexsn._program.compiled import Program, program_of
from flexsn._runtime.backends import BACKENDS
from flexsn.errors import FlexSNError

from . import batch

# Closed ops whose values PyTorch's maths library only approximates, too (`sqrt`: MKL's is not correctly rounded).
APPROXIMATE = frozenset(n for n, op in OPS.items() if op.promote == "float") - {"div", "copysign"} | {"pow"}
MEMORY = frozenset(
    """view _unsafe_view reshape expand sum select_backward slice_backward unbind select slice squeeze unsqueeze permute transpose t
    stack cat clone detach alias copy_ _reshape_alias narrow lift_fresh new_zeros zeros_like ones_like full_like empty_like new_empty
    zeros ones full empty new_full scalar_tensor as_strided fill_ zero_ broadcast_tensors select_scatter slice_scatter empty_strided
    zero _to_copy is_same_size new_empty_strided mean diagonal _local_scalar_dense item set_ split contiguous""".split()
)  # ops that move or add up; all others are elementwise
# PyTorch treats the last elements of a row by other code, with another sign of zero, another NaN, or without FMA.
TAILS = frozenset(
    """softshrink softshrink_backward hardshrink_backward elu_backward hardswish_backward hardtanh_backward logit_backward
    fmod remainder pow sinh cosh minimum maximum fmin fmax clamp clamp_min clamp_max add sub rsub""".split()
)
# On a GPU, as in PyTorch's code for tails, these let NaNs pass: a CPU is asked for them.
OF_NAN = frozenset("elu_backward hardtanh_backward hardswish_backward hardshrink_backward softshrink_backward logit_backward".split())
HARD = frozenset(("hardsigmoid", "hardswish"))  # in float64 on a GPU PyTorch multiplies by 1/6 rounded to float32: docs/numerics.md
# On a GPU, as in PyTorch's code for tails, the remainder is exact where a / b overflows; the vector code of a CPU gives NaN.
REMAINDERS = frozenset(("fmod", "remainder"))
# Made of several ops, of 16-bit floats: PyTorch rounds between them on a CPU, flexsn once
ROUNDED_ONCE = frozenset("ldexp xlogy logit hardshrink floor_divide".split())
LOOSE = frozenset("special_ndtri special_log_ndtr special_erfcx digamma".split())  # of many ulp in PyTorch, too: docs/numerics.md
ULPS = 4  # of one op, own against PyTorch's: twice the bounds in docs/numerics.md


class Disagreement(AssertionError):
    """What flexsn computes is not what PyTorch computes."""


# --- one closed op by itself --------------------------------------------------------------------------------------------
@functools.cache
def _single(op: str, dtype: torch.dtype, backend: str) -> Callable[..., Tensor]:
    """The kernel of one closed op on rows; those of the backend "cpp" are built all at once."""
    if backend == "cpp":
        return _singles()[op, dtype]
    graph = _graph_of(op, dtype)
    made = plan.plan_forward(graph, _storage(graph), chunk=16, checkpoint=False, sequences=False)
    return functools.partial(_run, BACKENDS[backend].load(made, BACKENDS[backend].render(made)))


@functools.cache
def _singles() -> dict[tuple[str, torch.dtype], Callable[..., Tensor]]:
    kernels = {}
    for op in sorted(APPROXIMATE):
        for dtype in (torch.float32, torch.float64):
            graph = _graph_of(op, dtype)
            made = plan.plan_forward(graph, _storage(graph), chunk=16, checkpoint=False, sequences=False)
            kernels[op, dtype] = batch.Deferred(made, BACKENDS["cpp"].render(made))
    batch.build(list(kernels.values()))
    return {key: functools.partial(_run, kernel) for key, kernel in kernels.items()}


def _graph_of(op: str, dtype: torch.dtype) -> Graph:
    b = Builder(op)
    args = [b.input(f"x{k}", dtype, f"x{k}") for k in range(OPS[op].arity)]
    return b.graph({"y0": b.op(op, *args)})


def _storage(graph: Graph) -> dict[str, torch.dtype]:
    return {r: n.dtype for r, n in (graph.inputs | graph.outputs).items()}


def _run(kernel: Any, *args: Tensor) -> Tensor:
    rows = [a.contiguous() for a in torch.broadcast_tensors(*args)]
    out = torch.empty(rows[0].shape, dtype=kernel.plan.writes[0].storage, device=rows[0].device)
    kernel.bind([True] * (len(rows) + 1), 1, out.numel())([*rows, out], [])
    return out


def single(op: str, *args: Tensor, backend: str = "cpp") -> Tensor:
    """A closed op as flexsn computes it, by itself."""
    return _single(op, args[0].dtype, backend)(*args)


# --- one op of PyTorch in closed ops --------------------------------------------------------------------------------------
Spec = tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]


@functools.cache
def _lowered(func: Any, spec: Spec, frozen: tuple[Any, ...], backend: str, device: torch.device) -> tuple[Program, list[str], bool] | None:
    """A call as a program, the name of every tensor in it, and whether it is a single closed op; None if none approximates.

    `spec`: of its tensors, shape, dtype, and whether they depend on params alone."""
    any_dims = any(shape for shape, _, static in spec if not static)
    moving = [i for i, (shape, _, static) in enumerate(spec) if bool(shape) == any_dims and not static]
    still = [i for i in range(len(spec)) if i not in moving]

    def core(*tensors: Tensor) -> Tensor:
        placed = {i: t.to(spec[i][1]) for i, t in zip([*moving, *still], tensors, strict=True)}
        args, kwargs = _thaw(frozen, [placed[i] for i in range(len(spec))])
        return func(*args, **kwargs)

    metas = [Meta(spec[i][0], torch.float32 if spec[i][1] in HALF else spec[i][1]) for i in (*moving, *still)]
    try:
        sig = make_signature(core, len(moving), 0, len(still))
        program = program_of(backend, core, sig, metas, device, {}, None)
    except FlexSNError:
        return None  # not elementwise: PyTorch's own then
    prologue = any(n.op == "call_function" and n.meta["kind"] == "static" for n in program.blueprint.trace.graph.nodes)
    approximate = func is torch.ops.aten.hardsigmoid_backward.default  # in float64 PyTorch's uses a float32 1 / 6
    approximate |= rounded_once(func, [dtype for _, dtype, _ in spec])
    approximate |= any(n.op in APPROXIMATE and n.args[0].dtype.is_floating_point for n in program.graph.nodes)
    if not (prologue or approximate):
        return None
    names = [f"x{moving.index(i)}" if i in moving else sig.param_names[still.index(i)] for i in range(len(spec))]
    return program, names, not prologue and sum(n.op != "convert" for n in program.graph.nodes) == 1


def _freeze(value: Any, tensors: list[Tensor]) -> Any:
    """Arguments without their tensors, hashable."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor",)
    if isinstance(value, (list, tuple)):
        return ("list", *(_freeze(v, tensors) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, _freeze(v, tensors)) for k, v in sorted(value.items())))
    return ("value", type(value), repr(value), _Held(value))


class _Held:
    """A value that all its kind are equal to: its text tells it apart."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


def _thaw(frozen: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    kind, *rest = frozen
    if kind == "tensor":
        return tensors.pop(0)
    if kind == "list":
        return [_thaw(v, tensors) for v in rest]
    if kind == "dict":
        return {k: _thaw(v, tensors) for k, v in rest}
    return rest[-1].value


def _interpret(graph: Graph, inputs: dict[str, Tensor], backend: str) -> list[Tensor]:
    env: dict[Any, Tensor] = {node: inputs[role] for role, node in graph.inputs.items()}
    device = next(iter(inputs.values())).device

    def get(node: Any) -> Tensor:
        return env[node] if node.op != "const" else torch.tensor(node.value, dtype=node.dtype, device=device)

    for node in graph.nodes:
        args = [get(a) for a in node.args]
        if node.op == "convert":
            env[node] = args[0].to(node.dtype)
        elif node.op in APPROXIMATE and args[0].is_floating_point():
            env[node] = single(node.op, *args, backend=backend)
        else:
            env[node] = OPS[node.op].eager(*args)
    return [get(graph.outputs[f"y{k}"]) for k in range(len(graph.outputs))]


# --- the modes ------------------------------------------------------------------------------------------------------------
class Own(TorchDispatchMode):
    """Approximated functions from flexsn, compared with PyTorch's; what params alone decide is PyTorch's: so is it in a call."""

    def __init__(self, static: Sequence[Tensor], backend: str):
        super().__init__()
        self.static = {id(t): t for t in static}
        self.backend = backend
        self.moving: list[Tensor] = []  # alive, so that no id is used twice
        self.substituted: set[str] = set()

    def step(self, core: Callable[..., Any], moving: int) -> Callable[..., Any]:
        """The core: its first operands depend on time, and so does what it returns, even if computed from params alone."""

        @functools.wraps(core)
        def run(*operands: Tensor) -> Any:
            for operand in operands[:moving]:
                self.static.pop(id(operand), None)
            returned = core(*operands)
            fresh = tuple(r.clone() if id(r) in self.static else r for r in (returned if isinstance(returned, tuple) else (returned,)))
            for r in fresh:
                self.static.pop(id(r), None)
                self.moving.append(r)
            return fresh

        return run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._efficientzerotensor.default:  # it has no memory: ops on it would go past this mode
            func = torch.ops.aten.zeros.default
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in MEMORY:
            out = func(*args, **kwargs)
            tensors: list[Tensor] = []
            _freeze([args, kwargs], tensors)
        else:
            tensors = []
            frozen = _freeze([args, kwargs], tensors)
            out = func(*args, **kwargs)
            if any(id(t) not in self.static for t in tensors):
                out = self.own(func, frozen, tensors, out)
        if all(id(t) in self.static for t in tensors):
            self.static |= {id(o): o for o in ((out,) if isinstance(out, Tensor) else out) if isinstance(o, Tensor)}
        return out

    def own(self, func: Any, frozen: Any, tensors: list[Tensor], out: Any) -> Any:
        """What flexsn computes instead of `out`, if it approximates."""
        outs = (out,) if isinstance(out, Tensor) else out
        if not any(o.is_floating_point() and o.numel() for o in outs):
            return out
        shape = torch.broadcast_shapes(*(t.shape for t in tensors if t.numel()))
        alone = any(id(t) in self.static for t in tensors)  # PyTorch computes those, and its last bit depends on their number
        full = [shape if not t.numel() else tuple(t.shape) for t in tensors]  # on a GPU, logsigmoid has an empty buffer
        spec = tuple((s if alone else (3,) * (len(s) > 0), t.dtype, id(t) in self.static) for s, t in zip(full, tensors, strict=True))
        with torch.utils._python_dispatch._disable_current_modes():
            tensors = [t if t.numel() else t.new_zeros(s) for s, t in zip(full, tensors, strict=True)]
            lowered = _lowered(func, spec, frozen, self.backend, outs[0].device)
            name = func._schema.name.removeprefix("aten::")
            exact = self.backend == "triton" and name in REMAINDERS
            eager = out
            if outs[0].is_cuda:
                eager = as_kernels_have_it(func, frozen, tensors, out)
            elif exact or name in TAILS:
                eager = placed(func, frozen, tensors, _strided if exact else _padded)
            if lowered is None:
                return eager
            program, order, single = lowered
            wide = [t.float() if t.dtype in HALF else t for t in tensors]
            named = dict(zip(order, wide, strict=True))
            named |= program.prologue(named)
            values = _interpret(program.graph, {r: named[r].expand(shape) for r in program.graph.inputs}, self.backend)
            pairs = zip(values, outs, strict=True)
            found = tuple(v.to(o.dtype).expand(o.shape).contiguous() if o.numel() else o for v, o in pairs)
            for value, o in zip(found, (eager,) if isinstance(eager, Tensor) else eager, strict=True):
                exempt = name == "hardsigmoid_backward" or rounded_once(func, [t.dtype for t in tensors])
                if value.is_floating_point() and o.numel() and not exempt:
                    compare(func, tensors, value, o, single, self.backend)
        self.substituted.add(func._schema.name)
        return found[0] if isinstance(out, Tensor) else found


def rounded_once(func: Any, dtypes: Sequence[torch.dtype]) -> bool:
    name = func._schema.name.removeprefix("aten::")
    modes = name == "div" and "mode" in func._overloadname
    return (modes or name.removesuffix("_backward") in ROUNDED_ONCE) and any(d in HALF for d in dtypes)


def as_kernels_have_it(func: Any, frozen: Any, tensors: list[Tensor], out: Any) -> Any:
    """What a GPU gives, but for what docs/numerics.md says of NaNs and of hard sigmoids."""
    name = func._schema.name.removeprefix("aten::")
    if name in HARD and out.dtype is torch.float64:
        return torch._decomp.decomposition_table[func](tensors[0])
    if name not in OF_NAN:
        return out
    nan = functools.reduce(torch.logical_or, [t.isnan() for t in tensors])
    return torch.where(nan, placed(func, frozen, [t.cpu() for t in tensors], _padded).to(out.device), out)


def placed(func: Any, frozen: Any, tensors: list[Tensor], place: Callable[[Tensor], Tensor]) -> Any:
    """An op on rows placed so that one of PyTorch's codes computes all of them."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    any_dims = any(t.dim() for t in tensors)
    rows = [t if any_dims and not t.dim() else place(t.expand(shape)) for t in tensors]
    args, kwargs = _thaw(frozen, rows)
    out = func(*args, **kwargs)
    return out[: shape.numel()].reshape(shape)


def _padded(tensor: Tensor) -> Tensor:
    """A row without a tail: vector code."""
    flat = tensor.flatten()
    return torch.cat([flat, flat.new_ones(-flat.numel() % 64)])


def _strided(tensor: Tensor) -> Tensor:
    """A row with gaps: scalar code."""
    return torch.stack([tensor.flatten()] * 2, -1)[:, 0]


def compare(func: Any, args: Sequence[Tensor], own: Tensor, eager: Tensor, direct: bool, backend: str) -> None:
    """One op on the same arguments: within some ulp; a composite within what its terms may lose."""
    a, b = own.double(), eager.double()
    info = torch.finfo(eager.dtype)
    eps = max([info.eps, *[torch.finfo(t.dtype).eps for t in args if t.is_floating_point()]])  # an op inside may have any of them
    direct = direct and func._schema.name.removeprefix("aten::") not in LOOSE
    size = b.abs().clamp(info.tiny, info.max)
    if not direct:
        for t in args:
            size = torch.maximum(size, t.double().abs().nan_to_num(0, 0, 0).clamp(min=1.0))
    allowed = (ULPS if direct else 64) * eps * size
    if eager.dtype in HALF:  # PyTorch's `erf` of tiny bfloat16 numbers is 0
        allowed = allowed.clamp(min=torch.finfo(torch.float32).eps)
    if backend == "triton" and func is torch.ops.aten.digamma.default:  # left of 0 PyTorch rounds pi * x before it takes the tangent
        allowed = torch.where(args[0].double() < 0, allowed + 4 * eps * b * b, allowed)
    if func is torch.ops.aten.special_erfcx.default:  # PyTorch rounds x * x before it takes `exp` of it
        allowed = torch.where(args[0] < 0, allowed + eps * b * args[0] * args[0], allowed)
    allowed = torch.where(b == 0, allowed.clamp(min=4 * info.tiny), allowed)  # PyTorch flushes some denormals
    same = (a == b) | ((a - b).abs() <= allowed) | (a.isnan() & b.isnan())
    if not direct:  # PyTorch's `gelu` of the largest numbers overflows, and of an infinite one is NaN
        same |= functools.reduce(torch.logical_or, [t.double().abs() > info.max / 16 for t in args])
    if not same.all():
        at = int((~same).flatten().nonzero()[0])
        where = [t.expand(eager.shape).flatten()[at].item() for t in args]
        raise Disagreement(f"`{func}` of {where} ({eager.dtype}): {own.flatten()[at].item()!r}, in PyTorch {eager.flatten()[at].item()!r}")


class Bounds(Own):
    """Beside every gradient: the sum of the magnitudes of its terms, and a bound of its rounding error."""

    def __init__(self, static: Sequence[Tensor], backend: str, roots: Sequence[Tensor]):
        super().__init__(static, backend)
        self.known: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for root in roots:
            self.known[id(root)] = (root, root.detach().double().abs(), torch.zeros_like(root, dtype=torch.float64))

    def of(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude and error bound; zeros for what no loss reaches."""
        zero = torch.zeros_like(grad, dtype=torch.float64)
        return self.known[id(grad)][1:] if id(grad) in self.known else (zero, zero)

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat: list[Tensor] = []
        frozen = _freeze([args, kwargs], flat)
        linear = [i for i, t in enumerate(flat) if id(t) in self.known]
        if not linear:
            return super().compute(func, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        before = [self.known.get(id(t)) for t in flat]
        bounds = None
        if name not in MEMORY:
            bounds = self.elementwise(func, frozen, flat, before)
        out = super().compute(func, args, kwargs)
        if name in MEMORY:
            self.moved(func, frozen, flat, before, out)
        else:
            self.keep(out, *bounds)
        return out

    def elementwise(self, func: Any, frozen: Any, flat: list[Tensor], before: list[Any]) -> tuple[Tensor, Tensor]:
        """Linear in every gradient: its weight is the op's value at 1, the other gradients 0."""
        total = error = torch.zeros((), dtype=torch.float64, device=flat[0].device)
        for i, known in enumerate(before):
            if known is None:
                continue
            tried = [torch.ones_like(t) if j == i else torch.zeros_like(t) if before[j] is not None else t for j, t in enumerate(flat)]
            args, kwargs = _thaw(frozen, [*tried])
            weight = func(*args, **kwargs)
            eps, own = torch.finfo(weight.dtype).eps, self.own(func, frozen, tried, weight)
            contracted = self.contracted(func, frozen, tried, own, i)
            weight = torch.maximum(weight.double().abs(), own.double().abs())
            term = known[1] * weight
            error = error + known[1] * contracted
            total, error = total + term, error + known[2] * weight + eps * term.clamp(min=torch.finfo(torch.float32).tiny)
        return total, error

    def contracted(self, func: Any, frozen: Any, tried: list[Tensor], weight: Tensor, gradient: int) -> Tensor | float:
        """How far a fused multiply-add, which a GPU's own derivatives have, may take a weight: as far as an ulp of its arguments."""
        if not weight.is_cuda:
            return 0.0
        moved: Tensor | float = 0.0
        for i, t in enumerate(tried):
            if i != gradient and t.is_floating_point() and t.numel():
                args, kwargs = _thaw(frozen, [*tried[:i], t * (1 + torch.finfo(t.dtype).eps), *tried[i + 1 :]])
                moved = moved + (func(*args, **kwargs).double() - weight.double()).abs().nan_to_num(0.0, 0.0, 0.0)
        return moved

    def moved(self, func: Any, frozen: Any, flat: list[Tensor], before: list[Any], out: Any) -> None:
        def part(k: int) -> Any:
            tried = [torch.zeros_like(t, dtype=torch.float64) if b is None else b[k] for t, b in zip(flat, before, strict=True)]
            args, kwargs = _thaw(frozen, tried)
            kwargs = (
                {n: v for n, v in kwargs.items() if n != "dtype"} if func._schema.name != "aten::_to_copy" else {"dtype": torch.float64}
            )
            return func(*args, **kwargs)

        name = func._schema.name.removeprefix("aten::")
        if name in (
            "new_zeros",
            "zeros_like",
            "new_empty",
            "empty_like",
            "ones_like",
            "is_same_size",
            "new_empty_strided",
            "empty_strided",
        ):
            return
        total, error = part(1), part(2)
        for o, t, e in zip(*([x] if isinstance(x, Tensor) else x for x in (out, total, error)), strict=True):
            terms = flat[0].numel() / max(1, o.numel()) if name in ("sum", "mean") else 1
            self.keep(o, t, e + torch.finfo(o.dtype).eps * max(1.0, math.log2(max(1, terms)) + 16) * t)

    def keep(self, out: Tensor, total: Tensor, error: Tensor) -> None:
        self.known[id(out)] = (out, total.expand(out.shape), error.expand(out.shape))
