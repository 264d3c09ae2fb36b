// Eight registers of up to 16 rows of 64 bytes, and products of two of them that are added to a third: AMX.
//
// Two forms have the same interface and give the same bits: AMX's instructions, and plain C++, which tests use on
// machines without AMX. Only kernels that are compiled with `NAIAD_TILES` use them.
//
// The order of sums in `multiply_bf16` is that of TDPBF16PS in Intel's Software Developer's Manual (volume 2,
// "Operation"). For an output of 32 inputs: the products of the even inputs are added to 0 one after the other with
// FMAs, those of the odd inputs likewise, then both sums are added, and the result is added to the output. Each of
// these rounds to nearest even, takes subnormal numbers for zero and makes zeros of subnormal results.
#pragma once

#include <cstdlib>

#include "simd.h"

#if defined(NAIAD_TILES) && !defined(NAIAD_PORTABLE) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && \
    defined(__AMX_INT8__)
#define NAIAD_AMX 1
#endif

namespace naiad {

#if defined(NAIAD_TILES)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int64_t kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
// Which register holds what: up to four tiles of sums, two of inputs, two of weights.
constexpr int kSumTiles = 0, kInputTiles = 4, kWeightTiles = 6, kNumTiles = 8;

// Tiles into which rows are cut, and the rows of each: the last one also has rows of the one before.
constexpr int64_t num_row_tiles(int64_t num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }
constexpr int64_t rows_of_tile(int64_t num_rows) {
  return (num_rows + num_row_tiles(num_rows) - 1) / num_row_tiles(num_rows);
}

// ---------------------------------------------------------------- the registers
// `load` and `store`: rows are `stride` bytes apart. `multiply_bf16`: sums of float32, pairs of bf16.
// `multiply_int8`: sums of int32, inputs of int8, weights of uint8.
#if NAIAD_AMX

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

NAIAD_INLINE void shape_tiles(int64_t rows) {
  TileShapes shapes;
  for (int t = 0; t < kNumTiles; t++) {
    shapes.row_bytes[t] = kTileRowBytes;
    shapes.rows[t] = static_cast<uint8_t>(t < kWeightTiles ? rows : kTileRows);
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
NAIAD_INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int TILE>
NAIAD_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
// The compilers' own functions take no number of a template, and g++'s do not say that memory is read.
template <int TILE>
NAIAD_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
NAIAD_INLINE void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int SUMS, int INPUTS, int WEIGHTS>
NAIAD_INLINE void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}
template <int SUMS, int INPUTS, int WEIGHTS>
NAIAD_INLINE void multiply_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

#else

// One thread's registers; 0 rows: there are none yet, and an instruction would be an error.
struct TwinTiles {
  int64_t rows = 0;
  alignas(64) char data[kNumTiles][kTileRows][kTileRowBytes];
};
inline thread_local TwinTiles twin_tiles;

NAIAD_INLINE int64_t rows_of_twin(int tile) {
  if (twin_tiles.rows < 1 || twin_tiles.rows > kTileRows) std::abort();
  return tile < kWeightTiles ? twin_tiles.rows : kTileRows;
}
NAIAD_INLINE void shape_tiles(int64_t rows) { twin_tiles.rows = rows; }
NAIAD_INLINE void release_tiles() { twin_tiles.rows = 0; }
template <int TILE>
NAIAD_INLINE void zero_tile() {
  std::memset(twin_tiles.data[TILE], 0, static_cast<size_t>(rows_of_twin(TILE) * kTileRowBytes));
}
template <int TILE>
NAIAD_INLINE void load_tile(const void* p, int64_t stride) {
  for (int64_t row = 0; row < rows_of_twin(TILE); row++)
    std::memcpy(twin_tiles.data[TILE][row], static_cast<const char*>(p) + row * stride, kTileRowBytes);
}
template <int TILE>
NAIAD_INLINE void store_tile(void* p, int64_t stride) {
  for (int64_t row = 0; row < rows_of_twin(TILE); row++)
    std::memcpy(static_cast<char*>(p) + row * stride, twin_tiles.data[TILE][row], kTileRowBytes);
}

// Subnormal numbers become zeros of their sign.
NAIAD_INLINE Floats without_subnormals(Floats x) { return where_less(absolute(x), fill(0x1p-126f), x * fill(0.0f), x); }
// Whether a result is subnormal is decided on what it would be if exponents had no limit: the same product with more
// distance to that limit shows it.
NAIAD_INLINE Floats fma_without_subnormals(Floats a, Floats b, Floats sum) {
  const Floats result = fma(a, b, sum), far = fma(a, b * fill(0x1p24f), sum * fill(0x1p24f));
  return where_less(absolute(far), fill(0x1p-102f), result * fill(0.0f), result);
}

template <int SUMS, int INPUTS, int WEIGHTS>
NAIAD_INLINE void multiply_bf16() {
  for (int64_t row = 0; row < rows_of_twin(SUMS); row++) {
    uint16_t x[2 * kTileRows];
    std::memcpy(x, twin_tiles.data[INPUTS][row], sizeof x);
    Floats even = fill(0.0f), odd = even;
    for (int64_t pair = 0; pair < kTileRows; pair++) {
      uint16_t w[2 * kLanes];
      std::memcpy(w, twin_tiles.data[WEIGHTS][pair], sizeof w);
      Floats first, second;
      load_pairs(w, first, second);
      even =
          fma_without_subnormals(without_subnormals(fill(float_of_bf16(x[2 * pair]))), without_subnormals(first), even);
      odd = fma_without_subnormals(without_subnormals(fill(float_of_bf16(x[2 * pair + 1]))), without_subnormals(second),
                                   odd);
    }
    float sums[kLanes];
    std::memcpy(sums, twin_tiles.data[SUMS][row], sizeof sums);
    store(sums, without_subnormals(load(sums) + without_subnormals(even + odd)));
    std::memcpy(twin_tiles.data[SUMS][row], sums, sizeof sums);
  }
}

template <int SUMS, int INPUTS, int WEIGHTS>
NAIAD_INLINE void multiply_int8() {
  for (int64_t row = 0; row < rows_of_twin(SUMS); row++) {
    int8_t x[kTileRowBytes];
    std::memcpy(x, twin_tiles.data[INPUTS][row], sizeof x);
    int32_t sums[kLanes];
    std::memcpy(sums, twin_tiles.data[SUMS][row], sizeof sums);
    for (int64_t i = 0; i < kTileRowBytes; i++)
      for (int64_t lane = 0; lane < kLanes; lane++)
        sums[lane] += x[i] * static_cast<uint8_t>(twin_tiles.data[WEIGHTS][i / 4][4 * lane + i % 4]);
    std::memcpy(twin_tiles.data[SUMS][row], sums, sizeof sums);
  }
}

#endif

// A thread's registers for a share: shaped for tiles of so many rows at its beginning and released at its end, because
// a thread that sleeps with tiles costs the system time.
class TileSession {
 public:
  explicit TileSession(int64_t rows) { shape_tiles(rows); }
  ~TileSession() { release_tiles(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

}  // namespace naiad
