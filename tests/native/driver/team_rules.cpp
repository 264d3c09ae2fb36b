// The team's own code behind a C interface, for tests.
#include <sched.h>

#include <thread>

#include "team.h"

namespace {

// Stages of different numbers of things, each of which is counted; some take longer.
class Counting : public naiad::Job {
 public:
  Counting(const int64_t* things, int64_t num_stages, int64_t team_size, std::atomic<int64_t>* counts)
      : things_(things), num_stages_(num_stages), team_size_(team_size), counts_(counts) {}
  bool next(naiad::Cut& cut) override {
    for (int64_t thing = 0; stage_ >= 0 && thing < things_[stage_]; thing++)
      is_in_order_ &= counts_[first_ + thing].load(std::memory_order_relaxed) == 1;
    if (stage_ >= 0) first_ += things_[stage_];
    if (++stage_ == num_stages_) return false;
    cut = naiad::Cut(now(), team_size_);
    return true;
  }
  void compute(const naiad::Share& share) override {
    const naiad::Range things = share.of(now());
    if ((share.index + stage_) % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    for (int64_t thing = things.first; thing < things.end; thing++)
      counts_[first_ + thing].fetch_add(1, std::memory_order_relaxed);
  }
  bool is_in_order_ = true;

 private:
  naiad::Things now() const { return {things_[stage_], 1 + stage_ % 3, 1 + stage_ % 2}; }
  const int64_t* things_;
  const int64_t num_stages_, team_size_;
  std::atomic<int64_t>* counts_;
  int64_t stage_ = -1, first_ = 0;
};

}  // namespace

extern "C" int64_t shares(int64_t count, int64_t least, int64_t grain, int64_t team_size, int64_t* borders) {
  const naiad::Things things{count, least, grain};
  const naiad::Cut cut(things, team_size);
  for (int64_t index = 0; index < cut.num_shares(); index++) {
    const naiad::Range share = naiad::Share{index, cut, 0, 0}.of(things);
    borders[2 * index] = share.first;
    borders[2 * index + 1] = share.end;
  }
  return cut.num_shares();
}

// The number of runs in which each thing was counted once, and all of a stage before any of the next.
extern "C" int64_t right_runs(int64_t team_size, int64_t num_runs, const int64_t* things, int64_t num_stages) {
  naiad::Team team(team_size);
  int64_t total = 0, num_right = 0;
  for (int64_t stage = 0; stage < num_stages; stage++) total += things[stage];
  for (int64_t run = 0; run < num_runs; run++) {
    std::vector<std::atomic<int64_t>> counts(static_cast<size_t>(total));
    for (auto& count : counts) count.store(0);
    Counting job(things, num_stages, team_size, counts.data());
    team.run(job);
    bool is_right = job.is_in_order_;
    for (auto& count : counts) is_right &= count.load() == 1;
    num_right += is_right;
  }
  return num_right;
}

namespace {

// Stages whose shares take as long as whoever computes them takes for one.
class Slow : public naiad::Job {
 public:
  Slow(int64_t num_stages, const naiad::Cut& cut, const std::vector<int64_t>& milliseconds)
      : num_left_(num_stages), cut_(cut), milliseconds_(milliseconds), counts_(milliseconds.size()) {}
  bool next(naiad::Cut& cut) override {
    cut = cut_;
    return num_left_-- > 0;
  }
  void compute(const naiad::Share& share) override {
    const size_t member = static_cast<size_t>(share.computed_by);
    counts_[member]++;
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds_[member]));
  }
  // Shares that the member has computed.
  int64_t count(size_t member) const { return counts_[member]; }

 private:
  int64_t num_left_;
  const naiad::Cut cut_;
  const std::vector<int64_t> milliseconds_;
  std::vector<std::atomic<int64_t>> counts_;
};

// One share at a time, for which all but one wait, until the team is smaller.
void shrink(naiad::Team& team, int64_t size) {
  for (int64_t run = 0; run < 100 && team.size() > size; run++) {
    Slow job(20, naiad::Cut(), std::vector<int64_t>(16, 1));
    team.run(job);
  }
}

// Nobody waits for long.
void run_evenly(naiad::Team& team, int64_t num_runs) {
  for (int64_t run = 0; run < num_runs; run++) {
    Slow job(1, naiad::Cut({team.size()}, team.size()), std::vector<int64_t>(16, 30));
    team.run(job);
  }
}

}  // namespace

// The size of a team that adapts after two seconds at most in which one member works and the others wait.
extern "C" int64_t size_after_waiting(int64_t team_size) {
  naiad::Team team(team_size);
  team.adapt(true);
  shrink(team, team_size - 1);
  return team.size();
}

// That of one that waited only before it adapted.
extern "C" int64_t size_after_earlier_waits() {
  naiad::Team team(2);
  for (int run = 0; run < 10; run++) {
    Slow job(20, naiad::Cut(), {1, 1});
    team.run(job);
  }
  team.adapt(true);
  run_evenly(team, 8);
  return team.size();
}

// That of one that has become smaller, rested, and had its member back for a while. Both members have one core, so the
// one that is left out may learn late that a run has ended.
extern "C" int64_t size_after_a_rest() {
  int64_t size = 0;
  // Pinning a team pins who calls it.
  std::thread([&] {
    const int32_t core = sched_getcpu(), cores[] = {core, core};
    naiad::Team team(2);
    if (team.pin(cores) != 0) return;
    team.adapt(true);
    shrink(team, 1);
    run_evenly(team, 30);
    size = team.size();
  }).join();
  return size;
}

// How many of its four shares the slow first member of a team computes that has lost half of its members; -1 if one of
// those has computed any, or if the team does not have four members then.
extern "C" int64_t shares_of_a_slow_member() {
  naiad::Team team(8);
  team.adapt(true);
  shrink(team, 4);
  // The slow share may end a window, and the team have another size after it.
  if (team.size() != 4) return -1;
  Slow job(1, naiad::Cut({64}, team.size()), {50, 1, 1, 1, 1, 1, 1, 1});
  team.run(job);
  for (size_t member = 4; member < 8; member++)
    if (job.count(member) > 0) return -1;
  return job.count(0);
}

extern "C" void sizes(int64_t most, const double* waits, int64_t count, int64_t run, int64_t* sizes) {
  naiad::Sizing sizing(most);
  for (int64_t i = 0; i < count; i++) {
    sizing.add(run, static_cast<int64_t>(waits[i] * static_cast<double>(sizing.size() * run)));
    sizes[i] = sizing.size();
  }
}
