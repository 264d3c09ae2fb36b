// Some rows of a step by a range of panels, with tiles.
//
// A step of a panel is one tile of weights as it lies in memory: 16 pairs, or fours, of inputs for 16 outputs. In four
// bits it is unpacked to two. Every number of rows has one order of sums: a row's result does not depend on its tile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "epilogue.h"
#include "inputs.h"
#include "nibbles.h"
#include "read_ahead.h"
#include "tiles.h"

namespace naiad {

// Calls f with 0, 1, ... COUNT - 1 as types, because instructions name registers by constants.
template <int COUNT, class F>
NAIAD_INLINE void for_each(const F& f) {
  if constexpr (COUNT > 0) {
    for_each<COUNT - 1>(f);
    f(std::integral_constant<int, COUNT - 1>{});
  }
}

// Some rows of one tile's inputs.
template <class Input>
struct TileRows {
  const Input* data;
  int64_t row_bytes;  // from a row to the next
  int64_t rows;
};

// The next lines of each of some panels: of those that are multiplied at once, or of later ones.
template <int PANELS, bool IS_LATER>
struct ReadLines {
  // One of equal parts of these lines of a panel. After the last part the panel goes on to its next lines.
  NAIAD_METHOD void read(int p, int64_t part, int64_t num_parts) {
    const int64_t end = lines * (part + 1) / num_parts;
    for (int64_t line = lines * part / num_parts; line < end; line++) {
      const char* at = next[p] + line * kLineBytes;
      if constexpr (IS_LATER)
        prefetch_early(at);
      else
        prefetch(at);
    }
    if (part + 1 == num_parts) next[p] += lines * kLineBytes;
  }
  const char* next[PANELS];
  int64_t lines;
};

// Reads nothing ahead.
struct ReadNoLines {
  NAIAD_METHOD void read(int, int64_t, int64_t) {}
};

// One of equal parts of a step.
template <class Ahead>
struct ReadPart {
  NAIAD_METHOD void read(int p, int64_t inner, int64_t num_inner) {
    ahead.read(p, part * num_inner + inner, num_parts * num_inner);
  }
  Ahead& ahead;
  int64_t part, num_parts;
};

// A tile of sums for each of the tiles of inputs and each of the tiles of weights: one step's products are added. Lines
// are read ahead one by one between the products: many at once hold up the loads that come after them.
template <class Product, int TILES, int PANELS, class Input, class Ahead>
NAIAD_INLINE void add_tile_products(const TileRows<Input> (&inputs)[TILES], const char* const (&weights)[PANELS],
                                    int64_t step, Ahead& ahead) {
  for_each<TILES>([&](auto tile) {
    load_tile<kInputTiles + decltype(tile)::value>(inputs[tile].data + step * Product::kWidth, inputs[tile].row_bytes);
  });
  for_each<PANELS>([&](auto panel) {
    constexpr int PANEL = decltype(panel)::value, WEIGHTS = kWeightTiles + PANEL % (kNumTiles - kWeightTiles);
    load_tile<WEIGHTS>(weights[PANEL], kTileRowBytes);
    for_each<TILES>([&](auto tile) {
      constexpr int TILE = decltype(tile)::value;
      ahead.read(PANEL, TILE, TILES);
      Product::template multiply<kSumTiles + TILE * PANELS + PANEL, kInputTiles + TILE, WEIGHTS>();
    });
  });
}

// Where a step's tile of each panel lies.
template <int PANELS>
struct WeightTiles {
  const char* data[PANELS];
};
template <int PANELS>
NAIAD_INLINE WeightTiles<PANELS> tiles_of_step(const char* const (&panels)[PANELS], int64_t step) {
  WeightTiles<PANELS> tiles;
  for (int p = 0; p < PANELS; p++) tiles.data[p] = panels[p] + step * kTileBytes;
  return tiles;
}

template <int COUNT>
NAIAD_INLINE void zero_sum_tiles() {
  for_each<COUNT>([](auto tile) { zero_tile<kSumTiles + decltype(tile)::value>(); });
}

template <int COUNT, class T>
NAIAD_INLINE void store_sum_tiles(T (*sums)[kTileRows * kLanes]) {
  for_each<COUNT>([&](auto tile) { store_tile<kSumTiles + decltype(tile)::value>(sums[tile], kTileRowBytes); });
}

// Sums stay in tiles until all steps are added.
struct Bf16Tiles {
  using Input = uint16_t;
  static constexpr bool kTakesTiles = true;
  static constexpr int64_t kInputsPerStep = 32, kWidth = 32, kPanelBytesPerStep = kTileBytes;

