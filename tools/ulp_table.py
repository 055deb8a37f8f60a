"""How far each function is from the correctly rounded value, in ulp: flexsn's C++ kernel and PyTorch's eager op, side by side.

    python tools/ulp_table.py [--write] [--samples 4000] [op ...]

The correctly rounded value is mpmath's, with 120 bits and more where digits cancel. Arguments: edges, and samples that are
spread evenly over the float numbers of an op's domain (every magnitude counts alike) and over the range where neurons live.
`--write` puts the table into docs/numerics.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

from flexsn._codegen import cpp as render_cpp
from flexsn._ir.graph import Builder
from flexsn._ir.ops import OPS
from flexsn._plan import plan
from flexsn._runtime import cpp_kernel as launch_cpp

ROOT = Path(__file__).resolve().parent.parent
mp = mpmath.mp
mp.prec = 120
DTYPES = (torch.float32, torch.float64)


def _ndtri(p: Any) -> Any:
    return mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1)


def _log_ndtr(x: Any) -> Any:
    return mpmath.log(mpmath.erfc(-x / mpmath.sqrt(2)) / 2)


def _erfcx(x: Any) -> Any:
    return mpmath.exp(x * x) * mpmath.erfc(x)


def _lgamma(x: Any) -> Any:
    return mpmath.log(abs(mpmath.gamma(x)))


@dataclass(frozen=True)
class Function:
    """What is measured of an op.

    Attributes:
        exact: its value in mpmath.
        domains: by argument, where it is sampled.
        bound: of the error of flexsn's kernel in ulp, float32 and float64; None: that of eager and a half. The tests hold it.
        expensive: mpmath takes long: fewer samples.
    """

    exact: Callable[..., Any]
    domains: tuple[tuple[float, float], ...]
    bound: tuple[float, float] | None
    expensive: bool = False


_ALL, _POSITIVE = (-1e300, 1e300), (0.0, 1e300)
FUNCTIONS: dict[str, Function] = {
    "sqrt": Function(mpmath.sqrt, (_POSITIVE,), (0.5, 0.5)),
    "fma": Function(lambda a, b, c: a * b + c, (_ALL, _ALL, _ALL), (0.5, 0.5)),
    "exp": Function(mpmath.exp, ((-104.0, 88.7),), (1.02, 1.0)),
    "exp2": Function(lambda x: mpf(2) ** x, ((-150.0, 128.0),), (1.0, 1.0)),
    "expm1": Function(mpmath.expm1, ((-50.0, 88.7),), (1.0, 1.0)),
    "log": Function(mpmath.log, (_POSITIVE,), (1.0, 1.0)),
    "log2": Function(lambda x: mpmath.log(x) / mpmath.ln2, (_POSITIVE,), (1.0, 1.0)),
    "log10": Function(mpmath.log10, (_POSITIVE,), (1.0, 1.0)),
    "log1p": Function(mpmath.log1p, ((-0.999999, 1e300),), (1.0, 1.0)),
    "sin": Function(mpmath.sin, ((-1e5, 1e5),), (1.0, 1.0)),
    "cos": Function(mpmath.cos, ((-1e5, 1e5),), (1.0, 1.0)),
    "tan": Function(mpmath.tan, ((-1e5, 1e5),), (1.0, 1.0)),
    "asin": Function(mpmath.asin, ((-1.0, 1.0),), (1.0, 1.0)),
    "acos": Function(mpmath.acos, ((-1.0, 1.0),), (1.0, 1.0)),
    "atan": Function(mpmath.atan, (_ALL,), (1.0, 1.0)),
    "sinh": Function(mpmath.sinh, ((-88.0, 88.0),), (1.02, 1.02)),
    "cosh": Function(mpmath.cosh, ((-88.0, 88.0),), (1.0, 1.0)),
    "tanh": Function(mpmath.tanh, ((-20.0, 20.0),), (1.02, 1.0)),
    "asinh": Function(mpmath.asinh, (_ALL,), (1.0, 1.0)),
    "acosh": Function(mpmath.acosh, ((1.0, 1e300),), (1.0, 1.0)),
    "atanh": Function(mpmath.atanh, ((-1.0, 1.0),), (1.02, 1.02)),
    "sigmoid": Function(lambda x: 1 / (1 + mpmath.exp(-x)), ((-80.0, 80.0),), (2.0, 2.0)),
    "erf": Function(mpmath.erf, ((-6.0, 6.0),), (1.0, 1.0)),
    "erfc": Function(mpmath.erfc, ((-6.0, 9.0),), (1.5, 1.5)),
    "lgamma": Function(_lgamma, ((0.01, 1e10),), (1.0, 1.0), True),
    "atan2": Function(mpmath.atan2, (_ALL, _ALL), (1.0, 1.0)),
    "hypot": Function(mpmath.hypot, ((-1e150, 1e150), (-1e150, 1e150)), (0.5, 0.5)),
    "pow": Function(mpmath.power, ((0.0, 1e6), (-20.0, 20.0)), (1.0, 1.0)),
    "erfinv": Function(mpmath.erfinv, ((-1.0, 1.0),), (0.51, 1.5), True),
    "digamma": Function(mpmath.digamma, ((0.01, 1e6),), None, True),
    "erfcx": Function(_erfcx, ((-9.0, 1e6),), None, True),
    "ndtri": Function(_ndtri, ((0.0, 1.0),), None, True),
    "log_ndtr": Function(_log_ndtr, ((-30.0, 5.0),), None, True),
}


# --- arguments ------------------------------------------------------------------------------------------------------------
def arguments(name: str, dtype: torch.dtype, count: int, seed: int = 0) -> list[Tensor]:
    """Edges and samples of an op's domain, for every argument."""
    generator = torch.Generator().manual_seed(seed)
    return [_samples(low, high, dtype, count, generator) for low, high in FUNCTIONS[name].domains]


