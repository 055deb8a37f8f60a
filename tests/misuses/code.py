"""What a core is: the many kinds of callables, and code that fails or is not what it seems."""

import functools
import sys
import time

import torch
from torch import nn

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, leaky, loop, passes_on, raises

misuse = group("What a core is")
AT_LINE = "PyTorch's error at the core's line"


def scan(backend, core, inputs=(X,), states=(V,), params=()):
    return flexsn.scan(core, inputs, states, params, backend=backend), None


# --- callables ---------------------------------------------------------------------------------------------------------------
@misuse("defaults that no operand fills", gives("keep their values"), triton=True)
def defaults(backend):
    def core(x, v, tau=2.0, w=torch.linspace(1, 2, 3)):  # noqa: B008
        return x * w, v + x / tau

    return both(backend, core, states=[V])


@misuse("keyword-only arguments with defaults", gives("keep their values"), slow=True)
def keyword_only(backend):
    def core(x, v, *, tau=2.0, hard=True):
        v = v + x / tau
        return v, v * 0.5 if hard else v

    return both(backend, core, states=[V])


@misuse(
    "a keyword-only argument without a default", raises(errors.OperandCountError, "keyword-only", "`tau`", "functools.partial"), triton=True
)
def keyword_only_required(backend):
    def core(x, v, *, tau):
        return x, v + x / tau

    return scan(backend, core)


@misuse("`**kwargs`", gives("empty"))
def keywords(backend):
    def core(x, v, **kwargs):
        return x, v + x * kwargs.get("gain", 3.0)

    return both(backend, core, states=[V])


@misuse("`*args`", gives("the operands"), slow=True)
def variadic(backend):
    return both(backend, lambda *args: (args[0] * 2.0, args[1] + args[0]), states=[V])


@misuse("`*args` into a module that cannot count them", raises(errors.OperandCountError, "num_inputs cannot be inferred", "pass it"))
def variadic_module(backend):
    return flexsn.FlexSN(lambda *args: args, num_states=1, backend=backend), None


@misuse("`functools.partial` with keywords", gives("bound"), slow=True)
def partial(backend):
    def core(x, v, tau, w):
        return x * w, v + x / tau

    return both(backend, functools.partial(core, tau=4.0, w=torch.ones(3)), states=[V])


@misuse("a builtin (`torch.add`) as a core", gives("works"), slow=True)
def builtin(backend):
    return both(backend, torch.add, [X, X * 2.0])


@misuse("a callable object", gives("works"), slow=True)
def callable_object(backend):
    class Core:
        gain = 2.0

        def __call__(self, x, v):
            return x * self.gain, v + x

    return both(backend, Core(), states=[V])


@misuse("a generator function", raises(errors.ReturnTypeError, "generator", "return *outputs, *new_states"), triton=True)
def generator(backend):
    def core(x, v):
        yield x
        yield v

    return scan(backend, core)


@misuse("an `async` function", raises(errors.ReturnTypeError, "coroutine", "return *outputs, *new_states"), triton=True)
def asynchronous(backend):
    async def core(x, v):
        return x, v

    return scan(backend, core)


@misuse("`exec`ed code without source", gives("works"), triton=True)
def executed(backend):
    names = {}
    exec("def core(x, v):\n    h = v + x\n    return h * 2.0, h", names)
    return both(backend, names["core"], states=[V])


@misuse(
    "`exec`ed code without source that reads a value",
    falls_back(errors.ScalarReadError, "`item` reads the value", "<string>:2"),
    triton=True,
)
def executed_read(backend):
    names = {}
    exec("def core(x, v):\n    return x - x.mean().item(), v", names)
    return both(backend, names["core"], states=[V])


@misuse("a lambda in a REPL", gives("works"), slow=True)
def repl(backend):
    return both(backend, eval(compile("lambda x, v: (x * 0.75, v - x)", "<stdin>", "eval")), states=[V])


@misuse("names that are no identifiers of C, or are its keywords", gives("renamed in the generated code"), triton=True)
def strange_names(backend):
    names = {}
    exec("def größe(int, λ):\n    double = int + λ\n    return double * 2.0, double", names)
    return both(backend, names["größe"], states=[V])


@misuse("a core under `functools.lru_cache`", gives("keeps the tensors that it met"), risky=True, slow=True)
def cached(backend):
    @functools.lru_cache
    def core(x, v):
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("a core under `torch.no_grad`", gives("no gradient flows, as in PyTorch"), slow=True)
def no_grad_core(backend):
    x = X.clone().requires_grad_()
    core = torch.no_grad()(lambda x, v: (x * 2.0, v + x))
    y = flexsn.scan(core, [x], [V], backend=backend)
    return [y.outputs[0].requires_grad, *y.outputs, *y.states], [False, *loop(core, [X], [V])]


