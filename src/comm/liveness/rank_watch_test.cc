// These tests use the transport of threads:
// a rank whose watch ends without announce_exit() looks like a dead process.
#include "comm/liveness/rank_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>

#include "comm/transport/threads.h"

namespace moebius {
namespace {

constexpr double kConnectS = 20;

// The events that each rank was notified of.
class News {
 public:
  explicit News(int size) : heard_(size) {}
  void add(int by, int dead) {
    const std::lock_guard lock(mutex_);
    heard_[by].push_back(dead);
  }
  std::vector<int> of(int rank) {
    const std::lock_guard lock(mutex_);
    return heard_[rank];
  }

 private:
  std::mutex mutex_;
  std::vector<std::vector<int>> heard_;
};

class RankWatchOn : public testing::TestWithParam<int> {
 protected:
  using Body = std::function<void(Control&, std::optional<RankWatch>&)>;
  // Every rank has a watch, which body may end.
  void run(const Body& body) {
    run_threads(GetParam(), {.timeout_s = 60}, [&](Transport& world) {
      Control control(world);
      std::optional<RankWatch> watch;
      watch.emplace(control, kConnectS,
                    RankWatch::Listener{.death = [&](int dead) { news_.add(control.rank(), dead); },
                                        .ending = [&] { ++num_told_of_end_; }});
      ASSERT_EQ(watch->why_missing(), "");
      body(control, watch);
    });
  }
  News news_{GetParam()};
  std::atomic<int> num_told_of_end_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Sizes, RankWatchOn, testing::Values(1, 2, 3, 4, 9));

TEST_P(RankWatchOn, ReportsNothingOfRanksThatEndWell) {
  run([](Control& control, std::optional<RankWatch>& watch) {
    control.barrier();
    watch->announce_exit();
    watch.reset();
  });
  for (int r = 0; r < GetParam(); ++r) EXPECT_THAT(news_.of(r), testing::IsEmpty());
}

// The dead rank is a leaf, one between, or the root.
TEST_P(RankWatchOn, ReportsADeathToAllOthers) {
  for (int dead = 0; dead < GetParam() && GetParam() > 1; ++dead) {
    SCOPED_TRACE(dead);
    run([&](Control& control, std::optional<RankWatch>& watch) {
      const size_t before = news_.of(control.rank()).size();
      control.barrier();
      if (control.rank() == dead) {
        watch.reset();
        return control.barrier();
      }
      const Deadline deadline = deadline_in(kConnectS);
      while (news_.of(control.rank()).size() == before && milliseconds_until(deadline) > 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      control.barrier();  // no connection ends before all ranks are notified
    });
  }
  for (int r = 0; r < GetParam(); ++r) {
    std::vector<int> others;
    for (int dead = 0; dead < GetParam() && GetParam() > 1; ++dead)
      if (dead != r) others.push_back(dead);
    EXPECT_EQ(news_.of(r), others) << "rank " << r;
  }
}

// The launcher then ends this rank and the others, which must not be reported.
TEST_P(RankWatchOn, ReportsNothingOfARankThatEndsTheRun) {
  run([&](Control& control, std::optional<RankWatch>& watch) {
    if (control.rank() == control.size() - 1) {
      watch->announce_abort();
      watch.reset();
    }
    const Deadline deadline = deadline_in(kConnectS);
    while (num_told_of_end_ < control.size() - 1 && milliseconds_until(deadline) > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    control.barrier();
    if (watch) watch->announce_exit();
  });
  for (int r = 0; r < GetParam(); ++r) EXPECT_THAT(news_.of(r), testing::IsEmpty());
  EXPECT_EQ(num_told_of_end_, GetParam() - 1);
}

}  // namespace
}  // namespace moebius
