#include "comm/transport/tcp.h"

#include <atomic>
#include <thread>

#include "comm/transport/tcp_testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// The time that a rank's destructors need while an exception passes.
struct Slow {
  explicit Slow(int s) : seconds(s) {}
  ~Slow() { std::this_thread::sleep_for(std::chrono::seconds(seconds)); }
  Slow(const Slow&) = delete;
  int seconds;
};

Tensor tensor(std::vector<float>& x) { return tensor_of(x.data(), {std::ssize(x)}); }

// The two kinds of message: short in one frame, long after an offer.
// Either may come before or after its receive.
constexpr int64_t kShort = 7, kLong = 300'000;

TEST(Tcp, MessagesOfEveryLengthInEitherOrder) {
  for (const bool late_receive : {false, true}) {
    for (const int64_t n : {int64_t{0}, kShort, kLong}) {
      expect_all_well(run_world(3, [&](Transport& transport) {
        Member m(transport);
        const int to = (m.rank + 1) % 3, from = (m.rank + 2) % 3;
        std::vector<float> mine(n, static_cast<float>(m.rank)), theirs(n, -1), again(n, -1);
        Pending send = m.world->send(m.s, tensor(mine), to), second = m.world->send(m.s, tensor(mine), to);
        if (late_receive) m.world->barrier();
        Pending recv = m.world->recv(m.s, tensor(theirs), from);
        recv.wait();
        m.world->recv(m.s, tensor(again), from).wait();
        send.wait();
        second.wait();
        EXPECT_EQ(theirs, std::vector<float>(n, static_cast<float>(from)));
        EXPECT_EQ(again, theirs);
      }));
    }
  }
}

// A long message that is not received yet does not block others.
TEST(Tcp, ChannelsDoNotWaitForEachOther) {
  expect_all_well(run_world(2, [&](Transport& transport) {
    Member m(transport);
    std::vector<float> first(kLong, 1), second(kLong, 2), got(kLong);
    if (m.rank == 0) {
      Pending one = m.world->send(m.s, tensor(first), 1), two = m.other->send(m.s, tensor(second), 1);
      two.wait();
      one.wait();
    } else {
      m.other->recv(m.s, tensor(got), 0).wait();
      EXPECT_EQ(got, second);
      m.world->recv(m.s, tensor(got), 0).wait();
      EXPECT_EQ(got, first);
    }
  }));
}

