// Rows, tiles and scratch memory of the generated CPU kernels.
#pragma once
#include <cstdlib>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "flexsn.h"

// Threads are those of the OpenMP runtime that PyTorch has loaded, asked for as compilers ask: so any compiler serves, and no second
// runtime comes into the process.
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace flexsn {

// Call `work(thread, threads)` on so many threads, or as many as there are. (One copy of the code is compiled for both cases.)
template <class Work> __attribute__((noinline, noclone)) void on_thread(const Work& work, int thread, int threads) { work(thread, threads); }
template <class Work> inline void parallel(int threads, Work&& work) {
  if (threads <= 1) return on_thread(work, 0, 1);
  GOMP_parallel([](void* p) { on_thread(*static_cast<const Work*>(p), omp_get_thread_num(), omp_get_num_threads()); }, &work, unsigned(threads), 0);
}
inline void fail(int& failed) { __atomic_store_n(&failed, 1, __ATOMIC_RELAXED); }  // also on several threads at once

// One thread's neurons: consecutive tiles, of which each thread has as many as any other, or one more.
struct Share {
  int64_t begin, end;
  Share(int64_t N, int64_t tile, int64_t thread, int64_t threads) {
    const int64_t tiles = (N + tile - 1) / tile, each = tiles / threads, more = tiles % threads;
    begin = (each * thread + (thread < more ? thread : more)) * tile;
    const int64_t after = begin + (each + (thread < more)) * tile;
    end = after < N ? after : N;
  }
};

constexpr int64_t LANES = 64;  // rows of a tile are padded to this many neurons: vector loops have no tail
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
constexpr int64_t BLOCK = 128;  // neurons between whose computation rows are asked for and written: both go on at once
inline int64_t up_to(int64_t limit, int64_t left) { return left < limit ? left : limit; }

// One thread's scratch memory: zeroed rows of `tile` neurons each, cut off one after another.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64))) {
    if (data_) std::memset(data_, 0, bytes);
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool ok() const { return data_ != nullptr; }
  template <class T> T* rows(int64_t count) {
    T* p = reinterpret_cast<T*>(data_ + used_);
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return p;
  }

 private:
  char* data_;
  int64_t used_ = 0;
};

