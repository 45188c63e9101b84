// Rounds over windows in memory that ranks share, between threads and between processes.
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "comm/peer_window.h"
#include "io/testing.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

// A rank and its window: control bytes, then an i64 for each rank and each of two turns.
struct WindowRank : Rank {
  explicit WindowRank(Transport& transport)
      : Rank(transport),
        control(PeerWindow::control_bytes(size)),
        memory(DeviceKind::cpu, kBefore + control + 2 * size * 8),
        window{.data = static_cast<std::byte*>(memory.data()) + kBefore,
               .shape = {control + 2 * size * 8},
               .dtype = DType::u8},
        peers(s, *world, memory, window) {}
  // Returns the numbers of a turn that the ranks wrote to rank r.
  int64_t* at(int r, int turn) {
    auto* base = reinterpret_cast<std::byte*>(peers.bases_W().ptr<int64_t>()[r]);
    return reinterpret_cast<int64_t*>(base + control) + turn * size;
  }

  static constexpr int64_t kBefore = 512;  // other memory of this rank
  int64_t control;
  PeerMemory memory;
  Tensor window;
  PeerWindow peers;
};

class PeerWindows : public Ranks {};
MOEBIUS_ON_RANKS(PeerWindows);

// Every rank writes to all others, and reads after the round what they wrote. Turns change places, so that one round
// a turn is enough.
TEST_P(PeerWindows, WritesBeforeARoundAreVisibleAfterIt) {
  run([](Transport& transport) {
    WindowRank r(transport);
    const RoundPlace place{.phase = "turn", .layer = "none"};
    for (int64_t turn = 0; turn < 300; ++turn) {
      for (int q = 0; q < r.size; ++q) r.at(q, turn % 2)[r.rank] = 1000 * turn + 10 * r.rank + q;
      r.peers.round(r.s, place);
      for (int q = 0; q < r.size; ++q) ASSERT_EQ(r.at(r.rank, turn % 2)[q], 1000 * turn + 10 * q + r.rank);
    }
    r.peers.round(r.s, place);
  });
}

// All ranks of a test are on one machine. Groups of one rank have nothing to reach.
TEST_P(PeerWindows, RanksOfAMachineReachEachOther) {
  run([](Transport& transport) {
    Rank r(transport);
    const std::unique_ptr<Group> alone = transport.make_group("alone", {r.rank});
    EXPECT_EQ(why_no_peer_access(r.s, *r.world, *r.world), "");
    EXPECT_EQ(why_no_peer_access(r.s, *alone, *r.world), "");
  });
}

// The limit of file sizes holds for files in memory too. So the ranks send messages instead, and say why.
TEST(PeerWindow, RanksThatCannotMakeMemoryReportIt) {
  if (process_world() != nullptr) GTEST_SKIP() << "the limit is set for the ranks of this process";
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 1000, before.rlim_max };
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<std::string> why(2);
  EXPECT_NO_THROW(run_threads(2, test_world(), [&](Transport& transport) {
    Rank r(transport);
    why[static_cast<size_t>(r.rank)] = why_no_peer_access(r.s, *r.world, *r.world);
  }));
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(why[0],
            "rank 0 cannot make memory for other ranks: peer memory: a file of 2097152 bytes in memory cannot be made: "
            "File too large; raise the limit of file sizes of this process (ulimit -f)");
  EXPECT_EQ(why[1], why[0]);
}

TEST(PeerWindow, ARankThatThrowsEndsTheOthers) {
  if (process_world() != nullptr) GTEST_SKIP() << "failing_rank does this in processes";
  const auto body = [](Transport& transport) {
    WindowRank r(transport);
    r.peers.round(r.s, {.phase = "dispatch", .layer = "layer 3"});
    if (r.rank == 1) MOEBIUS_FAIL(numerics, "the loss is not a number");
    try {
      r.peers.round(r.s, {.phase = "dispatch", .layer = "layer 3"});
      ADD_FAILURE() << "rank 1 never came";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::distributed);
      const std::string text = e.what();
      EXPECT_EQ(text.find(fmt::format("dispatch of layer 3: rank {} waits for rank ", r.rank)), 0u) << text;
      EXPECT_NE(text.find(": round 2 of group world is expected of it, and 1 was seen; "), text.npos) << text;
      EXPECT_NE(text.find("rank 1 threw: the loss is not a number"), text.npos) << text;
      throw;
    }
  };
  expect_error(ErrorKind::numerics, "rank 1: the loss is not a number", [&] { run_threads(3, test_world(), body); });
}

TEST(PeerWindow, ARankThatStallsIsNamedWithPhaseLayerAndRounds) {
  if (process_world() != nullptr) GTEST_SKIP() << "failing_rank does this in processes";
  const auto body = [](Transport& transport) {
    WindowRank r(transport);
    r.peers.round(r.s, {.phase = "dispatch", .layer = "layer 3"});
    if (r.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
    r.peers.round(r.s, {.phase = "combine", .layer = "layer 3"});
  };
  expect_error(
      ErrorKind::distributed,
      "combine of layer 3: rank 0 (dp 0) has waited for 0.5 s for rank 1 (dp 1), which has not come: round 2 of "
      "group world is expected of it, and 1 was seen",
      [&] { run_threads(2, {.timeout_s = 0.5, .coordinates = [](int r) { return fmt::format("dp {}", r); }}, body); });
}

}  // namespace
}  // namespace moebius