  template <int SUMS, int INPUTS, int WEIGHTS>
  NAIAD_INLINE void multiply() {
    multiply_bf16<SUMS, INPUTS, WEIGHTS>();
  }

  template <int COUNT>
  NAIAD_INLINE void begin(float (*)[kTileRows * kLanes]) {
    zero_sum_tiles<COUNT>();
  }

  template <int TILES, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const TileRows<Input> (&inputs)[TILES], const char* const (&panels)[PANELS], int64_t step,
                             Ahead& ahead, float (*)[kTileRows * kLanes]) {
    add_tile_products<Bf16Tiles>(inputs, tiles_of_step(panels, step).data, step, ahead);
  }

  template <int COUNT>
  NAIAD_INLINE void end(float (*sums)[kTileRows * kLanes]) {
    store_sum_tiles<COUNT>(sums);
  }
};

// Each tile of weights is multiplied by three tiles of inputs, whose sum the inputs are.
struct FloatByBf16Tiles : Bf16Tiles {
  using Input = Bf16Planes;
  static constexpr int64_t kInputsPerStep = kInputsPerPlanes, kWidth = 1;
  static_assert(sizeof(Bf16Planes) == Bf16Planes::kCount * kTileRowBytes, "a plane is a row of a tile");

  template <int TILES, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const TileRows<Input> (&inputs)[TILES], const char* const (&panels)[PANELS], int64_t step,
                             Ahead& ahead, float (*)[kTileRows * kLanes]) {
    constexpr int kKept = kNumTiles - kWeightTiles;
    if constexpr (PANELS <= kKept)
      for_each<PANELS>(
          [&](auto panel) { load_tile<kWeightTiles + panel>(panels[panel] + step * kTileBytes, kTileRowBytes); });
    for_each<Bf16Planes::kCount>([&](auto plane) {
      for_each<TILES>([&](auto tile) {
        load_tile<kInputTiles + tile>(inputs[tile].data[step].planes[plane], inputs[tile].row_bytes);
      });
      for_each<PANELS>([&](auto panel) {
        ahead.read(panel, plane, Bf16Planes::kCount);
        if constexpr (PANELS > kKept)
          load_tile<kWeightTiles + panel % kKept>(panels[panel] + step * kTileBytes, kTileRowBytes);
        for_each<TILES>([&](auto tile) {
          multiply<kSumTiles + tile * PANELS + panel, kInputTiles + tile, kWeightTiles + panel % kKept>();
        });
      });
    });
  }
};

// Sums of floats in memory, to which the whole numbers of a step's tiles are added.
struct WholeTiles {
  using Input = RoundedInputs;
  static constexpr bool kTakesTiles = true;
  static constexpr int64_t kInputsPerStep = kInputsPerScale, kWidth = 1;
  static_assert(kInputsPerScale == kTileRowBytes, "a step's values are a row of a tile");

  template <int SUMS, int INPUTS, int WEIGHTS>
  NAIAD_INLINE void multiply() {
    multiply_int8<SUMS, INPUTS, WEIGHTS>();
  }

