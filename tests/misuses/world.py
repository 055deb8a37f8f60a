"""What a core does to the world around it, and what the world does to a call: random numbers, globals, clocks, files, modes."""

import builtins
import os
import random
import threading
import time

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, leaky, loop, passes_on, raises

misuse = group("The world around a core")
AT_LINE = "PyTorch's error at the core's line"


# --- randomness, clocks, the world ---------------------------------------------------------------------------------------------------
@misuse("`torch.rand_like`", falls_back(errors.RandomOpError, "draws random numbers", "one more input [T, *shape]"), triton=True)
def random_torch(backend):
    def core(x, v):
        return x + torch.rand_like(x), v

    torch.manual_seed(1)
    got = flexsn.scan(core, [X], [V], backend=backend).outputs
    torch.manual_seed(1)
    return got, loop(core, [X], [V])[:1]


@misuse("Python's `random.random()`", falls_back(errors.RandomOpError, "`random`"))
def random_python(backend):
    core = lambda x, v: (x + random.random(), v)
    random.seed(1)
    got = flexsn.scan(core, [X], [V], backend=backend).outputs
    random.seed(1)
    return got, loop(core, [X], [V])[:1]


@misuse("numpy's random numbers", falls_back(errors.RandomOpError, "numpy"))
def random_numpy(backend):
    core = lambda x, v: (x + float(np.random.rand()), v)
    np.random.seed(1)
    got = flexsn.scan(core, [X], [V], backend=backend).outputs
    np.random.seed(1)
    return got, loop(core, [X], [V])[:1]


@misuse("`torch.manual_seed` in a core", gives("seeds when the core is traced"), slow=True)
def seeds(backend):
    def core(x, v):
        torch.manual_seed(0)
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("a global that the core counts up", falls_back(errors.SideEffectError, "changes `COUNT`", "is a state"), triton=True)
def counts_global(backend):
    global COUNT
    COUNT = 0

    def core(x, v):
        global COUNT
        COUNT += 1
        return x * COUNT, v

    return flexsn.scan(core, [X], [V], backend=backend).outputs, X * torch.arange(1.0, 6.0).view(5, 1, 1)


COUNT = 0


@misuse("a list that the core appends tensors to", falls_back(errors.SideEffectError, "changes `kept`", "is a state"))
def appends(backend):
    kept = []

    def core(x, v):
        kept.append(x)
        return x + kept[0], v

    return flexsn.scan(core, [X], [V], backend=backend).outputs, X + X[:1]


@misuse("an attribute that keeps a tensor from step to step", falls_back(errors.SideEffectError, "is a state"))
def keeps_tensor(backend):
    class Core(torch.nn.Module):
        v = 0.0

        def forward(self, x):
            self.v = self.v * 0.5 + x
            return self.v

    want, v = [], torch.zeros(4, 3)
    for x in X:
        v = v * 0.5 + x
        want.append(v)
    return flexsn.scan(Core(), [X], backend=backend).outputs, torch.stack(want)


@misuse("a dict with a cache of tensors", falls_back(errors.SideEffectError, "is a state"))
def caches(backend):
    cache = {}

    def core(x, v):
        if "w" not in cache:
            cache["w"] = torch.ones(3) * 2.0
        return x * cache["w"], v + x

    return both(backend, core, states=[V], plain=lambda x, v: (x * 2.0, v + x))


@misuse("a clock (`time.time()`) as a value", falls_back(errors.RandomOpError, "computes with other numbers each time it runs"))
def clock(backend):
    return both(backend, lambda x, v: (x + 1e-12 * time.perf_counter(), v + x), states=[V])


@misuse("a decision by a clock", gives("is made when the core is traced"), torch=gives("is made at every step"))
def clock_decides(backend):
    return both(backend, lambda x, v: (x * float(time.time() > 0), v + x), states=[V])


@misuse("a generator of random numbers made in a core", falls_back(errors.RandomOpError, "computes with other numbers each time it runs"))
def generator_made_inside(backend):
    return both(backend, lambda x, v: (x + 1e-9 * np.random.default_rng().random(), v + x), states=[V])


@misuse(
    "an environment variable that changes between calls",
    gives("is frozen when the core is traced"),
    torch=gives("is read at every step"),
    slow=True,
)
def environment(backend):
    core = lambda x: x * float(os.environ["FLEXSN_GAIN"])
    found = []
    for gain in ("2", "3"):
        os.environ["FLEXSN_GAIN"] = gain
        found += flexsn.scan(core, [X], backend=backend).outputs
    del os.environ["FLEXSN_GAIN"]
    return found, [X * 2.0, X * (3.0 if backend == "torch" else 2.0)]


@misuse("a file read in a core", gives("is read when the core is traced"), slow=True)
def reads_file(backend):
    def core(x, v):
        with open(os.devnull) as file:
            return x * float(len(file.read()) + 2), v + x

    return both(backend, core, states=[V])


