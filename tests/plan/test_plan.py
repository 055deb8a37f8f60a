"""Plans: what a kernel reads, writes and carries for the flags of a call, and the bytes that it moves."""

import pytest
import torch
from cores import adlif, lif
from helpers import run_kernel

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._captured.captured_values import look
from flexsn._ir.graph import Builder, interpret
from flexsn._ir.roles import Kind, Role
from flexsn._plan.plan import Array, KernelPlan, Plan, Segment, chunk_in_cache, plan_backward
from flexsn._program import compiled as compiling
from flexsn._runtime.backends import BACKENDS
from flexsn.errors import FlexSNError

f32 = torch.float32


def program(core, inputs, states, params, dtype=f32):
    sig = make_signature(core, inputs, states, params)
    metas = [Meta((5,), dtype)] * (inputs + states) + [Meta((), dtype)] * params
    made = compiling.program_of("cpp", core, sig, metas, torch.device("cpu"), look(core).tensors(), None)
    made.differentiate(core, look(core).tensors())
    return made


def roles(arrays, kind=None):
    return [a.role for a in arrays if kind is None or a.kind == kind]


def test_chunk_in_cache():
    assert [
        chunk_in_cache(1, 1, 10, 4, True),
        chunk_in_cache(2, 1, 10, 4, True),
        chunk_in_cache(1, 2, 10, 4, True),
        chunk_in_cache(1, 3, 10, 4, True),
        chunk_in_cache(1, 4, 10, 4, True),
        chunk_in_cache(1, 40, 10, 4, True),
    ] == [
        16,
        16,
        32,
        64,
        64,
        64,
    ]
    assert chunk_in_cache(1, 0, 10, 4, True) == 16


def test_forward():
    made = program(lif, 1, 1, 2)
    plain = made.forward_plan((f32,), False, False)
    assert set(roles(plain.reads)) == {"x0", "v0", "p0", "p1"} and sorted(roles(plain.writes)) == ["v0", "y0"]
    full = made.forward_plan((f32,), True, True)
    assert sorted(roles(full.writes)) == ["c0", "s0", "v0", "y0"] and roles(full.writes, "checkpoint") == ["c0"]
    assert roles(full.carried) == ["v0"]


def test_bytes_per_step():
    made = program(lif, 1, 1, 2)
    plan = made.forward_plan((f32,), True, False)
    assert (plan.bytes_per_step(plan.reads), plan.bytes_per_step(plan.writes)) == (4.0, 4.0 + 4.0 / 16)
    half = program(lif, 1, 1, 2, torch.float16).forward_plan((torch.float16,), False, False)
    assert (half.bytes_per_step(half.reads), half.bytes_per_step(half.writes)) == (2.0, 2.0)
    assert {a.compute for a in half.arguments} == {f32}


def test_backward_computes_only_what_is_wanted():
    made = program(adlif, 2, 2, 2)
    for wanted in ([], ["gx0"], ["gx1", "gv0"], ["gx0", "gx1", "gv0", "gv1"]):
        plan = made.backward_plan((f32, f32), wanted, ["gy0", "gy1"])
        assert sorted(roles(plan.writes)) == sorted(wanted)
    one = made.backward_plan((f32, f32), ["gx0"], ["gy1"])
    assert "gy0" not in roles(one.reads) and "gy1" in roles(one.reads)
    assert len(one.step.nodes) < len(made.backward_plan((f32, f32), ["gx0"], ["gy0", "gy1"]).step.nodes)


def test_a_linear_core_needs_no_states_in_its_backward():
    def linear(x, v):
        v = 0.5 * v + x
        return v, v

    plan = program(linear, 1, 1, 0).backward_plan((f32,), ["gx0", "gv0"], ["gy0"])
    assert "x0" not in roles(plan.reads) and not roles(plan.reads, "checkpoint") and plan.advance.nodes == []


def test_prints_what_it_moves():
    text = str(program(lif, 1, 1, 2).forward_plan((f32,), True, False))
    assert "forward of lif, chunks of 16 steps" in text and "x0 (sequence, float32)" in text and "4.25 B per neuron-step" in text


def test_tile_bytes_count_the_recomputed_states():
    made = program(lif, 1, 1, 2)
    assert made.backward_plan((f32,), ["gx0"], ["gy0"]).tile_bytes > made.forward_plan((f32,), True, False).tile_bytes >= 4


def test_roles_of_params_name_one_tensor_in_a_plan():
    """What the recomputation of states reads as a param and what the VJP reads are different tensors under different roles."""

    def core(x, v, p, q):
        new = v * v * 0.1 + x + p
        return v * q, new

    made = program(core, 1, 1, 2)
    plan = made.backward_plan((f32,), ["gx0", "gv0"], ["gy0"])
    names = {}
    for graph in (plan.step, plan.advance):
        for role, node in graph.inputs.items():
            if role[0] == "p":
                assert names.setdefault(role, node.name) == node.name, f"{role} is both {names[role]} and {node.name}"
    assert sorted(n.rstrip("_") for n in names.values()) == ["p", "q"]


