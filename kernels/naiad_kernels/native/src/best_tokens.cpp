// The best token of each row of logits: the lowest id among the greatest allowed logits.
//
// The columns are shared as the panels of the product that made them, so that most members find the logits in their own
// cache; of so many rows that members shared those, they find a part of them there. Then the rows are shared.
#include <algorithm>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace naiad {
namespace {

// So many vectors of logits take longer than taking a share of them.
constexpr int64_t kVectorsTogether = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Best {
  float value;
  int32_t id;  // -1: no token is allowed
};

// A NaN is better than every number, so that it shows.
bool is_better(const Best& a, const Best& b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0;
  if (a.value != a.value || b.value != b.value) return b.value == b.value;
  return a.value > b.value;
}

// One row's logits, and which of them count.
struct Logits {
  const float* values;
  Allowed allowed;
};

Best best_one_by_one(const Logits& logits, int64_t first, int64_t end) {
  Best best{kLowest, -1};
  for (int64_t id = first; id < end; id++) {
    const Best next{logits.values[id], static_cast<int32_t>(id)};
    if (logits.allowed.has(id) && is_better(next, best)) best = next;
  }
  return best;
}

// The greatest logits that each lane has met, the first one of equals, and in which group of vectors.
struct Lanes {
  Floats greatest = fill(kLowest), group = fill(0.0f), not_finite = fill(0.0f);

  void take(const Logits& logits, int64_t id, Floats number) {
    Floats x = load(logits.values + id), judged = x;
    if (logits.allowed.words) {
      const uint32_t lanes = logits.allowed.lanes(id);
      judged = where_set(lanes, x, fill(0.0f));
      x = where_set(lanes, x, fill(kLowest));
    }
    not_finite = fma(judged, fill(0.0f), not_finite);
    group = where_less(greatest, x, number, group);
    greatest = where_less(greatest, x, x, greatest);
  }
};

// In [first, end), of a multiple of VECTORS vectors. Several that do not wait for each other make a group.
template <int VECTORS>
Best best_of_vectors(const Logits& logits, int64_t first, int64_t end) {
  constexpr int64_t kGroup = VECTORS * kLanes;
  Lanes lanes[VECTORS];
  Floats number = fill(0.0f);
  for (int64_t id = first; id < end; id += kGroup, number = number + fill(1.0f))
    for (int v = 0; v < VECTORS; v++) lanes[v].take(logits, id + v * kLanes, number);
  Best best{kLowest, -1};
  for (int v = 0; v < VECTORS; v++) {
    const float finite = sum_lanes(lanes[v].not_finite);
    if (finite != finite) return best_one_by_one(logits, first, end);
    alignas(64) float values[kLanes], groups[kLanes];
    store(values, lanes[v].greatest);
    store(groups, lanes[v].group);
    for (int lane = 0; lane < kLanes; lane++) {
      if (values[lane] == kLowest) continue;  // nothing is allowed here
      const int64_t id = first + static_cast<int64_t>(groups[lane]) * kGroup + v * kLanes + lane;
      const bool is_first = values[lane] == best.value && id < best.id;
      if (values[lane] > best.value || is_first) best = {values[lane], static_cast<int32_t>(id)};
    }
  }
  return best;
}

// In [first, end), of which the first is a multiple of 16.
Best best_in_part(const Logits& logits, int64_t first, int64_t end) {
  constexpr int kVectors = 4;
  const int64_t count = std::max<int64_t>(0, end - first);
  const int64_t groups_end = first + count / (kVectors * kLanes) * (kVectors * kLanes);
  const int64_t vectors_end = first + count / kLanes * kLanes;
  // The first of equals stays.
  Best best = best_of_vectors<kVectors>(logits, first, groups_end);
  for (const Best& next :
       {best_of_vectors<1>(logits, groups_end, vectors_end), best_one_by_one(logits, vectors_end, end)})
    if (is_better(next, best)) best = next;
  return best;
}

}  // namespace

Things best_tokens_things(const NaiadRecord& record, const NaiadStep& step, int64_t phase) {
  if (!step.best_ids || phase > 1) return {0};
  return phase == 0 ? Things{whole_lanes(record.width) / kLanes, kVectorsTogether, kVectorsTogether}
                    : Things{step.num_tokens};
}

int64_t best_tokens_shared_bytes(const NaiadRecord& record, const NaiadStep& step, int64_t team_size) {
  const int64_t num_parts = Cut(best_tokens_things(record, step, 0), team_size).num_shares();
  return step.best_ids ? step.num_tokens * num_parts * static_cast<int64_t>(sizeof(Best)) : 0;
}

void best_tokens(const NaiadRecord& record, const Run& run, int64_t phase, const Share& share) {
  const NaiadStep& step = *run.step;
  const Things vectors = best_tokens_things(record, step, 0);
  const int64_t num_parts = Cut(vectors, run.team_size).num_shares();
  Best* parts = run.shared->get<Best>(step.num_tokens * num_parts);
  const auto [first, end] = share.of(best_tokens_things(record, step, phase));
  if (phase == 0) {
    const int64_t end_id = std::min(end * kLanes, record.width);
    for (int64_t token = 0; token < step.num_tokens; token++) {
      const Logits logits{run.row(record.in, token), allowed_of(step, token)};
      parts[share.index * step.num_tokens + token] = best_in_part(logits, first * kLanes, end_id);
    }
    return;
  }
  for (int64_t token = first; token < end; token++) {
    // Parts have ascending ids, and the first of equals stays.
    Best best = parts[token];
    for (int64_t part = 1; part < num_parts; part++) {
      const Best& next = parts[part * step.num_tokens + token];
      if (is_better(next, best)) best = next;
    }
    step.best_ids[token] = best.id;
    step.best_logits[token] = best.value;
  }
}

}  // namespace naiad
