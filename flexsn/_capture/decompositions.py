"""How an ATen op outside the closed set is written in terms of others.

PyTorch's own decompositions serve where they round as eager does; the composites here replace those that do not, with
eager's own formulas. `torch.addcmul` stands for the FMA that eager's vector code does.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._ir.graph import HALF
from .._ir.rounding import rounding_of
from .._torch.capture import decomposition_table

aten = torch.ops.aten

# In place, without a value that changes; `vector @ matrix` ends with the first.
LAID_OUT_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default, aten.squeeze_.dim: aten.squeeze.dim, aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default, aten.t_.default: aten.t.default, aten.transpose_.default: aten.transpose.int,
}  # fmt: skip

# Identity on a step tensor if the shape stays: layout and autograd bookkeeping.
LAYOUT = {
    "aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::lift_fresh",
    "aten::contiguous", "aten::squeeze", "aten::flatten", "aten::positive", "aten::lift",
}  # fmt: skip
_OWN: dict[Any, Callable[..., Any]] = {}
_COMPOSITE = {aten.to, aten.__and__, aten.__or__, aten.__xor__}  # not in PyTorch's table, whose import takes most of a second


def _own(*overloads: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            packet, _, name = overload.partition(".")
            _OWN[getattr(getattr(aten, packet), name)] = _wide(fn)
        return fn

    return register


def _wide(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As eager: 16-bit floats are computed in float32 and rounded once, at the end."""

    @functools.wraps(fn)
    def wide(*args: Any, **kwargs: Any) -> Any:
        dtypes = {a.dtype for a in args if isinstance(a, Tensor)}
        if len(dtypes) > 1 or not dtypes <= set(HALF):
            return fn(*args, **kwargs)
        done = fn(*[a.float() if isinstance(a, Tensor) else a for a in args], **kwargs)
        return tuple(d.to(*dtypes) if d.is_floating_point() else d for d in done) if isinstance(done, tuple) else done.to(*dtypes)

    return wide


def _one_less_square(y: Tensor) -> Tensor:
    return torch.addcmul(torch.ones_like(y), y, y, value=-1)


@_own("copy.default")
def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return torch.where(torch.ones_like(target, dtype=torch.bool), source.to(target.dtype), torch.zeros_like(target))


@_own("ldexp.Tensor")
def _ldexp(x: Tensor, other: Tensor) -> Tensor:
    return x * torch.pow(2.0, other)


@_own("frac.default")
def _frac(x: Tensor) -> Tensor:
    return x - torch.trunc(x)  # before 2.13 PyTorch's own gives -0.0 for -0.0


@_own("heaviside.default")
def _heaviside(x: Tensor, values: Tensor) -> Tensor:
    return torch.where(x == 0, values, (x > 0).to(values.dtype))


@_own("isinf.default")
def _isinf(x: Tensor) -> Tensor:
    return torch.abs(x) == math.inf if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


@_own("logaddexp.default")
def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    larger = torch.maximum(x, y)
    return torch.where((x == y) & torch.isinf(x), x, larger + torch.log1p(torch.exp(-torch.abs(x - y))))


@_own("logaddexp2.default")
def _logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    larger = torch.maximum(x, y)
    spread = torch.log1p(torch.exp2(-torch.abs(x - y)))
    return torch.where((x == y) & torch.isinf(x), x, torch.add(larger, spread, alpha=1 / math.log(2)))


@_own("logit.default")
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    z = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(z / (1 - z))


@_own("round.decimals")
def _round(x: Tensor, *, decimals: int) -> Tensor:
    if decimals == 0 or not x.is_floating_point():
        return torch.round(x)
    scale = torch.full_like(x, 10.0 ** abs(decimals))  # a tensor: eager on a GPU divides here, and by a number it would multiply
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


@_own("elu.default")
def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return torch.where(x > 0, scale * x, (alpha * scale) * torch.expm1(x * input_scale))


@_own("celu.default")
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


@_own("leaky_relu.default")
def _leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


@_own("softplus.default")
def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


@_own("silu.default")
def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@_own("mish.default")
def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x))


@_own("hardsigmoid.default")
def _hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x + 3, 0, 6) / 6


@_own("hardswish.default")
def _hardswish(x: Tensor) -> Tensor:
    return x * torch.clamp(x + 3, 0, 6) / 6


@_own("hardshrink.default")
def _hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, x)


@_own("hardshrink_backward.default", "softshrink_backward.default")
def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x < -lambd) | (x > lambd), grad, 0.0)


@_own("softshrink.default")
def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, torch.where(x > 0, x - lambd, x + lambd))


@_own("hardtanh_backward.default")
def _hardtanh_backward(grad: Tensor, x: Tensor, min_val: float, max_val: float) -> Tensor:
    return torch.where((x > min_val) & (x < max_val), grad, 0.0)


@_own("hardswish_backward.default")
def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, grad * (x / 3 + 0.5)))


@_own("hardsigmoid_backward.default")
def _hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3) & (x < 3), grad * (1 / 6), 0.0)


@_own("leaky_relu_backward.default")
def _leaky_relu_backward(grad: Tensor, x: Tensor, negative_slope: float, self_is_result: bool) -> Tensor:
    return torch.where(x > 0, grad, grad * negative_slope)


