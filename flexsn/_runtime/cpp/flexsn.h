// What every generated CPU kernel includes: types and maths here, tiles in tile.h. Needs the C++ library alone.
#pragma once
#include <cstdint>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // of libstdc++: Bessel functions and their like, which take longer to read than all the rest
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace flexsn {

// --- storage of 16-bit floats; arithmetic on them is done in float. Integer arithmetic only, so that loops vectorise ---
enum class half : uint16_t {};
enum class bfloat16 : uint16_t {};
enum class bool8 : uint8_t {};  // a bool in memory: loops over C++ bools do not vectorise

inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

inline float from_bfloat16(bfloat16 x) { return bits_to_float(uint32_t(x) << 16); }
inline bfloat16 to_bfloat16(float f) {  // round to nearest even, NaN stays NaN
  const uint32_t u = float_to_bits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bfloat16(uint16_t(f != f ? 0x7fc0u : rounded));
}
inline float from_half(half x) {
  const uint32_t h = uint32_t(x), shifted = (h & 0x7fffu) << 13, exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + (exponent == 0x0f800000u ? 0x70000000u : 0x38000000u);  // inf and NaN keep all ones
  const float denormal = bits_to_float(shifted + 0x38800000u) - bits_to_float(0x38800000u);
  return bits_to_float((exponent == 0 ? float_to_bits(denormal) : normal) | (h & 0x8000u) << 16);
}
inline half to_half(float f) {  // round to nearest even
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  const uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t denormal = float_to_bits(bits_to_float(a) + bits_to_float(0x3f000000u)) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return half(uint16_t((a >= 0x47800000u ? special : a < 0x38800000u ? denormal : normal) | sign));
}
template <class To, class From> inline To load(From x) {
  if constexpr (std::is_same_v<From, To>) return x;
  else if constexpr (std::is_same_v<From, half>) return To(from_half(x));
  else if constexpr (std::is_same_v<From, bfloat16>) return To(from_bfloat16(x));
  else if constexpr (std::is_same_v<From, bool8>) return uint8_t(x) != 0 ? To(1) : To(0);
  else return static_cast<To>(x);
}
template <class To, class From> inline To store(From x) {
  if constexpr (std::is_same_v<From, To>) return x;
  else if constexpr (std::is_same_v<From, bool> && std::is_same_v<To, half>) return half(uint16_t(x ? 0x3c00u : 0u));
  else if constexpr (std::is_same_v<From, bool> && std::is_same_v<To, bfloat16>) return bfloat16(uint16_t(x ? 0x3f80u : 0u));
  else if constexpr (std::is_same_v<To, half>) return to_half(float(x));
  else if constexpr (std::is_same_v<To, bfloat16>) return to_bfloat16(float(x));
  else if constexpr (std::is_same_v<To, bool8>) return bool8(uint8_t(x ? 1 : 0));
  else return static_cast<To>(x);
}
inline float round_half(float x) { return from_half(to_half(x)); }
inline float round_bfloat16(float x) { return from_bfloat16(to_bfloat16(x)); }

// --- conversions as c10::convert does them ----------------------------------------------------------------------------
// With -fno-trapping-math GCC (12, at least) makes float(int(y)) trunc(y), which is -0.0 where the integer is 0, and NaN
// where y is: a zero that it cannot know keeps it from that.
extern "C" __attribute__((visibility("default"))) int32_t flexsn_zero;
int32_t flexsn_zero = 0;
template <class To, class From> inline To convert(From x) {
  if constexpr (std::is_same_v<To, bool>) return x != From(0);
  else if constexpr (std::is_same_v<From, bool>) return x ? To(1) : To(0);  // a cast of bool does not vectorise
  else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> && sizeof(To) < 8) return To(int32_t(x));
  else if constexpr (std::is_integral_v<From> && std::is_floating_point_v<To>) return static_cast<To>(From(x ^ From(flexsn_zero)));
  else return static_cast<To>(x);
}

