// Causal grouped-query attention over the cache's blocks, which are read in place.
//
// A tile is some query rows (heads of one or more tokens) that share a KV head. Its keys are read in splits
// of `kSplit` positions, whose borders are multiples of `kSplit`: each split gives a partial result, and a
// row's partial results are merged in order. So a row's result hangs on its own position alone, whoever
// computes which split.
#include <algorithm>
#include <limits>

#include "heads.h"

namespace naiad {
namespace {

constexpr int64_t kSplit = 512, kMostGroups = kSplit / kGroup;
constexpr int64_t kTileRows = 12;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What is computed together, so that sums fill the registers: rows by groups of keys, and rows by vectors of values.
constexpr int kRowsTogether = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 3 : 2;
constexpr int kGroupsTogether = kRegisters >= 32 ? 4 : 2;
constexpr int kVectorsTogether = kGroupsTogether;

// One tile of one sequence.
struct Tile {
  int64_t seq, kv_head;
  int64_t first_row, num_rows;  // of the sequence: token * heads of a KV head + head
  int64_t first_key, end_key;   // that any of its rows sees
};

// The visible keys of one row: [first, end).
struct Visible {
  int64_t first, end;
};

struct Shape {
  explicit Shape(const NaiadRecord& record, const NaiadStep& step)
      : step(step),
        window(record.window),
        num_kv_heads(record.cache.num_kv_heads),
        heads_per_kv(record.num_heads / record.cache.num_kv_heads) {}

  int64_t num_rows(int64_t seq) const { return (step.query_starts[seq + 1] - step.query_starts[seq]) * heads_per_kv; }
  int64_t num_tiles(int64_t seq) const { return (num_rows(seq) + kTileRows - 1) / kTileRows * num_kv_heads; }
  int64_t token(int64_t seq, int64_t row) const { return step.query_starts[seq] + row / heads_per_kv; }

  Visible visible(int64_t token) const {
    const int64_t end = step.positions[token] + 1;
    return {window ? std::max<int64_t>(0, end - window) : 0, end};
  }

  // The tile of that number; KV heads of the same rows stand together.
  Tile tile(int64_t seq, int64_t number) const {
    const int64_t first_row = number / num_kv_heads * kTileRows;
    const int64_t rows = std::min(kTileRows, num_rows(seq) - first_row);
    return {seq,
            number % num_kv_heads,
            first_row,
            rows,
            visible(token(seq, first_row)).first,
            visible(token(seq, first_row + rows - 1)).end};
  }

  const NaiadStep& step;
  const int64_t window, num_kv_heads, heads_per_kv;
};

// Of the splits that a tile reads: [first, end).
struct Splits {
  explicit Splits(const Tile& tile) : first(tile.first_key / kSplit), end((tile.end_key + kSplit - 1) / kSplit) {}
  int64_t count() const { return end - first; }
  int64_t first, end;
};

// One split of a tile, and where its keys and values lie.
template <class Element>
struct Part {
  Tile tile;
  int64_t index;  // of the tile in the step
  int64_t split;
  int64_t first, end;  // keys; the first one begins a group
  int64_t num_groups;
  const Element *keys[kMostGroups], *values[kMostGroups];
};

// What a tile's rows have seen of some of their keys. Lives in memory of `floats()`.
struct Partial {
  Partial(float* memory, int64_t head_dim)
      : top(memory), total(memory + kTileRows), values(memory + 2 * kTileRows), stride(whole_lanes(head_dim)) {}
  static int64_t floats(int64_t head_dim) { return kTileRows * (2 + whole_lanes(head_dim)) + kLanes; }

  float* row(int64_t r) const { return values + r * stride; }

