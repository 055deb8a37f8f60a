"""Faults around a build: races, kills, disks and compilers that fail, forks. A call works or says what is wrong, and what
comes after it works."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from nursery import Nursery

import flexsn
from flexsn._runtime import cpp_compiler as launch_compiler
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime import disk_cache as launch_cache
from flexsn.errors import BackendUnavailableError, BuildError

# one call of one kernel, and its right result; prints how many kernels were built
USE = """
import torch, flexsn
from flexsn._runtime import cpp_kernel as launch_cpp

built, build = [], launch_cpp._build
launch_cpp._build = lambda source, path: (build(source, path), built.append(path))

def core(x, v):
    v = v * 0.4375 + x
    return v * v, v

torch.manual_seed(0)
x = torch.randn(7, 70)
y = flexsn.scan(core, [x], [None], backend="cpp").outputs[0]
assert torch.equal(y, flexsn.scan(core, [x], [None], backend="torch").outputs[0])
print("built", len(built))
"""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


def script(path, text):
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def copier(nursery, tmp_path_factory):
    """A compiler for the core of `USE` that copies what g++ made: fast, for tests that compile many times."""
    folder = tmp_path_factory.mktemp("copier")
    code, said = nursery.run(USE, folder / "cache")
    assert (code, said) == (0, "built 1\n")
    (library,) = (folder / "cache" / "cpp").glob("*.so")
    return script(folder / "c++", f'while [ "$1" != -o ]; do shift; done\ncp {library} "$2"')


def entries(cache):
    return sorted(p.name for p in (cache / "cpp").iterdir() if not p.name.startswith("build-"))


def assert_sound(cache):
    """Whatever lies in the cache: an entry that counts is whole and runs."""
    for digest in (cache / "cpp").glob("*.sha256"):
        library = digest.with_suffix(".so")
        if launch_cache.trusted(library):
            assert hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()


# --- processes that race, processes that die ---------------------------------------------------------------------------
@pytest.mark.parametrize("compiler", ["copier", pytest.param("g++", marks=pytest.mark.slow)])
def test_processes_that_race_on_a_cold_cache(nursery, copier, tmp_path, compiler):
    cxx = {"CXX": copier} if compiler == "copier" else {}
    children = [nursery.start(USE, tmp_path, **cxx) for _ in range(4)]
    results = [child.wait() for child in children]
    assert [code for code, _ in results] == [0] * 4, results
    assert nursery.run(USE, tmp_path, **cxx) == (0, "built 0\n")
    assert len(entries(tmp_path)) == 3 and len(list((tmp_path / "cpp").iterdir())) == 3


# dies at the k-th line that it runs in the modules that build, and says how many lines there are otherwise
DIES = (
    """
import os, signal, sys
from flexsn._runtime import disk_cache as launch_cache
from flexsn._runtime import cpp_compiler as launch_compiler
from flexsn._runtime import cpp_kernel as launch_cpp

files = {m.__file__ for m in (launch_cache, launch_compiler, launch_cpp)}
left = int(os.environ["LINES"])

def at_line(frame, event, argument):
    global left
    if frame.f_code.co_filename not in files:
        return None
    if event == "line":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return at_line

