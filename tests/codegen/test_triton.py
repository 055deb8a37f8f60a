"""The Triton backend without a GPU: source, binaries for GPUs that are not there, and the kernels in Triton's interpreter.

`python tests/codegen/test_triton.py sm_90 every lif adaptive_lif` builds the golden kernels of these cores and prints what ptxas reports.
"""

import ast
import collections
import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

import folders
import pytest
import torch
from cores import adlif, leaky, lif, plif
from helpers import check

import flexsn
from flexsn._capture.signature import make_signature
from flexsn._capture.trace import Meta
from flexsn._codegen import triton as render_triton
from flexsn._codegen import triton_frame
from flexsn._codegen.language import values
from flexsn._plan import plan
from flexsn._program import compiled as compiling
from flexsn._runtime.triton import kernel as launch_triton
from flexsn._runtime.triton import parallel_time
from flexsn._runtime.triton import passes as launch_passes
from flexsn._runtime.triton import tiles as triton_tiles
from flexsn._runtime.triton.tiles import tile_for
from flexsn._version import __version__
from flexsn.errors import BackendError, BackendUnavailableError
from flexsn.scan import look

f16, f32, f64, bf16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
fused = functools.partial(check, only="triton")  # this file is about one backend; tests/operator/test_parity.py runs all
# what Triton itself refuses to do without a GPU: these tests are the interpreter's
interpreted = pytest.mark.skipif("config.getoption('--device') == 'cuda'", reason="operands on a GPU: kernels are not interpreted")


def _benchmarked():
    """benchmarks/cores.py, beside tests/cores.py."""
    spec = importlib.util.spec_from_file_location("benchmarked_cores", folders.ROOT / "benchmarks" / "cores.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measured = _benchmarked()


# --- golden files -------------------------------------------------------------------------------------------------------------
GAIN = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5], device="cpu")


def params(x, v, scalar, last, channel, neuron, apart, count, flag):
    """A param of every kind: a number, [C], [C, 1], per neuron, broadcast dims amid others, int, bool, captured."""
    h = v * torch.sigmoid(scalar) + x * last * GAIN + channel
    h = torch.where(flag, h, h * neuron) + apart * count
    return h * h, h


KINDS = [Meta((), f32), Meta((5,), f32), Meta((3, 1), f32), Meta((2, 3, 5), f32), Meta((2, 1, 5), f32), Meta((5,), torch.int64),
         Meta((3, 1), torch.bool)]  # fmt: skip
CASES = {  # core, dtype, inputs, states, params
    "lif": (measured.lif_atan, f32, 1, 1, []),
    "adaptive_lif": (measured.adaptive_lif, f32, 2, 2, []),
    "hodgkin_huxley": (measured.hodgkin_huxley, f32, 1, 4, []),
    "params": (params, f32, 1, 1, KINDS),
}
BUILT = CASES | {
    "lif_half": (measured.lif_atan, f16, 1, 1, []),
    "lif_bfloat16": (measured.lif_atan, bf16, 1, 1, []),
    "lif_double": (measured.lif_atan, f64, 1, 1, []),
}
STEPS = {"lif_in_4": 4, "lif_in_12": 12, "lif_half_in_4": 4, "lif_half_in_12": 12, "adaptive_lif_in_4": 4}
BUILT |= {name: BUILT[name.partition("_in_")[0]] for name in STEPS}


def spilled(x, v):
    """So many values that a backward of them spills most."""
    for _ in range(300):
        v = v + (v - x) * v * x
    return v, v


TUNED = BUILT | {  # by tools/tune_triton.py
    "spilled": (spilled, f32, 1, 1, []),
    "lif_sigmoid": (measured.lif_sigmoid, f32, 1, 1, []),
    "lif_sigmoid_half": (measured.lif_sigmoid, f16, 1, 1, []),
}
KERNELS = ["inference", "forward", "backward"]  # forward: with checkpoints


@functools.cache
def program(name):
    core, dtype, inputs, states, given = TUNED[name]
    sig, captured = make_signature(core, inputs, states, len(given)), look(core).tensors()
    metas = [Meta((2, 3, 5), dtype)] * inputs + [None] * states + given
    made = compiling.program_of("triton", core, sig, metas, torch.device("cpu"), captured, None)
    made.differentiate(core, captured)
    return made


@functools.cache
def plans(name, T=None):
    made, T = program(name), T or STEPS.get(name, 1000)
    dtypes = (TUNED[name][1],) * made.sig.num_inputs
    wanted = tuple(r for r in made.vjp.graph.outputs if r[0] == "g")
    cotangents = tuple(f"gy{k}" for k in range(made.num_outputs))
    found = {
        "inference": made.forward_plan(dtypes, False, False),
        "forward": made.forward_plan(dtypes, True, False),
        "backward": made.backward_plan(dtypes, wanted, cotangents),
    }
    return {kernel: made.for_steps(T, plan) for kernel, plan in found.items()}


def sources(names):
    return {f"{n}_{k}": render_triton.render(p) for n in names for k, p in plans(n).items()}


@pytest.mark.parametrize("name", [f"{n}_{k}" for n in CASES for k in KERNELS])
def test_golden(name, update_golden):
    """After a wanted change of the renderer: `pytest tests/codegen/test_triton.py --update-golden`, and read the diff."""
    core, _, kernel = name.rpartition("_")
    text = render_triton.render(plans(core)[kernel]).replace(f"flexsn {__version__}", "flexsn")
    text = re.sub(r"test_triton\.py:\d+", "test_triton.py", text)  # the lines of this file move
    path = folders.TESTS / "golden" / f"{name}.py.txt"
    if update_golden:
        path.write_text(text)
    assert text == path.read_text()
    assert text.isascii() and kernel_names(text)[-1] == triton_frame.kernel_name(plans(core)[kernel])


def kernel_names(text):
    return [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]


