// Causal grouped-query attention over the cache's blocks, which are read in place.
#include <type_traits>

#include "attention_codes.h"
#include "attention_parts.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "attention_weights.h"

namespace naiad {
namespace {

using RoundedStrips = std::conditional_t<kHasTiles, TileStrips<uint16_t>, VectorStrips<uint16_t>>;

// One record as one member computes it.
template <class Strips>
class Attention {
 public:
  using Element = typename Strips::Element;

  static int64_t bytes(const NaiadRecord& record) {
    const int64_t head_dim = record.cache.head_dim;
    return Strips::bytes(head_dim) + element_bytes(head_dim) + (score_floats() + partial_floats(head_dim)) * kFloat;
  }

  // `memory`: `bytes()`, from a multiple of 64 on.
  Attention(const NaiadRecord& record, const Run& run, const Tiling& tiling, char* memory)
      : record_(record),
        run_(run),
        tiling_(tiling),
        cache_(record.cache),
        head_dim_(record.cache.head_dim),
        weighing_(record),
        scores_(reinterpret_cast<float*>(memory)),
        one_(scores_ + score_floats(), Strips::kMostRows, head_dim_),
        queries_(reinterpret_cast<Element*>(scores_ + score_floats() + partial_floats(head_dim_))),
        weights_(queries_ + query_elements(head_dim_)),
        strips_(record, tiling, reinterpret_cast<char*>(queries_) + element_bytes(head_dim_)) {}

  // What all splits of a tile need of it.
  void begin(const QueryTile& tile) {
    const int64_t stride = Strips::query_stride(head_dim_);
    for (int64_t r = 0; r < tile.num_rows; r++) {
      const float* from = run_.row(record_.in, tiling_.token(tile, r)) + tiling_.head(tile, r) * head_dim_;
      Element* to = queries_ + r * stride;
      round_head(from, head_dim_, to);
      std::fill(to + whole_lanes(head_dim_), to + stride, Element(0));
    }
  }

  void locate(const QueryTile& tile, int64_t index, int64_t split, Part<Element>& part) const {
    const int64_t seen = std::max(split * kSplit, tile.seen.first);
    part.tile = tile;
    part.index = index;
    part.split = split;
    part.keys = {seen / Strips::kKeysPerStep * Strips::kKeysPerStep, std::min((split + 1) * kSplit, tile.seen.end)};
    part.num_groups = (part.keys.end - part.keys.first + kGroup - 1) / kGroup;
    const NaiadTables& tables = run_.step->tables[record_.group];
    for (int64_t g = 0; g < part.num_groups; g++) {
      const int64_t key = part.keys.first + g * kGroup;
      part.group_keys[g] = part.group_values[g] = nullptr;
      part.offsets[g] = -1;
      if (key + kGroup <= seen) continue;
      const int64_t offset = cache_.group(tables.blocks + tile.seq * tables.stride, key, tile.kv_head);
      part.offsets[g] = offset;
      if (record_.cache.key_scales) continue;
      part.group_keys[g] = cache_.keys + offset;
      part.group_values[g] = cache_.values + offset;
    }
  }

  // Into the partial result of a tile: what its rows see of a part. It is added to what they saw before if there is
  // any. `next`: what this member computes after it, or null.
  void compute(const Part<Element>& part, const Part<Element>* next, const Partial& partial, bool is_first) {
    strips_.prepare(part);
    for (int64_t row = 0; row < part.tile.num_rows; row += Strips::kMostRows) {
      const int64_t num_rows = std::min(Strips::kMostRows, part.tile.num_rows - row);
      const Strip strip{num_rows, seen_of(part, row, num_rows), row == 0};
      const Partial made = is_first ? partial.from(row) : one_;
      compute_strip(part, row == 0 ? next : nullptr, row, strip, made);
      if (!is_first) merge(partial.from(row), made, num_rows);
    }
  }

  void write(const QueryTile& tile, const Partial& partial) const {
    for (int64_t r = 0; r < tile.num_rows; r++) {
      const int64_t token = tiling_.token(tile, r), head = tiling_.head(tile, r);
      float* out = run_.row(record_.out, token) + head * head_dim_;
      if (head == 0) clear_rest(run_.row(record_.out, token), record_.width);
      const Floats factor = fill(1.0f / partial.total[r]);
      int64_t d = 0;
      for (; d + kLanes <= head_dim_; d += kLanes) store(out + d, load(partial.row(r) + d) * factor);
      if (d < head_dim_) store_part(out + d, load(partial.row(r) + d) * factor, head_dim_ - d);
    }
  }

