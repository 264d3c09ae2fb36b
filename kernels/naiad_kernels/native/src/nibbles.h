// Products of weights in four bits with inputs in eight.
//
// A step of a panel is 64 inputs, two groups of 32 with a scale and an offset for each output: 512 bytes of weights,
// then the groups' scales in float16, then their offsets. 64 bytes of weights hold eight inputs of 16 outputs: four of
// them in the lower halves of the bytes, and those that come 16 inputs later in the upper ones.
#pragma once

#include "inputs.h"
#include "simd.h"

namespace naiad {

// ---------------------------------------------------------------- sums of whole numbers
// Weights are from 0 to 15 and inputs within ±127. A group's sums are exact in every form: those of two inputs in each
// step of four, over 32 inputs, are at most 16 · 15 · 127, which 16 bits hold.
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

// ---------------------------------------------------------------- what a group's sums stand for
constexpr int64_t kGroupInputs = 32, kGroupsPerStep = kInputsPerScale / kGroupInputs;
constexpr int64_t kNibbleBytesPerGroup = kGroupInputs * kLanes / 2, kScaleBytesPerGroup = kLanes * 2;

// A weight is scale * (number - zero point). What is stored of a zero point is eight times what it has more than 8.
struct ZeroPoints {
  static constexpr int64_t kBytesPerGroup = kLanes;
  NAIAD_INLINE Floats load_offsets(const char* p) {
    return fma(load_whole(reinterpret_cast<const int8_t*>(p)), fill(0.125f), fill(8.0f));
  }
  // Whole eighths below 2^24 until the scale is applied: nothing is rounded before.
  NAIAD_INLINE Floats products(Floats sums, float inputs, Floats scale, Floats zero_point) {
    return fma(zero_point, fill(-inputs), sums) * scale;
  }
};

// A weight is scale * number + minimum, a float16.
struct Minimums {
  static constexpr int64_t kBytesPerGroup = kLanes * 2;
  NAIAD_INLINE Floats load_offsets(const char* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
  NAIAD_INLINE Floats products(Floats sums, float inputs, Floats scale, Floats minimum) {
    return fma(sums, scale, minimum * fill(inputs));
  }
};

// A step of a panel.
template <class Offsets>
struct NibbleStep {
  static constexpr int64_t kScalesAt = kGroupsPerStep * kNibbleBytesPerGroup;
  static constexpr int64_t kOffsetsAt = kScalesAt + kGroupsPerStep * kScaleBytesPerGroup;
  static constexpr int64_t kBytes = kOffsetsAt + kGroupsPerStep * Offsets::kBytesPerGroup;

  NAIAD_INLINE Floats load_scales(const char* step, int64_t group) {
    return load_f16(reinterpret_cast<const uint16_t*>(step + kScalesAt + group * kScaleBytesPerGroup));
  }
  NAIAD_INLINE Floats load_offsets(const char* step, int64_t group) {
    return Offsets::load_offsets(step + kOffsetsAt + group * Offsets::kBytesPerGroup);
  }
};

// Both groups of a step are added as floats, one after the other.
template <class Offsets>
struct Int4ByInt8 {
  using Input = RoundedInputs;
  static constexpr bool kTakesTiles = false;
  static constexpr int64_t kInputsPerStep = kInputsPerScale, kWidth = 1;
  static constexpr int64_t kPanelBytesPerStep = NibbleStep<Offsets>::kBytes;
  static constexpr int kMostRows = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 3 : 2, kMostPanels = 2, kPanelsAtOnce = 2;

  template <int ROWS, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const Input* x, int64_t stride, const char* const panels[PANELS], Ahead& ahead,
                             Floats sums[ROWS][PANELS]) {
    const char* at[PANELS];
    for (int64_t group = 0; group < kGroupsPerStep; group++) {
      GroupSums whole[ROWS][PANELS];
      for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) whole[r][p] = no_sums();
      for (int64_t line = 0; line < kNibbleBytesPerGroup / 64; line++) {
        Fours lower[PANELS], upper[PANELS];
        for (int p = 0; p < PANELS; p++) {
          at[p] = panels[p] + group * kNibbleBytesPerGroup + line * 64;
          load_nibbles(at[p], lower[p], upper[p]);
        }
        ahead.read(at);
        for (int r = 0; r < ROWS; r++) {
          const int8_t* values = x[r * stride].values + group * kGroupInputs + line * 4;
          for (int p = 0; p < PANELS; p++) {
            whole[r][p] = add_products(lower[p], values, whole[r][p]);
            whole[r][p] = add_products(upper[p], values + kGroupInputs / 2, whole[r][p]);
          }
        }
      }
      add_group<ROWS, PANELS>(x, stride, panels, group, whole, sums);
    }
    // Scales and offsets take two more lines, or nearly.
    for (int64_t line = 0; line < 2; line++) {
      for (int p = 0; p < PANELS; p++) at[p] = panels[p] + NibbleStep<Offsets>::kScalesAt + line * 64;
      ahead.read(at);
    }
  }

 private:
  template <int ROWS, int PANELS>
  NAIAD_INLINE void add_group(const Input* x, int64_t stride, const char* const panels[PANELS], int64_t group,
                              const GroupSums whole[ROWS][PANELS], Floats sums[ROWS][PANELS]) {
    for (int p = 0; p < PANELS; p++) {
      const Floats scale = NibbleStep<Offsets>::load_scales(panels[p], group);
      const Floats offset = NibbleStep<Offsets>::load_offsets(panels[p], group);
      for (int r = 0; r < ROWS; r++) {
        const Input& inputs = x[r * stride];
        const float sum = static_cast<float>(inputs.group_sums[group]);
        const Floats products = Offsets::products(to_floats(whole[r][p]), sum, scale, offset);
        sums[r][p] = fma(products, fill(inputs.scale), sums[r][p]);
      }
    }
  }
};

}  // namespace naiad