  float* const top;     // the largest score
  float* const total;   // of e^(score - top); 0 if no key was seen
  float* const values;  // [kTileRows][stride]: values, each times e^(score - top)
  const int64_t stride;
};

void merge(const Partial& into, const Partial& next, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; r++) {
    // A key that was seen makes the total at least 1, or not a number.
    if (next.total[r] == 0.0f) continue;
    if (into.total[r] == 0.0f) {
      into.top[r] = next.top[r];
      into.total[r] = next.total[r];
      std::memcpy(into.row(r), next.row(r), into.stride * sizeof(float));
      continue;
    }
    const float top = std::max(into.top[r], next.top[r]);
    const float old_factor = std::exp(into.top[r] - top), new_factor = std::exp(next.top[r] - top);
    into.total[r] = into.total[r] * old_factor + next.total[r] * new_factor;
    for (int64_t d = 0; d < into.stride; d += kLanes) {
      const Floats kept = load(into.row(r) + d) * fill(old_factor);
      store(into.row(r) + d, fma(load(next.row(r) + d), fill(new_factor), kept));
    }
    into.top[r] = top;
  }
}

template <class Element>
class Attention {
 public:
  // A member's own memory.
  struct Workspace {
    Element* queries;  // [kTileRows][whole_lanes(head_dim)], rounded as keys are
    float* scores;     // [kTileRows][kSplit]
    Element* weights;  // [kTileRows][kSplit], rounded as values are
  };

  Attention(const NaiadRecord& record, const Run& run)
      : record_(record), run_(run), shape_(record, *run.step), cache_(record.cache), head_dim_(record.cache.head_dim) {}

  static int64_t workspace_bytes(int64_t head_dim) {
    return kTileRows * (whole_lanes(head_dim) + kSplit) * static_cast<int64_t>(sizeof(Element)) +
           kTileRows * kSplit * static_cast<int64_t>(sizeof(float));
  }

  Workspace workspace(char* memory) const {
    float* scores = reinterpret_cast<float*>(memory);
    Element* weights = reinterpret_cast<Element*>(scores + kTileRows * kSplit);
    return {weights + kTileRows * kSplit, scores, weights};
  }

  // What all splits of a tile need of it.
  void begin(const Tile& tile, const Workspace& work) const {
    for (int64_t r = 0; r < tile.num_rows; r++) {
      const float* from = query(tile, r);
      Element* to = work.queries + r * whole_lanes(head_dim_);
      int64_t d = 0;
      for (; d + kLanes <= head_dim_; d += kLanes) Product::store_rounded(to + d, load(from + d));
      if (d < head_dim_) Product::store_rounded(to + d, load_part(from + d, head_dim_ - d));
    }
  }

  void locate(const Tile& tile, int64_t index, int64_t split, Part<Element>& part) const {
    part.tile = tile;
    part.index = index;
    part.split = split;
    part.first = std::max(split * kSplit, tile.first_key) / kGroup * kGroup;
    part.end = std::min((split + 1) * kSplit, tile.end_key);
    part.num_groups = (part.end - part.first + kGroup - 1) / kGroup;
    const NaiadTables& tables = run_.step->tables[record_.group];
    for (int64_t g = 0; g < part.num_groups; g++) {
      const int64_t key = part.first + g * kGroup;
      const int64_t offset = cache_.group(tables.blocks + tile.seq * tables.stride, key, tile.kv_head);
      part.keys[g] = cache_.keys + offset;
      part.values[g] = cache_.values + offset;
    }
  }

  // A part of a tile into `partial`; `next` is what this member computes after it, or null.
  void compute(const Part<Element>& part, const Part<Element>* next, const Workspace& work,
               const Partial& partial) const {
    const Tile& tile = part.tile;
    for (int64_t r = 0; r < tile.num_rows; r += kRowsTogether)
      score<1>(part, r, std::min<int64_t>(kRowsTogether, tile.num_rows - r), work);
    for (int64_t r = 0; r < tile.num_rows; r++) {
      const Visible seen = shape_.visible(shape_.token(tile.seq, tile.first_row + r));
      weigh(work.scores + r * kSplit, part.first, part.num_groups, seen, work.weights + r * kSplit, partial.top[r],
            partial.total[r]);
    }
    for (int64_t r = 0; r < tile.num_rows; r += kRowsTogether)
      sum_values<1>(part, r == 0 ? next : nullptr, work.weights, r, std::min<int64_t>(kRowsTogether, tile.num_rows - r),
                    partial);
  }

