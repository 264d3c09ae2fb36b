// Scores and weighted values with tiles.
//
// A tile of weights is 32 features of a group's 16 keys as they lie in memory, or 16 features of 32 values, whose pairs
// are rows that are `head_dim` pairs apart. What does not fit is copied once for all strips of a part: keys of a
// head that is no multiple of 32, values of 32 keys that do not lie together, or that are not all there.
#pragma once

#include "attention_weights.h"
#include "tile_panels.h"

namespace naiad {

template <class CacheElement>
class TileStrips {
 public:
  using Element = CacheElement;
  // Splits begin with a multiple of so many keys, because it decides about the order of sums.
  static constexpr int64_t kKeysPerStep = 32;
  static constexpr int64_t kMostRows = kTileRows;

  static int64_t query_stride(int64_t head_dim) { return whole_steps(head_dim); }
  // Of a member's own memory.
  static int64_t bytes(int64_t head_dim) {
    return kSplit * (whole_steps(head_dim) + whole_lanes(head_dim)) * static_cast<int64_t>(sizeof(Element));
  }

  // Of one record; for each of its parts `prepare` comes first. `memory`: `bytes()`.
  TileStrips(const NaiadRecord& record, const Tiling& tiling, char* memory)
      : head_dim_(record.cache.head_dim),
        copied_keys_(reinterpret_cast<Element*>(memory)),
        copied_values_(copied_keys_ + kSplit * whole_steps(head_dim_)),
        tiles_(tiling.most_rows()) {}

  void prepare(const Part<Element>& part) {
    part_ = &part;
    for (int64_t g = 0; g < part.num_groups; g++)
      keys_[g] = whole_steps(head_dim_) == head_dim_ ? part.group_keys[g] : copied_keys(g);
    for (int64_t g = 0; g < part.num_groups; g += kGroupsPerStep)
      values_[g / kGroupsPerStep] = lie_together(g) ? StepValues{part.group_values[g], head_dim_} : copied_values(g);
  }

  // Of each group, what its values are multiplied by: nothing.
  const float* const* value_scales() const { return nullptr; }

  // The strip's rows of `scores`, for all groups that it sees.
  void score(const Strip& strip, const Element* queries, float* scores) const {
    const int64_t end = (strip.keys.end + kGroup - 1) / kGroup;
    int64_t g = strip.keys.first / kGroup;
    for (; g + kTilesTogether <= end; g += kTilesTogether) score_groups<kTilesTogether>(strip, g, queries, scores);
    for (; g < end; g++) score_groups<1>(strip, g, queries, scores);
  }

  // The strip's weighted values; the keys of `next` are read ahead meanwhile.
  void sum_values(const Strip& strip, const Part<Element>* next, const Element* weights, const Partial& partial) const {
    int64_t d = 0;
    for (; d + kTilesTogether * kLanes <= head_dim_; d += kTilesTogether * kLanes)
      sum_features<kTilesTogether>(strip, d == 0 ? next : nullptr, d, weights, partial);
    for (; d < head_dim_; d += kLanes) sum_features<1>(strip, d == 0 ? next : nullptr, d, weights, partial);
  }

 private:
  static constexpr int64_t kFeaturesPerStep = 32, kGroupsPerStep = kKeysPerStep / kGroup;
  static constexpr int64_t kPairsPerGroup = kGroup / 2;
  static constexpr int kTilesTogether = 4;

  // Values of 32 keys: 16 rows of pairs, `stride` pairs apart.
  struct StepValues {
    const Element* pairs;
    int64_t stride;
  };

  static int64_t whole_steps(int64_t width) {
    return (width + kFeaturesPerStep - 1) / kFeaturesPerStep * kFeaturesPerStep;
  }

  const Element* copied_keys(int64_t group) const {
    const int64_t count = head_dim_ * kGroup, whole = whole_steps(head_dim_) * kGroup;
    Element* copy = copied_keys_ + group * whole;
    const Element* keys = part_->group_keys[group];
    if (!keys) return nullptr;
    std::memcpy(copy, keys, static_cast<size_t>(count) * sizeof(Element));
    std::fill(copy + count, copy + whole, Element(0));
    return copy;
  }

  // Whether the values of two groups can be a tile where they are.
  bool lie_together(int64_t group) const {
    const Element* const* values = part_->group_values + group;
    return part_->keys.first + (group + kGroupsPerStep) * kGroup <= part_->keys.end && head_dim_ % kLanes == 0 &&
           values[0] && values[0] + kGroup * head_dim_ == values[1];
  }

