"""`flexsn.lowlevel`: graphs, sources of a step, infos."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import fx

import flexsn
from flexsn import lowlevel, surrogate
from flexsn.errors import BackendUnavailableError, UnsupportedOpError
from flexsn.lowlevel import (
    FlexSNInfo,
    compile_triton_code_str,
    extract_info,
    generate_forward_and_backward_graph,
    generate_inference_graph,
    generate_triton_code_str,
)
from flexsn.lowlevel.graphs import output_values

aten = torch.ops.aten


def lif(x, v):
    h = v + (x - v) / 2.0
    s = surrogate.atan(h - 1.0)
    return s, h * (1.0 - s.detach())


def run(graph, *args):
    return fx.Interpreter(graph.owning_module, graph=graph).run(*args)


def targets(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


def two(*shape, **options):
    return [torch.randn(*shape, **options) for _ in range(2)]


# --- inference graphs ----------------------------------------------------------------------------------------------------------------
def test_inference_graph_computes_the_function():
    x, v = two(3, 5)
    graph = generate_inference_graph(lif, [x, v])
    assert isinstance(graph, fx.Graph)
    for got, want in zip(run(graph, x, v), lif(x, v), strict=True):
        assert torch.equal(got, want)


def test_graphs_are_flat_aten_without_detach():
    graphs = [generate_inference_graph(lif, two(3, 5)), *generate_forward_and_backward_graph(lif, two(3, 5))]
    for graph in graphs:
        assert targets(graph) and all(isinstance(t, torch._ops.OpOverload) and t.namespace == "aten" for t in targets(graph))
        assert aten.detach.default not in targets(graph)


def in_place(x, v):
    v.mul_(0.5)
    v += x
    x.zero_()
    return v.clamp_(min=0), v


@pytest.mark.parametrize("generate", [generate_inference_graph, generate_forward_and_backward_graph])
def test_examples_stay_as_they_are(generate):
    x, v = torch.randn(3, 5), torch.randn(3, 5, requires_grad=True)
    before = [x.clone(), v.detach().clone()]
    versions = x._version, v._version
    generate(in_place, [x, v])
    assert torch.equal(x, before[0]) and torch.equal(v.detach(), before[1]) and (x._version, v._version) == versions
    assert not x.requires_grad and v.requires_grad and x.grad is None and v.grad is None


def test_in_place_cores_become_functional():
    x, v = two(3, 5)
    want = in_place(x.clone(), v.clone())
    graph = generate_inference_graph(in_place, [x, v])
    assert not any(t._schema.is_mutable for t in targets(graph))
    assert all(torch.equal(a, b) for a, b in zip(run(graph, x, v), want, strict=True))


@pytest.mark.parametrize("generate", [generate_inference_graph, lambda *a: generate_forward_and_backward_graph(*a)[0]])
def test_examples_that_are_no_tensors_pass_through(generate):
    def core(x, factor, v, mode):
        return (x * factor if mode == "scale" else x + factor) + v

    x, v = two(4)
    graph = generate(core, [x, 3.0, v, "scale"])
    assert len(graph.find_nodes(op="placeholder")) == 4
    assert torch.equal(run(graph, x, 3.0, v, "scale")[0], x * 3.0 + v)


def test_tensor_constants_are_reachable():
    captured = torch.tensor([1.0, 2.0, 3.0])
    graph = generate_inference_graph(lambda x: x * captured, [torch.randn(2, 3)])
    (node,) = graph.find_nodes(op="get_attr")
    assert torch.equal(getattr(graph.owning_module, node.target), captured)


@pytest.mark.parametrize(
    "core",
    [lambda x: x.item() * x, lambda x: x if x.sum() > 0 else -x, lambda x: x @ x, lambda x: 3, lambda x: {"y": x}, lambda x: None],
)
@pytest.mark.parametrize("generate", [generate_inference_graph, generate_forward_and_backward_graph])
def test_what_cannot_be_captured_is_a_value_error(core, generate):
    with pytest.raises(ValueError, match="core `<lambda>`"):
        generate(core, [torch.randn(2, 3)])


def test_nothing_to_capture_is_a_value_error():
    with pytest.raises(ValueError, match="no example that is a tensor"):
        generate_inference_graph(lambda: torch.ones(3), [])


# --- forward and backward --------------------------------------------------------------------------------------------------------------
def test_forward_and_backward_graphs_give_eagers_values_and_gradients():
    x, v = (t.requires_grad_() for t in two(3, 5))
    forward, backward = generate_forward_and_backward_graph(lif, [x, v])
    want = lif(x, v)
    cotangents = [torch.randn_like(t) for t in want]
    gradients = torch.autograd.grad(want, [x, v], cotangents)
    returned = run(forward, x.detach(), v.detach())
    assert all(torch.equal(a, b) for a, b in zip(returned[:2], want, strict=True))
    found = run(backward, *returned[2:], *cotangents)
    for got, grad in zip(found, gradients, strict=True):
        torch.testing.assert_close(got, grad)


def test_backward_takes_cotangents_of_differentiable_returns_only():
    def core(x, v):
        return (x > 0), x * v, (x * 3).int(), v * v

    forward, backward = generate_forward_and_backward_graph(core, two(3))
    intermediates = len(output_values(forward)) - 4
    names = [n.name for n in backward.find_nodes(op="placeholder")]
    assert names[intermediates:] == ["grad_1", "grad_3"]


def test_intermediates_are_few():
    """The min-cut saves what the backward cannot cheaply recompute: never more than the inputs here."""

    def core(x):
        return (torch.exp(-(x * x + x) * 0.5) * 3.0 + x) * 2.0

    forward, _ = generate_forward_and_backward_graph(core, [torch.randn(3)])
    assert len(output_values(forward)) - 1 <= 2


def test_the_min_cut_saves_one_tensor_of_a_long_chain():
    """Each factor's gradient needs the other one: what saves all that the backward reads keeps twelve."""

    def core(x):
        for _ in range(6):
            x = torch.sin(x) * x
        return x

    forward, _ = generate_forward_and_backward_graph(core, [torch.randn(3)])
    assert len(output_values(forward)) - 1 == 1


