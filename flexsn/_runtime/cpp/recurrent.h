// A recurrence on a CPU: at each step products of states and weights, then the kernel of one step. Threads own sequences.
#pragma once
#include <algorithm>
#include <vector>
#include "tile.h"

#define FLEXSN_RUN \
  extern "C" int run(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int flag)

namespace flexsn {

// The kernel of one step, as every generated one.
using Step = int (*)(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int large);

constexpr int64_t GROUP = 8;  // sequences that a thread steps together

// Where an array of the step lies at step t.
struct Place {
  char* base;
  char* first;       // BEFORE: at step 0
  int64_t step;      // bytes from step to step
  int64_t neuron;    // bytes from neuron to neuron; 0: the array is the same for every sequence
  enum Kind : int64_t { AT, BEFORE, SLOT, OTHER_SLOT } kind;
  char* at(int64_t t) const {
    switch (kind) {
      case BEFORE: return t == 0 ? first : base + (t - 1) * step;  // as the step before left it
      case SLOT: return base + (t & 1) * step;                     // one of two that take turns
      case OTHER_SLOT: return base + ((t + 1) & 1) * step;
      default: return base + t * step;
    }
  }
};

// rows of `to` [width] = or += rows of `from` @ w [width, width]
template <class F> struct Product {
  const F* w;
  const F* bias;
  std::vector<F> blocks;  // of `w`
  bool finite;            // else zero times a weight is not zero
  int64_t from, to, sum;  // places; `sum`, or -1: to which `to` is added
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

// Weights [width, width] block of columns by block of columns, each dense and filled up with zeros.
template <class F> std::vector<F> packed(const F* w, int64_t width) {
  constexpr int64_t J = COLUMNS<F>;
  std::vector<F> found((width + J - 1) / J * J * width, F(0));
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t i = 0; i < width; i += J) std::memcpy(&found[i * width + k * J], w + k * width + i, (width - i < J ? width - i : J) * sizeof(F));
  }
  return found;
}

template <class F> bool all_finite(const F* values, int64_t count) {
  F found = F(0);
  for (int64_t i = 0; i < count; ++i) found += values[i] - values[i];  // NaN of what is not
  return found == F(0);
}

// R rows of a product, in one block of columns of which `n` are there. Each sum runs over k in order, whatever R is.
template <class F, int R> inline void dense(const F* const* a, const F* block, F* const* out, int64_t width, int64_t i, int64_t n) {
  constexpr int J = COLUMNS<F>;
  F sum[R][J];
  for (int r = 0; r < R; ++r) for (int j = 0; j < J; ++j) sum[r][j] = j < n ? out[r][i + j] : F(0);
  for (int64_t k = 0; k < width; ++k) {
    const F* row = block + k * J;
    for (int r = 0; r < R; ++r) {
      const F x = a[r][k];
#pragma omp simd
      for (int j = 0; j < J; ++j) sum[r][j] = fused(x, row[j], sum[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) std::memcpy(out[r] + i, sum[r], n * sizeof(F));
}

// One row of a product, from the k at which it is not zero: spikes drive rows of the weights.
template <class F> inline void sparse(const F* a, const int32_t* at, int64_t count, const F* w, F* out, int64_t width) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4) {
    const F *w0 = w + at[c] * width, *w1 = w + at[c + 1] * width, *w2 = w + at[c + 2] * width, *w3 = w + at[c + 3] * width;
    const F a0 = a[at[c]], a1 = a[at[c + 1]], a2 = a[at[c + 2]], a3 = a[at[c + 3]];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += (a0 * w0[i] + a1 * w1[i]) + (a2 * w2[i] + a3 * w3[i]);
  }
  for (; c < count; ++c) {
    const F* w0 = w + at[c] * width;
    const F a0 = a[at[c]];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] = fused(a0, w0[i], out[i]);
  }
}

// A row that is mostly zero is driven by what is not; the others go together.
template <class F>
inline void product(const F* a, const Product<F>& p, F* out, int64_t rows, int64_t width, int32_t* at) {
  constexpr int64_t J = COLUMNS<F>;
  const F* from[GROUP];
  F* to[GROUP];
  int64_t left = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const F* row = a + r * width;
    F* target = out + r * width;
    if (!p.adds) for (int64_t i = 0; i < width; ++i) target[i] = p.bias ? p.bias[i] : F(0);
    int64_t count = 0;
    for (int64_t k = 0; k < width; ++k) {
      at[count] = int32_t(k);
      count += row[k] != F(0);
    }
    if (p.finite && count * 4 <= width) sparse(row, at, count, p.w, target, width);
    else from[left] = row, to[left++] = target;
  }
  for (int64_t i = 0; i < width && left; i += J) {
    const int64_t n = width - i < J ? width - i : J;
    const F* const block = p.blocks.data() + i * width;
    int64_t r = 0;
    for (; r + 8 <= left; r += 8) dense<F, 8>(from + r, block, to + r, width, i, n);
    for (; r + 4 <= left; r += 4) dense<F, 4>(from + r, block, to + r, width, i, n);
    for (; r < left; ++r) dense<F, 1>(from + r, block, to + r, width, i, n);
  }
}

