#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport/threads.h"
#include "core/error.h"
#include "device/accelerator.h"
#include "engine/engine_testing.h"
#include "io/testing.h"
#include "memory/testing.h"
#include "ops/attention/attention_cudnn.h"

namespace moebius {
namespace {

using testing::HasSubstr;

void expect_refused(const EngineSpec& spec, const std::vector<std::string>& texts) {
  try {
    Engine engine(spec);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    for (const std::string& text : texts) EXPECT_THAT(e.what(), HasSubstr(text));
  }
}

TEST(Engine, RefusesAPlanThatTheMachineCannotHold) {
  const int64_t resident = current_rss_bytes();
  expect_refused(
      huge_spec(DeviceKind::cpu),
      {"out of memory: ", " are available; weights, gradients and the optimizer alone take ",
       "of any batch: use more ranks (parallel.ep, tp or pp), train.freeze, a smaller model", "memory plan\n"});
  EXPECT_LT(current_rss_bytes() - resident, 64 << 20);
}

// Each of two ranks needs six tenths of the memory that is available here.
TEST(Engine, RefusesPlansThatTheRanksOfAMachineCannotHoldTogether) {
  EngineSpec spec{.model = huge_spec(DeviceKind::cpu).model, .shape = {.seq = 3}, .mesh = {.dp = 2, .edp = 2}};
  spec.model.num_layers = 1;
  spec.model.moe_layers = {false};
  spec.model.hidden_size = 1 << 10;
  spec.model.num_heads = spec.model.num_kv_heads = 4;
  spec.model.head_dim = spec.model.intermediate_size = 256;
  spec.model.tie_word_embeddings = true;
  spec.precision.compute = DType::f32;
  spec.model.vocab_size = static_cast<int64_t>(0.6 * static_cast<double>(available_memory_bytes())) /
                          (spec.model.hidden_size * size_of(DType::f32));
  run_threads(2, {.timeout_s = 30}, [&](Transport& world) {
    EngineSpec of_rank = spec;
    of_rank.world = &world;
    expect_refused(of_rank, {"out of memory: ", ", other ranks of the machine need ", "memory plan\n"});
  });
}

TEST(Engine, RefusesAPlanThatTheGpuCannotHold) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  expect_refused(huge_spec(DeviceKind::cuda),
                 {"out of memory: ", " of the GPU are needed: ", "384.0 MiB are kept for kernels and CUDA graphs; ",
                  " are available; weights, gradients and the optimizer alone take ", "memory plan\n"});
}

TEST(Engine, OutOfMemoryShowsTheMemoryTable) {
  Engine engine(
      {.model = huge_spec(DeviceKind::cpu).model, .shape = {.batch = 1, .seq = 3}, .device = DeviceKind::null});
  try {
    engine.run([](Step&) { throw OutOfMemory("out of device memory in a call"); });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(),
                HasSubstr("out of device memory in a call; use a shorter train.seq_len (--seq-len), more ranks "
                          "(parallel.ep, tp or pp), a smaller model, or a larger machine\nmemory plan\n"));
  }
  expect_error(ErrorKind::usage, "in a start; use a shorter train.seq_len",
               [&] { engine.with_memory_advice([] { throw OutOfMemory("in a start"); }); });
}

TEST(DeviceMemory, IsComparedBeforeAnythingIsAllocated) {
  MemoryPlan plan;
  Tensor a, b, c;
  plan.declare(a, "a", {1000}, DType::f32, Life::param);
  plan.declare(b, "b", {(3 << 20) / 4}, DType::f32, Life::grad);
  plan.declare(c, "c", {(1 << 20) / 4}, DType::f32, Life::optimizer);
  const DeviceMemory memory = device_memory(plan, 5);  // bytes of stack
  EXPECT_EQ(memory.plan_bytes, (2 + 4 + 2) << 20) << "pages of 2 MiB: one shared, two for b, one for c";
  EXPECT_EQ(memory.code_bytes, 6 << 20);
  EXPECT_EQ(device_memory(plan, 5, /*with_cudnn=*/true).code_bytes, 16 << 20);
  EXPECT_EQ(memory.workspace_bytes, 130 << 20) << "128 MiB and an answer of 256 bytes";
  const int64_t enough = memory.plan_bytes + memory.workspace_bytes + kDeviceReserveBytes;
  check_device_memory(plan, 5, enough, {});
  for (const int64_t free : {enough - 1, int64_t{5} << 20, int64_t{0}}) {
    try {
      check_device_memory(plan, 5, free, {});
      FAIL() << "no error with " << free;
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("522.0 MiB of the GPU are needed: 8.0 MiB for the plan"));
      EXPECT_THAT(e.what(), HasSubstr(bytes_text(free) + " are available; "));
      EXPECT_THAT(e.what(), HasSubstr("memory plan\n"));
    }
  }
}

