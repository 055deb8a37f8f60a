"""Autograd used in ways that fail in PyTorch, or that a kernel does not serve."""

import threading
import warnings

import torch
from torch import nn

import flexsn
from flexsn import errors

from . import V, X, both, falls_back, gives, group, leaky, loop, passes_on, raises, slopes, total

misuse = group("Gradients")
PYTORCH = "PyTorch's error"


def run(backend, core=leaky, states=(V,)):
    x = X.clone().requires_grad_()
    result = flexsn.scan(core, [x], states, backend=backend)
    return x, [*result.outputs, *result.states]


@misuse("backward twice", passes_on(RuntimeError, "backward through the graph a second time", whose=PYTORCH), triton=True)
def twice(backend):
    _, found = run(backend, lambda x, v: (torch.tanh(x), v + x))
    loss = total(found)
    loss.backward()
    loss.backward()
    return None, None


@misuse("backward twice of an output's sum, of which PyTorch saves nothing", raises(errors.FreedGraphError, "a second time", "retain_graph"),
        torch=passes_on(RuntimeError, "backward through the graph a second time", whose=PYTORCH))  # fmt: skip
def twice_alone(backend):
    _, found = run(backend)
    for _ in range(2):
        found[0].sum().backward()
    return None, None


@misuse("backward twice with `retain_graph=True`", gives("the same gradients again"), triton=True)
def retained(backend):
    x, found = run(backend)
    loss = total(found)
    first = torch.autograd.grad(loss, [x], retain_graph=True)
    return torch.autograd.grad(loss, [x]), first


@misuse("a second derivative", gives("works"), triton=True)
def second_derivative(backend):
    x, found = run(backend, lambda x, v: (x * x * x, v + x))
    (grad,) = torch.autograd.grad(found[0].sum(), [x], create_graph=True)
    return torch.autograd.grad(grad.sum(), [x]), 6.0 * X


@misuse("a batch of cotangents at once", gives("works"), triton=True)
def batch_of_cotangents(backend):
    x, found = run(backend, lambda x, v: (x * x, v + x))
    return torch.autograd.grad(found[0], [x], torch.ones(2, *x.shape), is_grads_batched=True), (2.0 * X).expand(2, *X.shape)


@misuse("backward from an output that is no scalar", passes_on(RuntimeError, "scalar outputs", whose=PYTORCH))
def not_scalar(backend):
    run(backend)[1][0].backward()
    return None, None


@misuse("a cotangent of the wrong shape", passes_on(RuntimeError, "Mismatch in shape", whose=PYTORCH))
def cotangent_shape(backend):
    run(backend)[1][0].backward(torch.ones(2))
    return None, None


@misuse("a cotangent of another dtype", gives("is cast"), slow=True)
def cotangent_dtype(backend):
    x, found = run(backend, lambda x, v: (x * 2.0, v))
    return torch.autograd.grad(found[0], [x], torch.ones(5, 4, 3, dtype=torch.float64)), torch.full_like(X, 2.0)


@misuse("a cotangent of stride 0", gives("works"), triton=True)
def cotangent_expanded(backend):
    x, found = run(backend)
    y = loop(leaky, [(w := X.clone().requires_grad_())], [V])
    ones = torch.ones(()).expand(5, 4, 3)
    return torch.autograd.grad(found[0], [x], ones), torch.autograd.grad(y[0], [w], ones)


@misuse("backward of a bool or integer output", passes_on(RuntimeError, "does not require grad", whose=PYTORCH))
def integer_output(backend):
    run(backend, lambda x, v: (x > 0, v + x))[1][0].sum().backward()
    return None, None


@misuse("backward under `torch.no_grad` of the call", passes_on(RuntimeError, "does not require grad", whose=PYTORCH))
def no_grad(backend):
    with torch.no_grad():
        _, found = run(backend)
    total([found[0].requires_grad_(False) + 0.0]).backward() if found[0].requires_grad else found[0].sum().backward()
    return None, None


@misuse("gradients with respect to nothing that requires grad", passes_on(RuntimeError, "does not require grad", whose=PYTORCH))
def nothing_requires_grad(backend):
    flexsn.scan(leaky, [X], [V], backend=backend).outputs[0].sum().backward()
    return None, None


@misuse("inference tensors without gradients", gives("works"), triton=True)
def inference(backend):
    with torch.inference_mode():
        x, v = X.clone(), V.clone()
    return both(backend, leaky, [x], [v])


@misuse("a call inside `torch.inference_mode`", gives("works"), triton=True)
def inside_inference(backend):
    with torch.inference_mode():
        return both(backend, leaky, [X.clone()], [V])


@misuse("inference tensors in a call that needs gradients", gives("a kernel saves copies"),
        torch=passes_on(RuntimeError, "Inference tensors cannot be saved for backward", whose=PYTORCH), triton=True)  # fmt: skip
def inference_saved(backend):
    with torch.inference_mode():
        x = X.clone()
    w = torch.ones(3, requires_grad=True)
    flexsn.scan(lambda x: x * w, [x], backend=backend).outputs[0].sum().backward()
    return w.grad, X.sum((0, 1))


@misuse("a tensor hook on an output", gives("sees the gradient"), slow=True)
def hook_on_output(backend):
    x, found = run(backend, lambda x, v: (x * 2.0, v))
    found[0].register_hook(lambda g: g * 3.0)
    return torch.autograd.grad(found[0].sum(), [x]), torch.full_like(X, 6.0)


@misuse("a tensor hook on an output, where only states lead back",
        gives("called with None, as by PyTorch's own ops of several outputs"), torch=gives("not called"))  # fmt: skip