  template <int COUNT>
  NAIAD_INLINE void begin(float (*sums)[kTileRows * kLanes]) {
    for (int tile = 0; tile < COUNT; tile++)
      for (int64_t i = 0; i < kTileRows * kLanes; i += kLanes) store(sums[tile] + i, fill(0.0f));
  }

  template <int COUNT>
  NAIAD_INLINE void end(float (*)[kTileRows * kLanes]) {}

  // Multiplies, and calls add(panel, inputs, products, sum) for each panel and row of the tiles of inputs.
  template <int TILES, int PANELS, class Ahead, class Add>
  NAIAD_INLINE void add_products(const TileRows<Input> (&inputs)[TILES], const char* const (&weights)[PANELS],
                                 int64_t step, Ahead& ahead, float (*sums)[kTileRows * kLanes], const Add& add) {
    alignas(64) int32_t whole[TILES * PANELS][kTileRows * kLanes];
    zero_sum_tiles<TILES * PANELS>();
    add_tile_products<WholeTiles>(inputs, weights, step, ahead);
    store_sum_tiles<TILES * PANELS>(whole);
    for (int tile = 0; tile < TILES; tile++)
      for (int64_t row = 0; row < inputs[tile].rows; row++) {
        const char* at = reinterpret_cast<const char*>(inputs[tile].data + step) + row * inputs[tile].row_bytes;
        const RoundedInputs& x = *reinterpret_cast<const RoundedInputs*>(at);
        for (int p = 0; p < PANELS; p++) {
          float* sum = sums[tile * PANELS + p] + row * kLanes;
          store(sum, add(p, x, load_whole(whole[tile * PANELS + p] + row * kLanes), load(sum)));
        }
      }
  }
};

// A step is one group of inputs.
struct Int8Tiles : WholeTiles {
  static constexpr int64_t kPanelBytesPerStep = kTileBytes;

  template <int TILES, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const TileRows<Input> (&inputs)[TILES], const char* const (&panels)[PANELS], int64_t step,
                             Ahead& ahead, float (*sums)[kTileRows * kLanes]) {
    // What the 128 more of each weight add is taken back: whole numbers that floats hold exactly.
    const auto add = [](int, const RoundedInputs& x, Floats products, Floats sum) {
      return fma(products - fill(static_cast<float>(128 * x.sum())), fill(x.scale), sum);
    };
    add_products(inputs, tiles_of_step(panels, step).data, step, ahead, sums, add);
  }
};

// A step is two groups with scales of their own. Each is unpacked to half of a tile whose other half is zero.
template <class Offsets>
struct Int4Tiles : WholeTiles {
  using Layout = NibbleStep<Offsets>;
  static constexpr int64_t kPanelBytesPerStep = Layout::kBytes;

  template <int TILES, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const TileRows<Input> (&inputs)[TILES], const char* const (&panels)[PANELS], int64_t step,
                             Ahead& ahead, float (*sums)[kTileRows * kLanes]) {
    alignas(64) char unpacked[PANELS][2 * kTileBytes];
    const char* steps[PANELS];
    for (int p = 0; p < PANELS; p++) unpack(steps[p] = panels[p] + step * kPanelBytesPerStep, unpacked[p]);
    for (int64_t group = 0; group < kGroupsPerStep; group++) {
      const char* weights[PANELS];
      Floats scales[PANELS], offsets[PANELS];
      for (int p = 0; p < PANELS; p++) {
        weights[p] = unpacked[p] + (1 + group) * kHalfBytes;
        scales[p] = Layout::load_scales(steps[p], group);
        offsets[p] = Layout::load_offsets(steps[p], group);
      }
      const auto add = [&](int p, const RoundedInputs& x, Floats whole, Floats sum) {
        const float inputs_sum = static_cast<float>(x.group_sums[group]);
        return fma(Offsets::products(whole, inputs_sum, scales[p], offsets[p]), fill(x.scale), sum);
      };
      ReadPart<Ahead> part{ahead, group, kGroupsPerStep};
      add_products(inputs, weights, step, part, sums, add);
    }
  }

 private:
  static constexpr int64_t kHalfBytes = kTileBytes / 2;

  // Zeros, the first group, zeros, the second group: a tile begins with the first group or ends with the second.
  NAIAD_INLINE void unpack(const char* step, char* out) {
    for (int64_t group = 0; group < kGroupsPerStep; group++) {
      char* zeros = out + 2 * group * kHalfBytes;
      std::memset(zeros, 0, kHalfBytes);
      for (int64_t line = 0; line < kNibbleBytesPerGroup / 64; line++) {
        Fours lower, upper;
        load_nibbles(step + group * kNibbleBytesPerGroup + line * 64, lower, upper);
        store_bytes(zeros + kHalfBytes + line * 64, lower);
        store_bytes(zeros + kHalfBytes + kHalfBytes / 2 + line * 64, upper);
      }
    }
  }
};

