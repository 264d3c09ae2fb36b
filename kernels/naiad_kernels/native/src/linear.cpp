// Products of a step's rows with a matrix in panels of 16 outputs.
//
// Each output has one accumulator, and its products are added in the order of the inputs. So a row's result
// is the same to the last bit whatever other rows there are and whoever computes it.
#include "kernels.h"
#include "simd.h"

#include <algorithm>

namespace naiad {
namespace {

// How far a panel is read ahead.
constexpr int64_t kAheadBytes = 2048;

// ---------------------------------------------------------------- what is multiplied
// A product says how inputs are laid out, how wide a panel's step is, and how one step is added.

struct FloatByFloat {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 1, kPanelBytesPerStep = 64;
  using Weights = Floats;
  NAIAD_INLINE Weights weights(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) { return fma(fill(x[0]), w, sum); }
};

struct FloatByBf16 {
  using Input = float;
  static constexpr int64_t kInputsPerStep = 2, kPanelBytesPerStep = 64;
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

struct Bf16ByBf16 {
  using Input = uint16_t;
  static constexpr int64_t kInputsPerStep = 2, kPanelBytesPerStep = 64;
  using Weights = Pairs;
  NAIAD_INLINE Weights weights(const char* p) { return load_weight_pairs(reinterpret_cast<const uint16_t*>(p)); }
  NAIAD_INLINE Floats multiply(const Input* x, const Weights& w, Floats sum) {
    return multiply_pairs(fill_pair(x), w, sum);
  }
};

// ---------------------------------------------------------------- a tile: some rows by some panels
template <class Product>
struct Rows {
  const typename Product::Input* data;
  int64_t stride;
};

// Steps [step, end) of a tile. With PREFETCH every panel is also read ahead, at `ahead` bytes from where it is.
template <class Product, int ROWS, int PANELS, bool PREFETCH>
NAIAD_INLINE void multiply_steps(const Rows<Product>& rows, const typename Product::Input* x,
                                 const char* const* panels, int64_t step, int64_t end, int64_t ahead,
                                 Floats sums[ROWS][PANELS]) {
  for (; step < end; step++) {
    typename Product::Weights w[PANELS];
    for (int p = 0; p < PANELS; p++) {
      const char* at = panels[p] + step * Product::kPanelBytesPerStep;
      w[p] = Product::weights(at);
      if (PREFETCH) prefetch(at + ahead);
    }
    for (int r = 0; r < ROWS; r++) {
      const typename Product::Input* at = x + r * rows.stride + step * Product::kInputsPerStep;
      for (int p = 0; p < PANELS; p++) sums[r][p] = Product::multiply(at, w[p], sums[r][p]);
    }
  }
}

// `next`: bytes from a panel to the one that is multiplied after it.
template <class Product, int ROWS, int PANELS, bool PREFETCH>
NAIAD_INLINE void multiply_tile(const Rows<Product>& rows, int64_t first_row, const char* const* panels,
                                int64_t num_steps, int64_t next, Floats sums[ROWS][PANELS]) {
  for (int r = 0; r < ROWS; r++)
    for (int p = 0; p < PANELS; p++) sums[r][p] = fill(0.0f);
  const typename Product::Input* x = rows.data + first_row * rows.stride;
  if (!PREFETCH) return multiply_steps<Product, ROWS, PANELS, false>(rows, x, panels, 0, num_steps, 0, sums);
  const int64_t panel_bytes = num_steps * Product::kPanelBytesPerStep;
  const int64_t ahead = std::min(kAheadBytes, panel_bytes);
  const int64_t turn = (panel_bytes - ahead) / Product::kPanelBytesPerStep;
  multiply_steps<Product, ROWS, PANELS, true>(rows, x, panels, 0, turn, ahead, sums);
  multiply_steps<Product, ROWS, PANELS, true>(rows, x, panels, turn, num_steps, next + ahead - panel_bytes, sums);
}

// ---------------------------------------------------------------- what becomes of the sums
// Adds bias and residual and stores, or gates.
struct Epilogue {
  const NaiadRecord& record;
  const Run& run;

  void operator()(int64_t token, int64_t panel, Floats sum) const {
    const NaiadMatrix& matrix = record.matrix;
    const int64_t at = panel * kLanes;
    if (matrix.bias) sum = sum + load(matrix.bias + at);
    if (record.other >= 0) sum = sum + load(run.row(record.other, token) + at);
    store(run.row(record.out, token) + at, sum);
  }

  // `panel` of the first half, the gate, and its partner in the second half.
  void operator()(int64_t token, int64_t panel, Floats sum, Floats factor) const {
    const NaiadMatrix& matrix = record.matrix;
    const int64_t at = panel * kLanes;
    if (matrix.bias) {
      sum = sum + load(matrix.bias + at);
      factor = factor + load(matrix.bias + at + matrix.num_panels / 2 * kLanes);
    }
    store(run.row(record.out, token) + at, activate(record.activation, sum) * factor);
  }
};

// ---------------------------------------------------------------- all rows by a range of panels
// A gate multiplies two matrices, one below the other: then every unit is a panel of the first half with its
// partner in the second, else it is a panel.
template <class Product, bool IS_GATED>
class PanelRange {
 public:
  PanelRange(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, int64_t num_rows)
      : epilogue_{record, run},
        rows_(rows),
        num_rows_(num_rows),
        num_steps_(record.matrix.in_features / Product::kInputsPerStep),
        panel_bytes_(num_steps_ * Product::kPanelBytesPerStep),
        partner_(record.matrix.num_panels / 2),
        panels_(static_cast<const char*>(record.matrix.panels)) {}

