/* The fastest products of a CPU: long runs of one instruction that touch no memory and never wait for each other.
 *
 * Each function repeats its run `turns` times. Instructions are written as text, so that a compiler without
 * flags for this machine builds them all; calling one that the CPU does not have ends the process. */
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As float32 finite, as two bfloat16 numbers finite, and no zeros, which would cost less energy. */
static const uint32_t words[16] __attribute__((aligned(64))) = {
    0x3fc0bfa0, 0xbf903fd0, 0x3fb0bf88, 0xbfc83f98, 0x3f90bfd8, 0xbfa03fe0, 0x3fd8bf94, 0xbf8c3fc4,
    0x3fe0bfb8, 0xbfdc3f8c, 0x3f84bfe4, 0xbfe83fa8, 0x3facbf9c, 0xbf983fb4, 0x3fccbfbc, 0xbfd43ff0,
};

/* Most vector registers are independent sums: more of them than an instruction takes cycles.
 * Registers beyond the fifteenth are not listed: a compiler without AVX-512 flags knows and uses none of them. */
#define CLOBBERS                                                                                                    \
  "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
      "xmm12", "xmm13", "xmm14", "xmm15"
#define NARROW_SUMS "4,5,6,7,8,9,10,11,12,13,14,15"
#define WIDE_SUMS NARROW_SUMS ",16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"

#define RUN(NAME, REGISTER, SUMS, STEP)                     \
  void NAME(uint64_t turns) {                               \
    __asm__ volatile("vmovups (%1), %%" REGISTER            \
                     "0\n\t"                                \
                     "vmovups (%1), %%" REGISTER            \
                     "1\n\t"                                \
                     "vpxor %%xmm2, %%xmm2, %%xmm2\n\t"     \
                     ".irp sum," SUMS                       \
                     "\n\t"                                 \
                     "vmovaps %%" REGISTER "2, %%" REGISTER \
                     "\\sum\n\t"                            \
                     ".endr\n"                              \
                     "1:\n\t"                               \
                     ".irp sum," SUMS "\n\t" STEP           \
                     "\n\t.endr\n\t"                        \
                     "dec %0\n\t"                           \
                     "jnz 1b\n\t"                           \
                     "vzeroupper"                           \
                     : "+r"(turns)                          \
                     : "r"(words)                           \
                     : CLOBBERS);                           \
  }

/* Twelve sums of 8 products. */
RUN(fma_256, "ymm", NARROW_SUMS, "vfmadd231ps %%ymm0, %%ymm1, %%ymm\\sum")
/* 28 sums of 16 products. */
RUN(fma_512, "zmm", WIDE_SUMS, "vfmadd231ps %%zmm0, %%zmm1, %%zmm\\sum")
/* 28 sums of 32 products. */
RUN(bf16_512, "zmm", WIDE_SUMS, "vdpbf16ps %%zmm0, %%zmm1, %%zmm\\sum")
/* Twelve sums of 32 products. */
RUN(vnni_256, "ymm", NARROW_SUMS, "%{vex%} vpdpbusd %%ymm0, %%ymm1, %%ymm\\sum")
/* 28 sums of 64 products. */
RUN(vnni_512, "zmm", WIDE_SUMS, "vpdpbusd %%zmm0, %%zmm1, %%zmm\\sum")

/* Without VNNI three instructions make what it does in one. */
#define BYTES_STEP(REGISTER)                                 \
  "vpmaddubsw %%" REGISTER "0, %%" REGISTER "1, %%" REGISTER \
  "3\n\t"                                                    \
  "vpmaddwd %%" REGISTER "0, %%" REGISTER "3, %%" REGISTER   \
  "3\n\t"                                                    \
  "vpaddd %%" REGISTER "3, %%" REGISTER "\\sum, %%" REGISTER "\\sum"
/* Twelve sums of 32 products. */
RUN(bytes_256, "ymm", NARROW_SUMS, BYTES_STEP("ymm"))
/* 28 sums of 64 products. */
RUN(bytes_512, "zmm", WIDE_SUMS, BYTES_STEP("zmm"))

/* Whether Linux lets this process use tiles: 0 if it does. The permission is asked for once. */
int request_tiles(void) {
  const int request_permission = 0x1023, tile_data = 18;
  return (int)syscall(SYS_arch_prctl, request_permission, tile_data);
}

/* Eight tiles of 16 rows of 64 bytes: six sums, and two that are multiplied. */
#define TILES(NAME, STEP)                                                                       \
  void NAME(uint64_t turns) {                                                                   \
    uint8_t config[64] __attribute__((aligned(64))), rows[16][64] __attribute__((aligned(64))); \
    memset(config, 0, sizeof config);                                                           \
    config[0] = 1;                                                                              \
    for (int tile = 0; tile < 8; ++tile) {                                                      \
      config[16 + 2 * tile] = 64;                                                               \
      config[48 + tile] = 16;                                                                   \
    }                                                                                           \
    for (int row = 0; row < 16; ++row) memcpy(rows[row], words, sizeof words);                  \
    __asm__ volatile(                                                                           \
        "ldtilecfg (%1)\n\t"                                                                    \
        ".irp tile,0,1,2,3,4,5\n\ttilezero %%tmm\\tile\n\t.endr\n\t"                            \
        "tileloadd (%2,%3,1), %%tmm6\n\t"                                                       \
        "tileloadd (%2,%3,1), %%tmm7\n"                                                         \
        "1:\n\t"                                                                                \
        ".irp tile,0,1,2,3,4,5\n\t" STEP                                                        \
        "\n\t.endr\n\t"                                                                         \
        "dec %0\n\t"                                                                            \
        "jnz 1b\n\t"                                                                            \
        "tilerelease"                                                                           \
        : "+r"(turns)                                                                           \
        : "r"(config), "r"(rows), "r"((uint64_t)64)                                             \
        : "cc", "memory");                                                                      \
  }

/* Six sums of 16 × 16 × 32 products. */
TILES(tiles_bf16, "tdpbf16ps %%tmm7, %%tmm6, %%tmm\\tile")
/* Six sums of 16 × 16 × 64 products. */
TILES(tiles_int8, "tdpbssd %%tmm7, %%tmm6, %%tmm\\tile")