@misuse("a core under `torch.inference_mode`", gives("no gradient flows, as in PyTorch"), slow=True)
def inference_core(backend):
    x = X.clone().requires_grad_()
    core = torch.inference_mode()(lambda x, v: (x * 2.0, v + x))
    y = flexsn.scan(core, [x], [V], backend=backend)
    return [y.outputs[0].requires_grad, y.outputs[0]], [False, X * 2.0]


@misuse("a neuron inside a core", falls_back(errors.NotElementwiseError, "`unsqueeze`"))
def nested(backend):
    def core(x, v):
        (y,), (v,) = flexsn.scan(leaky, [x[None]], [v], backend=backend)
        return y[0], v

    return flexsn.scan(core, [X], [V], backend=backend).outputs, loop(leaky, [X], [V])[:1]


@misuse("a core that calls itself without end", passes_on(RecursionError, "maximum recursion depth"), triton=True)
def recursion(backend):
    def core(x, v):
        return core(x, v)

    return scan(backend, core)


@misuse("a core that calls itself with an end", gives("works"), slow=True)
def bounded_recursion(backend):
    def power(x, n):
        return x if n == 0 else power(x, n - 1) * x

    return both(backend, lambda x, v: (power(x, 3), v), states=[V])


@misuse("a core of 3000 operations", gives("works"), slow=True)
def long_core(backend):
    def core(x, v):
        for _ in range(1000):
            v = v * 0.999 + x
        return v, v

    return both(backend, core, states=[V])


# --- errors of the core's own -----------------------------------------------------------------------------------------------------
class Mine(Exception):
    pass


@misuse("a core that raises", passes_on(Mine, "mine"), triton=True)
def raising(backend):
    def core(x, v):
        raise Mine("mine")

    return scan(backend, core)


@misuse("a core that raises NotImplementedError", passes_on(NotImplementedError, "not yet"))
def raising_not_implemented(backend):
    def core(x, v):
        raise NotImplementedError("not yet")

    return scan(backend, core)


@misuse("a core that raises from another error", passes_on(Mine, "outer"))
def raising_from(backend):
    def core(x, v):
        raise Mine("outer") from KeyError("inner")

    try:
        flexsn.scan(core, [X], [V], backend=backend)
    except Mine as error:
        assert isinstance(error.__cause__, KeyError)
        raise
    return None, None


@misuse("a core that calls `sys.exit`", passes_on(SystemExit, "3"))
def exiting(backend):
    return scan(backend, lambda x, v: sys.exit(3))


@misuse("a keyboard interrupt inside a core", passes_on(KeyboardInterrupt))
def interrupted(backend):
    def core(x, v):
        raise KeyboardInterrupt

    return scan(backend, core)


@misuse("a name that is not defined", passes_on(NameError, "undefined_name"))
def undefined(backend):
    return scan(backend, lambda x, v: (undefined_name * x, v))  # noqa: F821


@misuse("an attribute that tensors do not have", passes_on(AttributeError, "spike"))
def no_attribute(backend):
    return scan(backend, lambda x, v: (x.spike(), v))


@misuse("an argument that an operator does not take", passes_on(TypeError, "clamp"))
def bad_argument(backend):
    return scan(backend, lambda x, v: (torch.clamp(x, low=0), v))


@misuse("a method that a dtype lacks (`~` of floats)", passes_on(TypeError, "integer and Boolean", whose=AT_LINE), triton=True)
def bad_dtype(backend):
    return scan(backend, lambda x, v: (~x, v))


@misuse("an assertion on a shape that fails", passes_on(AssertionError, "four"))
def failing_assertion(backend):
    def core(x, v):
        assert x.shape[-1] == 4, "four"
        return x, v

    return scan(backend, core)


@misuse("an error in the backward of a custom `autograd.Function`", passes_on(Mine, "backward"), triton=True)
def raising_backward(backend):
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (x > 0).float()

        @staticmethod
        def backward(ctx, grad):
            raise Mine("backward")

    x = X.clone().requires_grad_()
    flexsn.scan(lambda x, v: (Spike.apply(x), v), [x], [V], backend=backend).outputs[0].sum().backward()
    return None, None


@misuse("a core that failed once, mended by a value that it reads", gives("runs"), triton=True)
def failed_before(backend):
    broken = True

    def core(x, v):
        if broken:
            raise Mine
        return x * 2.0, v + x

    try:
        flexsn.scan(core, [X], [V], backend=backend)
    except Mine:
        broken = False
    return both(backend, core, states=[V])


# --- slow, changing, elsewhere -------------------------------------------------------------------------------------------------------
@misuse("a core that sleeps", gives("works"), slow=True)
def sleeping(backend):
    def core(x, v):
        time.sleep(0.01)
        return x * 2.0, v + x

    return both(backend, core, states=[V])


@misuse("a core whose code is replaced between calls", gives("runs the new code"), triton=True)
def code_replaced(backend):
    core = lambda x, v: (x * 2.0, v + x)
    flexsn.scan(core, [X], [V], backend=backend)
    core.__code__ = (lambda x, v: (x * 7.0, v - x)).__code__
    return both(backend, core, states=[V])


