// Records that treat every token's row by itself: embedding, norm, sum, gate, cap.
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace naiad {
namespace {

// So many rows take longer than taking a share of them.
constexpr int64_t kRowsTogether = 4;

// Calls `work` for each row of a share.
template <class Work>
void for_rows(const Run& run, const Share& share, const Work& work) {
  const auto [first, end] = share.of(row_things(*run.step, 0));
  for (int64_t token = first; token < end; token++) work(token);
}

// The two halves of a row are only aligned to each other where their width is a multiple of 16, so the
// rest of a row is copied first.
void gate_row(int32_t activation, const float* in, float* out, int64_t width) {
  const float *gates = in, *factors = in + width;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, activate(activation, load(gates + i)) * load(factors + i));
  if (i == width) return;
  alignas(64) float rest[2][kLanes] = {};
  std::memcpy(rest[0], gates + i, (width - i) * sizeof(float));
  std::memcpy(rest[1], factors + i, (width - i) * sizeof(float));
  store(out + i, activate(activation, load(rest[0])) * load(rest[1]));
}

// The way to load is a template argument, because a compiler that does not optimise much cannot inline what a
// variable holds.
template <class Stored, Floats (*load_stored)(const Stored*)>
void embed_row_as(const NaiadRecord& record, int64_t id, float* out) {
  const Stored* row = static_cast<const Stored*>(record.table) + id * record.width;
  const Floats factor = fill(record.factor);
  int64_t i = 0;
  for (; i + kLanes <= record.width; i += kLanes) store(out + i, load_stored(row + i) * factor);
  if (i == record.width) return;
  Stored rest[kLanes] = {};
  std::memcpy(rest, row + i, static_cast<size_t>(record.width - i) * sizeof(Stored));
  store(out + i, load_stored(rest) * factor);
}

void embed_row(const NaiadRecord& record, int64_t id, float* out) {
  switch (record.element) {
    case NAIAD_BFLOAT16: return embed_row_as<uint16_t, load_bf16>(record, id, out);
    case NAIAD_FLOAT16: return embed_row_as<uint16_t, load_f16>(record, id, out);
    default: return embed_row_as<float, load>(record, id, out);
  }
}

}  // namespace

Things row_things(const NaiadStep& step, int64_t phase) { return {phase == 0 ? step.num_tokens : 0, kRowsTogether}; }

void embed(const NaiadRecord& record, const Run& run, const Share& share) {
  for_rows(run, share,
           [&](int64_t token) { embed_row(record, run.step->token_ids[token], run.row(record.out, token)); });
}

void rms_norm(const NaiadRecord& record, const Run& run, const Share& share) {
  const int64_t width = whole_lanes(record.width);
  for_rows(run, share, [&](int64_t token) {
    const float* in = run.row(record.in, token);
    float* out = run.row(record.out, token);
    Floats squares = fill(0.0f);
    for (int64_t i = 0; i < width; i += kLanes) squares = fma(load(in + i), load(in + i), squares);
    const float mean = sum_lanes(squares) / static_cast<float>(record.width);
    const Floats scale = fill(1.0f / std::sqrt(mean + record.eps));
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, load(in + i) * scale * load(record.weight + i));
  });
}

void add(const NaiadRecord& record, const Run& run, const Share& share) {
  const int64_t width = whole_lanes(record.width);
  for_rows(run, share, [&](int64_t token) {
    const float *a = run.row(record.in, token), *b = run.row(record.other, token);
    float* out = run.row(record.out, token);
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, load(a + i) + load(b + i));
  });
}

void gate(const NaiadRecord& record, const Run& run, const Share& share) {
  for_rows(run, share, [&](int64_t token) {
    gate_row(record.activation, run.row(record.in, token), run.row(record.out, token), record.width);
  });
}

void soft_cap(const NaiadRecord& record, const Run& run, const Share& share) {
  const int64_t width = whole_lanes(record.width);
  const Floats cap = fill(record.factor);
  for_rows(run, share, [&](int64_t token) {
    const float* in = run.row(record.in, token);
    float* out = run.row(record.out, token);
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, cap * hyperbolic_tangent(load(in + i) / cap));
  });
}

}  // namespace naiad
