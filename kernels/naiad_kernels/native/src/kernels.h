// What a record's kernel gets, and the kernels.
#pragma once

#include "allowed.h"
#include "simd.h"
#include "tape.h"
#include "team.h"

namespace naiad {

// Memory of one member that outlives a record; grows to the largest that was asked for.
class Scratch {
 public:
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 64;
    if (memory_.size() < bytes) memory_.resize(bytes);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((address + 63) & ~static_cast<uintptr_t>(63));
  }

 private:
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

}  // namespace naiad