sys.settrace(at_line)
"""
    + USE
    + "\nsys.settrace(None)\nprint('lines', int(os.environ['LINES']) - left)"
)


def lines_of_a_build(nursery, copier, tmp_path):
    code, said = nursery.run(DIES, tmp_path / "counted", CXX=copier, LINES=10**9)
    assert code == 0, said
    return int(said.split()[-1])


def die_and_go_on(nursery, copier, cache, points):
    died = 0
    for point in points:
        code, said = nursery.run(DIES, cache / str(point), CXX=copier, LINES=point)
        assert code in (-signal.SIGKILL, 0), said
        died += code != 0
        code, said = nursery.run(USE, cache / str(point), CXX=copier)
        assert code == 0, f"after a kill at line {point}: {said}"
        assert_sound(cache / str(point))
        assert nursery.run(USE, cache / str(point), CXX=copier) == (0, "built 0\n")
    return died


def test_a_process_killed_at_some_lines_of_a_build(nursery, copier, tmp_path):
    lines = lines_of_a_build(nursery, copier, tmp_path)
    assert lines > 100
    points = [lines - back for back in (45, 35, 29, 24, 22, 20)]
    assert die_and_go_on(nursery, copier, tmp_path, points) == len(points)


@pytest.mark.slow
def test_a_process_killed_at_any_line_of_a_build(nursery, copier, tmp_path):
    lines = lines_of_a_build(nursery, copier, tmp_path)
    points = range(1, lines, 4)
    assert die_and_go_on(nursery, copier, tmp_path, points) > len(points) - 20  # the compiler's time varies the number of lines


def test_a_process_killed_while_the_compiler_runs(nursery, tmp_path):
    for after in (0.05, 0.4, 0.9):
        child = nursery.start(USE, tmp_path)
        child.kill(after)
        assert child.wait()[0] in (-signal.SIGKILL, 0)
    code, said = nursery.run(USE, tmp_path)
    assert code == 0, said
    assert nursery.run(USE, tmp_path) == (0, "built 0\n")


def test_what_killed_processes_left_goes_with_time(nursery, copier, tmp_path):
    old, young, named, filled = (tmp_path / "cpp" / f"build-{n}" for n in ("abc_1234", "abc_5678", "of_the_user", "notebook"))
    for folder in (old, young, named, filled):
        folder.mkdir(parents=True)
        (folder / "kernel.cpp").write_text("")
    (filled / "results.csv").write_text("the user's own")
    (tmp_path / "cpp").chmod(0o700)
    for folder in (old, named, filled):
        os.utime(folder, (0, time.time() - 2 * launch_cache._ABANDONED))
    assert nursery.run(USE, tmp_path, CXX=copier) == (0, "built 1\n")
    assert not old.exists() and young.exists()
    assert named.exists() and filled.exists(), "what is not flexsn's stays"


def test_folders_of_builds_are_known_by_their_names(tmp_path):
    with launch_cache.workshop(tmp_path / "entry.so") as folder:
        (folder / "kernel.cpp").write_text("")
        assert launch_cache.abandoned(tmp_path, -1.0) == [folder]


# --- entries that are not what they were ----------------------------------------------------------------------------------
def damage_library(path, change):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))
    path.chmod(0o700)


DAMAGES = {
    "truncated": lambda so, digest: damage_library(so, lambda b: b[: len(b) // 2]),
    "one bit": lambda so, digest: damage_library(so, lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:]),
    "longer": lambda so, digest: damage_library(so, lambda b: b + b"\0"),
    "empty": lambda so, digest: damage_library(so, lambda b: b""),
    "a folder": lambda so, digest: (so.unlink(), so.mkdir()),
    "a pipe": lambda so, digest: (so.unlink(), os.mkfifo(so, 0o700)),
    "a dangling link": lambda so, digest: (so.unlink(), so.symlink_to("nowhere")),
    "no digest": lambda so, digest: digest.unlink(),
    "a digest of bytes": lambda so, digest: digest.write_bytes(b"\xff\xfe"),
    "a digest of another": lambda so, digest: digest.write_text(hashlib.sha256(b"").hexdigest()),
    "unreadable": lambda so, digest: so.chmod(0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_anew(nursery, copier, tmp_path, damage):
    assert nursery.run(USE, tmp_path, CXX=copier) == (0, "built 1\n")
    (library,) = (tmp_path / "cpp").glob("*.so")
    DAMAGES[damage](library, library.with_suffix(".sha256"))
    code, said = nursery.run(USE, tmp_path, CXX=copier)
    rebuilt = 0 if damage == "unreadable" and os.getuid() == 0 else 1  # root reads everything
    assert code == 0 and said.endswith(f"built {rebuilt}\n")
    if damage != "a folder":
        assert nursery.run(USE, tmp_path, CXX=copier) == (0, "built 0\n")


def test_an_entry_that_is_whole_but_loads_no_more_is_built_anew(nursery, copier, tmp_path):
    """Say, a library that it was linked with has gone."""
    assert nursery.run(USE, tmp_path, CXX=copier) == (0, "built 1\n")
    (library,) = (tmp_path / "cpp").glob("*.so")
    for content in (b"no library", Path(launch_cpp.compiler()[0]).read_bytes()):
        damage_library(library, lambda b: content)
        library.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())
        assert nursery.run(USE, tmp_path, CXX=copier) == (0, "built 1\n")


def test_a_new_compiler_makes_old_entries_stale(nursery, copier, tmp_path):
    other = tmp_path / "c++"
    shutil.copy(copier, other)
    assert nursery.run(USE, tmp_path / "cache", CXX=other) == (0, "built 1\n")
    other.write_text(other.read_text() + "\n# a newer version\n")
    assert nursery.run(USE, tmp_path / "cache", CXX=other) == (0, "built 1\n")


# --- disks -------------------------------------------------------------------------------------------------------------------
ELSEWHERE = "RuntimeWarning: flexsn: "


@contextlib.contextmanager
def mounted(tmp_path, options, otherwise):
    """A disk of its own, where mounts are allowed; `otherwise`: what tests the same without."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", str(place)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not allowed here; {otherwise} injects the error")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path, "size=16k", "test_a_disk_that_fills_up") as place:
        yield place