def _samples(low: float, high: float, dtype: torch.dtype, count: int, generator: torch.Generator) -> Tensor:
    info = torch.finfo(dtype)
    low, high = max(low, info.min), min(high, info.max)
    near = (torch.rand(count, generator=generator, dtype=torch.float64) * 20 - 10).clamp(low, high)
    smallest = 2 * info.tiny
    exponents = torch.rand(count, generator=generator, dtype=torch.float64)
    top = max(abs(low), abs(high))
    small, large = torch.tensor([smallest, top], dtype=torch.float64).log2()
    spread = torch.exp2(small + exponents * (large - small)) * (1 + torch.rand(count, generator=generator, dtype=torch.float64) * 1e-3)
    sign = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    spread = (spread * sign).clamp(low, high) if low < 0 else spread.clamp(low, high)
    inside = low + torch.rand(count, generator=generator, dtype=torch.float64) * (min(high, 1e4) - max(low, -1e4))
    edges = torch.tensor([low, high, 1 - info.eps / 2, 1 + info.eps, 0.5, 1.0, 2.0, 1e-3, info.eps, 0.693147, 1.5707963, 3.1415927],
                         dtype=torch.float64).clamp(low, high)  # fmt: skip
    values = torch.cat([near, spread, inside.clamp(low, high), edges]).to(dtype).clamp(low, high)
    return values[torch.randperm(len(values), generator=generator)]


