// Processes a stream in several threads and keeps its order: items are written
// in the order in which they were read.
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

// Calls write(work(read())) until read() returns nothing.
// read() and write() run in the order of the stream, one at a time. work() runs in all threads at
// once. A thread holds one item.
// The first error in the order of the stream ends the work, after all results before it were written.
// run() throws that error.
//   std::optional<Item> read();   Result work(Item&&);   void write(Result&&);
template <class Read, class Work, class Write>
class OrderedWork {
 public:
  OrderedWork(Read read, Work work, Write write) : read_(read), work_(work), write_(write) {}

  void run(ThreadPool& pool) {
    pool.run(pool.size(), [&](int64_t, int) {
      while (one()) {
      }
    });
    if (failed_) std::rethrow_exception(failed_);
  }

 private:
  using Item = typename std::invoke_result_t<Read>::value_type;
  using Result = std::invoke_result_t<Work, Item&&>;
  struct Turn {
    int64_t number = -1;  // position in the stream; below 0 at its end
    std::optional<Item> item;
    std::exception_ptr error;
  };

  bool one() {
    Turn turn = read_next();
    if (turn.number < 0) return false;
    std::optional<Result> result;
    if (turn.item) {
      try {
        result.emplace(work_(std::move(*turn.item)));
      } catch (...) {
        turn.error = std::current_exception();
      }
    }
    return write_in_order(turn, std::move(result));
  }

  Turn read_next() {
    const std::lock_guard lock(reading_);
    Turn turn;
    if (ended_) return turn;
    try {
      turn.item = read_();
    } catch (...) {
      turn.error = std::current_exception();
    }
    ended_ = !turn.item;
    if (turn.item || turn.error) turn.number = num_read_++;
    return turn;
  }

  // Returns false when the stream has failed.
  bool write_in_order(const Turn& turn, std::optional<Result> result) {
    std::unique_lock lock(writing_);
    turn_.wait(lock, [&] { return num_written_ == turn.number; });
    if (!failed_) failed_ = turn.error;
    if (!failed_) {
      try {
        write_(std::move(*result));
      } catch (...) {
        failed_ = std::current_exception();
      }
    }
    ++num_written_;
    turn_.notify_all();
    return !failed_;
  }

  Read read_;
  Work work_;
  Write write_;
  std::mutex reading_;
  bool ended_ = false;
  int64_t num_read_ = 0;
  std::mutex writing_;
  std::condition_variable turn_;
  int64_t num_written_ = 0;
  std::exception_ptr failed_;
};

}  // namespace moebius