def test_a_full_disk(nursery, small_disk):
    code, said = nursery.run(USE, small_disk)
    assert code == 0 and ELSEWHERE in said and "No space left" in said and said.endswith("built 1\n")
    assert entries(small_disk) == []


@pytest.fixture
def disk_without_programs(tmp_path):
    with mounted(tmp_path, "noexec,size=16m", "test_launch_cpp.py") as place:
        yield place


def test_a_disk_that_runs_no_programs(nursery, disk_without_programs):
    code, said = nursery.run(USE, disk_without_programs / "cache")
    assert code == 0 and ELSEWHERE in said and "failed to map segment" in said and said.endswith("built 1\n")
    code, said = nursery.run(f"import tempfile\ntempfile.tempdir = '{disk_without_programs}'\n" + USE, disk_without_programs / "cache")
    assert code == 1 and "BackendUnavailableError" in said and "failed to map segment" in said and "$FLEXSN_CACHE_DIR" in said


NO_SPACE = (
    """
import errno, os
from pathlib import Path
from flexsn._runtime import disk_cache as launch_cache

where, point = os.environ["FLEXSN_CACHE_DIR"], os.environ["POINT"]
kind, name = point.split(".")
owner = {"os": os, "Path": Path}[kind]
real = getattr(owner, name)

def full(first, *others, **named):
    if str(first).startswith(where) and "build-" in str(first):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(first))
    return real(first, *others, **named)

setattr(owner, name, full)
"""
    + USE
)


@pytest.mark.parametrize("point", ["os.mkdir", "Path.write_text", "os.chmod", "os.replace"])
def test_a_disk_that_fills_up(nursery, copier, tmp_path, point):
    code, said = nursery.run(NO_SPACE, tmp_path, CXX=copier, POINT=point)
    assert code == 0 and ELSEWHERE in said and "No space left" in said and said.endswith("built 1\n"), said
    assert nursery.run(USE, tmp_path, CXX=copier)[0] == 0


def test_a_compiler_that_finds_the_disk_full(nursery, tmp_path):
    """It says so, and nothing else tells."""
    full = script(tmp_path / "c++", f"""
        while [ "$1" != -o ]; do shift; done
        case "$2" in {tmp_path}/cache/*) echo "c++: error writing to $2: No space left on device" >&2; exit 1;; esac
        exit 3""")  # fmt: skip
    code, said = nursery.run(USE, tmp_path / "cache", CXX=full)
    assert code == 1 and ELSEWHERE in said and "the compiler failed (exit 3)" in said  # elsewhere it fails for good


