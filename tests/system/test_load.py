"""Load: thousands of modules made and dropped leave nothing; many threads call and compile at once, and build once."""

import collections
import copy
import functools
import gc
import os
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cores import leaky, lif
from helpers import on_cpu
from torch import nn

import flexsn
from flexsn import lowlevel
from flexsn._operator import fallback
from flexsn._operator.mixing import cut
from flexsn._program import cache as caching
from flexsn._runtime import cpp_kernel as launch_cpp
from flexsn._runtime.triton import kernel as launch_triton

MiB = 1 << 20


def closure_neuron(scale=0.5, backend="auto"):
    w = nn.Parameter(torch.tensor([scale, scale, scale]))

    def core(x, v):
        v = v * w + x
        return v * v, v

    return flexsn.FlexSN(core, num_inputs=1, num_states=1, backend=backend)


class Network(nn.Module):
    """Its core is a closure over the network that holds it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(3))

        def core(x, v):
            v = v * self.w + x
            return v, v

        self.neuron = flexsn.FlexSN(core, num_inputs=1, num_states=1)

    def forward(self, x):
        return self.neuron(x)


class Callable:
    """A core that holds its own neuron."""

    def __init__(self):
        self.decay = 0.5
        self.neuron = flexsn.FlexSN(self, num_inputs=1, num_states=1)

    def __call__(self, x, v):
        v = v * self.decay + x
        return v, v


def executed():
    names = {"torch": torch}
    exec("decay = 0.5\ndef core(x, v):\n    v = v * decay + x\n    return v, v", names)
    return names["core"]


def use(module, x):
    module(x).sum().backward()


# --- nothing is left --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [closure_neuron, Network], ids=["closure", "closure over its network"])
def test_a_dropped_module_dies(make):
    module = make()
    for _ in range(2):
        use(module, torch.randn(4, 3))
        flexsn.reset_net(module)
    dead = [weakref.ref(module), *(weakref.ref(p) for p in module.parameters())]
    del module
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, v):
        return scaled(self.w, x, v)


class Viewed(Learned):
    """It sees a view of its parameter."""

    def forward(self, x, v):
        return scaled(self.w[None], x, v)


class Plain:
    def __init__(self):
        self.w = torch.tensor(0.5)

    def __call__(self, x, v):
        return scaled(self.w, x, v)


def scaled(w, x, v):
    v = v * w + x
    return v * v, v


class Mixing(Learned):
    """It runs in pieces."""

    def forward(self, x, v):
        v = scaled(self.w, x, v)[1]
        return v - v.softmax(-1) * self.w, v - v.mean(-1, keepdim=True)


def partial():
    return functools.partial(scaled, nn.Parameter(torch.tensor(0.5)))


CORES = [Callable, executed, Learned, Viewed, Mixing, Plain, partial]


@pytest.mark.parametrize("owned", [False, True], ids=["scan", "FlexSN"])
@pytest.mark.parametrize("make", CORES, ids=[make.__name__ for make in CORES])
def test_a_dropped_core_dies(make, owned):
    core = make()
    call = flexsn.FlexSN(core, num_inputs=1, num_states=1, stateful=False) if owned else None
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        y = call(x) if call else flexsn.scan(core, [x], [None]).outputs[0]
        y.sum().backward()
    dead = [weakref.ref(core), *(weakref.ref(p) for p in core.parameters())] if isinstance(core, nn.Module) else [weakref.ref(core)]
    del core, call, x, y
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


VIEWS = [
    lambda w: w[None], lambda w: w[:, None], lambda w: w.view(1, 3), lambda w: w.expand(3, 3), lambda w: w[0], lambda w: w.detach(),
    lambda w: torch.stack(w.unbind()), lambda w: torch.cat(w.split(1)), lambda w: torch.cat(w.chunk(3)[:1]), lambda w: w.data,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_a_captured_tensor_that_the_core_views_dies(view, trains):
    def attempt():
        w, held = nn.Parameter(torch.rand(3)), nn.Linear(1, 1)
        w.register_hook(lambda grad, held=held: grad)
        with torch.set_grad_enabled(trains):
            y = flexsn.scan(lambda x, v: scaled(VIEWS[view](w), x, v), [torch.randn(4, 3, 3)], [None]).outputs[0]
        if y.requires_grad:
            y.sum().backward()
        return weakref.ref(w), weakref.ref(held)

    dead = attempt()
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_the_first_call_of_a_core_that_views_a_tensor_trains_nothing(view, made_inside, mode):
    with torch.inference_mode(made_inside):
        w, x = torch.rand(3), torch.randn(4, 3, 3)

    def run(backend):
        return flexsn.scan(lambda x, v: scaled(VIEWS[view](w), x, v), [x], [None], backend=backend).outputs[0]

    with mode():
        assert torch.equal(run("auto"), run("torch"))


@pytest.mark.parametrize(
    ("dtype", "calls"), [(torch.bfloat16, 1), (torch.float32, cut._MOST + 1)], ids=["in half precision", "of too many calls that mix"]
)
def test_a_refused_core_dies_and_its_error_is_the_same_again(dtype, calls):
    def attempt(w):
        def core(x, v):
            h = 2 * v
            for _ in range(calls):
                h = h - h.mean() * w
            return x - h, v

        found = []
        for _ in range(2):
            with pytest.raises(flexsn.errors.NotElementwiseError) as caught:
                flexsn.scan(core, [torch.randn(2, 3, dtype=dtype)], [None], strict=True)
            found.append(caught.value)
        assert found[0] is not found[1] and str(found[0]) == str(found[1]) and vars(found[0]) == vars(found[1])
        return weakref.ref(core), weakref.ref(w)

    dead = attempt(torch.ones(3, dtype=dtype))
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_a_wrapper_does_not_take_what_its_function_reads():
    def decorated(function):
        @functools.wraps(function)
        def wrapper(x, v):
            y, v = function(x, v)
            return y + gain, v

        gain = torch.tensor(float(len(vars(function)) + 1))
        return wrapper

    x = torch.randn(3, 2)
    core = lambda x, v: (x, v)
    for _ in range(3):
        want = flexsn.scan(core, [x], [None], backend="torch").outputs[0]
        assert torch.equal(flexsn.scan(core, [x], [None]).outputs[0], want)
        core = decorated(core)


def caches():
    """Entries of everything in flexsn that is kept between calls."""
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "flexsn"]
    things = {f"{m.__name__}.{n}": thing for m in modules for n, thing in vars(m).items() if not n.startswith("__")}
    things |= {f"flexsn._program.cache.PROGRAMS.{n}": table for n, table in vars(caching.PROGRAMS).items()}
    kinds = collections.abc.MutableMapping, collections.abc.MutableSequence, collections.abc.MutableSet
    tables = {name: len(thing) for name, thing in things.items() if isinstance(thing, kinds)}
    memories = {name: thing.cache_info().currsize for name, thing in things.items() if hasattr(thing, "cache_parameters")}
    assert {
        "flexsn._program.cache.PROGRAMS.exact",
        "flexsn._runtime.cpp_kernel._kernels",
        "flexsn._captured.captured_values._looks",
        "flexsn._operator.library._launches",
    } <= set(tables)
    assert {"flexsn.lowlevel.source._loaded", "flexsn._operator.fallback._warned"} <= set(
        tables
    ) and "flexsn._torch.availability.moved" in memories
    return tables | memories


def footprint():
    gc.collect()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "libraries": sum(".so" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        **caches(),
    }


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_and_drop(count, every):
    x = torch.randn(5, 3)
    for k in range(count):
        module = closure_neuron() if k % 2 else copy.deepcopy(closure_neuron())
        if k % every == 0:
            use(module, x)
            if k % 50 == 0:
                use(Network(), x)


@pytest.mark.parametrize(("count", "every"), [(10_000, 20), pytest.param(10_000, 1, marks=pytest.mark.slow)])
def test_modules_made_and_dropped_leave_nothing(count, every):
    """`every` so many, one is called and differentiated."""
    make_and_drop(200, 1)
    launch_triton.finish_builds()  # the tiles that a GPU may need later
    before, memory_before = footprint(), resident()
    make_and_drop(count, every)
    assert footprint() == before
    grown = resident() - memory_before
    assert grown < 4 * MiB + 100 * count, f"{grown / count:.0f} bytes per module stayed"


@on_cpu
def test_kernels_that_no_program_uses_are_unloaded(monkeypatch):
    """Also: distinct cores without end do not fill the table of mapped files."""
    monkeypatch.setattr(caching, "_SIZE", 2)
    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())
    kept = closure_neuron()
    x = torch.randn(4, 3)
    paths = []
    for k in range(4):
        names = {}
        exec(f"def core_{k}(x, v):\n    v = v * 0.12345 + x\n    return v, v", names)  # a kernel of its own, as its text has the name
        flexsn.scan(names[f"core_{k}"], [x], [None])
        program, _ = list(caching.PROGRAMS.exact.values())[-1]
        paths += [kernel.path.name for kernel in program._kernels.values()]
        del names, program
    use(kept, x)
    gc.collect()
    mapped = Path("/proc/self/maps").read_text()
    assert len(set(paths)) == 4
    assert [path in mapped for path in paths[:2]] == [False, False]


def test_programs_of_one_layout_are_bounded(monkeypatch):
    """A core that depends on its size needs a program per size."""
    monkeypatch.setattr(caching, "_MOST_CANDIDATES", 3)
    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())

    def core(x, v):
        return x * float(x.shape[0]), v

    for n in (2, 3, 4, 5, 6, 7):
        x = torch.randn(3, n)
        assert torch.equal(flexsn.scan(core, [x], [None]).outputs[0], x * n)
    assert [len(candidates) for candidates in caching.PROGRAMS.by_layout.values()] == [3]


def test_sources_of_steps_that_nobody_holds_are_dropped():
    for k in range(3):
        function = lowlevel.compile_triton_code_str(f"@triton.jit\ndef core_{k}(x):\n    return x * {k}\n", f"core_{k}")
        assert function is lowlevel.compile_triton_code_str(f"@triton.jit\ndef core_{k}(x):\n    return x * {k}\n", f"core_{k}")
    dead = weakref.ref(function)
    gc.collect()
    held = caches()["flexsn.lowlevel.source._loaded"]
    del function
    gc.collect()
    assert dead() is None and caches()["flexsn.lowlevel.source._loaded"] < held


def test_reasons_that_were_said_are_bounded(monkeypatch):
    monkeypatch.setattr(fallback, "_MOST", 3)
    for k in (0, 1, 1, 2, 3, 4, 5, 6):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fallback.warn_once("the eager loop", ValueError(str(k)))
        assert len(fallback._warned) <= 3 and str(k) in str(sorted(fallback._warned))
        assert len(said) == 1 or k == 1


# --- many threads ---------------------------------------------------------------------------------------------------------
def at_once(jobs):
    """Run functions in a thread each, released together; their results, in order."""
    barrier = threading.Barrier(len(jobs))

    def run(job):
        torch.set_num_threads(1)
        barrier.wait(60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result(120) for f in [pool.submit(run, job) for job in jobs]]


@pytest.fixture
def cold(counts, tmp_path, monkeypatch):
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("FLEXSN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(launch_cpp, "_kernels", weakref.WeakValueDictionary())
    return counts


def test_64_threads_on_one_module():
    module = closure_neuron()
    inputs = [torch.randn(20, 50, 3) for _ in range(64)]
    want = [flexsn.scan(module.core, [x], [None], backend="torch").outputs[0] for x in inputs]

    def job(x):
        return [module.run((x,), (None,), False)[0][0] for _ in range(3)]

    found = at_once([functools.partial(job, x) for x in inputs])
    assert all(torch.equal(y, w) for ys, w in zip(found, want, strict=True) for y in ys)


@on_cpu
def test_64_threads_that_compile_the_same_core_build_once(cold):
    def core(x, v):
        v = v * 0.53125 + x
        return v * v, v

    x = torch.randn(20, 65)
    (want,) = flexsn.scan(core, [x], [None], backend="torch").outputs
    want_grad = 2.0 * want.detach()

    def job():
        own = x.clone().requires_grad_()
        (y,) = flexsn.scan(core, [own], [None]).outputs
        torch.autograd.backward(y, want_grad)
        return y.detach(), own.grad

    found = at_once([job] * 64)
    assert cold.programs == 1 and cold.builds == 2  # forward and backward
    assert all(torch.equal(y, want) and torch.equal(g, found[0][1]) for y, g in found)


@on_cpu
def test_threads_that_compile_different_cores_build_each_once(cold):
    def core_of(k):
        def core(x, v):
            v = v * (0.25 + k / 64) + x
            return v * v, v

        core.__name__ = f"core_{k}"  # is part of the text of its kernel
        return core

    cores = [core_of(k) for k in range(3)]
    x = torch.randn(20, 65)
    want = [flexsn.scan(core, [x], [None], backend="torch").outputs[0] for core in cores]
    jobs = [functools.partial(flexsn.scan, cores[k % 3], [x], [None]) for k in range(64)]
    found = at_once(jobs)
    assert cold.builds == 3
    assert all(torch.equal(result.outputs[0], want[k % 3]) for k, result in enumerate(found))


def test_threads_that_wait_for_a_failing_build_all_hear_why(cold, monkeypatch):
    def fail(source, path):
        cold.builds += 1
        raise flexsn.errors.BuildError("no luck", hint="try again")

    monkeypatch.setattr(launch_cpp, "_build", fail)

    def job():
        with pytest.raises(flexsn.errors.BuildError, match="no luck") as caught:
            flexsn.scan(leaky, [torch.ones(2, 3)], [None], [torch.tensor(0.5)])
        return caught.value

    found = at_once([job] * 16)
    assert all(error.hint == "try again" for error in found) and len(set(map(id, found))) == 16
    assert launch_cpp._builds == {}


@on_cpu
def test_an_interrupted_build_is_taken_over(cold, monkeypatch):
    build, first, started = launch_cpp._build, [True], threading.Event()

    def interrupted_once(source, path):
        if first:
            first.clear()
            started.set()
            waiting.wait(60)
            raise KeyboardInterrupt
        build(source, path)

    monkeypatch.setattr(launch_cpp, "_build", interrupted_once)
    waiting, caught = threading.Event(), []
    x = torch.randn(4, 3)

    def work():
        return flexsn.scan(leaky, [x], [None], [torch.tensor(0.5)]).outputs[0]

    def interrupted():
        try:
            work()
        except KeyboardInterrupt as error:
            caught.append(error)

    thread = threading.Thread(target=interrupted)
    thread.start()
    assert started.wait(60)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        waiting.set()
        want = flexsn.scan(leaky, [x], [None], [torch.tensor(0.5)], backend="torch").outputs[0]
        assert torch.equal(result.result(60), want)
    thread.join(60)
    assert len(caught) == 1


def test_threads_train_networks_of_their_own():
    def job(seed):
        generator = torch.Generator().manual_seed(seed)
        w = nn.Parameter(torch.rand(3, generator=generator))
        x = torch.randn(10, 8, 3, generator=generator)
        found = []
        for backend in ("auto", "torch"):
            w.grad = None
            (y,) = flexsn.scan(lif, [x], [None], [w + 1.5, torch.tensor(0.5)], backend=backend).outputs
            (y * x).sum().backward()
            found.append((y.detach(), w.grad))
        return found

    for (y, grad), (want, want_grad) in at_once([functools.partial(job, k) for k in range(16)]):
        assert torch.equal(y, want)
        torch.testing.assert_close(grad, want_grad)


def test_a_core_that_is_a_closure_over_its_network():
    """PyTorch's walks over modules end, and a copy has parameters of its own."""
    net = Network()
    x = torch.randn(4, 3)
    net.eval().train()
    assert list(net.state_dict()) == ["w"] and "FlexSN" in repr(net)
    net.load_state_dict({"w": torch.full((3,), 0.25)})
    assert [name for name, _ in net.named_parameters()] == ["w"]
    seen = []
    net.apply(lambda module: seen.append(type(module).__name__))
    assert seen.count("Network") == 1
    use(net, x)
    assert net.w.grad is not None and torch.equal(net.neuron.states[0], flexsn.scan(net.neuron.core, [x], [None]).states[0])
    flexsn.reset_net(net)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.w.fill_(0.75)
    flexsn.reset_net(other)
    assert not torch.equal(other(x), net(x))
    use(other.double(), x.double())
    assert other.w.grad.dtype == torch.float64 and net.w.dtype == torch.float32
