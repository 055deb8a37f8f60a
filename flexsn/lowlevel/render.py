"""A multi-step kernel around the source of one step: its plan and its Triton text.

Roles are those of `_plan/plan.py`, with the kernel's returns (outputs, state sequences, intermediates) as `y*`; in the backward
the saved values are `x*`, numbered after the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._codegen.triton import COMPUTE, kernel_name, nullable
from .._ir.graph import Graph
from .._plan.plan import Array, Plan
from .info import FlexSNInfo


def saved_roles(info: FlexSNInfo) -> list[str]:
    """Of the values that the backward reads, in the order of `c2k_return_mapping`."""
    return [f"x{info.num_inputs + m}" for m, _ in enumerate(info.c2k_return_mapping)]


def cotangent_roles(info: FlexSNInfo) -> list[str]:
    """Of the cotangents of outputs and new states, at one step."""
    return [*(f"gy{k}" for k in range(info.num_outputs)), *(f"gv{k}" for k in range(info.num_states))]


def forward_plan(core: str, info: FlexSNInfo, storage: Mapping[str, torch.dtype], num_returns: int) -> Plan:
    """The pass over T that stores the first `num_returns` of the kernel's returns, and the final states."""
    states = [_array(f"v{k}", "row", storage[f"v{k}"]) for k in range(info.num_states)]
    inputs = [_array(f"x{k}", "sequence", storage[f"x{k}"]) for k in range(info.num_inputs)]
    returns = [_array(f"y{k}", "sequence", storage[f"y{k}"]) for k in range(num_returns)]
    return Plan(core, "forward", _unknown(core), None, (*inputs, *states), (*states, *returns), tuple(states), 1)


def backward_plan(core: str, info: FlexSNInfo, storage: Mapping[str, torch.dtype], present: Sequence[str]) -> Plan:
    """The walk back over saved values, from the cotangents `present` (`gy*` of outputs, `gs*` of state sequences)."""
    saved = [_array(r, "sequence", storage[r]) for r in saved_roles(info)]
    given = [_array(r, "sequence", storage[f"{'y' if r[1] == 'y' else 'v'}{r[2:]}"]) for r in present]
    states = [_array(f"gv{k}", "row", storage[f"v{k}"]) for k in range(info.num_states)]
    inputs = [_array(f"gx{k}", "sequence", storage[f"x{k}"]) for k in range(info.num_inputs)]
    return Plan(core, "backward", _unknown(core), None, (*saved, *given, *states), (*states, *inputs), tuple(states), 1)


def _array(role: str, kind: str, dtype: torch.dtype) -> Array:
    return Array(role, kind, dtype, dtype)


def _unknown(core: str) -> Graph:
    return Graph(core, {}, {})


def forward_text(plan: Plan, info: FlexSNInfo) -> str:
    """The kernel that calls step function `plan.core` from the first step to the last."""
    states = [a.role for a in plan.carried]
    inputs = [a.role for a in plan.reads if a.kind == "sequence"]
    outputs = [a.role for a in plan.writes if a.kind == "sequence"]
    new = {info.num_outputs + k: f"{v}_next" for k, v in enumerate(states)}
    kept = [new.get(j, f"y{j}" if j < len(outputs) else "_") for j in range(info.num_fwd_kernel_returns)]
    results = iter(kept)
    received = [next(results) if name != "_" else "_" for name in info.fwd_core_recipients]
    lines = _open(plan)
    lines += [f"    {v} = {_first(plan, v)}" for v in states]
    lines += ["    at = i", "    for t in range(T):"]
    lines += [f"        {x} = tl.load({x}_seq + at, mask=mask, other=0)" for x in inputs]
    lines.append(f"        {', '.join(received)} = {plan.core}({', '.join([*inputs, *states])})")
    lines += [f"        tl.store({y}_seq + at, {kept[j]}, mask=mask)" for j, y in enumerate(outputs)]
    lines += [f"        {v} = {v}_next.to({v}.dtype)" for v in states]
    return "\n".join([*lines, "        at += N", *_last(plan, states), ""])


def backward_text(plan: Plan, info: FlexSNInfo, cotangents: Sequence[str], storage: Mapping[str, torch.dtype]) -> str:
    """The kernel that calls backward step function `plan.core` from the last step to the first.

    Args:
        cotangents: roles of those that the function takes (`gy*`, `gv*`), after the saved values.
    """
    states = [a.role for a in plan.carried]
    inputs = [a.role for a in plan.writes if a.kind == "sequence"]
    sequences = [a.role for a in plan.reads if a.kind == "sequence"]
    lines = _open(plan)
    lines += [f"    {v} = {_first(plan, v)}" for v in states]
    lines += ["    at = i + (T - 1) * N", "    for t in range(T):"]
    lines += [f"        {r} = tl.load({r}_seq + at, mask=mask, other=0)" for r in sequences]
    for role in cotangents:
        own = f"gs{role[2:]}"
        if role[1] == "y" and role not in sequences:
            lines.append(f"        {role} = tl.zeros((BLOCK,), {COMPUTE[storage[role[1:]]]})  # no cotangent")
        elif own in sequences and role[1] == "v":
            lines.append(f"        {role} = {role} + {own}")
    results = [*inputs, *(f"{v}_next" for v in states)]
    call = f"{plan.core}({', '.join([*saved_roles(info), *cotangents])})"
    lines.append(f"        {', '.join(results)} = {call}")
    lines += [f"        tl.store({x}_seq + at, {x}, mask=mask)" for x in inputs]
    lines += [f"        {v} = {v}_next.to({v}.dtype)" for v in states]
    return "\n".join([*lines, "        at -= N", *_last(plan, states), ""])


def _open(plan: Plan) -> list[str]:
    pointers = []
    for i, a in enumerate(plan.arguments):
        pointers.append(f"{a.role}_{'seq' if a.kind == 'sequence' else 'first' if i < len(plan.reads) else 'last'}")
    return [
        "",
        "",
        "@triton.jit",
        f"def {kernel_name(plan)}({', '.join(pointers)}, T, N, given, BLOCK: tl.constexpr, AHEAD: tl.constexpr):",
        "    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    mask = i < N",
    ]


def _first(plan: Plan, role: str) -> str:
    bit = 1 << [a.role for a in nullable(plan)].index(role)
    return f"tl.load({role}_first + i, mask=mask & ((given & {bit}) != 0), other=0)"


def _last(plan: Plan, states: Sequence[str]) -> list[str]:
    return [f"    tl.store({v}_last + i, {v}, mask=mask)" for v in states]