def test_no_disk_at_all(nursery, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, said = nursery.run("import tempfile\ntempfile.tempdir = '/nowhere'\n" + USE, tmp_path / "file")
    assert code == 1 and 'BackendUnavailableError: backend "cpp" has no place for its kernels' in said and "$FLEXSN_CACHE_DIR" in said


READ_ONLY = "import os\nos.setgid(65534); os.setuid(65534)\n" + USE


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
def test_a_read_only_disk(nursery):
    """Here: a folder of another user, seen by an ordinary one."""
    code, said = nursery.run(READ_ONLY, "/proc/flexsn")
    assert code == 0 and ELSEWHERE in said and said.endswith("built 1\n"), said
    code, said = nursery.run(READ_ONLY, "/usr/lib")
    assert code == 0 and ELSEWHERE in said and said.endswith("built 1\n"), said


def test_a_disk_that_vanishes_between_calls(nursery, copier, tmp_path):
    vanish = f"import shutil\nshutil.rmtree({str(tmp_path / 'cache')!r})\n"
    again = USE + vanish + "assert torch.equal(flexsn.scan(core, [x], [None], backend='cpp').outputs[0], y)"
    code, said = nursery.run(again, tmp_path / "cache", CXX=copier)
    assert code == 0, said
    assert nursery.run(USE, tmp_path / "cache", CXX=copier) == (0, "built 1\n")


def test_a_disk_that_vanishes_during_a_build(nursery, copier, tmp_path):
    vanishing = script(tmp_path / "c++", f'rm -rf {tmp_path}/cache\nexec {copier} "$@"')
    _, said = nursery.run(USE, tmp_path / "cache", CXX=vanishing)
    assert "Traceback" not in said or "flexsn.errors.BuildError" in said
    assert nursery.run(USE, tmp_path / "cache", CXX=copier)[0] == 0


def test_the_folder_of_one_process_goes_with_it(tmp_path):
    (tmp_path / "file").write_text("in the way")
    code = "import flexsn._runtime.disk_cache as c, warnings\nwarnings.simplefilter('ignore')\nprint(c.folder())"
    environment = os.environ | {
        "FLEXSN_CACHE_DIR": str(tmp_path / "file"),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "flexsn-")) and sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_there_is_no_home(monkeypatch, tmp_path):
    monkeypatch.setattr(launch_cache, "_private", None)
    monkeypatch.delenv("FLEXSN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home"))))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="there is no home folder"):
        assert launch_cache.folder().parent == tmp_path


# --- compilers -----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def cold(tmp_path, monkeypatch, counts):
    """A function that uses a kernel with a fake compiler, in an empty cache."""
    flexsn.scan(lambda x: x + 0.5, [torch.ones(2, 3)], backend="cpp")  # imports PyTorch's modules first: they take memory, and read $CXX
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch_cpp, "_kernels", {})

    def use(text=None, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if text is not None:
            monkeypatch.setenv("CXX", str(script(tmp_path / "fake c++", text)))
        x = torch.ones(3, 5)
        return flexsn.scan(lambda x, v: (x * 0.3125 + v, v), [x], [None], backend="cpp").outputs[0]

    yield use
    monkeypatch.delenv("CXX", raising=False)
    left = [p for p in (tmp_path / "cache" / "cpp").glob("*")]
    assert left == []  # what fails leaves nothing
    assert torch.equal(use(), torch.full((3, 5), 0.3125))  # and the next build is right


def test_a_compiler_that_fails(cold):
    with pytest.raises(BackendUnavailableError, match=r"failed \(exit 7\)(?s:.*)internal compiler error: nothing works") as caught:
        cold("echo 'internal compiler error: nothing works' >&2; exit 7")
    assert 'backend="torch"' in caught.value.hint


def test_a_compiler_that_dies(cold):
    with pytest.raises(BackendUnavailableError, match=r"the compiler failed \(exit -9\)"):
        cold("kill -9 $$")


def test_a_compiler_that_hangs(cold):
    start = time.monotonic()
    with pytest.raises(BackendUnavailableError, match=r"had not finished after 0.5 s, and was killed(?s:.*)FLEXSN_BUILD_TIMEOUT"):
        cold("sleep 90; exit 1", FLEXSN_BUILD_TIMEOUT="0.5")
    assert time.monotonic() - start < 20
    os.environ["FLEXSN_BUILD_TIMEOUT"] = "600"


def test_a_compiler_that_hangs_is_killed_with_what_it_started(cold, tmp_path):
    with pytest.raises(BackendUnavailableError, match="had not finished"):
        cold(f"sleep 1000 & echo $! > {tmp_path}/child; wait", FLEXSN_BUILD_TIMEOUT="1")
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it still runs")
    os.environ["FLEXSN_BUILD_TIMEOUT"] = "600"


def test_a_compiler_that_leaves_something_running(cold):
    """Which holds its output open: nobody waits for that."""
    with pytest.raises(BackendUnavailableError, match="exit 4"):
        cold("sleep 5 & exit 4")


def test_a_compiler_that_prints_megabytes(cold):
    size = 24 << 20
    tracemalloc.start()
    with pytest.raises(BackendUnavailableError, match="the last words") as caught:
        cold(f"head -c {size} /dev/zero | tr '\\0' 'x'; head -c {size} /dev/zero >&2; echo the last words; exit 1")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) < 4000 and peak < size