// --- exact maths: one meaning in vector and scalar code -------------------------------------------------------------
template <class T> inline T select(bool c, T a, T b) { return c ? a : b; }
// The sign alone: GCC makes -fma(a, b, c) one instruction, which has +0.0 where eager has -0.0.
template <class T> inline T neg(T x) {
  if constexpr (!std::is_floating_point_v<T>) return T(-x);
  else {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    Bits bits;
    std::memcpy(&bits, &x, sizeof(T));
    bits ^= Bits(1) << (8 * sizeof(T) - 1);
    std::memcpy(&x, &bits, sizeof(T));
    return x;
  }
}
template <class T> inline T abs(T x) {
  if constexpr (std::is_floating_point_v<T>) return std::fabs(x);
  else if constexpr (std::is_signed_v<T>) return x < 0 ? T(-x) : x;
  else return x;
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline float ceil(float x) { return __builtin_ceilf(x); }
inline double ceil(double x) { return __builtin_ceil(x); }
inline float trunc(float x) { return __builtin_truncf(x); }
inline double trunc(double x) { return __builtin_trunc(x); }
inline float round(float x) { return __builtin_nearbyintf(x); }  // half to even
inline double round(double x) { return __builtin_nearbyint(x); }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline double copysign(double x, double y) { return __builtin_copysign(x, y); }
template <class T> inline bool signbit(T x) {
  if constexpr (std::is_same_v<T, float>) return float_to_bits(x) >> 31;
  else if constexpr (std::is_same_v<T, double>) { uint64_t u; std::memcpy(&u, &x, 8); return u >> 63; }
  else return x < T(0);
}
template <class T> inline T sign(T x) { return T((T(0) < x) - (x < T(0))); }
template <class T> inline T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> inline T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T> inline T fmax(T a, T b) { return (a < b) | (a != a) ? b : a; }
template <class T> inline T fmin(T a, T b) { return (a > b) | (a != a) ? b : a; }

// Integer division: rounding as Python's or C's. A zero divisor gives 0 (eager raises), never a trap.
template <class T> inline T trunc_div(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return trunc(a / b);
  else return b == T(0) ? T(0) : (std::is_signed_v<T> && b == T(-1)) ? T(-a) : T(a / b);
}
template <class T> inline T c_mod(T a, T b) { return b == T(0) || (std::is_signed_v<T> && b == T(-1)) ? T(0) : T(a % b); }
template <class T> inline T floor_div_int(T a, T b) {
  const T q = trunc_div(a, b);
  return c_mod(a, b) != T(0) && ((a < T(0)) != (b < T(0))) ? T(q - 1) : q;
}
template <class T> inline T remainder_int(T a, T b) {
  const T r = c_mod(a, b);
  return r != T(0) && ((r < T(0)) != (b < T(0))) ? T(r + b) : r;
}
template <class T> inline T pow_int(T a, T b) {
  if (std::is_signed_v<T> && b < T(0)) return a == T(1) ? T(1) : a == T(-1) ? (b & T(1) ? T(-1) : T(1)) : T(0);
  T r = 1;
  for (; b; b = T(b >> 1)) { if (b & T(1)) r = T(r * a); a = T(a * a); }
  return r;
}
template <class T> inline T shift_left(T a, T b) { return b < T(0) || b >= T(sizeof(T) * 8) ? T(0) : T(std::make_unsigned_t<T>(a) << b); }
template <class T> inline T shift_right(T a, T b) {
  constexpr T last = T(sizeof(T) * 8 - 1);
  return b < T(0) || b > last ? T(a < T(0) ? -1 : 0) : T(a >> b);
}

// Float division with rounding, from fmod: exact where a/b would not be (as ATen's). `&` and `|`: of `&&` compilers make branches.
template <class T> inline T remainder_from(T mod, T b) { return (mod != T(0)) & ((b < T(0)) != (mod < T(0))) ? mod + b : mod; }
template <class T> inline T floor_div_from(T mod, T a, T b) {
  const T quotient = a / b;
  T div = (a - mod) / b;
  div = (mod != T(0)) & ((b < T(0)) != (mod < T(0))) ? div - T(1) : div;
  const T fl = floor(div);
  const T rounded = div - fl > T(0.5) ? fl + T(1) : fl;
  const T result = div != T(0) ? rounded : copysign(T(0), quotient);
  const bool overflows = (a - a == T(0)) & (quotient - quotient != T(0));  // Sleef's fmod gives NaN then
  return (b == T(0)) | overflows ? quotient : result;
}

// Sleef's asinh and acosh overflow where x * x does; long before, they are log(2 |x|).
template <class T> inline T far_as_log(T x, T near, T log_abs) {
  return abs(x) > T(1e9) && near == near ? copysign(log_abs + T(0.693147180559945309417232121458), x) : near;
}
// exp in float: within 1.02 ulp for every argument, and inline, so that it costs a dozen instructions for 16 lanes.
// n = round(x / ln 2), r = x - n ln 2 in two parts, a polynomial in r (weighted least squares), then two exact scalings.
inline float exp_float(float x) {
  const float a = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;  // NaN passes
  const float n = __builtin_nearbyintf(a * 1.44269504f);
  const float r = fma(n, -1.42860677e-6f, fma(n, -6.93145752e-1f, a));
  float p = fma(0x1.6a23cep-10f, r, 0x1.123a2p-7f);
  p = fma(p, r, 0x1.5558f2p-5f);
  p = fma(p, r, 0x1.555492p-3f);
  p = fma(p, r, 0x1.fffffcp-2f);
  p = fma(p * r, r, r) + 1.0f;
  const int32_t k = n == n ? int32_t(n) : 0, part = k >> 1;
  return p * bits_to_float(uint32_t(part + 127) << 23) * bits_to_float(uint32_t(k - part + 127) << 23);
}
// ATen's erfinv loses all digits near 1: there its value x only starts Halley's method for erfc(x) = 1 - y, which is exact.
inline double refined_erfinv(double y, double x) {
  const double rest = 1.0 - std::fabs(y);
  if (!(rest > 0.0) || rest > 0.5) return x;
  double z = std::fabs(x) < 7.0 ? std::fabs(x) : 5.0;
  for (int i = 0; i < 5; ++i) {
    const double error = std::erfc(z) - rest;
    z += error / (1.12837916709551257390 * std::exp(-z * z) - z * error);
  }
  return std::copysign(z, y);
}
template <class T> inline T nextafter(T a, T b) { return std::nextafter(a, b); }
template <class T> inline T mantissa(T x) { int e; return std::frexp(x, &e); }
template <class T> inline int32_t exponent(T x) { int e = 0; std::frexp(x, &e); return x - x == T(0) ? e : 0; }

}  // namespace flexsn

