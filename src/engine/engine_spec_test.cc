#include "engine/engine_spec.h"

#include <gtest/gtest.h>

#include "io/testing.h"

namespace moebius {
namespace {

EngineSpec training_on_gpus(DispatcherKind dispatcher = DispatcherKind::automatic) {
  return {.model = {.vocab_size = 256,
                    .hidden_size = 64,
                    .num_layers = 1,
                    .num_heads = 2,
                    .num_kv_heads = 1,
                    .head_dim = 64,
                    .max_position_embeddings = 16,
                    .moe_layers = {true},
                    .num_experts = 8,
                    .top_k = 2,
                    .moe_intermediate_size = 64},
          .use = ModelUse::training,
          .shape = {.batch = 1, .seq = 8},
          .num_micro_batches = 3,
          .mesh = {.dp = 4, .ep = 4},
          .dispatcher = dispatcher,
          .device = DeviceKind::null,
          .target = DeviceKind::cuda};
}

// An engine that no recipe describes gets the dispatcher that a recipe would get.
TEST(EngineSpec, CapturedStepsGetADispatcherThatCanBeCaptured) {
  EngineSpec spec = training_on_gpus();
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::allgather);
  spec.graph = false;
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::alltoall) << "ep is above top-k";
  spec.graph = true, spec.use = ModelUse::inference;
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::alltoall) << "generation is eager";
  spec = training_on_gpus(), spec.target = DeviceKind::cpu;
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::alltoall);
  spec.mesh = {.dp = 2, .ep = 2};
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::allgather);
  EXPECT_EQ(resolved(training_on_gpus(DispatcherKind::allgather)).dispatcher, DispatcherKind::allgather);
}

TEST(EngineSpec, RefusesAllToAllInCapturedSteps) {
  expect_error(ErrorKind::usage, "parallel.dispatcher = \"alltoall\" reads its counts on the host",
               [] { resolved(training_on_gpus(DispatcherKind::alltoall)); });
  EngineSpec spec = training_on_gpus(DispatcherKind::alltoall);
  spec.graph = false;
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::alltoall);
  spec = training_on_gpus(DispatcherKind::alltoall), spec.mesh = {};
  EXPECT_EQ(resolved(spec).dispatcher, DispatcherKind::alltoall) << "one rank has all experts: nothing is exchanged";
}

TEST(EngineSpec, OneStageTakesMicroBatchesInTurn) {
  EngineSpec spec = training_on_gpus();
  EXPECT_EQ(resolved(spec).pipeline.num_micro_batches, 1);
  EXPECT_EQ(resolved(spec).max_positions, 8);
  spec.mesh.pp = 2;
  EXPECT_EQ(resolved(spec).pipeline.num_micro_batches, 3);
}

}  // namespace
}  // namespace moebius
