// How much of the weights is asked for before it is needed.
#pragma once

#include <cstdint>

namespace naiad {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kAheadBytes = 2048;

}  // namespace naiad
