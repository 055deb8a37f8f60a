// Products of rows with weights, dense ones and such that spikes drive, and the gradients of weights.
#pragma once
#include <algorithm>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include "tile.h"

#define FLEXSN_RUN \
  extern "C" int run(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int flag)

namespace flexsn {

constexpr int64_t GROUP = 32;  // sequences that a thread steps together

// Values that begin where a line of the cache does, so that no vector of them lies in two.
template <class F> class Aligned {
  struct alignas(64) Line { F values[64 / sizeof(F)]; };
  std::vector<Line> lines_;

 public:
  explicit Aligned(int64_t count = 0) : lines_(count * sizeof(F) / 64 + 1, Line{}) {}
  F* data() { return lines_[0].values; }
  const F* data() const { return lines_[0].values; }
};

// rows of `to` [columns] = or += rows of `from` [width] @ w [width, columns]
template <class F> struct Product {
  const F* w;
  const F* bias;
  Aligned<F> blocks;  // of `w`
  bool finite;      // else zero times a weight is not zero
  int64_t from, to, width, columns;
  bool adds;
};

template <class F> inline F fused(F a, F b, F c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Columns that a block of a product takes: a cache line or two of every row.
template <class F> constexpr int64_t COLUMNS = 128 / sizeof(F);

// Weights [width, columns] block of columns by block of columns, each dense and filled up with zeros.
template <class F> Aligned<F> packed(const F* w, int64_t width, int64_t columns) {
  constexpr int64_t J = COLUMNS<F>;
  Aligned<F> found((columns + J - 1) / J * J * width);
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t i = 0; i < columns; i += J) {
      std::memcpy(found.data() + i * width + k * J, w + k * columns + i, (columns - i < J ? columns - i : J) * sizeof(F));
    }
  }
  return found;
}

template <class F> bool all_finite(const F* values, int64_t count) {
  F found = F(0);
  for (int64_t i = 0; i < count; ++i) found += values[i] - values[i];  // NaN of what is not
  return found == F(0);
}

constexpr int64_t DEPTH = 128;  // rows of a block of weights that stay in the first cache while all rows of values go by

// Add to R sums the products of R values, at each of `depth` steps of `next` values, with one row of a block, row by row in order.
template <class F, int R> inline void accumulate(F (&sum)[R][COLUMNS<F>], const F* values, int64_t next, const F* block, int64_t depth) {
  constexpr int J = COLUMNS<F>;
  for (int64_t k = 0; k < depth; ++k) {
    const F* row = block + k * J;
    for (int r = 0; r < R; ++r) {
      const F x = values[k * next + r];
#pragma omp simd
      for (int j = 0; j < J; ++j) sum[r][j] = fused(x, row[j], sum[r][j]);
    }
  }
}

// R rows of a product, in one block of columns, of which `n` are there: add what `depth` interleaved values of each row make.
template <class F, int R> inline void dense(const F* values, const F* block, F* const* out, int64_t depth, int64_t i, int64_t n) {
  constexpr int J = COLUMNS<F>;
  F sum[R][J] = {};
  const auto each = [&](auto move) {
    if (n == J) for (int r = 0; r < R; ++r) move(out[r] + i, sum[r], J);  // of a size that the compiler knows: one load or two
    else for (int r = 0; r < R; ++r) move(out[r] + i, sum[r], n);
  };
  each([](const F* from, F* to, int64_t n) { std::memcpy(to, from, n * sizeof(F)); });
  accumulate<F, R>(sum, values, R, block, depth);
  each([](F* to, const F* from, int64_t n) { std::memcpy(to, from, n * sizeof(F)); });
}

// Write `depth` values of R rows, from the k-th on: the first of each row, the second of each, and so on.
template <class F, int R> ONCE void interleave(const F* const* from, int64_t k, int64_t depth, F* values) {
  for (int64_t d = 0; d < depth; ++d) for (int r = 0; r < R; ++r) values[d * R + r] = from[r][k + d];
}

// Rows by eights, by fours, and one by one. `work(R, r)` takes R rows from the r-th on.
template <class Work> inline void by_rows(int64_t rows, Work&& work) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) work(std::integral_constant<int, 8>(), r);
  for (; r + 4 <= rows; r += 4) work(std::integral_constant<int, 4>(), r);
  for (; r < rows; ++r) work(std::integral_constant<int, 1>(), r);
}

