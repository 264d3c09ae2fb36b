// Scores and weighted values of a cache of eight bits.
//
// A part's whole numbers are widened to elements, which hold them exactly, in memory of the member's own, and
// multiplied there as others are. Scores are then multiplied by the scales of their keys; weights by those of their
// values, before they are rounded.
#pragma once

#include "attention_weights.h"

namespace naiad {

template <class Strips>
class CodedStrips {
 public:
  using Element = typename Strips::Element;
  static constexpr int64_t kKeysPerStep = Strips::kKeysPerStep;
  static constexpr int64_t kMostRows = Strips::kMostRows;

  static int64_t query_stride(int64_t head_dim) { return Strips::query_stride(head_dim); }
  // Of a member's own memory.
  static int64_t bytes(int64_t head_dim) {
    return Strips::bytes(head_dim) + 2 * kSplit * head_dim * static_cast<int64_t>(sizeof(Element));
  }

  // Of one record; for each of its parts `prepare` comes first. `memory`: `bytes()`.
  CodedStrips(const NaiadRecord& record, const Tiling& tiling, char* memory)
      : cache_(record.cache),
        group_size_(kGroup * record.cache.head_dim),
        keys_(reinterpret_cast<Element*>(memory)),
        values_(keys_ + kMostGroups * group_size_),
        strips_(record, tiling, reinterpret_cast<char*>(values_ + kMostGroups * group_size_)) {}

  void prepare(const Part<Element>& part) {
    widened_ = part;
    for (int64_t g = 0; g < part.num_groups; g++) {
      if (part.offsets[g] < 0) continue;
      read_ahead(part, g + kGroupsAhead);
      widened_.group_keys[g] = widened(cache_.keys, part.offsets[g], keys_ + g * group_size_);
      widened_.group_values[g] = widened(cache_.values, part.offsets[g], values_ + g * group_size_);
      const int64_t first_token = part.offsets[g] / cache_.head_dim;
      key_scales_[g] = cache_.key_scales + first_token;
      value_scales_[g] = cache_.value_scales + first_token;
    }
    strips_.prepare(widened_);
  }

  const float* const* value_scales() const { return value_scales_; }

  // The strip's rows of `scores`, for all groups that it sees.
  void score(const Strip& strip, const Element* queries, float* scores) const {
    strips_.score(strip, queries, scores);
    for (int64_t r = 0; r < strip.num_rows; r++)
      for (int64_t g = strip.keys.first / kGroup; g * kGroup < strip.keys.end; g++) {
        float* group = scores + r * kScoreStride + g * kGroup;
        store(group, load(group) * load(key_scales_[g]));
      }
  }

  // The strip's weighted values.
  void sum_values(const Strip& strip, const Part<Element>*, const Element* weights, const Partial& partial) const {
    strips_.sum_values(strip, nullptr, weights, partial);
  }

 private:
  // Far enough that a group is there when it is widened.
  static constexpr int64_t kGroupsAhead = 2, kLine = 64;

  Element* widened(const void* codes, int64_t offset, Element* to) const {
    const int8_t* from = static_cast<const int8_t*>(codes) + offset;
    for (int64_t i = 0; i < group_size_; i += kLanes) Products<Element>::widen(from + i, to + i);
    return to;
  }

  void read_ahead(const Part<Element>& part, int64_t group) const {
    if (group >= part.num_groups) return;
    const int8_t* keys = static_cast<const int8_t*>(cache_.keys) + part.offsets[group];
    const int8_t* values = static_cast<const int8_t*>(cache_.values) + part.offsets[group];
    for (int64_t i = 0; i < group_size_; i += kLine) {
      prefetch_early(keys + i);
      prefetch_early(values + i);
    }
  }

  const NaiadCache& cache_;
  const int64_t group_size_;
  Element *const keys_, *const values_;  // [kMostGroups][group_size]
  Strips strips_;
  Part<Element> widened_;
  const float *key_scales_[kMostGroups], *value_scales_[kMostGroups];
};

}  // namespace naiad