# --- values ----------------------------------------------------------------------------------------------------------------
def kernel(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The C++ kernel of one op, as users get it."""
    b = Builder(name)
    graph = b.graph({"y0": b.op(name, *[b.input(f"x{k}", dtype, f"x{k}") for k in range(OPS[name].arity)])})
    storage = {r: n.dtype for r, n in (graph.inputs | graph.outputs).items()}
    made = plan.plan_forward(graph, storage, chunk=16, checkpoint=False, sequences=False)
    loaded = launch_cpp.load(made, render_cpp.render(made))

    def run(*args: Tensor) -> Tensor:
        out = torch.empty_like(args[0])
        arrays = [*(a.contiguous() for a in args), out]
        loaded.bind([True] * len(arrays), 1, out.numel())(arrays, [])
        return out

    return run


def errors(name: str, args: list[Tensor], results: list[Tensor]) -> list[tuple[float, int]]:
    """The largest error in ulp of each of the results, and at which element. Only where the value is a normal number."""
    exact, dtype = FUNCTIONS[name].exact, args[0].dtype
    info = torch.finfo(dtype)
    rows = list(zip(*(a.tolist() for a in args), strict=True))
    found = [(0.0, 0)] * len(results)
    values = [r.double().tolist() for r in results]
    for i, row in enumerate(rows):
        want = _exact(exact, row)
        if want is None or not info.tiny <= abs(want) <= info.max:
            continue
        ulp = mpf(2) ** (mpmath.frexp(want)[1] - (24 if dtype is torch.float32 else 53))
        for k, got in enumerate(values):
            error = float(abs(mpf(got[i]) - want) / ulp) if mpmath.isfinite(got[i]) else float("inf")
            if error > found[k][0]:
                found[k] = (error, i)
    return found


def _exact(function: Callable[..., Any], row: tuple[float, ...]) -> Any | None:
    """With digits to spare; None outside of the domain."""
    try:
        value = function(*map(mpf, row))
    except (ValueError, ZeroDivisionError, mpmath.libmp.NoConvergence, OverflowError):
        return None
    return value if isinstance(value, mpf) and mpmath.isfinite(value) and value else None


# --- the table --------------------------------------------------------------------------------------------------------------
@dataclass
class Row:
    name: str
    flexsn: dict[torch.dtype, float]
    eager: dict[torch.dtype, float]
    worst: dict[torch.dtype, tuple[float, ...]]
    samples: int

    def holds(self) -> bool:
        """Whether flexsn keeps its bounds."""
        bound = FUNCTIONS[self.name].bound or tuple(0.5 + 1.5 * self.eager[d] for d in DTYPES)
        return all(self.flexsn[d] <= b for d, b in zip(DTYPES, bound, strict=True))


def measure(name: str, count: int, kernel: Callable[[str, torch.dtype], Callable[..., Tensor]] = kernel) -> Row:
    row = Row(name, {}, {}, {}, 0)
    count = count // 20 if FUNCTIONS[name].expensive else count
    for dtype in DTYPES:
        args = arguments(name, dtype, count // 3)
        (own, at), (eager, _) = errors(name, args, [kernel(name, dtype)(*args), OPS[name].eager(*args)])
        row.flexsn[dtype], row.eager[dtype] = own, eager
        row.worst[dtype] = tuple(a[at].item() for a in args)
        row.samples += len(args[0])
    return row


def table(rows: list[Row]) -> str:
    lines = ["| op | bound | flexsn float32 | eager float32 | flexsn float64 | eager float64 | samples | worst float32 argument |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        cells = [_ulp(v[d]) for d in DTYPES for v in (row.flexsn, row.eager)]
        bound = FUNCTIONS[row.name].bound
        promised = "eager's" if bound is None else " / ".join(map(str, bound))
        worst = ", ".join(f"{w:.9g}" for w in row.worst[torch.float32])
        lines.append(f"| `{row.name}` | {promised} | {' | '.join(cells)} | {row.samples} | {worst} |")
    return "\n".join(lines)


def _ulp(error: float) -> str:
    return "0.500" if error == 0.5 else f"{error:.3f}" if error < 100 else f"{error:.3g}"


def provenance(command: str) -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    where = f"{cpu[1] if cpu else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"
    versions = f"torch {torch.__version__}, mpmath {mpmath.__version__}, Python {platform.python_version()}"
    return f"Measured by `{command}` on {datetime.date.today().isoformat()}: {where}, {versions}."


def write(body: str) -> None:
    path = ROOT / "docs" / "numerics.md"
    text = path.read_text()
    begin, end = "<!-- ulp table -->\n", "<!-- end of the ulp table -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    path.write_text(f"{head}{begin}{body}\n{end}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("op", nargs="*", help="ops; all if none is given")
    parser.add_argument("--write", action="store_true", help="write docs/numerics.md")
    parser.add_argument("--samples", type=int, default=4000, help="of each op and dtype")
    options = parser.parse_args()
    start, rows = time.perf_counter(), []
    for name in options.op or FUNCTIONS:
        rows.append(measure(name, options.samples))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if options.write:
        write(f"{provenance(f'python tools/ulp_table.py --write --samples {options.samples}')}\n\n{table(rows)}")
    over = [r.name for r in rows if not r.holds()]
    print(f"{time.perf_counter() - start:.0f} s; over their bounds: {', '.join(over) or 'none'}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