def test_requires_grad_has_one_flag_per_example():
    _, backward = generate_forward_and_backward_graph(lif, two(3), [False, True])
    x, v = output_values(backward)
    assert x is None and v is not None
    for flags in ([True], [True] * 3):
        with pytest.raises(ValueError, match="flags"):
            generate_forward_and_backward_graph(lif, two(3), flags)


def test_integers_and_bools_never_require_grad():
    def core(x, n, b):
        return x * n + b

    examples = [torch.randn(3), torch.arange(3), torch.ones(3, dtype=torch.bool)]
    _, backward = generate_forward_and_backward_graph(core, examples, [True, True, True])
    x, n, b = output_values(backward)
    assert x is not None and n is None and b is None


@pytest.mark.parametrize("core", [lambda x: x > 0, lambda x: x.detach() * 2, lambda x: torch.ones_like(x)])
def test_no_differentiable_output_is_a_value_error(core):
    with pytest.raises(ValueError, match="differentiable"):
        generate_forward_and_backward_graph(core, [torch.randn(3)])
    with pytest.raises(ValueError, match="differentiable"):
        generate_forward_and_backward_graph(lambda x: x * 2, [torch.randn(3)], [False])


@pytest.mark.parametrize("generate", [generate_inference_graph, generate_forward_and_backward_graph])
def test_neither_random_numbers_nor_warning_filters_are_touched(generate):
    def noisy(x):
        return x * torch.rand_like(x) + torch.randn(3)

    state, filters = torch.get_rng_state(), list(warnings.filters)
    generate(noisy, [torch.ones(2, 3)])
    assert torch.equal(torch.get_rng_state(), state)
    assert warnings.filters == filters


