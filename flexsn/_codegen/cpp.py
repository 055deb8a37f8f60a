"""Plan -> C++ source. Pure: no compiler, no device.

The kernel is `run(arrays, numbers, dims, T, N, tile, threads, large)`: `arrays` in the order of `plan.arguments`, `numbers` the
constants of the core, `dims` two numbers per param (`inner`, `count`: element i of the step reads param element
`(i / inner) % count`). `run_parts` walks `count` parts of time side by side, each of T steps of N neurons: rows of states and
cotangents then have `count * N` elements, but for the initial states of a walk back. Threads share the tiles;
a tile walks all of T with its states in cache; a row of a tile is computed in blocks, while what is read soon is asked
for and what is finished is written; loops over the neurons of a block are vector loops.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from .._ir.roles import Kind, of_kind
from .._plan.plan import Array, KernelPlan
from .cpp_ops import NEEDS
from .cpp_step import COMPUTE, ROW, STORAGE, Step, loaded, operand_rows, stored
from .language import numbers, safe, title


def render(plan: KernelPlan) -> str:
    """Return the kernel's source text."""
    body = _forward(plan) if plan.direction == "forward" else _backward(plan)
    return "\n".join([*_header(plan), *body, *(_carry(plan) if plan.matrix else ()), ""])


def _header(plan: KernelPlan) -> list[str]:
    graphs = [g for g in (plan.step, plan.advance) if g is not None]
    uses = sorted({line for g in graphs for n in g.nodes for line in NEEDS.get(n.op, ())})
    includes = [u for u in uses if u[0] == "#"]
    macros = [u for u in uses if u[0] != "#"]
    return [
        *title(plan, "//"),
        *includes,
        '#include "tile.h"',
        *macros,
        "using namespace flexsn;",
        "",
        f"constexpr int64_t K = {plan.chunk};  // steps from checkpoint to checkpoint",
        "",
    ]


# --- the frame around it --------------------------------------------------------------------------------------------------
def _open(plan: KernelPlan) -> list[str]:
    """Return the lines that open `run`: its signature, its arrays, and what each thread does: its rows, and a loop over its tiles."""
    sizes = "const int64_t* dims, int64_t T, int64_t N, int64_t count, int64_t tile, int threads, int large"
    lines = [f'extern "C" int run_parts(void* const* arrays, const double* numbers, {sizes}) {{']
    for i, a in enumerate(plan.arguments):
        const = "const " if i < len(plan.reads) else ""
        ctype = const + STORAGE[a.storage]
        lines.append(f"  {ctype}* const {_pointer(a, i < len(plan.reads))} = static_cast<{ctype}*>(arrays[{i}]);")
    lines.append("  const Parts parts{T, N, count};  // of time; one as a rule")
    lines += [
        f"  huge_pages({a.role}_seq, T * parts.neurons() * sizeof({STORAGE[a.storage]}));" for a in plan.writes if a.kind == "sequence"
    ]
    lines += [
        "  int failed = 0;",
        "  parallel(threads, [=, &failed](int thread, int threads) {",
        f"    Scratch scratch(tile * {_scratch_bytes(plan)} + {64 * (2 * len(plan.arguments) + len(plan.carried) + 4)});",
        "    if (!scratch.ok()) return fail(failed);",
    ]
    for k, (node, name) in enumerate(numbers(plan).items()):  # of each thread: what it stores might else lie where they do
        lines.append(f"    const {COMPUTE[node.dtype]} {name} = {COMPUTE[node.dtype]}(numbers[{k}]);")
    for name, ctype, count in _scratch_rows(plan):
        lines.append(f"    {ctype}* const {name} = scratch.rows<{ctype}>({count});")
    lines += [
        "    const Share share(parts.neurons(), tile, thread, threads);",
        "    for (int64_t begin = share.begin; begin < share.end; begin += tile) {",
        "      const int64_t size = up_to(tile, parts.neurons() - begin), n = padded(size);",
        "      const bool full = n == size && count == 1;  // else rows pass through padded buffers",
    ]
    params = [a for a in plan.reads if a.kind == "param"]
    lines += [f"      spread({a.role}_seq, dims[{2 * i}], dims[{2 * i + 1}], begin, size, {a.role}_row);" for i, a in enumerate(params)]
    for a in plan.carried:
        if a.role.kind is Kind.PARAM_GRAD:
            lines.append(f"      std::memset({a.role}_row, 0, n * sizeof({ROW[a.compute]}));")
        else:
            lines.append(f"      first_row({a.role}_first, begin, size, {a.role}_row);")
    return lines + _end(plan)