// --- vector maths: Sleef, as libtorch_cpu carries it ------------------------------------------------------------------
// FLEXSN_MATH1(exp, u10) makes flexsn::exp(float) and (double). In a vectorised loop the compiler calls the
// 512-, 256- or 128-bit form; in scalar code the same vector form runs on one lane, so that bits never depend on the place.
// (`x - f8_{}` spreads x over the lanes; `x + f8_{}` would turn -0 into 0.)
#if defined(__x86_64__) && defined(__AVX2__) && defined(FLEXSN_SLEEF)
typedef float f16_ __attribute__((vector_size(64)));
typedef float f8_ __attribute__((vector_size(32)));
typedef float f4_ __attribute__((vector_size(16)));
typedef double d8_ __attribute__((vector_size(64)));
typedef double d4_ __attribute__((vector_size(32)));
typedef double d2_ __attribute__((vector_size(16)));
#define FLEXSN_SIMD __attribute__((simd("notinbranch"), const))
#define FLEXSN_USED __attribute__((used))
namespace flexsn {
// The first lanes of a vector as a narrower one, or all of them as the first ones of a wider, whose others are zero.
template <class To, class From> inline To resized(From x) {
  To found = {};
  std::memcpy(&found, &x, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return found;
}
}  // namespace flexsn

#if defined(__AVX512F__)
#define FLEXSN_WIDE1(fn, acc)                                                                                         \
  extern "C" f16_ Sleef_##fn##f16_##acc(f16_);                                                                        \
  extern "C" d8_ Sleef_##fn##d8_##acc(d8_);                                                                           \
  extern "C" FLEXSN_USED f16_ _ZGVeN16v_flexsn_##fn##f(f16_ x) { return Sleef_##fn##f16_##acc(x); }                   \
  extern "C" FLEXSN_USED d8_ _ZGVeN8v_flexsn_##fn(d8_ x) { return Sleef_##fn##d8_##acc(x); }                          \
  static float lane_##fn(float x) { return Sleef_##fn##f16_##acc(x - f16_{})[0]; }                                    \
  static double lane_##fn(double x) { return Sleef_##fn##d8_##acc(x - d8_{})[0]; }
#define FLEXSN_WIDE2(fn, acc)                                                                                         \
  extern "C" f16_ Sleef_##fn##f16##acc(f16_, f16_);                                                                   \
  extern "C" d8_ Sleef_##fn##d8##acc(d8_, d8_);                                                                       \
  extern "C" FLEXSN_USED f16_ _ZGVeN16vv_flexsn_##fn##f(f16_ x, f16_ y) { return Sleef_##fn##f16##acc(x, y); }        \
  extern "C" FLEXSN_USED d8_ _ZGVeN8vv_flexsn_##fn(d8_ x, d8_ y) { return Sleef_##fn##d8##acc(x, y); }                \
  static float lane_##fn(float x, float y) { return Sleef_##fn##f16##acc(x - f16_{}, y - f16_{})[0]; }                \
  static double lane_##fn(double x, double y) { return Sleef_##fn##d8##acc(x - d8_{}, y - d8_{})[0]; }
#else
#define FLEXSN_WIDE1(fn, acc)                                                                                         \
  static float lane_##fn(float x) { return Sleef_##fn##f8_##acc(x - f8_{})[0]; }                                      \
  static double lane_##fn(double x) { return Sleef_##fn##d4_##acc(x - d4_{})[0]; }
#define FLEXSN_WIDE2(fn, acc)                                                                                         \
  static float lane_##fn(float x, float y) { return Sleef_##fn##f8##acc(x - f8_{}, y - f8_{})[0]; }                   \
  static double lane_##fn(double x, double y) { return Sleef_##fn##d4##acc(x - d4_{}, y - d4_{})[0]; }
#endif

#define FLEXSN_MATH1(fn, acc)                                                                                         \
  namespace flexsn {                                                                                                  \
  extern "C" f8_ Sleef_##fn##f8_##acc(f8_);                                                                           \
  extern "C" d4_ Sleef_##fn##d4_##acc(d4_);                                                                           \
  extern "C" FLEXSN_SIMD float flexsn_##fn##f(float);                                                                 \
  extern "C" FLEXSN_SIMD double flexsn_##fn(double);                                                                  \
  extern "C" FLEXSN_USED f8_ _ZGVdN8v_flexsn_##fn##f(f8_ x) { return Sleef_##fn##f8_##acc(x); }                       \
  extern "C" FLEXSN_USED d4_ _ZGVdN4v_flexsn_##fn(d4_ x) { return Sleef_##fn##d4_##acc(x); }                          \
  extern "C" FLEXSN_USED f4_ _ZGVbN4v_flexsn_##fn##f(f4_ x) {                                                         \
    return resized<f4_>(Sleef_##fn##f8_##acc(resized<f8_>(x)));                                                       \
  }                                                                                                                   \
  extern "C" FLEXSN_USED d2_ _ZGVbN2v_flexsn_##fn(d2_ x) {                                                            \
    return resized<d2_>(Sleef_##fn##d4_##acc(resized<d4_>(x)));                                                       \
  }                                                                                                                   \
  FLEXSN_WIDE1(fn, acc)                                                                                               \
  extern "C" FLEXSN_USED float scalar_##fn##f(float x) __asm__("flexsn_" #fn "f");                                    \
  extern "C" FLEXSN_USED double scalar_##fn(double x) __asm__("flexsn_" #fn);                                         \
  extern "C" float scalar_##fn##f(float x) { return lane_##fn(x); }                                                   \
  extern "C" double scalar_##fn(double x) { return lane_##fn(x); }                                                    \
  inline float fn(float x) { return flexsn_##fn##f(x); }                                                              \
  inline double fn(double x) { return flexsn_##fn(x); }                                                               \
  }
#define FLEXSN_MATH2(fn, acc)                                                                                         \
  namespace flexsn {                                                                                                  \
  extern "C" f8_ Sleef_##fn##f8##acc(f8_, f8_);                                                                       \
  extern "C" d4_ Sleef_##fn##d4##acc(d4_, d4_);                                                                       \
  extern "C" FLEXSN_SIMD float flexsn_##fn##f(float, float);                                                          \
  extern "C" FLEXSN_SIMD double flexsn_##fn(double, double);                                                          \
  extern "C" FLEXSN_USED f8_ _ZGVdN8vv_flexsn_##fn##f(f8_ x, f8_ y) { return Sleef_##fn##f8##acc(x, y); }             \
  extern "C" FLEXSN_USED d4_ _ZGVdN4vv_flexsn_##fn(d4_ x, d4_ y) { return Sleef_##fn##d4##acc(x, y); }                \
  extern "C" FLEXSN_USED f4_ _ZGVbN4vv_flexsn_##fn##f(f4_ x, f4_ y) {                                                 \
    return resized<f4_>(Sleef_##fn##f8##acc(resized<f8_>(x), resized<f8_>(y)));                                       \
  }                                                                                                                   \
  extern "C" FLEXSN_USED d2_ _ZGVbN2vv_flexsn_##fn(d2_ x, d2_ y) {                                                    \
    return resized<d2_>(Sleef_##fn##d4##acc(resized<d4_>(x), resized<d4_>(y)));                                       \
  }                                                                                                                   \
  FLEXSN_WIDE2(fn, acc)                                                                                               \
  extern "C" FLEXSN_USED float scalar_##fn##f(float x, float y) __asm__("flexsn_" #fn "f");                           \
  extern "C" FLEXSN_USED double scalar_##fn(double x, double y) __asm__("flexsn_" #fn);                               \
  extern "C" float scalar_##fn##f(float x, float y) { return lane_##fn(x, y); }                                       \
  extern "C" double scalar_##fn(double x, double y) { return lane_##fn(x, y); }                                       \
  inline float fn(float x, float y) { return flexsn_##fn##f(x, y); }                                                  \
  inline double fn(double x, double y) { return flexsn_##fn(x, y); }                                                  \
  }
#else  // no Sleef: the C++ library's scalar functions
#define FLEXSN_MATH1(fn, acc)                                     \
  namespace flexsn {                                              \
  inline float fn(float x) { return std::fn(x); }                 \
  inline double fn(double x) { return std::fn(x); }               \
  }
#define FLEXSN_MATH2(fn, acc)                                     \
  namespace flexsn {                                              \
  inline float fn(float x, float y) { return std::fn(x, y); }     \
  inline double fn(double x, double y) { return std::fn(x, y); }  \
  }
#endif

#define FLEXSN_EXP                                                \
  FLEXSN_MATH1(exp, u10)                                          \
  namespace flexsn {                                              \
  inline float exponential(float x) { return exp_float(x); }      \
  inline double exponential(double x) { return exp(x); }          \
  }