// Rows of a product of dense values. Each sum runs over k in order, whatever rows stand beside.
template <class F> inline void dense_rows(const F* const* from, F* const* to, int64_t rows, const F* blocks, int64_t width, int64_t columns) {
  constexpr int64_t J = COLUMNS<F>;
  alignas(64) F values[GROUP * DEPTH];
  for (int64_t k = 0; k < width; k += DEPTH) {
    const int64_t depth = std::min(DEPTH, width - k);
    by_rows(rows, [&](auto R, int64_t r) { interleave<F, R>(from + r, k, depth, values + r * depth); });
    for (int64_t i = 0; i < columns; i += J) {
      const F* const block = blocks + i * width + k * J;
      by_rows(rows, [&](auto R, int64_t r) { dense<F, R>(values + r * depth, block, to + r, depth, i, std::min(J, columns - i)); });
    }
  }
}

// Find where a row is not zero: `at`, which has room for 16 more; returns how many places that are.
template <class F> inline int64_t nonzero(const F* row, int64_t width, int32_t* at) {
  int64_t count = 0, k = 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; k + 16 <= width && std::is_same_v<F, float>; k += 16) {
    const __mmask16 there = _mm512_cmp_ps_mask(_mm512_loadu_ps(row + k), _mm512_setzero_ps(), _CMP_NEQ_UQ);
    _mm512_storeu_si512(at + count, _mm512_maskz_compress_epi32(there, _mm512_add_epi32(lanes, _mm512_set1_epi32(int(k)))));
    count += __builtin_popcount(there);
  }
#endif
  for (; k < width; ++k) {
    at[count] = int32_t(k);
    count += row[k] != F(0);
  }
  return count;
}

// One row of a product, from the k at which it is not zero: spikes drive rows of the weights.
template <class F> inline void sparse(const F* a, const int32_t* at, int64_t count, const F* w, F* out, int64_t columns) {
  int64_t c = 0;
  const auto row = [&](int64_t q) { return w + at[c + q] * columns; };
  const auto by = [&](int64_t q) { return a[at[c + q]]; };
  for (; c + 8 <= count; c += 8) {
    const F *w0 = row(0), *w1 = row(1), *w2 = row(2), *w3 = row(3), *w4 = row(4), *w5 = row(5), *w6 = row(6), *w7 = row(7);
    const F a0 = by(0), a1 = by(1), a2 = by(2), a3 = by(3), a4 = by(4), a5 = by(5), a6 = by(6), a7 = by(7);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const F first = fused(a0, w0[i], a1 * w1[i]) + fused(a2, w2[i], a3 * w3[i]);
      out[i] += first + (fused(a4, w4[i], a5 * w5[i]) + fused(a6, w6[i], a7 * w7[i]));
    }
  }
  for (; c + 2 <= count; c += 2) {
    const F *w0 = row(0), *w1 = row(1);
    const F a0 = by(0), a1 = by(1);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] += fused(a0, w0[i], a1 * w1[i]);
  }
  if (c < count) {
    const F* w0 = row(0);
    const F a0 = by(0);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] = fused(a0, w0[i], out[i]);
  }
}

// A row that is mostly zero is driven by what is not; the others go together. `a`, `out`: rows of the first sequence and bytes to the next.
template <class F>
inline void product(const Product<F>& p, const char* a, int64_t next, char* out, int64_t next_out, int64_t rows, int32_t* at) {
  const F* from[GROUP];
  F* to[GROUP];
  int64_t left = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const F* const row = reinterpret_cast<const F*>(a + r * next);
    F* const target = reinterpret_cast<F*>(out + r * next_out);
    if (!p.adds) for (int64_t i = 0; i < p.columns; ++i) target[i] = p.bias ? p.bias[i] : F(0);
    const int64_t count = nonzero(row, p.width, at);
    if (p.finite && count * 4 <= p.width) sparse(row, at, count, p.w, target, p.columns);
    else from[left] = row, to[left++] = target;
  }
  if (left) dense_rows(from, to, left, p.blocks.data(), p.width, p.columns);
}

