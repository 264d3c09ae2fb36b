// Runs a tape's records, after a look at what the step names.
#include "tape.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>

#include "kernels.h"
#include "tiles.h"

struct NaiadTeam {
  explicit NaiadTeam(int64_t size) : team(size), own(static_cast<size_t>(size)) {}
  naiad::Team team;
  naiad::Scratch shared;
  std::vector<naiad::Scratch> own;
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

int64_t shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t num_members) {
  if (record.kind == NAIAD_LINEAR) return linear_shared_bytes(record, step);
  if (record.kind == NAIAD_ATTENTION) return attention_shared_bytes(record, step, num_members);
  if (record.kind == NAIAD_BEST_TOKENS) return best_tokens_shared_bytes(step, num_members);
  if (record.kind == NAIAD_DRAW_TOKENS) return draw_tokens_shared_bytes(record, step, num_members);
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
  const int64_t num_members = team.team.size();
  int64_t shared = 0, own = 0;
  for (const NaiadRecord* record = records; record < records + num_records; record++) {
    shared = std::max(shared, shared_bytes(*record, step, num_members));
    own = std::max(own, own_bytes(*record, step));
  }
  try {
    team.shared.get<char>(shared);
    for (int64_t index = 0; index < num_members; index++) team.own[static_cast<size_t>(index)].reserve(own);
  } catch (const std::exception&) {
    return kNoMemory;
  }
  return kFine;
}

bool takes_tiles(const NaiadRecord* records, int64_t num_records) {
  return std::any_of(records, records + num_records, [](const NaiadRecord& record) {
    if (record.kind == NAIAD_ATTENTION) return attention_takes_tiles(record);
    return record.kind == NAIAD_LINEAR && linear_takes_tiles(record);
  });
}

void compute(const NaiadRecord& record, const Run& run, Member& member) {
  switch (record.kind) {
    case NAIAD_EMBED: return embed(record, run, member);
    case NAIAD_RMS_NORM: return rms_norm(record, run, member);
    case NAIAD_ADD: return add(record, run, member);
    case NAIAD_LINEAR: return linear(record, run, member);
    case NAIAD_GATE: return gate(record, run, member);
    case NAIAD_ANGLES: return angles(record, run, member);
    case NAIAD_ROTARY_STORE: return rotary_store(record, run, member);
    case NAIAD_ATTENTION: return attention(record, run, member);
    case NAIAD_SOFT_CAP: return soft_cap(record, run, member);
    case NAIAD_BEST_TOKENS: return best_tokens(record, run, member);
    case NAIAD_DRAW_TOKENS: return draw_tokens(record, run, member);
  }
}

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

void naiad_team_lose_member(NaiadTeam* team) { team->team.lose_member(); }

int naiad_run(NaiadTeam* team, const NaiadRecord* records, int64_t num_records, const NaiadBuffer* buffers,
              const NaiadStep* step, int64_t* nanoseconds) {
  if (const naiad::Refusal refusal = naiad::check(records, num_records, *step)) return refusal;
  if (const naiad::Refusal refusal = naiad::reserve(*team, records, num_records, *step)) return refusal;
  const naiad::Run run{buffers, step, &team->shared, team->own.data()};
  const int64_t num_tile_rows = naiad::takes_tiles(records, num_records) ? step->num_tokens : 0;
  using Clock = std::chrono::steady_clock;
  const auto work = [&](naiad::Member& member) {
    const naiad::TileSession tiles(num_tile_rows);
    for (int64_t index = 0; index < num_records; index++) {
      const bool is_timed = nanoseconds && member.index == 0;
      const auto start = is_timed ? Clock::now() : Clock::time_point();
      naiad::compute(records[index], run, member);
      if (index + 1 < num_records) member.barrier();
      if (is_timed) nanoseconds[index] += std::chrono::nanoseconds(Clock::now() - start).count();
    }
  };
  // A reference, for which `std::function` asks for no memory.
  team->team.run(std::cref(work));
  return 0;
}

void naiad_sizes(int64_t sizes[5]) {
  sizes[0] = sizeof(NaiadRecord);
  sizes[1] = sizeof(NaiadMatrix);
  sizes[2] = sizeof(NaiadCache);
  sizes[3] = sizeof(NaiadStep);
  sizes[4] = sizeof(NaiadDraws);
}