// A gate multiplies two matrices, one below the other: then every unit is a panel of the first half with its
// partner in the second, else it is a panel.
template <class Product, bool IS_GATED>
class TileRange {
 public:
  TileRange(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, int64_t first_row, int64_t end_row)
      : epilogue_{record, run},
        rows_(rows),
        first_row_(first_row),
        num_rows_(end_row - first_row),
        num_tiles_(num_row_tiles(num_rows_)),
        rows_of_tile_(rows_of_tile(num_rows_)),
        num_steps_(record.matrix.in_features / Product::kInputsPerStep),
        panel_bytes_(num_steps_ * Product::kPanelBytesPerStep),
        partner_(record.matrix.num_panels / 2),
        panels_(static_cast<const char*>(record.matrix.panels)) {}

  void compute(int64_t unit, int64_t end) const {
    if (num_tiles_ == 1)
      units<1, 4 / kPanelsPerUnit>(unit, end);
    else
      units<2, 2 / kPanelsPerUnit>(unit, end);
  }

 private:
  static constexpr int kPanelsPerUnit = IS_GATED ? 2 : 1;

  template <int TILES, int UNITS>
  void units(int64_t unit, int64_t end) const {
    for (; unit + UNITS <= end; unit += UNITS) {
      int64_t tile = 0;
      for (; tile + TILES <= num_tiles_; tile += TILES) block<TILES, UNITS>(tile, unit);
      if constexpr (TILES > 1)
        for (; tile < num_tiles_; tile++) block<1, UNITS>(tile, unit);
    }
    if constexpr (UNITS > 1) units<TILES, UNITS / 2>(unit, end);
  }

  // The last tile begins early enough to be full: its first rows are then those of the tile before it.
  int64_t first_row_of(int64_t tile) const {
    return first_row_ + std::min(tile * rows_of_tile_, num_rows_ - rows_of_tile_);
  }

  template <int TILES, int UNITS>
  void block(int64_t tile, int64_t unit) const {
    constexpr int PANELS = UNITS * kPanelsPerUnit;
    const char* panels[PANELS];
    for (int u = 0; u < UNITS; u++) {
      panels[u * kPanelsPerUnit] = panels_ + (unit + u) * panel_bytes_;
      if constexpr (IS_GATED) panels[u * 2 + 1] = panels_ + (partner_ + unit + u) * panel_bytes_;
    }
    TileRows<typename Product::Input> inputs[TILES];
    for (int t = 0; t < TILES; t++)
      inputs[t] = {rows_.data + first_row_of(tile + t) * rows_.stride,
                   rows_.stride * static_cast<int64_t>(sizeof(typename Product::Input)), rows_of_tile_};
    alignas(64) float sums[TILES * PANELS][kTileRows * kLanes];
    Product::template begin<TILES * PANELS>(sums);
    if (num_tiles_ == 1)
      multiply_alone<UNITS>(inputs, panels, sums);
    else
      multiply_among<UNITS>(tile, inputs, panels, sums);
    Product::template end<TILES * PANELS>(sums);
    for (int t = 0; t < TILES; t++) finish<UNITS>(tile + t, unit, sums + t * PANELS);
  }