# --- a plan is a list of kernels, a kernel a list of segments -------------------------------------------------------------------
def halves():
    """`y0 = (x0 + 1) * 2` as two segments, and what the first leaves to the second."""
    first, second = Builder("halves"), Builder("halves")
    x = first.input("x0", f32, "x")
    left = Role(Kind.STORED, 0)
    h = second.input(left, f32, "h")
    return (
        left,
        first.graph({left: first.op("add", x, first.const(1, f32))}),
        second.graph({"y0": second.op("mul", h, second.const(2, f32))}),
    )


def array(role, kind="sequence"):
    return Array(Role.of(role), kind, f32, f32)


def kernel(segments, reads, writes):
    return KernelPlan("halves", "forward", tuple(map(Segment, segments)), tuple(map(array, reads)), tuple(map(array, writes)), (), 16)


def test_a_plan_of_two_kernels_with_a_scratch_array_between_them():
    left, first, second = halves()
    plan = Plan((kernel([first], ["x0"], [left]), kernel([second], [left], ["y0"])), (array(left),))
    assert (roles(plan.reads), roles(plan.writes)) == (["x0"], ["y0"])
    assert str(plan).count("forward of halves") == 2 and str(plan).endswith("scratch: w0")


def test_a_kernel_of_two_segments():
    _, first, second = halves()
    plan = Plan((kernel([first, second], ["x0"], ["y0"]),))
    assert [s.step for s in plan.kernels[0].segments] == [first, second]
    with pytest.raises(ValueError, match="unpack"):
        _ = plan.kernels[0].step  # no renderer takes more than one


def test_plans_that_do_not_hold_together():
    left, first, second = halves()
    one, other = kernel([first], ["x0"], [left]), kernel([second], [left], ["y0"])
    for kernels, scratch, lacks in (
        ((other, one), (array(left),), "lacks w0"),
        ((kernel([first], [], [left]),), (), "lacks x0"),
        ((kernel([first], ["x0"], [left, "y0"]),), (), "lacks y0"),
        ((kernel([second, first], ["x0"], ["y0"]),), (), "lacks w0"),
        ((kernel([first], ["x0"], [left]),), (array("w1"),), "nothing writes w1"),
    ):
        with pytest.raises(FlexSNError, match=lacks):
            Plan(kernels, scratch)


def test_plans_of_programs_hold_one_kernel_of_one_segment():
    made = program(adlif, 2, 2, 2)
    for plan in (made.plan_of("forward", (f32, f32), True, True), made.plan_of("backward", (f32, f32), ("gx0", "gv1", "gp0"), ("gy0",))):
        ((segment,),) = [k.segments for k in plan.kernels]
        assert segment.step is plan.kernels[0].step and plan.writes == list(plan.kernels[0].writes) and not plan.scratch


def test_an_epilogue_may_take_a_sequence():
    """A backward stores a value of every step under a role of its own: for gradients that are no sums of values of one neuron."""
    T, N, b = 37, 100, Builder("stored")
    x, v, g = b.input("x0", f32, "x"), b.input("v0", f32, "v"), b.input("gv0", f32, "g")
    kept = Role(Kind.STORED, 0)
    joint = b.graph({"gx0": b.op("mul", g, v), "gv0": b.op("mul", g, x), "v0": b.op("mul", v, x), kept: b.op("mul", g, b.const(3, f32))})
    storage = dict.fromkeys([*joint.inputs, *joint.outputs, Role(Kind.STATE, 0)], f32)
    made = plan_backward(joint, storage, chunk=16, wanted=["gx0", "gv0", kept], cotangents=())
    assert Plan((made,)).writes == [array("gx0"), array("gv0", "row"), array(kept)]
    xs, start, end = torch.rand(T, N) + 0.5, torch.rand(N), torch.rand(N)
    states = [start]
    for t in range(T - 1):
        states.append(states[-1] * xs[t])
    checkpoints = torch.stack([states[t] for t in range(16, T, 16)])
    want = []
    cotangent = end
    for t in reversed(range(T)):
        want.append(interpret(joint, {"x0": xs[t], "v0": states[t], "gv0": cotangent}))
        cotangent = want[-1]["gv0"]
    written = {"gx0": torch.empty(T, N), "gv0": torch.empty(N), kept: torch.empty(T, N)}
    loaded = BACKENDS["cpp"].load(made, BACKENDS["cpp"].render(made))
    run_kernel(loaded, {"x0": xs, "v0": start, "c0": checkpoints, "gv0": end}, written, T, N)
    assert torch.equal(written[kept], torch.stack([w[kept] for w in reversed(want)])) and torch.equal(written["gv0"], cotangent)


def test_program_is_reused_by_scan(counts):
    def mine(x, v):
        return x * 0.5, v + x

    for T in (3, 4):
        flexsn.scan(mine, [torch.randn(T, 5)], [None], backend="cpp")
    assert counts.programs == 1