  void write(const Tile& tile, const Partial& partial) const {
    for (int64_t r = 0; r < tile.num_rows; r++) {
      const int64_t row = tile.first_row + r;
      const int64_t head = tile.kv_head * shape_.heads_per_kv + row % shape_.heads_per_kv;
      float* out = run_.row(record_.out, shape_.token(tile.seq, row)) + head * head_dim_;
      if (head == 0) clear_rest(run_.row(record_.out, shape_.token(tile.seq, row)), record_.width);
      const Floats factor = fill(1.0f / partial.total[r]);
      int64_t d = 0;
      for (; d + kLanes <= head_dim_; d += kLanes) store(out + d, load(partial.row(r) + d) * factor);
      if (d < head_dim_) store_part(out + d, load(partial.row(r) + d) * factor, head_dim_ - d);
    }
  }

 private:
  using Product = Products<Element>;
  // Elements of one line of memory.
  static constexpr int64_t kLine = 64 / sizeof(Element);

  const float* query(const Tile& tile, int64_t r) const {
    const int64_t row = tile.first_row + r;
    const int64_t head = tile.kv_head * shape_.heads_per_kv + row % shape_.heads_per_kv;
    return run_.row(record_.in, shape_.token(tile.seq, row)) + head * head_dim_;
  }

  // Scores of `count` rows from `row` on; ROWS is where the search for the fitting form begins.
  template <int ROWS>
  void score(const Part<Element>& part, int64_t row, int64_t count, const Workspace& work) const {
    if constexpr (ROWS < kRowsTogether)
      if (count > ROWS) return score<ROWS + 1>(part, row, count, work);
    int64_t g = 0;
    for (; g + kGroupsTogether <= part.num_groups; g += kGroupsTogether)
      score_groups<ROWS, kGroupsTogether>(part, g, row, work);
    for (; g < part.num_groups; g++) score_groups<ROWS, 1>(part, g, row, work);
  }

  template <int ROWS, int GROUPS>
  void score_groups(const Part<Element>& part, int64_t group, int64_t row, const Workspace& work) const {
    const Element* queries = work.queries + row * whole_lanes(head_dim_);
    float* scores = work.scores + row * kSplit + group * kGroup;
    if (row == 0)
      score_groups<ROWS, GROUPS>(queries, part.keys + group, ReadOn<GROUPS>(part, group), scores);
    else
      score_groups<ROWS, GROUPS>(queries, part.keys + group, ReadNothing(), scores);
  }

  struct ReadNothing {
    NAIAD_METHOD void read(int64_t) const {}
  };

  // Reads the keys of the next groups, and the values of these, ahead.
  template <int GROUPS>
  struct ReadOn {
    ReadOn(const Part<Element>& part, int64_t group) : values(part.values + group) {
      for (int g = 0; g < GROUPS; g++) next[g] = part.keys[std::min(group + GROUPS + g, part.num_groups - 1)];
    }
    NAIAD_METHOD void read(int64_t d) const {
      for (int g = 0; g < GROUPS; g++) {
        prefetch(next[g] + d * kGroup);
        prefetch_early(values[g] + d * kGroup);
      }
    }
    const Element* next[GROUPS];
    const Element* const* values;
  };

  template <int ROWS, int GROUPS, class Ahead>
  void score_groups(const Element* queries, const Element* const* keys, const Ahead& ahead, float* scores) const {
    const int64_t stride = whole_lanes(head_dim_);
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
      for (int g = 0; g < GROUPS; g++) store(scores + r * kSplit + g * kGroup, scaled(sums[r][g]));
  }

  NAIAD_METHOD Floats scaled(Floats sum) const {
    const Floats score = sum * fill(record_.factor);
    if (record_.soft_cap <= 0.0f) return score;
    const Floats cap = fill(record_.soft_cap);
    return cap * hyperbolic_tangent(score / cap);
  }

