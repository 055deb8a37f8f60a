"""Compiled kernels: the cache on disk, who may write it, a second process, threads, fork."""

import hashlib
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from cores import leaky
from helpers import run_kernel

import flexsn
from flexsn._codegen import cpp as render_cpp
from flexsn._ir.graph import Builder
from flexsn._plan import plan
from flexsn._runtime import cpp_compiler as launch_compiler
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime import disk_cache as launch_cache
from flexsn.errors import BackendUnavailableError, FallbackWarning

ROOT = Path(flexsn.__file__).parent.parent


def tiny_plan(scale, name="tiny"):
    """y = x * scale + v, v = y."""
    b = Builder(name)
    x, v = b.input("x0", torch.float32, "x"), b.input("v0", torch.float32, "v")
    y = b.op("add", b.op("mul", x, b.const(scale, torch.float32)), v)
    storage = dict.fromkeys(("x0", "v0", "y0"), torch.float32)
    return plan.plan_forward(b.graph({"y0": y, "v0": y}), storage, chunk=16, checkpoint=False, sequences=False)


def run_tiny(kernel, scale):
    x, v = torch.randn(3, 5), torch.randn(5)
    y, final = torch.empty(3, 5), torch.empty(5)
    read, written = {"x0": x, "v0": v}, {"y0": y, "v0": final}
    run_kernel(kernel, read, written, 3, 5)
    want = v.clone()
    for t in range(3):
        want = x[t] * scale + want
        assert torch.equal(y[t], want)
    assert torch.equal(final, want)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of its own, and a process that has loaded nothing."""
    base = tmp_path / "cache"
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(base))
    monkeypatch.setattr(launch_cpp, "_kernels", {})
    return base / "cpp"


def load(scale=0.5):
    made = tiny_plan(scale)
    return launch_cpp.load(made, render_cpp.render(made))


def forget(monkeypatch):
    monkeypatch.setattr(launch_cpp, "_kernels", {})


# --- the folder -----------------------------------------------------------------------------------------------------------
def test_kernel_runs_and_lies_in_the_folder(folder, counts):
    kernel = load()
    run_tiny(kernel, 0.5)
    assert kernel.path.parent == folder and counts.builds == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(kernel.path.stat().st_mode) & 0o077 == 0
    assert kernel.path.with_suffix(".cpp").read_text() == kernel.source
    assert not [p for p in folder.iterdir() if p.name.startswith("build-")]
    assert load() is kernel and counts.builds == 1


def test_a_new_process_state_loads_from_disk(folder, counts, monkeypatch):
    load()
    forget(monkeypatch)
    run_tiny(load(), 0.5)
    assert counts.builds == 1


def test_folder_that_others_can_write_is_not_used(folder, counts, monkeypatch):
    load()
    forget(monkeypatch)
    monkeypatch.setattr(launch_cache, "_private", None)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="only this user"):
        kernel = load()
    assert kernel.path.parent != folder and counts.builds == 2
    run_tiny(kernel, 0.5)


def test_folder_that_is_a_link_is_not_used(folder, counts, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_cache, "_private", None)
    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning):
        run_tiny(load(), 0.5)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path, monkeypatch, counts):
    monkeypatch.setattr(launch_cache, "_private", None)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "file"))
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="cannot make"):
        run_tiny(load(), 0.5)


def test_no_folder_from_which_kernels_may_run(folder, counts, monkeypatch):
    """As without a compiler; and no call tries again what none can do."""

    def refused(path, owner, symbol):
        raise OSError(f"{path}: failed to map segment from shared object")

    def core(x, v):
        return x * 0.6171875 + v, v

    x = torch.ones(2, 3)
    monkeypatch.setattr(launch_cache, "_private", None)
    monkeypatch.setattr(launch_cpp, "_entry_point", refused)
    with (
        pytest.warns(RuntimeWarning, match="failed to map segment"),
        pytest.raises(BackendUnavailableError, match="failed to map") as caught,
    ):
        flexsn.scan(core, [x], [None], backend="cpp")
    assert "$FLEXSN_CACHE_DIR" in caught.value.hint and "from which programs may run" in caught.value.hint
    with pytest.raises(BackendUnavailableError):
        flexsn.scan(core, [x], [None], strict=True)
    with pytest.warns(FallbackWarning, match="no place for its kernels") as seen:
        got = [flexsn.scan(core, [x], [None]).outputs[0] for _ in range(3)]
    assert len(seen) == 1 and all(torch.equal(y, x * 0.6171875) for y in got)
    assert counts.builds == 2 and not list(folder.iterdir())  # in the cache, and in the temporary folder


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o722])
def test_entry_that_others_can_write_is_not_loaded(folder, counts, monkeypatch, mode):
    path = load().path
    path.chmod(mode)
    forget(monkeypatch)
    run_tiny(load(), 0.5)
    assert counts.builds == 2 and stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_entry_that_is_a_link_is_not_loaded(folder, counts, monkeypatch, tmp_path):
    path = load().path
    path.rename(tmp_path / "moved.so")
    path.symlink_to(tmp_path / "moved.so")
    forget(monkeypatch)
    run_tiny(load(), 0.5)
    assert counts.builds == 2 and not path.is_symlink()


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "no digest", "wrong digest"])
def test_damaged_entry_is_built_anew(folder, counts, monkeypatch, damage):
    path = load().path
    whole = path.read_bytes()
    path.unlink()  # a new file: the old one is mapped into this process
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "changed":
        path.write_bytes(whole[:-100] + bytes(100))
    else:
        path.write_bytes(whole)
        digest = path.with_suffix(".sha256")
        digest.unlink() if damage == "no digest" else digest.write_text(hashlib.sha256(b"").hexdigest())
    path.chmod(0o700)
    forget(monkeypatch)
    run_tiny(load(), 0.5)
    assert counts.builds == 2 and hashlib.sha256(path.read_bytes()).hexdigest() == path.with_suffix(".sha256").read_text()


def test_what_the_key_depends_on(folder, monkeypatch):
    keys = {launch_cpp._key("a"), launch_cpp._key("b")}
    for name, value in (("_FLAGS", ("-O0",)), ("_header_text", lambda: "other"), ("_processor", lambda: "other")):
        with monkeypatch.context() as patch:
            patch.setattr(launch_cpp, name, value)
            keys.add(launch_cpp._key("a"))
    for owner, name, value in ((torch, "__version__", "0.0.0"), (launch_compiler, "identity", lambda: ("/other/g++", "1", "2"))):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.add(launch_cpp._key("a"))
    assert len(keys) == 7


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FLEXSN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert launch_cache.folder() == tmp_path / "flexsn" / "cpp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert launch_cache.folder() == tmp_path / "home" / ".cache" / "flexsn" / "cpp"


# --- other processes and threads -----------------------------------------------------------------------------------------------
CHILD = """
import torch, flexsn
from flexsn._runtime import cpp_kernel as launch_cpp

