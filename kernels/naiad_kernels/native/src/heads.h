// One layer's keys and values, as the kernels address them.
//
// A block holds, for each KV head, its tokens in groups of 16. With k elements side by side, 1 in float32 and 2 in
// bf16, keys of a group are [head_dim / k][16 tokens][k], and values [16 tokens / k][head_dim][k]. Whole numbers of
// eight bits lie in the order of the elements as which they are multiplied.
#pragma once

#include <algorithm>

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
  uint16_t* pairs = group + place / 2 * 2 * head_dim + place % 2;
  for (int64_t d = 0; d < head_dim; d++) pairs[2 * d] = bf16_of_float(value[d]);
}

// Rounds a vector to whole numbers within ±127 and puts each where `place` says, as `quantize` of store_kv describes
// it. Returns what they are multiplied by: not a number if one of the vector is not finite.
template <class Place>
NAIAD_INLINE float put_codes(int8_t* group, const float* vector, int64_t head_dim, const Place& place) {
  float largest = 1e-30f, not_finite = 0.0f;
  for (int64_t d = 0; d < head_dim; d++) {
    largest = std::max(largest, std::fabs(vector[d]));
    not_finite += vector[d] * 0.0f;
  }
  const float scale = largest / 127.0f + not_finite;
  for (int64_t d = 0; d < head_dim; d++) {
    const float whole = std::floor(vector[d] / scale + 0.5f);
    group[place(d)] = static_cast<int8_t>(whole == whole ? std::min(127.0f, std::max(-127.0f, whole)) : 0.0f);
  }
  return scale;
}

// One token's key and value into its group, for one KV head.
template <class Element>
NAIAD_INLINE void put_token(const NaiadCache& cache, int64_t group, int64_t token, const float* key,
                            const float* value) {
  const int64_t head_dim = cache.head_dim;
  if (!cache.key_scales) {
    put_key(static_cast<Element*>(cache.keys) + group, token, key, head_dim);
    put_value(static_cast<Element*>(cache.values) + group, token, value, head_dim);
    return;
  }
  constexpr int64_t kTogether = 4 / sizeof(Element);
  const int64_t place = group / head_dim + token;
  cache.key_scales[place] = put_codes(static_cast<int8_t*>(cache.keys) + group, key, head_dim, [&](int64_t d) {
    return (d / kTogether * kGroup + token) * kTogether + d % kTogether;
  });
  cache.value_scales[place] = put_codes(static_cast<int8_t*>(cache.values) + group, value, head_dim, [&](int64_t d) {
    return (token / kTogether * head_dim + d) * kTogether + token % kTogether;
  });
}

// How elements of the cache are multiplied: `kTogether` at once in each lane, by elements of the other side that
// are rounded to the same type.
template <class Element>
struct Products;

template <>
struct Products<float> {
  static constexpr int64_t kTogether = 1;
  using Vector = Floats;
  NAIAD_METHOD static Floats load(const float* p) { return naiad::load(p); }
  NAIAD_METHOD static Floats fill(const float* p) { return naiad::fill(p[0]); }
  NAIAD_METHOD static Floats multiply(Floats a, Floats b, Floats sum) { return fma(a, b, sum); }
  NAIAD_METHOD static Floats first_only(Floats a) { return a; }
  NAIAD_METHOD static void store_rounded(float* p, Floats a) { store(p, a); }
  NAIAD_METHOD static void widen(const int8_t* codes, float* p) { store(p, load_whole(codes)); }
};

template <>
struct Products<uint16_t> {
  static constexpr int64_t kTogether = 2;
  using Vector = Pairs;
  NAIAD_METHOD static Pairs load(const uint16_t* p) { return load_weight_pairs(p); }
  NAIAD_METHOD static Pairs fill(const uint16_t* p) { return fill_pair(p); }
  NAIAD_METHOD static Floats multiply(Pairs a, Pairs b, Floats sum) { return multiply_pairs(a, b, sum); }
  NAIAD_METHOD static Pairs first_only(Pairs a) { return naiad::first_only(a); }
  NAIAD_METHOD static void store_rounded(uint16_t* p, Floats a) { store_bf16(p, a); }
  NAIAD_METHOD static void widen(const int8_t* codes, uint16_t* p) { store_exact_bf16(p, load_whole(codes)); }
};

// `count` features of `kTogether` values, where the head ends; the others are 0.
template <class Element>
NAIAD_INLINE typename Products<Element>::Vector load_value_part(const Element* value, int64_t count) {
  constexpr int64_t kTogether = Products<Element>::kTogether;
  alignas(64) Element part[kLanes * kTogether] = {};
  std::memcpy(part, value, count * kTogether * sizeof(Element));
  return Products<Element>::load(part);
}
// `count` floats; the others are 0.
NAIAD_INLINE Floats load_part(const float* p, int64_t count) {
  alignas(64) float part[kLanes] = {};
  std::memcpy(part, p, count * sizeof(float));
  return load(part);
}
// A head rounded to elements of the cache, with zeros up to the next multiple of the lanes.
template <class Element>
NAIAD_INLINE void round_head(const float* head, int64_t head_dim, Element* rounded) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) Products<Element>::store_rounded(rounded + d, load(head + d));
  if (d < head_dim) Products<Element>::store_rounded(rounded + d, load_part(head + d, head_dim - d));
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