  // The weights of a row's keys are e^(score - top), and 0 where it does not see the key.
  static void weigh(float* scores, int64_t first, int64_t num_groups, Visible seen, Element* weights, float& top,
                    float& total) {
    const int64_t from = std::max<int64_t>(seen.first - first, 0);
    const int64_t to = std::min(seen.end - first, num_groups * kGroup);
    if (from >= to) {
      std::fill(weights, weights + num_groups * kGroup, Element(0));
      top = kNothing;
      total = 0.0f;
      return;
    }
    const int64_t from_group = from / kGroup, end_group = (to + kGroup - 1) / kGroup;
    std::fill(scores + from_group * kGroup, scores + from, kNothing);
    std::fill(scores + to, scores + end_group * kGroup, kNothing);
    Floats largest = fill(kNothing);
    for (int64_t g = from_group; g < end_group; g++) largest = max(largest, load(scores + g * kGroup));
    top = max_lanes(largest);
    Floats sum = fill(0.0f);
    for (int64_t g = from_group; g < end_group; g++) {
      float* at = scores + g * kGroup;
      store(at, exponential(load(at) - fill(top)));
      if (g == from_group) std::fill(at, scores + from, 0.0f);
      if (g == end_group - 1) std::fill(scores + to, at + kGroup, 0.0f);
      sum = sum + load(at);
      Product::store_rounded(weights + g * kGroup, load(at));
    }
    total = sum_lanes(sum);
    std::fill(weights, weights + from_group * kGroup, Element(0));
    std::fill(weights + end_group * kGroup, weights + num_groups * kGroup, Element(0));
  }

  // Weighted values of `count` rows from `row` on; ROWS is where the search for the fitting form begins.
  template <int ROWS>
  void sum_values(const Part<Element>& part, const Part<Element>* next, const Element* weights, int64_t row,
                  int64_t count, const Partial& partial) const {
    if constexpr (ROWS < kRowsTogether)
      if (count > ROWS) return sum_values<ROWS + 1>(part, next, weights, row, count, partial);
    weights += row * kSplit;
    int64_t d = 0;
    for (; d + kVectorsTogether * kLanes <= head_dim_; d += kVectorsTogether * kLanes)
      sum_features<ROWS, kVectorsTogether>(part, d == 0 ? next : nullptr, weights, row, d, partial);
    for (; d < head_dim_; d += kLanes) sum_features<ROWS, 1>(part, d == 0 ? next : nullptr, weights, row, d, partial);
  }

  // The keys of `next` are read ahead meanwhile.
  template <int ROWS, int VECTORS>
  void sum_features(const Part<Element>& part, const Part<Element>* next, const Element* weights, int64_t row,
                    int64_t d, const Partial& partial) const {
    Floats sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] = fill(0.0f);
    const int64_t num_keys = part.end - part.first, lines_per_key = head_dim_ / kLine;
    for (int64_t g = 0; g < part.num_groups; g++, weights += kGroup) {
      const Element* group = part.values[g] + d * Product::kTogether;
      const Element* ahead = next && g < next->num_groups ? next->keys[g] : nullptr;
      const int64_t count = std::min(kGroup, num_keys - g * kGroup);
      const int64_t whole = count / Product::kTogether * Product::kTogether;
      for (int64_t key = 0; key < whole; key += Product::kTogether) {
        if (ahead)
          for (int64_t line = 0; line < lines_per_key * Product::kTogether; line++)
            prefetch_early(ahead + (key * lines_per_key + line) * kLine);
        add_weighted<ROWS, VECTORS>(weights + key, vectors<VECTORS>(group + key * head_dim_, d), sums);
      }
      // After the last key there may be anything, which is not to be multiplied even by 0.
      if (whole < count) {
        auto last = vectors<VECTORS>(group + whole * head_dim_, d);
        for (auto& features : last.v) features = Product::first_only(features);
        add_weighted<ROWS, VECTORS>(weights + whole, last, sums);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(partial.row(row + r) + d + v * kLanes, sums[r][v]);
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
      const auto weight = Product::fill(weights + r * kSplit);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Product::multiply(weight, values.v[v], sums[r][v]);
    }
  }

