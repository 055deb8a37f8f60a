"""Which elementwise ops of PyTorch work inside a core: every entry of op_db in scope, on its own samples.

    python tools/op_table.py [--write] [--interpret] [--backend cpp|triton] [--device cpu|cuda] [--jobs 2] [entry ...]

Each float32 sample of an entry becomes the core `lambda x, *others: op(x, *others)`: `x` is a sequence of three steps;
the other tensors go in as params, and, where they broadcast with `x` and no gradient is lost by it, a second time as
input sequences. The backend must agree with `backend="torch"` in shape, dtype, values and gradients. On the CPU Triton's
kernels run in its interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import math
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexsn
from flexsn._captured.captured_values import lock
from flexsn._ir.graph import interpret
from flexsn._plan.plan import KernelPlan
from flexsn._program.cache import PROGRAMS
from flexsn._runtime.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
EXTRA = (
    "where", "lerp", "addcmul", "addcdiv", "clamp", "masked_fill", "nn.functional.gelu", "nn.functional.leaky_relu",
    "nn.functional.hardswish",
)  # fmt: skip
# Forward values with the bits of eager: nothing in them is approximated.
EXACT = frozenset(
    """__radd__ __rdiv__ __rmod__ __rmul__ __rsub__ abs add bfloat16 bool byte ceil char clamp_max clamp_min copysign deg2rad
    div.floor_rounding div.no_rounding_mode div.trunc_rounding double eq fill float floor floor_divide fmax fmin fmod frac frexp ge
    gt half heaviside int isclose isfinite isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor long lt
    max.binary maximum min.binary minimum mul nan_to_num ne neg nextafter nn.functional.hardshrink nn.functional.hardsigmoid
    nn.functional.hardtanh nn.functional.prelu nn.functional.relu nn.functional.relu6 nn.functional.softshrink
    nn.functional.softsign nn.functional.threshold positive rad2deg reciprocal remainder round round.decimals_0 round.decimals_3
    round.decimals_neg_3 rsub sgn short sign signbit square sub true_divide trunc where lerp addcmul addcdiv clamp
    masked_fill nn.functional.leaky_relu nn.functional.hardswish""".split()
)
ULPS = 4
GRADIENT_EPS = 16
T = 3


def scope() -> list[str]:
    """The entries named in docs/op_scope.txt."""
    lines = (ROOT / "docs" / "op_scope.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and line[0] != "#"]


@functools.cache
def entries() -> dict[str, Any]:
    """op_db by `name` or `name.variant`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


# --- agreement ----------------------------------------------------------------------------------------------------------
def ulp(x: Tensor) -> Tensor:
    """The distance from |x| to the next float; of the smallest normal number below it (results there may be flushed)."""
    info = torch.finfo(x.dtype)
    magnitude = x.abs().clamp(info.tiny, info.max)
    return torch.ldexp(torch.full_like(magnitude, info.eps), torch.frexp(magnitude).exponent - 1)


def disagreement(got: Tensor, eager: Tensor, exact: Tensor | None, scale: float | None = None) -> str | None:
    """Why `got` is not acceptable beside `eager`, or None.

    Args:
        exact: float64 reference: `got` may differ from eager by more than a few ulp where it is no further from this than
            eager is. None: the bits must be equal (all NaNs are).
        scale: of gradients: how large the terms are of which a value is made. The derivative at a value that is itself only
            within a few ulp may lose more than these, and sums may be taken in another order.
    """
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return f"{got.dtype} {list(got.shape)} instead of {eager.dtype} {list(eager.shape)}"
    same = got == eager
    if got.is_floating_point():
        if exact is None:
            same = same & (got.signbit() == eager.signbit())
        same |= got.isnan() & eager.isnan()
        if exact is not None:
            g, e = got.double(), eager.double()
            allowed = ULPS * ulp(eager).double()
            if scale is not None:
                allowed = torch.maximum(allowed, GRADIENT_EPS * torch.finfo(eager.dtype).eps * e.abs().clamp(min=scale))
            same |= (got == exact.to(got.dtype)) | ((g - e).abs() <= allowed)
            same |= (g - exact).abs() <= torch.maximum((e - exact).abs(), allowed)
    if same.all():
        return None
    at = (~same).nonzero()[0].tolist()
    index = tuple(at)
    return f"{got[index].item()!r} instead of {eager[index].item()!r} ({int((~same).sum())} of {same.numel()} values)"


