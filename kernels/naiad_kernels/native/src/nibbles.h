// Products of weights in four bits with inputs in eight.
//
// A step of a panel is 64 inputs, two groups of 32 with a scale and an offset for each output: 512 bytes of weights,
// then the groups' scales in float16, then their offsets. 64 bytes of weights hold eight inputs of 16 outputs: four of
// them in the lower halves of the bytes, and those that come 16 inputs later in the upper ones.
#pragma once

#include "inputs.h"
#include "simd_nibbles.h"

namespace naiad {

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
