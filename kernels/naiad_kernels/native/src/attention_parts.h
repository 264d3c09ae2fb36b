// What attention is cut into: tiles of query rows, splits of their keys, strips of a tile's rows.
//
// A tile is some query rows (heads of one or more tokens) that share a KV head. Its keys are read in splits
// of `kSplit` positions, whose borders are multiples of `kSplit`: each split gives a partial result, and a
// row's partial results are merged in order. So a row's result hangs on its own position alone, whoever
// computes which split. A strip is what is computed at once: its scores fit into the nearest cache, and while the next
// strip is computed the split's keys and values are in the second.
#pragma once

#include <algorithm>

#include "heads.h"

namespace naiad {

constexpr int64_t kSplit = 512, kMostGroups = kSplit / kGroup;
constexpr int64_t kMostStrips = 8;      // of a tile
constexpr int64_t kTilesPerMember = 8;  // at least, if the rows suffice for that

// Keys: [first, end).
struct Span {
  int64_t first, end;
};

struct QueryTile {
  int64_t seq, kv_head;
  int64_t first_row, num_rows;  // of the sequence: token * heads of a KV head + head
  Span seen;                    // by any of its rows
};

// One layer's tiles in one step. `strip_rows`: the most rows of a strip.
class Tiling {
 public:
  Tiling(const NaiadRecord& record, const NaiadStep& step, int64_t strip_rows, int64_t team_size)
      : step(step),
        strip_rows(strip_rows),
        window_(record.window),
        num_kv_heads_(record.cache.num_kv_heads),
        heads_per_kv_(record.num_heads / record.cache.num_kv_heads) {
    tile_rows = kMostStrips * strip_rows;
    while (tile_rows > strip_rows && count_tiles() < kTilesPerMember * team_size) tile_rows /= 2;
    num_tiles = count_tiles();
  }

  int64_t num_rows(int64_t seq) const { return (step.query_starts[seq + 1] - step.query_starts[seq]) * heads_per_kv_; }

  // The most rows of any strip.
  int64_t most_rows() const {
    int64_t most = 0;
    for (int64_t seq = 0; seq < step.num_seqs; seq++) most = std::max(most, num_rows(seq));
    return std::min(most, strip_rows);
  }

  int64_t token(const QueryTile& tile, int64_t row) const {
    return step.query_starts[tile.seq] + (tile.first_row + row) / heads_per_kv_;
  }
  int64_t head(const QueryTile& tile, int64_t row) const {
    return tile.kv_head * heads_per_kv_ + (tile.first_row + row) % heads_per_kv_;
  }

  // What some rows of a tile see.
  Span seen(const QueryTile& tile, int64_t row, int64_t num_rows) const {
    const int64_t end = step.positions[token(tile, row)] + 1;
    return {window_ ? std::max<int64_t>(0, end - window_) : 0, step.positions[token(tile, row + num_rows - 1)] + 1};
  }

  // Calls `work` with each tile and its number; KV heads of the same rows stand together.
  template <class Work>
  void for_tiles(const Work& work) const {
    int64_t index = 0;
    for (int64_t seq = 0; seq < step.num_seqs; seq++)
      for (int64_t row = 0; row < num_rows(seq); row += tile_rows)
        for (int64_t kv_head = 0; kv_head < num_kv_heads_; kv_head++) {
          QueryTile tile{seq, kv_head, row, std::min(tile_rows, num_rows(seq) - row), {}};
          tile.seen = seen(tile, 0, tile.num_rows);
          work(index++, tile);
        }
  }

  const NaiadStep& step;
  const int64_t strip_rows;
  int64_t tile_rows;  // the most of a tile: a multiple of those of a strip
  int64_t num_tiles;

 private:
  int64_t count_tiles() const {
    int64_t count = 0;
    for (int64_t seq = 0; seq < step.num_seqs; seq++) count += (num_rows(seq) + tile_rows - 1) / tile_rows;
    return count * num_kv_heads_;
  }

  const int64_t window_, num_kv_heads_, heads_per_kv_;
};

// Of the splits that a tile reads: [first, end).
struct Splits {
  explicit Splits(const QueryTile& tile)
      : first(tile.seen.first / kSplit), end((tile.seen.end + kSplit - 1) / kSplit) {}
  int64_t count() const { return end - first; }
  int64_t first, end;
};

// One split of a tile, and where its keys and values lie.
template <class Element>
struct Part {
  QueryTile tile;
  int64_t index;  // of the tile in the step
  int64_t split;
  Span keys;
  int64_t num_groups;  // the first one begins with the first key
  // Of each group in the cache; -1 before those that the tile sees: that block may be another sequence's by now.
  int64_t offsets[kMostGroups];
  // Where the group's elements are; null if there is no offset, or if the cache has whole numbers of eight bits.
  const Element *group_keys[kMostGroups], *group_values[kMostGroups];
};

// Some rows of a part; keys count from the part's first one.
struct Strip {
  int64_t num_rows;
  Span keys;      // that any of its rows sees
  bool is_first;  // of its part
};

// What rows have seen of some of their keys. Lives in memory of `floats()`.
struct Partial {
  Partial(float* memory, int64_t num_rows, int64_t head_dim)
      : top(memory), total(memory + num_rows), values(memory + 2 * num_rows), stride(whole_lanes(head_dim)) {}
  static int64_t floats(int64_t num_rows, int64_t head_dim) {
    return whole_lanes(num_rows * (2 + whole_lanes(head_dim)));
  }

  float* row(int64_t r) const { return values + r * stride; }
  // From a row on.
  Partial from(int64_t r) const {
    Partial rest = *this;
    rest.top += r;
    rest.total += r;
    rest.values += r * stride;
    return rest;
  }

  float* top;     // the largest score, times what makes it an exponent of 2
  float* total;   // of 2^(score - top); 0 if no key was seen
  float* values;  // [num_rows][stride]: values, each times 2^(score - top)
  int64_t stride;
};

inline void merge(const Partial& into, const Partial& next, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; r++) {
    // A key that was seen makes the total about 1 at least, or not a number.
    if (next.total[r] == 0.0f) continue;
    if (into.total[r] == 0.0f) {
      into.top[r] = next.top[r];
      into.total[r] = next.total[r];
      std::memcpy(into.row(r), next.row(r), static_cast<size_t>(into.stride) * sizeof(float));
      continue;
    }
    const float top = std::max(into.top[r], next.top[r]);
    const Floats old_factor = two_to_the(fill(into.top[r] - top)), new_factor = two_to_the(fill(next.top[r] - top));
    const auto merged = [&](Floats old, Floats added) { return fma(added, new_factor, old * old_factor); };
    into.total[r] = first_lane(merged(fill(into.total[r]), fill(next.total[r])));
    for (int64_t d = 0; d < into.stride; d += kLanes)
      store(into.row(r) + d, merged(load(into.row(r) + d), load(next.row(r) + d)));
    into.top[r] = top;
  }
}

}  // namespace naiad
