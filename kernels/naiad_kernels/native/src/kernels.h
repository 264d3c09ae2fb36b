// What a record's kernel gets, and the kernels.
#pragma once

#include <vector>

#include "allowed.h"
#include "simd.h"
#include "shares.h"
#include "tape.h"

namespace naiad {

// Memory that outlives a record; grows to the largest that was asked for.
class Scratch {
 public:
  // Let `get` find so many bytes without asking for memory. What was there is lost. The memory is not touched: that is
  // left to the thread that uses it. Throws std::bad_alloc.
  void reserve(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) + kAlignment;
    if (memory_.capacity() >= bytes) return;
    memory_ = std::vector<char>();
    memory_.reserve(bytes);
  }

  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T) + kAlignment;
    if (memory_.size() < bytes) memory_.resize(bytes);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((address + kAlignment - 1) & ~static_cast<uintptr_t>(kAlignment - 1));
  }

 private:
  static constexpr size_t kAlignment = 64;

  std::vector<char> memory_;
};

// Memory of a member, and the stage for which it has the rounded inputs, if that is the present one.
struct alignas(64) Own {
  Scratch memory;
  int64_t stage = -1;
};

// What a step's records share.
struct Run {
  const NaiadBuffer* buffers;
  const NaiadStep* step;
  int64_t team_size;
  // Written in one phase of a record for the next.
  Scratch* shared;
  // Of each member.
  Own* own;

  float* row(int32_t buffer, int64_t token) const { return buffers[buffer].data + token * buffers[buffer].stride; }
};

inline Allowed allowed_of(const NaiadStep& step, int64_t token) {
  return {step.allowed ? step.allowed + token * step.allowed_stride : nullptr};
}

// What a gate does to its first half.
inline Floats activate(int32_t activation, Floats x) {
  switch (activation) {
    case NAIAD_SILU: return silu(x);
    case NAIAD_GELU_TANH: return gelu_tanh(x);
    default: return gelu_erf(x);
  }
}

// A record is computed in at most two phases. `things`: what is shared out in a phase; `count` is 0 if there is no such
// phase. A phase's kernel computes one share of its things.
Things row_things(const NaiadStep& step, int64_t phase);
void embed(const NaiadRecord& record, const Run& run, const Share& share);
void rms_norm(const NaiadRecord& record, const Run& run, const Share& share);
void add(const NaiadRecord& record, const Run& run, const Share& share);
void gate(const NaiadRecord& record, const Run& run, const Share& share);
void soft_cap(const NaiadRecord& record, const Run& run, const Share& share);
void angles(const NaiadRecord& record, const Run& run, const Share& share);

Things linear_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase, int64_t team_size);
void linear(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share);

Things rotary_store_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase);
void rotary_store(const NaiadRecord& record, const Run& run, const Share& share);

Things attention_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase, int64_t team_size);
void attention(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share);

Things best_tokens_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase);
void best_tokens(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share);

Things draw_tokens_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase);
void draw_tokens(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share);

// Bytes of `Run::shared` that a record needs in this step.
int64_t linear_shared_bytes(const NaiadRecord& record, const NaiadStep& step);
int64_t attention_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size);
int64_t best_tokens_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size);
int64_t draw_tokens_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size);

// Bytes of each member's `Run::own` that a record needs in this step at most. Members have no way to say that there is
// no memory, so all of it is there before they begin.
int64_t linear_own_bytes(const NaiadRecord& record, const NaiadStep& step);
int64_t rotary_store_own_bytes(const NaiadRecord& record);
int64_t attention_own_bytes(const NaiadRecord& record);
int64_t draw_tokens_own_bytes(const NaiadRecord& record, const NaiadStep& step);

}  // namespace naiad
