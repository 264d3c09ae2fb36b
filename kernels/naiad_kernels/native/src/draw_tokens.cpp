// The token that each row draws: the greatest of logit / temperature + noise among those that are allowed and that its
// filters keep.
//
// First the columns are shared: each part has a winner where a row has no filters, and else the greatest logit of each
// group of columns. Then the rows are shared. Filters look at the tokens above a cut that as many groups
// reach as tokens are wanted, and at more if they may keep others.
#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "kernels.h"
#include "simd.h"

namespace naiad {
namespace {

constexpr int64_t kGroupColumns = 64;
// A total is the sum of its blocks' in their order, so that it is the same however columns are shared.
constexpr int64_t kBlockColumns = 1024;
// Without top-k: how many tokens the filters see at first.
constexpr int64_t kWanted = 256;
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
constexpr float kLowestFinite = std::numeric_limits<float>::lowest();
constexpr double kNone = -std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------- noise
// As `naiad_kernels.gumbel_argmax` computes it: SplitMix64 of the id, 53 bits of it as a uniform number.

class Noise {
 public:
  explicit Noise(uint64_t key) : key_(key) {}

  uint64_t bits(int64_t id) const {
    uint64_t x = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u + key_;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  double of(int64_t id) const {
    // The half is lost where it would round up to 1, of which the logarithm is not finite.
    const double uniform = std::min((static_cast<double>(bits(id) >> 11) + 0.5) * 0x1p-53, 1 - 0x1p-53);
    return -std::log(-std::log1p(-uniform));
  }

  // No less than the noise of 16 ids: -log(u), where a chord of log2 takes the place of the mantissa's logarithm.
  Floats most(int64_t id) const {
    alignas(64) float chord[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
      const float high = static_cast<float>(static_cast<int32_t>(bits(id + lane) >> 33));
      chord[lane] = static_cast<float>(static_cast<int32_t>(bits_of_float(high)));
    }
    // The first 31 bits are u * 2^31; the bits of a float are 2^23 * (its logarithm + 127).
    constexpr float kLn2 = 0.693147181f;
    return fma(load(chord), fill(-kLn2 * 0x1p-23f), fill(kLn2 * (31 + 127)));
  }

 private:
  const uint64_t key_;
};

// ---------------------------------------------------------------- a row and how it draws

struct Row {
  const float* logits;
  Allowed allowed;
  int64_t width;
  float best;
  int64_t best_id;
  double temperature, top_p, log_min_p;
  int64_t top_k;
  Noise noise;

  bool is_filtered() const { return top_k > 0 || top_p < 1 || log_min_p > kNone; }
  bool needs_mass() const { return top_k == 0 && top_p < 1; }
  double scaled(float logit) const { return (static_cast<double>(logit) - static_cast<double>(best)) / temperature; }

  // Sixteen logits, -inf after the last and where the token is not allowed.
  Floats load_logits(int64_t id) const {
    const Floats x = load(logits + id);
    uint32_t lanes = allowed.lanes(id);
    if (id + kLanes > width) lanes &= (1u << (width - id)) - 1;
    return lanes == 0xffff ? x : where_set(lanes, x, fill(-std::numeric_limits<float>::infinity()));
  }
  // The same in float32.
  Floats load_scaled(int64_t id) const {
    return (load_logits(id) - fill(best)) * fill(static_cast<float>(1 / temperature));
  }
};

struct Drawn {
  double score;
  int64_t id;

  // Of equals the one with the lowest id.
  void take(double other_score, int64_t other_id) {
    const bool is_better = other_score > score || (other_score == score && other_id < id);
    if (is_better) *this = {other_score, other_id};
  }
};

// ---------------------------------------------------------------- by columns

// The best of all tokens in [first, end), or the row's best token.
Drawn draw_freely(const Row& row, int64_t first, int64_t end) {
  // Above the errors of scaled logits and noise in float32: a token whose scaled logit is below -41 never wins.
  constexpr float kSlack = 1e-3f;
  Drawn drawn{row.noise.of(row.best_id), row.best_id};
  Floats least = fill(static_cast<float>(drawn.score) - kSlack);
  for (int64_t id = first; id < end; id += kLanes) {
    uint32_t hopeful = bits_where_less(least, row.load_scaled(id) + row.noise.most(id));
    for (int lane = 0; hopeful; lane++, hopeful >>= 1)
      if (hopeful & 1) drawn.take(row.scaled(row.logits[id + lane]) + row.noise.of(id + lane), id + lane);
    least = fill(static_cast<float>(drawn.score) - kSlack);
  }
  return drawn;
}

// The greatest logit of each group of columns in [first, end).
void find_maxima(const Row& row, int64_t first, int64_t end, float* maxima) {
  for (int64_t id = first; id < end; id += kGroupColumns) {
    Floats greatest = row.load_logits(id);
    for (int64_t next = id + kLanes; next < std::min(id + kGroupColumns, row.width); next += kLanes)
      greatest = max(greatest, row.load_logits(next));
    maxima[id / kGroupColumns] = max_lanes(greatest);
  }
}

// The sum of exp(scaled logit) in each block of columns in [first, end).
void find_masses(const Row& row, int64_t first, int64_t end, double* masses) {
  for (int64_t id = first; id < end; id += kBlockColumns) {
    Floats mass = fill(0.0f);
    for (int64_t next = id; next < std::min(id + kBlockColumns, row.width); next += kLanes)
      mass = mass + exponential(row.load_scaled(next));
    masses[id / kBlockColumns] = static_cast<double>(sum_lanes(mass));
  }
}

// ---------------------------------------------------------------- by rows

int64_t groups_of(int64_t width) { return (width + kGroupColumns - 1) / kGroupColumns; }

struct Candidate {
  float logit;
  int32_t id;
};

// Every token that is not below a cut.
struct Candidates {
  Candidate* tokens;
  int64_t count;
  float cut;  // kLowestFinite: all that are possible

