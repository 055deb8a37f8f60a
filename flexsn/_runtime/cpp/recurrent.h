// A recurrence on a CPU: at each step kernels of one step, products, and what else mixes the neurons of a sequence. Threads own sequences.
#pragma once
#include <algorithm>
#include <vector>
#include "tile.h"

FLEXSN_EXP

#define FLEXSN_RUN \
  extern "C" int run(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int flag)

namespace flexsn {

// A kernel of one step, as every generated one.
using Step = int (*)(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int large);

constexpr int64_t GROUP = 32;  // sequences that a thread steps together

// Where an array lies at step t.
struct Place {
  char* base;
  char* first;       // BEFORE: at step 0
  int64_t step;      // bytes from step to step
  int64_t row;       // bytes from sequence to sequence; 0: the array is the same for all of them
  enum Kind : int64_t { AT, BEFORE, SLOT, OTHER_SLOT } kind;
  char* at(int64_t t, int64_t sequence) const {
    char* const found = kind == BEFORE ? (t == 0 ? first : base + (t - 1) * step)  // as the step before left it
        : kind == SLOT ? base + (t & 1) * step                                     // one of two that take turns
        : kind == OTHER_SLOT ? base + ((t + 1) & 1) * step : base + t * step;
    return found + sequence * row;
  }
};

// A kernel of one step. Where an array is a part of wider rows it runs row by row.
struct Kernel {
  Step run;
  const double* numbers;
  const int64_t *dims, *places;  // a place of -1 is none
  int64_t count, width;
  bool dense;
};

// rows of `to` [columns] = or += rows of `from` [width] @ w [width, columns]
template <class F> struct Product {
  const F* w;
  const F* bias;
  std::vector<F> blocks;  // of `w`
  bool finite;            // else zero times a weight is not zero
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
template <class F> std::vector<F> packed(const F* w, int64_t width, int64_t columns) {
  constexpr int64_t J = COLUMNS<F>;
  std::vector<F> found((columns + J - 1) / J * J * width, F(0));
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t i = 0; i < columns; i += J) {
      std::memcpy(&found[i * width + k * J], w + k * columns + i, (columns - i < J ? columns - i : J) * sizeof(F));
    }
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
template <class F> inline void sparse(const F* a, const int32_t* at, int64_t count, const F* w, F* out, int64_t columns) {
  int64_t c = 0;
  for (; c + 4 <= count; c += 4) {
    const F *w0 = w + at[c] * columns, *w1 = w + at[c + 1] * columns, *w2 = w + at[c + 2] * columns, *w3 = w + at[c + 3] * columns;
    const F a0 = a[at[c]], a1 = a[at[c + 1]], a2 = a[at[c + 2]], a3 = a[at[c + 3]];
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] += (a0 * w0[i] + a1 * w1[i]) + (a2 * w2[i] + a3 * w3[i]);
  }
  for (; c < count; ++c) {
    const F* w0 = w + at[c] * columns;
    const F a0 = a[at[c]];
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] = fused(a0, w0[i], out[i]);
  }
}

// A row that is mostly zero is driven by what is not; the others go together. `a`, `out`: rows of the first sequence and bytes to the next.
template <class F>
inline void product(const Product<F>& p, const char* a, int64_t next, char* out, int64_t next_out, int64_t rows, int32_t* at) {
  constexpr int64_t J = COLUMNS<F>;
  const F* from[GROUP];
  F* to[GROUP];
  int64_t left = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const F* const row = reinterpret_cast<const F*>(a + r * next);
    F* const target = reinterpret_cast<F*>(out + r * next_out);
    if (!p.adds) for (int64_t i = 0; i < p.columns; ++i) target[i] = p.bias ? p.bias[i] : F(0);
    int64_t count = 0;
    for (int64_t k = 0; k < p.width; ++k) {
      at[count] = int32_t(k);
      count += row[k] != F(0);
    }
    if (p.finite && count * 4 <= p.width) sparse(row, at, count, p.w, target, p.columns);
    else from[left] = row, to[left++] = target;
  }
  for (int64_t i = 0; i < p.columns && left; i += J) {
    const int64_t n = p.columns - i < J ? p.columns - i : J;
    const F* const block = p.blocks.data() + i * p.width;
    int64_t r = 0;
    for (; r + 8 <= left; r += 8) dense<F, 8>(from + r, block, to + r, p.width, i, n);
    for (; r + 4 <= left; r += 4) dense<F, 4>(from + r, block, to + r, p.width, i, n);
    for (; r < left; ++r) dense<F, 1>(from + r, block, to + r, p.width, i, n);
  }
}

