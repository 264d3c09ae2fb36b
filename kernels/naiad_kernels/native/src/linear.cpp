// Products of a step's rows with a matrix in panels of 16 outputs.
//
// Each output has one accumulator, and its products are added in the order of the inputs. So a row's result
// is the same to the last bit whatever other rows there are and whoever computes it.
#include "blocks.h"
#include "epilogue.h"
#include "inputs.h"
#include "kernels.h"
#include "nibbles.h"
#include "read_ahead.h"
#include "simd.h"
#include "tile_panels.h"

#include <algorithm>
#include <type_traits>

namespace naiad {
namespace {

// ---------------------------------------------------------------- what is read ahead
// A tile asks for memory each time it has taken one vector from each of its panels.

struct ReadNothing {
  NAIAD_METHOD void read(const char* const*) const {}
};

// Every panel, so far ahead of where the tile is. Into the second cache: a core has buffers for few lines on their way
// to the first one, and waits when they are taken.
template <int PANELS>
struct ReadPanels {
  NAIAD_METHOD void read(const char* const* at) const {
    for (int p = 0; p < PANELS; p++) prefetch_early(at[p] + ahead_bytes);
  }
  const int64_t ahead_bytes;
};

// The next LINES lines of each of some regions.
template <int REGIONS, int LINES>
struct ReadRegions {
  NAIAD_METHOD void read(const char* const*) {
    for (int r = 0; r < REGIONS; r++) {
      for (int line = 0; line < LINES; line++) prefetch_early(next[r] + line * kLineBytes);
      next[r] += LINES * kLineBytes;
    }
  }
  const char* next[REGIONS];
};

// ---------------------------------------------------------------- what is multiplied
// A product says how inputs are laid out, how wide a step of a panel is, and how a tile adds one step:
// `panels` are then the step's places in some panels. A tile has up to `kMostRows` rows and `kMostPanels` panels, of
// which it takes `kPanelsAtOnce` together: their sums, the weights of a step and an input fill the registers.

// Steps of one vector of each panel: `Steps` has `weights` and `multiply`.
template <class Steps>
struct VectorSteps {
  static constexpr bool kTakesTiles = false;
  static constexpr int64_t kPanelBytesPerStep = 64;
  static constexpr int kMostRows = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 4 : 2;
  static constexpr int kMostPanels = kRegisters >= 32 ? 4 : 2;
  static constexpr int kPanelsAtOnce = kRegisters >= 32 ? 4 : 1;

  template <int ROWS, int PANELS, class Ahead, class Input>
  NAIAD_INLINE void add_step(const Input* x, int64_t stride, const char* const panels[PANELS], Ahead& ahead,
                             Floats sums[ROWS][PANELS]) {
    typename Steps::Weights w[PANELS];
    for (int p = 0; p < PANELS; p++) w[p] = Steps::weights(panels[p]);
    ahead.read(panels);
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) sums[r][p] = Steps::multiply(x + r * stride, w[p], sums[r][p]);
  }
};

struct FloatByFloat : VectorSteps<FloatByFloat> {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 1, kWidth = 1;
  using Weights = Floats;
  NAIAD_INLINE Weights weights(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) { return fma(fill(x[0]), w, sum); }
};

struct FloatByBf16 : VectorSteps<FloatByBf16> {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 2, kWidth = 2;
  struct Weights {
    Floats first, second;
  };
  NAIAD_INLINE Weights weights(const char* p) {
    Weights w;
    load_pairs(reinterpret_cast<const uint16_t*>(p), w.first, w.second);
    return w;
  }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) {
    return fma(fill(x[1]), w.second, fma(fill(x[0]), w.first, sum));
  }
};

struct FloatByF16 : VectorSteps<FloatByF16> {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 2, kWidth = 2;
  struct Weights {
    Floats first, second;
  };
  NAIAD_INLINE Weights weights(const char* p) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
    return {load_f16(halves), load_f16(halves + kLanes)};
  }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) {
    return fma(fill(x[1]), w.second, fma(fill(x[0]), w.first, sum));
  }
};

