"""What every generated Triton kernel uses: rows of a sequence, and the functions that Triton lacks. Imports triton.

Under `TRITON_INTERPRET=1` kernels run on CPU tensors, and `libdevice` is the same functions by PyTorch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret


class _ByTorch:
    """libdevice for the interpreter, whose tensors hold numpy arrays."""

    _NAMES: ClassVar = {
        "rint": torch.round,
        "round_bfloat16": lambda x: x.bfloat16().float(),
        "fma": lambda a, b, c: torch.addcmul(c, a, b),
        "erfcx": torch.special.erfcx,
        "fmod": lambda a, b: torch.from_numpy(np.fmod(a.numpy(), b.numpy())),  # Sleef's gives NaN where a / b overflows
        "normcdfinv": torch.special.ndtri,
    }

    def __getattr__(self, name):
        function = self._NAMES.get(name) or getattr(torch, name)

        def call(*args):
            widest = max(args, key=lambda a: len(a.shape))
            data = self._whole(function, torch.broadcast_tensors(*(torch.as_tensor(a.handle.data) for a in args)))
            dtype = widest.dtype
            return tl.tensor(type(widest.handle)(data.numpy(), dtype), tl.block_type(dtype, widest.shape) if widest.shape else dtype)

        return call

    @staticmethod
    def _whole(function, tensors):
        """On whole vectors: PyTorch computes the last elements of a row by other code, with other last bits."""
        shape = tensors[0].shape
        rows = [torch.cat([t.flatten(), t.new_ones(-t.numel() % 64)]) for t in tensors]
        return function(*rows)[: shape.numel()].reshape(shape)


if INTERPRETED:
    libdevice = _ByTorch()
else:
    from triton.language.extra.cuda import libdevice


# --- rows of a sequence ------------------------------------------------------------------------------------------------------
@triton.jit
def read(at, N, mask, count, L: tl.constexpr):
    """Rows at, at + N, ... of `count` steps, zeros up to L, all loads before the first use. (`!= 0` makes bools of a mask, which
    Triton 3.9's interpreter wants: comparisons of numbers are none there.)"""
    rows = ()
    for j in tl.static_range(L):
        rows = rows + (tl.load(at + j * N, mask=(mask & (j < count)) != 0, other=0),)  # noqa: RUF005  Triton knows no starred tuples
    return rows


@triton.jit
def index(i, N, inner, count):
    """A param broadcasts by index: neuron i reads element (i / inner) % count. In 32 bits where they hold N, which a GPU divides
    several times as fast."""
    if count == 1:
        element = i * 0
    elif N > 2147483647:  # the largest int32, which N is in the interpreter: Triton 3.9 compares it with no larger number
        element = (i // inner) % count
    elif inner == 1:
        element = (i.to(tl.uint32) % count.to(tl.uint32)).to(tl.int64)
    else:
        element = (i.to(tl.uint32) // inner.to(tl.uint32) % count.to(tl.uint32)).to(tl.int64)
    return element


@triton.jit
def index_or(known, same, i, N, inner, count):
    """`index` of another param, whose sizes may be the same."""
    if same:
        element = known
    else:
        element = index(i, N, inner, count)
    return element


@triton.jit
def state_at(t, checkpoint, first, given, mask):
    """The state at step t: the initial one (zero where none is given) at step 0, else its checkpoint."""
    saved = tl.load(checkpoint, mask=(mask & (t > 0)) != 0, other=0)
    initial = tl.load(first, mask=(mask & (t == 0) & given) != 0, other=0).to(saved.dtype)
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
    below = tl.floor(whole)
    rounded = tl.where(whole - below > 0.5, below + 1, below)
    result = tl.where(whole != 0, rounded, libdevice.copysign(whole - whole, quotient))
    return tl.where(b == 0, quotient, result)


@triton.jit
def pow_int(a, b):
    result = a - a + 1
    base = a
    left = b
    BITS: tl.constexpr = b.dtype.primitive_bitwidth
    for _ in tl.static_range(BITS):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
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


@triton.jit
def fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def fmax(a, b):
    return tl.maximum(a, b)


@triton.jit
def fmin(a, b):
    return tl.minimum(a, b)


if INTERPRETED:  # which truncates to bfloat16, rounds a fma twice, and takes NaN for the larger and the smaller value
    round_bfloat16 = _ByTorch().round_bfloat16
    fma, fmax, fmin = _ByTorch().fma, _ByTorch().fmax, _ByTorch().fmin


# --- floats ------------------------------------------------------------------------------------------------------------------------
@triton.jit
def neg(x):
    """Triton's own is 0 - x, which is 0 of 0."""
    return x * -1


@triton.jit
def frexp(x):
    """By the bits: libdevice's function writes one of its results to memory."""
    if x.dtype == tl.float32:
        small = tl.abs(x) < 1.1754943508222875e-38
        bits = tl.where(small, x * 18446744073709551616.0, x).to(tl.int32, bitcast=True)
        power = ((bits >> 23) & 255) - 126
        part = ((bits & -2139095041) | 1056964608).to(tl.float32, bitcast=True)
    else:
        small = tl.abs(x) < 2.2250738585072014e-308
        bits = tl.where(small, x * 18446744073709551616.0, x).to(tl.int64, bitcast=True)
        power = ((bits >> 52) & 2047).to(tl.int32) - 1022
        part = ((bits & -9218868437227405313) | 4602678819172646912).to(tl.float64, bitcast=True)
    known = (x - x == 0) & (x != 0)
    return tl.where(known, part, x), tl.where(known, tl.where(small, power - 64, power), 0)


@triton.jit
def mantissa(x):
    part, _ = frexp(x)
    return part


@triton.jit
def exponent(x):
    _, power = frexp(x)
    return power


@triton.jit
def digamma(x):
    """As ATen's: reflection, recurrence to x >= 10, asymptotic series (Abramowitz & Stegun 6.3)."""
    one = x - x + 1.0
    whole = libdevice.rint(x)
    mirror = -div(one * 3.141592653589793, libdevice.tan((x - whole) * 3.141592653589793))
    y = tl.where(x < 0, 1.0 - x, x)
    result = tl.where(x < 0, mirror, 0.0)
    for _ in tl.static_range(10):
        below = y < 10.0
        result = tl.where(below, result - div(one, y), result)
        y = tl.where(below, y + 1.0, y)
    r = div(one, y * y)
    series = r * (1.0 / 12 - r * (1.0 / 120 - r * (1.0 / 252 - r * (1.0 / 240 - r * (1.0 / 132 - r * (691.0 / 32760))))))
    far = libdevice.log(y) - div(one * 0.5, y) - series
    result = tl.where(y == 10.0, one * 2.251752589066721, far) + result
    result = tl.where((x < 0) & (x == whole), float("nan"), result)
    result = tl.where(x == 0, libdevice.copysign(one * float("inf"), neg(x)), result)
    return tl.where(x == float("inf"), x, result)


@triton.jit
def log_ndtr(x):
    t = x * 0.7071067811865476
    left = libdevice.log(libdevice.erfcx(-t) * 0.5) - t * t
    right = libdevice.log1p(libdevice.erfc(t) * -0.5)
    return tl.where(x < -1.0, left, right)