@misuse("a core that reads a global that changes between calls", gives("sees the change"), triton=True)
def global_changes(backend):
    global GAIN
    core = lambda x, v: (x * GAIN, v + x)
    found, wanted = [], []
    for gain in (1.0, 5.0, 1.0):
        GAIN = gain
        got, want = both(backend, core, states=[V])
        found, wanted = found + got, wanted + want
    return found, wanted


GAIN = 0.0


@misuse("a core that reads a list that grows between calls", gives("sees the change"), slow=True)
def list_grows(backend):
    gains, found, wanted = [1.0], [], []
    core = lambda x, v: (x * sum(gains), v + x)
    for _ in range(3):
        got, want = both(backend, core, states=[V])
        found, wanted = found + got, wanted + want
        gains.append(2.0)
    return found, wanted


@misuse("a module that changes between `train()` and `eval()`", gives("sees the change"))
def training_flag(backend):
    class Core(nn.Module):
        def forward(self, x, v):
            return (x * 2.0 if self.training else x * 3.0), v

    core = Core()
    first = flexsn.scan(core, [X], [V], backend=backend).outputs
    return [first, flexsn.scan(core.eval(), [X], [V], backend=backend).outputs], [X * 2.0, X * 3.0]


@misuse("a core that behaves by shape", gives("is traced for each layout"), slow=True)
def by_shape(backend):
    def core(x, v):
        return (x * 2.0 if x.shape[-1] == 3 else x * 5.0), v

    wide = torch.ones(5, 4, 7)
    second = flexsn.scan(core, [wide], [None], backend=backend).outputs
    return [flexsn.scan(core, [X], [V], backend=backend).outputs, second], [X * 2.0, wide * 5.0]


@misuse("a core that behaves by dtype", gives("is traced for each dtype"), slow=True)
def by_dtype(backend):
    def core(x, v):
        return (x * 2.0 if x.dtype is torch.float32 else x * 5.0), v

    x = X.double()
    return [flexsn.scan(core, [t], [None], backend=backend).outputs for t in (X, x)], [X * 2.0, x * 5.0]


@misuse("the default dtype changed between calls", gives("sees the change"), slow=True)
def default_dtype(backend):
    core = lambda x: torch.ones(()) * x
    ints = torch.arange(6).view(3, 2)
    found = [flexsn.scan(core, [ints], backend=backend).outputs]
    torch.set_default_dtype(torch.float64)
    try:
        found += [flexsn.scan(core, [ints], backend=backend).outputs]
    finally:
        torch.set_default_dtype(torch.float32)
    return found, [ints.float(), ints.double()]


@misuse("a core with Python's division of a number by zero", passes_on(ZeroDivisionError, "division by zero"))
def number_by_zero(backend):
    return scan(backend, lambda x, v: (x * (1 / 0), v))


@misuse("a core with a constant of NaN and infinity", gives("as in PyTorch"), triton=True)
def not_finite(backend):
    return both(backend, lambda x, v: (x * float("inf"), v + float("nan")), states=[V])


@misuse("an integer constant that no int64 holds", passes_on(OverflowError, "int too big", whose=AT_LINE))
def huge_constant(backend):
    return scan(backend, lambda x, n: (x + 2**80, n), [torch.arange(6).view(3, 2)], [torch.tensor(0)])


@misuse("arguments called as the generated code calls its own (`T`, `N`, `i`, `tile`)", gives("kept apart"), triton=True)
def names_of_kernels(backend):
    def core(T, N, i, tile):
        n = T * 2.0
        run = N + n
        return run, run * i, i + tile, tile

    return both(backend, core, [X], [V, V + 1, V + 2])


@misuse("a core whose name is no name", gives("renamed in the generated code"), triton=True, slow=True)
def strange_core_name(backend):
    core = lambda x, v: (x * 0.5, v + x)
    core.__name__ = 'a */ b\n"c" \\'
    return both(backend, core, states=[V])


@misuse("64 states", gives("works"), slow=True)
def many_states(backend):
    return both(backend, lambda x, *v: (x + v[-1], *[0.5 * s + x for s in v]), [X], [V * k for k in range(64)])


@torch.library.custom_op("misuses::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


@misuse("an operator of the user without a fake kernel", falls_back(errors.NotElementwiseError, "`misuses.twice` is not elementwise"))
def without_fake(backend):
    return both(backend, lambda x, v: (twice(x), v), states=[V])


@misuse("the same on params alone", falls_back(errors.UnsupportedOpError, "`misuses.twice` cannot be traced", "register_fake"))
def without_fake_on_params(backend):
    return both(backend, lambda x, v, w: (x * twice(w), v), states=[V], params=[V])


@misuse("a neuron as the core of `scan`", raises(errors.ArgumentError, "FlexSN", "one step"))
def scan_of_neuron(backend):
    return flexsn.scan(flexsn.FlexSN(leaky, num_states=1), [X], backend=backend), None
