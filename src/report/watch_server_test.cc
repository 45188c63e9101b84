#include "report/watch_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "report/clients_testing.h"
#include "report/testing.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Watch : public ::testing::Test {
 protected:
  void SetUp() override { write_run(dir_.path("run"), 5); }
  WatchServer server(bool metrics = true) { return WatchServer(dir_.path("run"), {.port = 0, .metrics = metrics}); }
  static std::string get(const WatchServer& server, const std::string& path, const std::string& host = "127.0.0.1",
                         const std::string& more = "") {
    return exchange(server.port(),
                    fmt::format("GET {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{}\r\n", path, host, more));
  }
  TestDir dir_;
};

TEST_F(Watch, ServesThePageItsDataAndTheMetrics) {
  const WatchServer watch = server();
  const std::string page = get(watch, "/");
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy: default-src 'none'"));
  EXPECT_THAT(page, HasSubstr("frame-ancestors 'none'"));
  EXPECT_THAT(page, HasSubstr("X-Content-Type-Options: nosniff"));
  EXPECT_THAT(page, HasSubstr("<!DOCTYPE html>"));
  EXPECT_THAT(get(watch, "/data"), HasSubstr("id=\"plot-loss\""));
  EXPECT_THAT(get(watch, "/metrics"), HasSubstr("moebius_loss{run=\"run\"} 1\n"));
  EXPECT_THAT(get(watch, "/?x=1"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(get(server(/*metrics=*/false), "/metrics"), StartsWith("HTTP/1.1 404"));
}

TEST_F(Watch, ServesNothingElse) {
  const WatchServer watch = server();
  for (const char* path : {"/metrics.jsonl", "/recipe.resolved.toml", "/../run/metrics.jsonl", "/..%2f..%2fetc/passwd",
                           "/%2e%2e/", "//etc/passwd", "/data/../metrics.jsonl", "/data/", "/%00", "/favicon.ico"})
    EXPECT_THAT(get(watch, path), StartsWith("HTTP/1.1 404")) << path;
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
    EXPECT_THAT(
        exchange(
            watch.port(),
            fmt::format("{} / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", method)),
        StartsWith("HTTP/1.1 405"))
        << method;
}

TEST_F(Watch, RequestsForOtherHostNamesAreRefused) {
  const WatchServer watch = server();
  for (const char* host :
       {"evil.example", "evil.example:7007", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0",
        "127.0.0.1@evil.example", "[::1].evil.example", "localhost:", "localhost:80x", "127.0.0.2", ""}) {
    const std::string answer = get(watch, "/data", host);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 403")) << host;
    EXPECT_THAT(answer, Not(HasSubstr("loss"))) << host;
  }
  for (const char* host : {"localhost", "127.0.0.1:1", "[::1]:65535", "[::1]"})
    EXPECT_THAT(get(watch, "/data", host), StartsWith("HTTP/1.1 200")) << host;
  EXPECT_THAT(exchange(watch.port(), "GET / HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(get(watch, "/data", "localhost", "Host: evil.example\r\n"), StartsWith("HTTP/1.1 403"));
}

TEST_F(Watch, OnlyThisMachineIsListenedTo) {
  const WatchServer watch = server();
  const int socket = connect_to("127.0.0.2", watch.port());  // would be taken if it listened to all addresses
  EXPECT_EQ(socket, -1);
  if (socket >= 0) ::close(socket);
}

TEST_F(Watch, TheRunIsFollowed) {
  const WatchServer watch = server();
  const std::string before = get(watch, "/data");
  const size_t at = before.find("ETag: ") + 6;
  const std::string version = before.substr(at, before.find("\r\n", at) - at);
  std::ofstream(dir_.path("run/metrics.jsonl"), std::ios::app) << train_line(6, 0.125) << "\n";
  std::string after;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    after = get(watch, "/data", "localhost", "If-None-Match: " + version + "\r\n");
    // The version has the time in half minutes too, so the old data may be sent once more.
  } while (after.find("step 6 of 20") == std::string::npos && std::chrono::steady_clock::now() < end);
  EXPECT_THAT(after, HasSubstr("step 6 of 20"));
  EXPECT_THAT(after, HasSubstr("0.125"));
}

TEST_F(Watch, UnchangedDataIsNotSentAgain) {
  const WatchServer watch = server();
  std::string answer;
  for (int i = 0; i < 3 && !answer.starts_with("HTTP/1.1 304");
       ++i) {  // the time is a part of the version, in half minutes
    const std::string first = get(watch, "/data");
    const size_t at = first.find("ETag: ") + 6;
    answer =
        get(watch, "/data", "localhost", "If-None-Match: " + first.substr(at, first.find("\r\n", at) - at) + "\r\n");
  }
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 304"));
}

TEST_F(Watch, APortInUseIsNamed) {
  const WatchServer watch = server();
  expect_error(ErrorKind::io, fmt::format("port {} of 127.0.0.1 cannot be bound: Address already in use", watch.port()),
               [&] { WatchServer(dir_.path("run"), {.port = watch.port()}); });
}

TEST_F(Watch, AFolderWithoutARunIsRefused) {
  expect_error(ErrorKind::input, "expected the folder of a run", [&] { WatchServer(dir_.path("no"), {}); });
}

TEST_F(Watch, RemovingTheRunDoesNotCrashTheServer) {
  const WatchServer watch = server();
  std::filesystem::remove_all(dir_.path("run"));
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_THAT(get(watch, "/data"), StartsWith("HTTP/1.1 200"));
}

TEST_F(Watch, MalformedRequestsAreAnswered) {
  const WatchServer watch = server();
  exchange(watch.port(), "\r\n\r\n");
  exchange(watch.port(), "GET\r\n\r\n");
  exchange(watch.port(), std::string(100000, 'A') + "\r\n\r\n");
  EXPECT_THAT(get(watch, "/"), StartsWith("HTTP/1.1 200"));
}

// Each byte comes well within any pause that a server would allow between two of them.
TEST_F(Watch, PeersThatSendAByteAtATimeDelayNobody) {
  const WatchServer watch(dir_.path("run"), {.limits = {.request = std::chrono::seconds(2)}});
  const SlowPeers peers(watch.port(), 150);
  const std::string slow = "GET / HTTP/1.1\r\nHost: localhost\r\nA: " + std::string(1000, 'a');
  const auto begin = std::chrono::steady_clock::now(), end = begin + std::chrono::seconds(20);
  std::chrono::steady_clock::duration longest{};
  int64_t closed = 0;
  for (size_t i = 0; i < slow.size() && closed < 150 && std::chrono::steady_clock::now() < end; ++i) {
    peers.send(slow.substr(i, 1));
    const auto asked = std::chrono::steady_clock::now();
    EXPECT_THAT(get(watch, "/"), StartsWith("HTTP/1.1 200"));
    longest = std::max(longest, std::chrono::steady_clock::now() - asked);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    closed = peers.num_closed();
  }
  EXPECT_LT(longest, std::chrono::seconds(1));
  EXPECT_EQ(closed, 150) << "connections that outlived their deadline";
}

TEST_F(Watch, MoreConnectionsThanTheLimitReplaceTheOldest) {
  const WatchServer watch(dir_.path("run"), {.limits = {.connections = 8}});
  const SlowPeers idle(watch.port(), 20);
  EXPECT_THAT(get(watch, "/"), StartsWith("HTTP/1.1 200"));
  EXPECT_GE(idle.num_closed(), 12);
}

TEST_F(Watch, ARequestMayComeInPieces) {
  const WatchServer watch = server();
  const int peer = connect_to("127.0.0.1", watch.port());
  for (const char* piece : {"GET /data HT", "TP/1.1\r\nHost: localhost\r", "\n", "\r", "\n"}) {
    EXPECT_GT(::send(peer, piece, std::strlen(piece), MSG_NOSIGNAL), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string answer = receive_all(peer);
  ::close(peer);
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("Connection: close"));
}

// The peers send nothing, or the beginning of a request.
TEST_F(Watch, IdlePeersDoNotKeepABrowserOut) {
  const WatchServer watch = server();
  std::vector<int> idle;
  for (int i = 0; i < 150; ++i) {
    const int peer = connect_to("127.0.0.1", watch.port());
    ASSERT_GE(peer, 0) << i;
    idle.push_back(peer);
    if (i % 2) ::send(idle.back(), "GET / HTTP/1.1\r\nA", 17, MSG_NOSIGNAL);
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(get(watch, "/"), StartsWith("HTTP/1.1 200"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  for (const int each : idle) ::close(each);
}

}  // namespace
}  // namespace moebius