// Write a finished row from its buffer; `streamed` past the caches, for arrays that are larger than these.
template <class T> inline void flush(T* row, const T* buffer, int64_t n, bool streamed) {
#if defined(__AVX512F__) && defined(__GNUC__)
  if (streamed && reinterpret_cast<uintptr_t>(row) % 64 == 0) {
    typedef long long line __attribute__((vector_size(64)));
    const int64_t lines = n * int64_t(sizeof(T)) / 64;
    const line* const from = reinterpret_cast<const line*>(buffer);
    line* const to = reinterpret_cast<line*>(row);
#if defined(__clang__)
    for (int64_t i = 0; i < lines; ++i) __builtin_nontemporal_store(from[i], to + i);
#else
    for (int64_t i = 0; i < lines; ++i) __builtin_ia32_movntdq512(to + i, from[i]);
#endif
    const int64_t done = lines * 64 / int64_t(sizeof(T));
    std::memcpy(row + done, buffer + done, (n - done) * sizeof(T));
    return;
  }
#endif
  (void)streamed;
  std::memcpy(row, buffer, n * sizeof(T));
}
inline void fence() {  // streamed rows are visible to other threads after it
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

// What is no vector loop of ops is compiled once: inlined for each of many states, it took most of the build.
#define ONCE __attribute__((noinline)) inline

// Copy n neurons, `run` of which lie side by side: every `apart` elements, and at the other end every `apart_there`.
template <int64_t run, class T> inline void copy(const T* from, int64_t apart, T* to, int64_t apart_there, int64_t n) {
  for (int64_t i = 0; i < n; i += run, from += apart, to += apart_there) std::memcpy(to, from, run * sizeof(T));
}

// Where the neurons of a row lie in a sequence of T steps: side by side; or in `count` parts of time after one another, each of T steps of N
// neurons, of which a row holds the same step. A row has `neurons()` elements.
struct Parts {
  int64_t T, N, count;
  int64_t neurons() const { return N * count; }

  // Call `visit(part, first, i, n)` for n neurons from `first` on of each part, which are the elements from i on of a row from `begin` on.
  template <class Visit> void runs(int64_t begin, int64_t n, Visit&& visit) const {
    int64_t part = begin / N, first = begin % N;
    for (int64_t i = 0; i < n; ++part, first = 0) {
      const int64_t run = up_to(N - first, n - i);
      visit(part, first, i, run);
      i += run;
    }
  }

  // A row that a vector loop may read past its end: the row itself if it is full, else a copy in `buffer`.
  template <class E> const E* readable(const E* sequence, int64_t t, int64_t begin, int64_t n, bool full, E* buffer) const {
    if (full) return sequence + t * N + begin;
    if (count == 1) std::memcpy(buffer, sequence + t * N + begin, n * sizeof(E));
    else gather(sequence, t, begin, n, buffer);
    return buffer;
  }
  // Write a finished row, or some of its neurons, from its buffer.
  template <class E> void flush(E* sequence, int64_t t, int64_t begin, const E* buffer, int64_t n, bool streamed) const {
    if (count == 1) flexsn::flush(sequence + t * N + begin, buffer, n, streamed);
    else scatter(sequence, t, begin, n, buffer);
  }

 private:
  template <class E> ONCE void gather(const E* sequence, int64_t t, int64_t begin, int64_t n, E* buffer) const {
    const E* const first = sequence + (begin / N * T + t) * N;
    if (N == 1) return copy<1>(first, T, buffer, 1, n);
    if (N == 2 && n % 2 == 0) return copy<2>(first, 2 * T, buffer, 2, n);
    if (N == 4 && n % 4 == 0) return copy<4>(first, 4 * T, buffer, 4, n);
    runs(begin, n, [=](int64_t part, int64_t k, int64_t i, int64_t run) { copy<1>(sequence + (part * T + t) * N + k, 1, buffer + i, 1, run); });
  }
  template <class E> ONCE void scatter(E* sequence, int64_t t, int64_t begin, int64_t n, const E* buffer) const {
    E* const first = sequence + (begin / N * T + t) * N;
    if (N == 1) return copy<1>(buffer, 1, first, T, n);
    if (N == 2 && n % 2 == 0) return copy<2>(buffer, 2, first, 2 * T, n);
    if (N == 4 && n % 4 == 0) return copy<4>(buffer, 4, first, 4 * T, n);
    runs(begin, n, [=](int64_t part, int64_t k, int64_t i, int64_t run) { copy<1>(buffer + i, 1, sequence + (part * T + t) * N + k, 1, run); });
  }
};

// Ask for n elements that are read soon (or, far, after some rows): rows are strided, so the processor does not foresee them.
template <class T, int cache = 3> inline void prefetch(const T* row, int64_t n) {
  const char* const p = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < n * int64_t(sizeof(T)); i += 64) __builtin_prefetch(p + i, 0, cache);
}
template <class T> inline void prefetch_far(const T* row, int64_t n) { prefetch<T, 2>(row, n); }

// Large fresh arrays: huge pages save most of the cost of their first touch.
inline void huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t page = int64_t(1) << 21;
  if (bytes < 2 * page) return;
  const int64_t begin = (reinterpret_cast<int64_t>(data) + page - 1) / page * page;
  const int64_t end = (reinterpret_cast<int64_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice only: a refusal changes nothing
#else
  (void)data, (void)bytes;
#endif
}

