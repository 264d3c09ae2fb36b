// AMX on a CPU without it: instructions of tiles trap as illegal, and this handler computes them as Intel's Software
// Developer's Manual says. So the real form of the kernels runs, slowly, on any CPU that has its other instructions.
//
// What the manual calls an error ends the process with 3.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tiles {
  bool is_shaped;
  int rows[kTiles], row_bytes[kTiles];
  alignas(64) unsigned char data[kTiles][kRows][kRowBytes];
};
thread_local Tiles tiles;
std::atomic<int64_t> num_shaped, num_released, num_products;

[[noreturn]] void fail(const char* what) {
  if (write(2, what, std::strlen(what)) < 0 || write(2, "\n", 1) < 0) _exit(4);
  _exit(3);
}

void demand(bool condition, const char* what) {
  if (!condition) fail(what);
}

greg_t general(const ucontext_t& context, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number]];
}

// One instruction: VEX with three bytes, an opcode, and a register or a place in memory.
struct Instruction {
  int prefix, opcode, mod, reg, rm, vvvv;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  int64_t length, address, stride;
};

Instruction decoded(const ucontext_t& context) {
  const unsigned char* at = reinterpret_cast<const unsigned char*>(context.uc_mcontext.gregs[REG_RIP]);
  const unsigned char* p = at;
  demand(p[0] == 0xc4 && (p[1] & 0x1f) == 2 && (p[2] & 0x84) == 0, "not an instruction of tiles");
  const int x = p[1] & 0x40 ? 0 : 8, b = p[1] & 0x20 ? 0 : 8;
  Instruction in{};
  in.prefix = p[2] & 3;
  in.vvvv = ~(p[2] >> 3) & 15;
  in.opcode = p[3];
  in.mod = p[4] >> 6;
  in.reg = p[4] >> 3 & 7;
  in.rm = p[4] & 7;
  p += 5;
  if (in.mod != 3) {
    bool is_relative = false, has_base = true;
    int base = in.rm;
    if (in.rm == 4) {
      const int sib = *p++, index = (sib >> 3 & 7) + x;
      base = sib & 7;
      if (index != 4) in.stride = general(context, index) << (sib >> 6);
      has_base = in.mod != 0 || base != 5;
    } else if (in.mod == 0 && in.rm == 5) {
      is_relative = true;
      has_base = false;
    }
    int32_t offset = 0;
    if (in.mod == 1) offset = static_cast<int8_t>(*p++);
    if (in.mod == 2 || !has_base) {
      std::memcpy(&offset, p, 4);
      p += 4;
    }
    in.address = offset;
    if (has_base) in.address += general(context, base + b);
    if (is_relative) in.address += reinterpret_cast<int64_t>(p);
  }
  in.length = p - at;
  return in;
}

void shape(const unsigned char* config) {
  demand(config[0] == 1 && config[1] == 0, "LDTILECFG: palette or first row");
  for (int i = 2; i < 16; i++) demand(config[i] == 0, "LDTILECFG: reserved bytes");
  std::memset(tiles.data, 0, sizeof tiles.data);
  std::memset(tiles.rows, 0, sizeof tiles.rows);
  std::memset(tiles.row_bytes, 0, sizeof tiles.row_bytes);
  for (int t = 0; t < 16; t++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * t, 2);
    const int rows = config[48 + t];
    demand(rows <= kRows && row_bytes <= kRowBytes && (rows == 0) == (row_bytes == 0), "LDTILECFG: a tile's shape");
    demand(t < kTiles || rows == 0, "LDTILECFG: a tile that is not there");
    if (t >= kTiles) continue;
    tiles.rows[t] = rows;
    tiles.row_bytes[t] = row_bytes;
  }
  if (!tiles.is_shaped) num_shaped++;
  tiles.is_shaped = true;
}