// Mean of a row and one over its deviation, as `layer_norm` takes them.
template <class F> inline void moments(const F* x, int64_t n, F eps, F& mean, F& scale) {
  F sum = F(0), squares = F(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  mean = sum / F(n);
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  scale = F(1) / std::sqrt(squares / F(n) + eps);
}

template <class F> inline void norm(const F* x, const F* w, const F* b, F* y, int64_t n, F eps) {
  F mean, scale;
  moments(x, n, eps, mean, scale);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * (w ? w[i] : F(1)) + (b ? b[i] : F(0));
}

// Cotangent of the row that a norm takes, of that `g` of what it gives.
template <class F> inline void norm_back(const F* x, const F* w, const F* g, F* out, int64_t n, F eps) {
  F mean, scale, sum = F(0), along = F(0);
  moments(x, n, eps, mean, scale);
#pragma omp simd reduction(+ : sum, along)
  for (int64_t i = 0; i < n; ++i) {
    const F by = w ? g[i] * w[i] : g[i];
    sum += by;
    along += by * (x[i] - mean) * scale;
  }
  sum /= F(n), along /= F(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = scale * ((w ? g[i] * w[i] : g[i]) - sum - (x[i] - mean) * scale * along);
}

// The sum of a row over `by`, at every place of it.
template <class F> inline void total(const F* x, F* y, int64_t n, F by) {
  F sum = F(0);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  for (int64_t i = 0; i < n; ++i) y[i] = sum / by;
}

template <class F> inline void softmax(const F* x, F* y, int64_t n) {
  F most = x[0], sum = F(0);
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += y[i] = exponential(x[i] - most);
  for (int64_t i = 0; i < n; ++i) y[i] /= sum;
}

// Cotangent of the row that a softmax takes, of that `g` of what it gives, `y`.
template <class F> inline void softmax_back(const F* y, const F* g, F* out, int64_t n) {
  F along = F(0);
#pragma omp simd reduction(+ : along)
  for (int64_t i = 0; i < n; ++i) along += g[i] * y[i];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = y[i] * (g[i] - along);
}

// What a step does, one after the other; each with its length and its operands in `dims`.
enum Op : int64_t {
  KERNEL,        // function, numbers, width, whether its rows are dense, counts of dims and places; dims, places
  PRODUCT,       // `from`, `to`, width, columns, whether it adds, weights, bias
  COPY,          // `from`, `to`, width, whether it adds
  NORM,          // `from`, `to`, width, weights, bias, eps
  NORM_BACK,     // `from`, cotangent of what the norm gave, `to`, width, weights, eps
  TOTAL,         // `from`, `to`, width, divisor
  SOFTMAX,       // `from`, `to`, width
  SOFTMAX_BACK,  // what it gave, cotangent of that, `to`, width
};

// Walk over T steps of `sequences`, or back in time.
//   arrays: `base` and `first` of every place; then what ops name by number: functions, numbers, weights
//   dims: counts of places and of ops; of every place, `step`, `row`, `kind`; the ops
template <class F> int recurrent(void* const* arrays, const int64_t* dims, int64_t T, int64_t sequences, int threads, int back) {
  const int64_t places = dims[0], count = dims[1];
  const int64_t* d = dims + 2;
  std::vector<Place> place(places);
  for (int64_t p = 0; p < places; ++p, d += 3) {
    place[p] = {static_cast<char*>(arrays[2 * p]), static_cast<char*>(arrays[2 * p + 1]), d[0], d[1], Place::Kind(d[2])};
    if (place[p].kind == Place::AT) huge_pages(place[p].base, T * place[p].step);
  }
  void* const* const given = arrays + 2 * places;
  const auto weights = [=](int64_t number) { return number < 0 ? nullptr : static_cast<const F*>(given[number]); };
  std::vector<const int64_t*> ops(count);
  std::vector<Kernel> kernels(count);
  std::vector<Product<F>> products(count);
  int64_t widest = 0, most = 0;
  for (int64_t k = 0; k < count; d += 2 + d[1], ++k) {
    const int64_t* const o = (ops[k] = d) + 2;
    if (d[0] == KERNEL) {
      const Step run = reinterpret_cast<Step>(given[o[0]]);
      kernels[k] = {run, static_cast<const double*>(given[o[1]]), o + 6, o + 6 + o[4], o[5], o[2], o[3] != 0};
      most = std::max(most, o[5]);
    } else if (d[0] == PRODUCT) {
      const F* const w = weights(o[5]);
      products[k] = {w, weights(o[6]), packed(w, o[2], o[3]), all_finite(w, o[2] * o[3]), o[0], o[1], o[2], o[3], o[4] != 0};
      widest = std::max(widest, o[2]);
    }
  }
  const int64_t each = (sequences + threads - 1) / threads, group = each < GROUP ? (each > 0 ? each : 1) : GROUP;
  int failed = 0;
  parallel(threads, [=, &failed, &place, &ops, &kernels, &products](int thread, int threads) {
    std::vector<void*> now(most);
    std::vector<int32_t> at(widest + 1);
    const Share share(sequences, group, thread, threads);
    for (int64_t begin = share.begin; begin < share.end; begin += group) {
      const int64_t rows = share.end - begin < group ? share.end - begin : group;
      const auto step = [&](const Kernel& kernel, int64_t t, int64_t first, int64_t rows) {
        for (int64_t p = 0; p < kernel.count; ++p) now[p] = kernel.places[p] < 0 ? nullptr : place[kernel.places[p]].at(t, first);
        const int64_t n = rows * kernel.width, tile = n < 128 ? (n + 63) / 64 * 64 : 128;  // its scratch is cleared at every step
        return kernel.run(now.data(), kernel.numbers, kernel.dims, 1, n, tile, 1, 0);
      };
      for (int64_t s = 0; s < T; ++s) {
        const int64_t t = back ? T - 1 - s : s;
        const auto row = [&](int64_t p, int64_t r) { return reinterpret_cast<F*>(place[p].at(t, begin + r)); };
        for (int64_t k = 0; k < count; ++k) {
          const int64_t* const o = ops[k] + 2;
          switch (ops[k][0]) {
            case KERNEL:
              if (kernels[k].dense && step(kernels[k], t, begin, rows)) return fail(failed);
              for (int64_t r = 0; r < rows && !kernels[k].dense; ++r) if (step(kernels[k], t, begin + r, 1)) return fail(failed);
              break;
            case PRODUCT:
              product(products[k], place[o[0]].at(t, begin), place[o[0]].row, place[o[1]].at(t, begin), place[o[1]].row, rows, at.data());
              break;
            case COPY:
              for (int64_t r = 0; r < rows; ++r) {
                const F* const from = row(o[0], r);
                F* const to = row(o[1], r);
                if (!o[3]) std::memcpy(to, from, o[2] * sizeof(F));
                for (int64_t i = 0; i < o[2] && o[3]; ++i) to[i] += from[i];
              }
              break;
            case NORM:
              for (int64_t r = 0; r < rows; ++r) norm(row(o[0], r), weights(o[3]), weights(o[4]), row(o[1], r), o[2], *weights(o[5]));
              break;
            case NORM_BACK:
              for (int64_t r = 0; r < rows; ++r) norm_back(row(o[0], r), weights(o[4]), row(o[1], r), row(o[2], r), o[3], *weights(o[5]));
              break;
            case TOTAL:
              for (int64_t r = 0; r < rows; ++r) total(row(o[0], r), row(o[1], r), o[2], *weights(o[3]));
              break;
            case SOFTMAX:
              for (int64_t r = 0; r < rows; ++r) softmax(row(o[0], r), row(o[1], r), o[2]);
              break;
            default:  // SOFTMAX_BACK
              for (int64_t r = 0; r < rows; ++r) softmax_back(row(o[0], r), row(o[1], r), row(o[2], r), o[3]);
          }
        }
      }
    }
  });
  return failed;
}

// R rows of `out`, in one block of `n` columns: add the sum of the outer products of `count` rows, which runs over them in order.
template <class F, int R> inline void add_outer(const F* a, int64_t width, const F* block, F* out, int64_t columns, int64_t count, int64_t n) {
  constexpr int J = COLUMNS<F>;
  F sum[R][J];
  for (int r = 0; r < R; ++r) for (int j = 0; j < J; ++j) sum[r][j] = F(0);
  for (int64_t m = 0; m < count; ++m) {
    const F* row = block + m * J;
    for (int r = 0; r < R; ++r) {
      const F x = a[m * width + r];
#pragma omp simd
      for (int j = 0; j < J; ++j) sum[r][j] = fused(x, row[j], sum[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) for (int64_t j = 0; j < n; ++j) out[r * columns + j] += sum[r][j];
}

// Gradient of weights: out [width, columns] = the sum over rows of outer products of `a` [rows, width] and `g` [rows, columns]; the first
// rows of `a` lie apart. A thread owns rows of `out`, whose sums run over the rows of `a` in order.
//   arrays: the first rows of `a`, the others, `g`, `out`; dims: how many the first are, whether most of `a` is zero
template <class F> int outer(void* const* arrays, const int64_t* dims, int64_t rows, int64_t width, int64_t columns, int threads) {
  const F *first = static_cast<const F*>(arrays[0]), *rest = static_cast<const F*>(arrays[1]), *g = static_cast<const F*>(arrays[2]);
  F* const out = static_cast<F*>(arrays[3]);
  const int64_t apart = dims[0];
  const bool few = dims[1] != 0;
  parallel(threads, [=](int thread, int threads) {
    constexpr int64_t J = COLUMNS<F>, M = 256;  // rows that a block of `g` has
    const int64_t begin = width * thread / threads, end = width * (thread + 1) / threads;
    for (int64_t i = begin * columns; i < end * columns; ++i) out[i] = F(0);
    for (int64_t r = 0; r < rows && few; ++r) {
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
    std::vector<F> block(few ? 0 : M * J);
    for (int64_t r = 0, count; r < rows && !few; r += count) {
      const F* const a = r < apart ? first + r * width : rest + (r - apart) * width;
      count = std::min(M, (r < apart ? apart : rows) - r);
      for (int64_t i = 0; i < columns; i += J) {
        const int64_t n = std::min(J, columns - i);
        for (int64_t m = 0; m < count; ++m) std::memcpy(&block[m * J], g + (r + m) * columns + i, n * sizeof(F));
        int64_t k = begin;
        for (; k + 8 <= end; k += 8) add_outer<F, 8>(a + k, width, block.data(), out + k * columns + i, columns, count, n);
        for (; k < end; ++k) add_outer<F, 1>(a + k, width, block.data(), out + k * columns + i, columns, count, n);
      }
    }
  });
  return 0;
}

}  // namespace flexsn
