#include "team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace naiad {
namespace {

// A member that waits this long, some microseconds, lets other programs have the core.
constexpr int kSpinsBeforeYield = 200;
// A member sleeps when no run has come for this long: longer than what lies between two steps, because waking
// takes as long as that.
constexpr std::chrono::milliseconds kWakefulness(3);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex has 32 bits");
  return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void Member::barrier() {
  const int phase = phase_++;
  if (size == 1) return;
  if (team_.num_arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    team_.num_arrived_.store(0, std::memory_order_relaxed);
    team_.phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 1; team_.phase_.load(std::memory_order_acquire) == phase; spins++) {
    pause();
    if (spins % kSpinsBeforeYield == 0) sched_yield();
  }
}

Team::Team(int64_t size) : size_(size) {
  try {
    for (int64_t index = 1; index < size; index++) threads_.emplace_back([this, index] { loop(index); });
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  is_over_.store(true);
  run_.fetch_add(1);
  wake();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Member&)>& work) {
  work_ = &work;
  phase_.store(0, std::memory_order_relaxed);
  num_left_.store(size_ - 1, std::memory_order_relaxed);
  if (size_ > 1) {
    run_.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }
  Member member(*this, 0, size_);
  work(member);
  for (int spins = 1; num_left_.load(std::memory_order_acquire) != 0; spins++) {
    pause();
    if (spins % kSpinsBeforeYield == 0) sched_yield();
  }
}

void Team::wake() {
  if (num_asleep_.load(std::memory_order_seq_cst)) futex(run_, FUTEX_WAKE, INT_MAX);
}

void Team::loop(int64_t index) {
  uint32_t seen = 0;
  for (;;) {
    auto since = std::chrono::steady_clock::now();
    for (int spins = 1; run_.load(std::memory_order_seq_cst) == seen; spins++) {
      pause();
      if (spins % kSpinsBeforeYield != 0) continue;
      sched_yield();
      if (std::chrono::steady_clock::now() - since < kWakefulness) continue;
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      futex(run_, FUTEX_WAIT, seen);
      num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
      since = std::chrono::steady_clock::now();
    }
    seen++;
    if (is_over_.load()) return;
    Member member(*this, index, size_);
    (*work_)(member);
    num_left_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace naiad