 private:
  using Product = Products<Element>;
  static constexpr int64_t kFloat = sizeof(float);

  static int64_t score_floats() { return Strips::kMostRows * kScoreStride; }
  static int64_t partial_floats(int64_t head_dim) { return Partial::floats(Strips::kMostRows, head_dim); }
  static int64_t query_elements(int64_t head_dim) {
    return kMostStrips * Strips::kMostRows * Strips::query_stride(head_dim);
  }
  static int64_t element_bytes(int64_t head_dim) {
    return (query_elements(head_dim) + score_floats()) * static_cast<int64_t>(sizeof(Element));
  }

  // What some rows see of a part, from its first key on; may be empty.
  Span seen_of(const Part<Element>& part, int64_t row, int64_t num_rows) const {
    const Span seen = tiling_.seen(part.tile, row, num_rows);
    return {std::max(seen.first, part.keys.first) - part.keys.first,
            std::min(seen.end, part.keys.end) - part.keys.first};
  }

  void compute_strip(const Part<Element>& part, const Part<Element>* next, int64_t row, const Strip& strip,
                     const Partial& made) const {
    if (strip.keys.first >= strip.keys.end) return std::fill(made.total, made.total + strip.num_rows, 0.0f);
    strips_.score(strip, queries_ + row * Strips::query_stride(head_dim_), scores_);
    // Apart from the weights, so that several rows' largest scores are found at the same time.
    for (int64_t r = 0; r < strip.num_rows; r++)
      made.top[r] = weighing_.top(scores_ + r * kScoreStride, seen_of(part, row + r, 1));
    constexpr int64_t kStep = Strips::kKeysPerStep;
    const Span keys = {strip.keys.first / kStep * kStep, (strip.keys.end + kStep - 1) / kStep * kStep};
    for (int64_t r = 0; r < strip.num_rows; r++)
      made.total[r] = weighing_.weigh(scores_ + r * kScoreStride, seen_of(part, row + r, 1), keys, made.top[r],
                                      weights_ + r * kScoreStride, strips_.value_scales());
    strips_.sum_values(strip, next, weights_, made);
  }

