// The exchange is overlapped with the passes: a rank continues while another is not yet at this point. The same ranks
// without overlap wait for each other forever, which shows that the test can fail.
#include "parallel/sharding/bucket_exchange.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/transport/threads.h"
#include "io/testing.h"

namespace moebius {
namespace {

// A rank with two parameters of a bucket each: as many as may be in flight.
struct ExchangeRank {
  ExchangeRank(Transport& world, bool overlap) : mesh({.dp = 2, .edp = 2}, world) {
    for (const char* name : {"first", "second"}) params.declare({.name = name, .shape = {7}});
    exchange = make_sharding(params, mesh, plan, {.overlap = overlap, .bucket_numel = 4});
    plan.bind(DeviceKind::cpu, 1 << 16);
    for (const Param& p : params.all())
      for (int i = 0; i < 7; ++i) {
        p.dw.ptr<float>()[i] = static_cast<float>(i + 1 + 10 * world.rank());
        p.w.ptr<float>()[i] = -1;
      }
  }
  void backward() {
    for (size_t i = params.all().size(); i-- > 0;) {
      params.ready(s, {i, i + 1});
      params.grad_ready(s, {i, i + 1});
      params.release(s, {i, i + 1});
    }
  }
  void update() {  // the optimizer's change of the owned elements
    for (const Param& p : params.all())
      for (int64_t i = p.owned.begin; i < p.owned.end(); ++i) p.w.ptr<float>()[i] = p.dw.ptr<float>()[i];
  }
  void forward() {
    for (size_t i = 0; i < params.all().size(); ++i) {
      params.ready(s, {i, i + 1});
      params.release(s, {i, i + 1});
    }
  }

  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Mesh mesh;
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training};
  std::unique_ptr<Sharding> exchange;
};

// Waits for the progress of the other rank, for at most `seconds`.
void wait_for(const std::atomic<int>& progress, int until, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (progress < until && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Rank 1 does each part of a step after rank 0 is through with it.
void step_one_after_the_other(bool overlap) {
  std::atomic<int> progress = 0;
  bool ranks_waited = false;
  const double patience = overlap ? 20 : 1;
  run_threads(2, {.timeout_s = overlap ? 30.0 : 0.5}, [&](Transport& world) {
    ExchangeRank rank(world, overlap);
    const bool first = world.rank() == 0;
    const StepPasses passes{.last_micro_batches = 1};
    rank.exchange->run_passes(rank.s, passes, [&] {
      if (!first) {
        wait_for(progress, 1, patience);
        ranks_waited = ranks_waited || progress < 1;
      }
      rank.backward();
    });
    if (first) progress = 1;
    rank.exchange->reduce(rank.s);
    rank.update();
    if (!first) {
      wait_for(progress, 2, patience);
      ranks_waited = ranks_waited || progress < 2;
    }
    rank.exchange->weights_changed(rank.s);
    if (first) progress = 2;
    rank.forward();
    for (const Param& p : rank.params.all())
      for (int i = 0; i < 7; ++i) EXPECT_EQ(p.w.ptr<float>()[i], static_cast<float>(2 * i + 12)) << p.spec.name << i;
  });
  EXPECT_FALSE(ranks_waited);
}

TEST(BucketExchange, GradientsAndWeightsOverlapWithPasses) { step_one_after_the_other(/*overlap=*/true); }

TEST(BucketExchange, WithoutOverlapRanksWaitForEachOther) {
  expect_error(ErrorKind::distributed, "did not join: rank 1", [] { step_one_after_the_other(/*overlap=*/false); });
}

// A replay runs none of this code, but leaves the state of the captured passes.
TEST(BucketExchange, ReplayLeavesTheStateOfTheCapturedPasses) {
  run_threads(2, {}, [&](Transport& world) {
    ExchangeRank rank(world, /*overlap=*/true);
    Sharding& exchange = *rank.exchange;
    const auto sent = [&] { return rank.mesh.group(Axis::dp_cp).sent_bytes(); };
    const auto sends = [&](const auto& call) {
      const int64_t before = sent();
      call();
      return sent() > before;
    };
    const StepPasses passes{.first = true, .last_micro_batches = 1, .closed = true};
    GraphCapture of_passes, of_update;
    rank.s.set_capture(&of_passes);
    exchange.run_passes(rank.s, passes, [&] {
      EXPECT_TRUE(sends([&] { rank.forward(); })) << "captured passes gather, whether weights have changed or not";
      EXPECT_TRUE(sends([&] { rank.backward(); }));
    });
    rank.s.set_capture(&of_update);
    EXPECT_FALSE(sends([&] { exchange.reduce(rank.s); }));
    exchange.weights_changed(rank.s);
    rank.s.set_capture(nullptr);
    rank.forward();
    EXPECT_TRUE(sends([&] { exchange.reduce(rank.s); })) << "nothing has been reduced since";
    for (int step = 0; step < 2; ++step) {
      of_passes.replayed();
      EXPECT_FALSE(sends([&] { rank.forward(); })) << "the replay has gathered";
      EXPECT_FALSE(sends([&] { rank.backward(); })) << "no gradient is awaited";
      EXPECT_FALSE(sends([&] { exchange.reduce(rank.s); })) << "the replay has reduced";
      of_update.replayed();
      EXPECT_TRUE(sends([&] { rank.forward(); })) << "the weights are old";
    }
  });
}

}  // namespace
}  // namespace moebius