def _end(plan: KernelPlan) -> list[str]:
    """Return the lines that find out after how many steps all sequences of a tile have ended, and set what is written after that."""
    if plan.end is None:
        return []
    lines = []
    if plan.direction == "backward":
        start = f"parts, 0, K, begin, size, {plan.end}_row"
        lines.append(f"      chunk_start({plan.end}_first, {plan.end.to(Kind.CHECKPOINT)}_seq, {start});")
    lines.append(f"      const int64_t steps = ends_of({plan.end}_row, size, T, block_least, block_most);")
    written = [a for a in plan.writes if a.kind == "sequence"]
    lines += [f"      if (steps < T) std::memset({a.role}_buffer, 0, size * sizeof({STORAGE[a.storage]}));" for a in written]
    flushes = [f"        parts.flush({a.role}_seq, t, begin, {a.role}_buffer, size, large);" for a in written]
    return [*lines, "      for (int64_t t = steps; t < T; ++t) {", *flushes, "      }"]


def _steps(plan: KernelPlan) -> str:
    """Return the name of the number of steps that a tile walks."""
    return "T" if plan.end is None else "steps"


def _checkpoints(plan: KernelPlan) -> list[str]:
    """Return the lines that store the states at the start of a chunk."""
    lines = []
    for a in plan.writes:
        if a.kind == "checkpoint":
            role = a.role.to(Kind.STATE)
            store = "store_left" if role == plan.end else "store_checkpoint"
            lines.append(f"        if (t % K == 0) {store}({role}_row, parts, t / K, K, begin, size, {a.role}_seq);")
    return lines


def _close(plan: KernelPlan) -> list[str]:
    """Store the last rows and end what a thread does."""
    written = [a.role for a in plan.writes if a.kind == "row"]
    ends = [f"last_left({r}_row, T" if r == plan.end else f"last_row({r}_row" for r in written]
    rows = [f"      {end}, begin, size, {r}_last);" for r, end in zip(written, ends, strict=True)]
    sizes = "const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int large"
    return [
        *rows, "    }", "    if (large) fence();", "  });", "  return failed;", "}",
        f'extern "C" int run(void* const* arrays, const double* numbers, {sizes}) {{',
        "  return run_parts(arrays, numbers, dims, T, N, 1, tile, threads, large);",
        "}",
    ]  # fmt: skip


def _carry(plan: KernelPlan) -> list[str]:
    """Return the function that passes on what is carried from part to part."""
    states = len(plan.carried) - len(plan.matrix)
    entries = ", ".join(f"{{{row}, {column}}}" for row, column in plan.matrix)
    walked = ("part = 0; part < count; ++part", "part = count - 1; part >= 0; --part")[plan.direction == "backward"]
    return [
        "// From part to part of time: what is carried, times A, plus b. What comes in at a part takes the place of its b.",
        'extern "C" void carry(void* const* arrays, int64_t N, int64_t count) {',
        f"  constexpr int entries[][2] = {{{entries}}};  // of A: row and column",
        f"  const Carried<{ROW[plan.carried[0].compute]}, {states}> carried(arrays);",
        "  for (int64_t neuron = 0; neuron < N; ++neuron) {",
        f"    auto now = carried.first(neuron, {len(plan.matrix)});",
        f"    for (int64_t {walked}) now = carried.next(now, part * N + neuron, entries);",
        "  }",
        "}",
    ]


def _pointer(a: Array, read: bool) -> str:
    return f"{a.role}_seq" if a.kind != "row" else f"{a.role}_first" if read else f"{a.role}_last"


def _scratch_rows(plan: KernelPlan) -> list[tuple[str, str, str]]:
    """Return name, type and length of one thread's rows: buffers of sequences, spread params, carried rows, recomputed states."""
    rows = [(f"{a.role}_buffer", STORAGE[a.storage], "tile") for a in plan.arguments if a.kind == "sequence"]
    rows += [(f"{a.role}_row", ROW[a.compute], "tile") for a in plan.arguments if a.kind == "param"]
    rows += [(f"{a.role}_row", ROW[a.compute], "tile") for a in plan.carried]
    if plan.direction == "backward":
        states = {a.role.to(Kind.STATE): ROW[a.compute] for a in plan.reads if a.kind == "checkpoint"}
        rows += [(f"{role}_row", ctype, "tile" if role == plan.end else "K * tile") for role, ctype in states.items()]
    return rows + ([("block_least", "int32_t", "tile"), ("block_most", "int32_t", "tile")] if plan.end is not None else [])


