// The inputs of a linear layer, rounded to what it multiplies.
#pragma once

#include "simd.h"

namespace naiad {

constexpr int64_t kInputsPerScale = 64, kInputsPerPlanes = 32;

// Inputs that are rounded together; each is `scale` times what it was.
struct RoundedInputs {
  int8_t values[kInputsPerScale];
  float scale;
  int32_t group_sums[2];  // of the first 32 values, and of the others

  int32_t sum() const { return group_sums[0] + group_sums[1]; }
};

// Inputs as sums of three numbers in bf16. The sums are exact while the last numbers are not subnormal.
struct Bf16Planes {
  static constexpr int kCount = 3;
  uint16_t planes[kCount][kInputsPerPlanes];  // from the largest numbers to the smallest
};

// `stride` inputs from a row to the next.
template <class Product>
struct Rows {
  const typename Product::Input* data;
  int64_t stride;
};

NAIAD_INLINE void round_row(const float* in, int64_t width, uint16_t* out) {
  for (int64_t i = 0; i < width; i += kLanes) store_bf16(out + i, load(in + i));
}

// What rounding leaves is exact, and has 8 bits less every time. If a value is not finite, no result will be.
NAIAD_INLINE void round_row(const float* in, int64_t width, Bf16Planes* out) {
  for (int64_t i = 0; i < width; i += kInputsPerPlanes, out++)
    for (int64_t j = 0; j < kInputsPerPlanes; j += kLanes) {
      Floats rest = load(in + i + j);
      for (uint16_t (&plane)[kInputsPerPlanes] : out->planes) {
        store_bf16(plane + j, rest);
        rest = rest - load_bf16(plane + j);
      }
    }
}

// The largest of 64 becomes ±127. If one is not finite, `scale` is not a number, and no result will be.
NAIAD_INLINE void round_group(const float* in, RoundedInputs& out) {
  Floats largest = fill(0.0f), not_finite = fill(0.0f);
  for (int64_t i = 0; i < kInputsPerScale; i += kLanes) {
    const Floats x = load(in + i);
    largest = max(largest, absolute(x));
    not_finite = fma(x, fill(0.0f), not_finite);
  }
  const float top = max_lanes(largest);
  out.scale = is_any_nan(not_finite) ? NAN : top / 127.0f;
  // Below it 127 / top would not be finite.
  if (!(out.scale > 1e-36f)) {
    if (out.scale == out.scale) out.scale = 0.0f;
    out.group_sums[0] = out.group_sums[1] = 0;
    std::memset(out.values, 0, sizeof out.values);
    return;
  }
  const Floats factor = fill(127.0f / top);
  for (int64_t i = 0; i < kInputsPerScale; i += kLanes) store_int8(out.values + i, load(in + i) * factor);
  sums_of_32(out.values, out.group_sums);
}

NAIAD_INLINE void round_row(const float* in, int64_t width, RoundedInputs* out) {
  for (int64_t i = 0; i < width; i += kInputsPerScale) round_group(in + i, *out++);
}

}  // namespace naiad
