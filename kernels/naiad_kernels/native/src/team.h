// A team of threads that compute one step together, and the barrier between a step's records.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

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

  const int64_t index, size;

 private:
  Team& team_;
  int phase_ = 0;
};

// Threads that stay. The one that calls `run` is the first member; the others spin for a moment after a run
// and then sleep until the next one.
class Team {
 public:
  explicit Team(int64_t size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Let every member call `work`; returns when all have.
  void run(const std::function<void(Member&)>& work);

  int64_t size() const { return size_; }

 private:
  friend class Member;
  void loop(int64_t index);
  void wake();
  void end();

  const int64_t size_;
  const std::function<void(Member&)>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> run_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_over_{false};
  alignas(64) std::atomic<int64_t> num_left_{0};
  alignas(64) std::atomic<int64_t> num_arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  std::vector<std::thread> threads_;
};

}  // namespace naiad