def test_a_compiler_that_prints_without_end(cold):
    with pytest.raises(BackendUnavailableError, match="had not finished"):
        cold("while :; do echo warning; done", FLEXSN_BUILD_TIMEOUT="0.5")
    os.environ["FLEXSN_BUILD_TIMEOUT"] = "600"


def test_a_compiler_that_prints_what_is_no_text(cold):
    with pytest.raises(BackendUnavailableError, match="exit 1"):
        cold(r"printf '\377\376\000'; exit 1")


def test_a_compiler_that_says_it_succeeds_and_makes_nothing(cold):
    with pytest.raises(BackendUnavailableError, match="made no library"):
        cold("exit 0")


@pytest.mark.parametrize("made", ["echo no library", "gcc -shared -x c /dev/null -o /dev/stdout"], ids=["text", "no kernel"])
def test_a_compiler_that_makes_something_else(cold, made, monkeypatch):
    monkeypatch.setattr(launch_cache, "_private", None)
    with (
        pytest.warns(RuntimeWarning, match="cannot be used"),
        pytest.raises(BackendUnavailableError, match=r"invalid ELF|file too short|no kernel in it"),
    ):
        cold(f'while [ "$1" != -o ]; do shift; done\n{made} > "$2"')


def test_a_compiler_that_is_not_there(cold, monkeypatch, tmp_path):
    monkeypatch.setattr(launch_compiler, "identity", lambda: (str(tmp_path / "gone"), "1", "2"))
    with pytest.raises(BackendUnavailableError, match=r"cannot run the compiler(?s:.*)CXX"):
        cold()
    monkeypatch.undo()
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "0", ""])
def test_a_time_limit_that_is_none(monkeypatch, given):
    monkeypatch.setenv("FLEXSN_BUILD_TIMEOUT", given)
    with pytest.raises(BuildError, match="not a number of seconds"):
        launch_compiler.time_limit()


# --- forks -----------------------------------------------------------------------------------------------------------------------
# a loader whose workers run a neuron; its gradients too
LOADER = """
import torch, flexsn
from torch.utils.data import DataLoader, Dataset
from flexsn._runtime import fork as forks

forks.forked = False  # stands for a process of its own: its mother started no thread
torch.set_num_threads(2)
w = torch.tensor(0.5, requires_grad=True)

def core(x, v):
    v = v * w + x
    return v * v, v

neuron = flexsn.FlexSN(core, num_inputs=1, num_states=1, backend="cpp")

class Encoded(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, k):
        neuron.reset()
        y = neuron(torch.full((40, 3000), 0.1 * k))  # more neuron-steps than one thread takes
        (grad,) = torch.autograd.grad(y.sum(), w)
        return y.detach()[-1, 0], grad

data = Encoded()
want = [data[k] for k in range(8)]
found = list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=90))
assert torch.equal(torch.cat([y for y, _ in found]), torch.stack([y for y, _ in want]))
torch.testing.assert_close(torch.cat([g for _, g in found]), torch.stack([g for _, g in want]))
"""


def test_workers_of_a_loader_after_first_use(nursery, tmp_path):
    code, said = nursery.run(LOADER, tmp_path)
    assert code == 0, said


# forks after OpenMP's threads have started; what the child runs is appended
FORKS = """
import os, signal, threading, time, torch, flexsn
from flexsn._runtime import fork as forks
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._captured import captured_values as reads

forks.forked = False  # stands for a process of its own: its mother started no thread
torch.set_num_threads(2)
x, w = torch.randn(50, 40000, requires_grad=True), torch.tensor(0.5, requires_grad=True)

def core(x, v, w):
    v = v * w + x
    return v * v, v

def go(fn=core):
    y = flexsn.scan(fn, [x], [None], [w], backend="cpp").outputs[0]
    gx, gw = torch.autograd.grad(y, [x, w], y.detach())
    return y.detach(), gx, gw

want = go()
assert len(os.listdir("/proc/self/task")) > 1  # OpenMP's are there

def child(work, before=lambda: None):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        work()
        os._exit(0)
    before()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def close(found):
    assert all(torch.equal(a[:, ::97], b[:, ::97]) for a, b in zip(found[:2], want[:2])) and abs(found[2] - want[2]) < 1e-3 * abs(want[2])
"""