  bool has_all(const Row& row, double threshold) const { return cut == kLowestFinite || threshold >= row.scaled(cut); }
};

// Find `wanted` tokens or more. `numbers` has room for a number of each group.
void find_candidates(const Row& row, const float* maxima, int64_t wanted, float* numbers, Candidates& found) {
  const int64_t num_groups = groups_of(row.width);
  found.count = 0;
  found.cut = kLowestFinite;
  if (wanted <= num_groups) {
    std::copy(maxima, maxima + num_groups, numbers);
    std::nth_element(numbers, numbers + wanted - 1, numbers + num_groups, std::greater<float>());
    found.cut = std::max(kLowestFinite, numbers[wanted - 1]);
  }
  for (int64_t group = 0; group < num_groups; group++) {
    if (maxima[group] < found.cut) continue;
    const int64_t end = std::min((group + 1) * kGroupColumns, row.width);
    for (int64_t id = group * kGroupColumns; id < end; id++)
      if (row.logits[id] >= found.cut && row.allowed.has(id))
        found.tokens[found.count++] = {row.logits[id], static_cast<int32_t>(id)};
  }
}

bool is_greater(const Candidate& a, const Candidate& b) { return a.logit > b.logit; }

double mass_of(const Row& row, const Candidate* first, const Candidate* end) {
  double mass = 0;
  for (; first < end; first++) mass += std::exp(row.scaled(first->logit));
  return mass;
}

// The scaled logit of the token with which the masses of the best tokens reach `wanted`, or -inf if all tokens together
// do not. Half of the tokens is judged at once, so that few are sorted.
double last_needed(const Row& row, Candidate* first, Candidate* end, double wanted) {
  constexpr int64_t kSorted = 64;
  double reached = 0;
  while (end - first > kSorted) {
    Candidate* middle = first + (end - first) / 2;
    std::nth_element(first, middle, end, is_greater);
    const double mass = mass_of(row, first, middle);
    if (reached + mass >= wanted) {
      end = middle;
    } else {
      reached += mass;
      first = middle;
    }
  }
  std::sort(first, end, is_greater);
  for (; first < end; first++) {
    const double scaled = row.scaled(first->logit);
    reached += std::exp(scaled);
    if (reached >= wanted) return scaled;
  }
  return kNone;
}

// The smallest scaled logit that the row keeps, as far as the candidates tell. `mass`: of all tokens, if the row needs
// it.
double threshold_among(const Row& row, const Candidates& found, double mass) {
  double threshold = row.log_min_p;
  Candidate* end = found.tokens + found.count;
  if (row.top_k > 0) {
    Candidate* last = found.tokens + std::min(row.top_k, found.count) - 1;
    std::nth_element(found.tokens, last, end, is_greater);
    const float kth = last->logit;
    threshold = std::max(threshold, row.scaled(kth));
    end = std::partition(found.tokens, end, [&](const Candidate& each) { return each.logit >= kth; });
    mass = mass_of(row, found.tokens, end);
  }
  return row.top_p < 1 ? std::max(threshold, last_needed(row, found.tokens, end, row.top_p * mass)) : threshold;
}

// Of a row's candidates, and a float for each of its groups.
int64_t filter_bytes(int64_t width) {
  return width * static_cast<int64_t>(sizeof(Candidate)) + groups_of(width) * static_cast<int64_t>(sizeof(float));
}

int64_t draw_filtered(const Row& row, const float* maxima, double mass, Scratch& own) {
  const int64_t num_groups = groups_of(row.width);
  Candidate* tokens = reinterpret_cast<Candidate*>(own.get<char>(filter_bytes(row.width)));
  Candidates found{tokens, 0, kLowestFinite};
  double threshold = 0;
  for (const int64_t wanted : {row.top_k > 0 ? row.top_k : kWanted, num_groups, kAll}) {
    find_candidates(row, maxima, wanted, reinterpret_cast<float*>(tokens + row.width), found);
    threshold = threshold_among(row, found, mass);
    if (found.has_all(row, threshold)) break;
  }
  Drawn drawn{kNone, row.best_id};
  for (int64_t index = 0; index < found.count; index++) {
    const double scaled = row.scaled(found.tokens[index].logit);
    const int64_t id = found.tokens[index].id;
    if (scaled >= threshold) drawn.take(scaled + row.noise.of(id), id);
  }
  return drawn.id;
}

// ---------------------------------------------------------------- what the first phase leaves the second

int64_t blocks_of(int64_t width) { return (width + kBlockColumns - 1) / kBlockColumns; }

// Arrays in the memory that members share, one after the other.
struct Shared {
  Shared(const NaiadRecord& record, const NaiadStep& step, int64_t team_size)
      : num_parts(Cut(draw_tokens_things(record, step, 0), team_size).num_shares()),
        num_groups(groups_of(record.width)),
        num_blocks(blocks_of(record.width)),
        masses_at(step.num_tokens * num_parts * static_cast<int64_t>(sizeof(Drawn))),
        maxima_at(masses_at + step.num_tokens * num_blocks * static_cast<int64_t>(sizeof(double))),
        num_bytes(maxima_at + step.num_tokens * num_groups * static_cast<int64_t>(sizeof(float))) {}