// Walk over T steps of `sequences` of `width` neurons: forward products, then the step; or, back in time, the step, then products.
//   arrays: the step; of every array of it, `base` and `first`; of every product, weights and bias
//   dims: counts of arrays, of products and of the dims of the step; these dims; of every array, `step`, `neuron`, `kind`;
//         of every product, `from`, `to`, `sum`, `adds`
template <class F> int recurrent(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t sequences, int64_t width, int threads, int back) {
  const Step step = reinterpret_cast<Step>(arrays[0]);
  const int64_t places = dims[0], products = dims[1];
  const int64_t* const step_dims = dims + 3;
  const int64_t* d = step_dims + dims[2];
  std::vector<Place> place(places);
  for (int64_t p = 0; p < places; ++p, d += 3) {
    place[p] = {static_cast<char*>(arrays[1 + 2 * p]), static_cast<char*>(arrays[2 + 2 * p]), d[0], d[1], Place::Kind(d[2])};
    if (place[p].kind == Place::AT) huge_pages(place[p].base, T * place[p].step);
  }
  std::vector<Product<F>> product_of(products);
  for (int64_t p = 0; p < products; ++p, d += 4) {
    void* const* given = arrays + 1 + 2 * places + 2 * p;
    const F* const w = static_cast<const F*>(given[0]);
    product_of[p] = {w, static_cast<const F*>(given[1]), packed(w, width), all_finite(w, width * width), d[0], d[1], d[2], d[3] != 0};
  }
  const int64_t each = (sequences + threads - 1) / threads, group = each < GROUP ? (each > 0 ? each : 1) : GROUP;
  int failed = 0;
  parallel(threads, [=, &failed, &place, &product_of](int thread, int threads) {
    std::vector<void*> now(places);
    std::vector<int32_t> at(width + 1);
    const Share share(sequences, group, thread, threads);
    for (int64_t begin = share.begin; begin < share.end; begin += group) {
      const int64_t rows = share.end - begin < group ? share.end - begin : group, n = rows * width;
      const int64_t tile = n < 128 ? (n + 63) / 64 * 64 : 128;  // its scratch is cleared at every step
      const auto lies = [&](int64_t p, int64_t t) { return place[p].at(t) + begin * width * place[p].neuron; };
      const auto multiply = [&](int64_t t) {
        for (const Product<F>& p : product_of) {
          F* const to = reinterpret_cast<F*>(lies(p.to, t));
          product(reinterpret_cast<const F*>(lies(p.from, t)), p, to, rows, width, at.data());
          if (p.sum < 0) continue;
          F* const sum = reinterpret_cast<F*>(lies(p.sum, t));
          for (int64_t i = 0; i < n; ++i) sum[i] += to[i];
        }
      };
      for (int64_t s = 0; s < T; ++s) {
        const int64_t t = back ? T - 1 - s : s;
        if (!back) multiply(t);
        for (int64_t p = 0; p < places; ++p) now[p] = place[p].base ? lies(p, t) : nullptr;
        if (step(now.data(), numbers, step_dims, 1, n, tile, 1, 0)) return fail(failed);
        if (back) multiply(t);
      }
    }
  });
  return failed;
}

// Gradient of weights: out [width, columns] = the sum over rows of outer products of `a` [rows, width], most of which is zero, and
// `g` [rows, columns]; the first rows of `a` lie apart. A thread owns rows of `out`, whose sums run over the rows of `a` in order.
//   arrays: the first rows of `a`, the others, `g`, `out`; dims: how many the first are
template <class F> int outer(void* const* arrays, const int64_t* dims, int64_t rows, int64_t width, int64_t columns, int threads) {
  const F *first = static_cast<const F*>(arrays[0]), *rest = static_cast<const F*>(arrays[1]), *g = static_cast<const F*>(arrays[2]);
  F* const out = static_cast<F*>(arrays[3]);
  const int64_t apart = dims[0];
  parallel(threads, [=](int thread, int threads) {
    const int64_t begin = width * thread / threads, end = width * (thread + 1) / threads;
    for (int64_t i = begin * columns; i < end * columns; ++i) out[i] = F(0);
    for (int64_t r = 0; r < rows; ++r) {
      const F* a = r < apart ? first + r * width : rest + (r - apart) * width;
      const F* by = g + r * columns;
      for (int64_t k = begin; k < end; ++k) {
        const F x = a[k];
        if (x == F(0)) continue;
        F* to = out + k * columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) to[i] = fused(x, by[i], to[i]);
      }
    }
  });
  return 0;
}

}  // namespace flexsn
