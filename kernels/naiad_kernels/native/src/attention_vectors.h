// Scores and weighted values with vectors.
//
// One vector of a group has `kTogether` features of 16 keys, or 16 features of `kTogether` values. Every sum has one
// accumulator.
#pragma once

#include "attention_weights.h"

namespace naiad {

template <class CacheElement>
class VectorStrips {
 public:
  using Element = CacheElement;
  // Splits begin with a multiple of so many keys.
  static constexpr int64_t kKeysPerStep = kGroup;
  static constexpr int64_t kMostRows = 12;

  static int64_t query_stride(int64_t head_dim) { return whole_lanes(head_dim); }
  // Of a member's own memory.
  static int64_t bytes(int64_t) { return 0; }

  // Of one record; for each of its parts `prepare` comes first.
  VectorStrips(const NaiadRecord& record, const Tiling&, char*) : head_dim_(record.cache.head_dim) {}

  void prepare(const Part<Element>& part) { part_ = &part; }

  // Of each group, what its values are multiplied by: nothing.
  const float* const* value_scales() const { return nullptr; }

  // The strip's rows of `scores`, for all groups that it sees.
  void score(const Strip& strip, const Element* queries, float* scores) const {
    for (int64_t r = 0; r < strip.num_rows; r += kRowsTogether)
      score_rows<1>(strip, r, std::min<int64_t>(kRowsTogether, strip.num_rows - r), queries, scores);
  }

  // The strip's weighted values; the keys of `next` are read ahead meanwhile.
  void sum_values(const Strip& strip, const Part<Element>* next, const Element* weights, const Partial& partial) const {
    for (int64_t r = 0; r < strip.num_rows; r += kRowsTogether)
      sum_rows<1>(strip, r == 0 ? next : nullptr, r, std::min<int64_t>(kRowsTogether, strip.num_rows - r), weights,
                  partial);
  }

 private:
  using Product = Products<Element>;
  // What is computed together, so that sums fill the registers: rows by groups of keys, and rows by vectors of values.
  static constexpr int kRowsTogether = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 3 : 2;
  static constexpr int kGroupsTogether = kRegisters >= 32 ? 4 : 2;
  static constexpr int kVectorsTogether = kGroupsTogether;
  // Elements of one line of memory.
  static constexpr int64_t kLine = 64 / sizeof(Element);

  static int64_t first_group(const Strip& strip) { return strip.keys.first / kGroup; }
  static int64_t end_group(const Strip& strip) { return (strip.keys.end + kGroup - 1) / kGroup; }

  // Scores of `count` rows from `row` on; ROWS is where the search for the fitting form begins.
  template <int ROWS>
  void score_rows(const Strip& strip, int64_t row, int64_t count, const Element* queries, float* scores) const {
    if constexpr (ROWS < kRowsTogether)
      if (count > ROWS) return score_rows<ROWS + 1>(strip, row, count, queries, scores);
    queries += row * query_stride(head_dim_);
    scores += row * kScoreStride;
    const bool reads = strip.is_first && row == 0;
    int64_t g = first_group(strip);
    for (; g + kGroupsTogether <= end_group(strip); g += kGroupsTogether)
      score_groups<ROWS, kGroupsTogether>(g, reads, queries, scores);
    for (; g < end_group(strip); g++) score_groups<ROWS, 1>(g, reads, queries, scores);
  }

  template <int ROWS, int GROUPS>
  void score_groups(int64_t group, bool reads, const Element* queries, float* scores) const {
    if (reads)
      score_groups<ROWS, GROUPS>(group, ReadOn<GROUPS>(*part_, group), queries, scores);
    else
      score_groups<ROWS, GROUPS>(group, ReadNothing(), queries, scores);
  }

  struct ReadNothing {
    NAIAD_METHOD void read(int64_t) const {}
  };

  // Reads the keys of the next groups, and the values of these, ahead.
  template <int GROUPS>
  struct ReadOn {
    ReadOn(const Part<Element>& part, int64_t group) : values(part.group_values + group) {
      for (int g = 0; g < GROUPS; g++) next[g] = part.group_keys[std::min(group + GROUPS + g, part.num_groups - 1)];
    }
    NAIAD_METHOD void read(int64_t d) const {
      for (int g = 0; g < GROUPS; g++) {
        prefetch_early(next[g] + d * kGroup);
        prefetch_early(values[g] + d * kGroup);
      }
    }
    const Element* next[GROUPS];
    const Element* const* values;
  };

