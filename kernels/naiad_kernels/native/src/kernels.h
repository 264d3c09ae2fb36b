// What a record's kernel gets, and the kernels.
#pragma once

#include "allowed.h"
#include "simd.h"
#include "tape.h"
#include "team.h"

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

// What a step's records share.
struct Run {
  const NaiadBuffer* buffers;
  const NaiadStep* step;
  // Written by one record's members for each other, between two of its barriers.
  Scratch* shared;
  // Of each member.
  Scratch* own;

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

void embed(const NaiadRecord& record, const Run& run, Member& member);
void rms_norm(const NaiadRecord& record, const Run& run, Member& member);
void add(const NaiadRecord& record, const Run& run, Member& member);
void gate(const NaiadRecord& record, const Run& run, Member& member);
void soft_cap(const NaiadRecord& record, const Run& run, Member& member);
void linear(const NaiadRecord& record, const Run& run, Member& member);
void angles(const NaiadRecord& record, const Run& run, Member& member);
void rotary_store(const NaiadRecord& record, const Run& run, Member& member);
void attention(const NaiadRecord& record, const Run& run, Member& member);
void best_tokens(const NaiadRecord& record, const Run& run, Member& member);
void draw_tokens(const NaiadRecord& record, const Run& run, Member& member);

// Whether a record's products are those of tiles.
bool linear_takes_tiles(const NaiadRecord& record);
bool attention_takes_tiles(const NaiadRecord& record);

// Bytes of `Run::shared` that a record needs in this step.
int64_t linear_shared_bytes(const NaiadRecord& record, const NaiadStep& step);
int64_t attention_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members);
int64_t best_tokens_shared_bytes(const NaiadStep& step, int64_t num_members);
int64_t draw_tokens_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members);

// Bytes of each member's `Run::own` that a record needs in this step at most. Members have no way to say that there is
// no memory, so all of it is there before they begin.
int64_t linear_own_bytes(const NaiadRecord& record, const NaiadStep& step);
int64_t rotary_store_own_bytes(const NaiadRecord& record);
int64_t attention_own_bytes(const NaiadRecord& record);
int64_t draw_tokens_own_bytes(const NaiadRecord& record, const NaiadStep& step);

}  // namespace naiad