@_own("softplus_backward.default")
def _softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    grown = torch.exp(x * beta)
    return torch.where(x * beta > threshold, grad, grad * grown / (grown + 1))


@_own("elu_backward.default")
def _elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    """`x`: the input, or the output if `is_result`."""
    below = alpha * scale
    curve = x + below if is_result else below * torch.exp(x * input_scale)
    return torch.where(x > 0, grad * scale, grad * input_scale * curve)


@_own("sigmoid_backward.default")
def _sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * (1 - y) * y


@_own("tanh_backward.default")
def _tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    return grad * _one_less_square(y)


@_own("silu_backward.default")
def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return grad * gate * torch.addcmul(torch.ones_like(x), x, 1 - gate)


@_own("mish_backward.default")
def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    bent = torch.tanh(torch.log1p(torch.exp(x)))
    return grad * torch.addcmul(bent, x * torch.sigmoid(x), _one_less_square(bent))


def _normal_below(x: Tensor) -> Tensor:
    """The share of a normal distribution below x: where it is small, 1 + erf cancels, on a CPU in eager too."""
    if not rounding_of(x.device).cancels_in_gelu:
        return 0.5 * torch.erfc(x * -math.sqrt(0.5))
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


@_own("gelu.default")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return x * _normal_below(x)
    beta, kappa, cube = math.sqrt(2 / math.pi), 0.044715, x * x * x
    inner = torch.add(x, cube, alpha=kappa) if rounding_of(x.device).contracts else x + kappa * cube  # nvcc contracts
    return 0.5 * x * (1 + torch.tanh(beta * inner))


@_own("gelu_backward.default")
def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        below = _normal_below(x)
        density = torch.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return grad * torch.addcmul(below, x, density)
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    bent = torch.tanh(beta * torch.add(x, square * x, alpha=kappa))
    inner = beta * torch.add(torch.ones_like(x), square, alpha=3 * kappa)
    return grad * torch.addcmul(0.5 * (1 + bent), 0.5 * x * _one_less_square(bent), inner)


@_own("log_sigmoid_forward.default")
def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    small = torch.exp(-torch.abs(x))
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(small), small


@_own("log_sigmoid_backward.default")
def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    small = torch.exp(-torch.abs(x))  # on a GPU PyTorch's `buffer` of it is empty
    share = small / (1 + small)
    return grad * torch.where(x < 0, 1 - share, share)


@_own("fake_quantize_per_tensor_affine_cachemask.default")
def _fake_quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    if not low <= zero_point <= high:
        raise RuntimeError("`zero_point` must be between `quant_min` and `quant_max`.")  # as eager
    step = ctypes.c_float(scale).value
    steps, inside = _steps(x, ctypes.c_float(1 / step).value, zero_point, low, high)
    return (steps.float() * step).to(x.dtype), inside  # in float32 also of float64, as in eager


@_own("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default")
def _fake_quantize_by_tensors(x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    step, on = scale.reshape(()), enabled.reshape(()) != 0
    steps, inside = _steps(x, 1 / step, zero_point.reshape(()), low, high)
    return torch.where(on, (steps.float() * step).to(x.dtype), x), inside | ~on


@_own("fake_quantize_per_channel_affine_cachemask.default")
def _fake_quantize_channels(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    along = [-1 if d == axis else 1 for d in range(x.dim())]
    step = scale.reshape(along)
    steps, inside = _steps(x, 1 / step, zero_point.reshape(along), low, high)
    return (steps * step).to(x.dtype), inside


def _steps(x: Tensor, per_step: Any, zero_point: Any, low: int, high: int) -> tuple[Tensor, Tensor]:
    """How many steps of the grid to the nearest value from `low` to `high`, counted from zero (NaN is the lowest), and where none is cut
    off: there the gradient passes."""
    q = torch.round((x.float() if x.dtype in HALF else x) * per_step) + zero_point
    return torch.where(q >= low, torch.clamp(q, max=high), float(low)) - zero_point, (q >= low) & (q <= high)


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """How `func` is written in terms of other ops: here, or by PyTorch, if it is."""
    if func in _OWN:
        return _OWN[func]
    if func.overloadpacket in _COMPOSITE:
        return func.decompose
    table = decomposition_table()
    if func in table:
        return table[func]
    return func.decompose if func._can_decompose() else None  # 2.11, 2.14


# --- cells, of which PyTorch has one function each: as calls of its other functions ---------------------------------------------
def _lstm_cell(x: Tensor, hx: tuple[Tensor, Tensor], w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
    h, cell = hx
    i, f, g, o = (linear(x, w, b) + linear(h, u, c)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    (r, z, n), (s, y, m) = linear(x, w, b).chunk(3, -1), linear(h, u, c).chunk(3, -1)
    z, new = torch.sigmoid(z + y), torch.tanh(n + torch.sigmoid(r + s) * m)
    return (h - new) * z + new


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        return activation(linear(x, w, b) + linear(h, u, c))

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell, torch.gru_cell: _gru_cell, torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}  # fmt: skip