struct Bf16ByBf16 : VectorSteps<Bf16ByBf16> {
  using Input = uint16_t;
  static constexpr int64_t kInputsPerStep = 2, kWidth = 2;
  using Weights = Pairs;
  NAIAD_INLINE Weights weights(const char* p) { return load_weight_pairs(reinterpret_cast<const uint16_t*>(p)); }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) {
    return multiply_pairs(fill_pair(x), w, sum);
  }
};

// A step's products are added as whole numbers, and steps as floats.
struct Int8ByInt8 {
  using Input = RoundedInputs;
  static constexpr bool kTakesTiles = false;
  static constexpr int64_t kInputsPerStep = kInputsPerScale, kWidth = 1;
  static constexpr int64_t kPanelBytesPerStep = kInputsPerScale * kLanes;
  static constexpr int kMostRows = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 3 : 2, kMostPanels = 2, kPanelsAtOnce = 2;

  template <int ROWS, int PANELS, class Ahead>
  NAIAD_INLINE void add_step(const Input* x, int64_t stride, const char* const panels[PANELS], Ahead& ahead,
                             Floats sums[ROWS][PANELS]) {
    Ints whole[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) whole[r][p] = first_sum(x[r * stride].sum());
    for (int64_t four = 0; four < kInputsPerStep / 4; four++) {
      Bytes w[PANELS];
      const char* at[PANELS];
      for (int p = 0; p < PANELS; p++) w[p] = load_bytes(at[p] = panels[p] + four * 64);
      ahead.read(at);
      for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++)
          whole[r][p] = multiply_four(w[p], x[r * stride].values + four * 4, whole[r][p]);
    }
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) sums[r][p] = fma(to_floats(whole[r][p]), fill(x[r * stride].scale), sums[r][p]);
  }
};

// Whether many rows take the inputs in blocks; with many registers a tile has enough rows without.
template <class Product>
constexpr bool kTakesBlocks = kRegisters < 32 && std::is_same_v<typename Product::Input, float>;
constexpr int64_t kFewestBlockRows = 16;

// ---------------------------------------------------------------- some rows by a range of panels
// A gate multiplies two matrices, one below the other: then every unit is a panel of the first half with its
// partner in the second, else it is a panel.
template <class Product, bool IS_GATED>
class PanelRange {
 public:
  PanelRange(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, int64_t first_row, int64_t end_row)
      : epilogue_{record, run},
        rows_(rows),
        first_row_(first_row),
        num_rows_(end_row - first_row),
        num_tiles_((num_rows_ + Product::kMostRows - 1) / Product::kMostRows),
        num_steps_(record.matrix.in_features / Product::kInputsPerStep),
        panel_bytes_(num_steps_ * Product::kPanelBytesPerStep),
        partner_(record.matrix.num_panels / 2),
        panels_(static_cast<const char*>(record.matrix.panels)) {}

  void compute(int64_t unit, int64_t end) const {
    if constexpr (kTakesBlocks<Product>)
      if (num_rows_ >= kFewestBlockRows) return by_blocks(unit, end);
    for (; unit + kUnits <= end; unit += kUnits) all_rows<kUnits>(unit);
    for (; unit < end; unit++) all_rows<1>(unit);
  }

 private:
  static constexpr int kPanelsPerUnit = IS_GATED ? 2 : 1;
  static constexpr int kUnits = Product::kMostPanels / kPanelsPerUnit;

  void by_blocks(int64_t unit, int64_t end) const {
    const int64_t num_parts = (num_rows_ + kMostBlockRows - 1) / kMostBlockRows;
    for (int64_t part = 0; part < num_parts; part++)
      for (int64_t each = unit; each < end; each++)
        rows_by_blocks(each, num_rows_ * part / num_parts, num_rows_ * (part + 1) / num_parts);
  }