  void compute(int64_t unit, int64_t end) const {
    for (; unit + kUnits <= end; unit += kUnits) all_rows<kUnits>(unit);
    for (; unit < end; unit++) all_rows<1>(unit);
  }

 private:
  static constexpr int kPanelsPerUnit = IS_GATED ? 2 : 1;
  // Tiles fill the registers: sums, the weights of a step, and an input.
  static constexpr int kUnits = (kRegisters >= 32 ? 4 : 2) / kPanelsPerUnit;
  static constexpr int kMostRows = kRegisters >= 32 ? 6 : 2;

  // Tiles of rows are as equal as can be; the first one brings the panels into the cache.
  template <int UNITS>
  void all_rows(int64_t unit) const {
    const int64_t num_tiles = (num_rows_ + kMostRows - 1) / kMostRows;
    for (int64_t index = 0; index < num_tiles; index++) {
      const int64_t row = num_rows_ * index / num_tiles, end = num_rows_ * (index + 1) / num_tiles;
      if (index == 0)
        rows<UNITS, true, 1>(row, end - row, unit);
      else
        rows<UNITS, false, 1>(row, end - row, unit);
    }
  }

  // The tile of that many rows, looked for from ROWS on.
  template <int UNITS, bool PREFETCH, int ROWS>
  void rows(int64_t row, int64_t count, int64_t unit) const {
    if (count == ROWS) return tile<ROWS, UNITS, PREFETCH>(row, unit);
    if constexpr (ROWS < kMostRows) rows<UNITS, PREFETCH, ROWS + 1>(row, count, unit);
  }

  template <int ROWS, int UNITS, bool PREFETCH>
  void tile(int64_t row, int64_t unit) const {
    constexpr int PANELS = UNITS * kPanelsPerUnit;
    const char* panels[PANELS];
    for (int u = 0; u < UNITS; u++) {
      panels[u * kPanelsPerUnit] = panels_ + (unit + u) * panel_bytes_;
      if constexpr (IS_GATED) panels[u * 2 + 1] = panels_ + (partner_ + unit + u) * panel_bytes_;
    }
    Floats sums[ROWS][PANELS];
    multiply_tile<Product, ROWS, PANELS, PREFETCH>(rows_, row, panels, num_steps_, UNITS * panel_bytes_, sums);
    for (int r = 0; r < ROWS; r++)
      for (int u = 0; u < UNITS; u++) {
        if constexpr (IS_GATED)
          epilogue_(row + r, unit + u, sums[r][u * 2], sums[r][u * 2 + 1]);
        else
          epilogue_(row + r, unit + u, sums[r][u]);
      }
  }

  const Epilogue epilogue_;
  const Rows<Product> rows_;
  const int64_t num_rows_, num_steps_, panel_bytes_, partner_;
  const char* const panels_;
};

template <class Product>
void compute_panels(const NaiadRecord& record, const Run& run, const Rows<Product>& rows, Member& member) {
  int64_t first, end;
  if (record.activation == NAIAD_NO_GATE) {
    member.share(record.matrix.num_panels, first, end);
    PanelRange<Product, false>(record, run, rows, run.step->num_tokens).compute(first, end);
  } else {
    member.share(record.matrix.num_panels / 2, first, end);
    PanelRange<Product, true>(record, run, rows, run.step->num_tokens).compute(first, end);
  }
}

// ---------------------------------------------------------------- inputs
// Up to this many rows every member rounds all inputs for itself instead of waiting for the others.
constexpr int64_t kRowsRoundedAlone = 2;

Rows<Bf16ByBf16> rounded_rows(const NaiadRecord& record, const Run& run, Member& member) {
  const int64_t width = record.matrix.in_features, num_rows = run.step->num_tokens;
  const int64_t stride = run.buffers[record.in].stride;
  const bool is_alone = num_rows <= kRowsRoundedAlone;
  uint16_t* rounded = (is_alone ? run.own[member.index] : *run.shared).get<uint16_t>(num_rows * width);
  int64_t first = 0, end = num_rows;
  if (!is_alone) member.share(num_rows, first, end);
  for (int64_t row = first; row < end; row++) {
    const float* in = run.row(record.in, row);
    uint16_t* out = rounded + row * width;
    for (int64_t i = 0; i < stride; i += kLanes) store_bf16(out + i, load(in + i));
    if (width > stride) std::memset(out + stride, 0, (width - stride) * sizeof(uint16_t));
  }
  if (!is_alone) member.barrier();
  return {rounded, width};
}

}  // namespace

int64_t linear_shared_bytes(const NaiadRecord& record, const NaiadStep& step) {
  const bool is_shared = record.matrix.product == NAIAD_BF16_BY_BF16 && step.num_tokens > kRowsRoundedAlone;
  return is_shared ? step.num_tokens * record.matrix.in_features * static_cast<int64_t>(sizeof(uint16_t)) : 0;
}

void linear(const NaiadRecord& record, const Run& run, Member& member) {
  const NaiadBuffer& in = run.buffers[record.in];
  switch (record.matrix.product) {
    case NAIAD_FLOAT_BY_FLOAT: return compute_panels<FloatByFloat>(record, run, {in.data, in.stride}, member);
    case NAIAD_FLOAT_BY_BF16: return compute_panels<FloatByBf16>(record, run, {in.data, in.stride}, member);
    default: return compute_panels<Bf16ByBf16>(record, run, rounded_rows(record, run, member), member);
  }
}

}  // namespace naiad
