// A world of threads ends when one of its ranks fails; these are its ways to end.
// The results of its collectives are tested over every transport in tests/distributed.
#include "comm/transport/threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>

namespace moebius {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Rank {
  explicit Rank(Transport& transport) : transport(transport), rank(transport.rank()) {
    std::vector<int> all(transport.size());
    std::iota(all.begin(), all.end(), 0);
    world = transport.make_group("world", all);
  }
  // Does not join any collective until another rank has failed.
  void stall() {
    while (*num_failed == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void all_reduce(int64_t n = 3) { world->all_reduce_sum(s, tensor_of(x.data(), {n})); }

  Transport& transport;
  int rank;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  std::vector<float> x = std::vector<float>(16);
  std::unique_ptr<Group> world;
  const std::atomic<int>* num_failed = nullptr;
};

struct Ended {
  ErrorKind kind = ErrorKind::internal;
  std::string text = "no error";        // of run_threads' error
  std::vector<std::string> rank_texts;  // of the ranks' errors
};

// A timeout that a loaded machine keeps when no rank stalls.
constexpr double kShort = 1;

// timeout_s is short where a test waits for it, and long where something else must end
// the run first.
Ended run(int num_ranks, double timeout_s, const std::function<void(Rank&)>& body) {
  Ended ended;
  std::atomic<int> num_failed = 0;
  ended.rank_texts.resize(num_ranks);
  try {
    run_threads(num_ranks, {.timeout_s = timeout_s, .coordinates = [](int r) { return fmt::format("dp {}", r); }},
                [&](Transport& transport) {
                  try {
                    Rank r(transport);
                    r.num_failed = &num_failed;
                    body(r);
                  } catch (const Error& e) {
                    ended.rank_texts[transport.rank()] = e.what();
                    ++num_failed;
                    throw;
                  }
                });
  } catch (const Error& e) {
    ended.kind = e.kind();
    ended.text = e.what();
  }
  return ended;
}

TEST(Threads, RunEveryRankOnce) {
  std::vector<int> seen(5);
  run_threads(5, {}, [&](Transport& transport) {
    EXPECT_EQ(transport.size(), 5);
    ++seen[transport.rank()];
  });
  EXPECT_THAT(seen, testing::Each(1));
  EXPECT_EQ(run(0, 60, [](Rank&) {}).text, "threads: a world has from 1 to 1024 ranks; got 0");
}

TEST(Threads, ARankThatThrowsEndsTheOthers) {
  const Ended ended = run(3, 60, [](Rank& r) {
    r.world->barrier();
    if (r.rank == 1) MOEBIUS_FAIL(numerics, "the loss is not a number");
    r.all_reduce();
  });
  EXPECT_EQ(ended.kind, ErrorKind::numerics);
  EXPECT_EQ(ended.text, "rank 1 (dp 1): the loss is not a number");
  EXPECT_THAT(ended.rank_texts[0],
              AllOf(HasSubstr("all_reduce_sum 1 of group world (f32 x 3): rank 0 (dp 0) is ended, because the run has "
                              "failed: rank 1 (dp 1) threw: the loss is not a number\n"),
                    HasSubstr("its last collectives:\n  barrier 0 of group world (u8 x 0)\n")));
}

// An error that every rank has, such as a wrong recipe, names no rank.
// This holds even when the first rank has failed while others are still in the barrier.
TEST(Threads, AnErrorOfEveryRankNamesNoRank) {
  for (int times = 0; times < 20; ++times) {
    const Ended ended = run(8, 60, [](Rank& r) {
      r.world->barrier();
      MOEBIUS_FAIL(usage, "this recipe is wrong on every rank");
    });
    EXPECT_EQ(ended.kind, ErrorKind::usage);
    EXPECT_EQ(ended.text, "this recipe is wrong on every rank");
  }
  const Ended ended = run(2, 60, [](Rank& r) { MOEBIUS_FAIL(input, "file {} does not exist", r.rank); });
  EXPECT_THAT(ended.text, testing::MatchesRegex("rank ([01]) \\(dp [01]\\): file [01] does not exist"));
}

TEST(Threads, AnyExceptionIsRethrown) {
  const auto body = [](Transport& transport) {
    Rank r(transport);
    if (r.rank == 0) throw std::out_of_range("of a container");
    r.world->barrier();
  };
  EXPECT_THROW(run_threads(2, {.timeout_s = 60}, body), std::out_of_range);
}

TEST(Threads, ARankThatStallsIsNamedWithTheCollective) {
  const Ended ended = run(3, kShort, [](Rank& r) {
    r.world->barrier();
    if (r.rank == 2) r.stall();
    r.all_reduce();
  });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text, AllOf(HasSubstr("all_reduce_sum 1 of group world (f32 x 3): rank "),
                                HasSubstr("has waited for 1 s; did not join: rank 2 (dp 2)\n"),
                                HasSubstr("rank 2 (dp 2) is in no collective; its last collectives:\n"
                                          "  barrier 0 of group world (u8 x 0)\n"),
                                HasSubstr("  all_reduce_sum 1 of group world (f32 x 3): not ended\n")));
  for (const std::string& text : ended.rank_texts) EXPECT_THAT(text, HasSubstr("did not join: rank 2 (dp 2)"));
}

// A pipeline's receives are like this: many collectives begin before a rank waits for them.
TEST(Threads, ACollectiveThatBeganLongAgoIsNamed) {
  const Ended ended = run(3, kShort, [](Rank& r) {
    std::unique_ptr<Group> pair = r.rank < 2 ? r.transport.make_group("pair", {0, 1}) : nullptr;
    if (r.rank == 2) r.stall();
    Pending from = r.world->recv(r.s, tensor_of(r.x.data(), {5}), 2);
    for (int64_t i = 0; i < 2 * CollectiveFlightRecorder::kSize; ++i) pair->barrier();
    from.wait();
  });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text, AllOf(HasSubstr("recv 0 of group world (f32 x 5): rank "),
                                HasSubstr("has waited for 1 s; did not join: rank 2 (dp 2)\n"),
                                HasSubstr("  recv 0 of group world (f32 x 5): not ended\n")));
}

// Rank 0 waits for 1, and 1 for 2, which sleeps: 2 is to blame, whichever rank reports first.
TEST(Threads, TheRankAtTheEndOfTheChainIsNamed) {
  const Ended ended = run(3, kShort, [](Rank& r) {
    const auto pair = [&](int a, int b) {
      if (r.rank != a && r.rank != b) return;
      r.transport.make_group("pair", {a, b})->barrier();
    };
    if (r.rank == 2) r.stall();
    pair(1, 2);
    pair(0, 1);
    r.world->barrier();
  });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text, HasSubstr("did not join: rank 2 (dp 2)\n"));
}