// Neither rank is in a call of the group while the bytes move.
// One rank waits for a message that is larger than the sockets' buffers, and the other rank does
// other work until the message has arrived.
// Both directions are tested.
TEST(Tcp, MessagesMoveWhileTheRanksCompute) {
  for (const int busy : {0, 1}) {
    std::atomic<bool> has_moved = false;
    expect_all_well(run_world(2, [&](Transport& transport) {
      Member m(transport);
      std::vector<float> x(20 * kLong, static_cast<float>(m.rank));
      m.world->barrier();
      Pending message = m.rank == 0 ? m.world->send(m.s, tensor(x), 1) : m.world->recv(m.s, tensor(x), 0);
      const Deadline deadline = deadline_in(10);
      if (m.rank == busy) {
        while (!has_moved && milliseconds_until(deadline) > 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_TRUE(has_moved);
      }
      message.wait();
      if (m.rank != busy) has_moved = true;
      EXPECT_EQ(x, std::vector<float>(x.size()));
    }));
  }
}

TEST(Tcp, WithdrawnMessagesLeaveOthersIntact) {
  expect_all_well(run_world(2, [&](Transport& transport) {
    Member m(transport);
    for (const int64_t n : {kShort, kLong}) {
      std::vector<float> x(n, 3), y(n, 4);
      { const Pending withdrawn = m.rank == 0 ? m.other->send(m.s, tensor(x), 1) : m.other->recv(m.s, tensor(y), 0); }
      m.world->all_reduce_sum(m.s, tensor(x));
      EXPECT_EQ(x, std::vector<float>(n, 6));
    }
  }));
}

TEST(Tcp, AnErrorOfAllRanksIsReportedOnce) {
  // On a busy machine one rank may throw much later than another.
  const Ends ends = run_world(
      3, [](Transport&) { MOEBIUS_FAIL(usage, "this recipe is wrong"); }, [](TcpOptions& o) { o.grace_s = 10; });
  EXPECT_THAT(ends.errors, testing::ElementsAre("this recipe is wrong", "", ""));
  EXPECT_THAT(ends.kinds, testing::Each(2));
  EXPECT_THAT(ends.reports, testing::Each(""));
}

TEST(Tcp, ARankThatThrowsEndsTheOthers) {
  const Ends ends = run_world(3, [](Transport& transport) {
    Member m(transport);
    m.world->barrier();
    MOEBIUS_CHECK(numerics, m.rank != 1, "the loss is not a number");
    std::vector<float> x(kLong);
    m.world->all_reduce_sum(m.s, tensor(x));
  });
  EXPECT_THAT(ends.kinds, testing::Each(6));
  EXPECT_THAT(ends.errors, testing::Each(""));  // the reports have the texts
  EXPECT_THAT(ends.reports[1], HasSubstr("rank 1 (dp 1) threw, and others did not: the loss is not a number\n"));
  EXPECT_THAT(ends.reports[0], StartsWith("all_reduce_sum 1 of group world (f32 x 300000): rank 0 (dp 0) is ended, "
                                          "because rank 1 (dp 1) has ended the run: the loss is not a number"));
}

TEST(Tcp, ARankThatEndsEarlyEndsTheOthers) {
  const Ends ends = run_world(
      2,
      [](Transport& transport) {
        Member m(transport);
        if (m.rank == 1) m.world->barrier();
      },
      [](TcpOptions& o) { o.world.timeout_s = 1; });
  EXPECT_THAT(ends.kinds, testing::Each(6));
  EXPECT_THAT(ends.reports[1],
              StartsWith("barrier 0 of group world (u8 x 0): rank 1 (dp 1) has waited for 1 s; did not "
                         "join: rank 0 (dp 0)\n"));
}

TEST(Tcp, AStalledRankIsNamedAndEndsItselfWhenTheOthersHave) {
  std::atomic<bool> ended = false;
  const Ends ends = run_world(
      2,
      [&](Transport& transport) {
        Member m(transport);
        while (m.rank == 1 && !ended) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (m.rank == 0) m.world->barrier();
      },
      [&](TcpOptions& o) {
        o.world.timeout_s = 1;
        o.stall_s = 0.5;
        o.end_process = [&] { ended = true; };
      });
  EXPECT_THAT(ends.reports[0],
              StartsWith("barrier 0 of group world (u8 x 0): rank 0 (dp 0) has waited for 1 s; did not "
                         "join: rank 1 (dp 1)\nlast collectives of rank 0 (dp 0):\n"));
  EXPECT_THAT(ends.reports[1], StartsWith("rank 1 (dp 1) is ended: rank 0 (dp 0) has ended the run, and rank 1 (dp 1) "
                                          "has joined no collective for 0.5 s since\n"));
  EXPECT_TRUE(ended);
}

// Rank 0 waits for longer than the stall time, and then another rank fails.
// From then on rank 0 has the whole stall time again, to report and to run its destructors.
TEST(Tcp, ARankThatHasWaitedIsNotTakenForStalled) {
  std::atomic<bool> ended = false;
  const Ends ends = run_world(
      2,
      [](Transport& transport) {
        Member m(transport);
        const Slow slow(m.rank == 0 ? 1 : 0);
        if (m.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(3));
        MOEBIUS_CHECK(numerics, m.rank == 0, "the loss is not a number");
        m.world->barrier();
      },
      [&](TcpOptions& o) {
        o.stall_s = 2;
        o.end_process = [&] { ended = true; };
      });
  EXPECT_FALSE(ended);
  EXPECT_THAT(ends.reports[0], StartsWith("barrier 0 of group world (u8 x 0): rank 0 (dp 0) is ended, because rank 1 "
                                          "(dp 1) has ended the run: the loss is not a number"));
}

TEST(Tcp, SizesThatDisagreeAreFound) {
  for (const int64_t n : {kShort, kLong}) {
    const Ends ends = run_world(2, [&](Transport& transport) {
      Member m(transport);
      std::vector<float> x(n + m.rank);
      m.rank == 0 ? m.world->send(m.s, tensor(x), 1).wait() : m.world->recv(m.s, tensor(x), 0).wait();
      m.world->barrier();
    });
    EXPECT_THAT(ends.kinds, testing::Each(6));
    EXPECT_THAT(ends.reports[1],
                HasSubstr(fmt::format("rank 1 (dp 1) expects {} bytes from rank 0 (dp 0), which sends {}; the ranks "
                                      "disagree about a shape or count",
                                      4 * n + 4, 4 * n)));
  }
}

}  // namespace
}  // namespace moebius
