// A team of threads that compute one step together, stage after stage.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "shares.h"
#include "sizing.h"

namespace naiad {

// What a team computes: stages one after the other, each cut into shares that any member may take.
class Job {
 public:
  virtual ~Job() = default;
  // Go on to the next stage, of which nothing has been computed, when nobody computes the one before. Returns false if
  // there is none.
  virtual bool next(Cut& cut) = 0;
  // Compute a share of the present stage; members do so at the same time.
  virtual void compute(const Share& share) = 0;
};

// Threads that stay. The one that calls `run` is the first member; the others spin for a moment after a run
// and then sleep until their next one.
//
// Every member has a few shares of a stage and takes them one by one; when it has no more, it takes those that others
// have not begun. So a member whose core does something else holds up the team by no more than the share it is at. Who
// completes a stage's last share opens the next stage.
class Team {
 public:
  explicit Team(int64_t size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Compute the job; returns when all of it is done. The last members are left out if the team is smaller now.
  void run(Job& job);

  // Members of the next run.
  int64_t size() const { return adapts_ ? sizing_.size() : static_cast<int64_t>(seats_.size()); }

  // Whether runs have fewer members while other programs use their cores; at first they do not.
  void adapt(bool adapts) { adapts_ = adapts; }

  // Give each member a core of its own, `cpus[size]`; the first one's is that of the thread that calls `run`.
  // Returns 0 or the system's error number.
  int pin(const int32_t* cpus);

  // From now on the first share of the last member but the first is taken by nobody, and a run that cuts a stage for
  // two members does not end.
  void lose_share() {
    loses_share_ = true;
    adapts_ = false;
  }

 private:
  struct alignas(64) Seat {
    // Of the present stage: its number, how many of its shares are this member's, and how many of those are taken. Of
    // an earlier one, all of whose shares are taken, if this member has none.
    std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<uint32_t> is_asleep{0};
  };

  void loop(int64_t member);
  void open(int64_t stage);
  void announce(int64_t stage);
  bool take(int64_t member, Share& share);
  void compute_what_there_is(int64_t member);
  void wait(int64_t member, int64_t seen);
  template <class Condition>
  void sleep(int64_t member, const Condition& condition);
  void end();

  std::vector<Seat> seats_;
  std::vector<std::thread> threads_;
  Sizing sizing_;
  bool adapts_ = false;
  bool loses_share_ = false;
  int32_t caller_cpu_ = -1;  // where the thread that calls `run` is to stay; -1: anywhere
  std::thread::id pinned_;   // the thread that stays there
  std::atomic<bool> is_over_{false};
  std::atomic<int64_t> run_size_{0};
  std::atomic<int64_t> run_{0};  // the number of the present or last run
  // Who has taken a share may read these two.
  Job* job_ = nullptr;
  Cut cut_;                                       // of the present stage
  alignas(64) std::atomic<int64_t> num_left_{0};  // shares of the present stage that are not done
  // The present stage. Stages are numbered through all runs; after each run comes one without shares.
  alignas(64) std::atomic<int64_t> stage_{0};
  std::atomic<int64_t> end_stage_{0};  // that of the last run that has ended
  alignas(64) std::atomic<int64_t> num_asleep_{0};
  alignas(64) std::atomic<int64_t> waited_{0};  // nanoseconds of long waits in this run, of all members
};

}  // namespace naiad
