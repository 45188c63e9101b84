#include "parallel/optim/kept_states.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "parallel/optim/optimizer.h"
#include "parallel/optim/streamed_update.h"

namespace moebius {
namespace {

using testing::ElementsAre;

OptimizerSpec on_host(double kib) { return {.offload = true, .offload_buffer = kib / (1 << 20)}; }

TEST(KeptStates, HaveTheBytesOfTheirTensors) {
  const StatesOf matrix{.count = 1000, .of_matrices = true};  // 4000 bytes of f32 are 4 KiB
  EXPECT_EQ(states_bytes({}, matrix), 3 * 4096);
  EXPECT_EQ(states_bytes({}, {.weights = DType::f32, .count = 1000}), 2 * 4096) << "no master";
  EXPECT_EQ(states_bytes({.state = StateFormat::bf16, .master = MasterFormat::bf16_remainder}, matrix), 3 * 2048);
  const OptimizerSpec codes{.state = StateFormat::blocks_8bit, .master = MasterFormat::bf16_stochastic};
  EXPECT_EQ(states_bytes(codes, {.count = 2048, .has_blocks = true}), 2 * (2048 + 1024)) << "codes, and scales";
  EXPECT_EQ(states_bytes(codes, {.count = 1000}), 2 * 4096) << "no blocks";
  EXPECT_EQ(states_bytes({.kind = OptimizerKind::muon}, matrix), 2 * 4096) << "a master and one moment";
}

TEST(KeptStates, AreThoseOfTheFirstParametersThatFit) {
  const std::vector<StatesOf> params{{.count = 256}, {.count = 2560}, {.count = 512}, {.count = 0}, {.count = 256}};
  EXPECT_THAT(kept_states(on_host(0), params), ElementsAre(false, false, false, false, false));
  EXPECT_THAT(kept_states(on_host(3), params), ElementsAre(true, false, false, false, false));
  EXPECT_THAT(kept_states(on_host(9), params), ElementsAre(true, false, true, false, false));
  EXPECT_THAT(kept_states(on_host(33), params), ElementsAre(true, true, false, false, false));
  EXPECT_THAT(kept_states(on_host(42), params), ElementsAre(true, true, true, false, true));
  EXPECT_THAT(kept_states({.offload_buffer = 1}, params), ElementsAre(false, false, false, false, false))
      << "without offload no state is on the host";
}

// Three parameters of 2 KiB of states each, f32, of which the buffer has some.
struct Rig {
  explicit Rig(double kib) : spec(on_host(kib)) {
    spec.weight_decay = 0.5;
    params.set_formats(spec);
    for (const char* name : {"first", "second", "third"})
      params.declare({.name = name, .shape = {2, 128}, .dtype = DType::f32});
    sharding = make_sharding(params, mesh, plan);
    keep_states(spec, params);
    plan.declare(scale_1, "scale", {1}, DType::f32, Life::state);
    optimizer =
        make_optimizer({.spec = spec, .params = params, .plan = plan, .mesh = &mesh, .sharding = sharding.get()});
    plan.bind(DeviceKind::cpu, 1 << 16);
    *scale_1.ptr<float>() = 1;
    for (const Param& p : params.all())
      for (int64_t i = 0; i < p.w.numel(); ++i) p.w.ptr<float>()[i] = 1;
  }
  std::vector<float> first_weights() const {
    std::vector<float> w;
    for (const Param& p : params.all()) w.push_back(*p.w.ptr<float>());
    return w;
  }

  OptimizerSpec spec;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Mesh mesh{MeshShape{}};
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training};
  std::unique_ptr<Sharding> sharding;
  Tensor scale_1;
  std::unique_ptr<Optimizer> optimizer;
};

TEST(KeptStates, AreInDeviceMemoryAndNotOnTheHost) {
  const Rig none(0), two(4.5), all(100);
  EXPECT_EQ(none.plan.bytes(Life::host), 6 * 1024);
  EXPECT_EQ(two.plan.bytes(Life::host), 2 * 1024);
  EXPECT_EQ(two.plan.bytes(Life::optimizer) - none.plan.bytes(Life::optimizer), 4 * 1024);
  EXPECT_EQ(all.plan.bytes(Life::host), 0);
  EXPECT_EQ(all.plan.bytes(Life::optimizer), 6 * 1024) << "no more than the states, and no slots";
  EXPECT_EQ(all.optimizer->streamed(), nullptr);
}

// On the CPU a piece is moved when something waits for it.
TEST(KeptStates, AreUpdatedBeforeAnythingIsMoved) {
  Rig rig(4.5);
  StreamedUpdate& update = *rig.optimizer->streamed();
  update.start(rig.s, {.scale_1 = rig.scale_1, .train_step = 1, .lr = 0.5});
  EXPECT_THAT(rig.first_weights(), ElementsAre(1, 1, 1));
  const std::array<size_t, 2> kept{0, 1};
  update.wait(rig.s, std::span(kept).first(1));
  EXPECT_THAT(rig.first_weights(), ElementsAre(0.75f, 1, 1));
  update.wait(rig.s, kept);
  EXPECT_THAT(rig.first_weights(), ElementsAre(0.75f, 0.75f, 1)) << "each is updated once";
  update.finish(rig.s);
  EXPECT_THAT(rig.first_weights(), ElementsAre(0.75f, 0.75f, 0.75f));
}

}  // namespace
}  // namespace moebius
