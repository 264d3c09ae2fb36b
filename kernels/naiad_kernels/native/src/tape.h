// The C interface: what Python writes and one call reads. Every struct has its twin in `library.py`.
//
// A tape is a list of records. Each reads and writes buffers of float32 with a row for every token of the
// step. The members of a team share the rows or columns of one record, and begin the next when all of it is done.
//
// Buffers: `stride` floats a row, a multiple of 64. Every record writes its rows up to the next multiple of 16,
// and there what is after the width is zero (or not a number, in a row that is not finite anyway). The rest is
// never written and stays zero. So kernels need not treat the last lanes apart.
#pragma once

#include <cstdint>

#define NAIAD_API __attribute__((visibility("default")))

extern "C" {

enum NaiadKind : int32_t {
  NAIAD_EMBED = 0,         // out = table[token ids] * factor
  NAIAD_RMS_NORM = 1,      // out = normalised(in) * weight
  NAIAD_ADD = 2,           // out = in + other
  NAIAD_LINEAR = 3,        // out = in · matrixᵀ + bias (+ other), or the gate of it
  NAIAD_GATE = 4,          // out = activation(first half of in) * second half of in
  NAIAD_ANGLES = 5,        // out = cosines, then sines of positions * frequencies
  NAIAD_ROTARY_STORE = 6,  // queries of in, normed and rotated by other, to out; keys and values to the cache
  NAIAD_ATTENTION = 7,     // out = attention of the queries in `in`
  NAIAD_SOFT_CAP = 8,      // out = factor * tanh(in / factor)
  NAIAD_BEST_TOKENS = 9,   // the step's `best_ids` and `best_logits` = each row's greatest of in; writes no buffer
  NAIAD_DRAW_TOKENS = 10,  // the step's `draws` = the token that each row of in draws; writes no buffer, and comes
                           // after NAIAD_BEST_TOKENS of the same rows
};

enum NaiadActivation : int32_t { NAIAD_NO_GATE = 0, NAIAD_SILU = 1, NAIAD_GELU_TANH = 2, NAIAD_GELU_ERF = 3 };

// What a linear record multiplies.
enum NaiadProduct : int32_t {
  NAIAD_FLOAT_BY_FLOAT = 0,  // float32 inputs, float32 weights
  NAIAD_FLOAT_BY_BF16 = 1,   // float32 inputs, bf16 weights: products and sums are float32's
  NAIAD_BF16_BY_BF16 = 2,    // inputs rounded to bf16, sums in float32
  NAIAD_INT8_BY_INT8 = 3,    // inputs rounded to whole numbers within ±127, with a scale for each 64 of a row
  NAIAD_FLOAT_BY_F16 = 4,    // float32 inputs, float16 weights: products and sums are float32's
  NAIAD_INT4_BY_INT8 = 5,    // the same inputs as NAIAD_INT8_BY_INT8; weights of four bits with scales and zero points
  NAIAD_INT4_AND_MINIMUM_BY_INT8 = 6,  // likewise, with scales and minimums
};

enum NaiadElement : int32_t { NAIAD_FLOAT32 = 0, NAIAD_BFLOAT16 = 1, NAIAD_FLOAT16 = 2 };

// A matrix as panels of 16 outputs, one panel after the other; see docs/native.md.
struct NaiadMatrix {
  const void* panels;
  const float* bias;    // [num_panels * 16], or null
  const float* scales;  // [num_panels * 16], by which sums are multiplied first, or null
  int64_t num_panels;
  int64_t in_features;  // padded with zeros to a multiple of 64
  int32_t product;      // NaiadProduct
};

// Keys and values of one layer in blocks; see docs/native.md.
struct NaiadCache {
  void* keys;
  void* values;
  // Null, or keys and values are whole numbers of eight bits: [num_blocks, num_kv_heads, block_size], what those of
  // each token are multiplied by.
  float* key_scales;
  float* value_scales;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;  // a multiple of 16
  int64_t head_dim;    // even
  int32_t element;     // NaiadElement, not NAIAD_FLOAT16, as which keys and values are multiplied
};

// Fields that a record's kind does not name are not read.
struct NaiadRecord {
  int32_t kind;       // NaiadKind
  int32_t in, other;  // buffers; other: -1 = none
  int32_t out;
  int32_t activation;  // NAIAD_LINEAR, NAIAD_GATE
  int32_t group;       // NAIAD_ROTARY_STORE, NAIAD_ATTENTION: which of the step's block tables
  int32_t num_heads;
  int32_t element;      // NAIAD_EMBED: NaiadElement of the table
  int64_t width;        // of a row of `out`; NAIAD_BEST_TOKENS, NAIAD_DRAW_TOKENS: of `in`
  int64_t num_rows;     // NAIAD_EMBED: of the table
  const void* table;    // NAIAD_EMBED: [num_rows, width]
  const float* weight;  // NAIAD_RMS_NORM: [stride]; NAIAD_ROTARY_STORE: [num_heads + num_kv_heads, head_dim] or null
  const float* frequencies;  // NAIAD_ANGLES: [width / 2], radians a position
  float eps;                 // of a norm
  float factor;              // NAIAD_EMBED, NAIAD_SOFT_CAP; NAIAD_ATTENTION: of the scores, > 0
  float soft_cap;            // NAIAD_ATTENTION: 0 = none
  int32_t window;            // NAIAD_ATTENTION: 0 = none
  NaiadMatrix matrix;        // NAIAD_LINEAR
  NaiadCache cache;          // NAIAD_ROTARY_STORE, NAIAD_ATTENTION
};

struct NaiadBuffer {
  float* data;  // [num_tokens, stride]
  int64_t stride;
};

// One group's block tables, as rows of one rectangle.
struct NaiadTables {
  const int32_t* blocks;  // [num_seqs, stride]
  int64_t stride;
};

// How each token's row draws its next token: the greatest of logit / temperature + noise among those that its filters
// keep. `docs/sampling.md` says what they mean.
struct NaiadDraws {
  const double* temperatures;  // [num_tokens]; 0: the row takes its best token
  const int64_t* top_k;        // [num_tokens]; 0: off
  const double* top_p;         // [num_tokens]; 1: off
  const double* log_min_p;     // [num_tokens]; -inf: off
  const uint64_t* keys;        // [num_tokens], of the noise
  int64_t* token_ids;          // [num_tokens], written; a row without a finite best logit gets its best token
};

struct NaiadStep {
  int64_t num_tokens;
  int64_t num_seqs;
  const int64_t* token_ids;     // [num_tokens]
  const int64_t* positions;     // [num_tokens]
  const int32_t* query_starts;  // [num_seqs + 1], of tokens
  const NaiadTables* tables;    // of each group
  int64_t num_groups;
  // NAIAD_BEST_TOKENS: the lowest id among the greatest allowed logits of each token's row, or among its NaNs, and that
  // logit; -1 and -inf if no token is allowed.
  int64_t* best_ids;       // [num_tokens], or null: the record does nothing
  float* best_logits;      // [num_tokens]
  const int32_t* allowed;  // [num_tokens, allowed_stride], or null: every token is; id i is allowed if bit i % 32 of
                           // word i / 32 is set
  int64_t allowed_stride;
  const NaiadDraws* draws;  // NAIAD_DRAW_TOKENS, with `best_ids`, among what is allowed; null: the record does nothing
};

struct NaiadTeam;

// `size` threads with the one that calls; null if the system starts no more threads. One run at a time.
NAIAD_API NaiadTeam* naiad_team_new(int64_t size);
NAIAD_API void naiad_team_free(NaiadTeam* team);

// Give each member a core of its own: `cpus[size]`, the first for the thread that calls `naiad_run`. Returns 0, or the
// system's error number for a core that may not be used.
NAIAD_API int naiad_team_pin(NaiadTeam* team, const int32_t* cpus);

// Whether the team computes with fewer members while other programs use their cores. At first it does not.
NAIAD_API void naiad_team_adapt(NaiadTeam* team, int32_t adapts);

// Members of the next run.
NAIAD_API int64_t naiad_team_size(const NaiadTeam* team);

// For tests of what watches over a team: nobody computes some of the shares from now on, so that the next run of
// two members or more, with a stage for two, never ends.
NAIAD_API void naiad_team_lose_share(NaiadTeam* team);

// Run records one after the other.
//
// Returns 0, or: 1 a token id is outside its table, 2 a sequence's positions do not follow each other from 0
// on, 3 a block id is outside its cache, 4 a block table is too short, 5 a bitmask is shorter than the rows, 6 there
// is no memory for what the kernels need beside the buffers. Nothing has been computed then.
//
// `nanoseconds`: null, or [num_records]: the time until each record is done is added to them.
NAIAD_API int naiad_run(NaiadTeam* team, const NaiadRecord* records, int64_t num_records, const NaiadBuffer* buffers,
                        const NaiadStep* step, int64_t* nanoseconds);

// Sizes of NaiadRecord, NaiadMatrix, NaiadCache, NaiadStep, NaiadDraws, so that Python sees whether its twins are the
// same.
NAIAD_API void naiad_sizes(int64_t sizes[5]);
}
