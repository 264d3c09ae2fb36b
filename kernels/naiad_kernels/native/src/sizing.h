// How many members of a team compute.
#pragma once

#include <algorithm>
#include <cstdint>

namespace naiad {

// A program that shares a core with a member makes all others wait in every stage, and a smaller team is faster
// then. So a team whose members wait for too long gives up one of them, and tries after a rest whether it can have
// it back. Rests get longer while that fails. The rule knows no clock, only what it is told.
class Sizing {
 public:
  explicit Sizing(int64_t most) : most_(most), size_(most) {}

  // Members of the next run.
  int64_t size() const { return size_; }

  // A run of `size` members took `elapsed` nanoseconds, in which they waited `waited` for each other, all together.
  void add(int64_t elapsed, int64_t waited) {
    elapsed_ += elapsed;
    waited_ += waited;
    if (elapsed_ < kWindow) return;
    const bool waits = static_cast<double>(waited_) > kMostWaiting * static_cast<double>(size_ * elapsed_);
    judge(size_ > 1 && waits);
    elapsed_ = waited_ = 0;
  }

 private:
  static constexpr int64_t kMillisecond = 1'000'000;
  // Longer than the slices of time that the system gives to programs, so that one slice is no evidence.
  static constexpr int64_t kWindow = 100 * kMillisecond;
  // Of runs, not of the time between them.
  static constexpr int64_t kFirstRest = 500 * kMillisecond, kLongestRest = 4'000 * kMillisecond;
  static constexpr double kMostWaiting = 0.3;

  void judge(bool waits) {
    if (waits) {
      rest_ = is_trial_ ? std::min(2 * rest_, kLongestRest) : kFirstRest;
      rest_left_ = rest_;
      is_trial_ = false;
      size_--;
    } else if (is_trial_) {
      rest_ = rest_left_ = kFirstRest;
      is_trial_ = false;
    } else if (size_ < most_ && (rest_left_ -= elapsed_) <= 0) {
      is_trial_ = true;
      size_++;
    }
  }

  const int64_t most_;
  int64_t size_;
  int64_t elapsed_ = 0, waited_ = 0;  // of the window that has not ended
  int64_t rest_ = kFirstRest, rest_left_ = 0;
  bool is_trial_ = false;  // whether this window decides if the last member stays
};

}  // namespace naiad
