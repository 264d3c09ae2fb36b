// Records that treat every token's row by itself: embedding, norm, sum, gate, cap.
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace naiad {
namespace {

// Calls `work` for each of this member's rows.
template <class Work>
void for_rows(const Run& run, Member& member, const Work& work) {
  int64_t first, end;
  member.share(run.step->num_tokens, first, end);
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

void embed_row(const NaiadRecord& record, int64_t id, float* out) {
  const int64_t width = record.width;
  const Floats factor = fill(record.factor);
  int64_t i = 0;
  if (record.element == NAIAD_BFLOAT16) {
    const uint16_t* row = static_cast<const uint16_t*>(record.table) + id * width;
    for (; i + kLanes <= width; i += kLanes) store(out + i, load_bf16(row + i) * factor);
    for (; i < width; i++) out[i] = float_of_bf16(row[i]) * record.factor;
  } else {
    const float* row = static_cast<const float*>(record.table) + id * width;
    for (; i + kLanes <= width; i += kLanes) store(out + i, load(row + i) * factor);
    for (; i < width; i++) out[i] = row[i] * record.factor;
  }
  std::fill(out + width, out + whole_lanes(width), 0.0f);
}

}  // namespace

void embed(const NaiadRecord& record, const Run& run, Member& member) {
  for_rows(run, member,
           [&](int64_t token) { embed_row(record, run.step->token_ids[token], run.row(record.out, token)); });
}

void rms_norm(const NaiadRecord& record, const Run& run, Member& member) {
  const int64_t width = whole_lanes(record.width);
  for_rows(run, member, [&](int64_t token) {
    const float* in = run.row(record.in, token);
    float* out = run.row(record.out, token);
    Floats squares = fill(0.0f);
    for (int64_t i = 0; i < width; i += kLanes) squares = fma(load(in + i), load(in + i), squares);
    const float mean = sum_lanes(squares) / static_cast<float>(record.width);
    const Floats scale = fill(1.0f / std::sqrt(mean + record.eps));
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, load(in + i) * scale * load(record.weight + i));
  });
}

void add(const NaiadRecord& record, const Run& run, Member& member) {
  const int64_t width = whole_lanes(record.width);
  for_rows(run, member, [&](int64_t token) {
    const float *a = run.row(record.in, token), *b = run.row(record.other, token);
    float* out = run.row(record.out, token);
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, load(a + i) + load(b + i));
  });
}

void gate(const NaiadRecord& record, const Run& run, Member& member) {
  for_rows(run, member, [&](int64_t token) {
    gate_row(record.activation, run.row(record.in, token), run.row(record.out, token), record.width);
  });
}

void soft_cap(const NaiadRecord& record, const Run& run, Member& member) {
  const int64_t width = whole_lanes(record.width);
  const Floats cap = fill(record.factor);
  for_rows(run, member, [&](int64_t token) {
    const float* in = run.row(record.in, token);
    float* out = run.row(record.out, token);
    for (int64_t i = 0; i < width; i += kLanes) store(out + i, cap * hyperbolic_tangent(load(in + i) / cap));
  });
}

}  // namespace naiad