def _scratch_bytes(plan: KernelPlan) -> int:
    """Return the scratch bytes per neuron of a tile; sizes of C++ types are those of the dtypes, but 16-bit floats compute in 4."""
    size = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "bool8": 1, "uint8_t": 1}
    sizes = size | {f"int{8 * n}_t": n for n in (1, 2, 4, 8)}
    return sum(sizes[ctype] * (plan.chunk if count != "tile" else 1) for _, ctype, count in _scratch_rows(plan))


def _rows(plan: KernelPlan, indent: str, roles: Container[str] | None = None) -> list[str]:
    """Return the lines that point at the rows of a step."""
    lines = []
    for i, a in enumerate(plan.arguments):
        if a.kind != "sequence" or (roles is not None and a.role not in roles):
            continue
        ctype = STORAGE[a.storage]
        if i < len(plan.reads):
            lines.append(
                f"{indent}const {ctype}* const {a.role}_row = parts.readable({a.role}_seq, t, begin, size, full, {a.role}_buffer);"
            )
        else:
            lines.append(f"{indent}{ctype}* const {a.role}_row = !full || large ? {a.role}_buffer : {a.role}_seq + t * N + begin;")
    return lines


def _blocks(plan: KernelPlan, indent: str, soon: Sequence[str], step: Step, *, writes: bool = True) -> list[str]:
    """Return the loop over the blocks of a row: prefetch, compute, flush what went to a buffer."""
    written = [a for a in plan.writes if writes and a.kind == "sequence"]
    flushes = [
        f"if (!full || large) parts.flush({a.role}_seq, t, begin + b, {a.role}_row + b, up_to(m, size - b), large);" for a in written
    ]
    zeros = " ".join([f"std::memset({a.role}_row + b, 0, m * sizeof({STORAGE[a.storage]}));" for a in written])
    ends = ["const int64_t least = block_least[b / BLOCK], most = block_most[b / BLOCK];"] if plan.end is not None else []
    return [
        f"{indent}for (int64_t b = 0; b < n; b += BLOCK) {{",
        f"{indent}  const int64_t m = up_to(BLOCK, n - b);",
        *(f"{indent}  {line}" for line in [*ends, *soon, step.call(zeros), *flushes]),
        f"{indent}}}",
    ]


# --- forward ----------------------------------------------------------------------------------------------------------------
def _forward(plan: KernelPlan) -> list[str]:
    graph = plan.step
    step = Step("step", f"One step of {safe(plan.core)} on n neurons of a row.", plan, graph)
    operand_rows(step, graph, plan, "")
    for a in plan.carried:
        if a.role == plan.end:
            continue
        step.row(f"{a.role}_row", ROW[a.compute], f"{a.role}_row", const=False)
        if a.role in graph.inputs:
            ctype = COMPUTE[a.compute]
            step.top.append(f"const {ctype} {graph.inputs[a.role].name} = {loaded(f'{a.role}_row[i]', ROW[a.compute], ctype)};")
        step.bottom.append(f"{a.role}_row[i] = {stored(graph.outputs[a.role], ROW[a.compute])};")
    for a in plan.writes:
        if a.kind == "sequence":
            value = graph.outputs[a.role.to(Kind.STATE) if a.role.kind is Kind.STATES else a.role]
            step.row(f"{a.role}_row", STORAGE[a.storage], f"{a.role}_row", const=False)
            step.bottom.append(f"{a.role}_row[i] = {stored(value, STORAGE[a.storage])};")
    steps = _steps(plan)
    lines = [*step.text(), *_open(plan), f"      for (int64_t t = 0; t < {steps}; ++t) {{", *_checkpoints(plan)]
    read, last = [a.role for a in plan.reads if a.kind == "sequence"], "T" if plan.end is None else "most"
    soon = [f"if (large && t + 1 < {last}) prefetch({r}_seq + (t + 1) * N + begin + b, m);" for r in read]
    lines += [*_rows(plan, "        "), *_blocks(plan, "        ", soon, step), "      }"]
    if plan.end is not None and (later := _checkpoints(plan)):
        lines += ["      for (int64_t t = steps; t < T; ++t) {", *later, "      }"]
    return [*lines, *_close(plan)]


