// Many rows by a few panels, a block of inputs at a time.
//
// With few registers a tile has few rows, and many tiles read the same weights. A block of weights is unpacked to
// floats, and stays in the first cache while many rows are multiplied by it. Sums wait in memory for the next
// block: they are floats there too, so the bits are those of a tile that takes all inputs.
#pragma once

#include <algorithm>

#include "read_ahead.h"
#include "simd.h"

namespace naiad {

constexpr int64_t kBlockInputs = 192;
// So many rows are multiplied by a block before the next one is unpacked.
constexpr int64_t kMostBlockRows = 96;
// Their sums, the weights of an input and the input fill the registers.
constexpr int kRowsAtOnce = kRegisters >= 8 ? 6 : 2;

NAIAD_INLINE void store_weights(float* out, Floats weights) { store(out, weights); }
template <class Two>
NAIAD_INLINE void store_weights(float* out, const Two& weights) {
  store(out, weights.first);
  store(out + kLanes, weights.second);
}

template <class Product>
NAIAD_INLINE void unpack_block(const char* panel, int64_t num_inputs, float* out) {
  for (int64_t i = 0; i < num_inputs; i += Product::kInputsPerStep, panel += Product::kPanelBytesPerStep)
    store_weights(out + i * kLanes, Product::weights(panel));
}

// Rows of inputs, `stride` floats from one to the next.
struct BlockRows {
  const float* data;
  int64_t stride, count;
};

template <int ROWS>
NAIAD_INLINE void add_block_products(const float* x, int64_t stride, const float* weights, int64_t num_inputs,
                                     Floats* sums) {
  Floats kept[ROWS];
  for (int r = 0; r < ROWS; r++) kept[r] = sums[r];
  for (int64_t i = 0; i < num_inputs; i++) {
    const Floats w = load(weights + i * kLanes);
    for (int r = 0; r < ROWS; r++) kept[r] = fma(fill(x[r * stride + i]), w, kept[r]);
  }
  for (int r = 0; r < ROWS; r++) sums[r] = kept[r];
}

// That many rows, looked for from ROWS on.
template <int ROWS>
NAIAD_INLINE void add_fitting_products(int64_t rows, const float* x, int64_t stride, const float* weights,
                                       int64_t num_inputs, Floats* sums) {
  if (rows == ROWS) return add_block_products<ROWS>(x, stride, weights, num_inputs, sums);
  if constexpr (ROWS < kRowsAtOnce) add_fitting_products<ROWS + 1>(rows, x, stride, weights, num_inputs, sums);
}

// The sums of each of up to `kMostBlockRows` rows with each panel.
template <class Product, int PANELS>
void multiply_by_blocks(const BlockRows& rows, const char* const (&panels)[PANELS], int64_t num_inputs,
                        Floats (&sums)[PANELS][kMostBlockRows]) {
  alignas(64) float weights[PANELS][kBlockInputs * kLanes];
  const int64_t num_tiles = (rows.count + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int p = 0; p < PANELS; p++)
    for (int64_t r = 0; r < rows.count; r++) sums[p][r] = fill(0.0f);
  for (int64_t input = 0; input < num_inputs; input += kBlockInputs) {
    const int64_t count = std::min(kBlockInputs, num_inputs - input);
    const int64_t block_bytes = count / Product::kInputsPerStep * Product::kPanelBytesPerStep;
    const char* next[PANELS];
    for (int p = 0; p < PANELS; p++) {
      const char* block = panels[p] + input / Product::kInputsPerStep * Product::kPanelBytesPerStep;
      unpack_block<Product>(block, count, weights[p]);
      next[p] = block + block_bytes;
    }
    for (int64_t tile = 0; tile < num_tiles; tile++) {
      const int64_t first = rows.count * tile / num_tiles, end = rows.count * (tile + 1) / num_tiles;
      const float* x = rows.data + first * rows.stride + input;
      for (int p = 0; p < PANELS; p++) {
        // Each tile asks for its part of the next block.
        const int64_t bytes_end = block_bytes * (tile + 1) / num_tiles;
        for (int64_t at = block_bytes * tile / num_tiles; at < bytes_end; at += kLineBytes)
          prefetch_early(next[p] + at);
        add_fitting_products<1>(end - first, x, rows.stride, weights[p], count, sums[p] + first);
      }
    }
  }
}

}  // namespace naiad
