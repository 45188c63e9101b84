// A world over TCP begins as a star; other connections are made at their first use.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "comm/collective_levels.h"
#include "comm/transport/tcp_links.h"
#include "comm/transport/tcp_testing.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// --- connections ----------------------------------------------------------------------------------------------------

// The connections of each rank of a world.
class Counted {
 public:
  explicit Counted(int size) : of_(size) {}
  void add_to(TcpOptions& o) {
    o.connections = [this, r = o.rank](const TcpConnections& c) { of_[r] = c; };
  }
  int at_start(int rank) const { return of_[rank].at_start; }
  int at_end(int rank) const { return of_[rank].at_end; }

 private:
  std::vector<TcpConnections> of_;
};

void expect_star_at_start(const Counted& counted, int size) {
  for (int r = 0; r < size; ++r) EXPECT_EQ(counted.at_start(r), r == 0 ? size - 1 : 1) << r;
}

// Returns how many files this process may have open, after asking for as many as it may.
rlim_t raise_file_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

// The sums of 256 ranks go over levels of 8, 8 and 4, so a rank has 17 neighbours.
TEST(TcpStar, ARankOf256IsConnectedToItsNeighbours) {
  constexpr int kRanks = 256;
  constexpr rlim_t kFiles = 2 * (kRanks - 1) + 17 * kRanks + 5 * kRanks + 100;
  if (raise_file_limit() < kFiles) GTEST_SKIP() << "needs " << kFiles << " open files (ulimit -n)";
  Counted counted(kRanks);
  const CollectiveLevels levels(kRanks);
  expect_all_well(run_world(
      kRanks,
      [&](Transport& transport) {
        Member m(transport);
        std::vector<int64_t> x(1000, m.rank);
        m.world->all_reduce_sum(m.s, tensor_of(x.data(), {std::ssize(x)}));
        EXPECT_EQ(x, std::vector<int64_t>(x.size(), kRanks * (kRanks - 1) / 2));
      },
      [&](TcpOptions& o) {
        o.world.timeout_s = 300;
        o.grace_s = 60;
        counted.add_to(o);
      }));
  expect_star_at_start(counted, kRanks);
  for (int r = 1; r < kRanks; ++r) {
    std::set<int> connected{0};
    for (int level = 0; level < levels.count(); ++level)
      for (const int other : levels.members(r, level)) connected.insert(other);
    connected.erase(r);
    EXPECT_EQ(counted.at_end(r), std::ssize(connected)) << r;
    EXPECT_LE(counted.at_end(r), 18) << r;
  }
  EXPECT_EQ(counted.at_end(0), kRanks - 1);
}