  void rows_by_blocks(int64_t unit, int64_t first, int64_t end) const {
    const char* panels[kPanelsPerUnit] = {panels_ + unit * panel_bytes_};
    if constexpr (IS_GATED) panels[1] = panels_ + (partner_ + unit) * panel_bytes_;
    Floats sums[kPanelsPerUnit][kMostBlockRows];
    const BlockRows rows{rows_.data + (first_row_ + first) * rows_.stride, rows_.stride, end - first};
    multiply_by_blocks<Product>(rows, panels, num_steps_ * Product::kInputsPerStep, sums);
    for (int64_t r = 0; r < rows.count; r++)
      if constexpr (IS_GATED)
        epilogue_(first_row_ + first + r, unit, sums[0][r], sums[1][r]);
      else
        epilogue_(first_row_ + first + r, unit, sums[0][r]);
  }

  // One of the tiles into which the rows are cut, as equal as can be.
  struct RowTile {
    int64_t number, first, end;
  };

  template <int UNITS>
  void all_rows(int64_t unit) const {
    for (int64_t number = 0; number < num_tiles_; number++) {
      const int64_t first = num_rows_ * number / num_tiles_, end = num_rows_ * (number + 1) / num_tiles_;
      fitting_tile<UNITS, 1>({number, first_row_ + first, first_row_ + end}, unit);
    }
  }

  // The tile of that many rows, looked for from ROWS on.
  template <int UNITS, int ROWS>
  void fitting_tile(const RowTile& rows, int64_t unit) const {
    if (rows.end - rows.first == ROWS) return tile<UNITS, ROWS>(rows, unit);
    if constexpr (ROWS < Product::kMostRows) fitting_tile<UNITS, ROWS + 1>(rows, unit);
  }

  template <int UNITS, int ROWS>
  void tile(const RowTile& rows, int64_t unit) const {
    constexpr int PANELS = UNITS * kPanelsPerUnit;
    const char* panels[PANELS];
    for (int u = 0; u < UNITS; u++) {
      panels[u * kPanelsPerUnit] = panels_ + (unit + u) * panel_bytes_;
      if constexpr (IS_GATED) panels[u * 2 + 1] = panels_ + (partner_ + unit + u) * panel_bytes_;
    }
    constexpr int AT_ONCE = std::min(PANELS, Product::kPanelsAtOnce);
    Floats sums[PANELS / AT_ONCE][ROWS][AT_ONCE];
    for (int p = 0; p < PANELS; p += AT_ONCE) multiply<UNITS, ROWS, AT_ONCE>(rows, panels + p, sums[p / AT_ONCE]);
    const auto sum = [&](int row, int panel) { return sums[panel / AT_ONCE][row][panel % AT_ONCE]; };
    // Unrolled, or the sums would go through memory.
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int u = 0; u < UNITS; u++) {
        if constexpr (IS_GATED)
          epilogue_(rows.first + r, unit + u, sum(r, u * 2), sum(r, u * 2 + 1));
        else
          epilogue_(rows.first + r, unit + u, sum(r, u));
      }
  }

  template <int UNITS, int ROWS, int PANELS>
  NAIAD_METHOD void multiply(const RowTile& rows, const char* const* panels, Floats (&sums)[ROWS][PANELS]) const {
    for (int r = 0; r < ROWS; r++)
      for (int p = 0; p < PANELS; p++) sums[r][p] = fill(0.0f);
    // One of several tiles has at least half of the most rows. What is left over of the panels is little.
    if constexpr (UNITS == kUnits && ROWS >= (Product::kMostRows + 1) / 2)
      if (num_tiles_ > 1) return multiply_among<UNITS>(rows, panels, sums);
    multiply_alone<UNITS>(rows, panels, sums);
  }

  // Memory is what a single tile waits for: it reads its own panels ahead, and at their ends those of the next units.
  template <int UNITS, int ROWS, int PANELS>
  NAIAD_METHOD void multiply_alone(const RowTile& rows, const char* const* panels, Floats (&sums)[ROWS][PANELS]) const {
    const int64_t ahead = std::min(kAheadBytes, panel_bytes_);
    const int64_t turn = (panel_bytes_ - ahead) / Product::kPanelBytesPerStep;
    const int64_t next = (UNITS - 1) * panel_bytes_;
    multiply_steps(rows, panels, 0, turn, ReadPanels<PANELS>{ahead}, sums);
    multiply_steps(rows, panels, turn, num_steps_, ReadPanels<PANELS>{next + ahead}, sums);
  }

  // Each of several tiles reads its part of the next units' panels, while all compute with these.
  template <int UNITS, int ROWS, int PANELS>
  NAIAD_METHOD void multiply_among(const RowTile& rows, const char* const* panels, Floats (&sums)[ROWS][PANELS]) const {
    // A region is panels that lie one after the other.
    constexpr int REGIONS = std::min(PANELS, kPanelsPerUnit);
    const int64_t num_lines = PANELS / REGIONS * panel_bytes_ / kLineBytes;
    const int64_t first = num_lines * rows.number / num_tiles_;
    const int64_t count = num_lines * (rows.number + 1) / num_tiles_ - first;
    const auto from_first = [&](auto ahead) {
      for (int r = 0; r < REGIONS; r++) ahead.next[r] = panels[r] + UNITS * panel_bytes_ + first * kLineBytes;
      return ahead;
    };
    const int64_t lines_per_step = Product::kPanelBytesPerStep / kLineBytes;
    const int lines = count > num_steps_ * lines_per_step ? 2 : 1;
    const int64_t turn = std::min(num_steps_, (count / lines + lines_per_step - 1) / lines_per_step);
    if (lines == 2)
      multiply_steps(rows, panels, 0, turn, from_first(ReadRegions<REGIONS, 2>{}), sums);
    else
      multiply_steps(rows, panels, 0, turn, from_first(ReadRegions<REGIONS, 1>{}), sums);
    multiply_steps(rows, panels, turn, num_steps_, ReadNothing{}, sums);
  }

  // Steps [step, end) of a tile.
  template <int ROWS, int PANELS, class Ahead>
  NAIAD_METHOD void multiply_steps(const RowTile& rows, const char* const* panels, int64_t step, int64_t end,
                                   Ahead ahead, Floats (&sums)[ROWS][PANELS]) const {
    const typename Product::Input* x = rows_.data + rows.first * rows_.stride;
    for (; step < end; step++) {
      const char* at[PANELS];
      for (int p = 0; p < PANELS; p++) at[p] = panels[p] + step * Product::kPanelBytesPerStep;
      Product::template add_step<ROWS, PANELS>(x + step * Product::kWidth, rows_.stride, at, ahead, sums);
    }
  }

  const Epilogue epilogue_;
  const Rows<Product> rows_;
  const int64_t first_row_, num_rows_, num_tiles_, num_steps_, panel_bytes_, partner_;
  const char* const panels_;
};

