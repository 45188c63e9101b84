// A fixed team of threads that runs numbered tasks. Any thread may run any task.
// The result of a task must depend on its number alone: the CPU backend promises the same bits for any number of
// threads. So split work into pieces of fixed size, never into size() pieces.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moebius {

// A reference to a callable; it is valid only during the call that it is passed to.
class TaskRef {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef>)
      TaskRef(F&& f)  // NOLINT: implicit, so that lambdas read as arguments
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, int64_t task, int worker) { (*static_cast<std::remove_reference_t<F>*>(o))(task, worker); }) {
  }
  void operator()(int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int);
};

class ThreadPool {
 public:
  // num_threads >= 1 includes the calling thread.
  // Throws Error{usage} when the system does not allow that many.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs fn(task, worker) for every task in [0, num_tasks), with worker in [0, size()).
  // Returns when all are done. The first exception of a task is rethrown here.
  // Not reentrant: a task must not call run() of the same pool.
  void run(int64_t num_tasks, TaskRef fn);

 private:
  void stop();  // ends and joins the workers
  void work(int worker);
  void take_tasks(int worker);
  bool enter(uint64_t& seen);  // returns whether there is a new loop that this worker may join
  void sleep_until_news(uint64_t seen);

  // loop_ packs the number of the loop, whether it is closed to late workers, and the number of workers inside.
  // So a worker that the system does not schedule never delays a loop whose tasks are done.
  static constexpr uint64_t kInside = 0xffff, kClosed = 0x10000, kNextLoop = 0x20000;

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> loop_{kClosed};
  std::atomic<int> num_sleeping_{0};
  std::atomic<int64_t> next_task_{0};
  std::atomic<bool> stop_{false};
  int64_t num_tasks_ = 0;
  const TaskRef* fn_ = nullptr;
  std::exception_ptr error_;
};

// Calls fn(begin, end) for blocks of `grain` in [0, n): the usual loop over rows.
template <class F>
void parallel_rows(ThreadPool& pool, int64_t n, int64_t grain, F&& fn) {
  pool.run((n + grain - 1) / grain, [&](int64_t task, int) {
    const int64_t begin = task * grain;
    fn(begin, begin + grain < n ? begin + grain : n);
  });
}

}  // namespace moebius