# --- one sample -----------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """One sample as a core: `core(x, *others)`."""

    core: Callable[..., Any]
    x: Tensor
    others: list[Tensor]
    aligned_otherwise: bool = False  # the others do not broadcast with x by the common rule

    def forms(self) -> Iterator[tuple[str, Callable[..., Any], list[Tensor], list[Tensor]]]:
        """How the other tensors go in: core, inputs and params."""
        yield "params", self.core, [self.x], self.others
        # a tensor without dims keeps a special place in type promotion that a sequence of one number per step has not
        moving = [i for i, o in enumerate(self.others) if o.dim() or not self.x[0].dim()]
        still = [i for i in range(len(self.others)) if i not in moving]
        if not moving or self.aligned_otherwise or not _broadcast([self.x[0], *self.others]):
            return

        def core(x, *others):
            placed = dict(zip([*moving, *still], others, strict=True))
            return self.core(x, *(placed[i] for i in range(len(others))))

        core.__name__ = self.core.__name__
        yield "inputs", core, [self.x, *(_steps(self.others[i]) for i in moving)], [self.others[i] for i in still]


def _broadcast(tensors: Sequence[Tensor]) -> bool:
    try:
        torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        return False
    return True


def _steps(tensor: Tensor) -> Tensor:
    """Three steps of a sample: as it is, its values in reverse (the domain stays), and as it is."""
    tensor = tensor.detach()
    return torch.stack([tensor, tensor.flatten().flip(0).reshape(tensor.shape), tensor])


def cases(op: Any, device: str = "cpu") -> Iterator[Case]:
    for sample in op.sample_inputs(device=device, dtype=torch.float32, requires_grad=False):
        kwargs = sample.kwargs
        places = [i for i, a in enumerate(sample.args) if isinstance(a, Tensor)]
        names = [k for k, v in kwargs.items() if isinstance(v, Tensor)]
        others = [sample.args[i] for i in places] + [kwargs[k] for k in names]

        def core(x, *others, args=sample.args, kwargs=kwargs, places=places, names=names):
            rest = iter(others)
            args = [next(rest) if i in places else a for i, a in enumerate(args)]
            return op.op(x, *args, **{k: next(rest) if k in names else v for k, v in kwargs.items()})

        core.__name__ = re.sub(r"\W", "_", f"{op.name} {op.variant_test_name}".strip())
        yield Case(core, _steps(sample.input), [o.detach().clone() for o in others], op.name == "nn.functional.prelu")


