"""Plans: what a kernel reads, writes and carries for the flags of a call, and the bytes that it moves."""

import torch
from cores import adlif, lif

import flexsn
from flexsn._capture.reads_look import look
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._plan.plan import chunk_in_cache
from flexsn._program import compiled as compiling

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


def test_program_is_reused_by_scan(counts):
    def mine(x, v):
        return x * 0.5, v + x

    for T in (3, 4):
        flexsn.scan(mine, [torch.randn(T, 5)], [None], backend="cpp")
    assert counts.programs == 1
