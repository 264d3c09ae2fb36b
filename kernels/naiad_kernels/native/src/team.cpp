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

// A wait of so many spins, a few microseconds, is worth a look at the clock.
constexpr int kSpinsOfShortWait = 200;
// A member that has waited so long within a run sleeps: longer than most shares take, and shorter than the time that
// the system gives to another program on a core, which may be what the others are waiting for.
constexpr std::chrono::microseconds kPatience(50);
// A member sleeps when no run has come for this long: longer than what lies between two steps, because waking takes as
// long as that.
constexpr std::chrono::milliseconds kWakefulness(3);
// A core that is offered to other programs is back sooner than this if none wants it.
constexpr std::chrono::microseconds kOffer(20);
// Of how many others a member takes shares, so that large teams do not look into each other's seats all the time.
constexpr int64_t kMostHelped = 3;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int64_t nanoseconds_since(Clock::time_point start) { return std::chrono::nanoseconds(Clock::now() - start).count(); }

// Whether the condition holds within some microseconds.
template <class Condition>
bool holds_soon(const Condition& condition) {
  for (int spins = 0; spins < kSpinsOfShortWait; spins++) {
    if (condition()) return true;
    pause();
  }
  return false;
}

// Let other programs have the core, if one wants it. Returns whether one did.
bool is_core_wanted() {
  const auto start = Clock::now();
  sched_yield();
  return Clock::now() - start > kOffer;
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

// A member's shares of a stage as one word, so that taking one and learning of which stage it is are one operation.
// Members that come too late count on beyond the number of shares, each at most once.
struct Ticket {
  static constexpr int kTakenBits = 12, kCountBits = 4;
  static_assert(kMostSharesPerMember < 1 << kCountBits, "a count fits");

  static uint64_t of(int64_t stage, int64_t count, int64_t taken) {
    return (static_cast<uint64_t>(stage) << kCountBits | static_cast<uint64_t>(count)) << kTakenBits |
           static_cast<uint64_t>(taken);
  }
  explicit Ticket(uint64_t word)
      : taken(word & ((1u << kTakenBits) - 1)),
        count(word >> kTakenBits & ((1u << kCountBits) - 1)),
        stage(word >> (kTakenBits + kCountBits)) {}

  bool has_more() const { return taken < count; }

  const uint64_t taken, count, stage;
};

}  // namespace

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
  run_size_.store(static_cast<int64_t>(seats_.size()));
  announce(stage_.load() + 1);
  for (std::thread& thread : threads_) thread.join();
}

int Team::pin(const int32_t* cpus) {
  for (size_t index = 0; index < threads_.size(); index++)
    if (const int error = pin_thread(threads_[index].native_handle(), cpus[index + 1])) return error;
  caller_cpu_ = cpus[0];
  return 0;
}

void Team::run(Job& job) {
  if (caller_cpu_ >= 0 && pinned_ != std::this_thread::get_id()) {
    // Cores that may not be used have been refused; if one was taken away since, the thread stays where it is.
    pin_thread(pthread_self(), caller_cpu_);
    pinned_ = std::this_thread::get_id();
  }
  const auto start = Clock::now();
  job_ = &job;
  run_.fetch_add(1);
  run_size_.store(size());
  open(stage_.load(std::memory_order_relaxed) + 1);
  for (;;) {
    const int64_t seen = stage_.load();
    if (seen == end_stage_.load(std::memory_order_relaxed)) break;
    compute_what_there_is(0);
    wait(0, seen);
  }
  const int64_t waited = waited_.exchange(0, std::memory_order_relaxed);
  if (adapts_) sizing_.add(nanoseconds_since(start), waited);
}

// Go on to the job's next stage, or end the run. One thread at a time begins with this: the one that begins the run, or
// the one that has computed the last share of the stage before. Once members can take all shares they may be through
// with the stage, and others, before this returns.
void Team::open(int64_t stage) {
  if (!job_->next(cut_)) {
    end_stage_.store(stage, std::memory_order_relaxed);
    return announce(stage);
  }
  const Cut cut = cut_;
  num_left_.store(cut.num_shares(), std::memory_order_relaxed);
  for (int64_t member = 0; member < cut.num_members; member++) {
    const bool is_lost = loses_share_ && member > 0 && member + 1 == cut.num_members;
    const uint64_t ticket = Ticket::of(stage, cut.shares_per_member, is_lost ? 1 : 0);
    seats_[static_cast<size_t>(member)].ticket.store(ticket, std::memory_order_release);
  }
  announce(stage);
}