TEST(DeviceMemory, OfRanksThatShareAGpuIsASumWithoutTheirContexts) {
  const DeviceMemory one{.plan_bytes = 58 << 20, .workspace_bytes = 130 << 20, .code_bytes = 6 << 20};
  EXPECT_EQ(one.text(),
            "predicted peak on the GPU 194.0 MiB (plan 58.0 MiB, workspaces of matrix products 130.0 MiB, kernels 6.0 "
            "MiB)");
  EXPECT_EQ(one.times(4).total_bytes(), 4 * one.total_bytes());
  EXPECT_EQ(one.times(4).text(),
            "predicted peak on the GPU 776.0 MiB of the 4 ranks that share it, without their contexts (plan 232.0 MiB, "
            "workspaces of matrix products 520.0 MiB, kernels 24.0 MiB)");
}

// A GPU's memory is not counted, and the host's is.
TEST(DeviceMemory, PinnedMemoryIsComparedWithTheHost) {
  MemoryPlan plan;
  Tensor here, there;
  plan.declare(here, "here", {(3 << 20) / 4}, DType::f32, Life::grad);
  plan.declare(there, "there", {(8 << 20) / 4}, DType::f32, Life::host);
  EXPECT_EQ(device_memory(plan, 0).plan_bytes, 4 << 20);
  check_pinned_memory(plan, 8 << 20);
  expect_error(
      ErrorKind::usage,
      "out of memory: optimizer.offload keeps 8.0 MiB in pinned memory of the host, and 7.0 MiB are available; "
      "set optimizer.state = \"8bit\" or optimizer.master = \"bf16_stochastic\", use more ranks on more "
      "machines, or keep it on the GPU (optimizer.offload = false)\nmemory plan\n",
      [&] { check_pinned_memory(plan, 7 << 20); });
}

// The message names the tensors there, and the keys that reduce them.
TEST(DeviceMemory, ActivationsThatArePinnedAreComparedWithTheHost) {
  OffloadedPlan offloaded;
  MemoryPlan& plan = offloaded.plan;
  check_pinned_memory(plan, 8 << 20);
  expect_error(
      ErrorKind::usage,
      "out of memory: memory.offload keeps 8.0 MiB in pinned memory of the host, and 7.0 MiB are available; set "
      "a smaller memory.offload_fraction, fewer names in memory.offload, use more ranks on more machines, or "
      "keep it on the GPU (memory.offload = [])\nmemory plan\n",
      [&] { check_pinned_memory(plan, 7 << 20); });
  check_pinned_memory(plan, 24 << 20, 16 << 20);
  expect_error(
      ErrorKind::usage,
      "memory.offload keeps 8.0 MiB in pinned memory of the host, other ranks of the machine 16.0 MiB, and 23.0 "
      "MiB are available",
      [&] { check_pinned_memory(plan, 23 << 20, 16 << 20); });
  Tensor moments;
  plan.declare(moments, "moments", {(4 << 20) / 4}, DType::f32, Life::host);
  expect_error(
      ErrorKind::usage,
      "out of memory: memory.offload keeps 8.0 MiB of activations; with optimizer.offload, 12.0 MiB are in "
      "pinned memory of the host, and 7.0 MiB are available; set a smaller memory.offload_fraction, fewer names "
      "in memory.offload, optimizer.state = \"8bit\" or",
      [&] { check_pinned_memory(plan, 7 << 20); });
}

// Returns one dense and one MoE layer.
EngineSpec small_spec(int64_t size, int64_t vocab, DType compute) {
  return {.model = {.vocab_size = vocab,
                    .hidden_size = size,
                    .num_layers = 2,
                    .num_heads = 2,
                    .num_kv_heads = 1,
                    .head_dim = size,
                    .intermediate_size = size / 2,
                    .max_position_embeddings = 16,
                    .moe_layers = {false, true},
                    .num_experts = 8,
                    .top_k = 2,
                    .moe_intermediate_size = size / 2},
          .precision = {.compute = compute},
          .use = ModelUse::training,
          .shape = {.batch = 1, .seq = 16},
          .optimizer = OptimizerSpec{.lr = 0.5},
          .device = DeviceKind::cuda};
}

