// Tests of connections that are made at their first use. The ranks are threads of this process.
#include "comm/transport/link_maker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>

#include "comm/transport/reserved_port_testing.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kSecret = "0123456789abcdef";

// A LinkMaker of a world on this machine, with the connections that it made.
class Maker {
 public:
  struct Spec {
    int rank = 0, size = 4;
    std::vector<HostPort> places;
    std::string secret = kSecret;
    LookUp look_up = nullptr;
    double look_up_s = 5, answer_s = 20;
  };
  explicit Maker(Spec spec) {
    Socket listener = listen_at(0, /*loopback_only=*/true);
    place = {.host = "127.0.0.1", .port = port_of(listener)};
    maker =
        std::make_unique<LinkMaker>(LinkMaker::Options{.rank = spec.rank,
                                                       .size = spec.size,
                                                       .job = {.secret = spec.secret, .run = "run"},
                                                       .listener = std::move(listener),
                                                       .places = std::move(spec.places),
                                                       .warn = [this](const std::string& text) { warn(text); },
                                                       .made = [this](int rank, Socket s) { add(rank, std::move(s)); },
                                                       .look_up = std::move(spec.look_up),
                                                       .look_up_s = spec.look_up_s,
                                                       .answer_s = spec.answer_s});
  }
  // Waits until it says this of a rank.
  std::string why_with(int rank, const std::string& text) const {
    std::string why;
    for (int i = 0; i < 10000 && why.find(text) == std::string::npos; ++i) {
      why = maker->why_not(rank);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return why;
  }
  ~Maker() { maker.reset(); }  // its thread uses the members below
  // Waits until it has made this many connections. Returns the ranks in their order.
  std::vector<int> ranks_after(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return ranks_.size() >= count; });
    return ranks_;
  }
  std::string warnings_after(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return num_warnings_ >= count; });
    return warnings_;
  }
  Socket take(int rank) {
    const std::lock_guard lock(mutex_);
    return std::move(sockets_[rank]);
  }

  HostPort place;
  std::unique_ptr<LinkMaker> maker;

 private:
  void add(int rank, Socket s) {
    const std::lock_guard lock(mutex_);
    ranks_.push_back(rank);
    sockets_[rank] = std::move(s);
    changed_.notify_all();
  }
  void warn(const std::string& text) {
    const std::lock_guard lock(mutex_);
    warnings_ += text + "\n";
    ++num_warnings_;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> ranks_;
  std::map<int, Socket> sockets_;
  std::string warnings_;
  size_t num_warnings_ = 0;
};

void expect_connected(const Socket& a, const Socket& b) {
  write_value(a, 17, deadline_in(5), "a number");
  EXPECT_EQ(read_value<int>(b, deadline_in(5), "a number"), 17);
}

TEST(LinkMaker, TheHigherRankConnects) {
  Maker lower({.rank = 1}), higher({.rank = 3, .places = {{}, lower.place}});
  higher.maker->call(1);
  EXPECT_THAT(lower.ranks_after(1), ElementsAre(3));
  EXPECT_THAT(higher.ranks_after(1), ElementsAre(1));
  expect_connected(lower.take(3), higher.take(1));
}

// The rank that is called listens later than the call.
TEST(LinkMaker, TriesUntilTheOtherListens) {
  const ReservedPort port;
  const HostPort place{.host = "127.0.0.1", .port = port.number()};
  Maker higher({.rank = 3, .places = {{}, place}});
  higher.maker->call(1);
  while (higher.maker->why_not(1).find("Connection refused") == std::string::npos)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(higher.maker->why_not(1), to_string(place) + ": Connection refused");
  LinkMaker late({.rank = 1,
                  .size = 4,
                  .job = {.secret = kSecret, .run = "run"},
                  .listener = listen_at(place.port, true),
                  .places = {},
                  .warn = {},
                  .made = [](int, Socket) {}});
  EXPECT_THAT(higher.ranks_after(1), ElementsAre(1));
}

// One that never answers, and one with another secret, do not hold up the call of a third.
TEST(LinkMaker, CallsDoNotWaitForEachOther) {
  const Socket silent = listen_at(0, true);
  Maker unauthenticated({.rank = 2, .secret = "another secret!!"}), lower({.rank = 3});
  Maker higher({.rank = 4,
                .size = 5,
                .places = {{}, {.host = "127.0.0.1", .port = port_of(silent)}, unauthenticated.place, lower.place}});
  for (const int r : {1, 2, 3}) higher.maker->call(r);
  EXPECT_THAT(higher.ranks_after(1), ElementsAre(3));
  EXPECT_THAT(unauthenticated.warnings_after(1),
              HasSubstr("closed the connection before it had proved the job's secret"));
  EXPECT_THAT(higher.maker->why_not(1), HasSubstr("its machine has accepted the connection, and the rank has not"));
  // It tries again, and says in between that it waits for the other's answer.
  EXPECT_THAT(higher.why_with(2, "does not know"), HasSubstr("does not know the secret of this job"));
}

