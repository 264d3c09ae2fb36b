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

// One record as one share of it is computed.
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
  Sharing(const Tiling& tiling, int64_t team_size) {
    if (team_size == 1 || tiling.num_tiles >= 4 * team_size) return;
    // With a window, an earlier tile may see more splits than a later one.
    tiling.for_tiles([&](int64_t, const QueryTile& tile) {
      most_splits = std::max(most_splits, Splits(tile).count());
      num_splits += Splits(tile).count();
    });
    by_splits = most_splits > 1;
  }
  int64_t most_splits = 1, num_splits = 0;  // of a tile; of all
  bool by_splits = false;
};

// A share's parts, each with the one after it: after the last one the member likely computes its next share.
template <class Strips, class Work>
void for_parts(const Attention<Strips>& attention, const Tiling& tiling, const Sharing& sharing, const Share& share,
               const Work& work) {
  Part<typename Strips::Element> parts[2], after;
  int64_t num_parts = 0, turn = 0;
  bool has_after = false;
  tiling.for_tiles([&](int64_t index, const QueryTile& tile) {
    const Splits splits(tile);
    for (int64_t split = splits.first; split < splits.end; split++) {
      const int64_t thing = sharing.by_splits ? turn++ : index;
      if (thing == share.next() && !has_after) {
        attention.locate(tile, index, split, after);
        has_after = true;
      }
      if (!share.has(thing)) continue;
      auto& part = parts[num_parts % 2];
      attention.locate(tile, index, split, part);
      if (num_parts > 0) work(parts[(num_parts - 1) % 2], &part);
      num_parts++;
    }
  });
  if (num_parts > 0) work(parts[(num_parts - 1) % 2], has_after ? &after : nullptr);
}

// One record in one step, for any member.
template <class Strips>
struct Layer {
  Layer(const NaiadRecord& record, const NaiadStep& step, int64_t team_size)
      : tiling(record, step, Strips::kMostRows, team_size),
        sharing(tiling, team_size),
        head_dim(record.cache.head_dim),
        floats(Partial::floats(tiling.tile_rows, head_dim)) {}

  Things things(int64_t phase) const {
    if (phase == 0) return {sharing.by_splits ? sharing.num_splits : tiling.num_tiles};
    return {phase == 1 && sharing.by_splits ? tiling.num_tiles : 0};
  }
  // Of the results of all splits, if these are shared.
  int64_t num_floats() const { return sharing.by_splits ? tiling.num_tiles * sharing.most_splits * floats : 0; }
  Partial partial_at(float* memory) const { return Partial(memory, tiling.tile_rows, head_dim); }
  Partial partial(float* memory, int64_t tile, int64_t split) const {
    return partial_at(memory + (tile * sharing.most_splits + split) * floats);
  }

  const Tiling tiling;
  const Sharing sharing;
  const int64_t head_dim, floats;
};

template <class Strips>
void attend_tiles(Attention<Strips>& attention, const Layer<Strips>& layer, const Partial& whole, const Share& share) {
  using Parts = Part<typename Strips::Element>;
  for_parts(attention, layer.tiling, layer.sharing, share, [&](const Parts& part, const Parts* next) {
    const Splits splits(part.tile);
    const bool is_first = part.split == splits.first;
    if (is_first) attention.begin(part.tile);
    attention.compute(part, next, whole, is_first);
    if (part.split + 1 == splits.end) attention.write(part.tile, whole);
  });
}

template <class Strips>
void attend_splits(Attention<Strips>& attention, const Layer<Strips>& layer, float* partials, const Share& share) {
  using Parts = Part<typename Strips::Element>;
  int64_t begun = -1;
  for_parts(attention, layer.tiling, layer.sharing, share, [&](const Parts& part, const Parts* next) {
    if (part.index != begun) attention.begin(part.tile);
    begun = part.index;
    const int64_t split = part.split - Splits(part.tile).first;
    attention.compute(part, next, layer.partial(partials, part.index, split), true);
  });
}

template <class Strips>
void merge_splits(const Attention<Strips>& attention, const Layer<Strips>& layer, float* partials, const Share& share) {
  layer.tiling.for_tiles([&](int64_t index, const QueryTile& tile) {
    if (!share.has(index)) return;
    const Partial first = layer.partial(partials, index, 0);
    for (int64_t split = 1; split < Splits(tile).count(); split++)
      merge(first, layer.partial(partials, index, split), tile.num_rows);
    attention.write(tile, first);
  });
}

template <class Strips>
void attend(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  const Layer<Strips> layer(record, *run.step, run.team_size);
  const int64_t partial_bytes = layer.floats * static_cast<int64_t>(sizeof(float));
  char* memory = run.own[share.computed_by].memory.template get<char>(partial_bytes + Attention<Strips>::bytes(record));
  Attention<Strips> attention(record, run, layer.tiling, memory + partial_bytes);
  if (!layer.sharing.by_splits)
    return attend_tiles(attention, layer, layer.partial_at(reinterpret_cast<float*>(memory)), share);
  float* partials = run.shared->get<float>(layer.num_floats());
  if (phase == 0)
    attend_splits(attention, layer, partials, share);
  else
    merge_splits(attention, layer, partials, share);
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

Things attention_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase, int64_t team_size) {
  return with_strips(
      record, [&](auto of) { return Layer<typename decltype(of)::Strips>(record, step, team_size).things(phase); });
}

int64_t attention_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  return with_strips(record, [&](auto of) {
    return Layer<typename decltype(of)::Strips>(record, step, team_size).num_floats() *
           static_cast<int64_t>(sizeof(float));
  });
}

int64_t attention_own_bytes(const NaiadRecord& record) {
  return with_strips(record, [&](auto of) { return own_bytes<typename decltype(of)::Strips>(record); });
}

void attention(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  with_strips(record, [&](auto of) { attend<typename decltype(of)::Strips>(record, run, phase, share); });
}

}  // namespace naiad
