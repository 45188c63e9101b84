// The network of the tests: what its links do, and that nothing of it stays.
#include "tests/hosts/network.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>

#include "comm/machine.h"
#include "comm/transport/socket.h"
#include "io/files.h"
#include "io/testing.h"
#include "tests/faults/forked.h"

namespace moebius {
namespace {

class HostNetwork : public testing::Test {
 protected:
  void SetUp() override {
    if (!network_.why_missing().empty()) GTEST_SKIP() << "no hosts on this system: " << network_.why_missing();
  }
  // Runs it on a host and returns its exit status.
  template <class Body>
  pid_t start_on(int host, Body&& body) {
    return start_forked({}, [&] {
      network_.enter(host);
      body();
    });
  }
  // Host 0 sends some bytes to host 1, which sends one back. Returns the seconds.
  double seconds_of(int64_t num_bytes) {
    TestDir dir;
    const pid_t server = start_on(1, [&] {
      const Socket listener = listen_at(4000, /*loopback_only=*/false);
      write_file_atomic(dir.path("listens"), "");
      const Socket s = accept_until(listener, deadline_in(20));
      std::vector<std::byte> bytes(num_bytes);
      read_all(s, bytes, deadline_in(20), "bytes");
      write_value(s, char{1}, deadline_in(20), "an answer");
    });
    // A connection that is refused is tried again, so the server listens first.
    for (int i = 0; i < 20000 && !std::filesystem::exists(dir.path("listens")); ++i) ::usleep(1000);
    const pid_t client = start_on(0, [&] {
      const Socket s = connect_until({.host = Network::name(1), .port = 4000}, deadline_in(20));
      const auto begin = std::chrono::steady_clock::now();
      write_all(s, std::vector<std::byte>(num_bytes), deadline_in(20), "bytes");
      read_value<char>(s, deadline_in(20), "an answer");
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      write_file_atomic(dir.path("seconds"), fmt::format("{}", seconds));
    });
    EXPECT_EQ(end_of(client), 0);
    EXPECT_EQ(end_of(server), 0);
    return std::stod(read_file(dir.path("seconds")));
  }
  Network network_{2};
};

TEST_F(HostNetwork, HostsAreMachinesOfTheirOwn) {
  for (int host = 0; host < 2; ++host) {
    const pid_t process = start_on(host, [&] {
      EXPECT_THAT(machine_name(), testing::StartsWith(Network::name(host) + "/"));
      EXPECT_EQ(own_hosts(), std::vector<std::string>{Network::address(host)});
    });
    EXPECT_EQ(end_of(process), 0);
  }
}

TEST_F(HostNetwork, LinksDelayPacketsAndLimitTheirRate) {
  const int64_t before = network_.sent_bytes(0, 1);
  seconds_of(100000);
  EXPECT_EQ(network_.num_connects(0, 1), 1);
  EXPECT_EQ(network_.num_connects(1, 0), 0);
  EXPECT_GE(network_.sent_bytes(0, 1) - before, 100000);
  EXPECT_LT(network_.sent_bytes(0, 1) - before, 110000);
  network_.set_links({.delay_s = 0.05});
  EXPECT_GE(seconds_of(1), 0.1);
  network_.set_links({.bytes_per_s = 1e6});
  EXPECT_GE(seconds_of(100000), 0.1);
  network_.set_links({.loss = 0.05});
  EXPECT_GT(seconds_of(100000), 0) << "all bytes arrive";
}

TEST_F(HostNetwork, NothingPassesALinkThatIsCut) {
  network_.set_links({.is_cut = true});
  const pid_t client = start_on(0, [&] {
    expect_error(ErrorKind::distributed, "was not reached in time",
                 [] { connect_until({.host = Network::name(1), .port = 4000}, deadline_in(0.2)); });
  });
  EXPECT_EQ(end_of(client), 0);
}

TEST_F(HostNetwork, ProcessesOfAHostEndWithIt) {
  pid_t process = 0;
  {
    const Network network(1);
    process = start_forked({}, [&] {
      network.enter(0);
      ::pause();
    });
    while (network.processes().empty()) ::usleep(1000);
    EXPECT_EQ(network.processes(), std::vector<pid_t>{process});
  }
  EXPECT_EQ(end_of(process), kKilled);
}

}  // namespace
}  // namespace moebius
