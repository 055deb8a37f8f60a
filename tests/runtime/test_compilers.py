"""Compilers other than a whole g++: bits, threads and flags with clang++, and with a g++ that knows no OpenMP or not every flag."""

import os
import platform
import shutil

import pytest
import torch
from cores import leaky
from test_launch_cpp import child

import flexsn
from flexsn._program import cache as caching
from flexsn._runtime import cpp_compiler as launch_compiler
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn.errors import BackendUnavailableError, BuildError, FallbackWarning


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


REFUSES = """
echo run >> "$(dirname "$0")/runs"
for word; do case "$word" in {flag}) echo "unrecognized option $word" >&2; exit 1;; esac; done
exec g++ "$@"
"""


@pytest.fixture
def compiler(request, tmp_path, monkeypatch):
    """A compiler by its kind, in an empty cache."""
    if request.param == "clang++" and shutil.which("clang++") is None:
        pytest.skip("there is no clang++ here; .ci/run says whether CI has one")
    refuses = {"no OpenMP": "-fopenmp", "no vector pragmas": "-fopenmp*", "older": "-fno-thread-jumps|--param=*"}
    path = "clang++" if request.param == "clang++" else script(tmp_path / "c++", REFUSES.format(flag=refuses[request.param]))
    flexsn.scan(lambda x: x + 0.5, [torch.ones(2, 3)], backend="cpp")  # imports what reads $CXX once
    monkeypatch.setenv("CXX", path)
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch_cpp, "_taken", {})
    forget(monkeypatch)
    return path


def forget(monkeypatch):
    """Make this process one that has captured and loaded nothing; returns what it loads from now on."""
    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())
    monkeypatch.setattr(launch_cpp, "_kernels", loaded := {})
    return loaded


def results(dtype, monkeypatch):
    """Outputs, states and gradients of a core, on more neuron-steps than one thread takes; and how many kernels were loaded."""
    loaded = forget(monkeypatch)

    def core(x, v, m, w):
        """Arithmetic, Sleef's functions, selects, an integer state."""
        h = v * w + torch.tanh(x) / 3.0 + torch.exp(-v.abs()) * 0.2
        s = flexsn.surrogate.atan(h - 0.5)
        return s, torch.where(s > 0, torch.remainder(h, 0.3), h), m + (s > 0)

    torch.manual_seed(0)
    x, w = torch.randn(19, 9001).to(dtype).requires_grad_(), torch.rand(9001).to(dtype).requires_grad_()
    got = flexsn.scan(core, [x], [None, torch.zeros(9001, dtype=torch.int32)], [w], backend="cpp")
    grads = torch.autograd.grad(got.outputs[0].sum() + got.states[0].sum(), [x, w])
    return [*got.outputs, *got.states, *grads], len(loaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiler", ["clang++", "no OpenMP", "no vector pragmas", "older"], indirect=True)
def test_every_compiler_gives_the_same_bits(compiler, dtype, threads, monkeypatch):
    threads(2)
    got, loaded = results(dtype, monkeypatch)
    monkeypatch.delenv("CXX")
    want, again = results(dtype, monkeypatch)
    assert loaded == again == 2
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("march", ["haswell", "x86-64-v2", "skylake-avx512"])
def test_kernels_for_other_processors(march, dtype, tmp_path, monkeypatch):
    """Vectors are of 256, 128 and 512 bits there, and compilers ask for functions of each width, and of half of it."""
    if march == "skylake-avx512" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has no AVX-512")

    def core(x, v):
        v = torch.tanh(x + v) + torch.pow(v.abs() + 1.0, 0.1 * x) + torch.atan2(x, v) + torch.sigmoid(x)
        return v, v

    x = torch.randn(4, 71, dtype=dtype, requires_grad=True)
    found = []
    flexsn.scan(lambda x: x + 0.5, [x.detach()], backend="cpp")  # imports what reads $CXX once
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f'exec g++ "$@" -march={march}'))
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    loaded = forget(monkeypatch)
    for backend in ("cpp", "torch"):
        y = flexsn.scan(core, [x], [None], backend=backend).outputs[0]
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    assert len(loaded) == 2
    torch.testing.assert_close(*found)


def test_any_number_of_threads_gives_the_same_bits(threads):
    x, w = torch.randn(700, 64 * 7 + 1), torch.tensor(0.5)
    found = []
    for count in (1, 2, 3, 5, 8):
        threads(count)
        found.append(flexsn.scan(leaky, [x], [None], [w], backend="cpp").outputs[0])
    assert all(torch.equal(y, found[0]) for y in found)


THREADED = """
import os, torch, flexsn
torch.set_num_threads(1)
x = torch.zeros(40, 9001)
torch.set_num_threads(3)  # from here on, flexsn alone starts threads
before = len(os.listdir("/proc/self/task"))
flexsn.scan(lambda x, v: (x * 0.5 + v, v + x), [x], [None], backend="cpp")
print(len(os.listdir("/proc/self/task")) - before)
print(len({line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2] and ".so" in line}))
"""


