#include "report/http_connections.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "report/clients_testing.h"

namespace moebius {
namespace {

using namespace std::chrono_literals;

// The answers are larger than what the system holds for a connection.
std::string answer_to(const std::string& request) {
  return request.starts_with("large") ? std::string(16 << 20, 'x') : "answer to " + request.substr(0, 5);
}

// Returns how long a client waits for a small answer.
std::chrono::steady_clock::duration asked(int port) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(exchange(port, "small\r\n\r\n"), "answer to small");
  return std::chrono::steady_clock::now() - begin;
}

TEST(HttpConnections, ClientsThatTakeNoAnswerDelayNobody) {
  const HttpConnections server(0, answer_to, {.answer = 1s});
  const SlowPeers peers(server.port(), 3);
  peers.send("large\r\n\r\n");
  EXPECT_LT(asked(server.port()), 900ms);
  const auto end = std::chrono::steady_clock::now() + 20s;
  // Reading what the system holds, each finds the end of its connection, long before that of the answer.
  for (const int peer : peers.all()) {
    while (std::chrono::steady_clock::now() < end - 18s) ::poll(nullptr, 0, 10);
    EXPECT_LT(receive_all(peer).size(), 16u << 20);
  }
}

TEST(HttpConnections, AnswersThatNobodyTakesAreBounded) {
  const HttpConnections server(0, answer_to, {.waiting_bytes = 40 << 20});
  const SlowPeers first(server.port(), 1), others(server.port(), 4);
  first.send("large\r\n\r\n");
  EXPECT_LT(asked(server.port()), 10s);
  others.send("large\r\n\r\n");
  EXPECT_LT(asked(server.port()), 10s);
  EXPECT_LT(receive_all(first.all()[0]).size(), 16u << 20);
}

TEST(HttpConnections, RequestsThatNeverEndAreAnsweredOrClosed) {
  const HttpConnections server(0, answer_to, {.request = 1s});
  EXPECT_EQ(exchange(server.port(), "endless" + std::string(100'000, 'a')), "answer to endle");
  EXPECT_EQ(exchange(server.port(), "no end\r\n"), "");
}

TEST(HttpConnections, AnErrorOfAnAnswerClosesItsConnectionAlone) {
  const HttpConnections server(0,
                               [](const std::string& request) {
                                 if (request.starts_with("bad")) throw std::bad_alloc();
                                 return answer_to(request);
                               },
                               {});
  EXPECT_EQ(exchange(server.port(), "bad\r\n\r\n"), "");
  EXPECT_LT(asked(server.port()), 10s);
}

}  // namespace
}  // namespace moebius
