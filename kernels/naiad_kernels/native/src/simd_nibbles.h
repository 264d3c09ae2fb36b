// The vector layer of products of whole numbers: weights in four bits and inputs in eight, and their sums.
//
// Weights are from 0 to 15 and inputs within ±127. A group's sums are exact in every form: those of two inputs in each
// step of four, over 32 inputs, are at most 16 · 15 · 127, which 16 bits hold.
#pragma once

#include "simd.h"

namespace naiad {

#if NAIAD_AVX512

struct Fours {
  __m512i v;
};
NAIAD_INLINE void load_nibbles(const char* p, Fours& lower, Fours& upper) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  lower.v = _mm512_and_si512(both, mask);
  upper.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
NAIAD_INLINE void store_bytes(char* p, Fours fours) { _mm512_storeu_si512(p, fours.v); }
struct GroupSums {
  __m512i v;
};
NAIAD_INLINE GroupSums no_sums() { return {_mm512_setzero_si512()}; }
#if defined(__AVX512VNNI__)
NAIAD_INLINE GroupSums add_products(Fours w, const int8_t* x, GroupSums sums) {
  return {_mm512_dpbusd_epi32(sums.v, w.v, fill_four(x))};
}
NAIAD_INLINE Floats to_floats(GroupSums sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
#else
NAIAD_INLINE GroupSums add_products(Fours w, const int8_t* x, GroupSums sums) {
  return {_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(w.v, fill_four(x)))};
}
NAIAD_INLINE Floats to_floats(GroupSums sums) {
  return {_mm512_cvtepi32_ps(_mm512_madd_epi16(sums.v, _mm512_set1_epi16(1)))};
}
#endif

#elif NAIAD_AVX2

struct Fours {
  __m256i a, b;
};
NAIAD_INLINE void load_nibbles(const char* p, Fours& lower, Fours& upper) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  const __m256i mask = _mm256_set1_epi8(15);
  lower = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  upper = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
NAIAD_INLINE void store_bytes(char* p, const Fours& fours) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), fours.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), fours.b);
}
struct GroupSums {
  __m256i a, b;
};
NAIAD_INLINE GroupSums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
NAIAD_INLINE GroupSums add_products(const Fours& w, const int8_t* x, const GroupSums& sums) {
  int four;
  std::memcpy(&four, x, sizeof four);
  const __m256i inputs = _mm256_set1_epi32(four);
  return {_mm256_add_epi16(sums.a, _mm256_maddubs_epi16(w.a, inputs)),
          _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(w.b, inputs))};
}
NAIAD_INLINE Floats to_floats(const GroupSums& sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(sums.a, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(sums.b, ones))};
}

#else

struct Fours {
  uint8_t v[4 * kLanes];
};
NAIAD_INLINE void load_nibbles(const char* p, Fours& lower, Fours& upper) {
  for (int64_t i = 0; i < 4 * kLanes; i++) {
    const uint8_t both = static_cast<uint8_t>(p[i]);
    lower.v[i] = both & 15;
    upper.v[i] = both >> 4;
  }
}
NAIAD_INLINE void store_bytes(char* p, const Fours& fours) { std::memcpy(p, fours.v, sizeof fours.v); }
struct GroupSums {
  int32_t v[kLanes];
};
NAIAD_INLINE GroupSums no_sums() { return {}; }
NAIAD_INLINE GroupSums add_products(const Fours& w, const int8_t* x, GroupSums sums) {
  for (int i = 0; i < kLanes; i++)
    for (int k = 0; k < 4; k++) sums.v[i] += w.v[4 * i + k] * x[k];
  return sums;
}
NAIAD_INLINE Floats to_floats(const GroupSums& sums) { return load_whole(sums.v); }

#endif

}  // namespace naiad