def hook_without_gradient(backend):
    x, found = run(backend, lambda x, v: (x * 2.0, v + x))
    seen = []
    found[0].register_hook(lambda g: seen.append(g is None))
    return (torch.autograd.grad(found[1].sum(), [x]), seen), (torch.ones_like(x), [True] * (backend != "torch"))


@misuse("a hook that raises in the backward", passes_on(KeyError, "mine", whose="the hook's own error"))
def raising_hook(backend):
    def hook(grad):
        raise KeyError("mine")

    x, found = run(backend)
    x.register_hook(hook)
    total(found).backward()
    return None, None


@misuse("a hook registered inside a core", gives("is part of the core's gradient"), slow=True)
def hook_inside(backend):
    def core(x, v):
        h = x * 2.0
        if h.requires_grad:
            h.register_hook(lambda g: g * 3.0)
        return h, v + x

    x, found = run(backend, core)
    return torch.autograd.grad(found[0].sum(), [x]), torch.full_like(X, 6.0)


@misuse("backward in another thread", gives("works"), slow=True)
def other_thread(backend):
    x, found = run(backend)
    thread = threading.Thread(target=total(found).backward)
    thread.start()
    thread.join()
    w = X.clone().requires_grad_()
    return x.grad, slopes(loop(leaky, [w], [V]), [w])


@misuse("only the final state enters the loss", gives("its gradients"))
def state_only(backend):
    x, found = run(backend)
    w = X.clone().requires_grad_()
    return torch.autograd.grad(found[1].sum(), [x]), torch.autograd.grad(loop(leaky, [w], [V])[1].sum(), [w])


@misuse("a captured param that no output depends on", gives("no gradient, or zeros"), triton=True)
def unreached(backend):
    w = nn.Parameter(torch.ones(3))

    def core(x, v):
        w * 2.0
        return x * 2.0, v + x

    x, found = run(backend, core)
    grads = torch.autograd.grad(total(found), [x, w], allow_unused=True)
    return [grads[0].shape, grads[1] is None or not grads[1].any()], [X.shape, True]


@misuse("a param that is frozen between calls", gives("gets no gradient from then on"), slow=True)
def frozen(backend):
    w = nn.Parameter(torch.full((3,), 2.0))
    core = lambda x: x * w
    x = X.clone().requires_grad_()
    flexsn.scan(core, [x], backend=backend).outputs[0].sum().backward()
    w.grad, w.requires_grad = None, False
    x.grad = None
    flexsn.scan(core, [x], backend=backend).outputs[0].sum().backward()
    return [w.grad is None, x.grad], [True, torch.full_like(X, 2.0)]


@misuse("forward-mode AD", gives("works"))
def forward_mode(backend):
    with torch.autograd.forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script")  # PyTorch imports its JVP decompositions
        x = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        y = flexsn.scan(lambda x: x * x, [x], backend=backend).outputs[0]
        return torch.autograd.forward_ad.unpack_dual(y).tangent, 2.0 * X


# --- autograd inside a core -------------------------------------------------------------------------------------------------------
@misuse("`torch.autograd.grad` inside a core", gives("is traced through"), triton=True)
def grad_inside(backend):
    def core(x, v):
        with torch.enable_grad():
            h = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(h * h * h, h, torch.ones_like(h))
        return slope, v + x

    return both(backend, core, states=[V])


@misuse(
    "`torch.autograd.grad` by an operand inside a core",
    falls_back(errors.UnsupportedOpError, "differentiates by `grad` inside the core", "autograd.Function"),
)
def grad_by_operand_inside(backend):
    x = X.clone().requires_grad_()
    core = lambda x, v: (torch.autograd.grad(x * x * x, x, torch.ones_like(x), create_graph=True)[0], v + 1.0)
    return both(backend, core, [x], [V], wrt=[x])


@misuse("`.backward()` inside a core", falls_back(errors.InPlaceError, "`copy_` writes", ".backward("))
def backward_inside(backend):
    def core(x, v):
        with torch.enable_grad():
            h = x.detach().requires_grad_()
            (h * h).backward(torch.ones_like(h))
        return h.grad, v + x

    return both(backend, core, states=[V])


@misuse("`torch.func.grad` inside a core", falls_back(errors.NotElementwiseError, "`sum`"), triton=True)
def functorch_inside(backend):
    slope = torch.func.grad(lambda h: (h * h).sum())
    return both(backend, lambda x, v: (slope(x), v + x), states=[V])


@misuse("`torch.vmap` inside a core", gives("is traced through"), slow=True)
def vmap_inside(backend):
    double = torch.vmap(lambda h: h * 2.0)
    return both(backend, lambda x, v: (double(x), v + x), states=[V])


@misuse("`requires_grad_()` of an operand inside a core", gives("changes nothing"), slow=True)
def requires_grad_inside(backend):
    return both(backend, lambda x, v: (x.detach().requires_grad_() * 2.0, v + x), states=[V])


@misuse("`torch.utils.checkpoint` inside a core", gives("works"), slow=True)
def checkpoint_inside(backend):
    from torch.utils.checkpoint import checkpoint

    x = X.clone().requires_grad_()
    core = lambda x, v: (checkpoint(torch.tanh, x, use_reentrant=False), v + x)
    return both(backend, core, [x], [V], wrt=[x])


@misuse("a `torch.compile`d function inside a core", gives("is traced through"), slow=True)
def compile_inside(backend):
    double = torch.compile(lambda h: h * 2.0, backend="eager")
    return both(backend, lambda x, v: (double(x), v + x), states=[V])


@misuse("a TorchScript function as a core", gives("works"), risky=True)
def script(backend):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.trace")  # PyTorch's own
        core = torch.jit.trace(lambda x, v: (x * 2.0, v + x), (X[0], V))
    return both(backend, core, states=[V])
