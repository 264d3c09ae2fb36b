// From a row's scores to the weights of its values.
#pragma once

#include <limits>

#include "attention_parts.h"

namespace naiad {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
// Floats of a row of scores: 64 bytes more than a split, or all rows would compete for the same places of a cache.
constexpr int64_t kScoreStride = kSplit + kLanes;

// A row's scores are products of its query and keys, and become 2^(factor * score - top).
class Weighing {
 public:
  explicit Weighing(const NaiadRecord& record)
      : soft_cap_(record.soft_cap), inner_(record.factor), factor_((soft_cap_ > 0.0f ? 1.0f : inner_) * kLog2OfE) {}

  // Caps scores, hides those of keys that are not seen, and returns the largest, times the factor.
  float top(float* scores, Span seen) const {
    if (seen.first >= seen.end) return kNothing;
    const int64_t first = first_group(seen), end = end_group(seen);
    if (soft_cap_ > 0.0f)
      for (int64_t k = first; k < end; k += kGroup) store(scores + k, capped(load(scores + k)));
    hide_rest(scores, seen);
    Floats largest = fill(kNothing);
    for (int64_t k = first; k < end; k += kGroup) largest = max(largest, load(scores + k));
    return max_lanes(largest) * factor_;
  }

  // Writes the weights of `keys`, which begin and end with groups: 0 where a key is not seen. Returns their sum before
  // they are rounded. `value_scales`: null, or for each group what its values are multiplied by; the weights are then.
  template <class Element>
  float weigh(const float* scores, Span seen, Span keys, float top, Element* weights,
              const float* const* value_scales) const {
    using Product = Products<Element>;
    const bool sees_none = seen.first >= seen.end;
    const int64_t first = sees_none ? keys.end : first_group(seen), end = sees_none ? keys.end : end_group(seen);
    for (int64_t k = keys.first; k < first; k += kGroup) Product::store_rounded(weights + k, fill(0.0f));
    const Floats factor = fill(factor_), less = fill(-top);
    Floats sum = fill(0.0f);
    for (int64_t k = first; k < end; k += kGroup) {
      const Floats weight = two_to_the(fma(load(scores + k), factor, less));
      sum = sum + weight;
      Product::store_rounded(weights + k, value_scales ? scaled(weight, value_scales[k / kGroup]) : weight);
    }
    for (int64_t k = end; k < keys.end; k += kGroup) Product::store_rounded(weights + k, fill(0.0f));
    return sum_lanes(sum);
  }

 private:
  static constexpr float kLog2OfE = 1.44269504f;

  // The first key of the first group, and the end of the last one.
  static int64_t first_group(Span keys) { return keys.first / kGroup * kGroup; }
  static int64_t end_group(Span keys) { return (keys.end + kGroup - 1) / kGroup * kGroup; }

  // Where a key is not seen its scale may be anything.
  NAIAD_METHOD static Floats scaled(Floats weight, const float* scales) {
    return where_less(fill(0.0f), weight, weight * load(scales), weight);
  }

  NAIAD_METHOD Floats capped(Floats score) const {
    const Floats cap = fill(soft_cap_);
    return cap * hyperbolic_tangent(score * fill(inner_) / cap);
  }

  static void hide_rest(float* scores, Span seen) {
    float *first = scores + first_group(seen), *last = scores + end_group(seen) - kGroup;
    if (const int64_t hidden = scores + seen.first - first)
      store(first, where_set(~0u << hidden, load(first), fill(kNothing)));
    if (const int64_t shown = scores + seen.end - last; shown < kGroup)
      store(last, where_set((1u << shown) - 1, load(last), fill(kNothing)));
  }

  const float soft_cap_, inner_, factor_;
};

}  // namespace naiad
