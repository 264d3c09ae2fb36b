// What becomes of a linear layer's sums.
#pragma once

#include "kernels.h"

namespace naiad {

// Scales, adds bias and residual and stores, or gates.
struct Epilogue {
  const NaiadRecord& record;
  const Run& run;

  void operator()(int64_t token, int64_t panel, Floats sum) const {
    const NaiadMatrix& matrix = record.matrix;
    const int64_t at = panel * kLanes;
    if (matrix.scales) sum = sum * load(matrix.scales + at);
    if (matrix.bias) sum = sum + load(matrix.bias + at);
    if (record.other >= 0) sum = sum + load(run.row(record.other, token) + at);
    store(run.row(record.out, token) + at, sum);
  }

  // `panel` of the first half, the gate, and its partner in the second half.
  void operator()(int64_t token, int64_t panel, Floats sum, Floats factor) const {
    const NaiadMatrix& matrix = record.matrix;
    const int64_t at = panel * kLanes, partner = at + matrix.num_panels / 2 * kLanes;
    if (matrix.scales) {
      sum = sum * load(matrix.scales + at);
      factor = factor * load(matrix.scales + partner);
    }
    if (matrix.bias) {
      sum = sum + load(matrix.bias + at);
      factor = factor + load(matrix.bias + partner);
    }
    store(run.row(record.out, token) + at, activate(record.activation, sum) * factor);
  }
};

}  // namespace naiad