def child(code, **environment):
    """A new process, without what conftest sets for this one; an environment variable of None is removed."""
    env = os.environ | {"PYTHONPATH": folders.PATH, "TRITON_INTERPRET": None} | environment
    env = {k: v for k, v in env.items() if v is not None}
    done = subprocess.run([sys.executable, *code], env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_rendering_needs_no_triton():
    code = """
import json, sys
sys.modules["triton"] = None
import test_triton
print(json.dumps(test_triton.sources(test_triton.CASES)))
"""
    assert child(["-c", code]) == sources(CASES)


def test_rendering_twice_gives_the_same_text():
    first = sources(["adaptive_lif", "params"])
    program.cache_clear(), plans.cache_clear()
    assert sources(["adaptive_lif", "params"]) == first


# --- binaries --------------------------------------------------------------------------------------------------------------------
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
REGISTERS = {"lif": 168, "adaptive_lif": 176, "hodgkin_huxley": 136, "params": 224, "lif_half": 176, "lif_bfloat16": 176, "lif_double": 152}
REGISTERS |= {name: 176 for name in STEPS} | {"lif_half_in_4": 224, "adaptive_lif_in_4": 216}
NEEDS_LIBDEVICE = {"hodgkin_huxley"}  # libdevice is CUDA's: on AMD such kernels do not build, and say so


def tiles(made, every):
    """All that an H100 or H200 is given, or the one of a large layer."""
    sizes = itertools.product((16, 1024, 10**5, 10**7), (False, True)) if every else [(10**5, True)]
    return list(dict.fromkeys(tile_for(made, N, 132, aligned) for N, aligned in sizes))


def build(job):
    """In a process of its own: what one kernel takes, by ptxas."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    name, kernel, tile, target = job
    made = plans(name)[kernel]
    found = {"name": name, "kernel": kernel, "tile": str(tile)}
    own = launch_triton.Kernel(made, render_triton.render(made))
    shortened, to_ttgir = [], launch_passes._to_ttgir
    launch_passes._to_ttgir = lambda *args: (shortened.append(args), to_ttgir(*args))[1]
    try:
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            binary = own.build(tile, GPUTarget(*TARGETS[target]))
    except flexsn.errors.BuildError as error:
        return found | {"error": str(error)}
    finally:
        launch_passes._to_ttgir = to_ttgir
    if "cubin" in binary.asm:
        theirs = by_triton(own, tile, GPUTarget(*TARGETS[target]))
        found["shortened"] = len(shortened) == 1
        narrow = triton_tiles.neighbours(made, tile) == 1
        found["as_by_triton"] = binary.asm["cubin"] == theirs.asm["cubin"] if narrow else accesses(binary) == accesses(theirs)
        found["waits"] = "bar.sync" in binary.asm["ptx"]
    else:
        return found | {"bytes": len(binary.asm["hsaco"])}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    used = dict(word.split(":", 1) for word in done.stdout.split() if word.startswith(("REG:", "STACK:", "LOCAL:")))
    return found | {k.lower(): int(v) for k, v in used.items()}


def by_triton(kernel, tile, target):
    """The same, with all of Triton's passes."""
    import triton
    from triton import knobs

    with knobs.compilation.scope(), pytest.MonkeyPatch.context() as patch:
        knobs.compilation.always_compile = True
        patch.setattr(
            launch_passes,
            "compile",
            lambda source, target, options, together: triton.compile(source, target, options),
        )
        return kernel.build(tile, target)


def accesses(binary):
    """The loads and stores of memory by kind and width, and how many of each."""
    return collections.Counter(re.findall(r"(?:ld|st)\.global\S*", binary.asm["ptx"]))


def main(target, every, *names):
    jobs = [(n, k, tile, target) for n in names for k, made in plans(n).items() for tile in tiles(made, every == "every")]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(json.dumps(pool.map(build, jobs, chunksize=1)))
        pool.close()
        pool.join()  # nobody writes to Triton's cache any more


@functools.cache
def built(target, every, *names):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # what was found counts, and not who clears up
        return child([str(Path(__file__)), target, every, *names], TRITON_CACHE_DIR=folder)


def is_light(found):
    return found["stack"] == found["local"] == 0 and found["reg"] <= REGISTERS[found["name"]]


@pytest.mark.parametrize(
    "target, every, names",
    [
        pytest.param("sm_90", "every", ["lif"], marks=pytest.mark.full),
        pytest.param("sm_90", "one", [n for n in BUILT if n != "lif"], marks=pytest.mark.full),
        pytest.param("sm_90", "one", ["lif", "params"], marks=pytest.mark.slow),
        pytest.param("sm_80", "one", ["lif", "params"], marks=pytest.mark.full),
        pytest.param("sm_100", "one", ["lif"], marks=pytest.mark.full),
    ],
    ids=["sm_90-lif", "sm_90-rest", "sm_90", "sm_80", "sm_100"],
)
def test_builds(target, every, names):
    """Without a GPU, a LIF's kernels at every tile and the others at one: no register spilled, and few enough of them."""
    found = built(target, every, *names)
    assert {(b["name"], b["kernel"]) for b in found} == set(itertools.product(names, KERNELS))
    assert [b for b in found if "error" in b] == []
    assert [b for b in found if not is_light(b)] == []
    assert [b for b in found if b["waits"] or not (b["shortened"] and b["as_by_triton"])] == []


@pytest.fixture
def builder(monkeypatch):
    """Builds of binaries that are none: names of the threads, by chunk and tile. What nobody waits for starts, and goes on when told to."""
    started, go_on, found = threading.Event(), threading.Event(), {}

    def build(kernel, tile, target):
        if threading.current_thread().name.startswith("flexsn-later"):
            started.set()
            assert go_on.wait(30)
        found.setdefault((kernel.plan.chunk, tile), []).append(threading.current_thread().name.rpartition("_")[0])

    monkeypatch.setattr(launch_triton.Kernel, "build", build)
    monkeypatch.setattr(launch_triton, "_kernels", weakref.WeakValueDictionary())
    for name, stand_in in (("_target", lambda: None), ("_processors", lambda index: 132)):
        monkeypatch.setattr(launch_triton, name, stand_in)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    yield started, go_on, found
    go_on.set()
    launch_triton.finish_builds()


def test_what_nobody_waits_for_is_built_later(builder):
    started, go_on, found = builder
    made = plans("lif", 4)["backward"]
    kernel = launch_triton.load(made, render_triton.render(made))
    kernel.expect(10**6, 0).result()
    assert started.wait(30)
    long = plans("lif", 99)["backward"]
    more = launch_triton.load(long, render_triton.render(long))
    more.expect_tile(more.tile(10**6, 0, True), 0).result()  # in the line, and now somebody waits
    assert {k: names for (k, _), names in found.items()} == {4: ["flexsn-build"], 16: ["flexsn-build"]}, "one tile of each"
    go_on.set()
    launch_triton.finish_builds()
    every = [
        (k, tile_for(plans("lif", T)["backward"], N, 132, aligned))
        for k, T in ((4, 4), (8, 12), (16, 99))
        for N, aligned in triton_tiles.CLASSES
    ]
    assert set(found) == set(every) and {len(names) for names in found.values()} == {1}
    assert list(found.values()).count(["flexsn-build"]) == 2 and more in kernel._others


def test_one_thread_at_a_time_reads_source(monkeypatch):
    """Two that parsed at once had failed in Python 3.11: "AST constructor recursion depth mismatch"."""
    reading, most, done = [], [], []

    class Source:
        def hash(self):
            reading.append(self)
            most.append(len(reading))
            time.sleep(0.02)
            reading.remove(self)

        make_ir = hash

    monkeypatch.setattr("triton.compile", lambda source, target, options: done.append(source.make_ir()))
    target = types.SimpleNamespace(backend="none")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for build in [threads.submit(launch_passes.compile, Source(), target, {}, together=1) for _ in range(4)]:
            build.result()
    assert most == [1] * 8 and len(done) == 4


@pytest.mark.slow
def test_a_stage_that_the_program_exchanged_stays(tmp_path):
    code = """
import json
from triton import knobs
from triton.backends.compiler import GPUTarget
ran = []
def exchange(backend, stages, *others):
    own = stages["ttgir"]
    stages["ttgir"] = lambda *args: (ran.append(args), own(*args))[1]
knobs.runtime.add_stages_inspection_hook = exchange
import test_triton as t
made = t.plans("lif")["inference"]
t.launch_triton.Kernel(made, t.render_triton.render(made)).build(t.tile_for(made, 16, 132, True), GPUTarget(*t.TARGETS["sm_90"]))
print(json.dumps(len(ran)))
"""
    assert child(["-c", code], TRITON_CACHE_DIR=str(tmp_path)) == 1


@pytest.mark.slow
def test_builds_after_a_scope_of_knobs_take_the_shorter_way(tmp_path):
    code = """
import json
from triton import knobs
from triton.backends.compiler import GPUTarget
import test_triton as t
ran, to_ttgir = [], t.launch_passes._to_ttgir
t.launch_passes._to_ttgir = lambda *args: (ran.append(args), to_ttgir(*args))[1]
kernel = t.launch_triton.Kernel(t.plans("lif")["inference"], t.render_triton.render(t.plans("lif")["inference"]))
knobs.compilation.always_compile = True
def build():
    kernel.build(t.tile_for(kernel.plan, 16, 132, True), GPUTarget(*t.TARGETS["sm_90"]))
with knobs.runtime.scope():
    build()
build()
print(json.dumps(len(ran)))
"""
    assert child(["-c", code], TRITON_CACHE_DIR=str(tmp_path)) == 2


@pytest.mark.slow
def test_the_largest_cores_have_options_of_the_assembler(tmp_path):
    code = """
import json
import test_triton as t
from triton.backends.compiler import GPUTarget
found = []
for kernel, made in t.plans("spilled").items():
    (tile,) = {t.tile_for(made, N, 132, aligned) for N, aligned in t.triton_tiles.CLASSES}
    built = t.launch_triton.Kernel(made, t.render_triton.render(made)).build(tile, GPUTarget(*t.TARGETS["sm_90"]))
    found.append((len(made.step.nodes) > 300, built.metadata.ptx_options))
print(json.dumps(found))
"""
    assert child(["-c", code], TRITON_CACHE_DIR=str(tmp_path)) == [[True, "-O1"]] * 3


@pytest.mark.slow
def test_builds_leave_the_filters_of_warnings_alone(tmp_path):
    """They run on threads, and filters are the program's; Triton's own builds, for which the program waits, set them."""
    code = """
import json
import warnings
from triton import knobs
from triton.backends.compiler import GPUTarget
import test_triton as t
made = t.plans("lif")["inference"]
kernel, tile, target = t.launch_triton.Kernel(made, t.render_triton.render(made)), t.tile_for(made, 16, 132, True), GPUTarget(*t.TARGETS["sm_90"])
entered, catch_warnings = [], warnings.catch_warnings
warnings.catch_warnings = lambda *args: (entered.append(args), catch_warnings(*args))[1]
knobs.compilation.always_compile = True
counts = []
for build in (lambda: kernel.build(tile, target), lambda: t.by_triton(kernel, tile, target)):
    entered.clear()
    build()
    counts.append(len(entered))
print(json.dumps(counts))
"""
    own, theirs = child(["-c", code], TRITON_CACHE_DIR=str(tmp_path))
    assert own == 0 < theirs


def delay_line(x, *taps):
    moved = [0.5 * tap + torch.relu(before) * tap + before for tap, before in zip(taps, (x, *taps[:-1]), strict=True)]
    return flexsn.surrogate.atan(moved[-1] - 0.5), *moved


@interpreted
@pytest.mark.parametrize("n", [15, 16, 31, 32, 40])
def test_many_states(n):
    """More rows that a call may lack than an int32 has bits: starts and the cotangents of ends."""
    x, starts = torch.rand(3, 4), [torch.rand(4) / 10 if k % 2 else None for k in range(n)]

    def results(backend):
        leaves = [t if t is None else t.clone().requires_grad_() for t in (x, *starts)]
        outputs, ends = flexsn.scan(delay_line, leaves[:1], leaves[1:], backend=backend)
        loss = outputs[0].sum() + sum((k + 1) * end.sum() for k, end in enumerate(ends) if k % 3)
        return [*outputs, *ends, *torch.autograd.grad(loss, [t for t in leaves if t is not None])]

    torch.testing.assert_close(results("triton"), results("torch"), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_many_states_build(tmp_path):
    code = """
import json
import torch
from triton.backends.compiler import GPUTarget
import test_triton as t
t.TUNED["delay_line"] = t.delay_line, torch.float32, 1, 33, []
found = [t.plans("delay_line")[kernel] for kernel in ("forward", "backward")]
builds = [t.launch_triton.Kernel(p, t.render_triton.render(p)).build(t.tile_for(p, 16, 132, True), GPUTarget(*t.TARGETS["sm_90"])) for p in found]
print(json.dumps([len(b.asm["cubin"]) > 0 for b in builds]))
"""
    assert child(["-c", code], TRITON_CACHE_DIR=str(tmp_path)) == [True, True]


@pytest.mark.full
def test_builds_for_amd():
    """All but those that call libdevice, which is CUDA's: these say so."""
    names = ["lif", "params", *NEEDS_LIBDEVICE]
    found = built("gfx942", "one", *names)
    assert {(b["name"], b["kernel"]) for b in found} == set(itertools.product(names, KERNELS))
    refused = [b for b in found if "error" in b]
    assert {b["name"] for b in refused} == NEEDS_LIBDEVICE and all("__nv_" in b["error"] for b in refused)
    assert all(b["bytes"] > 0 for b in found if b["name"] not in NEEDS_LIBDEVICE)


# --- where it does not run ----------------------------------------------------------------------------------------------------------
CALL = """
import json, sys
{first}
import flexsn, torch
def call(backend):
    try:
        return flexsn.scan(lambda x, v: (x + v, v + x), [torch.ones(3, 4)], [None], backend=backend).outputs[0].sum().item()
    except Exception as error:  # returned, and asserted on by the test
        return [type(error).__name__, str(error)]
print(json.dumps([call("triton"), call("inductor"), call("auto"), call("torch")]))
"""


def test_without_triton():
    code = CALL.format(first="sys.modules['triton'] = None")
    triton, inductor, auto, eager = child(["-c", code], TRITON_INTERPRET="1")
    assert triton == inductor and triton[0] == "BackendUnavailableError"
    assert "not installed" in triton[1] and 'pip install "flexsn[triton]"' in triton[1]
    assert auto == eager == 24.0


@pytest.mark.slow
def test_the_interpreter_is_asked_for_as_triton_reads_it():
    triton, *others = child(["-c", CALL.format(first="")], TRITON_INTERPRET="True")
    assert triton == 24.0 and others == [24.0] * 3


def test_operands_on_the_cpu():
    triton, inductor, auto, eager = child(["-c", CALL.format(first="")])
    assert triton == inductor and triton[0] == "BackendError"
    assert "NVIDIA GPUs" in triton[1] and "cpu" in triton[1] and "TRITON_INTERPRET=1" in triton[1]
    assert auto == eager == 24.0


@interpreted
def test_auto_on_the_cpu_is_never_triton(monkeypatch, counts):
    def refuse(*_):
        raise AssertionError("triton was asked")

    monkeypatch.setitem(compiling.BACKENDS, "triton", types.SimpleNamespace(refuses=refuse, load=refuse, render=refuse))
    x = torch.randn(3, 5, requires_grad=True)
    flexsn.scan(leaky, [x], [None], [torch.tensor(0.5)]).outputs[0].sum().backward()
    assert counts.programs == 1 and x.grad is not None


def test_inductor_is_the_same_program(counts):
    x = torch.randn(3, 5)
    results = [flexsn.scan(leaky, [x], [None], [torch.tensor(0.5)], backend=b).outputs[0] for b in ("triton", "inductor")]
    assert counts.programs == 1 and torch.equal(*results)


def test_classes_of_errors():
    assert issubclass(BackendUnavailableError, flexsn.errors.FlexSNError) and issubclass(BackendError, ValueError)


# --- tiles, chunks, checkpoints -------------------------------------------------------------------------------------------------------
SIZES = [1, 16, 1000, 2**14, 10**5, 2 * 10**5, 2**20, 10**8]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", BUILT)
def test_two_tiles_serve_every_size(name, aligned):
    """Few neurons: loads ahead of their use; many: none, and several neurons per thread."""
    for made in plans(name).values():
        chosen = [tile_for(made, N, 132, aligned) for N in SIZES]
        few, many = (tile for tile, _ in itertools.groupby(chosen))
        assert few.ahead and not many.ahead and few.block <= many.block
        assert chosen == [tile_for(made, 2 * N, 264, aligned) for N in SIZES]


def test_neurons_per_thread():
    """As many as a load brings, unless a long chunk of them takes too many registers."""
    blocks = {name: {tile_for(plans(name)[k], 10**8, 132, True).block for k in KERNELS} for name in BUILT if "lif" in name}
    many = {"lif_in_4": 256, "lif_in_12": 256, "lif_half_in_4": 512, "lif_half_in_12": 256, "adaptive_lif_in_4": 256, "lif_double": 64}
    assert blocks == {name: {many.get(name, 128)} for name in blocks}


def test_tiles_are_near_the_best_ones_that_were_measured():
    """On an H200, at the chunks that the plan chooses: within 5% in time."""
    rows = json.loads((folders.ROOT / "benchmarks" / "results" / "gpu_tune_h200.json").read_text())["rows"]
    case = lambda row: (row["core"] + "_half" * (row["dtype"] == "float16"), row["kernel"], row["T"], row["N"])
    slower = {}
    for key, measured_tiles in itertools.groupby(sorted(rows, key=case), key=case):
        made = plans(key[0], key[2])[key[1]]
        tile = tile_for(made, key[3], 132, True)
        times = {
            triton_tiles.Tile(r["block"], r["warps"], r["ahead"], r["aligned"]): r["ms"] for r in measured_tiles if r["chunk"] == made.chunk
        }
        slower[key] = times[tile] / min(times.values())
    assert len(slower) == 36 and {key[0] for key in slower} == {"lif_sigmoid", "lif_sigmoid_half", "adaptive_lif", "hodgkin_huxley"}
    assert {key: ratio for key, ratio in slower.items() if ratio > 1.05} == {}


def test_tile_of_a_kernel_without_sequences():
    """No outputs, and an input that nothing depends on."""

    def core(x, v):
        return v * 0.5

    made = compiling.program_of("triton", core, make_signature(core, 1, 1, 0), [Meta((5,), f32), None], torch.device("cpu"), {}, None)
    assert tile_for(made.forward_plan((f32,), False, False), 10**8, 132, True).block >= 64


def test_tiles_are_powers_of_two():
    for made in (p for n in BUILT for p in plans(n).values()):
        for tile in tiles(made, every=True):
            assert tile.block.bit_count() == 1 and tile.block >= 32 * tile.warps


@pytest.mark.parametrize("K", [1, 2, 16])
def test_checkpoints(K):
    for T in range(200):
        assert plan.checkpoints(T, K, K) == len(range(K, T, K))


def test_chunks():
    chunks = {name: program(name).chunk for name in BUILT}
    assert chunks["lif"] == chunks["lif_half"] == chunks["lif_bfloat16"] == 16 and chunks["adaptive_lif"] == 8
    for inputs, ops, itemsize, checkpoint in itertools.product([1, 3], [0, 1, 10, 100, 10**4], [2, 4, 8], [False, True]):
        K = plan.chunk_in_registers(inputs, 2, ops, itemsize, checkpoint)
        assert K.bit_count() == 1 and (2 if ops <= 100 or not checkpoint else 1) <= K <= 16
        assert plan.chunk_in_registers(inputs, 2, ops, itemsize, False) >= K
        assert plan.chunk_in_registers(inputs, 2, ops + 5, itemsize, checkpoint) <= K


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
def test_few_steps_have_short_chunks(chunk):
    lengths = [plan.chunk_for(chunk, T) for T in range(100)]
    assert set(lengths) == set(plan.chunks(chunk)) and max(lengths) == lengths[16] == chunk
    assert all(plan.checkpoints(T, K, chunk) == len(range(K, T, K)) for T, K in enumerate(lengths) if chunk == K)
    assert all(plan.checkpoints(T, K, chunk) == 0 and T < 2 * K for T, K in enumerate(lengths) if chunk > K)
    assert all(T >= K or 2 * T > K or K <= 4 for T, K in enumerate(lengths))


# --- pieces of T ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("T", range(41))
def test_every_length(T):
    """0 to 2 full chunks of 16 and every set of pieces; N is no multiple of a block."""
    fused(leaky, [torch.randn(T, 3, 5)], [torch.randn(3, 5)], [torch.tensor(0.9)])


@pytest.mark.parametrize("T", [1, 7, 8, 13, 15, 16, 23, 33])
def test_every_length_of_two_inputs_and_state_sequences(T):
    inputs, states = [torch.randn(T, 3, 5) for _ in range(2)], [None, torch.randn(3, 5)]
    fused(adlif, inputs, states, [torch.rand(3, 1), torch.rand(3, 5)], sequences=True)


@pytest.fixture
def watched(monkeypatch):
    """Kernels run in small blocks; every address that they touch lies in an array of theirs. Returns a setter of AHEAD."""
    from triton.runtime import interpreter

    builder, spans, ahead = interpreter.InterpreterBuilder, [], [True]
    load, store = builder.create_masked_load, builder.create_masked_store

    def touches(pointers, mask, write):
        for address in pointers.data[mask.data.astype(bool)].tolist():
            assert any(begin <= address < end and (not write or own) for begin, end, own in spans), "outside of all arrays"

    def watched_load(self, pointers, mask, *rest):
        touches(pointers, mask, False)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        touches(pointers, mask, True)
        return store(self, pointers, value, mask, *rest)

    def interpret(self, arrays, dims, sizes, parts):
        N = sizes[len(values(self.plan)) + 1]
        held = [torch.zeros((), dtype=a.storage) if t is None else t for a, t in zip(self.plan.arguments, arrays, strict=True)]
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.nbytes, i >= len(self.plan.reads)) for i, t in enumerate(arrays) if t is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.function[(-(-N // 4), parts)](*held, *dims, *sizes, BLOCK=4, AHEAD=ahead[0])

    monkeypatch.setattr(builder, "create_masked_load", watched_load)
    monkeypatch.setattr(builder, "create_masked_store", watched_store)
    monkeypatch.setattr(launch_triton.Kernel, "_interpret", interpret)
    return lambda value: ahead.__setitem__(0, value)


@interpreted
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("T", [1, 16, *(pytest.param(T, marks=pytest.mark.slow) for T in (6, 15, 21, 32, 33))])
def test_nothing_outside_of_the_arrays_is_touched(watched, poison, T, ahead):
    watched(ahead)
    for state in (None, torch.randn(3, 5)):
        fused(leaky, [torch.randn(T, 3, 5)], [state], [torch.rand(3, 1)])
        fused(adlif, [torch.randn(T, 3, 5)] * 2, [state, None], [torch.rand(()), torch.rand(3, 5)], sequences=True)


@interpreted
@pytest.mark.parametrize("ahead", [False, True])
def test_parts_of_time_touch_nothing_outside(watched, poison, monkeypatch, ahead):
    monkeypatch.setattr(parallel_time, "LEAST_STEPS", 33)
    call, walks = parallel_time._Walks.__call__, []
    monkeypatch.setattr(parallel_time._Walks, "__call__", lambda self, *given: walks.append(self.parts) or call(self, *given))
    watched(ahead)
    for state in (None, torch.randn(3, 2)):
        fused(adlif, [torch.randn(35, 3, 2)] * 2, [state, None], [torch.rand(()), torch.rand(3, 2)], sequences=True)
        with torch.no_grad():
            flexsn.scan(leaky, [torch.randn(35, 3, 2)], [state], [torch.rand(3, 1)], exact=False, backend="triton")
    assert walks == [2] * 4


@pytest.mark.parametrize("N", [1, 2, 127, 128, 129, 300])
def test_sizes_around_a_block(N):
    fused(lif, [torch.randn(5, N)], [torch.randn(N)], [torch.tensor(2.0), torch.rand(N)])
    fused(leaky, [torch.randn(17, N)], [None], [torch.rand(N)])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_neurons(shape):
    fused(leaky, [torch.randn(5, *shape)], [torch.randn(shape)], [torch.tensor(0.5)])


@pytest.mark.parametrize("dtype", [f64, f32, f16, bf16])
def test_dtypes(dtype):
    for T in (3, 19):
        x, v = torch.randn(T, 3, 5, dtype=dtype), torch.randn(3, 5, dtype=dtype)
        fused(leaky, [x], [v], [torch.rand(3, 1, dtype=dtype)], exact=False, scale=4)
        fused(lif, [x], [None], [torch.tensor(2.0, dtype=dtype), torch.ones(5, dtype=dtype)])


# --- states ---------------------------------------------------------------------------------------------------------------------------
def test_given_and_missing_states():
    def core(x, u, v, w):
        u = u * 0.5 + x
        v = v * 0.25 + u * w
        return u * v, u, v, w * 0.5 + v

    for given in itertools.product([False, True], repeat=3):
        fused(core, [torch.randn(18, 5)], [torch.randn(5) if g else None for g in given])


@pytest.mark.parametrize("loss", ["output", "final", "final 0", "final 1", "output 1"])
def test_parts_of_a_loss(loss):
    """Cotangents of outputs and final states that exist, and none."""
    operands = [torch.randn(18, 5), torch.randn(18, 5)], [torch.randn(5), torch.randn(5)], [torch.rand(5) for _ in range(2)]
    fused(adlif, *operands, loss=lambda name: name.startswith(loss))


def test_parts_of_a_loss_on_state_sequences():
    operands = [torch.randn(18, 5), torch.randn(18, 5)], [torch.randn(5), None], [torch.rand(5) for _ in range(2)]
    for loss in ("sequence", "sequence 0", "sequence 1"):
        fused(adlif, *operands, sequences=True, loss=lambda name: name.startswith(loss))


def test_no_states():
    fused(lambda x, y: (x * y, (x - y).abs()), [torch.randn(19, 3, 5), torch.randn(19, 3, 5)])
    fused(lambda x, w: (torch.tanh(x * w),), [torch.randn(19, 5)], [], [torch.rand(5)], exact=False)


def test_state_that_does_not_depend_on_itself():
    fused(lambda x, v: (x * v, x * 0.5), [torch.randn(19, 5)], [torch.randn(5)])
    fused(lambda x, v: (x * 2, x), [torch.randn(19, 5)], [None])


def test_states_that_stay():
    fused(lambda x, v: (x * v, v), [torch.randn(19, 5)], [torch.randn(5)])
    fused(lambda x, u, v: (x * u + v, v, u), [torch.randn(19, 5)], [torch.randn(5), torch.randn(5)], sequences=True)


def test_constants_as_states_and_outputs():
    def core(x, v, w):
        return torch.full_like(x, 3.0), torch.zeros_like(x, dtype=torch.bool), x * w, torch.ones_like(v), w * 0 + 2.0

    fused(core, [torch.randn(19, 5)], [torch.randn(5), torch.randn(5)], sequences=True)
    fused(lambda x: (torch.full_like(x, -1.5),), [torch.randn(19, 5)])
    fused(lambda x, v: (torch.ones_like(x), torch.full_like(v, float("inf"))), [torch.randn(3, 5)], [None])


def test_outputs_that_are_operands():
    fused(lambda x, v, w: (x, v, w, x), [torch.randn(19, 3, 5)], [torch.randn(3, 5)], [torch.rand(3, 1)])
    fused(lambda x, w: (w * 1.0, w + x), [torch.randn(19, 3, 5)], [], [torch.rand(3, 5)])


def test_integers_and_bools():
    def core(x, k, b, n, f):
        n = n + torch.where(b, k, 1)
        f = f ^ (x > 0)
        return x * n, n % 3, f & b, k.to(torch.uint8), n, f

    x, b = torch.randn(19, 5), torch.rand(19, 5) > 0.5
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        k = torch.randint(-5, 5, (19, 5)).to(dtype)
        fused(core, [x, k, b], [torch.zeros(5, dtype=dtype), torch.rand(5) > 0.5])


# --- params ---------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (3, 5), (2, 1, 1), (2, 3, 1), (2, 3, 5), (2, 1, 5)])
def test_params_and_their_gradients(shape):
    for T in (3, 19):
        fused(leaky, [torch.randn(T, 2, 3, 5)], [torch.randn(2, 3, 5)], [torch.rand(shape)])
        fused(plif, [torch.randn(T, 2, 3, 5)], [None], [torch.randn(shape)], exact=False)


def test_params_of_every_kind():
    given = [torch.rand(m.shape) * 3 if m.dtype == f32 else (torch.rand(m.shape) * 3).to(m.dtype) for m in KINDS]
    x = torch.randn(19, 2, 3, 5)
    if x.device.type == "cpu":
        fused(params, [x], [None], [p * 0.3 if p.dtype == f32 else p for p in given], exact=False)
    fused(
        lambda x, v, n, b: (torch.where(b, x, v * n), v + x), [x], [None], [torch.tensor(2), torch.tensor([True, False, True]).view(3, 1)]
    )


def test_param_alone():
    """An output that depends on a param and nothing else, and a param that nothing depends on."""
    fused(lambda x, v, w, u: (x, w * 2 + 0 * x, v), [torch.randn(5, 3)], [None], [torch.rand(3), torch.rand(3)])


# --- names ----------------------------------------------------------------------------------------------------------------------------
NAMES = """triton tl math libdevice read param state_at N T L K mask i j t step steps vjp advance given left after rest count v0_half BLOCK AHEAD range float
x0 v0 y0 gx0 x0_at v0_first v0_at v0_given saved saved_at start v0_all x0_seq p0_inner shape to dtype torch jit constexpr print len None_ t1 t5 grad_0 _ __v λ größe""".split()


@pytest.mark.parametrize("name", NAMES)
def test_names_of_variables(name):
    """As input, state, param, and as local variable."""
    space = {"exp": torch.exp, "where": torch.where, "inf": math.inf}
    exec(
        f"def first({name}, v, w):\n    h = exp(-{name}.abs()) * v + w\n    return h, h\n"
        f"def second(x, {name}, w):\n    h = exp({name} * w) / 3 + x % 2.0\n    return h, h * 0.5\n"
        f"def third(x, v, {name}):\n    {name} = where(x > v, inf, {name} * x)\n    return {name}.clamp(max=2.0), v * 0.5 + x\n",
        space,
    )
    for core in (space["first"], space["second"], space["third"]):
        fused(core, [torch.randn(3, 5)], [torch.rand(5)], [torch.rand(5)], exact=False)


@pytest.mark.slow
def test_all_names_at_once(tmp_path):
    """In a file, so that local variables keep their names too."""
    names = [n for n in NAMES if n not in ("None_", "torch", "range", "float", "x0")]
    lines = [f"    {n} = {before} * 0.5 + torch.tanh({before}) % 2.0" for before, n in itertools.pairwise(["x0", *names])]
    path = tmp_path / "named.py"
    path.write_text("import torch\n\ndef named(x0, v):\n" + "\n".join(lines) + f"\n    return {names[-1]} * v, {names[-1]} + v\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    fused(space["named"], [torch.randn(3, 5)], [torch.rand(5)], exact=False)


@pytest.mark.parametrize(
    "name",
    [
        "triton",
        "step",
        "steps",
        "vjp",
        "advance",
        "math",
        "tl",
        "<lambda>",
        "λ",
        'a"""b',
        "a\\\n#b",
        "",
        "class",
        "x" * 200,
        "2nd",
    ],
)
def test_names_of_cores(name):
    def core(x, v):
        return x * v, v + x

    core.__name__ = core.__qualname__ = name
    fused(core, [torch.randn(3, 5)], [torch.randn(5)])


def test_core_without_source_text():
    space = {}
    exec("def core(x, v):\n    h = x + v\n    return h * 0.5, h\n", space)
    fused(space["core"], [torch.randn(3, 5)], [torch.randn(5)])


def test_cores_of_one_name():
    cores = [lambda x, v, k=k: (x * k + v, v) for k in (2.0, 3.0)]
    for core in (*cores, *cores):
        fused(core, [torch.randn(3, 5)], [torch.randn(5)])


# --- functions of triton/math.py ------------------------------------------------------------------------------------------------------------
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 7.0, 1e-3, -1e-3, 1e10, -1e10, math.inf, -math.inf, math.nan]
EXTREME = {f32: [1e-45, -1e-45, 1.1754944e-38, 1e-40, 3.4028235e38, -3.4028235e38, 0.1, 0.3, 16777217.0],
           f64: [5e-324, -5e-324, 2.2250738585072014e-308, 1e-310, 1.7976931348623157e308, -1.7976931348623157e308, 0.1, 0.3, 2.0**53]}  # fmt: skip


def grid(dtype):
    """All pairs of special values: an input of one step and a state."""
    values = torch.tensor([*SPECIAL, *EXTREME[dtype], *torch.linspace(-7, 7, 12).tolist()], dtype=dtype)
    return values.repeat(len(values), 1)[None], values[:, None].expand(len(values), len(values)).contiguous()


def same(f, inputs, states, exact=True):
    """`f(x, v)` and its sign, forward alone."""

    def core(x, v):
        y = f(x, v)
        return y, (torch.signbit(y) if y.is_floating_point() else y < 0), v

    results = [flexsn.scan(core, inputs, states, backend=b).outputs for b in ("triton", "torch")]
    (got, got_sign), (want, want_sign) = results
    rtol = 0.0 if exact else {f32: 3e-6, f64: 2e-13}[want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True)
    known = (want == want) & (exact | ((want != 0) & (got != 0)))  # the sign of a NaN means nothing
    assert torch.equal(got_sign[known], want_sign[known])


BINARY = {
    "floor_div": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "nextafter": torch.nextafter,
}


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("name", BINARY)
def test_floats_of_two_arguments(name, dtype):
    x, v = grid(dtype)
    if name in ("floor_div", "remainder", "fmod"):
        known = ~((x / v).isinf() & x.isfinite() & (v != 0))[0]  # else PyTorch's own vectorised fmod gives NaN
    elif "m" in name:
        known = ((x != v) & (x == x) & (v == v))[0]  # of 0 and -0 either is right; the interpreter's fmax is its maximum
    else:
        known = torch.ones_like(v, dtype=torch.bool)
    same(BINARY[name], [x[:, known]], [v[known]])


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DIVISIONS = {n: BINARY[n] for n in ("floor_div", "remainder", "fmod", "trunc_div")}


def integers(dtype):
    info = torch.iinfo(dtype)
    ends = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2]
    return torch.tensor(list(dict.fromkeys([n for n in (*ends, *range(-9, 10), 100, -100) if info.min <= n <= info.max])), dtype=dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division(name, dtype):
    """By everything but 0, which PyTorch refuses: there it is 0 (and the remainder, too)."""
    values = integers(dtype)
    divisors = values[(values != 0) & ((values != -1) | (dtype == torch.uint8))]  # min / -1 overflows: C leaves it open
    x, v = torch.cartesian_prod(values, divisors).unbind(1)
    same(DIVISIONS[name], [x[None]], [v])
    zero = flexsn.scan(lambda x, v: (DIVISIONS[name](x, v), v), [values[None]], [torch.zeros_like(values)], backend="triton")
    assert not zero.outputs[0].any()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_powers(dtype):
    values = integers(dtype)
    exponents = torch.tensor([0, 1, 2, 3, 5, 7, 63, 64, 100], dtype=dtype)
    x, v = torch.cartesian_prod(values, exponents).unbind(1)
    same(torch.pow, [x[None]], [v])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts(dtype):
    """By more than the width too, and by less than nothing."""
    values = integers(dtype)
    bits = torch.iinfo(dtype).bits
    far = [0, 1, 3, bits - 1, bits, bits + 1, 100] + ([-1, -5] if dtype.is_signed else [])
    x, v = torch.cartesian_prod(values, torch.tensor(far, dtype=dtype)).unbind(1)
    same(torch.bitwise_left_shift, [x[None]], [v])
    same(torch.bitwise_right_shift, [x[None]], [v])


UNARY = {
    "digamma": torch.digamma,
    "log_ndtr": torch.special.log_ndtr,
    "erfcx": torch.special.erfcx,
    "ndtri": torch.special.ndtri,
    "sigmoid": torch.sigmoid,
    "lgamma": torch.lgamma,
}


@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("name", UNARY)
def test_special_functions(name, dtype):
    smooth = torch.cat([torch.linspace(-9.9, 30, 800), torch.logspace(-20, 20, 200), -torch.logspace(-20, 1, 100)]).to(dtype)
    values = torch.cat([smooth, torch.tensor([*SPECIAL[1:], *EXTREME[dtype]], dtype=dtype)])  # +0: below
    same(lambda x, v: UNARY[name](x), [values[None]], [torch.zeros_like(values)], exact=False)


@pytest.mark.parametrize("f", [lambda x, v: -x, lambda x, v: torch.digamma(x)], ids=["neg", "digamma"])
def test_zero_has_a_sign(f):
    zeros = torch.tensor([0.0, -0.0])
    same(f, [zeros[None]], [zeros])


@pytest.mark.parametrize(
    "f",
    [lambda x, v: torch.where(x > 1, x, -0.0), lambda x, v: x + -0.0, lambda x, v: -0.0 - x, lambda x, v: x * -0.0],
    ids=["where", "add", "sub", "mul"],
)
@pytest.mark.parametrize("dtype", [f32, f64])
def test_constant_zero_has_a_sign(f, dtype):
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    same(f, [zeros[None]], [zeros])


INTEGER_OPS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a, b: -a, "invert": lambda a, b: ~a,
    "abs": lambda a, b: a.abs(), "sign": lambda a, b: a.sign(), "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "maximum": torch.maximum, "minimum": torch.minimum, "lt": torch.lt, "ge": torch.ge, "eq": torch.eq, "clamp": lambda a, b: a.clamp(2, 90),
    "where": lambda a, b: torch.where(a > b, a - b, b), "div": torch.div, "signbit": lambda a, b: a.signbit(), "mixed": lambda a, b: a * 0.5 + (b > 1),
    "wide": lambda a, b: a.to(torch.int64) * b + 2**33, "small": lambda a, b: (a + b).to(torch.float32) / 3,
}  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", INTEGER_OPS)
def test_integer_arithmetic(name, dtype):
    """Wraps around in its own dtype."""
    x, v = torch.cartesian_prod(integers(dtype), integers(dtype)).unbind(1)
    same(INTEGER_OPS[name], [x[None]], [v])


@pytest.mark.parametrize("dtype", [f32, f64])
def test_mantissa_and_exponent(dtype):
    values = torch.tensor([*SPECIAL, *EXTREME[dtype], *torch.logspace(-37, 38, 151).tolist()], dtype=dtype)
    finite = values[values.isfinite()]  # of others PyTorch's exponent is left open
    for part in ("mantissa", "exponent"):
        same(lambda x, v: getattr(torch.frexp(x), part), [finite[None]], [torch.zeros_like(finite)])
    same(lambda x, v: torch.frexp(x).mantissa, [values[None]], [torch.zeros_like(values)])


@pytest.mark.parametrize("half", [f16, bf16])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_rounding_to_16_bits(half, dtype):
    """Ties to even, overflow, and numbers below the normal ones."""
    steps = torch.linspace(1, 2, 4097, dtype=f64)
    values = torch.cat([steps, -steps * 2.0**-15, steps * 2.0**-25, steps * 65504, steps * 3.38e38, torch.tensor(SPECIAL, dtype=f64)]).to(
        dtype
    )
    same(lambda x, v: x.to(half), [values[None]], [torch.zeros_like(values)])
    same(lambda x, v: x.to(half).to(f32) * 2, [values[None]], [torch.zeros_like(values)])


@pytest.mark.parametrize("half", [f16, bf16])
def test_arithmetic_in_16_bits(half):
    x = (torch.randn(19, 65) * 3).to(half)

    def core(x, v):
        y = x * v + x / 3 - v.abs()
        return y, torch.where(y > 0, y, -x), x.to(f32) * 2, (x * 0.5).to(half)

    same(lambda x, v: core(x, v)[0], [x], [x[0] * 0.5])
    same(lambda x, v: core(x, v)[1], [x], [x[0] * 0.5])
    same(lambda x, v: core(x, v)[2], [x], [x[0] * 0.5])


CONVERSIONS = [f32, f64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("target", CONVERSIONS)
@pytest.mark.parametrize("source", CONVERSIONS)
def test_conversions(source, target):
    values = torch.tensor([0, 1, -1, 2, 100, -100, 127, -128, 0.5, -0.5, 1.75, -1.75, 30000, -30000], dtype=f64)
    values = values.clamp(min=0) if target is torch.uint8 else values
    values = values.clamp(-128, 127) if torch.int8 in (source, target) or source is torch.uint8 else values
    x = values.to(source)
    same(lambda x, v: x.to(target), [x[None]], [torch.zeros_like(x)])


def test_constants_arrive_bit_for_bit():
    values = [0.1, -1e-45, 3.0e38, -0.0, math.inf, -math.inf, math.nan, 123456789.123, 1 / 3]

    def core(x, v):
        return *(torch.where(x > 2, x, c) for c in values), *(x * c for c in values), v

    for dtype in (f32, f64):
        fused(core, [torch.randn(2, 3, dtype=dtype)], [torch.zeros(3, dtype=dtype)])


def test_integer_constants_arrive():
    def core(x, n):
        return n + (2**40), n * -(2**63), n - 2**31, n.to(torch.uint8) + 250, n.to(torch.int32) + (2**31 - 1), n

    fused(core, [torch.zeros(2, 3)], [torch.arange(3)])


if __name__ == "__main__":
    main(*sys.argv[1:])
