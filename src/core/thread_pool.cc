#include "core/thread_pool.h"

#include <immintrin.h>
#include <omp.h>

#include <system_error>

#include "core/error.h"

namespace moebius {
namespace {

// The ops of a training step follow each other within microseconds;
// waking a sleeping worker costs about 50 us.
// A spin is a pause of some 60 ns: after a quarter of a millisecond the worker frees its
// core and sleeps.
constexpr int kSpins = 4000;

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  MOEBIUS_CHECK(usage, num_threads >= 1 && num_threads <= 1024, "run.threads must be between 1 and 1024; got {}",
                num_threads);
  try {
    for (int worker = 1; worker < num_threads; ++worker) threads_.emplace_back([this, worker] { work(worker); });
  } catch (const std::system_error& e) {
    const int num_started = size();
    stop();  // the destructor does not run after an exception of the constructor
    MOEBIUS_FAIL(usage,
                 "run.threads: {} threads were requested, but only {} could be started: {}; set run.threads lower, or "
                 "raise the limits on processes and memory (ulimit -u, ulimit -v)",
                 num_threads, num_started, e.what());
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& t : threads_) t.join();
}

void ThreadPool::run(int64_t num_tasks, TaskRef fn) {
  if (num_tasks <= 0) return;
  // Libraries called from a task must not start teams of their own. This setting is per thread.
  omp_set_num_threads(1);
  if (num_tasks == 1 || threads_.empty()) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, 0);
    return;
  }
  fn_ = &fn;
  num_tasks_ = num_tasks;
  next_task_ = 0;
  loop_ = (loop_ / kNextLoop + 1) * kNextLoop;  // the loop is open, with no worker inside
  if (num_sleeping_ > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  take_tasks(0);
  loop_ |= kClosed;
  for (int i = 0; (loop_ & kInside) != 0; ++i) {
    if (i < kSpins)
      _mm_pause();
    else
      std::this_thread::yield();  // there may be more threads than cores
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::take_tasks(int worker) {
  try {
    for (;;) {
      const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) return;
      (*fn_)(task, worker);
    }
  } catch (...) {
    next_task_ = num_tasks_;
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

bool ThreadPool::enter(uint64_t& seen) {
  uint64_t now = loop_;
  while (now / kNextLoop != seen) {
    if (now & kClosed) {
      seen = now / kNextLoop;  // this loop has already ended
      return false;
    }
    if (loop_.compare_exchange_weak(now, now + 1)) {
      seen = now / kNextLoop;
      return true;
    }
  }
  return false;
}

void ThreadPool::sleep_until_news(uint64_t seen) {
  std::unique_lock lock(mutex_);
  // The counter goes up before the check: either this worker sees the new loop, or run()
  // sees a sleeper.
  ++num_sleeping_;
  wake_.wait(lock, [&] { return stop_ || loop_ / kNextLoop != seen; });
  --num_sleeping_;
}

void ThreadPool::work(int worker) {
  omp_set_num_threads(1);
  uint64_t seen = 0;
  int spins = 0;
  while (!stop_) {
    if (enter(seen)) {
      take_tasks(worker);
      --loop_;
      spins = 0;
    } else if (++spins < kSpins) {
      _mm_pause();
    } else {
      sleep_until_news(seen);
      spins = 0;
    }
  }
}

}  // namespace moebius