@pytest.mark.slow
def test_first_capture_in_a_process_leaves_the_warning_filters():
    code = (
        "import torch, warnings, flexsn\nfrom flexsn.lowlevel import generate_forward_and_backward_graph as g\n"
        "before = list(warnings.filters)\ng(lambda x: x * x, [torch.ones(3)])\nassert warnings.filters == before, warnings.filters\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_captures_on_threads_leave_the_warning_filters():
    filters, failed = list(warnings.filters), []

    def work():
        try:
            generate_forward_and_backward_graph(lif, two(3))
        except Exception as error:  # asserted on below: a thread's exception does not fail a test by itself
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and warnings.filters == filters


def test_capture_works_in_any_surroundings():
    x, v = two(3, 5)
    with torch.no_grad(), torch.autocast("cpu"):
        _, backward = generate_forward_and_backward_graph(lif, [x, v])
    with torch.inference_mode():
        forward, _ = generate_forward_and_backward_graph(lif, two(3, 5))
    assert len(output_values(backward)) == 2
    assert all(n.meta["val"].dtype == torch.float32 for n in output_values(forward))


# --- source of a step -------------------------------------------------------------------------------------------------------------------
def test_source_is_one_jitted_function_named_after_its_text():
    source, name = generate_triton_code_str(generate_inference_graph(lif, two(3)), "lif")
    assert name.startswith("lif") and name != "lif" and f"@triton.jit\ndef {name}(" in source
    assert generate_triton_code_str(generate_inference_graph(lif, two(3)), "lif") == (source, name)
    other, unlike = generate_triton_code_str(generate_inference_graph(lambda x, v: (x, v * x), two(3)), "lif")
    assert other != source and unlike != name


def test_source_takes_every_argument_and_writes_numbers_of_captured_scalars():
    tau, w = torch.tensor(4.0), torch.nn.Parameter(torch.tensor(0.0))
    source, name = generate_triton_code_str(generate_inference_graph(lambda x, v: x / tau + torch.sigmoid(w), two(3)), "a core!")
    assert name.isidentifier() and "4.0" in source and "0.5" in source
    assert len(compile_triton_code_str(source, name).arg_names) == 2


def test_larger_captured_tensors_do_not_fit_into_a_source():
    w = torch.randn(3)
    with pytest.raises(UnsupportedOpError, match="captured tensor of shape"):
        generate_triton_code_str(generate_inference_graph(lambda x: x * w, [torch.randn(2, 3)]), "f")


@pytest.mark.parametrize(
    "core, op",
    [
        (lambda x: x.cumsum(0), "cumsum"), (lambda x: torch.special.bessel_j0(x), "special_bessel_j0"), (lambda x: x.mean() + x, "mean"),
        (lambda x: x * torch.rand_like(x), "rand_like"), (lambda x: x.sort().values, "sort"),
    ],
)  # fmt: skip
def test_an_op_outside_the_closed_set_is_named(core, op):
    graph = generate_inference_graph(core, [torch.randn(3, 5)])
    with pytest.raises(UnsupportedOpError, match=op) as caught:
        generate_triton_code_str(graph, "f")
    assert isinstance(caught.value, NotImplementedError)


def test_a_graph_made_by_hand_needs_no_metadata():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    source, name = generate_triton_code_str(graph, "wave")
    assert f"def {name}(x):" in source and "sin" in source


def test_the_same_source_loads_the_same_function():
    source, name = generate_triton_code_str(generate_inference_graph(lif, two(3)), "lif")
    function = compile_triton_code_str(source, name)
    assert function is compile_triton_code_str(str(source), str(name))
    with pytest.raises(ValueError, match="no function `other`"):
        compile_triton_code_str(source, "other")


def test_imports_without_triton_and_says_what_needs_it():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, flexsn.lowlevel as low\nfrom flexsn.errors import BackendUnavailableError\n"
        "source = low.generate_triton_code_str(low.generate_inference_graph(lambda x: x * 2, [torch.ones(3)]), 'f')\n"
        "kernel, info = low.build_inference_kernel(lambda x, v: (x + v, v + x), 1, 1, 1)\n"
        "print(low.flexsn_inference(kernel, info, torch.ones(2, 3))[1][-1, 0].item())\n"
        "try:\n    low.compile_triton_code_str(*source)\nexcept BackendUnavailableError as error:\n    print('triton' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "True"]
    assert issubclass(BackendUnavailableError, RuntimeError)


def test_every_name_is_exported_and_documented():
    for name in lowlevel.__all__:
        assert callable(getattr(lowlevel, name)) and getattr(lowlevel, name).__doc__
        assert f"`{name}`" in lowlevel.__doc__
    assert flexsn.lowlevel is lowlevel


# --- infos ------------------------------------------------------------------------------------------------------------------------------
def hand_made(returns):
    """A graph of (x, v) that returns the values of these names."""
    graph = fx.Graph()
    x, v = graph.placeholder("x"), graph.placeholder("v")
    values = {"x": x, "v": v, "h": graph.call_function(aten.add.Tensor, (x, v), name="h")}
    values["s"] = graph.call_function(aten.sin.default, (values["h"],), name="s")
    graph.output(tuple(values[r] for r in returns))
    return graph


def test_info_fields():
    info = extract_info(hand_made(["s", "h", "x", "s", "v"]), 1, 1, 1)
    assert FlexSNInfo._fields == (
        "num_inputs", "num_outputs", "num_states", "fwd_core_args", "fwd_core_returns", "fwd_core_recipients", "fwd_kernel_returns",
        "num_fwd_kernel_returns", "c2k_return_mapping",
    )  # fmt: skip
    assert tuple(info) == (
        1, 1, 1, ["x", "v"], ["s", "h", "x", "s", "v"], ["s0", "v0", "res0_f", "_", "res1_f"], ["s0", "v0", "res0_f", "res1_f"], 4, [2, 0, 3],
    )  # fmt: skip


def test_outputs_and_states_keep_their_own_slots():
    info = extract_info(hand_made(["h", "h", "h", "h"]), 1, 1, 2)
    assert info.fwd_core_recipients == ["s0", "s1", "v0", "_"]
    assert info.fwd_kernel_returns == ["s0", "s1", "v0"] and info.c2k_return_mapping == [0]


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 0, 1), (1, 1, 4), (3, -1, 1), (2, 0, 5)])
def test_a_graph_that_does_not_fit_the_counts_is_a_value_error(counts):
    with pytest.raises(ValueError, match="graph"):
        extract_info(hand_made(["s", "h", "x"]), *counts)


def test_info_defaults():
    graph = generate_inference_graph(lambda x: x * 2, [torch.randn(3)])
    assert extract_info(graph)[:3] == (1, 1, 0)
