// Runs one body over every transport: in threads of this process, or in the processes
// of a launcher.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "comm/transport/threads.h"

namespace moebius {

// Returns the timeout of a rank in a stalled test. It is far more than a loaded machine needs, and less
// than a test may take.
inline WorldOptions test_world() { return {.timeout_s = 60}; }

// Returns the world of processes that this one belongs to. It is null where threads are the ranks.
inline Transport*& process_world() {
  static Transport* world = nullptr;
  return world;
}

// Runs the body on num_ranks ranks, which are threads or the processes of process_world().
inline void run_ranks(int num_ranks, const RankBody& body) {
  if (process_world() == nullptr) return run_threads(num_ranks, test_world(), body);
  ASSERT_EQ(process_world()->size(), num_ranks);
  body(*process_world());
}

// A test of N ranks. It runs in processes only where a launcher started N of them
// (distributed/main.cc).
class Ranks : public ::testing::TestWithParam<int> {
 protected:
  static void run(const RankBody& body) { run_ranks(GetParam(), body); }
};

inline std::string name_of_ranks(const ::testing::TestParamInfo<int>& info) { return std::to_string(info.param); }
// Names are such as "Everywhere/Ranks.AllReduceSum/4".
#define MOEBIUS_ON_RANKS(suite) \
  INSTANTIATE_TEST_SUITE_P(Everywhere, suite, ::testing::Values(1, 2, 3, 4, 8), name_of_ranks)

// The things that a rank of a test has: a stream and the group of all ranks.
struct Rank {
  explicit Rank(Transport& transport) : transport(transport), rank(transport.rank()), size(transport.size()) {
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    world = transport.make_group("world", all);
  }
  Transport& transport;
  int rank, size;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  std::unique_ptr<Group> world;
};

template <class T>
Tensor as_tensor(std::vector<T>& x, int64_t columns = 1) {
  const Shape shape = columns == 1 ? Shape{std::ssize(x)} : Shape{std::ssize(x) / columns, columns};
  return tensor_of(x.data(), shape);
}

}  // namespace moebius