  // Memory is what a single tile waits for: it reads its own panels ahead, and at their ends those of the next units.
  template <int UNITS, int TILES, int PANELS, class Inputs>
  NAIAD_METHOD void multiply_alone(const Inputs (&inputs)[TILES], const char* const (&panels)[PANELS],
                                   float (*sums)[kTileRows * kLanes]) const {
    const int64_t ahead_bytes = std::min(kAheadBytes, panel_bytes_),
                  turn = (panel_bytes_ - ahead_bytes) / Product::kPanelBytesPerStep;
    ReadLines<PANELS, false> ahead;
    ahead.lines = (Product::kPanelBytesPerStep + kLineBytes - 1) / kLineBytes;
    for (int p = 0; p < PANELS; p++) ahead.next[p] = panels[p] + ahead_bytes;
    multiply_steps(inputs, panels, 0, turn, ahead, sums);
    for (int p = 0; p < PANELS; p++) ahead.next[p] += (UNITS - 1) * panel_bytes_;
    multiply_steps(inputs, panels, turn, num_steps_, ahead, sums);
  }

  // Each of several tiles reads its part of the next units' panels, while all compute with these.
  template <int UNITS, int TILES, int PANELS, class Inputs>
  NAIAD_METHOD void multiply_among(int64_t tile, const Inputs (&inputs)[TILES], const char* const (&panels)[PANELS],
                                   float (*sums)[kTileRows * kLanes]) const {
    const int64_t num_lines = panel_bytes_ / kLineBytes, first = num_lines * tile / num_tiles_;
    const int64_t count = num_lines * (tile + TILES) / num_tiles_ - first;
    ReadLines<PANELS, true> ahead;
    ahead.lines = std::max<int64_t>(1, (count + num_steps_ - 1) / num_steps_);  // the first tile may have none
    for (int p = 0; p < PANELS; p++) ahead.next[p] = panels[p] + UNITS * panel_bytes_ + first * kLineBytes;
    const int64_t turn = (count + ahead.lines - 1) / ahead.lines;
    multiply_steps(inputs, panels, 0, turn, ahead, sums);
    ahead.lines = 0;
    multiply_steps(inputs, panels, turn, num_steps_, ahead, sums);
  }

  // Steps [step, end) of a block.
  template <int TILES, int PANELS, class Inputs, class Ahead>
  NAIAD_METHOD void multiply_steps(const Inputs (&inputs)[TILES], const char* const (&panels)[PANELS], int64_t step,
                                   int64_t end, Ahead& ahead, float (*sums)[kTileRows * kLanes]) const {
    for (; step < end; step++) {
      Product::template add_step<TILES, PANELS>(inputs, panels, step, ahead, sums);
    }
  }

  // The rows that this tile has first.
  template <int UNITS>
  void finish(int64_t tile, int64_t unit, const float (*sums)[kTileRows * kLanes]) const {
    const int64_t end = first_row_ + std::min((tile + 1) * rows_of_tile_, num_rows_);
    for (int64_t row = first_row_ + tile * rows_of_tile_; row < end; row++) {
      const int64_t at = (row - first_row_of(tile)) * kLanes;
      for (int u = 0; u < UNITS; u++) {
        if constexpr (IS_GATED)
          epilogue_(row, unit + u, load(sums[u * 2] + at), load(sums[u * 2 + 1] + at));
        else
          epilogue_(row, unit + u, load(sums[u] + at));
      }
    }
  }

  const Epilogue epilogue_;
  const Rows<Product> rows_;
  const int64_t first_row_, num_rows_, num_tiles_, rows_of_tile_, num_steps_, panel_bytes_, partner_;
  const char* const panels_;
};

}  // namespace naiad