TEST(Engine, NamesTheOpsThatRunOnFallbackKernels) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const auto text = [](int64_t size, int64_t vocab, DType compute) {
    Engine engine(small_spec(size, vocab, compute));
    engine.forward_backward();
    return engine.fallback_kernels_text();
  };
  EXPECT_EQ(text(64, 256, DType::bf16), "");
  const std::string f32 = "fallback kernels: f32: no tensor cores (bf16 has them)";
  EXPECT_EQ(text(64, 257, DType::f32), f32);
  const std::string of_vocab = text(64, 257, DType::bf16);
  EXPECT_THAT(of_vocab, HasSubstr("lm_loss: its products and its rows of logits need a vocabulary"));
  EXPECT_THAT(of_vocab, HasSubstr("is a multiple of 8; got 257"));
  EXPECT_THAT(of_vocab, testing::Not(HasSubstr("rms_norm")));
  const std::string odd = text(36, 256, DType::bf16);
  for (const char* op : {"rms_norm_fwd", "rms_norm_bwd", "rope_fwd", "embedding_fwd", "router_logits_fwd", "gated_up",
                         "d_gated_down", "expert_up", "attention_fwd"})
    EXPECT_THAT(odd, HasSubstr(op));
  EXPECT_THAT(odd, testing::Not(HasSubstr("lm_loss")));
}

// Advice names what would change the memory and is not in use yet.
TEST(MemoryAdvice, NamesOnlyUnusedSettingsThatWouldHelp) {
  MemoryPlan plan;
  Tensor w, kept;
  plan.declare(w, "w", {1 << 20}, DType::f32, Life::param);
  plan.declare(kept, "kept", {1 << 20}, DType::f32, Life::saved);
  MemoryUse use{.model = {.num_layers = 2, .moe_layers = {true, true}, .num_experts = 4}, .training = true, .batch = 2};
  constexpr int64_t kFits = 5 << 20, kTooLittle = 3 << 20;
  EXPECT_EQ(
      memory_advice(use, plan, kFits),
      "use a smaller train.micro_batch (--batch), more of memory.recompute (not in it yet: norm, qkv, attention, "
      "expert_up, layer), a shorter train.seq_len (--seq-len), more ranks (parallel.ep, tp or pp), train.freeze, a "
      "smaller model, or a larger machine");
  EXPECT_EQ(memory_advice(use, plan, kTooLittle),
            "weights, gradients and the optimizer alone take 4.0 MiB, of any batch: use more ranks (parallel.ep, tp or "
            "pp), train.freeze, a smaller model, or a larger machine");
  use.batch = 1, use.freezes = true, use.recompute.norm = use.recompute.attention = use.recompute.expert_up = true;
  EXPECT_THAT(memory_advice(use, plan, kFits),
              testing::StartsWith("use more of memory.recompute (not in it yet: qkv, layer), a shorter train.seq_len"));
  EXPECT_THAT(memory_advice(use, plan, kFits), HasSubstr(", a longer train.freeze, "));
  use.has_adapters = true;
  EXPECT_THAT(memory_advice(use, plan, kFits), HasSubstr(", a smaller lora.rank, "));
  use.recompute.layer = true;
  EXPECT_THAT(memory_advice(use, plan, kFits), testing::StartsWith("use a shorter train.seq_len"));
  use.model = {.num_layers = 2, .moe_layers = {false, false}}, use.training = false;
  EXPECT_EQ(memory_advice(use, plan, kTooLittle),
            "weights alone take 4.0 MiB, of any batch: "
            "use more ranks (parallel.tp or pp), a smaller model, or a larger machine");
}

// Kernels of cuDNN are part of the prediction where cuDNN takes this attention, unless the build has CUDA and no
// cuDNN. It takes no heads of 16, and nothing on a Hopper GPU with run.kernels = "portable".
TEST(DeviceMemory, CountsCudnnOnlyIfItComputesAttention) {
  const auto code_bytes = [](int64_t head_dim, DType dtype, KernelChoice kernels = KernelChoice::automatic) {
    EngineSpec spec = {.model = huge_spec(DeviceKind::null).model,
                       .precision = {.compute = dtype},
                       .shape = {.batch = 1, .seq = 64, .documents = false},
                       .device = DeviceKind::null,
                       .target = DeviceKind::cuda,
                       .kernels = kernels};
    spec.model.head_dim = head_dim;
    spec.model.max_position_embeddings = 64;
    return Engine(spec).device_memory().code_bytes;
  };
  const auto heads = [](int64_t n) { return Tensor{.shape = {64, n, 64}, .dtype = DType::bf16}; };
  EXPECT_EQ(cudnn_is_chosen(AttentionFwd{.q_THd = heads(8), .k_UGd = heads(8), .v_UGd = heads(8)}), has_cudnn());
  EXPECT_EQ(code_bytes(64, DType::bf16), (has_cudnn() ? 16 : 6) << 20);
  EXPECT_EQ(code_bytes(64, DType::f32), 6 << 20);
  EXPECT_EQ(code_bytes(16, DType::bf16), 6 << 20);
  EXPECT_EQ(code_bytes(64, DType::bf16, KernelChoice::portable), 6 << 20);
}

