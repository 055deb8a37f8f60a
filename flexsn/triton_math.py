"""What every generated Triton kernel uses: rows of a sequence, and the functions that Triton lacks. Imports triton.

Under `TRITON_INTERPRET=1` kernels run on CPU tensors, and `libdevice` is the same functions by PyTorch.
"""

from __future__ import annotations

import os
from typing import ClassVar

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _ByTorch:
    """libdevice for the interpreter, whose tensors hold numpy arrays."""

    _NAMES: ClassVar = {
        "rint": torch.round,
        "erfcx": torch.special.erfcx,
        "normcdfinv": torch.special.ndtri,
        "ilogb": lambda x: x.frexp()[1] - 1,
    }

    def __getattr__(self, name):
        function = self._NAMES.get(name) or getattr(torch, name)

        def call(*args):
            first = next(a for a in args if isinstance(a, tl.tensor))
            dtype = _torch_dtype(first.dtype)
            arrays = [torch.as_tensor(a.handle.data if isinstance(a, tl.tensor) else a) for a in args]
            arrays = [a if name == "ldexp" and a.dtype == torch.int32 else a.to(dtype) for a in arrays]
            return _like(first, function(*arrays), tl.int32 if name == "ilogb" else first.dtype)

        return call


def _like(first: tl.tensor, data: torch.Tensor, dtype: tl.dtype) -> tl.tensor:
    return tl.tensor(type(first.handle)(data.numpy(), dtype), tl.block_type(dtype, first.shape) if first.shape else dtype)


def _torch_dtype(dtype: tl.dtype) -> torch.dtype:
    return getattr(torch, {"fp32": "float32", "fp64": "float64"}[dtype.name])


if INTERPRETED:
    libdevice = _ByTorch()
else:
    from triton.language.extra.cuda import libdevice


# --- rows of a sequence ------------------------------------------------------------------------------------------------------
@triton.jit
def read(at, N, mask, L: tl.constexpr):
    """Rows at, at + N, ... of L steps, all loads before the first use."""
    rows = ()
    for j in tl.static_range(L):
        rows = rows + (tl.load(at + j * N, mask=mask, other=0),)  # noqa: RUF005  Triton knows no starred tuples
    return rows


@triton.jit
def param(at, i, inner, count, mask):
    """A param broadcasts by index: neuron i reads element (i / inner) % count."""
    if count == 1:
        index = i * 0
    else:
        index = (i // inner) % count
    return tl.load(at + index, mask=mask, other=0)


@triton.jit
def state_at(t, checkpoint, first, given, mask):
    """The state at step t: the initial one (zero where none is given) at step 0, else its checkpoint."""
    saved = tl.load(checkpoint, mask=mask & (t > 0), other=0)
    initial = tl.load(first, mask=mask & (t == 0) & given, other=0).to(saved.dtype)
    return tl.where(t > 0, saved, initial)


# --- division, rounding as Python's or C's; a zero divisor of integers gives 0 -------------------------------------------------
@triton.jit
def div(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def trunc_div(a, b):
    if a.dtype.is_floating():
        return libdevice.trunc(div(a, b))
    else:
        return tl.where(b == 0, a - a, a // (b + (b == 0).to(b.dtype)))


@triton.jit
def fmod_int(a, b):
    return tl.where(b == 0, a - a, a % (b + (b == 0).to(b.dtype)))


@triton.jit
def floor_div_int(a, b):
    between = (fmod_int(a, b) != 0) & ((a < 0) != (b < 0))
    return trunc_div(a, b) - between.to(a.dtype)


@triton.jit
def remainder_int(a, b):
    mod = fmod_int(a, b)
    return tl.where((mod != 0) & ((mod < 0) != (b < 0)), mod + b, mod)


@triton.jit
def remainder(a, b):
    mod = libdevice.fmod(a, b)
    return tl.where((mod != 0) & ((mod < 0) != (b < 0)), mod + b, mod)


@triton.jit
def floor_div(a, b):
    """Exact where a / b would not be, as ATen's."""
    mod = libdevice.fmod(a, b)
    quotient = div(a, b)
    whole = div(a - mod, b)
    whole = tl.where((mod != 0) & ((mod < 0) != (b < 0)), whole - 1, whole)
    floor = tl.floor(whole)
    rounded = tl.where(whole - floor > 0.5, floor + 1, floor)
    result = tl.where(whole != 0, rounded, libdevice.copysign(whole - whole, quotient))
    return tl.where(b == 0, quotient, result)


@triton.jit
def pow_int(a, b):
    result = a - a + 1
    base = a
    exponent = b
    for _ in tl.static_range(b.dtype.primitive_bitwidth):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = tl.where(exponent < 0, exponent, exponent >> 1)
    odd = (b & 1) != 0
    unit = tl.where((a == 1) | ((a == -1) & (odd == 0)), a - a + 1, tl.where(a == -1, a, a - a))
    return tl.where(b < 0, unit, result)


@triton.jit
def shift_left(a, b):
    far = (b < 0) | (b >= a.dtype.primitive_bitwidth)
    return tl.where(far, a - a, a << tl.where(far, b - b, b))


@triton.jit
def shift_right(a, b):
    far = (b < 0) | (b >= a.dtype.primitive_bitwidth)
    return tl.where(far, a - a - (a < 0).to(a.dtype), a >> tl.where(far, b - b, b))


@triton.jit
def round_half(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def round_bfloat16(x):
    return x.to(tl.bfloat16).to(tl.float32)


if INTERPRETED:  # whose own conversion truncates

    def round_bfloat16(x):
        return _like(x, torch.as_tensor(x.handle.data).bfloat16().float(), tl.float32)


# --- floats ------------------------------------------------------------------------------------------------------------------------
@triton.jit
def exponent(x):
    known = (x - x == 0) & (x != 0)
    return tl.where(known, libdevice.ilogb(tl.where(known, x, x - x + 1)) + 1, 0)


@triton.jit
def mantissa(x):
    e = exponent(x)
    half = e // 2  # in two steps: 2^-e may overflow
    return libdevice.ldexp(libdevice.ldexp(x, -half), half - e)


@triton.jit
def digamma(x):
    """Reflection, recurrence to x >= 10, asymptotic series (Abramowitz & Stegun 6.3)."""
    reflected = x < 0.5
    y = tl.where(reflected, 1.0 - x, x)
    result = x - x
    for _ in tl.static_range(10):
        below = y < 10.0
        result = tl.where(below, result - div(y - y + 1.0, y), result)
        y = tl.where(below, y + 1.0, y)
    r = div(y - y + 1.0, y * y)
    series = r * (1.0 / 12 - r * (1.0 / 120 - r * (1.0 / 252 - r * (1.0 / 240 - r * (1.0 / 132 - r * (691.0 / 32760))))))
    result = result + libdevice.log(y) - div(y - y + 0.5, y) - series
    fraction = x - libdevice.trunc(x)
    pole = (fraction == 0) & (x < 0)
    mirror = result - div(x - x + 3.141592653589793, libdevice.tan(fraction * 3.141592653589793))
    result = tl.where(reflected, tl.where(pole, float("nan"), mirror), result)
    result = tl.where(x == 0, libdevice.copysign(x - x + float("inf"), -x), result)
    return tl.where(x == float("inf"), x, result)


@triton.jit
def log_ndtr(x):
    t = x * 0.7071067811865476
    left = libdevice.log(libdevice.erfcx(-t) * 0.5) - t * t
    right = libdevice.log1p(-libdevice.erfc(t) * 0.5)
    return tl.where(x < -1.0, left, right)