TEST(Threads, RanksThatWaitForEachOtherShowBothCollectives) {
  const Ended ended = run(2, kShort, [](Rank& r) {
    std::unique_ptr<Group> first = r.transport.make_group("first", {0, 1});
    std::unique_ptr<Group> second = r.transport.make_group("second", {0, 1});
    (r.rank == 0 ? first : second)->barrier();
  });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text,
              AllOf(HasSubstr("is in barrier 0 of group first"), HasSubstr("is in barrier 0 of group second")));
}

TEST(Threads, ARankThatEndsIsFoundAtOnce) {
  const Ended ended = run(2, 60, [](Rank& r) {
    if (r.rank == 0) r.all_reduce();
  });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text,
              AllOf(HasSubstr("rank 0 (dp 0) waits for a rank that has ended its work; did not join: rank 1"),
                    HasSubstr("rank 1 (dp 1) has ended its work"), Not(HasSubstr("has waited"))));
}

TEST(Threads, SizesThatDisagreeAreFound) {
  const Ended ended = run(2, 60, [](Rank& r) { r.world->broadcast(r.s, tensor_of(r.x.data(), {3 + r.rank}), 0); });
  EXPECT_EQ(ended.kind, ErrorKind::distributed);
  EXPECT_THAT(ended.text, AllOf(HasSubstr("broadcast 0 of group world"), HasSubstr("12"), HasSubstr("16"),
                                HasSubstr("the ranks disagree about a shape or count")));
}

TEST(Threads, ADestroyedSendIsWithdrawn) {
  const Ended ended = run(2, 60, [](Rank& r) {
    if (r.rank == 0) {
      const std::vector<float> gone(4, 1);
      Pending pending = r.world->send(r.s, tensor_of(const_cast<float*>(gone.data()), {4}), 1);
      MOEBIUS_FAIL(io, "the disk is full");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    r.world->recv(r.s, tensor_of(r.x.data(), {4}), 0).wait();
  });
  EXPECT_EQ(ended.kind, ErrorKind::io);
  EXPECT_THAT(ended.rank_texts[1], HasSubstr("recv 0 of group world (f32 x 4): rank 1 (dp 1) is ended"));
}

TEST(Threads, TwoWorldsFitInOneProcess) {
  const auto body = [](Transport& transport) {
    Rank r(transport);
    r.x[0] = 1;
    for (int i = 0; i < 10; ++i) r.all_reduce(1);
    EXPECT_EQ(r.x[0], std::pow(transport.size(), 10));
  };
  std::jthread other([&] { run_threads(3, {}, body); });
  run_threads(2, {}, body);
}

}  // namespace
}  // namespace moebius