@misuse("a thread started in a core", gives("works"), slow=True)
def thread_inside(backend):
    def core(x, v):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("`torch.set_default_dtype` in a core", falls_back(errors.SideEffectError, "default dtype"))
def sets_default_dtype(backend):
    def core(x, v):
        torch.set_default_dtype(torch.float64)
        return x * torch.tensor(2.0), v + x

    try:
        got = flexsn.scan(core, [X], [V], backend=backend).outputs
    finally:
        torch.set_default_dtype(torch.float32)
    return got, X * 2.0


@misuse("`torch.set_grad_enabled(False)` in a core", falls_back(errors.SideEffectError, "grad mode"))
def sets_grad_mode(backend):
    def core(x, v):
        torch.set_grad_enabled(False)
        return x * 2.0, v + x

    try:
        got = flexsn.scan(core, [X.clone().requires_grad_()], [V], backend=backend).outputs[0].detach()
    finally:
        torch.set_grad_enabled(True)
    return got, X * 2.0


@misuse("`torch.autocast` in a core", gives("as in PyTorch"), slow=True)
def autocast_inside(backend):
    def core(x, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x * 2.0, v + x

    return both(backend, core, states=[V])


# --- modes around a call -----------------------------------------------------------------------------------------------------------
class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@misuse("a call under a `__torch_function__` mode", gives("works"), triton=True)
def function_mode(backend):
    with Counting():
        return both(backend, leaky, [X], [V])


class Tripled(TorchFunctionMode):
    """Changes what a product means."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.0 + 1.0 if func is torch.sigmoid else result


@misuse("a mode that changes an operator", gives("is applied when the core is traced"), slow=True)
def changing_mode(backend):
    core = lambda x, v: (torch.sigmoid(x), v + x)
    with Tripled():
        return both(backend, core, states=[V])


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@misuse("a call under a `__torch_dispatch__` mode", gives("works"))
def dispatch_mode(backend):
    with Passing():
        return both(backend, leaky, [X], [V])


@misuse(
    '`torch.set_default_device("meta")` around a call',
    passes_on(RuntimeError, "meta", whose="PyTorch's error at the core's line"),
    cpp=raises(errors.UnsupportedOpError, "`ones` gives a tensor on the meta device"),
)
def default_device(backend):
    core = lambda x, v: (x * torch.ones(3), v + x)
    with torch.device("meta"):
        return both(backend, core, states=[V])


@misuse("an attribute of a Python module that the core sets and nothing reads", gives("is set when the core is traced"), slow=True)
def rebinds(backend):
    def core(x, v):
        builtins.flexsn_last = 1
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("numbers of a captured numpy generator", falls_back(errors.RandomOpError, "a generator of numpy"))
def random_numpy_generator(backend):
    def drawn(run):
        generator = np.random.default_rng(1)
        return run(lambda x, v: (x + float(generator.random()), v))

    return drawn(lambda core: flexsn.scan(core, [X], [V], backend=backend).outputs), drawn(lambda core: loop(core, [X], [V])[:1])


@misuse("numbers of a captured `random.Random`", falls_back(errors.RandomOpError, "random.Random"))
def random_instance(backend):
    def drawn(run):
        generator = random.Random(1)
        return run(lambda x, v: (x + generator.random(), v))

    return drawn(lambda core: flexsn.scan(core, [X], [V], backend=backend).outputs), drawn(lambda core: loop(core, [X], [V])[:1])


@misuse("outputs whose shape changes from step to step", raises(errors.ReturnTypeError, "float32[4, 3] at the first step", "float32[1, 3] at a later one"),
        cpp=raises(errors.SideEffectError, "changes `COUNT`"))  # fmt: skip
def shape_changes(backend):
    global COUNT
    COUNT = 0

    def core(x, v):
        global COUNT
        COUNT += 1
        return (x if COUNT < 3 else x[:1]), v

    return flexsn.scan(core, [X], [V], backend=backend), None


@misuse("another number of outputs from step to step", raises(errors.ReturnTypeError, "at the first step", "at a later one"),
        cpp=raises(errors.SideEffectError, "changes `COUNT`"))  # fmt: skip
def count_changes(backend):
    global COUNT
    COUNT = 0

    def core(x, v):
        global COUNT
        COUNT += 1
        return (x, v) if COUNT < 3 else (x, x, v)

    return flexsn.scan(core, [X], [V], backend=backend), None


@misuse("`torch.set_num_threads` in a core", gives("is set when the core is traced"), slow=True)
def sets_threads(backend):
    threads = torch.get_num_threads()

    def core(x, v):
        torch.set_num_threads(1)
        return x * 2.0, v + x

    try:
        return both(backend, core, states=[V])
    finally:
        torch.set_num_threads(threads)
