// A build without CUDA predicts the same memory and time for a GPU as a build with CUDA and cuDNN 9.19. These values
// change with the kernels, with the tensors that a step keeps, and with the planner's costs. After such a change,
// copy the new values from the failures.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ops/attention/attention_cudnn.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

struct Planned {
  const char* name;
  const char* recipe;
  std::vector<std::string> set;
  int64_t ranks;
  bool needs_cudnn;      // a build with CUDA and without cuDNN 9.19 predicts less memory
  int64_t memory_bytes;  // of the fullest rank
  double step_ms;
  int capability = 90;  // of the GPU
};

const Planned kPlanned[] = {
    {"bf16", "bench_qwen3_30b_a3b_8layers.toml", {}, 1, false, 121001476096, 1473.83887},
    {"f32",
     "bench_qwen3_30b_a3b_8layers.toml",
     {"precision.compute=\"f32\"", "train.micro_batch=1"},
     1,
     false,
     98868133888,
     2608.58084},
    {"fp8_block",
     "bench_qwen3_30b_a3b_8layers.toml",
     {"precision.recipe=\"fp8_block\""},
     1,
     false,
     130971336704,
     1369.30165},
    {"whole_sequences", "bench_olmoe_1b_7b.toml", {"data.pack_documents=false"}, 1, false, 144676225024, 2144.24111},
    {"short_sequences", "bench_olmoe_1b_7b.toml", {"train.seq_len=512"}, 1, true, 127508938752, 539.936686},
    {"portable_heads", "bench_qwen3_30b_a3b_8layers.toml", {"model.head_dim=96"}, 1, true, 119124525056, 1375.66345},
    {"sums_in_bf16",
     "bench_qwen3_30b_a3b_8layers.toml",
     {"optimizer.grad=\"bf16\""},
     1,
     false,
     113529323520,
     1525.9281},
    {"gpt_oss", "bench_gpt_oss_20b_8layers.toml", {}, 1, false, 120143740928, 2477.51051},
    {"long", "bench_qwen3_30b_a3b_128k.toml", {}, 1, false, 47401926656, 2767.79397},
    {"latent", "deepseek_v3_256_gpus.toml", {}, 256, false, 143493431296, 202805.759},
    {"adapters", "lora_qwen3_30b_a3b.toml", {}, 1, false, 78804680704, 3062.48599},
    {"context_parallel",
     "bench_qwen3_30b_a3b_8layers.toml",
     {"parallel.cp=4", "train.seq_len=16384"},
     4,
     false,
     73767321600,
     2499.66368},
    {"direct",
     "bench_olmoe_1b_7b.toml",
     {"model.num_hidden_layers=4", "train.global_batch=8", "optimizer.offload=false", "parallel.tp=4", "parallel.ep=8",
      "train.micro_batch=1", "memory.recompute=[]", "parallel.dispatcher=\"direct\""},
     8,
     true,
     5880414208,
     49.3559426},
    // with the code of cuDNN, and portable kernels alone
    {"other_gpu", "bench_qwen3_30b_a3b_8layers.toml", {}, 1, true, 121011961856, 1473.83836, 80},
    {"other_gpu_portable",
     "bench_qwen3_30b_a3b_8layers.toml",
     {"run.kernels=portable"},
     1,
     false,
     121001476096,
     1992.79039,
     80},
};

// Returns a machine whose figures do not follow from measured runs, so that the next fit does not change them.
PlanMachine unfitted_machine(int capability) {
  PlanMachine m = machine("h100");
  m.of(PlanSystem::moebius).fill(0.7);
  m.spread = 0.02, m.layer_us = 300, m.portable = 0.53;
  m.capability = capability;
  return m;
}

void PrintTo(const Planned& p, std::ostream* out) { *out << p.name; }

class EveryBuild : public testing::TestWithParam<Planned> {};

TEST_P(EveryBuild, PredictsTheSameForAGpu) {
  const Planned& want = GetParam();
  if (want.needs_cudnn && !has_cudnn()) GTEST_SKIP() << "this build has CUDA and no cuDNN 9.19";
  PartLibrary parts;
  const Prediction p = predict(parts, recipe(want.recipe, want.set), want.ranks, unfitted_machine(want.capability), {});
  EXPECT_EQ(p.fullest_rank().total(), want.memory_bytes);
  EXPECT_NEAR(1e3 * p.step_s, want.step_ms, 1e-6 * want.step_ms) << fmt::format("{:.9g} ms", 1e3 * p.step_s);
}

INSTANTIATE_TEST_SUITE_P(Runs, EveryBuild, testing::ValuesIn(kPlanned),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moebius