  // After the last key there may be anything, which is not to be multiplied even by 0.
  StepValues copied_values(int64_t group) const {
    const int64_t stride = whole_lanes(head_dim_), num_keys = part_->keys.end - part_->keys.first;
    Element* copy = copied_values_ + group * kGroup * stride;
    for (int64_t pair = 0; pair < kKeysPerStep / 2; pair++) {
      Element* to = copy + pair * 2 * stride;
      const int64_t key = group * kGroup + 2 * pair, in_group = pair % kPairsPerGroup;
      const Element* values = key < num_keys ? part_->group_values[group + pair / kPairsPerGroup] : nullptr;
      const int64_t count = values ? 2 * head_dim_ : 0;
      if (values) std::memcpy(to, values + in_group * count, static_cast<size_t>(count) * sizeof(Element));
      std::fill(to + count, to + 2 * stride, Element(0));
      if (key + 1 == num_keys)
        for (int64_t d = 0; d < head_dim_; d++) to[2 * d + 1] = 0;
    }
    return {copy, stride};
  }

  template <int GROUPS>
  void score_groups(const Strip& strip, int64_t group, const Element* queries, float* scores) const {
    const TileRows<Element> inputs[] = {
        {queries, query_stride(head_dim_) * static_cast<int64_t>(sizeof(Element)), strip.num_rows}};
    const char *panels[GROUPS], *next[GROUPS], *values[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
      panels[g] = reinterpret_cast<const char*>(keys_[group + g]);
      next[g] = reinterpret_cast<const char*>(keys_[std::min(group + GROUPS + g, part_->num_groups - 1)]);
      values[g] = reinterpret_cast<const char*>(part_->group_values[group + g]);
    }
    zero_sum_tiles<GROUPS>();
    ReadNoLines nothing;
    for (int64_t step = 0; step < query_stride(head_dim_) / kFeaturesPerStep; step++) {
      if (strip.is_first)
        for (int g = 0; g < GROUPS; g++) read_tile(next[g] + step * kTileBytes, values[g] + step * kTileBytes);
      add_tile_products<Bf16Tiles>(inputs, tiles_of_step(panels, step).data, step, nothing);
    }
    for_each<GROUPS>([&](auto tile) {
      constexpr int TILE = decltype(tile)::value;
      store_tile<kSumTiles + TILE>(scores + (group + TILE) * kGroup, kScoreStride * 4);
    });
  }

  // Asks for keys, and for values that are read later.
  NAIAD_METHOD static void read_tile(const char* keys, const char* values) {
    for (int64_t at = 0; at < kTileBytes; at += kLineBytes) {
      prefetch(keys + at);
      prefetch_early(values + at);
    }
  }

  void read_group(const Element* keys) const {
    if (!keys) return;
    for (int64_t at = 0; at < kGroup * head_dim_; at += kLineBytes / static_cast<int64_t>(sizeof(Element)))
      prefetch_early(keys + at);
  }

  template <int TILES>
  void sum_features(const Strip& strip, const Part<Element>* next, int64_t d, const Element* weights,
                    const Partial& partial) const {
    zero_sum_tiles<TILES>();
    for (int64_t step = strip.keys.first / kKeysPerStep; step * kKeysPerStep < strip.keys.end; step++) {
      const StepValues& values = values_[step];
      if (next)
        for (int64_t g = step * kGroupsPerStep; g < std::min((step + 1) * kGroupsPerStep, next->num_groups); g++)
          read_group(next->group_keys[g]);
      load_tile<kInputTiles>(weights + step * kKeysPerStep, kScoreStride * 2);
      for_each<TILES>([&](auto tile) {
        constexpr int TILE = decltype(tile)::value, WEIGHTS = kWeightTiles + TILE % (kNumTiles - kWeightTiles);
        load_tile<WEIGHTS>(values.pairs + (d + TILE * kLanes) * 2, values.stride * 4);
        multiply_bf16<kSumTiles + TILE, kInputTiles, WEIGHTS>();
      });
    }
    for_each<TILES>([&](auto tile) {
      constexpr int TILE = decltype(tile)::value;
      store_tile<kSumTiles + TILE>(partial.values + d + TILE * kLanes, partial.stride * 4);
    });
  }

  const int64_t head_dim_;
  Element *const copied_keys_, *const copied_values_;
  const TileSession tiles_;
  const Part<Element>* part_ = nullptr;
  const Element* keys_[kMostGroups];
  StepValues values_[kMostGroups / kGroupsPerStep];
};

}  // namespace naiad
