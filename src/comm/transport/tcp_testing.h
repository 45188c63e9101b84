// Worlds over TCP whose ranks are threads of a test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport/reserved_port_testing.h"
#include "comm/transport/tcp.h"
#include "core/error.h"

namespace moebius {

// The end of each rank of a world: its error, and what it reported.
struct Ends {
  std::vector<std::string> errors, reports;
  std::vector<int> kinds;  // kinds of the errors; 0: no error
};

// Runs the ranks of a world over TCP as threads of this process.
inline Ends run_world(int size, const RankBody& body, const std::function<void(TcpOptions&)>& change = {}) {
  Ends ends{.errors = std::vector<std::string>(size),
            .reports = std::vector<std::string>(size),
            .kinds = std::vector<int>(size)};
  const ReservedPort port;  // rank 0 will listen there
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      TcpOptions options;
      options.world = {.timeout_s = 20, .coordinates = [](int q) { return fmt::format("dp {}", q); }};
      options.grace_s = 0.2;
      options.rank = r;
      options.size = size;
      options.master = {.host = "localhost", .port = port.number()};
      options.report = [&, r](const std::string& text) { ends.reports[r] += text; };
      if (change) change(options);
      try {
        run_tcp(options, body);
      } catch (const Error& e) {
        ends.errors[r] = e.what();
        ends.kinds[r] = static_cast<int>(e.kind());
      }
    });
  }
  threads.clear();  // joins
  return ends;
}

struct Member {
  explicit Member(Transport& transport) : rank(transport.rank()), size(transport.size()) {
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    world = transport.make_group("world", all);
    other = transport.make_group("other", all);
  }
  int rank, size;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  std::unique_ptr<Group> world, other;
};

inline void expect_all_well(const Ends& ends) {
  for (size_t r = 0; r < ends.errors.size(); ++r) {
    EXPECT_EQ(ends.kinds[r], 0) << ends.errors[r];
    EXPECT_EQ(ends.reports[r], "");
  }
}

}  // namespace moebius
