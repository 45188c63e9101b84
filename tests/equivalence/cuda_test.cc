// The training step on a GPU: with and without a CUDA graph, repeated, and compared with the CPU.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cmath>

#include "device/accelerator.h"
#include "device/gpu_limits.h"
#include "io/testing.h"
#include "tests/equivalence/gpu_specs.h"
#include "train/evaluate.h"
#include "train/testing.h"

namespace moebius {
namespace {

class OnGpu : public ::testing::TestWithParam<Way> {
 protected:
  using SpecOn = EngineSpec (*)(DeviceKind, DType, bool);

  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static DType compute() { return GetParam().compute; }
  static EngineSpec on_gpu(SpecOn spec_on, bool graph = true) {
    EngineSpec spec = spec_on(DeviceKind::cuda, compute(), graph);
    spec.kernels = GetParam().kernels;
    return spec;
  }
  static EngineSpec on_cpu(SpecOn spec_on) { return spec_on(DeviceKind::cpu, compute(), true); }
};

TEST_P(OnGpu, CapturingChangesNoBit) {
  for (const auto spec : kSpecs) {
    Engine captured(on_gpu(spec)), eager(on_gpu(spec, false));
    EXPECT_EQ(train(initialised(captured), 6), train(initialised(eager), 6));
    EXPECT_EQ(masters(captured), masters(eager));
  }
}

TEST_P(OnGpu, TheSameRunGivesTheSameBits) {
  for (const auto spec : kSpecs) {
    Engine one(on_gpu(spec)), other(on_gpu(spec));
    EXPECT_EQ(train(initialised(one), 5), train(initialised(other), 5));
    EXPECT_EQ(masters(one), masters(other));
  }
}

TEST_P(OnGpu, NothingIsAllocatedAfterCapture) {
  Engine engine(on_gpu(wide_spec_on));
  train(initialised(engine), 3);
  Accelerator& gpu = engine.stream().accelerator();
  const int64_t before = gpu.info().free_bytes;
  train(engine, 4, 4);
  EXPECT_EQ(gpu.info().free_bytes, before);
}

TEST_P(OnGpu, TheStackEqualsThePlan) {
  for (const auto spec : kSpecs) {
    Engine engine(on_gpu(spec));
    train(initialised(engine), 1);
    EXPECT_EQ(EngineTestAccess::stack_high_water(engine), engine.plan().bytes(Life::stack));
  }
}

TEST_P(OnGpu, RecomputeChangesNoBit) {
  Engine kept(on_gpu(wide_spec_on));
  const std::vector<double> expected = train(initialised(kept), 4);
  for (const auto& [name, flag] : kRecomputeNames) {
    SCOPED_TRACE(name);
    EngineSpec spec = on_gpu(wide_spec_on);
    if (flag == &RecomputeSpec::mla_up_proj && spec.model.kv_lora_rank == 0) continue;
    spec.recompute.*flag = true;
    Engine recomputed(spec);
    EXPECT_EQ(train(initialised(recomputed), 4), expected);
    EXPECT_EQ(masters(recomputed), masters(kept));
    EXPECT_EQ(EngineTestAccess::stack_high_water(recomputed), recomputed.plan().bytes(Life::stack));
    EXPECT_LT(recomputed.plan().bytes(Life::saved), kept.plan().bytes(Life::saved));
  }
}

TEST_P(OnGpu, FusionChangesNoBit) {
  for (const auto spec : {spec_on, wide_spec_on}) {
    EngineSpec apart = on_gpu(spec);
    apart.fusion = false;
    Engine one(on_gpu(spec)), two(apart);
    EXPECT_EQ(train(initialised(one), 4), train(initialised(two), 4));
    EXPECT_EQ(masters(one), masters(two));
  }
}

// All recomputation together, and with other settings that decide which kernels run and
// what is captured.
TEST_P(OnGpu, RecomputeInCombinationChangesNoBit) {
  for (const auto kept_spec : {documents_on, balanced_on, sinkhorn_on, many_on, whole_norm_on, frozen_on}) {
    Engine kept(on_gpu(kept_spec));
    const std::vector<double> expected = train(initialised(kept), 4);
    for (const bool layer : {false, true}) {
      EngineSpec spec = on_gpu(kept_spec);
      for (const auto& [name, flag] : kRecomputeNames) spec.recompute.*flag = (flag == &RecomputeSpec::layer) == layer;
      Engine recomputed(spec);
      EXPECT_EQ(train(initialised(recomputed), 4), expected);
      EXPECT_EQ(masters(recomputed), masters(kept));
    }
  }
}

TEST_P(OnGpu, FrozenParametersAreUnchanged) {
  Engine engine(on_gpu(frozen_on));
  Stream s = engine.stream();
  const auto weights = [&] {
    std::vector<std::vector<std::byte>> all;
    for (const Param& p : engine.model().params().all()) {
      all.emplace_back(p.master().num_bytes());
      copy_to_host(s, all.back().data(), p.master().data, p.master().num_bytes());
    }
    return all;
  };
  initialised(engine);
  const auto before = weights();
  train(engine, 4);
  const auto after = weights();
  size_t i = 0;
  int64_t frozen = 0, trained = 0;
  for (const Param& p : engine.model().params().all()) {
    EXPECT_EQ(after[i] == before[i], !p.has_grad) << p.spec.name;
    frozen += p.frozen;
    trained += p.has_grad;
    ++i;
  }
  EXPECT_GT(frozen, 3);
  EXPECT_GT(trained, 3);
}

// Each micro-batch is filled while the one before it is computed.
TEST_P(OnGpu, FillingDuringComputeChangesNoBit) {
  Engine loaded_late(on_gpu(many_on)), before(on_gpu(many_on));
  const std::vector<double> expected = train(initialised(before), 5);
  initialised(loaded_late);
  std::vector<double> got;
  RandomBatches source(loaded_late.spec());
  for (int64_t step = 1; step <= 5; ++step) {
    loaded_late.step(source, step, 1e-4 * static_cast<double>(step));
    got.push_back(loaded_late.loss());
    loaded_late.end_of_step();
  }
  EXPECT_EQ(got, expected);
  EXPECT_EQ(masters(loaded_late), masters(before));
}

// A traced step is eager, between replayed ones.
TEST_P(OnGpu, ATraceChangesNoBit) {
  Engine traced(on_gpu(wide_spec_on)), plain(on_gpu(wide_spec_on));
  std::vector<double> got = train(initialised(traced), 4);
  Trace trace;
  traced.set_trace(&trace);
  got.push_back(train(traced, 1, 5)[0]);
  traced.set_trace(nullptr);
  got.push_back(train(traced, 1, 6)[0]);
  EXPECT_EQ(got, train(initialised(plain), 6));
  EXPECT_EQ(masters(traced), masters(plain));
  EXPECT_FALSE(trace.events().empty());
}

RunSpec evaluation_of(const EngineSpec& spec, const std::string& prefix) {
  RunSpec run;
  run.model = spec.model;
  run.data.separate_documents = spec.shape.documents;
  run.data.valid = {{.prefix = prefix}};
  run.train.seq_len = spec.shape.seq;
  run.train.micro_batch = run.train.global_batch = spec.shape.batch;
  return run;
}

// Evaluation uses the buffers of the first micro-batch, and sums of its own. Its loss is that
// of the CPU.
TEST_P(OnGpu, EvaluationBetweenCapturedStepsChangesNoBit) {
  const TestDir dir;
  const std::string prefix = testing::write_dataset(dir, "valid", 1100);
  for (const auto spec : {balanced_on, recomputed_on}) {
    Engine evaluated(on_gpu(spec)), plain(on_gpu(spec)), cpu(on_cpu(spec));
    const RunSpec run = evaluation_of(plain.spec(), prefix);
    Loader loader(run.data.valid, run, /*shuffle=*/false, evaluated.data_share());
    initialised(evaluated);
    const EvalResult first = evaluate(evaluated, loader, 2), expected = evaluate(initialised(cpu), loader, 2);
    EXPECT_EQ(first.tokens, expected.tokens);
    EXPECT_GT(first.tokens, 0);
    EXPECT_NEAR(first.loss, expected.loss, (compute() == DType::f32 ? 1e-5 : 1e-2) * expected.loss);
    EXPECT_EQ(evaluate(evaluated, loader, 2).loss, first.loss);
    std::vector<double> got;
    for (int64_t step = 1; step <= 6; ++step) {
      got.push_back(train(evaluated, 1, step)[0]);
      EXPECT_TRUE(std::isfinite(evaluate(evaluated, loader, 2).loss));
    }
    EXPECT_EQ(got, train(initialised(plain), 6));
    EXPECT_EQ(masters(evaluated), masters(plain));
  }
}

double rms_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

std::vector<double> losses_of(const EngineSpec& spec, int64_t num_steps = 20) {
  Engine engine(spec);
  return train(initialised(engine), num_steps);
}

// Both devices add f32 in an order of their own. The error is sqrt(n) 2^-24 of a sum of n products,
// amplified by 20 steps.
// In bf16 an activation near a tie rounds the other way, and 20 steps amplify that like any
// other rounding. So a run in bf16 is the curve of f32 with noise, and the CPU's own bf16 run
// shows how much.
// Two such runs differ by sqrt(2) of the noise. Twice the noise is allowed.
TEST_P(OnGpu, LossesAreThoseOfTheCpu) {
  for (const auto spec : {spec_on, wide_spec_on}) {
    const auto gpu = losses_of(on_gpu(spec)), cpu = losses_of(on_cpu(spec));
    if (compute() == DType::f32) {
      for (size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(gpu[i], cpu[i], 1e-5 * cpu[i]) << "step " << i + 1;
    } else {
      const auto exact = losses_of(spec(DeviceKind::cpu, DType::f32, true));
      EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
    }
  }
}

// Every kind of batch and balance is compared. The steps are few, since an expert chosen by a
// narrow margin changes all after it.
TEST_P(OnGpu, FirstLossesOfEverySpecAreThoseOfTheCpu) {
  if (compute() != DType::f32) GTEST_SKIP() << "bf16 rounds the logits that choose";
  for (const auto spec : kSpecs) {
    const auto gpu = losses_of(on_gpu(spec), 4), cpu = losses_of(on_cpu(spec), 4);
    for (size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(gpu[i], cpu[i], 1e-5 * cpu[i]) << "step " << i + 1;
  }
}

class QuantisedOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static EngineSpec spec(DeviceKind device, bool graph = true) {
    return quantised_on(device, PrecisionRecipe::fp8_block, graph);
  }
  static void expect_eager_steps_and_those_of_the_cpu(PrecisionRecipe recipe, KernelChoice kernels) {
    SCOPED_TRACE(fmt::format("{}, {}", name_of(recipe), name_of(kernels)));
    const auto on_gpu = [&](bool graph) {
      EngineSpec spec = quantised_on(DeviceKind::cuda, recipe, graph);
      spec.kernels = kernels;
      return spec;
    };
    Engine captured(on_gpu(true)), eager(on_gpu(false)), passes(on_gpu(false));
    const std::vector<double> expected = train(initialised(captured), 4);
    EXPECT_EQ(train(initialised(eager), 4), expected);
    EXPECT_EQ(train_by_passes(initialised(passes), 4), expected);
    EXPECT_EQ(masters(captured), masters(eager));
    EngineSpec plain = spec(DeviceKind::cpu);
    plain.precision = {.compute = DType::f32};
    const auto gpu = losses_of(on_gpu(true)), cpu = losses_of(quantised_on(DeviceKind::cpu, recipe)),
               exact = losses_of(plain);
    EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
  }
};

// A step quantises the weights once; passes on their own quantise them at each use.
TEST_F(QuantisedOnGpu, CapturingAndCopiesOfWeightsChangeNoBit) {
  Engine captured(spec(DeviceKind::cuda)), eager(spec(DeviceKind::cuda, false)), passes(spec(DeviceKind::cuda, false));
  const std::vector<double> expected = train_by_passes(initialised(passes), 6);
  EXPECT_EQ(train(initialised(captured), 6), expected);
  EXPECT_EQ(train(initialised(eager), 6), expected);
  EXPECT_EQ(masters(captured), masters(passes));
  EXPECT_EQ(masters(eager), masters(passes));
}

TEST_F(QuantisedOnGpu, RecomputeAndFusionChangeNoBit) {
  Engine kept(spec(DeviceKind::cuda));
  const std::vector<double> expected = train(initialised(kept), 4);
  EngineSpec recomputes = spec(DeviceKind::cuda), apart = spec(DeviceKind::cuda);
  recomputes.recompute.layer = true;
  apart.fusion = false;
  for (const EngineSpec& other : {recomputes, apart}) {
    Engine engine(other);
    EXPECT_EQ(train(initialised(engine), 4), expected);
    EXPECT_EQ(masters(engine), masters(kept));
  }
}

// Each operand is quantised as on the CPU. Hopper multiplies those of fp8_tensor as they are; other products are
// emulated in bf16.
TEST_F(QuantisedOnGpu, OtherRecipesAreThoseOfEagerStepsAndOfTheCpu) {
  for (const auto recipe : {PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4})
    expect_eager_steps_and_those_of_the_cpu(recipe, KernelChoice::automatic);
}

TEST_F(QuantisedOnGpu, RecipesOnPortableKernelsAreThoseOfEagerStepsAndOfTheCpu) {
  for (const auto recipe : {PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4})
    expect_eager_steps_and_those_of_the_cpu(recipe, KernelChoice::portable);
}

TEST_F(QuantisedOnGpu, RecomputeAndFusionOnPortableKernelsChangeNoBit) {
  EngineSpec kept = quantised_on(DeviceKind::cuda, PrecisionRecipe::fp8_tensor);
  kept.kernels = KernelChoice::portable;
  EngineSpec recomputes = kept, apart = kept;
  recomputes.recompute.layer = true;
  apart.fusion = false;
  for (const EngineSpec& other : {recomputes, apart}) EXPECT_EQ(losses_of(other), losses_of(kept));
}

// FP8 kernels and their emulation multiply the same numbers, and add them in another order.
TEST_F(QuantisedOnGpu, ScalesOfTensorsOnKernelsAreThoseOfTheEmulation) {
  if (!query_gpu_limits().is_hopper()) GTEST_SKIP() << "FP8 products are Hopper's";
  EngineSpec on_kernels = quantised_on(DeviceKind::cuda, PrecisionRecipe::fp8_tensor), emulated = on_kernels,
             plain = spec(DeviceKind::cpu);
  emulated.precision.has_f8_kernels = false;
  plain.precision = {.compute = DType::f32};
  const auto kernels = losses_of(on_kernels), emulation = losses_of(emulated), exact = losses_of(plain);
  EXPECT_NE(kernels, emulation);
  EXPECT_LE(rms_difference(kernels, exact), 2 * rms_difference(emulation, exact));
  EXPECT_NEAR(kernels[0], emulation[0], 1e-3 * emulation[0]);
  EngineSpec recomputes = on_kernels, apart = on_kernels;
  recomputes.recompute.layer = true;
  apart.fusion = false;
  for (const EngineSpec& other : {recomputes, apart}) EXPECT_EQ(losses_of(other), kernels);
}

// Products of both kinds follow each other, on the tensor and on its quantised copy.
TEST_F(QuantisedOnGpu, WeightGradientsInBf16AreThoseOfEagerStepsAndOfTheCpu) {
  const auto in_bf16 = [](EngineSpec spec) {
    spec.precision.weight_gradients = WeightGradientPrecision::compute;
    return spec;
  };
  Engine captured(in_bf16(spec(DeviceKind::cuda))), eager(in_bf16(spec(DeviceKind::cuda, false)));
  EXPECT_EQ(train(initialised(captured), 4), train(initialised(eager), 4));
  EXPECT_EQ(masters(captured), masters(eager));
  EngineSpec plain = spec(DeviceKind::cpu);
  plain.precision = {.compute = DType::f32};
  const auto gpu = losses_of(in_bf16(spec(DeviceKind::cuda))), cpu = losses_of(in_bf16(spec(DeviceKind::cpu))),
             exact = losses_of(plain);
  EXPECT_NE(gpu, losses_of(spec(DeviceKind::cuda)));
  EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
}

TEST_F(QuantisedOnGpu, WeightsHeldInEightBitsChangeNoBit) {
  const auto held = [](EngineSpec spec) {
    spec.precision.weights = PrecisionChoice::recipe;
    return spec;
  };
  Engine plain(spec(DeviceKind::cuda)), captured(held(spec(DeviceKind::cuda))),
      eager(held(spec(DeviceKind::cuda, false))), passes(held(spec(DeviceKind::cuda, false)));
  const std::vector<double> expected = train(initialised(plain), 6);
  for (Engine* engine : {&captured, &eager}) EXPECT_EQ(train(initialised(*engine), 6), expected);
  EXPECT_EQ(train_by_passes(initialised(passes), 6), expected);
  for (Engine* engine : {&captured, &eager, &passes}) EXPECT_EQ(masters(*engine), masters(plain));
  EXPECT_LT(captured.plan().bytes(Life::param), plain.plan().bytes(Life::param));
}

// One rank rounds the rows to its experts too, which gradients of weights in bf16 show.
TEST_F(QuantisedOnGpu, RowsInEightBitsAreThoseOfEagerStepsAndOfTheCpu) {
  const auto packed = [](DeviceKind device, bool graph, PrecisionChoice dispatch = PrecisionChoice::recipe) {
    EngineSpec packed = spec(device, graph);
    packed.precision.dispatch = dispatch;
    packed.precision.weight_gradients = WeightGradientPrecision::compute;
    return packed;
  };
  const auto gpu = losses_of(packed(DeviceKind::cuda, true)), cpu = losses_of(packed(DeviceKind::cpu, false));
  EXPECT_EQ(losses_of(packed(DeviceKind::cuda, false)), gpu);
  EXPECT_NE(losses_of(packed(DeviceKind::cuda, true, PrecisionChoice::compute)), gpu);
  EngineSpec plain = spec(DeviceKind::cpu);
  plain.precision = {.compute = DType::f32};
  const auto exact = losses_of(plain);
  EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
}

TEST_F(QuantisedOnGpu, ActivationsInEightBitsAreThoseOfEagerStepsAndOfTheCpu) {
  const auto saved = [](DeviceKind device, bool graph = true, WeightGradientPrecision of_dw = {}) {
    EngineSpec saved = spec(device, graph);
    saved.precision.activations = PrecisionChoice::recipe;
    saved.precision.weight_gradients = of_dw;
    return saved;
  };
  for (const auto of_dw : {WeightGradientPrecision::recipe, WeightGradientPrecision::compute}) {
    Engine captured(saved(DeviceKind::cuda, true, of_dw)), plain(spec(DeviceKind::cuda));
    const std::vector<double> expected = train(initialised(captured), 4);
    EXPECT_LT(captured.plan().bytes(Life::saved), plain.plan().bytes(Life::saved));
    EXPECT_NE(train(initialised(plain), 4), expected);
    EngineSpec recomputes = saved(DeviceKind::cuda, true, of_dw), apart = saved(DeviceKind::cuda, true, of_dw),
               on_host = saved(DeviceKind::cuda, true, of_dw);
    recomputes.recompute.layer = true;
    apart.fusion = false;
    on_host.offload.tensors.expert_up = on_host.offload.tensors.mlp = true;
    for (const EngineSpec& other : {saved(DeviceKind::cuda, false, of_dw), recomputes, apart, on_host}) {
      Engine engine(other);
      EXPECT_EQ(train(initialised(engine), 4), expected);
      EXPECT_EQ(masters(engine), masters(captured));
    }
  }
  EngineSpec plain = spec(DeviceKind::cpu);
  plain.precision = {.compute = DType::f32};
  const auto gpu = losses_of(saved(DeviceKind::cuda)), cpu = losses_of(saved(DeviceKind::cpu)),
             exact = losses_of(plain);
  EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
}

// The bound is that of OnGpu: a run is the curve of f32 with noise, here that of FP8, which the CPU's own run shows.
TEST_F(QuantisedOnGpu, LossesAreThoseOfTheCpu) {
  EngineSpec plain = spec(DeviceKind::cpu);
  plain.precision = {.compute = DType::f32};
  const auto gpu = losses_of(spec(DeviceKind::cuda)), cpu = losses_of(spec(DeviceKind::cpu)), exact = losses_of(plain);
  EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
}

TEST(GpuSpecs, CopiesOfWeightsChangeNoBitOnTheCpu) {
  for (const PrecisionRecipe recipe :
       {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4}) {
    SCOPED_TRACE(name_of(recipe));
    Engine step(quantised_on(DeviceKind::cpu, recipe)), passes(quantised_on(DeviceKind::cpu, recipe));
    EXPECT_TRUE(step.model().params().has_copies());
    EXPECT_EQ(train(initialised(step), 3), train_by_passes(initialised(passes), 3));
    EXPECT_EQ(masters(step), masters(passes));
  }
}

// This runs where there is no GPU too. Otherwise a spec that no engine accepts would fail
// on GPUs only.
TEST(GpuSpecs, TrainOnTheCpu) {
  for (const auto spec : kSpecs) {
    const std::vector<double> losses = losses_of(spec(DeviceKind::cpu, DType::f32, true), 2);
    EXPECT_GT(losses[0], 0);
    EXPECT_TRUE(std::isfinite(losses[1]));
    EXPECT_NE(losses[1], losses[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, OnGpu, ::testing::ValuesIn(kWays), [](const auto& info) { return name_of(info.param); });

// The memory that a run will hold is predicted within 3 % before it holds any.
// Kernels that earlier tests have loaded are not loaded again, so a run may hold less.
TEST(OnGpuMemory, IsPredictedBeforeThePlanIsBound) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
    for (const auto spec_of : {wide_spec_on, documents_on, many_on}) {
      SCOPED_TRACE(name_of(kernels));
      EngineSpec dry_run_spec = spec_of(DeviceKind::cuda, DType::bf16, true);
      dry_run_spec.model.vocab_size = 300'000;
      dry_run_spec.kernels = kernels;
      EngineSpec spec = dry_run_spec;
      dry_run_spec.device = DeviceKind::null;
      const int64_t predicted = Engine(dry_run_spec).device_memory().total_bytes();
      Engine engine(spec);
      EXPECT_EQ(engine.device_memory().total_bytes(), predicted);
      train(initialised(engine), 4);
      engine.sample_peak_memory();
      EXPECT_LE(engine.peak_bytes(), 1.03 * static_cast<double>(predicted));
      EXPECT_GE(engine.peak_bytes(), 0.97 * static_cast<double>(predicted) - (16 << 20));
    }
  }
}

// Trains 4 steps, then makes the gates of all experts equal, so that experts 0 and 1 take all tokens and others get
// none. Returns the losses of two more steps.
std::vector<double> losses_of_one_sided_routing(const EngineSpec& spec) {
  Engine engine(spec);
  train(initialised(engine), 4);
  Stream s = engine.stream();
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.name.find(".gate.weight") == std::string::npos) continue;
    const std::vector<std::byte> zeros(p.w.num_bytes());
    copy_to_device(s, p.w.data, zeros.data(), p.w.num_bytes());
  }
  synchronize(s);
  return train(engine, 2, 5);
}

// The captured step must not have kept a count.
TEST(OnGpuRouting, ACapturedStepFollowsTheRouter) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const auto cpu = losses_of_one_sided_routing(wide_spec_on(DeviceKind::cpu, DType::f32));
  for (const Way& way : kWays) {
    SCOPED_TRACE(name_of(way));
    EngineSpec captured = wide_spec_on(DeviceKind::cuda, way.compute);
    captured.kernels = way.kernels;
    EngineSpec eager = captured;
    eager.graph = false;
    const auto losses = losses_of_one_sided_routing(captured);
    EXPECT_EQ(losses, losses_of_one_sided_routing(eager));
    EXPECT_TRUE(std::isfinite(losses[1]));
    if (way.compute == DType::f32) {
      EXPECT_NEAR(losses[0], cpu[0], 1e-5 * cpu[0]);
    }
  }
}

}  // namespace
}  // namespace moebius
