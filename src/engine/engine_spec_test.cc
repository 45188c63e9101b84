#include "engine/engine_spec.h"

#include <gtest/gtest.h>

#include "engine/engine.h"
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

TEST(EngineSpec, OneStageRunsOneMicroBatchAtATime) {
  EngineSpec spec = training_on_gpus();
  EXPECT_EQ(resolved(spec).pipeline.num_micro_batches, 1);
  EXPECT_EQ(resolved(spec).max_positions, 8);
  spec.mesh.pp = 2;
  EXPECT_EQ(resolved(spec).pipeline.num_micro_batches, 3);
}

EngineSpec scales_of_tensors() {
  EngineSpec spec = training_on_gpus();
  spec.mesh = {};
  spec.precision = {.compute = DType::bf16, .recipe = PrecisionRecipe::fp8_tensor};
  spec.optimizer = OptimizerSpec{};
  return spec;
}

TEST(EngineSpec, PortableKernelsHaveNoProductsInFp8) {
  EngineSpec spec = scales_of_tensors();
  EXPECT_TRUE(resolved(spec).precision.has_f8_kernels);
  spec.kernels = KernelChoice::portable;
  EXPECT_FALSE(resolved(spec).precision.has_f8_kernels);
}

// An engine without memory runs a step to count its stack: with operands in 8 bits, plain ones, and both.
TEST(EngineSpec, Fp8TensorStepsArePlannedWithAndWithoutKernels) {
  const auto widen = [](ModelSpec& m) { m.hidden_size = 128, m.moe_intermediate_size = 128; };
  const std::pair<const char*, void (*)(EngineSpec&)> changes[] = {
      {"all on kernels", [](EngineSpec&) {}},
      {"experts of another width", [](EngineSpec& s) { s.model.moe_intermediate_size = 136; }},
      {"attention of latents",
       [](EngineSpec& s) {
         ModelSpec& m = s.model;
         m.num_kv_heads = m.num_heads, m.kv_lora_rank = 40, m.qk_rope_head_dim = 16, m.v_head_dim = 32;
       }},
      {"adapters",
       [](EngineSpec& s) {
         s.lora = {.rank = 8, .alpha = 8, .targets = {"self_attn.*", "mlp.experts.*"}};
       }},
      {"weight gradients in bf16",
       [](EngineSpec& s) { s.precision.weight_gradients = WeightGradientPrecision::compute; }},
  };
  for (const auto& [name, change] : changes) {
    for (const bool has_f8_kernels : {true, false}) {
      EngineSpec spec = scales_of_tensors();
      widen(spec.model);
      change(spec);
      spec.precision.has_f8_kernels = has_f8_kernels;
      EXPECT_NO_THROW(EXPECT_GT(Engine(spec).plan().total_bytes(), 0)) << name << " " << has_f8_kernels;
    }
  }
}

// No GPU is needed for the limits of another one.
TEST(EngineSpec, KernelsAreChosenByTheGpuLimits) {
  EngineSpec spec = training_on_gpus();
  spec.device = DeviceKind::cuda;
  spec.gpu_limits = documented_gpu_limits(8, 0, 108);
  EXPECT_EQ(limits_of_gpu(spec), documented_gpu_limits(8, 0, 108));
  EXPECT_FALSE(gpu_kernels(spec).has_hopper_kernels());
  EXPECT_FALSE(gpu_kernels(spec).are_portable()) << "cuDNN's attention may run";
  spec.gpu_limits = documented_gpu_limits(9, 0, 132);
  EXPECT_TRUE(gpu_kernels(spec).has_hopper_kernels());
  spec.kernels = KernelChoice::portable;
  EXPECT_FALSE(gpu_kernels(spec).has_hopper_kernels());
}

}  // namespace
}  // namespace moebius