  const NaiadRecord& record_;
  const Run& run_;
  const Shape shape_;
  const CacheView<Element> cache_;
  const int64_t head_dim_;
};

// Whether splits are shared out rather than tiles: tiles are few, and some are long.
struct Sharing {
  Sharing(const NaiadRecord& record, const NaiadStep& step, int64_t num_members) {
    const Shape shape(record, step);
    for (int64_t seq = 0; seq < step.num_seqs; seq++) num_tiles += shape.num_tiles(seq);
    if (num_members == 1 || num_tiles >= 4 * num_members) return;
    // With a window, an earlier tile may see more splits than a later one.
    for (int64_t seq = 0; seq < step.num_seqs; seq++)
      for (int64_t number = 0; number < shape.num_tiles(seq); number++)
        most_splits = std::max(most_splits, Splits(shape.tile(seq, number)).count());
    by_splits = most_splits > 1;
  }
  int64_t num_tiles = 0, most_splits = 1;
  bool by_splits = false;
};

template <class Work>
void for_tiles(const Shape& shape, const NaiadStep& step, const Work& work) {
  int64_t index = 0;
  for (int64_t seq = 0; seq < step.num_seqs; seq++)
    for (int64_t number = 0; number < shape.num_tiles(seq); number++) work(index++, shape.tile(seq, number));
}

// This member's parts, each with the one after it.
template <class Element, class Work>
void for_parts(const Attention<Element>& attention, const Shape& shape, const Sharing& sharing, const Member& member,
               const Work& work) {
  Part<Element> parts[2];
  int64_t num_parts = 0, turn = 0;
  for_tiles(shape, shape.step, [&](int64_t index, const Tile& tile) {
    const Splits splits(tile);
    for (int64_t split = splits.first; split < splits.end; split++) {
      if ((sharing.by_splits ? turn++ : index) % member.size != member.index) continue;
      Part<Element>& part = parts[num_parts % 2];
      attention.locate(tile, index, split, part);
      if (num_parts > 0) work(parts[(num_parts - 1) % 2], &part);
      num_parts++;
    }
  });
  if (num_parts > 0) work(parts[(num_parts - 1) % 2], nullptr);
}

template <class Element>
void attend(const NaiadRecord& record, const Run& run, Member& member) {
  const NaiadStep& step = *run.step;
  const Shape shape(record, step);
  const Attention<Element> attention(record, run);
  const Sharing sharing(record, step, member.size);
  const int64_t head_dim = record.cache.head_dim, floats = Partial::floats(head_dim);
  const int64_t partial_bytes = floats * static_cast<int64_t>(sizeof(float));
  char* memory = run.own[member.index].get<char>(2 * partial_bytes + Attention<Element>::workspace_bytes(head_dim));
  const auto work = attention.workspace(memory + 2 * partial_bytes);
  if (!sharing.by_splits) {
    float* own = reinterpret_cast<float*>(memory);
    const Partial whole(own, head_dim), one(own + floats, head_dim);
    for_parts(attention, shape, sharing, member, [&](const Part<Element>& part, const Part<Element>* next) {
      const Splits splits(part.tile);
      const bool is_first = part.split == splits.first;
      if (is_first) attention.begin(part.tile, work);
      attention.compute(part, next, work, is_first ? whole : one);
      if (!is_first) merge(whole, one, part.tile.num_rows);
      if (part.split + 1 == splits.end) attention.write(part.tile, whole);
    });
    return;
  }
  float* partials = run.shared->get<float>(sharing.num_tiles * sharing.most_splits * floats);
  const auto partial = [&](int64_t index, int64_t split) {
    return Partial(partials + (index * sharing.most_splits + split) * floats, head_dim);
  };
  int64_t begun = -1;
  for_parts(attention, shape, sharing, member, [&](const Part<Element>& part, const Part<Element>* next) {
    if (part.index != begun) attention.begin(part.tile, work);
    begun = part.index;
    attention.compute(part, next, work, partial(part.index, part.split - Splits(part.tile).first));
  });
  member.barrier();
  for_tiles(shape, step, [&](int64_t index, const Tile& tile) {
    if (index % member.size != member.index) return;
    const Partial first = partial(index, 0);
    for (int64_t split = 1; split < Splits(tile).count(); split++) merge(first, partial(index, split), tile.num_rows);
    attention.write(tile, first);
  });
}

}  // namespace

int64_t attention_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members) {
  const Sharing sharing(record, step, num_members);
  if (!sharing.by_splits) return 0;
  return sharing.num_tiles * sharing.most_splits * Partial::floats(record.cache.head_dim) *
         static_cast<int64_t>(sizeof(float));
}

void attention(const NaiadRecord& record, const Run& run, Member& member) {
  if (record.cache.element == NAIAD_BFLOAT16)
    attend<uint16_t>(record, run, member);
  else
    attend<float>(record, run, member);
}

}  // namespace naiad