builds = []
original = launch_cpp._build
launch_cpp._build = lambda *a: builds.append(1) or original(*a)

def core(x, v, decay):
    v = v * decay + x
    return v * v, v

torch.manual_seed(0)
for T, N in ((5, 7), (20, 65)):
    x, decay = torch.randn(T, N, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    y = flexsn.scan(core, [x], [None], [decay], backend="cpp").outputs[0]
    y.sum().backward()
print(len(builds), y.sum().item(), decay.grad.item())
"""


def child(code, tmp_path, **environment):
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(code))
    env = os.environ | {"FLEXSN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_second_process_starts_warm(tmp_path):
    cold, warm = child(CHILD, tmp_path), child(CHILD, tmp_path, OMP_NUM_THREADS="1")
    assert (cold[0], warm[0]) == ("2", "0") and cold[1:] == warm[1:]


@pytest.mark.slow
def test_processes_that_build_at_once(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    env = os.environ | {"FLEXSN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [p.communicate(timeout=120) for p in started]
    assert [p.returncode for p in started] == [0, 0], results
    assert len({out.split(maxsplit=1)[1] for out, _ in results}) == 1


def test_threads_build_once(folder, counts):
    made = tiny_plan(0.25)
    source, kernels = render_cpp.render(made), []
    workers = [threading.Thread(target=lambda: kernels.append(launch_cpp.load(made, source))) for _ in range(8)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert counts.builds == 1 and len(kernels) == 8 and len(set(map(id, kernels))) == 1


def test_one_kernel_runs_in_many_threads_at_once():
    x, v, decay = torch.randn(50, 3001), torch.randn(3001), torch.tensor(0.5)
    want = flexsn.scan(leaky, [x], [v], [decay], backend="cpp").outputs[0]
    results = []

    def work():
        for _ in range(5):
            results.append(torch.equal(flexsn.scan(leaky, [x], [v], [decay], backend="cpp").outputs[0], want))

    workers = [threading.Thread(target=work) for _ in range(6)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert results == [True] * 30


@pytest.mark.parametrize("N", [1, 64, 1000, 1_000_000])
def test_tile_length(N):
    for threads in (1, 2, 7, 64):
        tile = launch_cpp.tile_length(tiny_plan(0.5), N, threads, "forward")
        tiles = -(-N // tile)
        longest = -(-tiles // threads) * tile  # neurons of the busiest thread
        assert tile % 64 == 0 and tile >= 64 and (longest <= 1.1 * N / threads + 64 or tiles <= threads)


@pytest.mark.slow
def test_forked_child_does_not_hang(tmp_path):
    code = """
    import os, signal, torch, flexsn
    torch.set_num_threads(2)
    core = lambda x, v: (x * 0.5 + v, v + x)
    x = torch.randn(5, 20000, requires_grad=True)
    def go():
        return flexsn.scan(core, [x], [None], backend="cpp").outputs[0]
    want = go()
    want.sum().backward()
    bits = want.detach().numpy().tobytes()
    pid = os.fork()  # in the child PyTorch's own parallel ops hang: no large ones there
    if pid == 0:
        signal.alarm(60)
        same = go().detach().numpy().tobytes() == bits
        flexsn.scan(lambda x, v: (x * 0.75 + v, v), [x.detach()], [None], backend="cpp")
        os._exit(0 if same else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert torch.equal(go(), want)
    """
    assert child(code, tmp_path) == ["0"]
