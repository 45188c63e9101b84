// Runs work on a stream in several threads and keeps the order of the stream: the item taken first
// is given first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/thread_pool.h"

namespace moebius {

// Repeats give(work(take())) until take() returns nothing.
// take() and give() run in the order of the stream, one at a time. work() runs in all threads at
// once. A thread holds one item.
// The first error in the order of the stream ends the work, after all results before it were given.
// run() throws that error.
//   std::optional<Item> take();   Result work(Item&&);   void give(Result&&);
template <class Take, class Work, class Give>
class OrderedWork {
 public:
  OrderedWork(Take take, Work work, Give give) : take_(take), work_(work), give_(give) {}

  void run(ThreadPool& pool) {
    pool.run(pool.size(), [&](int64_t, int) {
      while (one()) {
      }
    });
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  using Item = typename std::invoke_result_t<Take>::value_type;
  using Result = std::invoke_result_t<Work, Item&&>;
  struct Turn {
    int64_t number = -1;  // position in the stream; below 0 at its end
    std::optional<Item> item;
    std::exception_ptr error;
  };

  bool one() {
    Turn turn = take_next();
    if (turn.number < 0) return false;
    std::optional<Result> result;
    if (turn.item) {
      try {
        result.emplace(work_(std::move(*turn.item)));
      } catch (...) {
        turn.error = std::current_exception();
      }
    }
    return give_in_turn(turn, std::move(result));
  }

  Turn take_next() {
    const std::lock_guard lock(taking_);
    Turn turn;
    if (ended_) return turn;
    try {
      turn.item = take_();
    } catch (...) {
      turn.error = std::current_exception();
    }
    ended_ = !turn.item;
    if (turn.item || turn.error) turn.number = num_taken_++;
    return turn;
  }

  // Returns false when the stream has failed.
  bool give_in_turn(const Turn& turn, std::optional<Result> result) {
    std::unique_lock lock(giving_);
    turn_.wait(lock, [&] { return num_given_ == turn.number; });
    if (!failed_) failed_ = turn.error;
    if (!failed_) {
      try {
        give_(std::move(*result));
      } catch (...) {
        failed_ = std::current_exception();
      }
    }
    ++num_given_;
    turn_.notify_all();
    return !failed_;
  }

  Take take_;
  Work work_;
  Give give_;
  std::mutex taking_;
  bool ended_ = false;
  int64_t num_taken_ = 0;
  std::mutex giving_;
  std::condition_variable turn_;
  int64_t num_given_ = 0;
  std::exception_ptr failed_;
};

}  // namespace moebius