using ExactByBf16 = std::conditional_t<kHasTiles, FloatByBf16Tiles, FloatByBf16>;
using RoundedByBf16 = std::conditional_t<kHasTiles, Bf16Tiles, Bf16ByBf16>;
using RoundedByInt8 = std::conditional_t<kHasTiles, Int8Tiles, Int8ByInt8>;

// ---------------------------------------------------------------- what is shared out
// If there are so many rows for each member, every member has rows of its own, and its shares are panels for these.
// Then every member reads all weights, but most of its inputs are what it has written itself: inputs that lie in the
// cache of another core take longer than weights. Else shares are panels for all rows.
constexpr int64_t kRowsToShare = 64;
// With fewer rows in 16 bits, tiles lose more by reading all weights than they gain; in eight bits they do not.
constexpr int64_t kRowsToShareOfBf16Tiles = 128;
// A tile's panels, of which a gate has half.
constexpr int64_t kPanelsTogether = 4;
// Up to this many rows every member rounds all inputs for itself; more are rounded in a phase of their own.
constexpr int64_t kRowsRoundedAlone = 2;

// Whether inputs are rounded, or split into what tiles multiply, before they are multiplied.
bool is_rounded(int32_t product) {
  if (product == NAIAD_FLOAT_BY_BF16) return kHasTiles;
  return product != NAIAD_FLOAT_BY_FLOAT && product != NAIAD_FLOAT_BY_F16;
}

