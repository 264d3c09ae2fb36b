// Runs a tape's records, after a look at what the step names.
#include "tape.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "kernels.h"
#include "team.h"

struct NaiadTeam {
  explicit NaiadTeam(int64_t size) : team(size), own(static_cast<size_t>(size)) {}
  naiad::Team team;
  naiad::Scratch shared;
  std::vector<naiad::Own> own;
};

namespace naiad {
namespace {

enum Refusal : int {
  kFine = 0,
  kTokenId = 1,
  kPosition = 2,
  kBlockId = 3,
  kShortTable = 4,
  kShortMask = 5,
  kNoMemory = 6
};

Refusal check_token_ids(const NaiadRecord& record, const NaiadStep& step) {
  for (int64_t token = 0; token < step.num_tokens; token++)
    if (step.token_ids[token] < 0 || step.token_ids[token] >= record.num_rows) return kTokenId;
  return kFine;
}

Refusal check_positions(const NaiadStep& step) {
  if (step.query_starts[0] != 0 || step.query_starts[step.num_seqs] != step.num_tokens) return kPosition;
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    const int64_t start = step.query_starts[seq], end = step.query_starts[seq + 1];
    if (start >= end || end > step.num_tokens || step.positions[start] < 0) return kPosition;
    for (int64_t token = start; token + 1 < end; token++)
      if (step.positions[token + 1] != step.positions[token] + 1) return kPosition;
  }
  return kFine;
}

// The blocks that a record writes or sees for each sequence.
Refusal check_tables(const NaiadRecord& record, const NaiadStep& step) {
  if (record.group >= step.num_groups) return kShortTable;
  const NaiadTables& tables = step.tables[record.group];
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    const int64_t first = step.positions[step.query_starts[seq]];
    const int64_t last = step.positions[step.query_starts[seq + 1] - 1];
    int64_t seen = record.window ? std::max<int64_t>(0, first + 1 - record.window) : 0;
    if (record.kind == NAIAD_ROTARY_STORE) seen = first;
    if (last / record.cache.block_size >= tables.stride) return kShortTable;
    for (int64_t index = seen / record.cache.block_size; index <= last / record.cache.block_size; index++) {
      const int64_t block = tables.blocks[seq * tables.stride + index];
      if (block < 0 || block >= record.cache.num_blocks) return kBlockId;
    }
  }
  return kFine;
}

// Whether what holds for one record's block tables holds for the other's, of the same kind: most layers are alike.
bool sees_same_blocks(const NaiadRecord& a, const NaiadRecord& b) {
  return a.group == b.group && a.window == b.window && a.cache.block_size == b.cache.block_size &&
         a.cache.num_blocks == b.cache.num_blocks;
}

Refusal check(const NaiadRecord* records, int64_t num_records, const NaiadStep& step) {
  if (const Refusal refusal = check_positions(step)) return refusal;
  const NaiadRecord* last_checked[2] = {};
  for (const NaiadRecord* record = records; record < records + num_records; record++) {
    Refusal refusal = kFine;
    if (record->kind == NAIAD_EMBED) refusal = check_token_ids(*record, step);
    if (record->kind == NAIAD_ATTENTION || record->kind == NAIAD_ROTARY_STORE) {
      const NaiadRecord*& last = last_checked[record->kind == NAIAD_ATTENTION];
      if (!last || !sees_same_blocks(*record, *last)) refusal = check_tables(*record, step);
      last = record;
    }
    if (record->kind == NAIAD_BEST_TOKENS && step.allowed && step.allowed_stride * 32 < record->width)
      refusal = kShortMask;
    if (refusal) return refusal;
  }
  return kFine;
}

int64_t shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  if (record.kind == NAIAD_LINEAR) return linear_shared_bytes(record, step);
  if (record.kind == NAIAD_ATTENTION) return attention_shared_bytes(record, step, team_size);
  if (record.kind == NAIAD_BEST_TOKENS) return best_tokens_shared_bytes(record, step, team_size);
  if (record.kind == NAIAD_DRAW_TOKENS) return draw_tokens_shared_bytes(record, step, team_size);
  return 0;
}

int64_t own_bytes(const NaiadRecord& record, const NaiadStep& step) {
  if (record.kind == NAIAD_LINEAR) return linear_own_bytes(record, step);
  if (record.kind == NAIAD_ROTARY_STORE) return rotary_store_own_bytes(record);
  if (record.kind == NAIAD_ATTENTION) return attention_own_bytes(record);
  if (record.kind == NAIAD_DRAW_TOKENS) return draw_tokens_own_bytes(record, step);
  return 0;
}

