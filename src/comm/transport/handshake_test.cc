// Tests of which connections are accepted. The two ends are threads of this process.
#include "comm/transport/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "core/error.h"

namespace moebius {
namespace {

using testing::HasSubstr;

constexpr const char* kSecret = "0123456789abcdef";

// The sizes of the messages, in their order.
constexpr int64_t kGreetingBytes = 320, kChallengeBytes = 80, kAnswerBytes = 32;

std::vector<std::byte> read_bytes(const Socket& s, int64_t size) {
  std::vector<std::byte> bytes(size);
  read_all(s, bytes, deadline_in(5), "bytes");
  return bytes;
}

std::string hex(const Proof& proof) {
  std::string text;
  for (const std::byte b : proof) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  return text;
}

// RFC 4231, test cases 2 and 6: a short key, and one that is longer than a block.
TEST(JobSecret, ProofsAreHmacSha256) {
  const std::string text = "what do ya want for nothing?",
                    longer = "Test Using Larger Than Block-Size Key - Hash Key First";
  EXPECT_EQ(hex(prove("Jefe", std::as_bytes(std::span(text)))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(prove(std::string(131, '\xaa'), std::as_bytes(std::span(longer)))),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_FALSE(is_same(prove("a", {}), prove("b", {})));
}

TEST(JobSecret, IsDrawnForEachJob) {
  EXPECT_EQ(draw_secret().size(), 64);
  EXPECT_NE(draw_secret(), draw_secret());
  EXPECT_NE(draw_nonce(), draw_nonce());
}

// A rank 0 that accepts others on a thread, until it has accepted one or five seconds are over.
class Door {
 public:
  explicit Door(const std::string& secret = kSecret, const std::string& run = "run")
      : acceptor_(listen_at(0, /*loopback_only=*/true), {.secret = secret, .run = run}, 0,
                  [this](const std::string& text) { warnings_.push_back(text); }) {}

  int port() const { return port_of(acceptor_.listener()); }
  Socket connect() const { return connect_until({.host = "127.0.0.1", .port = port()}, deadline_in(5)); }
  // Waits for a member while `body` runs on this thread.
  template <class Body>
  std::optional<HandshakeAcceptor::Member> while_running(double seconds, Body&& body) {
    std::optional<HandshakeAcceptor::Member> member;
    {
      const std::jthread waiting([&] { member = acceptor_.next(deadline_in(seconds)); });
      body();
    }
    return member;
  }
  std::string refused() const { return acceptor_.refused_text(); }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::vector<std::string> warnings_;
  HandshakeAcceptor acceptor_;
};

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::distributed);
    return e.what();
  }
  return "";
}

std::string join_with(const Socket& s, const std::string& secret, int rank = 3, int to_rank = 0) {
  return failure_of([&] {
    complete_handshake(s, {.secret = secret, .run = "run"}, {.rank = rank, .size = 4, .port = 7, .host = "me"}, to_rank,
                       deadline_in(5));
  });
}

TEST(HandshakeAcceptor, AcceptsARankThatKnowsTheSecret) {
  Door door;
  Socket s = door.connect();
  const auto member = door.while_running(5, [&] { EXPECT_EQ(join_with(s, kSecret), ""); });
  ASSERT_TRUE(member);
  EXPECT_EQ(member->greeting.rank, 3);
  EXPECT_EQ(member->greeting.size, 4);
  EXPECT_EQ(member->greeting.port, 7);
  EXPECT_EQ(member->greeting.host, "me");
  EXPECT_EQ(door.refused(), "");
}

TEST(HandshakeAcceptor, RefusesAWrongOrMissingSecret) {
  for (const std::string secret : {"another secret!!", ""}) {
    Door door;
    const auto member = door.while_running(0.5, [&] {
      EXPECT_EQ(join_with(door.connect(), secret), "the rank there does not know the secret of this job");
    });
    EXPECT_FALSE(member);
    EXPECT_EQ(door.refused(),
              "; refused: 127.0.0.1, which closed the connection before it had proved the job's secret; it calls "
              "itself rank 3");
  }
}

TEST(HandshakeAcceptor, RefusesARankOfAnotherRunOrWithAnInvalidNumber) {
  Door door(kSecret, "other");
  EXPECT_FALSE(door.while_running(0.3, [&] { EXPECT_NE(join_with(door.connect(), kSecret), ""); }));
  EXPECT_EQ(door.refused(), "; refused: 127.0.0.1, which is a rank of another run");
  Door zero;
  EXPECT_FALSE(zero.while_running(0.3, [&] { EXPECT_NE(join_with(zero.connect(), kSecret, /*rank=*/0), ""); }));
  EXPECT_EQ(zero.refused(), "; refused: 127.0.0.1, which calls itself rank 0");
}

TEST(HandshakeAcceptor, AConnectorReportsThatAnotherRankAnswers) {
  Door door;
  door.while_running(0.3, [&] { EXPECT_EQ(join_with(door.connect(), kSecret, 3, /*to_rank=*/2), "rank 0 is there"); });
}

// Returns a listener that passes bytes on to the door and keeps those of the connector.
std::vector<std::byte> overheard(Door& door) {
  const Socket between = listen_at(0, /*loopback_only=*/true);
  std::vector<std::byte> kept;
  const auto member = door.while_running(5, [&] {
    const std::jthread rank([&] {
      const Socket s = connect_until({.host = "127.0.0.1", .port = port_of(between)}, deadline_in(5));
      EXPECT_EQ(join_with(s, kSecret), "");
    });
    const Socket from = accept_until(between, deadline_in(5)), to = door.connect();
    const auto pass = [&](const Socket& a, const Socket& b, int64_t size) {
      std::vector<std::byte> bytes(size);
      read_all(a, bytes, deadline_in(5), "bytes");
      write_all(b, bytes, deadline_in(5), "bytes");
      if (&a == &from) kept.insert(kept.end(), bytes.begin(), bytes.end());
    };
    pass(from, to, kGreetingBytes);
    pass(to, from, kChallengeBytes);
    pass(from, to, kAnswerBytes);
    pass(to, from, 1);
  });
  EXPECT_TRUE(member);
  return kept;
}

TEST(HandshakeAcceptor, RefusesAReplayedProof) {
  Door door;
  const std::vector<std::byte> bytes = overheard(door);
  const std::string secret = kSecret;
  EXPECT_EQ(std::search(bytes.begin(), bytes.end(), std::as_bytes(std::span(secret)).begin(),
                        std::as_bytes(std::span(secret)).end()),
            bytes.end())
      << "the secret was sent";
  const auto member = door.while_running(0.5, [&] {
    const Socket s = door.connect();
    write_all(s, bytes, deadline_in(5), "the same bytes");
    EXPECT_THAT(failure_of([&] {
                  std::vector<std::byte> answer(kChallengeBytes + 1);
                  read_all(s, answer, deadline_in(5), "an answer");
                }),
                HasSubstr("the other end has closed the connection"));
  });
  EXPECT_FALSE(member);
  EXPECT_EQ(door.refused(),
            "; refused: 127.0.0.1, which did not prove that it knows the job's secret; it calls itself rank 3");
  EXPECT_THAT(door.warnings(),
              testing::ElementsAre("tcp: rank 0 has refused a connection from 127.0.0.1, which did not prove that it "
                                   "knows the job's secret; it calls itself rank 3"));
}

// An acceptor that sends back what it got, as its own proof.
TEST(HandshakeAcceptor, AConnectorRefusesAnAcceptorWithoutTheSecret) {
  const Socket listener = listen_at(0, /*loopback_only=*/true);
  const std::jthread echo([&] {
    const Socket s = accept_until(listener, deadline_in(5));
    std::vector<std::byte> greeting = read_bytes(s, kGreetingBytes);
    greeting.resize(kChallengeBytes);
    write_all(s, greeting, deadline_in(5), "an echo");
    failure_of([&] { read_value<char>(s, deadline_in(5), "nothing"); });
  });
  const Socket s = connect_until({.host = "127.0.0.1", .port = port_of(listener)}, deadline_in(5));
  EXPECT_EQ(join_with(s, kSecret), "the rank there does not know the secret of this job");
}

// Returns the first message of rank 3.
std::vector<std::byte> greeting_of_a_rank() {
  const Socket listener = listen_at(0, /*loopback_only=*/true);
  const std::jthread rank(
      [&] { join_with(connect_until({.host = "127.0.0.1", .port = port_of(listener)}, deadline_in(5)), kSecret); });
  return read_bytes(accept_until(listener, deadline_in(5)), kGreetingBytes);
}

// An unauthenticated connection sends back the acceptor's own proof.
TEST(HandshakeAcceptor, RefusesItsOwnProof) {
  Door door;
  const auto member = door.while_running(0.5, [&] {
    const Socket s = door.connect();
    write_all(s, greeting_of_a_rank(), deadline_in(5), "a greeting");
    const std::vector<std::byte> challenge = read_bytes(s, kChallengeBytes);
    write_all(s, std::span(challenge).last(kAnswerBytes), deadline_in(5), "its own proof");
  });
  EXPECT_FALSE(member);
  EXPECT_EQ(door.refused(),
            "; refused: 127.0.0.1, which did not prove that it knows the job's secret; it calls itself rank 3");
}

// Another program listens in place of rank 2, and forwards the messages of rank 3 to rank 0. Rank 3 does not answer,
// whether the challenge that comes back names rank 0 or was changed to rank 2.
TEST(HandshakeAcceptor, AConnectorAnswersOnlyTheExpectedRank) {
  for (const bool renames : {false, true}) {
    Door door;
    const Socket in_place_of_2 = listen_at(0, /*loopback_only=*/true);
    std::string failure;
    const auto member = door.while_running(0.5, [&] {
      const std::jthread rank([&] {
        const Socket s = connect_until({.host = "127.0.0.1", .port = port_of(in_place_of_2)}, deadline_in(5));
        failure = join_with(s, kSecret, 3, /*to_rank=*/2);
      });
      const Socket from = accept_until(in_place_of_2, deadline_in(5)), to = door.connect();
      write_all(to, read_bytes(from, kGreetingBytes), deadline_in(5), "a greeting");
      std::vector<std::byte> challenge = read_bytes(to, kChallengeBytes);
      if (renames) challenge[8] = std::byte{2};  // after the magic number
      write_all(from, challenge, deadline_in(5), "a challenge");
      EXPECT_THAT(failure_of([&] { read_bytes(from, 1); }), HasSubstr("the other end has closed the connection"));
    });
    EXPECT_FALSE(member);
    EXPECT_EQ(failure, renames ? "the rank there does not know the secret of this job" : "rank 0 is there");
  }
}

// Connections that send nothing, send something else, or end within a greeting are made first. A rank is accepted at
// once nevertheless.
TEST(HandshakeAcceptor, UnauthenticatedConnectionsDoNotDelayARank) {
  Door door;
  std::vector<Socket> unauthenticated;
  for (int i = 0; i < 100; ++i) unauthenticated.push_back(door.connect());
  write_text(unauthenticated[0], std::string(400, 'x'), deadline_in(5), "nonsense");
  write_value<uint64_t>(unauthenticated[1], 0x3273756962656f6d, deadline_in(5), "a beginning");
  unauthenticated[1].close();
  write_all(unauthenticated[2], greeting_of_a_rank(), deadline_in(5), "a greeting");
  unauthenticated[2].close();
  const auto begin = std::chrono::steady_clock::now();
  Socket s;
  const auto member = door.while_running(5, [&] {
    s = door.connect();
    EXPECT_EQ(join_with(s, kSecret), "");
  });
  EXPECT_TRUE(member);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  EXPECT_THAT(door.refused(), HasSubstr("127.0.0.1, which is another program"));
  EXPECT_THAT(door.refused(),
              HasSubstr("127.0.0.1, which closed the connection before it had proved the job's secret,"));
  EXPECT_THAT(door.refused(), HasSubstr("before it had proved the job's secret; it calls itself rank 3"));
}

TEST(HandshakeAcceptor, ASilentConnectionIsClosedInTime) {
  Door door;
  const Socket silent = door.connect();
  door.while_running(HandshakeAcceptor::kHandshakeTimeoutS + 1, [&] {
    EXPECT_THAT(failure_of([&] { read_value<char>(silent, deadline_in(10), "anything"); }),
                HasSubstr("the other end has closed the connection"));
  });
  EXPECT_EQ(door.refused(), "; refused: 127.0.0.1, which has proved nothing for 5 s");
}

}  // namespace
}  // namespace moebius