# --- backward -----------------------------------------------------------------------------------------------------------------
def _backward(plan: KernelPlan) -> list[str]:
    assert plan.advance is not None
    advance = plan.advance
    states = [a for a in plan.reads if a.kind == "checkpoint" and a.role.to(Kind.STATE) != plan.end]
    ahead = Step("advance", f"The states of {safe(plan.core)} one step on, on n neurons of a row.", plan, advance)
    operand_rows(ahead, advance, plan, "{}_row + (t - start) * tile")
    for role, node in advance.outputs.items():
        if role == plan.end:
            continue
        ahead.row(f"{role}_next", ROW[node.dtype], f"{role}_row + (t - start + 1) * tile", const=False)
        ahead.bottom.append(f"{role}_next[i] = {stored(node, ROW[node.dtype])};")
    back, steps = _vjp_step(plan), _steps(plan)
    lines = [*(ahead.text() if states else []), *back.text(), *_open(plan)]
    lines += [
        f"      for (int64_t start = ({steps} - 1) / K * K; start >= 0; start -= K) {{",
        f"        const int64_t end = start + K < {steps} ? start + K : {steps};",
    ]
    for a in states:
        role = a.role.to(Kind.STATE)
        lines.append(f"        chunk_start({role}_first, {a.role}_seq, parts, start / K, K, begin, size, {role}_row);")
    indent = "          "
    if states:
        rows = _rows(plan, indent, advance.inputs)
        soon = [f"if (end == {steps}) prefetch({r}_seq + (t + 1) * N + begin + b, m);" for r in of_kind(advance.inputs, Kind.INPUT)]
        lines += [
            "        for (int64_t t = start; t + 1 < end; ++t) {",
            *rows,
            *_blocks(plan, indent, soon, ahead, writes=False),
            "        }",
        ]
    lines += [
        "        for (int64_t t = end - 1; t >= start; --t) {",
        *_rows(plan, indent),
        *_blocks(plan, indent, _soon(plan, advance.inputs if states else {}), back),
        "        }",
        "      }",
    ]
    return [*lines, *_close(plan)]


def _soon(plan: KernelPlan, recomputed: Container[str]) -> list[str]:
    """Return prefetch lines: the inputs of step t - 1, and one step of the inputs of the previous chunk's recomputation."""
    lines, going = [], "" if plan.end is None else "t <= most && "
    for a in plan.reads:
        if a.kind == "sequence" and a.role in recomputed:
            lines.append(f"if ({going}start > 0) prefetch_far({a.role}_seq + (start - K + (end - 1 - t)) * N + begin + b, m);")
        elif a.kind == "sequence":
            lines.append(f"if ({going}t > 0) prefetch({a.role}_seq + (t - 1) * N + begin + b, m);")
    return lines


def _vjp_step(plan: KernelPlan) -> Step:
    vjp = plan.step
    back = Step("vjp", f"One step back: the vector-Jacobian product of {safe(plan.core)} on n neurons of a row.", plan, vjp)
    operand_rows(back, vjp, plan, "{}_row + (t - start) * tile")
    sequences = {a.role: a for a in plan.reads if a.kind == "sequence"}
    for a in plan.carried:
        ctype = ROW[a.compute]
        back.row(f"{a.role}_row", ctype, f"{a.role}_row", const=False)
        if a.role.kind is Kind.PARAM_GRAD:
            back.bottom.append(f"{a.role}_row[i] += {stored(vjp.outputs[a.role], ctype)};")
            continue
        cotangent, own = f"{a.role}_row[i]", a.role.to(Kind.STATES_GRAD)
        if own in sequences:
            back.row(f"{own}_row", STORAGE[sequences[own].storage], f"{own}_row")
            cotangent += f" + load<{ctype}>({own}_row[i])"
        if a.role in vjp.inputs:
            back.top.append(f"const {ctype} {vjp.inputs[a.role].name} = {cotangent};")
        back.bottom.append(f"{a.role}_row[i] = {stored(vjp.outputs[a.role], ctype)};")
    for a in plan.writes:
        if a.kind == "sequence":
            back.row(f"{a.role}_row", STORAGE[a.storage], f"{a.role}_row", const=False)
            back.bottom.append(f"{a.role}_row[i] = {stored(vjp.outputs[a.role], STORAGE[a.storage])};")
    return back