float widened(const unsigned char* p) {
  const uint32_t bits = static_cast<uint32_t>(p[0] | p[1] << 8) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void multiply_bf16(int sums, int left, int right) {
  // Flushes results to zero, takes subnormal operands for zero, masks exceptions; the signal's end restores it.
  _mm_setcsr(0x9fc0);
  for (int m = 0; m < tiles.rows[sums]; m++)
    for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
      volatile float even = 0, odd = 0, total;
      for (int k = 0; k < tiles.row_bytes[left] / 4; k++) {
        const unsigned char *a = tiles.data[left][m] + 4 * k, *b = tiles.data[right][k] + 4 * n;
        even = __builtin_fmaf(widened(a), widened(b), even);
        odd = __builtin_fmaf(widened(a + 2), widened(b + 2), odd);
      }
      float sum;
      std::memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
      total = even + odd;
      sum = sum + total;
      std::memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
    }
}

void multiply_signed_by_unsigned(int sums, int left, int right) {
  for (int m = 0; m < tiles.rows[sums]; m++)
    for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
      for (int i = 0; i < tiles.row_bytes[left]; i++)
        sum += static_cast<int8_t>(tiles.data[left][m][i]) * tiles.data[right][i / 4][4 * n + i % 4];
      std::memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
    }
}

void multiply(const Instruction& in) {
  const int sums = in.reg, left = in.rm, right = in.vvvv;
  demand(in.mod == 3 && right < kTiles && sums != left && sums != right && left != right, "a product's operands");
  demand(tiles.rows[sums] > 0 && tiles.rows[left] > 0 && tiles.rows[right] > 0, "a product of tiles without a shape");
  demand(tiles.rows[sums] == tiles.rows[left] && tiles.row_bytes[sums] == tiles.row_bytes[right] &&
             tiles.row_bytes[left] / 4 == tiles.rows[right],
         "a product of shapes that do not fit");
  if (in.opcode == 0x5c && in.prefix == 2)
    multiply_bf16(sums, left, right);
  else if (in.opcode == 0x5e && in.prefix == 2)
    multiply_signed_by_unsigned(sums, left, right);
  else
    fail("another product");
  num_products++;
}

void move(const Instruction& in) {
  demand(in.mod != 3 && in.rm == 4 && tiles.rows[in.reg] > 0, "TILELOADD or TILESTORED");
  if (in.prefix == 3) std::memset(tiles.data[in.reg], 0, sizeof tiles.data[in.reg]);
  for (int row = 0; row < tiles.rows[in.reg]; row++) {
    char* memory = reinterpret_cast<char*>(in.address + row * in.stride);
    const size_t count = static_cast<size_t>(tiles.row_bytes[in.reg]);
    if (in.prefix == 3)
      std::memcpy(tiles.data[in.reg][row], memory, count);
    else if (in.prefix == 2)
      std::memcpy(memory, tiles.data[in.reg][row], count);
    else
      fail("another move");
  }
}

void on_illegal(int, siginfo_t*, void* raw) {
  ucontext_t& context = *static_cast<ucontext_t*>(raw);
  const Instruction in = decoded(context);
  if (in.opcode == 0x49 && in.prefix == 0 && in.mod != 3) {
    shape(reinterpret_cast<const unsigned char*>(in.address));
  } else if (in.opcode == 0x49 && in.prefix == 0) {
    if (tiles.is_shaped) num_released++;
    tiles.is_shaped = false;
  } else {
    demand(tiles.is_shaped, "tiles before LDTILECFG or after TILERELEASE");
    if (in.opcode == 0x49 && in.prefix == 3)
      std::memset(tiles.data[in.reg], 0, sizeof tiles.data[in.reg]);
    else if (in.opcode == 0x4b)
      move(in);
    else
      multiply(in);
  }
  context.uc_mcontext.gregs[REG_RIP] += in.length;
}

}  // namespace

API void amx_traps_install() {
  struct sigaction action = {};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}
API int64_t amx_traps_shaped() { return num_shaped; }
API int64_t amx_traps_released() { return num_released; }
API int64_t amx_traps_products() { return num_products; }