// The machine of a stopped rank accepts connections that nobody answers. When the rank continues it answers the newest.
TEST(LinkMaker, ReconnectsIfARankDoesNotAnswer) {
  Socket stopped = listen_at(0, true);
  const HostPort place{.host = "127.0.0.1", .port = port_of(stopped)};
  Maker higher({.rank = 3, .places = {{}, place}, .answer_s = 0.5});
  higher.maker->call(1);
  const std::string why =
      "its machine has accepted the connection, and the rank has not answered for 0.5 s: it is "
      "stopped, or the link to it was cut";
  EXPECT_EQ(higher.why_with(1, why), to_string(place) + ": " + why);
  const LinkMaker going_on({.rank = 1,
                            .size = 4,
                            .job = {.secret = kSecret, .run = "run"},
                            .listener = std::move(stopped),
                            .places = {},
                            .warn = {},
                            .made = [](int, Socket) {}});
  EXPECT_THAT(higher.ranks_after(1), ElementsAre(1));
}

// A look-up that ends when the test lets it.
struct SlowNames {
  LookUp look_up() {
    return [may_end = may_end.get_future().share()](const HostPort& to) {
      may_end.wait();
      return *NameLookup({.host = "127.0.0.1", .port = to.port}).wait(Deadline());
    };
  }
  std::promise<void> may_end;
};

TEST(LinkMaker, AnUnresolvedHostNameDelaysNoOtherConnection) {
  SlowNames names;
  Maker named({.rank = 1}), lower({.rank = 2});
  const HostPort place{.host = "node1.example", .port = named.place.port};
  Maker higher({.rank = 3, .places = {{}, place, lower.place}, .look_up = names.look_up(), .look_up_s = 0.05});
  higher.maker->call(1);
  EXPECT_EQ(higher.why_with(1, "name servers"),
            to_string(place) + ": the name servers of this machine have not answered for the name for 0.05 s");
  higher.maker->call(2);
  EXPECT_THAT(higher.ranks_after(1), ElementsAre(2));
  names.may_end.set_value();
  EXPECT_THAT(higher.ranks_after(2), ElementsAre(2, 1));
}

TEST(ConnectUntil, NamesTheHostThatNameServersDoNotKnow) {
  SlowNames names;
  try {
    connect_until({.host = "node1.example", .port = 4000}, deadline_in(0.05), names.look_up());
    ADD_FAILURE() << "it is connected";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "tcp: node1.example:4000 was not reached in time: the name servers of this machine have not answered "
                 "for node1.example; check the name, or give a number");
  }
  names.may_end.set_value();
}

// The last look-up has no answer in time. The reason that an earlier one gave is the one to report.
TEST(ConnectUntil, ReportsTheReasonOfAnEarlierLookUp) {
  SlowNames names;
  const LookUp slow = names.look_up();
  const auto num_calls = std::make_shared<std::atomic<int>>(0);
  const LookUp once = [slow, num_calls](const HostPort& to) {
    return ++*num_calls == 1 ? Addresses{.all = {}, .why_none = "no such name"} : slow(to);
  };
  try {
    connect_until({.host = "node1.example", .port = 4000}, deadline_in(2), once);
    ADD_FAILURE() << "it is connected";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "tcp: node1.example:4000 was not reached in time: no such name");
  }
  names.may_end.set_value();
}

// Unauthenticated connections arrive during training: a silent one, another program, one with another secret. A rank
// that comes later is accepted at once. One that is connected already, or that should not call, is closed.
TEST(LinkMaker, LateUnauthenticatedConnectionsAreRefused) {
  Maker lower({.rank = 1, .size = 5});
  const auto begin = std::chrono::steady_clock::now();
  const auto connect = [&] { return connect_until(lower.place, deadline_in(5)); };
  const auto join = [&](int rank, const std::string& secret) {
    Socket s = connect();
    complete_handshake(s, {.secret = secret, .run = "run"}, {.rank = rank, .size = 5}, 1, deadline_in(5));
    return s;
  };
  const Socket silent = connect();
  const Socket other = connect();
  write_text(other, std::string(200, 'x'), deadline_in(5), "nonsense");
  EXPECT_THROW(join(2, "another secret!!"), Error);
  EXPECT_THAT(lower.warnings_after(2), AllOf(HasSubstr("which is another program"), HasSubstr("calls itself rank 2")));
  Socket first = join(3, kSecret);
  EXPECT_THAT(lower.ranks_after(1), ElementsAre(3));
  for (const int rank : {3, 0, 7}) {
    Socket s = join(rank, kSecret);  // it knows the secret
    EXPECT_THROW(read_value<std::byte>(s, deadline_in(5), "anything"), Error);
  }
  expect_connected(lower.take(3), first);
  join(2, kSecret), join(4, kSecret);
  EXPECT_THAT(lower.ranks_after(3), ElementsAre(3, 2, 4));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4)) << "a rank waited for the silent one";
}

TEST(LinkMaker, StopsListeningOnceAllRanksAreConnected) {
  Maker lower({.rank = 2}), higher({.rank = 3, .places = {{}, {}, lower.place}});
  higher.maker->call(2);
  lower.ranks_after(1);
  for (int i = 0; i < 5000; ++i) {
    try {
      connect_until(lower.place, deadline_in(1));
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("Connection refused"));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ADD_FAILURE() << "it still listens";
}

TEST(LinkMaker, CanBeDestroyedDuringAConnectionAttempt) {
  const Socket silent = listen_at(0, true);
  Maker higher({.rank = 1, .size = 3, .places = {{.host = "127.0.0.1", .port = port_of(silent)}}});
  higher.maker->call(0);
  higher.maker.reset();
}

}  // namespace
}  // namespace moebius