// Have all memory that the records need: members cannot do without it once they have begun.
Refusal reserve(NaiadTeam& team, const NaiadRecord* records, int64_t num_records, const NaiadStep& step) {
  int64_t shared = 0, own = 0;
  for (const NaiadRecord* record = records; record < records + num_records; record++) {
    shared = std::max(shared, shared_bytes(*record, step, team.team.size()));
    own = std::max(own, own_bytes(*record, step));
  }
  try {
    team.shared.get<char>(shared);
    for (Own& each : team.own) each.memory.reserve(own);
  } catch (const std::exception&) {
    return kNoMemory;
  }
  return kFine;
}

Things things(const NaiadRecord& record, const NaiadStep& step, int64_t phase, int64_t team_size) {
  switch (record.kind) {
    case NAIAD_LINEAR: return linear_things(record, step, phase, team_size);
    case NAIAD_ROTARY_STORE: return rotary_store_things(record, step, phase);
    case NAIAD_ATTENTION: return attention_things(record, step, phase, team_size);
    case NAIAD_BEST_TOKENS: return best_tokens_things(record, step, phase);
    case NAIAD_DRAW_TOKENS: return draw_tokens_things(record, step, phase);
    default: return row_things(step, phase);
  }
}

void compute(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  switch (record.kind) {
    case NAIAD_EMBED: return embed(record, run, share);
    case NAIAD_RMS_NORM: return rms_norm(record, run, share);
    case NAIAD_ADD: return add(record, run, share);
    case NAIAD_LINEAR: return linear(record, run, phase, share);
    case NAIAD_GATE: return gate(record, run, share);
    case NAIAD_ANGLES: return angles(record, run, share);
    case NAIAD_ROTARY_STORE: return rotary_store(record, run, share);
    case NAIAD_ATTENTION: return attention(record, run, phase, share);
    case NAIAD_SOFT_CAP: return soft_cap(record, run, share);
    case NAIAD_BEST_TOKENS: return best_tokens(record, run, phase, share);
    case NAIAD_DRAW_TOKENS: return draw_tokens(record, run, phase, share);
  }
}

// A step's records, each in its phases.
class Replay : public Job {
 public:
  // `nanoseconds`: null, or of each record; the time until it is done is added.
  Replay(const NaiadRecord* records, int64_t num_records, const Run& run, int64_t* nanoseconds)
      : records_(records), num_records_(num_records), run_(run), nanoseconds_(nanoseconds), start_(Clock::now()) {}

  bool next(Cut& cut) override {
    for (phase_++; record_ < num_records_; phase_ = 0) {
      const Things things = naiad::things(records_[record_], *run_.step, phase_, run_.team_size);
      if (things.count > 0) {
        cut = Cut(things, run_.team_size);
        return true;
      }
      if (nanoseconds_) take_time();
      record_++;
    }
    return false;
  }

  void compute(const Share& share) override { naiad::compute(records_[record_], run_, phase_, share); }

 private:
  using Clock = std::chrono::steady_clock;

  void take_time() {
    const auto now = Clock::now();
    nanoseconds_[record_] += std::chrono::nanoseconds(now - start_).count();
    start_ = now;
  }

  const NaiadRecord* const records_;
  const int64_t num_records_;
  const Run& run_;
  int64_t* const nanoseconds_;
  Clock::time_point start_;
  int64_t record_ = 0, phase_ = -1;
};

}  // namespace
}  // namespace naiad

NaiadTeam* naiad_team_new(int64_t size) {
  try {
    return new NaiadTeam(size);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void naiad_team_free(NaiadTeam* team) { delete team; }

int naiad_team_pin(NaiadTeam* team, const int32_t* cpus) { return team->team.pin(cpus); }

void naiad_team_adapt(NaiadTeam* team, int32_t adapts) { team->team.adapt(adapts); }

int64_t naiad_team_size(const NaiadTeam* team) { return team->team.size(); }

void naiad_team_lose_share(NaiadTeam* team) { team->team.lose_share(); }

int naiad_run(NaiadTeam* team, const NaiadRecord* records, int64_t num_records, const NaiadBuffer* buffers,
              const NaiadStep* step, int64_t* nanoseconds) {
  if (const naiad::Refusal refusal = naiad::check(records, num_records, *step)) return refusal;
  if (const naiad::Refusal refusal = naiad::reserve(*team, records, num_records, *step)) return refusal;
  const naiad::Run run{buffers, step, team->team.size(), &team->shared, team->own.data()};
  naiad::Replay replay(records, num_records, run, nanoseconds);
  team->team.run(replay);
  return 0;
}

void naiad_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(NaiadRecord);
  sizes[1] = sizeof(NaiadMatrix);
  sizes[2] = sizeof(NaiadCache);
  sizes[3] = sizeof(NaiadStep);
  sizes[4] = sizeof(NaiadDraws);
}
