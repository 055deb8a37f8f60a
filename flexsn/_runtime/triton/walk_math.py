"""What the Triton kernels of recurrences use: products of rows with weights, sums of rows, and how programs meet. Imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .math import INTERPRETED

WITHOUT_BFLOAT16 = tl.constexpr(INTERPRETED)  # whose numpy has none: it multiplies their bits


@triton.jit
def row_before(t, later, step, row, first, r, c, H, mask):  # noqa: PLR0913  Triton has no structures
    """A row of a state before step t: what it was after the step before, in `later`, or at the start, in `first [B, H]`."""
    at = later + (t - 1) * step + r * row + c
    return tl.load(tl.where(t > 0, at, first + r * H + c), mask=mask, other=0)


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
def arrive(counter, PROGRAMS: tl.constexpr):
    """Let the programs that share a counter know that this one is here."""
    tl.debug_barrier()
    if PROGRAMS > 1:
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter, count, PROGRAMS: tl.constexpr):
    """Wait until all programs that share a counter are here for the time `count`, from 0: what they wrote before is there for all."""
    if PROGRAMS > 1:
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
            rest = _add_parts_of_weights(rest, a, weights, PRODUCTS)
        else:
            middle = tl.load(at + B * K, mask=mask, other=0, cache_modifier=".cg")
            if PRODUCTS == 6:
                rest = _dot(tl.load(at + 2 * B * K, mask=mask, other=0, cache_modifier=".cg"), weights[0], rest)
                rest = _dot(middle, weights[1], rest)
            rest = _dot(middle, weights[0], rest)
            rest = _add_parts_of_weights(rest, a, weights, PRODUCTS)
    return _dot(a, weights[0], found), rest


@triton.jit
def own_product(a, columns, weights, start, PRODUCTS: tl.constexpr, SPIKES: tl.constexpr):
    """`a @ w` in a program that has all of both; what stands beside the `columns` is left out. The rest as of `add_product`."""
    high, middle, low = parts(tl.where(columns, a, 0.0))
    rest = tl.zeros(a.shape, tl.float32)
    if PRODUCTS > 1:
        if not (SPIKES and not start):
            if PRODUCTS == 6:
                rest = _dot(low, weights[0], rest)
                rest = _dot(middle, weights[1], rest)
            rest = _dot(middle, weights[0], rest)
        rest = _add_parts_of_weights(rest, high, weights, PRODUCTS)
    return joined(_dot(high, weights[0], tl.zeros(a.shape, tl.float32)), rest)


@triton.jit
def _add_parts_of_weights(rest, a, weights, PRODUCTS: tl.constexpr):
    """The products with all parts of weights but the largest."""
    if PRODUCTS == 6:
        rest = _dot(a, weights[2], rest)
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
        arrive(counter, PROGRAMS)
        wait(counter, count, PROGRAMS)
        p = tl.arange(0, triton.next_power_of_2(PROGRAMS))[None, :]
        every = tl.load(rows + p, mask=(r < B) & (p < PROGRAMS), other=float("-inf") if LARGEST else 0.0, cache_modifier=".cg")
        own = tl.max(every, 1, keep_dims=True) if LARGEST else tl.sum(every, 1, keep_dims=True)
    return tl.broadcast_to(own, a.shape)


@triton.jit
def _dot(a, b, found):
    if WITHOUT_BFLOAT16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, found, input_precision="ieee")
