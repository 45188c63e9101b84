#include "cli/config_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "engine/engine_spec.h"

namespace moebius {
namespace {

TEST(ConfigVerdict, PredictionNotesRanksThatShareAGpu) {
  const DeviceMemory memory{.plan_bytes = 58 << 20, .workspace_bytes = 130 << 20, .code_bytes = 6 << 20};
  EXPECT_EQ(sharing_text(memory, 1, 0), "");
  EXPECT_EQ(sharing_text(memory, 1, 1), "");
  for (const int64_t num_gpus : {0, 4, 8})
    EXPECT_EQ(sharing_text(memory, 4, num_gpus), ", for each rank that has a GPU of its own");
  EXPECT_EQ(sharing_text(memory, 4, 1),
            ", for each rank that has a GPU of its own; on this machine alone 4 ranks would share a GPU and take up to "
            "776.0 MiB of it together, plus their contexts, which are not predicted");
  EXPECT_NE(sharing_text(memory, 5, 3).find("alone 2 ranks would share a GPU and take up to 388.0 MiB"),
            std::string::npos);
}

TEST(ConfigVerdict, NamesTheGpusThatARecipeFits) {
  const auto text = [](int64_t gib) { return known_gpus_text(gib << 30, gib << 30); };
  EXPECT_EQ(text(21),
            ": fits an RTX 4090 (22 GiB free), an RTX 5090 (30), an L40S (43), an H100 (78), an A100 of 80 GB (78), "
            "an H200 (139), a B200 (177)");
  EXPECT_EQ(
      text(78),
      ": fits an H100 (78 GiB free), an A100 of 80 GB (78), an H200 (139), a B200 (177); does not fit an RTX 4090 "
      "(22 GiB free), an RTX 5090 (30), an L40S (43)");
  EXPECT_EQ(text(200).substr(0, 48), ": does not fit an RTX 4090 (22 GiB free), an RTX");
  EXPECT_EQ(known_gpus_text(int64_t{79} << 30, int64_t{78} << 30),
            ": fits an A100 of 80 GB (78 GiB free), an H200 (139), a B200 (177); does not fit an RTX 4090 (22 GiB "
            "free), an RTX 5090 (30), an L40S (43), an H100 (78)")
      << "an A100 runs kernels with less scratch";
}

// A small run on a GPU, on a machine that has none, in bf16.
RunSpec small_gpu_run(const std::vector<std::string>& more) {
  std::vector<std::string> set{"run.device=cuda",
                               "run.threads=1",
                               "precision.compute=bf16",
                               "model.hidden_size=512",
                               "model.head_dim=128",
                               "model.intermediate_size=128",
                               "model.moe_intermediate_size=1024",
                               "model.shared_expert_intermediate_size=128",
                               "model.max_position_embeddings=1024",
                               "data.separate_documents=false",
                               "train.micro_batch=1",
                               "train.seq_len=1024"};
  set.insert(set.end(), more.begin(), more.end());
  return load_run_spec(MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", set);
}

EngineSpec on_no_gpu(const RunSpec& run) {
  EngineSpec spec = training_engine_spec(run);
  spec.device = DeviceKind::null;
  return spec;
}

// It emulates the products, with operands in bf16 beside the quantised ones.
TEST(ConfigVerdict, CountsEmulatedProductsForGpusThatAreNotHoppers) {
  const EngineSpec spec = on_no_gpu(small_gpu_run({"precision.recipe=fp8_tensor"}));
  ASSERT_TRUE(spec.precision.has_f8_kernels);
  EngineSpec emulates = spec, has_kernels = spec;
  emulates.counts_for_hopper = has_kernels.counts_for_hopper = false;
  emulates.precision.has_f8_kernels = false;
  const Engine engine(spec);
  EXPECT_EQ(needed_of_other_gpu(engine), needed_of_gpu(Engine(emulates)));
  EXPECT_GT(needed_of_other_gpu(engine), needed_of_gpu(Engine(has_kernels)));
}

TEST(ConfigVerdict, CountsLessScratchForGpusThatAreNotHoppers) {
  const EngineSpec spec = on_no_gpu(small_gpu_run({}));
  EngineSpec other = spec;
  other.counts_for_hopper = false;
  const Engine engine(spec);
  EXPECT_EQ(needed_of_other_gpu(engine), needed_of_gpu(Engine(other)));
  EXPECT_LE(needed_of_other_gpu(engine), needed_of_gpu(engine));
}

// `config` says of runs that other GPUs refuse that the memory alone is compared.
TEST(ConfigVerdict, SaysWhichRunsNeedAHopperGpu) {
  if (Accelerator::count() > 0) GTEST_SKIP() << "the GPU here is asked";
  const auto text = [](const std::vector<std::string>& more) {
    const RunSpec run = small_gpu_run(more);
    Engine engine(on_no_gpu(run));
    return check_rank_memory(engine, run, 2, {}, int64_t{1} << 40).text;
  };
  const auto needs_hopper = ::testing::HasSubstr("by memory only: only Hopper GPUs run this recipe");
  EXPECT_THAT(text({}), ::testing::Not(needs_hopper));
  EXPECT_THAT(text({"precision.recipe=fp8_tensor"}), ::testing::Not(needs_hopper));
  EXPECT_THAT(text({"precision.recipe=fp8_block"}), needs_hopper);
  EXPECT_THAT(text({"parallel.ep=2", "parallel.dispatcher=direct", "parallel.expert_overlap=batch_split"}),
              needs_hopper);
}

// The sum is over the ranks of one machine, as in `train`, of the machine whose ranks pin most.
TEST(ConfigVerdict, SumsThePinnedMemoryOfAMachine) {
  using Bytes = std::pair<int64_t, int64_t>;  // and the number of ranks
  const auto most = [](const MeshShape& mesh, const std::vector<int64_t>& of_stage, int64_t ranks_per_machine) {
    const PinnedMemory pinned = pinned_of_machine(mesh, of_stage, ranks_per_machine);
    return Bytes(pinned.bytes, pinned.num_ranks);
  };
  EXPECT_EQ(most({}, {7}, 8), Bytes(7, 1));
  EXPECT_EQ(most({.dp = 3, .edp = 3}, {7}, 8), Bytes(21, 3)) << "all ranks on one machine";
  EXPECT_EQ(most({.dp = 3, .edp = 3}, {7}, 2), Bytes(14, 2));
  // The ranks of stage 0 are 0 and 1, those of stage 1 are 2 and 3.
  const MeshShape two_stages{.dp = 2, .pp = 2, .edp = 2};
  EXPECT_EQ(most(two_stages, {5, 100}, 4), Bytes(210, 4));
  EXPECT_EQ(most(two_stages, {5, 100}, 2), Bytes(200, 2)) << "of the second machine";
  EXPECT_EQ(most(two_stages, {5, 100}, 3), Bytes(110, 3));
}

}  // namespace
}  // namespace moebius
