// One layer's keys and values, as the kernels address them.
//
// A block holds, for each KV head, its tokens in groups of 16: keys of a group as [head_dim][16 tokens] in
// float32 and [head_dim / 2][16 tokens][2] in bf16, values as [16 tokens][head_dim].
#pragma once

#include "kernels.h"
#include "simd.h"

namespace naiad {

constexpr int64_t kGroup = 16;

template <class Element>
struct CacheView {
  explicit CacheView(const NaiadCache& cache)
      : cache(cache), keys(static_cast<Element*>(cache.keys)), values(static_cast<Element*>(cache.values)) {}

  // The offset of the 16 tokens around a position, for one KV head.
  int64_t group(const int32_t* table, int64_t position, int64_t kv_head) const {
    const int64_t block = table[position / cache.block_size];
    const int64_t offset = position % cache.block_size / kGroup;
    return ((block * cache.num_kv_heads + kv_head) * cache.block_size + offset * kGroup) * cache.head_dim;
  }

  const NaiadCache& cache;
  Element* const keys;
  Element* const values;
};

// Keys of one token into its group.
NAIAD_INLINE void put_key(float* group, int64_t place, const float* key, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d++) group[d * kGroup + place] = key[d];
}
NAIAD_INLINE void put_key(uint16_t* group, int64_t place, const float* key, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 2) {
    uint16_t* pair = group + d * kGroup + place * 2;
    pair[0] = bf16_of_float(key[d]);
    pair[1] = bf16_of_float(key[d + 1]);
  }
}
NAIAD_INLINE void put_value(float* group, int64_t place, const float* value, int64_t head_dim) {
  std::memcpy(group + place * head_dim, value, head_dim * sizeof(float));
}
NAIAD_INLINE void put_value(uint16_t* group, int64_t place, const float* value, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d++) group[place * head_dim + d] = bf16_of_float(value[d]);
}

// Features d and d + 1 of a group's 16 keys.
NAIAD_INLINE void load_keys(const float* group, int64_t d, Floats& first, Floats& second) {
  first = load(group + d * kGroup);
  second = load(group + (d + 1) * kGroup);
}
NAIAD_INLINE void load_keys(const uint16_t* group, int64_t d, Floats& first, Floats& second) {
  load_pairs(group + d * kGroup, first, second);
}

// 16 features of a value; fewer where the head ends.
NAIAD_INLINE Floats load_value(const float* value) { return load(value); }
NAIAD_INLINE Floats load_value(const uint16_t* value) { return load_bf16(value); }
template <class Element>
NAIAD_INLINE Floats load_value_part(const Element* value, int64_t count) {
  alignas(64) Element part[kLanes] = {};
  std::memcpy(part, value, count * sizeof(Element));
  return load_value(part);
}
NAIAD_INLINE void store_part(float* p, Floats a, int64_t count) {
  alignas(64) float part[kLanes];
  store(part, a);
  std::memcpy(p, part, count * sizeof(float));
}

// What is after a row's width, up to the next multiple of the lanes.
NAIAD_INLINE void clear_rest(float* row, int64_t width) {
  for (int64_t i = width; i < whole_lanes(width); i++) row[i] = 0.0f;
}

}  // namespace naiad