// Returns the step stack of a training step with causal sequences, whose backward pass has scratch.
int64_t stack_bytes(int64_t head_dim, bool for_hopper, KernelChoice kernels) {
  EngineSpec spec = huge_spec(DeviceKind::null);
  spec.precision.compute = DType::bf16;
  spec.shape = {.batch = 1, .seq = 4096, .documents = false};
  spec.target = DeviceKind::cuda;
  spec.counts_for_hopper = for_hopper;
  spec.kernels = kernels;
  spec.model.num_layers = 1;
  spec.model.moe_layers = {false};
  spec.model.intermediate_size = 64;
  spec.model.num_heads = spec.model.num_kv_heads = 8;
  spec.model.hidden_size = 64;
  spec.model.vocab_size = 512;
  spec.model.max_position_embeddings = 4096;
  spec.model.head_dim = head_dim;
  return Engine(spec).plan().bytes(Life::stack);
}

// The scratch of these kernels is larger than any other that the step needs.
TEST(Engine, CountsScratchOnlyOfKernelsThatMayRun) {
  const int64_t hopper = stack_bytes(128, true, KernelChoice::automatic),
                portable = stack_bytes(128, true, KernelChoice::portable);
  EXPECT_LT(portable, hopper);
  EXPECT_EQ(stack_bytes(128, false, KernelChoice::portable), portable);
  if (!has_cudnn()) return;
  EXPECT_EQ(stack_bytes(80, false, KernelChoice::automatic), stack_bytes(80, true, KernelChoice::automatic));
  EXPECT_GT(stack_bytes(128, false, KernelChoice::automatic), hopper) << "cuDNN's backward pass";
  EXPECT_LT(stack_bytes(96, false, KernelChoice::portable), stack_bytes(96, false, KernelChoice::automatic));
}

// Records the requested micro-batches, each in its own host memory.
struct NotedFills final : BatchSource {
  explicit NotedFills(Engine& engine) : engine(engine) {}
  void fill(MicroBatch& batch, int64_t m) override {
    EXPECT_EQ(&batch, &engine.batch(m));
    filled.push_back(m);
  }
  Engine& engine;
  std::vector<int64_t> filled;
};

TEST(Engine, ADryRunHasEveryMicroBatchOfAGpu) {
  EngineSpec spec = huge_spec(DeviceKind::null);
  spec.target = DeviceKind::cuda;
  spec.num_micro_batches = 3;
  Engine engine(spec);
  Trace trace;
  engine.set_trace(&trace);
  NotedFills source(engine);
  engine.step(source, 1, 0.1);
  EXPECT_EQ(source.filled, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(trace.totals().at("lm_loss").calls, 3);
  EXPECT_EQ(trace.totals().at("adamw").calls > 0, true);
}

// Layers read the choice from the engine's mesh.
TEST(Engine, ExchangesOfTpAndCpOverlapOnCpusAndBetweenNodes) {
  EngineSpec spec = huge_spec(DeviceKind::null);
  spec.target = DeviceKind::cpu;
  spec.shape.seq = 32;
  spec.mesh = {.tp = 2, .cp = 2, .edp = 4};
  const auto overlap = [&](auto&& change) {
    EngineSpec changed = spec;
    change(changed);
    const MeshShape mesh = Engine(changed).mesh().shape();
    return std::pair(mesh.tp_overlap, mesh.cp_overlap);
  };
  const auto on_gpus = [](EngineSpec& s, int64_t node) { s.target = DeviceKind::cuda, s.mesh.ranks_per_node = node; };
  EXPECT_EQ(overlap([](EngineSpec&) {}), std::pair(true, true));
  EXPECT_EQ(overlap([](EngineSpec& s) { s.overlap = false; }), std::pair(false, false));
  EXPECT_EQ(overlap([](EngineSpec& s) { s.shape.cp_comm = s.shape.cp_comm_window = CpComm::ring; }),
            std::pair(true, false));
  EXPECT_EQ(overlap([&](EngineSpec& s) { on_gpus(s, 8); }), std::pair(false, false));
  EXPECT_EQ(overlap([&](EngineSpec& s) { on_gpus(s, 2); }), std::pair(false, true));
  EXPECT_EQ(overlap([&](EngineSpec& s) { on_gpus(s, 1); }), std::pair(true, true));
  EXPECT_EQ(overlap([&](EngineSpec& s) { on_gpus(s, 1), s.sums = GpuSums::nccl; }), std::pair(false, false));
}

TEST(Engine, CountsAPlanOfAnySizeOnTheNullDevice) {
  EXPECT_GT(Engine(huge_spec(DeviceKind::null)).plan().total_bytes(), int64_t{1} << 40);
}

}  // namespace
}  // namespace moebius