// A param broadcasts by index: element i of the step is element (i / inner) % count of the param.
template <class To, class T>
ONCE void spread(const T* param, int64_t inner, int64_t count, int64_t begin, int64_t n, To* row) {
  if (inner == 1 && begin + n <= count) {
    for (int64_t i = 0; i < n; ++i) row[i] = load<To>(param[begin + i]);
    return;
  }
  const int64_t once = inner * count < n ? inner * count : n;  // then it starts again
  int64_t index = (begin / inner) % count, left = inner - begin % inner;
  for (int64_t i = 0; i < once;) {
    const int64_t run = left < once - i ? left : once - i;
    const To value = load<To>(param[index]);
    for (int64_t j = 0; j < run; ++j) row[i + j] = value;
    i += run;
    left = inner;
    index = index + 1 == count ? 0 : index + 1;
  }
  for (int64_t i = once; i < n; i *= 2) std::memcpy(row + i, row, (i < n - i ? i : n - i) * sizeof(To));
}
// The first row of a state or cotangent: given, or zero.
template <class To, class T> ONCE void first_row(const T* given, int64_t begin, int64_t n, To* row) {
  for (int64_t i = 0; i < n; ++i) row[i] = given ? load<To>(given[begin + i]) : To(0);
}
// The states at the start of a chunk: a checkpoint, or of the first chunk what is given, or zero.
template <class To, class T>
ONCE void chunk_start(const T* given, const To* checkpoints, const Parts& parts, int64_t chunk, int64_t K, int64_t begin, int64_t n, To* row) {
  parts.runs(begin, n, [=](int64_t part, int64_t first, int64_t i, int64_t run) {
    const int64_t steps = part * parts.T + chunk * K;
    if (steps == 0) return first_row(given, first, run, row + i);
    std::memcpy(row + i, checkpoints + (steps / K - 1) * parts.N + first, run * sizeof(To));
  });
}
template <class T>
ONCE void store_checkpoint(const T* row, const Parts& parts, int64_t chunk, int64_t K, int64_t begin, int64_t n, T* checkpoints) {
  parts.runs(begin, n, [=](int64_t part, int64_t first, int64_t i, int64_t run) {
    const int64_t steps = part * parts.T + chunk * K;
    if (steps > 0) std::memcpy(checkpoints + (steps / K - 1) * parts.N + first, row + i, run * sizeof(T));
  });
}
// The same of how many steps are left, `row` at first.
ONCE void store_left(const int32_t* row, const Parts& parts, int64_t chunk, int64_t K, int64_t begin, int64_t n, int32_t* checkpoints) {
  parts.runs(begin, n, [=](int64_t part, int64_t first, int64_t i, int64_t run) {
    const int64_t steps = part * parts.T + chunk * K;
    for (int64_t j = 0; steps > 0 && j < run; ++j) checkpoints[(steps / K - 1) * parts.N + first + j] = row[i + j] - int32_t(chunk * K);
  });
}
// After how many of T steps the first and the last sequence of every block of neurons end; returns that of the last of all.
ONCE int64_t ends_of(const int32_t* left, int64_t n, int64_t T, int32_t* least, int32_t* most) {
  int32_t last = 0;
  for (int64_t b = 0; b < n; b += BLOCK) {
    int32_t low = left[b], high = 0;
    for (int64_t i = b; i < n && i < b + BLOCK; ++i) low = left[i] < low ? left[i] : low, high = left[i] > high ? left[i] : high;
    least[b / BLOCK] = low, most[b / BLOCK] = high;
    last = high > last ? high : last;
  }
  return up_to(T, last);
}
// What passes from part to part of time: `arrays` holds b of every part, the entries of A, and what comes in at the first part, or null.
template <class T, int states> struct Carried {
  T* const* arrays;
  explicit Carried(void* const* all) : arrays(reinterpret_cast<T* const*>(all)) {}
  struct Values {
    T of[states];
  };
  Values first(int64_t neuron, int entries) const {
    Values now;
    for (int k = 0; k < states; ++k) now.of[k] = arrays[states + entries + k] ? arrays[states + entries + k][neuron] : T(0);
    return now;
  }
  template <int count> Values next(const Values& now, int64_t at, const int (&entries)[count][2]) const {
    Values after;
    for (int k = 0; k < states; ++k) {
      after.of[k] = arrays[k][at];
      arrays[k][at] = now.of[k];
    }
    for (int e = 0; e < count; ++e) {
      const T in = now.of[entries[e][1]];
      if (in != T(0)) after.of[entries[e][0]] += arrays[states + e][at] * in;  // nothing gives nothing, whatever A has grown to
    }
    return after;
  }
};
template <class To, class T> ONCE void last_row(const T* row, int64_t begin, int64_t n, To* out) {
  for (int64_t i = 0; i < n; ++i) out[begin + i] = store<To>(row[i]);
}
ONCE void last_left(const int32_t* row, int64_t T, int64_t begin, int64_t n, int32_t* out) {
  for (int64_t i = 0; i < n; ++i) out[begin + i] = row[i] - int32_t(T);
}
}  // namespace flexsn
