// Angles of a step's positions; queries and keys normed and rotated; keys and values stored.
#include "heads.h"

namespace naiad {
namespace {

// So many KV heads, with the heads that share them, take longer than taking a share of them.
constexpr int64_t kHeadsTogether = 4;

// Scales a head to root mean square 1, then by `weight`.
void norm_head(float* head, const float* weight, float eps, int64_t head_dim) {
  float squares = 0.0f;
  for (int64_t d = 0; d < head_dim; d++) squares = std::fma(head[d], head[d], squares);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(head_dim) + eps);
  for (int64_t d = 0; d < head_dim; d++) head[d] = head[d] * scale * weight[d];
}

// (a, b) → (a cos − b sin, b cos + a sin) for the two halves of a head.
void rotate(const float* in, const float* angles, float* out, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  const float *cosines = angles, *sines = angles + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = load(in + i), b = load(in + half + i), c = load(cosines + i), s = load(sines + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = in[i], b = in[half + i];
    out[i] = a * cosines[i] - b * sines[i];
    out[half + i] = b * cosines[i] + a * sines[i];
  }
}

// One head, normed and then rotated.
int64_t num_own_floats(const NaiadRecord& record) { return 2 * record.cache.head_dim; }

template <class Element>
void rotate_and_store(const NaiadRecord& record, const Run& run, const Share& share) {
  const NaiadStep& step = *run.step;
  const CacheView<Element> cache(record.cache);
  const int64_t head_dim = record.cache.head_dim, num_kv_heads = record.cache.num_kv_heads;
  const int64_t num_heads = record.num_heads, heads_per_kv = num_heads / num_kv_heads;
  float* head = run.own[share.computed_by].memory.get<float>(num_own_floats(record));
  float* rotated = head + head_dim;
  int64_t seq = 0;
  const auto [first, end] = share.of(rotary_store_things(record, step, 0));
  for (int64_t item = first; item < end; item++) {
    const int64_t token = item / num_kv_heads, kv_head = item % num_kv_heads;
    while (step.query_starts[seq + 1] <= token) seq++;
    const float *in = run.row(record.in, token), *angles = run.row(record.other, token);
    const auto turned = [&](int64_t index, float* out) {
      const float* source = in + index * head_dim;
      if (record.weight) {
        std::memcpy(head, source, head_dim * sizeof(float));
        norm_head(head, record.weight + index * head_dim, record.eps, head_dim);
        source = head;
      }
      rotate(source, angles, out, head_dim);
    };
    for (int64_t index = kv_head * heads_per_kv; index < (kv_head + 1) * heads_per_kv; index++)
      turned(index, run.row(record.out, token) + index * head_dim);
    turned(num_heads + kv_head, rotated);
    if (kv_head == 0) clear_rest(run.row(record.out, token), num_heads * head_dim);
    const NaiadTables& tables = step.tables[record.group];
    const int64_t position = step.positions[token];
    const int64_t group = cache.group(tables.blocks + seq * tables.stride, position, kv_head);
    const float* value = in + (num_heads + num_kv_heads + kv_head) * head_dim;
    put_token<Element>(record.cache, group, position % kGroup, rotated, value);
  }
}

}  // namespace

Things rotary_store_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase) {
  return {phase == 0 ? step.num_tokens * record.cache.num_kv_heads : 0, kHeadsTogether};
}

int64_t rotary_store_own_bytes(const NaiadRecord& record) {
  return num_own_floats(record) * static_cast<int64_t>(sizeof(float));
}

void angles(const NaiadRecord& record, const Run& run, const Share& share) {
  const int64_t half = record.width / 2;
  const auto [first, end] = share.of(row_things(*run.step, 0));
  for (int64_t token = first; token < end; token++) {
    float* out = run.row(record.out, token);
    const float position = static_cast<float>(run.step->positions[token]);
    for (int64_t i = 0; i < half; i++) {
      const float angle = position * record.frequencies[i];
      out[i] = std::cos(angle);
      out[half + i] = std::sin(angle);
    }
    clear_rest(out, record.width);
  }
}

void rotary_store(const NaiadRecord& record, const Run& run, const Share& share) {
  if (record.cache.element == NAIAD_BFLOAT16)
    rotate_and_store<uint16_t>(record, run, share);
  else
    rotate_and_store<float>(record, run, share);
}

}  // namespace naiad