// R rows of a gradient of weights, in one block of columns: add the sum of the outer products of `count` rows of values and of a block.
template <class F, int R> inline void add_outer(const F* values, int64_t next, const F* block, F* out, int64_t count) {
  constexpr int J = COLUMNS<F>;
  F sum[R][J] = {};
  accumulate<F, R>(sum, values, next, block, count);
  for (int r = 0; r < R; ++r) for (int j = 0; j < J; ++j) out[r * J + j] += sum[r][j];
}

// One row of it, where most values are zero: from the `count` others, and the rows of the block with which they meet.
template <class F> inline void add_outer_sparse(const F* values, const int32_t* at, int64_t count, const F* block, F* out) {
  constexpr int J = COLUMNS<F>;
  typedef F Half __attribute__((vector_size(64), may_alias));  // GCC makes slow gathers of a loop over J here
  Half* const to = reinterpret_cast<Half*>(out);
  Half first = to[0], second = to[1];
  for (int64_t c = 0; c < count; ++c) {
    const Half* const row = reinterpret_cast<const Half*>(block + at[c] * J);
    first += values[c] * row[0], second += values[c] * row[1];
  }
  to[0] = first, to[1] = second;
}

// Gradient of weights: out [width, columns] = the sum over rows of outer products of `a` [rows, width] and `g` [rows, columns]; the first
// rows of `a` lie apart. A thread owns rows of `out`, whose sums run over the rows of `a` in order.
//   arrays: the first rows of `a`, the others, `g`, `out`; dims: how many the first are, whether most of `a` is zero
template <class F> int outer(void* const* arrays, const int64_t* dims, int64_t rows, int64_t width, int64_t columns, int threads) {
  const F *first = static_cast<const F*>(arrays[0]), *rest = static_cast<const F*>(arrays[1]), *g = static_cast<const F*>(arrays[2]);
  F* const out = static_cast<F*>(arrays[3]);
  const int64_t apart = dims[0];
  const bool mostly_zero = dims[1] != 0;
  parallel(threads, [=](int thread, int threads) {
    constexpr int64_t J = COLUMNS<F>, M = 128;  // rows that a block of `g` has
    const int64_t begin = width * thread / threads, end = width * (thread + 1) / threads, own = end - begin;
    Aligned<F> block(M * J), sums((columns + J - 1) / J * J * own);  // block of columns by block of columns
    std::vector<F> values(mostly_zero ? own * M : 0);  // up to M that are not zero for each row of `out`, and their rows of `a` in `at`
    std::vector<int32_t> at(mostly_zero ? own * M : 0), counts(own), there(own + 16);
    for (int64_t r = 0, count; r < rows; r += count) {
      const F* const a = (r < apart ? first + r * width : rest + (r - apart) * width) + begin;
      count = std::min(M, (r < apart ? apart : rows) - r);
      std::fill(counts.begin(), counts.end(), 0);
      for (int64_t m = 0; m < count && mostly_zero; ++m) {
        for (int64_t c = 0, found = nonzero(a + m * width, own, there.data()); c < found; ++c) {
          const int64_t k = there[c], place = k * M + counts[k]++;
          at[place] = int32_t(m), values[place] = a[m * width + k];
        }
      }
      for (int64_t i = 0; i < columns; i += J) {
        const int64_t n = std::min(J, columns - i);
        for (int64_t m = 0; m < count; ++m) std::memcpy(block.data() + m * J, g + (r + m) * columns + i, n * sizeof(F));
        F* const to = sums.data() + i * own;
        for (int64_t k = 0; k < own && mostly_zero; ++k) add_outer_sparse(&values[k * M], &at[k * M], counts[k], block.data(), to + k * J);
        if (!mostly_zero) by_rows(own, [&](auto R, int64_t k) { add_outer<F, R>(a + k, width, block.data(), to + k * J, count); });
      }
    }
    for (int64_t i = 0; i < columns; i += J) {
      for (int64_t k = 0; k < own; ++k) std::memcpy(out + (begin + k) * columns + i, sums.data() + i * own + k * J, std::min(J, columns - i) * sizeof(F));
    }
  });
  return 0;
}

}  // namespace flexsn
