// Which tokens a bitmask allows.
#pragma once

#include <cstdint>

namespace naiad {

// One row's bitmask: id i is allowed if bit i % 32 of word i / 32 is set; null: every token is.
struct Allowed {
  const int32_t* words;

  bool has(int64_t id) const { return !words || (static_cast<uint32_t>(words[id / 32]) >> id % 32) & 1; }
  // Of 16 ids, the first of which is a multiple of 16.
  uint32_t lanes(int64_t id) const {
    return words ? (static_cast<uint32_t>(words[id / 32]) >> id % 32) & 0xffff : 0xffff;
  }
};

}  // namespace naiad
