// Sixteen floats at a time, and the few other vector operations that the kernels need.
//
// Three forms have the same interface and give the same bits: AVX-512, AVX2 with FMA, and plain C++
// (`NAIAD_PORTABLE`, or any other machine). Sums of the lanes are taken in one fixed order, and nothing is
// contracted behind our back (`-ffp-contract=off`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#if !defined(NAIAD_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
#include <immintrin.h>
#endif

#if !defined(NAIAD_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NAIAD_AVX512 1
#elif !defined(NAIAD_PORTABLE) && defined(__AVX2__) && defined(__FMA__)
#define NAIAD_AVX2 1
#endif

// NAIAD_METHOD: of a class. Both leave nothing to the compiler's judgement, but where speed is no matter it decides,
// because it takes minutes to put arrays of sixteen into each other with sanitizers.
#if NAIAD_AVX512 || NAIAD_AVX2
#define NAIAD_INLINE static inline __attribute__((always_inline))
#define NAIAD_METHOD __attribute__((always_inline))
#else
#define NAIAD_INLINE static inline
#define NAIAD_METHOD
#endif

namespace naiad {

constexpr int64_t kLanes = 16;

NAIAD_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

NAIAD_INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Round to nearest even; a NaN stays one.
NAIAD_INLINE uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

NAIAD_INLINE float float_of_bf16(uint16_t value) { return float_of_bits(static_cast<uint32_t>(value) << 16); }

// A NaN stays one, made quiet.
NAIAD_INLINE float float_of_f16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t exponent = value >> 10 & 0x1f, mantissa = value & 0x3ff;
  if (exponent == 0) return float_of_bits(sign | bits_of_float(static_cast<float>(mantissa) * 0x1p-24f));
  if (exponent < 31) return float_of_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
  return float_of_bits(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
}

// ---------------------------------------------------------------- the vector
#if NAIAD_AVX512

constexpr int kRegisters = 32;
struct Floats {
  __m512 v;
};
NAIAD_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
NAIAD_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
NAIAD_INLINE Floats fill(float x) { return {_mm512_set1_ps(x)}; }
NAIAD_INLINE __m256 lower_half(Floats a) { return _mm512_castps512_ps256(a.v); }
NAIAD_INLINE __m256 upper_half(Floats a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
NAIAD_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
NAIAD_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
NAIAD_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
NAIAD_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
NAIAD_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
NAIAD_INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
NAIAD_INLINE Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
// a * b + c, rounded once.
NAIAD_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
NAIAD_INLINE Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// In each lane x where a < b, else y.
NAIAD_INLINE Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// A bit for each lane, set where a < b.
NAIAD_INLINE uint32_t bits_where_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// In each lane x where that bit is set, else y.
NAIAD_INLINE Floats where_set(uint32_t bits, Floats x, Floats y) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), y.v, x.v)};
}
// 2 to the power of whole numbers in [-126, 127].
NAIAD_INLINE Floats power_of_two(Floats a) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
// The lowest eight bits of each lane, as exponents of floats.
NAIAD_INLINE Floats bits_to_exponents(Floats a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
}
NAIAD_INLINE Floats load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
NAIAD_INLINE Floats load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// 16 lanes of two bf16 each: the first ones and the second ones.
NAIAD_INLINE void load_pairs(const uint16_t* p, Floats& first, Floats& second) {
  const __m512i pairs = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

#elif NAIAD_AVX2

constexpr int kRegisters = 8;  // pairs of 256 bits
struct Floats {
  __m256 a, b;
};
NAIAD_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
NAIAD_INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
NAIAD_INLINE Floats fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
NAIAD_INLINE __m256 lower_half(Floats x) { return x.a; }
NAIAD_INLINE __m256 upper_half(Floats x) { return x.b; }
NAIAD_INLINE Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
NAIAD_INLINE Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
NAIAD_INLINE Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
NAIAD_INLINE Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
NAIAD_INLINE Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
NAIAD_INLINE Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
NAIAD_INLINE Floats absolute(Floats x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
NAIAD_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
NAIAD_INLINE Floats round(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
NAIAD_INLINE Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
NAIAD_INLINE uint32_t bits_where_less(__m256 a, __m256 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
NAIAD_INLINE uint32_t bits_where_less(Floats a, Floats b) {
  return bits_where_less(a.a, b.a) | bits_where_less(a.b, b.b) << 8;
}
NAIAD_INLINE __m256 where_set(uint32_t bits, __m256 x, __m256 y) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}
NAIAD_INLINE Floats where_set(uint32_t bits, Floats x, Floats y) {
  return {where_set(bits, x.a, y.a), where_set(bits >> 8, x.b, y.b)};
}
NAIAD_INLINE __m256 power_of_two(__m256 x) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
NAIAD_INLINE Floats power_of_two(Floats x) { return {power_of_two(x.a), power_of_two(x.b)}; }
NAIAD_INLINE __m256 bits_to_exponents(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
}
NAIAD_INLINE Floats bits_to_exponents(Floats x) { return {bits_to_exponents(x.a), bits_to_exponents(x.b)}; }
NAIAD_INLINE __m256 widen(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
NAIAD_INLINE Floats load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
NAIAD_INLINE Floats load_f16(const uint16_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
NAIAD_INLINE void load_pairs(const uint16_t* p, Floats& first, Floats& second) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}

#else

constexpr int kRegisters = 1;  // small tiles, which compile fast
struct Floats {
  float v[kLanes];
};
template <class F>
NAIAD_INLINE Floats each_lane(const F& f) {
  Floats result;
  for (int i = 0; i < kLanes; i++) result.v[i] = f(i);
  return result;
}
NAIAD_INLINE Floats load(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
NAIAD_INLINE void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
NAIAD_INLINE Floats fill(float x) {
  return each_lane([&](int) { return x; });
}
NAIAD_INLINE Floats operator+(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
NAIAD_INLINE Floats operator-(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
NAIAD_INLINE Floats operator*(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
NAIAD_INLINE Floats operator/(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
// As the instructions: the second operand where either is NaN.
NAIAD_INLINE Floats max(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
NAIAD_INLINE Floats min(Floats a, Floats b) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
NAIAD_INLINE Floats absolute(Floats a) {
  return each_lane([&](int i) { return std::fabs(a.v[i]); });
}
NAIAD_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return each_lane([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
NAIAD_INLINE Floats round(Floats a) {
  return each_lane([&](int i) { return std::nearbyint(a.v[i]); });
}
NAIAD_INLINE Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
NAIAD_INLINE uint32_t bits_where_less(Floats a, Floats b) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(a.v[i] < b.v[i]) << i;
  return bits;
}
NAIAD_INLINE Floats where_set(uint32_t bits, Floats x, Floats y) {
  return each_lane([&](int i) { return bits >> i & 1 ? x.v[i] : y.v[i]; });
}
NAIAD_INLINE Floats power_of_two(Floats a) {
  return each_lane([&](int i) { return float_of_bits(static_cast<uint32_t>(static_cast<int>(a.v[i]) + 127) << 23); });
}
NAIAD_INLINE Floats bits_to_exponents(Floats a) {
  return each_lane([&](int i) { return float_of_bits(bits_of_float(a.v[i]) << 23); });
}
NAIAD_INLINE Floats load_bf16(const uint16_t* p) {
  return each_lane([&](int i) { return float_of_bf16(p[i]); });
}
NAIAD_INLINE Floats load_f16(const uint16_t* p) {
  return each_lane([&](int i) { return float_of_f16(p[i]); });
}
NAIAD_INLINE void load_pairs(const uint16_t* p, Floats& first, Floats& second) {
  for (int i = 0; i < kLanes; i++) {
    first.v[i] = float_of_bf16(p[2 * i]);
    second.v[i] = float_of_bf16(p[2 * i + 1]);
  }
}

#endif

// The next multiple of the lanes.
NAIAD_INLINE int64_t whole_lanes(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// ---------------------------------------------------------------- made of the operations above

// The sum of the lanes, and the greatest: halves are put together until one lane is left. Of a NaN and a number the
// greatest is the one that comes later. `is_any_nan`: whether a lane is no number.
#if NAIAD_AVX512 || NAIAD_AVX2
NAIAD_INLINE float sum_lanes(Floats a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
NAIAD_INLINE float max_lanes(Floats a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
NAIAD_INLINE bool is_any_nan(Floats a) {
  const __m256 low = lower_half(a), high = upper_half(a);
  return _mm256_movemask_ps(_mm256_cmp_ps(low, high, _CMP_UNORD_Q)) != 0;
}
#else
NAIAD_INLINE float sum_lanes(Floats a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] += a.v[i + width];
  return a.v[0];
}
NAIAD_INLINE float max_lanes(Floats a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
NAIAD_INLINE bool is_any_nan(Floats a) {
  return std::any_of(a.v, a.v + kLanes, [](float lane) { return lane != lane; });
}
#endif

NAIAD_INLINE float first_lane(Floats a) {
  alignas(64) float t[kLanes];
  store(t, a);
  return t[0];
}

// e to the power of x, within 2 units in the last place; x is first clamped to [-87.3, 88]. A NaN stays one.
NAIAD_INLINE Floats exponential(Floats x) {
  // The operand that may be NaN stands second: that is the one which `max` and `min` then return.
  x = max(fill(-87.3f), min(fill(88.0f), x));
  const Floats n = round(x * fill(1.44269504f));
  // ln 2 in two parts.
  Floats r = fma(n, fill(-0.693359375f), x);
  r = fma(n, fill(2.12194440e-4f), r);
  Floats p = fill(1.9875691500e-4f);
  p = fma(p, r, fill(1.3981999507e-3f));
  p = fma(p, r, fill(8.3334519073e-3f));
  p = fma(p, r, fill(4.1665795894e-2f));
  p = fma(p, r, fill(1.6666665459e-1f));
  p = fma(p, r, fill(5.0000001201e-1f));
  p = fma(p, r * r, r + fill(1.0f));
  return p * power_of_two(n);
}

// 2 to the power of x ≤ 127, within 2 units in the last place; 0 where that is less than 2^-126. A NaN stays one.
NAIAD_INLINE Floats two_to_the(Floats x) {
  // So large that a sum with it is a whole number, whose lowest bits are those of an exponent.
  const Floats whole = fill(0x1.8p23f + 127.0f);
  x = max(fill(-127.0f), x);
  const Floats n = x + whole, r = x - (n - whole);
  Floats p = fill(1.32647273e-3f);
  p = fma(p, r, fill(9.67151299e-3f));
  p = fma(p, r, fill(5.55073358e-2f));
  p = fma(p, r, fill(2.40222424e-1f));
  p = fma(p, r, fill(6.93147004e-1f));
  p = fma(p, r, fill(1.0f));
  return p * bits_to_exponents(n);
}

// 1 - 2 / (e^2x + 1); near 0, where that would lose digits, an odd polynomial.
NAIAD_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x;
  Floats p = fill(-5.70498872745e-3f);
  p = fma(p, square, fill(2.06390887954e-2f));
  p = fma(p, square, fill(-5.37397155531e-2f));
  p = fma(p, square, fill(1.33314422036e-1f));
  p = fma(p, square, fill(-3.33332819422e-1f));
  const Floats small = fma(p * square, x, x);
  const Floats large = fill(1.0f) - fill(2.0f) / (exponential(x + x) + fill(1.0f));
  return where_less(absolute(x), fill(0.625f), small, large);
}

NAIAD_INLINE Floats silu(Floats x) { return x / (fill(1.0f) + exponential(fill(0.0f) - x)); }

// What `gelu_and_mul` calls "tanh".
NAIAD_INLINE Floats gelu_tanh(Floats x) {
  const Floats cubic = fma(fill(0.044715f) * x * x, x, x);
  return fill(0.5f) * x * (fill(1.0f) + hyperbolic_tangent(fill(0.7978845608f) * cubic));
}

// What `gelu_and_mul` calls "none".
NAIAD_INLINE Floats gelu_erf(Floats x) {
  alignas(64) float t[kLanes];
  store(t, x * fill(0.7071067812f));
  for (int i = 0; i < kLanes; i++) t[i] = std::erf(t[i]);
  return fill(0.5f) * x * (fill(1.0f) + load(t));
}

// ---------------------------------------------------------------- products of bf16 pairs

// acc + a₁·b₁ + a₀·b₀ in each lane, the odd ones first: two FMAs, as AVX512-BF16 does them.
#if NAIAD_AVX512 && defined(__AVX512BF16__)
struct Pairs {
  __m512bh v;
};
NAIAD_INLINE Pairs load_weight_pairs(const uint16_t* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
NAIAD_INLINE Pairs fill_pair(const uint16_t* p) {
  int pair;
  std::memcpy(&pair, p, sizeof pair);
  return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))};
}
NAIAD_INLINE Floats multiply_pairs(Pairs a, Pairs b, Floats acc) { return {_mm512_dpbf16_ps(acc.v, a.v, b.v)}; }
// The pairs with 0 in place of the second ones.
NAIAD_INLINE Pairs first_only(Pairs a) {
  const __m512i mask = _mm512_set1_epi32(0xffff);
  return {reinterpret_cast<__m512bh>(_mm512_and_si512(reinterpret_cast<__m512i>(a.v), mask))};
}
#else
struct Pairs {
  Floats first, second;
};
NAIAD_INLINE Pairs load_weight_pairs(const uint16_t* p) {
  Pairs pairs;
  load_pairs(p, pairs.first, pairs.second);
  return pairs;
}
NAIAD_INLINE Pairs fill_pair(const uint16_t* p) { return {fill(float_of_bf16(p[0])), fill(float_of_bf16(p[1]))}; }
NAIAD_INLINE Floats multiply_pairs(Pairs a, Pairs b, Floats acc) {
  return fma(a.first, b.first, fma(a.second, b.second, acc));
}
NAIAD_INLINE Pairs first_only(Pairs a) { return {a.first, fill(0.0f)}; }
#endif

NAIAD_INLINE void store_bf16(uint16_t* p, Floats a) {
#if NAIAD_AVX512 && defined(__AVX512BF16__)
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
#else
  alignas(64) float t[kLanes];
  store(t, a);
  for (int i = 0; i < kLanes; i++) p[i] = bf16_of_float(t[i]);
#endif
}

// ---------------------------------------------------------------- products of bytes

// Sixteen sums of products of four weights by four inputs. Weights are stored as w + 128, from 1 to 255, so that
// VNNI multiplies bytes without a sign by bytes with one; inputs are within ±127. Sums are exact in every form.
#if NAIAD_AVX512
struct Ints {
  __m512i v;
};
NAIAD_INLINE Floats load_whole(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
NAIAD_INLINE Floats load_whole(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Of numbers that bf16 holds exactly.
NAIAD_INLINE void store_exact_bf16(uint16_t* p, Floats a) {
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(upper));
}
NAIAD_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
NAIAD_INLINE void store_int8(int8_t* p, Floats a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
NAIAD_INLINE __m512i fill_four(const int8_t* p) {
  int four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
#if defined(__AVX512VNNI__)
struct Bytes {
  __m512i v;
};
NAIAD_INLINE Bytes load_bytes(const char* p) { return {_mm512_loadu_si512(p)}; }
// What a sum begins with, given the sum of the inputs: the products with the 128 of each weight, taken back.
NAIAD_INLINE Ints first_sum(int32_t sum_of_inputs) { return {_mm512_set1_epi32(-128 * sum_of_inputs)}; }
NAIAD_INLINE Ints multiply_four(const Bytes& w, const int8_t* x, Ints sum) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, fill_four(x))};
}
#else
struct Bytes {
  __m512i magnitude;
  __mmask64 is_negative;
};
NAIAD_INLINE Bytes load_bytes(const char* p) {
  const __m512i w = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
NAIAD_INLINE Ints first_sum(int32_t) { return {_mm512_setzero_si512()}; }
NAIAD_INLINE Ints multiply_four(const Bytes& w, const int8_t* x, Ints sum) {
  const __m512i four = fill_four(x);
  const __m512i inputs = _mm512_mask_sub_epi8(four, w.is_negative, _mm512_setzero_si512(), four);
  // At most 2 · 128 · 127: nothing saturates.
  const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, inputs);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif
#elif NAIAD_AVX2
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b, magnitude_a, magnitude_b;
};
NAIAD_INLINE __m256 widen(const int32_t* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
NAIAD_INLINE Floats load_whole(const int32_t* p) { return {widen(p), widen(p + 8)}; }
NAIAD_INLINE __m256 widen(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
NAIAD_INLINE Floats load_whole(const int8_t* p) { return {widen(p), widen(p + 8)}; }
NAIAD_INLINE void store_exact_bf16(uint16_t* p, Floats x) {
  const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16);
  const __m256i b = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
  // Packing works on halves of 128 bits: the middle quarters change places.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
NAIAD_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
NAIAD_INLINE void store_int8(int8_t* p, Floats x) {
  // Packing works on halves of 128 bits: the middle quarters change places.
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
NAIAD_INLINE Bytes load_bytes(const char* p) {
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i a = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), sign);
  const __m256i b = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)), sign);
  return {a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)};
}
NAIAD_INLINE Ints first_sum(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
NAIAD_INLINE __m256i multiply_four(__m256i w, __m256i magnitude, __m256i inputs, __m256i sum) {
  // At most 2 · 128 · 127: nothing saturates.
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(inputs, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
NAIAD_INLINE Ints multiply_four(const Bytes& w, const int8_t* x, Ints sum) {
  int four;
  std::memcpy(&four, x, sizeof four);
  const __m256i inputs = _mm256_set1_epi32(four);
  return {multiply_four(w.a, w.magnitude_a, inputs, sum.a), multiply_four(w.b, w.magnitude_b, inputs, sum.b)};
}
#else
struct Ints {
  int32_t v[kLanes];
};
struct Bytes {
  const uint8_t* v;
};
NAIAD_INLINE Floats load_whole(const int32_t* p) {
  return each_lane([&](int i) { return static_cast<float>(p[i]); });
}
NAIAD_INLINE Floats load_whole(const int8_t* p) {
  return each_lane([&](int i) { return static_cast<float>(p[i]); });
}
NAIAD_INLINE void store_exact_bf16(uint16_t* p, Floats a) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<uint16_t>(bits_of_float(a.v[i]) >> 16);
}
NAIAD_INLINE Floats to_floats(Ints a) {
  return each_lane([&](int i) { return static_cast<float>(a.v[i]); });
}
NAIAD_INLINE void store_int8(int8_t* p, Floats a) {
  for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(std::nearbyint(a.v[i]));
}
NAIAD_INLINE Bytes load_bytes(const char* p) { return {reinterpret_cast<const uint8_t*>(p)}; }
NAIAD_INLINE Ints first_sum(int32_t) { return {}; }
NAIAD_INLINE Ints multiply_four(const Bytes& w, const int8_t* x, Ints sum) {
  for (int i = 0; i < kLanes; i++)
    for (int k = 0; k < 4; k++) sum.v[i] += (w.v[4 * i + k] - 128) * x[k];
  return sum;
}
#endif

// The sums of 32 whole numbers within ±127, and of the 32 after them.
#if NAIAD_AVX512 || NAIAD_AVX2
NAIAD_INLINE __m256i sums_of_four(const int8_t* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
}
NAIAD_INLINE void sums_of_32(const int8_t* p, int32_t sums[2]) {
  const __m256i pairs = _mm256_hadd_epi32(sums_of_four(p), sums_of_four(p + 32));
  const __m256i halves = _mm256_hadd_epi32(pairs, pairs);
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), both);
}
#else
NAIAD_INLINE void sums_of_32(const int8_t* p, int32_t sums[2]) {
  for (int half = 0; half < 2; half++) sums[half] = std::accumulate(p + 32 * half, p + 32 * half + 32, 0);
}
#endif

// Into the cache nearest to the core, for what is read at once; and into the second, for what is read later.
NAIAD_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
NAIAD_INLINE void prefetch_early(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace naiad
