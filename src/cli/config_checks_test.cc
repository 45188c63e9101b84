#include "cli/config_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine_spec.h"
#include "ops/attention/attention_cudnn.h"

namespace moebius {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

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
  EXPECT_EQ(
      text(21),
      ": fits an RTX 3090 (22 GiB free), an RTX 4090 (22), an RTX 5090 (30), an A100 of 40 GB (38), an L40S (43), "
      "an H100 (78), an A100 of 80 GB (78), an H200 (139), a B200 (177)");
  EXPECT_EQ(
      text(39),
      ": fits an L40S (43 GiB free), an H100 (78), an A100 of 80 GB (78), an H200 (139), a B200 (177); does not fit an "
      "RTX 3090 (22 GiB free), an RTX 4090 (22), an RTX 5090 (30), an A100 of 40 GB (38)");
  EXPECT_EQ(text(200).substr(0, 48), ": does not fit an RTX 3090 (22 GiB free), an RTX");
  EXPECT_EQ(known_gpus_text(int64_t{79} << 30, int64_t{78} << 30),
            ": fits an A100 of 80 GB (78 GiB free), an H200 (139), a B200 (177); does not fit an RTX 3090 (22 GiB "
            "free), an RTX 4090 (22), an RTX 5090 (30), an A100 of 40 GB (38), an L40S (43), an H100 (78)")
      << "an A100 needs less here";
}

TEST(ConfigVerdict, NamesOnlyHopperGpusWhereOthersRefuse) {
  const auto text = [](int64_t gib) { return known_gpus_text(gib << 30, std::nullopt); };
  EXPECT_EQ(text(21), ": fits an H100 (78 GiB free), an H200 (139)");
  EXPECT_EQ(text(79), ": fits an H200 (139 GiB free); does not fit an H100 (78 GiB free)");
  EXPECT_EQ(text(150), ": does not fit an H100 (78 GiB free), an H200 (139)");
}

using Settings = std::vector<std::string>;

// A small run on a GPU, on a machine that has none, in bf16.
RunSpec small_gpu_run(const Settings& more) {
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

// The backward pass of attention needs more scratch than any other op: for Hopper's own kernels, on others for cuDNN,
// and nearly none for portable kernels.
TEST(ConfigVerdict, CountsTheScratchOfGpusThatAreNotHoppers) {
  const EngineSpec spec =
      on_no_gpu(small_gpu_run({"model.max_position_embeddings=4096", "train.seq_len=4096", "model.hidden_size=64",
                               "model.num_attention_heads=8", "model.num_key_value_heads=8"}));
  const auto needed = [&](bool for_hopper, KernelChoice kernels) {
    EngineSpec on = spec;
    on.counts_for_hopper = for_hopper;
    on.kernels = kernels;
    return needed_of_gpu(Engine(on));
  };
  const int64_t hopper = needed(true, KernelChoice::automatic), other = needed_of_other_gpu(Engine(spec)),
                portable = needed(false, KernelChoice::portable);
  EXPECT_EQ(needed(true, KernelChoice::portable), portable);
  EXPECT_EQ(other, needed(false, KernelChoice::automatic));
  EXPECT_GT(hopper, portable);
  EXPECT_EQ(other > hopper, has_cudnn());
  EXPECT_EQ(other > portable, has_cudnn());
}

std::string text_without_gpu(const Settings& more) {
  const RunSpec run = small_gpu_run(more);
  Engine engine(on_no_gpu(run));
  return check_rank_memory(engine, run, 2, {}, int64_t{1} << 40, std::nullopt).text;
}

TEST(ConfigVerdict, SaysWhichRunsNeedAHopperGpu) {
  const Settings splits{"parallel.ep=2", "parallel.dispatcher=direct", "parallel.expert_overlap=batch_split"};
  for (const Settings& more : {Settings{}, Settings{"precision.recipe=fp8_tensor"}}) {
    const std::string text = text_without_gpu(more);
    EXPECT_THAT(text, AllOf(HasSubstr("fits an RTX 3090"), Not(HasSubstr("refuse"))));
  }
  for (const Settings& more : {Settings{"precision.recipe=fp8_block"}, splits}) {
    const std::string text = text_without_gpu(more);
    EXPECT_THAT(text, HasSubstr(": fits an H100 (78 GiB free), an H200 (139); GPUs that are not Hopper's refuse this "
                                "recipe; no GPU is here to ask"));
    EXPECT_THAT(text, Not(HasSubstr("of one that is not Hopper's")));
  }
}

// The needs of both kinds are printed where they differ as printed.
TEST(ConfigVerdict, PrintsTheNeedOfOtherGpusIfItDiffers) {
  for (const Settings& more : {Settings{}, Settings{"precision.recipe=fp8_tensor"}, Settings{"model.head_dim=96"}}) {
    const RunSpec run = small_gpu_run(more);
    Engine engine(on_no_gpu(run));
    const std::string of_hopper = bytes_text(needed_of_gpu(engine)),
                      of_others = bytes_text(needed_of_other_gpu(engine));
    const std::string text = text_without_gpu(more);
    EXPECT_EQ(text.find(", " + of_others + " of one that is not Hopper's") != std::string::npos, of_hopper != of_others)
        << text;
  }
}

TEST(ConfigVerdict, AnswersNoForAGpuThatRefusesTheRun) {
  const auto check = [](const Settings& more, const AcceleratorInfo& gpu) {
    const RunSpec run = small_gpu_run(more);
    Engine engine(on_no_gpu(run));
    return check_rank_memory(engine, run, 1, {}, int64_t{1} << 40, gpu);
  };
  AcceleratorInfo l40s{.name = "NVIDIA L40S", .capability_major = 8, .capability_minor = 9};
  AcceleratorInfo h100{.name = "NVIDIA H100", .capability_major = 9};
  l40s.free_bytes = h100.free_bytes = int64_t{43} << 30;
  const MemoryCheck refused = check({"precision.recipe=fp8_block"}, l40s);
  EXPECT_EQ(refused.fits, false);
  EXPECT_THAT(
      refused.text,
      AllOf(StartsWith("no: "),
            HasSubstr(" are needed, 43.00 GiB are free of the first GPU here, NVIDIA L40S; this GPU refuses the "
                      "recipe: precision.recipe = \"fp8_block\" needs a GPU of compute capability 9.0; this "
                      "one has 8.9; set ")));
  for (const MemoryCheck& runs : {check({"precision.recipe=fp8_block"}, h100), check({}, l40s)}) {
    EXPECT_EQ(runs.fits, true);
    EXPECT_THAT(runs.text, AllOf(StartsWith("yes: "), Not(HasSubstr("refuses"))));
  }
  h100.free_bytes = 1 << 20;
  EXPECT_EQ(check({}, h100).fits, false);
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