// Let those who wait know that there is a new stage, unless there is a newer one.
void Team::announce(int64_t stage) {
  int64_t present = stage_.load();
  while (present < stage && !stage_.compare_exchange_weak(present, stage)) {
  }
  if (num_asleep_.load() == 0) return;
  for (int64_t member = 0; member < run_size_.load(std::memory_order_relaxed); member++) {
    std::atomic<uint32_t>& is_asleep = seats_[static_cast<size_t>(member)].is_asleep;
    if (is_asleep.load() && is_asleep.exchange(0)) futex(is_asleep, FUTEX_WAKE, 1);
  }
}

// Take a share that nobody has: one of the member's own, else of those after it, of which the first follows the last.
bool Team::take(int64_t member, Share& share) {
  const int64_t size = std::max<int64_t>(1, run_size_.load(std::memory_order_relaxed));
  for (int64_t distance = 0; distance < std::min(size, 1 + kMostHelped); distance++) {
    const int64_t owner = (member + distance) % size;
    std::atomic<uint64_t>& word = seats_[static_cast<size_t>(owner)].ticket;
    if (!Ticket(word.load(std::memory_order_relaxed)).has_more()) continue;
    const Ticket ticket(word.fetch_add(1, std::memory_order_acq_rel));
    if (!ticket.has_more()) continue;
    const int64_t index = owner * cut_.shares_per_member + static_cast<int64_t>(ticket.taken);
    share = {index, cut_, member, static_cast<int64_t>(ticket.stage)};
    return true;
  }
  return false;
}

// Take shares and compute them until there are none. All that are taken before others have to know are of one stage.
void Team::compute_what_there_is(int64_t member) {
  Share share;
  for (;;) {
    int64_t num_done = 0;
    for (; take(member, share); num_done++) job_->compute(share);
    // Who is not the last one finds a new stage by its number.
    if (num_done == 0 || num_left_.fetch_sub(num_done, std::memory_order_acq_rel) != num_done) return;
    open(share.stage + 1);
  }
}

// Wait until there may be something to take for a member that has seen that stage.
void Team::wait(int64_t member, int64_t seen) {
  const auto is_called = [&] {
    return is_over_.load() || (stage_.load() != seen && member < run_size_.load(std::memory_order_relaxed));
  };
  if (holds_soon(is_called)) return;
  const auto start = Clock::now();
  // A member may be away from its core for so long that there is another run when it has waited.
  const int64_t run = run_.load();
  const bool is_in_run = seen != end_stage_.load() && member < run_size_.load();
  // Within a run the core is not offered: the system would give it to another program for longer than a stage takes.
  while (!holds_soon(is_called)) {
    const auto waited = Clock::now() - start;
    if (is_in_run ? waited > kPatience : waited > kWakefulness || is_core_wanted()) sleep(member, is_called);
  }
  if (is_in_run && run == run_.load()) waited_.fetch_add(nanoseconds_since(start), std::memory_order_relaxed);
}

// Sleep until the condition may hold.
template <class Condition>
void Team::sleep(int64_t member, const Condition& condition) {
  std::atomic<uint32_t>& is_asleep = seats_[static_cast<size_t>(member)].is_asleep;
  is_asleep.store(1);
  num_asleep_.fetch_add(1);
  // Whoever changes what the condition looks at looks for sleepers afterwards.
  if (!condition()) futex(is_asleep, FUTEX_WAIT, 1);
  is_asleep.store(0);
  num_asleep_.fetch_sub(1);
}

void Team::loop(int64_t member) {
  while (!is_over_.load()) {
    const int64_t seen = stage_.load();
    if (member < run_size_.load(std::memory_order_relaxed)) compute_what_there_is(member);
    wait(member, seen);
  }
}

}  // namespace naiad