IN_CHILDREN = {
    "forward and backward": "child(lambda: close(go()))\nclose(go())",
    "threads of a kernel": "child(lambda: (close(go()), os._exit(forks.num_threads() != 1)))\nassert forks.num_threads() == 2",
    "the setting of the user stays": "child(lambda: (go(), os._exit(torch.get_num_threads() != 2)))",
    "a build": "child(lambda: go(lambda x, v, w: (x * w + v * 0.1875, v + x)))",
    "the eager loop": "child(lambda: flexsn.scan(core, [x.detach()], [None], [w.detach()], backend='torch'))",
    "an input that is copied": "z = torch.zeros(40000, 50).t()\nchild(lambda: flexsn.scan(core, [z], [None], [w], backend='cpp'))",
    "a grandchild": "child(lambda: child(lambda: close(go())))",
    "the parent after it": "child(lambda: None, before=lambda: close(go()))\nclose(go())",
}


@pytest.mark.parametrize("name", IN_CHILDREN)
def test_in_a_forked_child(nursery, tmp_path, name):
    code, said = nursery.run(FORKS + IN_CHILDREN[name], tmp_path / ".." / "forked")
    assert code == 0, said


FIRST_USES = {
    "a scan": "flexsn.scan(core, [x], [None], backend='cpp').outputs[0].sum().backward()",
    "a graph": "flexsn.lowlevel.generate_forward_and_backward_graph(core, [x[0], x[0]])",
}


@pytest.mark.parametrize("use", [n if n == "a scan" else pytest.param(n, marks=pytest.mark.slow) for n in FIRST_USES])
def test_a_forked_child_differentiates_after_a_capture(tmp_path, use):
    """Also in a build for CUDA on a machine without a GPU, where a fake mode makes autograd see eight."""
    code = f"""
import os, torch, flexsn, flexsn.lowlevel
core, x = lambda x, v: (x * 0.5 + v, v), torch.ones(2, 3, requires_grad=True)
{FIRST_USES[use]}
if (pid := os.fork()) == 0:
    (x * x).sum().backward()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "FLEXSN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


LOCKED = (
    FORKS
    + """
held, release = threading.Event(), threading.Event()

def hold():
    with {lock}:
        held.set()
        release.wait({seconds})

thread = threading.Thread(target=hold)
thread.start()
held.wait(60)
child(lambda: close(go(lambda x, v, w: core(x, v, w))), before=release.set)
thread.join(60)
"""
)


@pytest.mark.parametrize(("lock", "seconds"), [("launch_cpp._lock", 30), ("reads.lock", 0.5)])
def test_a_fork_while_a_thread_holds_a_lock(nursery, tmp_path, lock, seconds):
    code, said = nursery.run(LOCKED.format(lock=lock, seconds=seconds), tmp_path / ".." / "forked")
    assert code == 0, said


BUILDING = (
    FORKS
    + """
started, build = threading.Event(), launch_cpp._build

def slow(source, path):
    started.set()
    time.sleep(1.0)
    build(source, path)

launch_cpp._build = slow
other = lambda x, v, w: (x * w - v * 0.6875, v + x)
thread = threading.Thread(target=go, args=(other,))
thread.start()
started.wait(60)
child(lambda: go(other))
thread.join(60)
go(other)
"""
)


@pytest.mark.slow
def test_a_fork_while_a_thread_builds_what_the_child_wants(nursery, tmp_path):
    code, said = nursery.run(BUILDING, tmp_path / ".." / "forked")
    assert code == 0, said


LOCKED = (
    FORKS
    + """
inside, half = threading.Event(), []

def make():
    with reads.lock:
        half.append("a program, half made")
        inside.set()
        time.sleep(0.5)
        half.clear()

thread = threading.Thread(target=make)
thread.start()
inside.wait(60)
child(lambda: os._exit(len(half)))
thread.join(60)
"""
)


def test_a_fork_waits_while_a_thread_makes_a_program(nursery, tmp_path):
    code, said = nursery.run(LOCKED, tmp_path / ".." / "forked")
    assert code == 0, said


def test_a_cache_under_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLEXSN_CACHE_DIR", "~/kernels")
    assert launch_cache.folder() == tmp_path.resolve() / "kernels" / "cpp" and not Path("~").exists()
