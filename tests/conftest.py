"""A private cache of kernels for the whole run, shared by xdist workers, and fixtures that several files use."""

import collections
import dataclasses
import os
import shutil
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # whatever pytest's import mode

import folders

# a compiler that another thread starts holds the lock of a file that is open meanwhile, for a moment after it is closed
os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")

sys.path[:0] = map(str, folders.ALL)  # `cores`, `helpers`, and test modules that others import

_made: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the operands of the tests are made")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/* from what the renderer gives now")


def spare_the_interpreter():
    """Triton's interpreter does much anew at every op, and would take half of the time of these tests: it patches its whole language at
    every call of a device function, makes a table of dtypes, adds integers once more to see whether they overflow, and spells out types."""
    try:
        import triton.language.core as language
        from triton.runtime import interpreter
    except ImportError:
        return
    patching, patched = interpreter.InterpretedFunction.__call__, set()

    def call(function, *args, **kwargs):
        module = function.fn.__module__
        if (
            module.startswith("triton.") and module not in patched
        ):  # the first of each patches for all; the kernel itself has patched the rest
            patched.add(module)
            return patching(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    numpy_dtypes, of_numpy = {}, interpreter._get_np_dtype

    def numpy_dtype(type):
        name = type.scalar.name
        return numpy_dtypes[name] if name in numpy_dtypes else numpy_dtypes.setdefault(name, of_numpy(type.scalar))

    shapes, whole = {}, language.tensor.__init__

    def tensor(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            whole(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    blocks, block_whole = {}, language.block_type.__init__

    def block_type(self, element, shape):
        key = element.name, *[getattr(n, "value", n) for n in shape]
        if key not in blocks:
            block_whole(self, element, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = numpy_dtype
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    language.tensor.__init__, language.block_type.__init__ = tensor, block_type


def pytest_configure(config):
    if config.getoption("--device") == "cuda":
        torch.set_default_device("cuda")
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: `backend="triton"` takes CPU tensors
        spare_the_interpreter()
    if hasattr(config, "workerinput"):  # an xdist worker inherits the environment of the main process
        torch.set_num_threads(1)
        return
    folder = tempfile.mkdtemp(prefix="flexsn-tests-")
    _made.append(folder)
    os.environ["FLEXSN_CACHE_DIR"] = folder


QUICK_CASES = 2
SLOW_CASES = 3


def spread(cases, count):
    """Return so many of the cases, from the first to the last."""
    return cases if len(cases) <= count else [cases[round(k * (len(cases) - 1) / (count - 1))] for k in range(count)]


def mark_most_cases_slow(items):
    """Of a test with many cases, `make test` runs the first and the last, `make test-slow` three others, and `make test-full` all."""
    tests = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        quick = spread(cases, QUICK_CASES)
        others = [item for item in cases if item not in quick]
        slow = spread(others, SLOW_CASES)
        for item in others:
            item.add_marker(pytest.mark.slow if item in slow else pytest.mark.full)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config, items):
    mark_most_cases_slow(items)
    if config.getoption("--device") == "cpu":  # where Triton interprets
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="runs on a GPU alone: make test-gpu"))


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        while _made:
            shutil.rmtree(_made.pop())


@pytest.fixture(scope="session")
def update_golden(request):
    return request.config.getoption("--update-golden")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    """Warnings that flexsn gives once per process come in each test anew, whatever ran before."""
    from flexsn._operator import fallback

    monkeypatch.setattr(fallback, "_warned", set())


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """To Dynamo all neurons are one function, which it compiles a limited number of times."""
    yield
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a first reset imports
            torch._dynamo.reset()


@pytest.fixture
def threads():
    """A function that sets the number of threads; restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class _PoisonedTorch(types.ModuleType):
    """`torch`, but `empty_strided` gives memory full of NaN (or of a wrong number), so that an unwritten element shows."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty_strided(*args, **kwargs):
        fresh = torch.empty_strided(*args, **kwargs)
        if fresh.dtype.is_floating_point:
            return fresh.fill_(float("nan"))
        return fresh.fill_(True if fresh.dtype is torch.bool else 77)


@pytest.fixture
def poison(monkeypatch):
    """Every tensor that a kernel has to fill starts as NaN."""
    from flexsn._runtime import memory

    monkeypatch.setattr(memory, "torch", _PoisonedTorch("torch"))
    made = memory.allocator(torch.device("cpu"), (3,), (1,), torch.float32)()
    assert made.isnan().all(), "flexsn._runtime.memory allocates otherwise; adapt this fixture"


@pytest.fixture(autouse=True)
def _poisoned(request):
    """On the CPU in every test: no result may rest on what memory held before."""
    if request.config.getoption("--device") == "cpu":
        request.getfixturevalue("poison")


class Counts:
    """How many programs were captured, and how many kernels the compiler built."""

    def __init__(self):
        self.programs = self.builds = 0


@pytest.fixture
def counts(monkeypatch):
    from flexsn._program import cache as caching
    from flexsn._program import compiled as compiling
    from flexsn._runtime import cpp_kernel as launch_cpp

    monkeypatch.setattr(caching, "PROGRAMS", caching.Programs())  # other tests may have captured the same core
    found = Counts()
    make, build = compiling.Program.__init__, launch_cpp._build

    def counted_program(self, *args, **kwargs):
        found.programs += 1
        make(self, *args, **kwargs)

    def counted_build(*args, **kwargs):
        found.builds += 1
        build(*args, **kwargs)

    monkeypatch.setattr(compiling.Program, "__init__", counted_program)
    monkeypatch.setattr(launch_cpp, "_build", counted_build)
    return found


@pytest.fixture
def run(capsys):
    """A command line -> exit code, what it printed, what it complained of."""

    from flexsn._cli import main

    def command(*words):
        try:
            code = main([str(w) for w in words])
        except SystemExit as stop:  # argparse
            code = stop.code
        done = capsys.readouterr()
        return code, done.out, done.err

    return command