// Both ends of each connection begin to use it at the same time, with messages of both kinds.
TEST(TcpStar, AllPairsMayBeginAtOnce) {
  constexpr int kRanks = 12;
  for (const int64_t n : {int64_t{1}, int64_t{40'000}}) {
    Counted counted(kRanks);
    expect_all_well(run_world(
        kRanks,
        [&](Transport& transport) {
          Member m(transport);
          const std::vector<int64_t> rows(kRanks, n);
          std::vector<float> in(kRanks * n, static_cast<float>(m.rank)), out(in.size(), -1);
          m.world->all_to_all_v(m.s, {.out = tensor_of(out.data(), {kRanks * n, 1}),
                                      .in = tensor_of(in.data(), {kRanks * n, 1}),
                                      .recv_rows = rows,
                                      .send_rows = rows});
          for (int64_t i = 0; i < std::ssize(out); ++i) ASSERT_EQ(out[i], static_cast<float>(i / n));
        },
        [&](TcpOptions& o) { counted.add_to(o); }));
    expect_star_at_start(counted, kRanks);
    for (int r = 0; r < kRanks; ++r) EXPECT_EQ(counted.at_end(r), kRanks - 1);
  }
}

// One of the two ranks computes all the time after it has posted its end: its connection is made meanwhile.
TEST(TcpStar, AConnectionIsMadeWhileARankComputes) {
  for (const int busy : {1, 2}) {
    std::atomic<bool> has_moved = false;
    expect_all_well(run_world(3, [&](Transport& transport) {
      Member m(transport);
      if (m.rank == 0) return;
      std::vector<float> x(300'000, static_cast<float>(m.rank));
      const Tensor x_N = tensor_of(x.data(), {std::ssize(x)});
      Pending message = m.rank == 1 ? m.world->send(m.s, x_N, 2) : m.world->recv(m.s, x_N, 1);
      const Deadline deadline = deadline_in(10);
      while (m.rank == busy && !has_moved && milliseconds_until(deadline) > 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      message.wait();
      if (m.rank != busy) has_moved = true;
      EXPECT_EQ(x[7], 1);
    }));
  }
}

TEST(TcpStar, AMessageWithdrawnBeforeItsConnectionLeavesOthersIntact) {
  expect_all_well(run_world(3, [&](Transport& transport) {
    Member m(transport);
    std::vector<float> x(7, 3), y(7, 4);
    const Tensor x_N = tensor_of(x.data(), {7}), y_N = tensor_of(y.data(), {7});
    if (m.rank == 1) {
      const Pending withdrawn = m.other->send(m.s, x_N, 2);
    }
    if (m.rank == 2) {
      const Pending withdrawn = m.other->recv(m.s, y_N, 1);
    }
    m.world->all_reduce_sum(m.s, x_N);
    EXPECT_EQ(x, std::vector<float>(7, 9));
  }));
}

// --- failures -------------------------------------------------------------------------------------------------------

// Ranks 1 and 2 wait for each other forever, and rank 3 has no connection to them.
TEST(TcpStar, RankZeroForwardsAFailure) {
  const auto begin = std::chrono::steady_clock::now();
  Counted counted(4);
  const Ends ends = run_world(
      4,
      [](Transport& transport) {
        Member m(transport);
        MOEBIUS_CHECK(numerics, m.rank != 3, "the loss is not a number");
        std::vector<float> x(1);
        if (m.rank == 0) m.world->barrier();
        m.world->recv(m.s, tensor_of(x.data(), {1}), 3 - m.rank).wait();
      },
      [&](TcpOptions& o) { counted.add_to(o); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "sooner than the timeout";
  EXPECT_THAT(ends.kinds, Each(6));
  for (const int r : {0, 1, 2})
    EXPECT_THAT(ends.reports[r], HasSubstr(fmt::format(
                                     "rank {0} (dp {0}) is ended, because rank 3 (dp 3) has ended the run: the loss is "
                                     "not a number",
                                     r)));
}

TEST(TcpStar, ARankThatNeverConnectsIsNamed) {
  const Ends ends = run_world(
      3,
      [](Transport& transport) {
        Member m(transport);
        std::vector<float> x(1);
        if (m.rank == 1) m.world->recv(m.s, tensor_of(x.data(), {1}), 2).wait();
        if (m.rank != 1) std::this_thread::sleep_for(std::chrono::seconds(6));
      },
      [](TcpOptions& o) { o.world.timeout_s = 3; });
  EXPECT_THAT(ends.kinds, Each(6));
  EXPECT_THAT(ends.reports[1], HasSubstr("rank 1 (dp 1) has waited for 3 s; did not join: rank 2 (dp 2); rank 2 (dp 2) "
                                         "has never connected to rank 1 (dp 1)\n"));
}

// The lower rank computes. Its connection is made, so nothing is wrong with the network.
TEST(TcpStar, NamesOnlyTheConnectedRankThatDoesNotJoin) {
  const Ends ends = run_world(
      3,
      [](Transport& transport) {
        Member m(transport);
        std::vector<float> x(1);
        if (m.rank == 2) m.world->recv(m.s, tensor_of(x.data(), {1}), 1).wait();
        if (m.rank != 2) std::this_thread::sleep_for(std::chrono::seconds(6));
      },
      [](TcpOptions& o) { o.world.timeout_s = 3; });
  EXPECT_THAT(ends.reports[2], AllOf(HasSubstr("rank 2 (dp 2) has waited for 3 s; did not join: rank 1 (dp 1)\n"),
                                     Not(HasSubstr("connect"))));
}

// Ranks of a world as TcpLinks alone, connected as at the start. Destroying one is the end of its process.
class Links {
 public:
  explicit Links(int size) {
    std::vector<std::vector<Socket>> sockets(size);
    for (auto& of_rank : sockets) of_rank.resize(size);
    for (int r = 1; r < size; ++r) {
      int pair[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
      sockets[0][r] = Socket(pair[0]);
      sockets[r][0] = Socket(pair[1]);
    }
    for (int r = 0; r < size; ++r) links.push_back(std::make_unique<TcpLinks>(r, std::move(sockets[r]), [](int) {}));
  }
  std::vector<std::unique_ptr<TcpLinks>> links;
};

// Rank 3 dies before it was ever connected to ranks 1 and 2. Rank 2 has posted a message to it; rank 0 computes.
TEST(TcpStar, ARankThatDiesBeforeItWasConnectedIsNamedEverywhere) {
  Links world(4);
  float x = 0;
  TcpEnd end{.peer = 3, .data = reinterpret_cast<std::byte*>(&x), .num_bytes = 4};
  world.links[2]->post(end);
  world.links[3].reset();
  for (const int r : {1, 2, 0}) {
    std::optional<int> failed;
    TcpLinks::Peer::State state{};
    EXPECT_TRUE(world.links[r]->move_until(10, [&] {
      failed = world.links[r]->first_failed();
      state = world.links[r]->peer(3).state;
      return failed.has_value();
    }));
    EXPECT_EQ(failed, 3);
    EXPECT_EQ(state, TcpLinks::Peer::State::lost);
  }
  world.links[2]->withdraw(end);
}

// The buffer of the connection is full several times while a message leaves, unless the receiver happens to be as fast.
TEST(TcpLinks, AConnectionThatWasFullHasARate) {
  Links world(2);
  std::vector<std::byte> sent(8 << 20), got(sent.size());
  LinkMeasurement measured;
  for (int i = 0; i < 100 && !measured.is_filled; ++i) {
    TcpEnd from{.peer = 1, .sends = true, .data = sent.data(), .num_bytes = std::ssize(sent)};
    TcpEnd to{.peer = 0, .data = got.data(), .num_bytes = std::ssize(got)};
    world.links[0]->post(from);
    world.links[1]->post(to);
    EXPECT_TRUE(world.links[0]->move_until(20, [&] { return from.state == TcpEnd::State::ended; }));
    EXPECT_TRUE(world.links[1]->move_until(20, [&] { return to.state == TcpEnd::State::ended; }));
    const std::vector<LinkMeasurement> all = world.links[0]->measurements();
    ASSERT_EQ(all.size(), 1);
    measured = all[0];
  }
  EXPECT_EQ(measured.peer, 1);
  EXPECT_TRUE(measured.is_filled);
  EXPECT_GT(measured.bytes_per_s, 0);
  EXPECT_FALSE(world.links[0]->measurements()[0].is_filled) << "nothing was sent since";
}

// Sends end before their connection is made, in the order of their bytes, as far as copies of them are kept.
TEST(TcpLinks, AShortMessageDoesNotWaitForItsConnection) {
  Links world(3);
  constexpr int64_t kBytes = TcpLinks::kEagerBytes, kMax = TcpLinks::kMaxKeptBytes / kBytes;
  std::vector<std::byte> data(kBytes), got(kBytes);
  std::vector<TcpEnd> sends(kMax + 1, {.peer = 2, .sends = true, .data = data.data(), .num_bytes = kBytes});
  for (int64_t i = 0; i <= kMax; ++i) {
    std::fill(data.begin(), data.end(), static_cast<std::byte>(i + 1));
    world.links[1]->post(sends[i]);
    bool has_ended = false;
    world.links[1]->move_until(0, [&] { return has_ended = sends[i].state == TcpEnd::State::ended, true; });
    EXPECT_EQ(has_ended, i < kMax) << i;
  }
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
  world.links[1]->add(2, Socket(pair[0]));
  world.links[2]->add(1, Socket(pair[1]));
  for (int64_t i = 0; i <= kMax; ++i) {
    TcpEnd to{.peer = 1, .data = got.data(), .num_bytes = kBytes};
    world.links[2]->post(to);
    EXPECT_TRUE(world.links[2]->move_until(20, [&] { return to.state == TcpEnd::State::ended; }));
    EXPECT_EQ(got, std::vector<std::byte>(kBytes, static_cast<std::byte>(i + 1)));
  }
  EXPECT_TRUE(world.links[1]->move_until(20, [&] { return sends[kMax].state == TcpEnd::State::ended; }));
}

// Returns how long a message needs after the connection for it was added: while the rank's thread sleeps in its poll,
// or while it computes.
double seconds_after_adding(bool computes) {
  Links world(3);
  int64_t sent = 42, got = 0;
  TcpEnd from{.peer = 2, .sends = true, .data = reinterpret_cast<std::byte*>(&sent), .num_bytes = 8};
  TcpEnd to{.peer = 1, .data = reinterpret_cast<std::byte*>(&got), .num_bytes = 8};
  world.links[1]->post(from);
  world.links[2]->post(to);
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  pause();  // the movers go to sleep
  std::chrono::steady_clock::time_point added;
  std::jthread later([&] {
    pause();
    int pair[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    added = std::chrono::steady_clock::now();
    world.links[1]->add(2, Socket(pair[0]));
    world.links[2]->add(1, Socket(pair[1]));
  });
  const auto has_ended = [](TcpEnd& end) { return [&end] { return end.state == TcpEnd::State::ended; }; };
  if (computes) {
    while (!world.links[2]->move_until(0, has_ended(to))) std::this_thread::sleep_for(std::chrono::milliseconds(80));
  } else {
    EXPECT_TRUE(world.links[2]->move_until(10, has_ended(to)));
  }
  const auto end = std::chrono::steady_clock::now();
  later.join();
  EXPECT_TRUE(world.links[1]->move_until(10, has_ended(from)));
  EXPECT_EQ(got, 42);
  return std::chrono::duration<double>(end - added).count();
}

// Nobody waits for the end of a poll, which is half a second. A busy machine may delay some of the messages.
TEST(TcpStar, AConnectionThatIsAddedMovesAtOnce) {
  for (const bool computes : {false, true}) {
    double shortest = 10;
    for (int i = 0; i < 20 && shortest > 0.25; ++i) shortest = std::min(shortest, seconds_after_adding(computes));
    EXPECT_LT(shortest, 0.25) << computes;
  }
}

}  // namespace
}  // namespace moebius
