#include "comm/transport/tcp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <numeric>
#include <thread>

#include "comm/transport/torch_store.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

// Returns a port that is free now; rank 0 will listen there.
int free_port() { return port_of(listen_at(0, /*loopback_only=*/true)); }

// The end of each rank of a world: its error, and what it reported.
struct Ends {
  std::vector<std::string> errors, reports;
  std::vector<int> kinds;  // kinds of the errors; 0: no error
};

// Runs the ranks of a world over TCP as threads of this process.
Ends run_world(int size, const RankBody& body, const std::function<void(TcpOptions&)>& change = {}) {
  Ends ends{.errors = std::vector<std::string>(size),
            .reports = std::vector<std::string>(size),
            .kinds = std::vector<int>(size)};
  const int port = free_port();
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      TcpOptions options;
      options.world = {.timeout_s = 20, .coordinates = [](int q) { return fmt::format("dp {}", q); }};
      options.grace_s = 0.2;
      options.rank = r;
      options.size = size;
      options.master = {.host = "localhost", .port = port};
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

// The time that a rank's destructors need while an exception passes.
struct Slow {
  explicit Slow(int s) : seconds(s) {}
  ~Slow() { std::this_thread::sleep_for(std::chrono::seconds(seconds)); }
  Slow(const Slow&) = delete;
  int seconds;
};

Tensor tensor(std::vector<float>& x) { return tensor_of(x.data(), {std::ssize(x)}); }

void expect_all_well(const Ends& ends) {
  for (size_t r = 0; r < ends.errors.size(); ++r) {
    EXPECT_EQ(ends.kinds[r], 0) << ends.errors[r];
    EXPECT_EQ(ends.reports[r], "");
  }
}

// The two kinds of message: short in one frame, long after an offer.
// Either may come before or after its receive.
constexpr int64_t kShort = 7, kLong = 300'000;

TEST(Tcp, MessagesOfEveryLengthWhicheverEndComesFirst) {
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

TEST(Tcp, MessagesThatAreGivenUpLeaveTheRestWhole) {
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

TEST(Tcp, WhatAllThrowIsSaidOnce) {
  const Ends ends = run_world(3, [](Transport&) { MOEBIUS_FAIL(usage, "this recipe is wrong"); });
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

// --- finding each other ---------------------------------------------------------------------------------------------

TEST(TcpBootstrap, AWorldOfOneNeedsNobody) {
  expect_all_well(run_world(1, [](Transport& transport) { Member(transport).world->barrier(); }));
}

TEST(TcpBootstrap, WhoDoesNotComeIsNamed) {
  const Ends ends = run_world(
      3, [](Transport&) {},
      [](TcpOptions& o) {
        o.world.timeout_s = 0.5;
        if (o.rank == 2) o.master.port = free_port();
      });
  EXPECT_THAT(ends.errors[0], StartsWith("tcp: rank 0 (dp 0) has waited for 0.5 s for the others to come; missing: "
                                         "rank 2 (dp 2); were they started, with the same MASTER_ADDR"));
  EXPECT_THAT(ends.errors[1],
              AllOf(StartsWith("tcp: rank 1 (dp 1) gets no answer from a rank 0 of this run at localhost:"),
                    HasSubstr(" (receiving the table of ranks: ")));
  EXPECT_THAT(ends.errors[2],
              AllOf(StartsWith("tcp: rank 2 (dp 2) gets no answer from a rank 0 of this run at localhost:"),
                    HasSubstr("was not reached in time: Connection refused); check that MASTER_ADDR")));
  EXPECT_THAT(ends.kinds, testing::Each(6));
}

TEST(TcpBootstrap, RanksOfAnotherWorldAreRefused) {
  const Ends sizes = run_world(
      2, [](Transport&) {}, [](TcpOptions& o) { o.size += o.rank; });
  EXPECT_EQ(sizes.errors[0],
            "tcp: rank 1 was started with WORLD_SIZE=3, rank 0 with WORLD_SIZE=2; start all ranks with the same value");
  EXPECT_THAT(sizes.kinds, testing::Each(2));
  const Ends twice = run_world(
      3, [](Transport&) {}, [](TcpOptions& o) { o.rank = std::min(o.rank, 1); });
  EXPECT_EQ(twice.errors[0], "tcp: RANK=1 was given to two processes; give each its own number");
}

TEST(TcpBootstrap, APortThatIsTakenIsSaid) {
  const Socket taken = listen_at(0, true);
  const Ends ends = run_world(
      1, [](Transport&) {},
      [&](TcpOptions& o) {
        o.size = 2;
        o.master.port = port_of(taken);
      });
  EXPECT_THAT(ends.errors[0],
              HasSubstr("Address already in use; rank 0 listens at MASTER_PORT: choose one that is free"));
}

// Other programs that listen at rank 0's address:
// a silent one, one with another protocol, one that hangs up.
TEST(TcpBootstrap, WhoFindsAnotherInPlaceOfRank0SaysWhere) {
  for (const std::string answer : {"", "HTTP/1.1 400 Bad Request", "hang up"}) {
    const Socket other = listen_at(0, true);
    std::vector<std::jthread> visited;
    const Ends ends = run_world(
        1, [](Transport&) {},
        [&](TcpOptions& o) {
          o.rank = 1;
          o.size = 2;
          o.master.port = port_of(other);
          o.world.timeout_s = 0.5;
          visited.emplace_back([&] {
            const Socket visitor = accept_until(other, deadline_in(5));
            if (answer == "hang up") return;
            write_all(visitor, std::as_bytes(std::span(answer)), deadline_in(5), "an answer");
            std::this_thread::sleep_for(std::chrono::seconds(1));
          });
        });
    const std::string place = fmt::format("localhost:{}", port_of(other));
    EXPECT_THAT(ends.errors[0],
                StartsWith("tcp: rank 1 (dp 1) gets no answer from a rank 0 of this run at " + place + " ("));
    EXPECT_THAT(ends.errors[0], HasSubstr("; check that MASTER_ADDR, MASTER_PORT and MOEBIUS_SECRET are the same on "
                                          "all ranks, that nothing else uses that port, and that all ranks were "
                                          "started"));
    EXPECT_EQ(ends.kinds[0], 6);
  }
}

// A connection from another program, silent or not, is closed.
TEST(TcpBootstrap, StrangersDoNotDisturb) {
  std::vector<std::jthread> strangers;
  expect_all_well(run_world(
      2, [](Transport& transport) { Member(transport).world->barrier(); },
      [&](TcpOptions& o) {
        if (o.rank == 0) return;
        const Socket stranger = connect_until(o.master, deadline_in(5));
        write_text(stranger, std::string(200, 'x'), deadline_in(5), "nonsense");
      }));
}

constexpr const char* kSecret = "0123456789abcdef";

TEST(TcpBootstrap, RanksThatKnowTheSecretMeet) {
  expect_all_well(run_world(
      4, [](Transport& transport) { Member(transport).world->barrier(); }, [](TcpOptions& o) { o.secret = kSecret; }));
}

// One rank has another secret, or none. It ends at once and says why; rank 0 names who it missed and
// who came instead.
TEST(TcpBootstrap, ARankWithAnotherSecretIsRefused) {
  for (const std::string secret : {"another secret!!", ""}) {
    std::string warned;
    const Ends ends = run_world(
        2, [](Transport&) {},
        [&](TcpOptions& o) {
          o.world.timeout_s = 1;
          o.secret = o.rank == 0 ? kSecret : secret;
          if (o.rank == 0) o.warn = [&](const std::string& text) { warned = text; };
        });
    const std::string refused =
        "127.0.0.1, which closed the connection before it had proved the job's secret; it calls itself rank 1";
    EXPECT_EQ(warned, "tcp: rank 0 has refused a connection from " + refused);
    EXPECT_THAT(ends.errors[0], AllOf(HasSubstr("missing: rank 1 (dp 1); were they started, with the same MASTER_ADDR, "
                                                "MASTER_PORT, WORLD_SIZE and secret?; refused: " +
                                                refused)));
    EXPECT_THAT(ends.errors[1], AllOf(HasSubstr("tcp: rank 1 (dp 1) gets no answer from a rank 0 of this run at "),
                                      HasSubstr(" (the rank there does not know the secret of this job); check that "
                                                "MASTER_ADDR, MASTER_PORT and MOEBIUS_SECRET are the same on all")));
    EXPECT_THAT(ends.kinds, testing::Each(6));
  }
}

TEST(TcpBootstrap, RanksOnSeveralMachinesNeedASecret) {
  const Ends ends = run_world(
      2, [](Transport&) {}, [](TcpOptions& o) { o.master.host = "10.255.255.1"; });
  EXPECT_THAT(ends.errors[0],
              AllOf(StartsWith("tcp: ranks on several machines let in only who knows the secret of the job; got none, "
                               "with rank 0 at 10.255.255.1:"),
                    HasSubstr("set MOEBIUS_SECRET to the same random text on all ranks")));
  EXPECT_EQ(ends.errors[1], "");
  EXPECT_THAT(ends.kinds, testing::Each(2));
}

// torchrun's store, as far as Moebius uses it.
class Store {
 public:
  Store() : listener_(listen_at(0, true)) {}
  ~Store() { stop_ = true; }
  int port() const { return port_of(listener_); }

 private:
  void serve() {
    while (!stop_) {
      Socket s = accept_until(listener_, deadline_in(0.05));
      if (!s.is_open()) continue;
      clients_.emplace_back([this, s = std::move(s)] {
        try {
          while (true) answer(s);
        } catch (const Error&) {  // the client has left
        }
      });
    }
  }
  void answer(const Socket& s) {
    const Deadline deadline = deadline_in(20);
    const auto query = read_value<unsigned char>(s, deadline, "a query");
    const uint32_t magic = query == 0 ? read_value<uint32_t>(s, deadline, "magic") : 0x3C85F7CE;
    EXPECT_EQ(magic, 0x3C85F7CE);
    if (query == 0) return;
    const uint64_t keys = query == 6 ? read_value<uint64_t>(s, deadline, "keys") : 1;
    EXPECT_EQ(keys, 1);
    const std::string key = read_text(s, deadline, "a key");
    if (query == 1) {
      const std::string value = read_text(s, deadline, "a value");
      const std::lock_guard lock(mutex_);
      entries_[key] = value;
    }
    while (query == 6 && !has(key)) std::this_thread::yield();
    if (query == 6) write_value<unsigned char>(s, 0, deadline, "an answer");
    if (query == 3) write_text(s, entry(key), deadline, "an answer");
  }
  bool has(const std::string& key) { return !entry(key).empty(); }
  std::string entry(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return entries_[key];
  }

  Socket listener_;
  std::mutex mutex_;
  std::map<std::string, std::string> entries_;
  std::atomic<bool> stop_ = false;
  std::vector<std::jthread> clients_;
  std::jthread server_{[this] { serve(); }};
};

TEST(TcpBootstrap, RanksThatTorchrunStartedMeetThroughItsStore) {
  Store store;
  // By default rank 0 draws a secret, and the store carries it.
  for (const char* host : {"", "127.0.0.1"}) {
    expect_all_well(run_world(
        3, [](Transport& transport) { Member(transport).world->barrier(); },
        [&](TcpOptions& o) {
          o.has_store = true;
          o.master = {.host = "localhost", .port = store.port()};
          o.host = host;
          o.run = fmt::format("run/{}", *host != 0);
        }));
  }
}

}  // namespace
}  // namespace moebius
