// A recurrence on a CPU: at each step kernels of one step, products, and what else mixes the neurons of a sequence. Threads own sequences.
#pragma once
#include "products.h"

FLEXSN_EXP

namespace flexsn {

// A kernel of one step, as every generated one.
using Step = int (*)(void* const* arrays, const double* numbers, const int64_t* dims, int64_t T, int64_t N, int64_t tile, int threads, int large);

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
    std::vector<int32_t> at(widest + 16);
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

}  // namespace flexsn
