"""Memory safety of the CPU kernels: guard pages around every array; AddressSanitizer and UBSan over the parity tests.

The GPU kernels: `tools/gpu_memcheck.sh`.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import folders
import pytest
from nursery import Nursery

import flexsn

ROOT = Path(flexsn.__file__).parent.parent


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


# --- arrays that end, or begin, where nothing may be touched ------------------------------------------------------------
GUARDED = """
import ctypes, mmap, os, sys, types
sys.path[:0] = {tests!r}
import torch, flexsn, helpers
from cores import leaky, lif, relu_mem
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime import memory

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
made = 0

def guarded(shape, dtype=torch.float32, device=None):
    "A tensor of NaN whose last byte is followed ({side!r} end), or whose first is preceded, by a page that nobody may touch."
    global made
    if isinstance(shape, int):
        shape = (shape,)
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    pages = -(-size // PAGE) * PAGE
    base = libc.mmap(None, pages + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert base != ctypes.c_void_p(-1).value
    for guard in (base, base + PAGE + pages):
        assert libc.mprotect(guard, PAGE, 0) == 0
    start = base + PAGE + (pages - size if {side!r} == "far" else 0)
    tensor = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=dtype, count=count).reshape(shape)
    made += 1
    return tensor.fill_(float("nan") if dtype.is_floating_point else 1)

class Torch(types.ModuleType):
    empty_strided = staticmethod(lambda shape, strides, **options: guarded(shape, **options).as_strided(shape, strides))

    def __getattr__(self, name):
        return getattr(torch, name)

memory.torch = Torch("torch")

def inside(tensor):
    return guarded(tuple(tensor.shape), tensor.dtype).copy_(tensor)
"""

MATRIX = """
torch.manual_seed(0)
for dtype in {dtypes}:
    for N in (1, 5, 63, 64, 65, 130):
        for T in (1, 16, 17, 35):
            for core, states, params in ((leaky, 1, [(N,)]), (lif, 1, [(), ()]), (relu_mem, 1, [])):
                if (dtype, core) not in ((torch.float32, lif), (torch.float16, leaky), (torch.int16, leaky)):
                    continue
                integer = not dtype.is_floating_point
                draw = lambda *shape: inside((torch.randint(-3, 3, shape) if integer else torch.randn(shape)).to(dtype))
                ps = [inside((torch.rand(shape) + 1.0).to(dtype)) for shape in params]
                if integer:
                    core = lambda x, v, d: (v * d + x, v + x)
                helpers.check(core, [draw(T, N)], [draw(N)], ps, only="cpp", sequences=True)
assert made > 200, made
print("done")
"""

LARGE = """
launch_cpp._cache_bytes = lambda: 1  # every call counts as larger than the cache: rows are streamed
draw = lambda *shape: inside(torch.randn(shape))
params = [inside(torch.tensor(1.75)), inside(torch.tensor([0.5]))]
for T, N in ((17, 1), (17, 65), (5, 4097)):
    helpers.check(lif, [draw(T, N)], [draw(N)], params, only="cpp", sequences=True)
print("done")
"""

OVERRUN = """
from test_launch_cpp import tiny_plan
from flexsn._codegen import cpp as render_cpp
made_plan = tiny_plan(0.5)
kernel = launch_cpp.load(made_plan, render_cpp.render(made_plan))
x, v, final, y = guarded((3, 5)), guarded(5), guarded(5), guarded((3, 5))
arrays = [{"x0": x, "v0": v}[a.role] for a in made_plan.reads] + [{"v0": final, "y0": y}[a.role] for a in made_plan.writes]
kernel.bind([True] * 4, 3, 5)(arrays, [])
print("in bounds", flush=True)
kernel.bind([True] * 4, 3, 5 + %d)(arrays, [])
"""


@pytest.mark.parametrize("dtypes", ["(torch.float32,)", pytest.param("(torch.float16, torch.int16)", marks=pytest.mark.slow)])
@pytest.mark.parametrize("side", ["far", "near"])
def test_nothing_beside_the_arrays_is_touched(nursery, tmp_path, side, dtypes):
    code = GUARDED.format(tests=list(map(str, folders.ALL)), side=side) + MATRIX.replace("{dtypes}", dtypes) + LARGE
    found = nursery.run(code, tmp_path / ".." / "guarded")
    assert found == (0, "done\ndone\n"), found


def test_guards_kill_an_overrun(nursery, tmp_path):
    code = GUARDED.format(tests=list(map(str, folders.ALL)), side="far") + OVERRUN % 1
    assert nursery.run(code, tmp_path / ".." / "guarded") == (-signal.SIGSEGV, "in bounds\n")


# --- sanitizers: the parity tests, with kernels that check themselves --------------------------------------------------------------
PARITY = """
import torch
import helpers
helpers.backends = lambda: ("cpp",)
import test_parity as parity
from flexsn._runtime import cpp_kernel as launch_cpp

def run(name, *arguments):
    torch.manual_seed(0)
    getattr(parity, name)(*arguments)

{cases}
print("sound")
"""

CASES = {
    "matrix": """
        for core in (parity.lif, parity.adlif):
            for dtype in (torch.float32, torch.bfloat16):
                for T in parity.TIMES:
                    run("test_matrix", core, dtype, T)
    """,
    "zoo": """
        for core in (parity.leaky, parity.lif_soft, parity.relu_mem):
            run("test_final_states", core, torch.float16 if core is parity.leaky else torch.float32)
    """,
    "neurons": """
        run("test_hodgkin_huxley"); run("test_izhikevich"); run("test_integer_refractory_counter"); run("test_two_compartments")
    """,
    "shapes": """
        run("test_strides_of_states_and_params"); run("test_strides_of_cotangents"); run("test_params_of_different_shapes")
        run("test_a_param_may_widen_the_step")
    """,
    "smaller": """
        run("test_a_state_that_stays_smaller_than_the_step")
        run("test_an_output_smaller_than_the_step"); run("test_where_and_clamp"); run("test_states_change_places")
        run("test_params_broadcast", (4, 1))
    """,
    "numbers": """
        for dtype in (torch.float32, torch.float16, torch.float64):
            run("test_special_values", dtype)
        for dtype in (torch.uint8, torch.int8, torch.int64, torch.bool):
            run("test_integer_and_bool_inputs", dtype)
    """,
    "tiles": """
        torch.set_num_threads(2)
        run("test_many_neurons_many_tiles", 64 * 300 + 1, torch.set_num_threads)
        x, v = torch.randn(40, 9001), torch.randn(9001)
        for cache in (launch_cpp._cache_bytes, lambda: 1):
            launch_cpp._cache_bytes = cache
            helpers.check(parity.lif, [x], [v], [torch.tensor(1.75), torch.rand(9001) + 0.5], only="cpp")
    """,
}


def sanitized(tmp_path, code):
    compiler = shutil.which("g++")
    runtimes = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
                for name in ("libasan.so", "libubsan.so")]  # fmt: skip
    if not all(os.path.isabs(r) for r in runtimes):
        pytest.skip("g++ has no sanitizers here")
    wrapper = tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\nexec {compiler} "$@" -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1\n'
    )
    wrapper.chmod(0o700)
    environment = os.environ | {
        "CXX": str(wrapper), "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
        "FLEXSN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": folders.PATH, "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert any(b"__asan_report" in p.read_bytes() for p in (tmp_path / "cache" / "cpp").glob("*.so")), done.stderr[-2000:]
    return done


@pytest.mark.parametrize(
    "names",  # a process takes long to start
    [
        pytest.param("matrix tiles", marks=pytest.mark.slow), pytest.param("zoo neurons shapes", marks=pytest.mark.full),
        pytest.param("smaller numbers", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_parity_under_sanitizers(tmp_path, names):
    done = sanitized(tmp_path, PARITY.format(cases="".join([textwrap.dedent(CASES[name]) for name in names.split()])))
    assert done.returncode == 0 and done.stdout == "sound\n", done.stderr[-3000:]


OUTSIDE = """
import torch
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._codegen import cpp as render_cpp
from helpers import run_kernel
from test_launch_cpp import tiny_plan

plan = tiny_plan(0.5)
source = render_cpp.render(plan)
fault = {fault!r}
assert fault[0] in source
kernel = launch_cpp.load(plan, source.replace(*fault))
x, v, final, y = torch.ones(3, 5), torch.ones(5), torch.empty(5), torch.empty(3, 5)
run_kernel(kernel, {{"x0": x, "v0": v}}, {{"v0": final, "y0": y}}, 3, 5)
print("not seen")
"""
SEEDED = {
    "heap-buffer-overflow": ("last_row(v0_row, begin, size, v0_last)", "last_row(v0_row, begin, size + 1, v0_last)"),
    "runtime error: shift exponent": ("int failed = 0;", "int failed = 0; volatile int by = 77; failed = (1 << by) * 0;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("report", SEEDED)
def test_sanitizers_see_a_seeded_fault(tmp_path, report):
    done = sanitized(tmp_path, OUTSIDE.format(fault=SEEDED[report]))
    assert done.returncode != 0 and report in done.stderr and "not seen" not in done.stdout, done.stderr[-2000:]