  const NaiadRecord& record_;
  const Run& run_;
  const Tiling& tiling_;
  const CacheView<Element> cache_;
  const int64_t head_dim_;
  const Weighing weighing_;
  float* const scores_;     // [kMostRows][kScoreStride]
  const Partial one_;       // of a strip
  Element* const queries_;  // [kMostStrips * kMostRows][query_stride], rounded as keys are
  Element* const weights_;  // [kMostRows][kScoreStride], rounded as values are
  Strips strips_;
};

// Whether splits are shared out rather than tiles: tiles are few, and some are long.
struct Sharing {
  Sharing(const Tiling& tiling, int64_t num_members) {
    if (num_members == 1 || tiling.num_tiles >= 4 * num_members) return;
    // With a window, an earlier tile may see more splits than a later one.
    tiling.for_tiles(
        [&](int64_t, const QueryTile& tile) { most_splits = std::max(most_splits, Splits(tile).count()); });
    by_splits = most_splits > 1;
  }
  int64_t most_splits = 1;
  bool by_splits = false;
};

// This member's parts, each with the one after it.
template <class Strips, class Work>
void for_parts(const Attention<Strips>& attention, const Tiling& tiling, const Sharing& sharing, const Member& member,
               const Work& work) {
  Part<typename Strips::Element> parts[2];
  int64_t num_parts = 0, turn = 0;
  tiling.for_tiles([&](int64_t index, const QueryTile& tile) {
    const Splits splits(tile);
    for (int64_t split = splits.first; split < splits.end; split++) {
      if ((sharing.by_splits ? turn++ : index) % member.size != member.index) continue;
      auto& part = parts[num_parts % 2];
      attention.locate(tile, index, split, part);
      if (num_parts > 0) work(parts[(num_parts - 1) % 2], &part);
      num_parts++;
    }
  });
  if (num_parts > 0) work(parts[(num_parts - 1) % 2], nullptr);
}

template <class Strips>
void attend(const NaiadRecord& record, const Run& run, Member& member) {
  using Parts = Part<typename Strips::Element>;
  const Tiling tiling(record, *run.step, Strips::kMostRows, member.size);
  const Sharing sharing(tiling, member.size);
  const int64_t head_dim = record.cache.head_dim, floats = Partial::floats(tiling.tile_rows, head_dim);
  const int64_t partial_bytes = floats * static_cast<int64_t>(sizeof(float));
  char* memory = run.own[member.index].get<char>(partial_bytes + Attention<Strips>::bytes(record));
  Attention<Strips> attention(record, run, tiling, memory + partial_bytes);
  const auto partial_at = [&](float* memory) { return Partial(memory, tiling.tile_rows, head_dim); };
  if (!sharing.by_splits) {
    const Partial whole = partial_at(reinterpret_cast<float*>(memory));
    for_parts(attention, tiling, sharing, member, [&](const Parts& part, const Parts* next) {
      const Splits splits(part.tile);
      const bool is_first = part.split == splits.first;
      if (is_first) attention.begin(part.tile);
      attention.compute(part, next, whole, is_first);
      if (part.split + 1 == splits.end) attention.write(part.tile, whole);
    });
    return;
  }
  float* partials = run.shared->get<float>(tiling.num_tiles * sharing.most_splits * floats);
  const auto partial = [&](int64_t index, int64_t split) {
    return partial_at(partials + (index * sharing.most_splits + split) * floats);
  };
  int64_t begun = -1;
  for_parts(attention, tiling, sharing, member, [&](const Parts& part, const Parts* next) {
    if (part.index != begun) attention.begin(part.tile);
    begun = part.index;
    attention.compute(part, next, partial(part.index, part.split - Splits(part.tile).first), true);
  });
  member.barrier();
  tiling.for_tiles([&](int64_t index, const QueryTile& tile) {
    if (index % member.size != member.index) return;
    const Partial first = partial(index, 0);
    for (int64_t split = 1; split < Splits(tile).count(); split++) merge(first, partial(index, split), tile.num_rows);
    attention.write(tile, first);
  });
}

template <class Strips>
int64_t shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members) {
  const Tiling tiling(record, step, Strips::kMostRows, num_members);
  const Sharing sharing(tiling, num_members);
  if (!sharing.by_splits) return 0;
  return tiling.num_tiles * sharing.most_splits * Partial::floats(tiling.tile_rows, record.cache.head_dim) *
         static_cast<int64_t>(sizeof(float));
}

// With the largest tile.
template <class Strips>
int64_t own_bytes(const NaiadRecord& record) {
  const int64_t floats = Partial::floats(kMostStrips * Strips::kMostRows, record.cache.head_dim);
  return floats * static_cast<int64_t>(sizeof(float)) + Attention<Strips>::bytes(record);
}

template <class T>
struct Of {
  using Strips = T;
};

// Calls `work` with `Of` the strips that compute a record.
template <class Work>
auto with_strips(const NaiadRecord& record, const Work& work) {
  const bool is_rounded = record.cache.element == NAIAD_BFLOAT16, has_codes = record.cache.key_scales != nullptr;
  if (is_rounded && has_codes) return work(Of<CodedStrips<RoundedStrips>>());
  if (is_rounded) return work(Of<RoundedStrips>());
  if (has_codes) return work(Of<CodedStrips<VectorStrips<float>>>());
  return work(Of<VectorStrips<float>>());
}

}  // namespace

bool attention_takes_tiles(const NaiadRecord& record) { return kHasTiles && record.cache.element == NAIAD_BFLOAT16; }

int64_t attention_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members) {
  if (record.cache.element == NAIAD_BFLOAT16) return shared_bytes<RoundedStrips>(record, step, num_members);
  return shared_bytes<VectorStrips<float>>(record, step, num_members);
}

int64_t attention_own_bytes(const NaiadRecord& record) {
  return with_strips(record, [&](auto of) { return own_bytes<typename decltype(of)::Strips>(record); });
}

void attention(const NaiadRecord& record, const Run& run, Member& member) {
  with_strips(record, [&](auto of) { attend<typename decltype(of)::Strips>(record, run, member); });
}

}  // namespace naiad
