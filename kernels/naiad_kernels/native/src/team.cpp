#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace naiad {
namespace {

using Clock = std::chrono::steady_clock;

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

int64_t nanoseconds_since(Clock::time_point start) { return std::chrono::nanoseconds(Clock::now() - start).count(); }

// Whether the condition holds within some microseconds.
template <class Condition>
bool holds_soon(const Condition& condition) {
  for (int spins = 0; spins < kSpinsBeforeYield; spins++) {
    if (condition()) return true;
    pause();
  }
  return false;
}

// Wait until the condition holds. Returns the nanoseconds that this took, or 0 for a short wait: those are many, and
// not worth a look at the clock.
template <class Condition>
int64_t wait_until(const Condition& condition) {
  if (holds_soon(condition)) return 0;
  const auto start = Clock::now();
  do sched_yield();
  while (!holds_soon(condition));
  return nanoseconds_since(start);
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex has 32 bits");
  return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

int pin_thread(pthread_t thread, int32_t cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return EINVAL;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  return pthread_setaffinity_np(thread, sizeof(cpus), &cpus);
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
  waited_ += wait_until([&] { return team_.phase_.load(std::memory_order_acquire) != phase; });
}

Team::Team(int64_t size) : seats_(static_cast<size_t>(size)), sizing_(size) {
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
  for (Seat& seat : seats_) call(seat);
  for (std::thread& thread : threads_) thread.join();
}

int Team::pin(const int32_t* cpus) {
  for (size_t index = 0; index < threads_.size(); index++)
    if (const int error = pin_thread(threads_[index].native_handle(), cpus[index + 1])) return error;
  caller_cpu_ = cpus[0];
  return 0;
}

void Team::lose_member() {
  lost_ = static_cast<int64_t>(seats_.size()) - 1;
  adapts_ = false;
}

void Team::run(const std::function<void(Member&)>& work) {
  if (caller_cpu_ >= 0 && pinned_ != std::this_thread::get_id()) {
    // Cores that may not be used have been refused; if one was taken away since, the thread stays where it is.
    pin_thread(pthread_self(), caller_cpu_);
    pinned_ = std::this_thread::get_id();
  }
  const int64_t size = this->size();
  work_ = &work;
  run_size_ = size;
  start_ = Clock::now();
  phase_.store(0, std::memory_order_relaxed);
  busy_.store(0, std::memory_order_relaxed);
  num_left_.store(size - 1, std::memory_order_relaxed);
  for (int64_t index = 1; index < size; index++) call(seats_[static_cast<size_t>(index)]);
  Member member(*this, 0, size);
  work(member);
  const int64_t busy = nanoseconds_since(start_) - member.waited();
  wait_until([&] { return num_left_.load(std::memory_order_acquire) == 0; });
  if (!adapts_) return;
  const int64_t elapsed = nanoseconds_since(start_);
  sizing_.add(elapsed, size * elapsed - busy - busy_.load(std::memory_order_relaxed));
}

void Team::call(Seat& seat) {
  seat.run.fetch_add(1, std::memory_order_seq_cst);
  if (seat.is_asleep.load(std::memory_order_seq_cst)) futex(seat.run, FUTEX_WAKE, 1);
}

void Team::await_run(Seat& seat, uint32_t seen) {
  const auto is_called = [&] { return seat.run.load(std::memory_order_seq_cst) != seen; };
  const auto start = Clock::now();
  while (!holds_soon(is_called)) {
    sched_yield();
    if (Clock::now() - start < kWakefulness) continue;
    seat.is_asleep.store(true, std::memory_order_seq_cst);
    while (!is_called()) futex(seat.run, FUTEX_WAIT, seen);
    seat.is_asleep.store(false, std::memory_order_relaxed);
  }
}

void Team::loop(int64_t index) {
  Seat& seat = seats_[static_cast<size_t>(index)];
  for (uint32_t seen = 0;; seen++) {
    await_run(seat, seen);
    if (is_over_.load()) return;
    while (index == lost_) ::pause();
    Member member(*this, index, run_size_);
    (*work_)(member);
    busy_.fetch_add(nanoseconds_since(start_) - member.waited(), std::memory_order_relaxed);
    num_left_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace naiad