def results(
    core: Callable, inputs: Sequence[Tensor], params: Sequence[Tensor], backend: str, dtype: torch.dtype, differentiate: bool = True
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    """Outputs, and gradients of all operands (None where there is none)."""

    def leaf(tensor: Tensor) -> Tensor:
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        return tensor.detach().clone().requires_grad_(differentiate and tensor.is_floating_point())

    inputs, params = [leaf(t) for t in inputs], [leaf(t) for t in params]
    outputs = flexsn.scan(core, inputs, params=params, backend=backend).outputs
    moving = [y for y in outputs if y.requires_grad]
    wanted = [t for t in (*inputs, *params) if t.requires_grad]
    if not moving:
        return outputs, []
    torch.manual_seed(1)
    cotangents = [torch.randn(y.shape).to(y) for y in moving]
    grads = torch.autograd.grad(moving, wanted, cotangents, allow_unused=True)
    return outputs, list(grads)


def check(
    core: Callable, inputs: Sequence[Tensor], params: Sequence[Tensor], exact_forward: bool, backend: str = "cpp"
) -> tuple[str | None, str | None, bool]:
    """What is wrong in forward and in backward, and whether there is a backward."""
    differentiate = True
    try:
        eager, eager_grads = results(core, inputs, params, "torch", torch.float32)
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        differentiate = False
        eager, eager_grads = results(core, inputs, params, "torch", torch.float32, differentiate)
    precise, precise_grads = results(core, inputs, params, "torch", torch.float64, differentiate)
    try:
        outputs, grads = results(core, inputs, params, backend, torch.float32, differentiate)
    except Exception as error:  # whatever it is, the table tells it
        text = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {text}", None, bool(eager_grads)
    wrong = backward = None
    if len(outputs) != len(eager):
        wrong = f"{len(outputs)} outputs instead of {len(eager)}"
    for y, expected, reference in zip(outputs, eager, precise, strict=False):
        bits = exact_forward or not y.is_floating_point()
        wrong = wrong or disagreement(y, expected, None if bits else reference.double())
    if [g is None for g in grads] != [g is None for g in eager_grads] or len(grads) != len(eager_grads):
        backward = "other tensors have gradients than in eager"
    else:
        for grad, own, known in zip(grads, eager_grads, precise_grads, strict=True):
            if grad is not None and own is not None and known is not None:
                terms = max(1, outputs[0].numel() // max(1, own.numel()))  # cotangents are of order 1
                size = float(own[own.isfinite()].abs().max()) if terms > 1 and own.isfinite().any() else 1.0
                backward = backward or disagreement(grad, own, known.double(), max(1.0, size) * math.sqrt(terms))
    return wrong, backward and f"gradient: {backward}", bool(eager_grads)


# --- one entry ------------------------------------------------------------------------------------------------------------
@dataclass
class Row:
    """The verdict on one entry."""

    name: str
    passed: int = 0
    total: int = 0
    differentiable: bool = False
    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.total > 0 and self.passed == self.total

    def states(self) -> list[str]:
        def state(wrong: list[str]) -> str:
            return "no" if wrong else "yes"

        backward = state(self.backward) if self.differentiable else "none in eager"
        return [f"{self.passed}/{self.total}", state(self.forward), backward]

    def notes(self) -> list[str]:
        wrong = list(dict.fromkeys([*self.forward, *self.backward]))[:2]
        return [n.replace("|", "\\|").replace("\n", " ")[:150] for n in wrong]


def judge(name: str, every: int = 1, backend: str = "cpp", device: str = "cpu") -> Row:
    """Run all samples of an entry (or each `every`th)."""
    row, start = Row(name), time.perf_counter()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    for i, case in enumerate(cases(entries()[name], device)):
        if i % every:
            continue
        for form, core, inputs, params in case.forms():
            forward, backward, differentiable = check(core, inputs, params, name in EXACT, backend)
            row.total += 1
            row.passed += forward is None and backward is None
            row.differentiable |= differentiable
            row.forward += [f"sample {i} ({form}): {forward}"] if forward else []
            row.backward += [f"sample {i} ({form}): {backward}"] if backward else []
    row.seconds = time.perf_counter() - start
    return row


# --- without a compiler -----------------------------------------------------------------------------------------------------
class InterpretedKernel:
    """Runs the plan of a core without states by the eager meaning of its closed ops."""

    def __init__(self, plan: KernelPlan, source: str):
        self.plan, self.source = plan, source

    def bind(self, present: Sequence[bool], T: int, N: int) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
        return functools.partial(self._run, T, N)

    def _run(self, T: int, N: int, arrays: Sequence[Tensor], dims: Sequence[int]) -> None:
        reads = len(self.plan.reads)
        values, pairs = {}, iter(zip(dims[::2], dims[1::2], strict=True))
        for a, tensor in zip(self.plan.reads, arrays, strict=False):
            if a.kind == "param":
                inner, count = next(pairs)
                values[a.role] = tensor.reshape(-1)[(torch.arange(N) // inner) % count].to(a.compute)
            else:
                values[a.role] = tensor.reshape(T, N).to(a.compute)
        found = interpret(self.plan.step, values)
        for a, tensor in zip(self.plan.writes, arrays[reads:], strict=True):
            value = found[a.role].broadcast_to(T, N)
            tensor.copy_((value.sum(0) if a.kind == "row" else value).reshape(tensor.shape))


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it, backend "cpp" renders its kernels but interprets their graphs."""
    backend = BACKENDS["cpp"]
    BACKENDS["cpp"] = dataclasses.replace(backend, load=InterpretedKernel)
    try:
        yield
    finally:
        BACKENDS["cpp"] = backend
        with lock:  # programs that hold interpreted kernels
            PROGRAMS.clear()


# --- the table ----------------------------------------------------------------------------------------------------------------
def _judge_alone(job: tuple[str, bool, int, str, str]) -> Row:
    name, interpret_only, every, backend, device = job
    torch.set_num_threads(1)
    if not interpret_only:
        return judge(name, every, backend, device)
    with interpreted():
        return judge(name, every)


def run(
    names: Sequence[str], jobs: int, interpret_only: bool = False, every: int = 1, backend: str = "cpp", device: str = "cpu"
) -> list[Row]:
    """Judge entries in `jobs` processes."""
    work = [(name, interpret_only, every, backend, device) for name in names]
    if jobs == 1:
        return [_judge_alone(w) for w in work]
    done = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:  # raises if a process dies
        for future in as_completed([pool.submit(_judge_alone, w) for w in work]):
            row = done[future.result().name] = future.result()
            wrong = "" if row.ok else f"  {[*row.forward, *row.backward][:2]}"
            line = f"{len(done):4}/{len(work)} {row.name:32} {row.passed}/{row.total} {row.seconds:.1f} s{wrong}"
            print(line, file=sys.stderr, flush=True)
    return [done[name] for name in names]


def summary(rows: Sequence[Row], scoped: Sequence[str]) -> str:
    inside = [r for r in rows if r.name in scoped]
    extra = [r for r in rows if r.name not in scoped]
    text = f"{sum(r.ok for r in inside)} of {len(inside)} entries in scope pass"
    text += f", and {sum(r.ok for r in extra)} of {len(extra)} others" if extra else ""
    return text + f"; {sum(r.passed for r in rows)} of {sum(r.total for r in rows)} samples."


def table(rows: dict[str, list[Row]], scoped: Sequence[str]) -> str:
    """Three columns per backend."""
    heads = [f"{backend}: {head}" for backend in rows for head in ("samples", "forward", "backward")]
    lines = [f"| {' | '.join(['op', *heads, 'note'])} |", "|" + " --- |" * (len(heads) + 2)]
    for of_one in zip(*rows.values(), strict=True):
        cells = [cell for row in of_one for cell in row.states()]
        notes = [f"{backend}: {note}" for backend, row in zip(rows, of_one, strict=True) for note in row.notes()]
        exact = "bits of eager" if of_one[0].name in EXACT and not any(row.forward for row in of_one) else ""
        lines.append(f"| {' | '.join([f'`{of_one[0].name}`', *cells, '; '.join(notes) or exact])} |")
    summaries = [f"{backend}: {summary(found, scoped)}\n" for backend, found in rows.items()]
    return "\n".join([*summaries, *lines])


def document(body: str, command: str) -> str:
    today = datetime.date.today().isoformat()
    return f"""# Ops that work inside a core

Generated by `{command}` on {today}, with torch {torch.__version__}. Do not edit.

Each row is an entry of `op_db` (`torch.testing._internal.common_methods_invocations`); `docs/op_scope.txt` says which are in
scope. Every float32 sample of the entry runs as a core over three steps with `backend="cpp"`, and with `backend="triton"` in
Triton's interpreter, its other tensors as params and, where shapes allow, again as input sequences, and is compared with the
eager loop (`backend="torch"`): shape, dtype, values, and gradients of all tensors. "Bits of eager": forward values must be
equal bit for bit. Of all others: within {ULPS} ulp of eager, or no further from the float64 result than {ULPS} ulp or eager
itself. Gradients: the same, or within {GRADIENT_EPS} times the float32 epsilon of the gradient or of the cotangents, for cotangents
of order 1. (`sqrt` is not among the ops with eager's bits because eager's own, from MKL, is not correctly rounded; the
kernel's is.)

{body}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("entry", nargs="*", help="entries of op_db; all in scope if none is given")
    parser.add_argument("--write", action="store_true", help="write docs/ops.md, of both backends on the CPU")
    parser.add_argument("--interpret", action="store_true", help="interpret the lowered graphs: fast, and no compiler needed")
    parser.add_argument("--backend", choices=["cpp", "triton"], help="cpp on the CPU, triton on a GPU, if not given")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the samples are made")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=1, help="only each n-th sample")
    options = parser.parse_args()
    backend = options.backend or ("triton" if options.device == "cuda" else "cpp")
    if (options.device == "cuda") > (backend == "triton" and not options.write) or options.interpret > (backend == "cpp"):
        parser.error("--device cuda goes with triton and without --write, --interpret with cpp")
    backends = ["cpp", "triton"] if options.write else [backend]
    if "triton" in backends and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, here or in a worker
    scoped = scope()
    names = options.entry or [*scoped, *EXTRA]
    start = time.perf_counter()
    rows = {b: run(names, options.jobs, options.interpret, options.every, b, options.device) for b in backends}
    body = table(rows, scoped)
    if options.write:
        (ROOT / "docs" / "ops.md").write_text(document(body, "python tools/op_table.py --write"))
    print(body)
    misses = [(b, row) for b in backends for row in rows[b] if not row.ok]
    for b, row in misses:
        print(f"{b}: {row.name}: {'; '.join(row.notes()) or 'no samples'}")
    for b in backends:
        print(f"{b} on {options.device}: {summary(rows[b], scoped)}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