bool shares_rows(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  const bool multiplies_bf16_tiles = kHasTiles && record.matrix.product == NAIAD_BF16_BY_BF16;
  return step.num_tokens >= (multiplies_bf16_tiles ? kRowsToShareOfBf16Tiles : kRowsToShare) * team_size;
}

bool rounds_first(const NaiadRecord& record, const NaiadStep& step) {
  return is_rounded(record.matrix.product) && step.num_tokens > kRowsRoundedAlone;
}

// Panels, or a gate's pairs of panels.
Things units(const NaiadRecord& record) {
  const int64_t panels_per_unit = record.activation == NAIAD_NO_GATE ? 1 : 2;
  const int64_t together = kPanelsTogether / panels_per_unit;
  return {record.matrix.num_panels / panels_per_unit, together, together};
}

Things product_things(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  // As many as make a cut in which every member has all of its shares.
  if (shares_rows(record, step, team_size)) return {team_size * kMostSharesPerMember};
  return units(record);
}

// ---------------------------------------------------------------- products

template <class Product, bool IS_GATED>
void compute_part(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, const Share& share) {
  const int64_t num_rows = run.step->num_tokens;
  const Things all = units(record);
  const bool has_own_rows = shares_rows(record, *run.step, run.team_size);
  const Range own_rows = has_own_rows ? share.member_of(num_rows) : Range{0, num_rows};
  const auto [first, end] = has_own_rows ? share.part_of({0, all.count}, all.grain) : share.of(all);
  if constexpr (Product::kTakesTiles) {
    const TileSession tiles(rows_of_tile(own_rows.end - own_rows.first));
    TileRange<Product, IS_GATED>(record, run, rows, own_rows.first, own_rows.end).compute(first, end);
  } else {
    PanelRange<Product, IS_GATED>(record, run, rows, own_rows.first, own_rows.end).compute(first, end);
  }
}

template <class Product>
void compute_panels(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, const Share& share) {
  if (record.activation == NAIAD_NO_GATE)
    compute_part<Product, false>(record, run, rows, share);
  else
    compute_part<Product, true>(record, run, rows, share);
}

// Few rows in four bits are multiplied as fast as their weights are read without tiles. Both forms give the same bits.
constexpr int64_t kMostInt4RowsWithoutTiles = 8;

template <class Offsets>
void compute_int4_panels(const NaiadRecord& record, const Run& run, const Rows<RoundedByInt8>& rows,
                         const Share& share) {
  if constexpr (kHasTiles)
    if (run.step->num_tokens > kMostInt4RowsWithoutTiles)
      return compute_panels<Int4Tiles<Offsets>>(record, run, {rows.data, rows.stride}, share);
  compute_panels<Int4ByInt8<Offsets>>(record, run, {rows.data, rows.stride}, share);
}

// ---------------------------------------------------------------- inputs

template <class Product>
int64_t inputs_of_row(const NaiadRecord& record) {
  return record.matrix.in_features / Product::kInputsPerStep * Product::kWidth;
}

template <class Product>
void round_rows(const NaiadRecord& record, const Run& run, int64_t first, int64_t end,
                typename Product::Input* rounded) {
  for (int64_t row = first; row < end; row++)
    round_row(run.row(record.in, row), record.matrix.in_features, rounded + row * inputs_of_row<Product>(record));
}

// Where the phase before the product rounds to: all rows.
template <class Product>
typename Product::Input* shared_inputs(const NaiadRecord& record, const Run& run) {
  return run.shared->get<typename Product::Input>(run.step->num_tokens * inputs_of_row<Product>(record));
}

// The inputs of all rows, rounded.
template <class Product>
Rows<Product> rounded_rows(const NaiadRecord& record, const Run& run, const Share& share) {
  const NaiadStep& step = *run.step;
  const int64_t width = inputs_of_row<Product>(record);
  if (rounds_first(record, step)) return {shared_inputs<Product>(record, run), width};
  Own& own = run.own[share.computed_by];
  auto* rounded = own.memory.get<typename Product::Input>(step.num_tokens * width);
  // A member's first share of this stage rounds for all of its shares.
  if (own.stage != share.stage) round_rows<Product>(record, run, 0, step.num_tokens, rounded);
  own.stage = share.stage;
  return {rounded, width};
}