  // Of one token: [num_parts], [num_blocks], [num_groups].
  Drawn* drawn(char* memory, int64_t token) const { return reinterpret_cast<Drawn*>(memory) + token * num_parts; }
  double* masses(char* memory, int64_t token) const {
    return reinterpret_cast<double*>(memory + masses_at) + token * num_blocks;
  }
  float* maxima(char* memory, int64_t token) const {
    return reinterpret_cast<float*>(memory + maxima_at) + token * num_groups;
  }

  const int64_t num_parts, num_groups, num_blocks, masses_at, maxima_at, num_bytes;
};

Row row_of(const NaiadRecord& record, const Run& run, int64_t token) {
  const NaiadStep& step = *run.step;
  const NaiadDraws& draws = *step.draws;
  return {run.row(record.in, token), allowed_of(step, token),   record.width,       step.best_logits[token],
          step.best_ids[token],      draws.temperatures[token], draws.top_p[token], draws.log_min_p[token],
          draws.top_k[token],        Noise(draws.keys[token])};
}

bool is_drawn(const NaiadStep& step, int64_t token) {
  return step.draws->temperatures[token] > 0 && std::isfinite(step.best_logits[token]);
}

// What one part of the columns, [first, end), has for each row.
void see_columns(const NaiadRecord& record, const Run& run, const Shared& shared, char* memory, int64_t part,
                 int64_t first, int64_t end) {
  for (int64_t token = 0; token < run.step->num_tokens; token++) {
    if (!is_drawn(*run.step, token)) continue;
    const Row row = row_of(record, run, token);
    if (row.is_filtered()) {
      find_maxima(row, first, end, shared.maxima(memory, token));
      if (row.needs_mass()) find_masses(row, first, end, shared.masses(memory, token));
    } else {
      shared.drawn(memory, token)[part] = draw_freely(row, first, end);
    }
  }
}

void draw_rows(const NaiadRecord& record, const Run& run, const Shared& shared, char* memory, Scratch& own,
               int64_t first, int64_t end) {
  const NaiadStep& step = *run.step;
  for (int64_t token = first; token < end; token++) {
    int64_t& token_id = step.draws->token_ids[token];
    token_id = step.best_ids[token];
    if (!is_drawn(step, token)) continue;
    const Row row = row_of(record, run, token);
    if (row.is_filtered()) {
      const double* masses = shared.masses(memory, token);
      const double mass = row.needs_mass() ? std::accumulate(masses, masses + shared.num_blocks, 0.0) : 0.0;
      token_id = draw_filtered(row, shared.maxima(memory, token), mass, own);
    } else {
      const Drawn* parts = shared.drawn(memory, token);
      Drawn drawn = parts[0];
      for (int64_t part = 1; part < shared.num_parts; part++) drawn.take(parts[part].score, parts[part].id);
      token_id = drawn.id;
    }
  }
}

}  // namespace

Things draw_tokens_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase) {
  if (!step.draws || phase > 1) return {0};
  return {phase == 0 ? blocks_of(record.width) : step.num_tokens};
}

int64_t draw_tokens_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  return step.draws ? Shared(record, step, team_size).num_bytes : 0;
}

int64_t draw_tokens_own_bytes(const NaiadRecord& record, const NaiadStep& step) {
  return step.draws ? filter_bytes(record.width) : 0;
}

void draw_tokens(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  const Shared shared(record, *run.step, run.team_size);
  char* memory = run.shared->get<char>(shared.num_bytes);
  const auto [first, end] = share.of(draw_tokens_things(record, *run.step, phase));
  if (phase == 0)
    see_columns(record, run, shared, memory, share.index, first * kBlockColumns,
                std::min(end * kBlockColumns, record.width));
  else
    draw_rows(record, run, shared, memory, run.own[share.computed_by].memory, first, end);
}

}  // namespace naiad