  template <int ROWS, int GROUPS, class Ahead>
  void score_groups(int64_t group, const Ahead& ahead, const Element* queries, float* scores) const {
    const Element* const* keys = part_->group_keys + group;
    const int64_t stride = query_stride(head_dim_);
    Floats sums[ROWS][GROUPS];
    for (int r = 0; r < ROWS; r++)
      for (int g = 0; g < GROUPS; g++) sums[r][g] = fill(0.0f);
    for (int64_t d = 0; d < head_dim_; d += Product::kTogether) {
      ahead.read(d);
      typename Product::Vector features[GROUPS];
      for (int g = 0; g < GROUPS; g++) features[g] = Product::load(keys[g] + d * kGroup);
      for (int r = 0; r < ROWS; r++) {
        const auto query = Product::fill(queries + r * stride + d);
        for (int g = 0; g < GROUPS; g++) sums[r][g] = Product::multiply(query, features[g], sums[r][g]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int g = 0; g < GROUPS; g++) store(scores + r * kScoreStride + (group + g) * kGroup, sums[r][g]);
  }

  // Weighted values of `count` rows from `row` on; ROWS is where the search for the fitting form begins.
  template <int ROWS>
  void sum_rows(const Strip& strip, const Part<Element>* next, int64_t row, int64_t count, const Element* weights,
                const Partial& partial) const {
    if constexpr (ROWS < kRowsTogether)
      if (count > ROWS) return sum_rows<ROWS + 1>(strip, next, row, count, weights, partial);
    weights += row * kScoreStride;
    const Partial rows = partial.from(row);
    int64_t d = 0;
    for (; d + kVectorsTogether * kLanes <= head_dim_; d += kVectorsTogether * kLanes)
      sum_features<ROWS, kVectorsTogether>(strip, d == 0 ? next : nullptr, weights, d, rows);
    for (; d < head_dim_; d += kLanes) sum_features<ROWS, 1>(strip, d == 0 ? next : nullptr, weights, d, rows);
  }

  template <int ROWS, int VECTORS>
  void sum_features(const Strip& strip, const Part<Element>* next, const Element* weights, int64_t d,
                    const Partial& partial) const {
    Floats sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] = fill(0.0f);
    const int64_t lines_per_key = head_dim_ / kLine;
    for (int64_t g = first_group(strip); g < end_group(strip); g++) {
      const Element* group = part_->group_values[g] + d * Product::kTogether;
      const Element* weight = weights + g * kGroup;
      const Element* ahead = next && g < next->num_groups ? next->group_keys[g] : nullptr;
      const int64_t count = std::min(kGroup, strip.keys.end - g * kGroup);
      const int64_t whole = count / Product::kTogether * Product::kTogether;
      for (int64_t key = 0; key < whole; key += Product::kTogether) {
        if (ahead)
          for (int64_t line = 0; line < lines_per_key * Product::kTogether; line++)
            prefetch_early(ahead + (key * lines_per_key + line) * kLine);
        add_weighted<ROWS, VECTORS>(weight + key, vectors<VECTORS>(group + key * head_dim_, d), sums);
      }
      // After the last key there may be anything, which is not to be multiplied even by 0.
      if (whole < count) {
        auto last = vectors<VECTORS>(group + whole * head_dim_, d);
        for (auto& features : last.v) features = Product::first_only(features);
        add_weighted<ROWS, VECTORS>(weight + whole, last, sums);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(partial.row(r) + d + v * kLanes, sums[r][v]);
  }

  template <int VECTORS>
  struct Values {
    typename Product::Vector v[VECTORS];
  };

  // Features d and on of the values that are multiplied together.
  template <int VECTORS>
  NAIAD_METHOD Values<VECTORS> vectors(const Element* value, int64_t d) const {
    Values<VECTORS> values;
    for (int v = 0; v < VECTORS; v++) {
      const bool is_whole = VECTORS > 1 || d + kLanes <= head_dim_;
      values.v[v] =
          is_whole ? Product::load(value + v * kLanes * Product::kTogether) : load_value_part(value, head_dim_ - d);
    }
    return values;
  }

  template <int ROWS, int VECTORS>
  NAIAD_METHOD static void add_weighted(const Element* weights, const Values<VECTORS>& values,
                                        Floats (&sums)[ROWS][VECTORS]) {
    for (int r = 0; r < ROWS; r++) {
      const auto weight = Product::fill(weights + r * kScoreStride);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Product::multiply(weight, values.v[v], sums[r][v]);
    }
  }

  const int64_t head_dim_;
  const Part<Element>* part_ = nullptr;
};

}  // namespace naiad
