// The rendezvous over TCP, with ranks and with unauthenticated connections.
#include "comm/transport/tcp_bootstrap.h"

#include <thread>

#include "comm/transport/tcp_testing.h"
#include "comm/transport/torch_store_testing.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kSecret = "0123456789abcdef";

TEST(TcpBootstrap, AWorldOfOneNeedsNoConnections) {
  expect_all_well(run_world(1, [](Transport& transport) { Member(transport).world->barrier(); }));
}

TEST(TcpBootstrap, MissingRanksAreNamed) {
  const ReservedPort without_listener;
  const Ends ends = run_world(
      3, [](Transport&) {},
      [&](TcpOptions& o) {
        o.world.timeout_s = 0.5;
        if (o.rank == 2) o.master.port = without_listener.number();
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

TEST(TcpBootstrap, APortInUseIsReported) {
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
TEST(TcpBootstrap, AnotherProgramInPlaceOfRank0IsReportedWithItsAddress) {
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

// Unauthenticated connections are made before the last rank's: one that sends nothing, one that sends something else,
// and one that ends within its first message.
TEST(TcpBootstrap, UnauthenticatedConnectionsDoNotDisturb) {
  Socket silent;
  std::string warned;
  const auto begin = std::chrono::steady_clock::now();
  expect_all_well(run_world(
      3, [](Transport& transport) { Member(transport).world->barrier(); },
      [&](TcpOptions& o) {
        o.secret = kSecret;
        if (o.rank == 0) o.warn = [&](const std::string& text) { warned += text + "\n"; };
        if (o.rank != 2) return;
        silent = connect_until(o.master, deadline_in(5));
        const Socket other = connect_until(o.master, deadline_in(5));
        write_text(other, std::string(200, 'x'), deadline_in(5), "nonsense");
        const Socket leaves = connect_until(o.master, deadline_in(5));
        write_all(leaves, std::as_bytes(std::span("moebius2", 8)), deadline_in(5), "a beginning");
      }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4)) << "a rank waited for the silent one";
  EXPECT_THAT(warned, AllOf(HasSubstr("tcp: rank 0 has refused a connection from 127.0.0.1, which is another program"),
                            HasSubstr("which closed the connection before it had proved the job's secret")));
}

TEST(TcpBootstrap, RanksThatKnowTheSecretMeet) {
  expect_all_well(run_world(
      4, [](Transport& transport) { Member(transport).world->barrier(); }, [](TcpOptions& o) { o.secret = kSecret; }));
}

// One rank has another secret, or none. It ends at once and says why; rank 0 names the missing rank and
// the refused connection.
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

TEST(TcpBootstrap, RanksThatTorchrunStartedMeetThroughItsStore) {
  TestStore store;
  // By default rank 0 draws a secret, and the store carries it.
  for (const char* host : {"", "127.0.0.1"}) {
    expect_all_well(run_world(
        3, [](Transport& transport) { Member(transport).world->barrier(); },
        [&](TcpOptions& o) {
          o.has_store = true;
          o.master = {.host = "localhost", .port = store.port()};
          o.host = host;
          o.run = fmt::format("run/{:d}", *host != 0);
        }));
  }
  EXPECT_THAT(store.entry("moebius/run/0"), testing::MatchesRegex("- [0-9]+ [0-9a-f]+"));
}

// A secret that was given stays out of the store. A rank that was given another, or none, is refused.
TEST(TcpBootstrap, AnExplicitSecretIsUsedWithTheStore) {
  TestStore store;
  const auto run_with = [&](const std::string& run, const std::string& secret_of_1) {
    return run_world(
        2, [](Transport& transport) { Member(transport).world->barrier(); },
        [&](TcpOptions& o) {
          o.has_store = true;
          o.master = {.host = "localhost", .port = store.port()};
          o.run = run;
          o.world.timeout_s = run == "same" ? 20 : 1;
          o.secret = o.rank == 0 ? kSecret : secret_of_1;
        });
  };
  expect_all_well(run_with("same", kSecret));
  EXPECT_THAT(store.entry("moebius/same"), testing::MatchesRegex("- [0-9]+ -"));
  for (const std::string other : {"another secret!!", ""}) {
    const Ends ends = run_with("other" + other, other);
    EXPECT_THAT(ends.errors[1], HasSubstr("the rank there does not know the secret of this job"));
    EXPECT_THAT(ends.kinds, testing::Each(6));
  }
}

}  // namespace
}  // namespace moebius