template <class Product>
void round_share(const NaiadRecord& record, const Run& run, const Share& share) {
  const auto [first, end] = share.of(row_things(*run.step, 0));
  round_rows<Product>(record, run, first, end, shared_inputs<Product>(record, run));
}

// The phase before the product.
void round_inputs(const NaiadRecord& record, const Run& run, const Share& share) {
  switch (record.matrix.product) {
    case NAIAD_FLOAT_BY_BF16:
      if constexpr (kHasTiles) round_share<ExactByBf16>(record, run, share);
      return;
    case NAIAD_BF16_BY_BF16: return round_share<RoundedByBf16>(record, run, share);
    default: return round_share<RoundedByInt8>(record, run, share);
  }
}

template <class Product>
void compute_exact_panels(const NaiadRecord& record, const Run& run, const Share& share) {
  if constexpr (Product::kTakesTiles) {
    compute_panels<Product>(record, run, rounded_rows<Product>(record, run, share), share);
  } else {
    const NaiadBuffer& in = run.buffers[record.in];
    compute_panels<Product>(record, run, {in.data, in.stride}, share);
  }
}

// Of all of a step's inputs; 0 for products that read floats as they are.
int64_t rounded_bytes(const NaiadRecord& record, const NaiadStep& step) {
  switch (record.matrix.product) {
    case NAIAD_FLOAT_BY_BF16:
      if (!kHasTiles) return 0;
      return step.num_tokens * inputs_of_row<ExactByBf16>(record) * static_cast<int64_t>(sizeof(ExactByBf16::Input));
    case NAIAD_BF16_BY_BF16:
      return step.num_tokens * inputs_of_row<RoundedByBf16>(record) * static_cast<int64_t>(sizeof(uint16_t));
    case NAIAD_INT8_BY_INT8:
    case NAIAD_INT4_BY_INT8:
    case NAIAD_INT4_AND_MINIMUM_BY_INT8:
      return step.num_tokens * inputs_of_row<RoundedByInt8>(record) * static_cast<int64_t>(sizeof(RoundedInputs));
    default: return 0;
  }
}

}  // namespace

int64_t linear_shared_bytes(const NaiadRecord& record, const NaiadStep& step) {
  return rounds_first(record, step) ? rounded_bytes(record, step) : 0;
}

int64_t linear_own_bytes(const NaiadRecord& record, const NaiadStep& step) {
  return rounds_first(record, step) ? 0 : rounded_bytes(record, step);
}

Things linear_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase, int64_t team_size) {
  const int64_t product_phase = rounds_first(record, step) ? 1 : 0;
  if (phase > product_phase) return {0};
  return phase == product_phase ? product_things(record, step, team_size) : row_things(step, 0);
}

void linear(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  if (phase == 0 && rounds_first(record, *run.step)) return round_inputs(record, run, share);
  switch (record.matrix.product) {
    case NAIAD_FLOAT_BY_FLOAT: return compute_exact_panels<FloatByFloat>(record, run, share);
    case NAIAD_FLOAT_BY_BF16: return compute_exact_panels<ExactByBf16>(record, run, share);
    case NAIAD_FLOAT_BY_F16: return compute_exact_panels<FloatByF16>(record, run, share);
    case NAIAD_BF16_BY_BF16:
      return compute_panels<RoundedByBf16>(record, run, rounded_rows<RoundedByBf16>(record, run, share), share);
    case NAIAD_INT4_BY_INT8:
      return compute_int4_panels<ZeroPoints>(record, run, rounded_rows<RoundedByInt8>(record, run, share), share);
    case NAIAD_INT4_AND_MINIMUM_BY_INT8:
      return compute_int4_panels<Minimums>(record, run, rounded_rows<RoundedByInt8>(record, run, share), share);
    default: return compute_panels<RoundedByInt8>(record, run, rounded_rows<RoundedByInt8>(record, run, share), share);
  }
}

}  // namespace naiad
