// A team of threads that compute one step together, and the barrier between a step's records.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "sizing.h"

namespace naiad {

class Team;

// One thread's place in a run of the team.
class Member {
 public:
  Member(Team& team, int64_t index, int64_t size) : index(index), size(size), team_(team) {}

  // Wait until every member is here.
  void barrier();

  // This member's part of `count` things: [first, end).
  void share(int64_t count, int64_t& first, int64_t& end) const {
    first = count * index / size;
    end = count * (index + 1) / size;
  }

  // Nanoseconds spent in long waits at barriers so far.
  int64_t waited() const { return waited_; }

  const int64_t index, size;

 private:
  Team& team_;
  int phase_ = 0;
  int64_t waited_ = 0;
};

// Threads that stay. The one that calls `run` is the first member; the others spin for a moment after a run
// and then sleep until their next one.
class Team {
 public:
  explicit Team(int64_t size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Let every member call `work`; returns when all have. The last members are left out if the team is smaller now.
  void run(const std::function<void(Member&)>& work);

  // Members of the next run.
  int64_t size() const { return adapts_ ? sizing_.size() : static_cast<int64_t>(seats_.size()); }

  // Whether runs have fewer members while other programs use their cores; at first they do not.
  void adapt(bool adapts) { adapts_ = adapts; }

  // Give each member a core of its own, `cpus[size]`; the first one's is that of the thread that calls `run`.
  // Returns 0 or the system's error number.
  int pin(const int32_t* cpus);

  // From now on the last member stays away, and the next run does not end.
  void lose_member();

 private:
  friend class Member;

  // What wakes a member: the number of runs that it was called to.
  struct alignas(64) Seat {
    std::atomic<uint32_t> run{0};
    std::atomic<bool> is_asleep{false};
  };

  void loop(int64_t index);
  void await_run(Seat& seat, uint32_t seen);
  void call(Seat& seat);
  void end();

  std::vector<Seat> seats_;
  std::vector<std::thread> threads_;
  Sizing sizing_;
  bool adapts_ = false;
  int32_t caller_cpu_ = -1;  // where the thread that calls `run` is to stay; -1: anywhere
  std::thread::id pinned_;   // the thread that stays there
  int64_t lost_ = -1;        // the member that stays away
  std::atomic<bool> is_over_{false};
  // Of the present run.
  const std::function<void(Member&)>* work_ = nullptr;
  int64_t run_size_ = 0;
  std::chrono::steady_clock::time_point start_;
  alignas(64) std::atomic<int64_t> num_left_{0};
  std::atomic<int64_t> busy_{0};  // nanoseconds that the members which have left did not wait
  alignas(64) std::atomic<int64_t> num_arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace naiad