@pytest.mark.parametrize("compiler", ["clang++", "no OpenMP"], indirect=True)
def test_kernels_run_on_the_threads_of_pytorchs_one_openmp(compiler, tmp_path):
    assert child(THREADED, tmp_path, CXX=compiler) == ["2", "1"]


# --- flags ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("compiler", "lost"),
    [
        ("clang++", {"-fno-tree-pre", "-fno-tree-sink", "-fno-thread-jumps"}),
        ("older", {"-fno-thread-jumps", *(f for f in launch_cpp._FLAGS if f[:7] == "--param")}),
    ],
    indirect=["compiler"],
)
def test_flags_that_a_compiler_does_not_know_are_left_out(compiler, lost):
    flexsn.scan(lambda x, v: (x * 0.65625 + v, v), [torch.ones(2, 3)], [None], backend="cpp")
    (taken,) = launch_cpp._taken.values()
    assert lost <= set(launch_cpp._FLAGS) - set(taken) <= {*lost, *(f for f in launch_cpp._FLAGS if f[:7] == "--param")}
    assert set(launch_cpp._EXACT) <= set(taken) and "-march=native" in taken and "-ffp-contract=off" in taken


@pytest.mark.parametrize("compiler", ["older"], indirect=True)
def test_flags_are_tried_once(compiler, tmp_path):
    runs = []
    for core in (lambda x, v: (x * 0.640625 + v, v), lambda x, v: (x * 0.640625 - v, v)):
        before = (tmp_path / "runs").read_text().count("run") if runs else 0
        flexsn.scan(core, [torch.ones(2, 3)], [None], backend="cpp")
        runs.append((tmp_path / "runs").read_text().count("run") - before)
    links = 2  # the stub of PyTorch's library, then the kernel
    assert runs == [
        1 + (1 + links) + len(launch_cpp._FAST) + (1 + links),
        1 + links,
    ]  # as given, the smallest program, each flag, the kernel


def test_a_compiler_is_run_by_the_name_by_which_it_was_found(tmp_path, monkeypatch):
    """clang++ is a link to clang, which links no C++ library; ccache's g++ is a link to ccache."""
    script(tmp_path / "driver", 'case "$0" in */g++) exec /usr/bin/env PATH="$OTHER" g++ "$@";; *) exit 1;; esac')
    (tmp_path / "g++").symlink_to("driver")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("OTHER", os.environ["PATH"])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch_cpp.compiler()[0] == str(tmp_path / "g++")
    (tmp_path / "cache").mkdir()
    launch_cpp._build('extern "C" int run() { return 0; }\n', tmp_path / "cache" / "entry.so")
    assert (tmp_path / "cache" / "entry.so").exists()


# --- compilers that take long -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quiet", ["", "1"])
def test_a_build_that_takes_long_says_what_it_does_once(tmp_path, monkeypatch, capsys, quiet):
    flexsn.scan(lambda x: x + 0.5, [torch.ones(2, 3)], backend="cpp")
    monkeypatch.setenv("CXX", script(tmp_path / "slow++", 'sleep 0.4\nexec g++ "$@"'))
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLEXSN_QUIET", quiet)
    monkeypatch.setattr(launch_compiler, "_told", set())
    monkeypatch.setattr(launch_compiler, "_PATIENCE", 0.1)
    forget(monkeypatch)

    def patient(x, v):
        return x * 0.6484375 + v, v

    for dtype in (torch.float32, torch.float64):  # two kernels, one line
        flexsn.scan(patient, [torch.ones(2, 3, dtype=dtype)], [None], backend="cpp")
    line = f"flexsn: building the kernels of `patient` with slow++ (kept in {tmp_path}/cache/cpp for the next time)\n"
    assert capsys.readouterr().err == ("" if quiet else line)


def test_a_build_that_is_quick_says_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch_compiler, "_PATIENCE", 60.0)
    launch_cpp._build('extern "C" int run() { return 0; }\n', tmp_path / "entry.so")
    assert capsys.readouterr().err == ""


# --- compilers that build nothing ---------------------------------------------------------------------------------------------------
def test_a_compiler_that_builds_no_program_is_none(tmp_path, monkeypatch):
    def core(x, v):
        return x * 0.6328125 + v, v

    x = torch.ones(2, 3)
    flexsn.scan(lambda x: x + 0.5, [x], backend="cpp")
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", "echo 'cmath: no such file' >&2; exit 1"))
    for named in ({"backend": "cpp"}, {"strict": True}):
        with pytest.raises(BackendUnavailableError, match=r"cannot build the smallest program(?s:.*)cmath: no such file") as caught:
            flexsn.scan(core, [x], [None], **named)
        assert "$CXX" in caught.value.hint and "report" not in str(caught.value)
    with pytest.warns(FallbackWarning, match="cannot build the smallest program"):
        assert torch.equal(flexsn.scan(core, [x], [None]).outputs[0], x * 0.6328125)


def test_a_kernel_that_fails_with_a_compiler_that_works_is_to_be_reported(tmp_path):
    with pytest.raises(BuildError, match="exit 1") as caught:
        launch_cpp._build("no C++\n", tmp_path / "entry.so")
    assert "report the core" in caught.value.hint and not list(tmp_path.iterdir())
