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
WITHOUT_BFLOAT16 = tl.constexpr(INTERPRETED)  # whose numpy has none: it multiplies their bits


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


# --- products of rows with weights ------------------------------------------------------------------------------------------
@triton.jit
def parts(x):
    """Three bfloat16 whose sum is x; a value that is not finite lies in the first."""
    high = x.to(tl.bfloat16)
    rest = tl.where(tl.abs(high.to(tl.float32)) < float("inf"), x - high.to(tl.float32), 0.0)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def weights(w, c, H: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr):
    """Columns c of weights `[H, H]`: three parts of each of the blocks of KB rows, of KP in all."""
    found = ()
    for block in tl.static_range(KP // KB):
        k = block * KB + tl.arange(0, KB)[:, None]
        found = found + (parts(tl.load(w + k * H + c, mask=(k < H) & (c < H), other=0)),)  # noqa: RUF005  Triton knows no starred tuples
    return found


@triton.jit
def meet(counter, count, PROGRAMS: tl.constexpr):
    """Wait until all programs that share a counter are here for the time `count`, from 0: what they wrote before is there for all."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < (count + 1) * PROGRAMS:
            pass
        tl.debug_barrier()


@triton.jit
def share(rows, B, K: tl.constexpr, column, a, mask, PRODUCTS: tl.constexpr):
    """Write some columns of what a product takes, in parts, to `rows` of `[3, B, K]`."""
    high, middle, low = parts(a)
    tl.store(rows + column, high, mask=mask)
    if PRODUCTS > 1:
        tl.store(rows + B * K + column, middle, mask=mask)
    if PRODUCTS == 6:
        tl.store(rows + 2 * B * K + column, low, mask=mask)


@triton.jit
def split(w, into, column, K: tl.constexpr, W: tl.constexpr, KB: tl.constexpr, columns):
    """Write some columns of weights `[K, W]`, from `column` on, in parts to `into [3, K, W]`."""
    for first in range(0, K, KB):
        k = first + tl.arange(0, KB)[:, None]
        mask = (k < K) & columns
        high, middle, low = parts(tl.load(w + k * W + column, mask=mask, other=0))
        tl.store(into + k * W + column, high, mask=mask)
        tl.store(into + (K + k) * W + column, middle, mask=mask)
        tl.store(into + (2 * K + k) * W + column, low, mask=mask)
    tl.debug_barrier()


@triton.jit
def read_weights(w, k, column, K: tl.constexpr, W: tl.constexpr, columns):
    """Three parts of rows k, from `column` on, of weights that `split` wrote."""
    mask, at = (k < K) & columns, w + k * W + column
    return tl.load(at, mask=mask, other=0), tl.load(at + K * W, mask=mask, other=0), tl.load(at + 2 * K * W, mask=mask, other=0)


@triton.jit
def add_product(  # noqa: PLR0913  Triton has no structures
    found, rest, rows, B, K: tl.constexpr, k, r, weights, start, PRODUCTS: tl.constexpr, SPIKES: tl.constexpr
):  # fmt: skip
    """Add `a @ w` to `found`, of the largest parts, and to `rest`, of the others: of columns k of `a`, which lies in parts in `rows` of
    `[3, B, K]`, and of three parts of these rows of w. PRODUCTS: of bfloat16 for one of float32: six, which is its rounding, three, or
    one. SPIKES: `a` is 0 or 1, but at the start of a call, which may have any."""
    mask, at = (r < B) & (k < K), rows + k
    a = tl.load(at, mask=mask, other=0, cache_modifier=".cg")
    if PRODUCTS > 1:
        if SPIKES and not start:
            if PRODUCTS == 6:
                rest = _dot(a, weights[2], rest)
            rest = _dot(a, weights[1], rest)
        else:
            rest = _add_rest(rest, a, at, B * K, mask, weights, PRODUCTS)
    return _dot(a, weights[0], found), rest


@triton.jit
def _add_rest(rest, a, at, part, mask, weights, PRODUCTS: tl.constexpr):
    """All products of parts but the largest."""
    middle = tl.load(at + part, mask=mask, other=0, cache_modifier=".cg")
    if PRODUCTS == 6:
        rest = _dot(tl.load(at + 2 * part, mask=mask, other=0, cache_modifier=".cg"), weights[0], rest)
        rest = _dot(middle, weights[1], rest)
        rest = _dot(a, weights[2], rest)
    rest = _dot(middle, weights[0], rest)
    return _dot(a, weights[1], rest)


@triton.jit
def joined(found, rest):
    """What `add_product` found: an infinite value is in the largest parts, and times a zero of others no number."""
    return tl.where(tl.abs(found) < float("inf"), found + rest, found)


@triton.jit
def total(  # noqa: PLR0913  Triton has no structures
    a, scratch, counter, count, r, c, B, H: tl.constexpr, PROGRAMS: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """The sum of a row, or its largest value, at every column: that of each program's columns goes through `scratch [2, B, H]`."""
    if LARGEST:
        own = tl.max(tl.where(c < H, a, float("-inf")), 1, keep_dims=True)
    else:
        own = tl.sum(tl.where(c < H, a, 0.0), 1, keep_dims=True)
    if PROGRAMS > 1:
        rows = scratch + (count % 2) * B * H + r * H
        tl.store(rows + tl.program_id(1), own, mask=r < B)
        meet(counter, count, PROGRAMS)
        p = tl.arange(0, triton.next_power_of_2(PROGRAMS))[None, :]
        every = tl.load(rows + p, mask=(r < B) & (p < PROGRAMS), other=float("-inf") if LARGEST else 0.0, cache_modifier=".cg")
        own = tl.max(every, 1, keep_dims=True) if LARGEST else tl.sum(every, 1, keep_dims=True)
    return tl.broadcast_to(own, a.shape)


@triton.jit
def _dot(a, b, found):
    if WITHOUT_BFLOAT16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, found, input_precision="ieee")


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
