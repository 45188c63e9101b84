#include "plan/memory/fit_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"
#include "engine/engine.h"
#include "ops/attention/attention_cudnn.h"
#include "plan/cost/usual_machine.h"
#include "plan/memory/chosen_memory.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const std::string kRecipes = std::string(MOEBIUS_SOURCE_DIR) + "/recipes/";

RunSpec run_of(const std::string& recipe, std::vector<std::string> set) {
  set.emplace_back("memory.recompute=auto");
  return load_run_spec(kRecipes + recipe, set);
}

// Returns the most that an engine of any pipeline rank plans.
int64_t planned_bytes(const RunSpec& run, int64_t ranks) {
  EngineSpec spec = planned_engine_spec(run, ranks);
  spec.device = DeviceKind::null;
  int64_t most = 0;
  for (int64_t pp = 0; pp < spec.mesh.pp; ++pp) {
    const int rank = rank_in_dense_view(spec.mesh, {.pp = pp});
    const auto world = make_dry_run_transport(rank, static_cast<int>(ranks));
    spec.world = world.get();
    most = std::max(most, Engine(spec).plan().total_bytes());
  }
  return most;
}

// From the plan that keeps all to the one that keeps least. What is chosen fits an engine to the byte, and the less
// memory there is, the longer the passes take.
TEST(FitMemory, ChosenSetFitsTheEngine) {
  const std::vector<std::string> layouts[] = {
      {},
      {"parallel.pp=2", "parallel.layout=E t | t*2 L", "parallel.ep=2", "train.global_batch=16",
       "parallel.dispatcher=allgather"},
      {"parallel.fsdp=true", "parallel.shard_gradients=true", "train.global_batch=16"}};
  for (const std::vector<std::string>& layout : layouts) {
    const int64_t ranks = layout.empty() ? 1 : 4;
    const auto fit = [&](int64_t bytes) {
      RunSpec run = run_of("tiny_cpu.toml", layout);
      run.threads = 1;
      run.memory.fit_bytes = bytes;
      return fit_memory(run, ranks);
    };
    const MemoryFit all = fit(int64_t{1} << 40);
    EXPECT_EQ(all.run.memory.recompute, RecomputeSpec{});
    EXPECT_FALSE(all.run.memory.automatic);
    EXPECT_EQ(all.bytes, all.kept_bytes);
    EXPECT_EQ(all.more, 0);
    int64_t least = all.bytes;
    RunSpec every = all.run;
    every.memory.recompute = {.layer = true};
    least = planned_bytes(every, ranks);
    ASSERT_LT(least, all.bytes);
    double more = -1;
    for (const double share : {0.01, 0.3, 0.6, 0.95}) {
      const auto bytes = all.bytes - static_cast<int64_t>(share * static_cast<double>(all.bytes - least));
      const MemoryFit some = fit(bytes);
      EXPECT_LE(some.bytes, bytes);
      EXPECT_EQ(some.bytes, planned_bytes(some.run, ranks));
      EXPECT_GE(some.more, more);
      EXPECT_NE(some.run.memory.recompute, RecomputeSpec{});
      more = some.more;
    }
  }
}

// Where only some layers are recomputed, the text names them.
TEST(FitMemory, TextHasTheKeysOfTheChosenRun) {
  RunSpec run = load_run_spec(kRecipes + "qwen3_30b_a3b_one_gpu.toml", {"memory.fit=139GiB"});
  ASSERT_FALSE(run.memory.recompute.ranges.empty());
  const ChosenMemory chosen = choose_memory(run, 1, {});
  EXPECT_EQ(chosen.run.memory.recompute, run.memory.recompute);
  EXPECT_THAT(chosen.text, StartsWith("memory.recompute = [\"norm\", \"expert_up:0-32\"], memory.offload = [\"qkv\"], "
                                      "optimizer.offload_buffer = "));
}

// A layer does not keep the tensors that it recomputes, so it does not offload them either.
TEST(FitMemory, RecomputedTensorsAreNotOffloaded) {
  const OffloadSpec both{.layer_input = true, .tensors = {.attention = true, .mlp = true}};
  MemorySpec memory{.recompute = {.mlp = true}, .offload = both};
  leave_out_recomputed(memory);
  EXPECT_EQ(memory.offload, (OffloadSpec{.layer_input = true, .tensors = {.attention = true}}));
  memory = {.recompute = {.layer = true}, .offload = both};
  leave_out_recomputed(memory);
  EXPECT_EQ(memory.offload, (OffloadSpec{.layer_input = true}));
  memory = {.recompute = {.ranges = {{&RecomputeSpec::mlp, 0, 1}}}, .offload = both};
  leave_out_recomputed(memory);
  EXPECT_EQ(memory.offload, both);
}

// 8 layers of Qwen3-30B-A3B on a GPU, with more or less memory than they need.
RunSpec run_of_8_layers(const std::vector<std::string>& more) {
  std::vector<std::string> set{"train.seq_len=4096", "train.micro_batch=8", "train.global_batch=32"};
  set.insert(set.end(), more.begin(), more.end());
  return run_of("bench_qwen3_30b_a3b_8layers.toml", set);
}

// Copies that overlap with the passes cost less than recompute does, so some tensors are moved. The keys of the choice
// make the run that was counted.
TEST(FitMemory, OffloadIsChosenWhereItCostsLess) {
  const PlanMachine h100 = load_machine("h100", MOEBIUS_SOURCE_DIR "/machines");  // its host, not the one at hand
  const Assumptions assume;
  PartLibrary parts;
  for (const char* fit : {"memory.fit=108GiB", "memory.fit=100GiB"}) {
    const MemoryFit chosen = fit_memory(parts, run_of_8_layers({fit}), 1, h100, assume);
    const MemoryFit none = fit_memory(parts, run_of_8_layers({fit, "memory.offload=[]"}), 1, h100, assume);
    EXPECT_TRUE(chosen.run.memory.offload.any()) << chosen.text();
    EXPECT_FALSE(none.run.memory.offload.any()) << none.text();
    EXPECT_LT(chosen.more, none.more);
    EXPECT_EQ(chosen.kept_bytes, none.kept_bytes);
    EXPECT_LE(chosen.bytes, chosen.fit_bytes);
    EXPECT_THAT(chosen.text(), HasSubstr(", memory.offload = [\""));
    EXPECT_THAT(none.text(), testing::Not(HasSubstr("memory.offload")));
    EngineSpec spec = planned_engine_spec(chosen.run, 1);
    spec.counts_for_hopper = true;
    EXPECT_EQ(chosen.bytes, Engine(spec).device_memory().total_bytes());
    EXPECT_NO_THROW(chosen.run.check(1));
  }
}

TEST(FitMemory, OffloadIsNotChosenWhereAllFitsOrTheRecipeNamesIt) {
  EXPECT_FALSE(fit_memory(run_of_8_layers({"memory.fit=1TiB"}), 1).run.memory.offload.any());
  const RunSpec named = run_of_8_layers({"memory.fit=108GiB", "memory.offload=[\"layer_input\"]"});
  EXPECT_EQ(fit_memory(named, 1).run.memory.offload, named.memory.offload);
  const RunSpec on_cpu = run_of_8_layers({"memory.fit=108GiB", "run.device=cpu"});
  EXPECT_FALSE(fit_memory(on_cpu, 1).run.memory.offload.any()) << "a CPU has no other memory";
}

// The usual machine has a rate for every copy, so the time of passes that a CPU offloads is a number, too.
TEST(FitMemory, CpuKeepsTheNamesOfTheRecipe) {
  for (const char* recompute : {"memory.recompute=auto", "memory.recompute=[\"norm\"]"}) {
    const RunSpec run = load_run_spec(kRecipes + "tiny_cpu.toml",
                                      {"memory.fit=1GiB", "memory.offload=[\"layer_input\", \"qkv\"]", recompute});
    const MemoryFit fit = fit_memory(run, 1);
    EXPECT_EQ(fit.run.memory.offload, run.memory.offload);
    EXPECT_EQ(fit.run.memory.recompute, run.memory.recompute);
    EXPECT_GT(fit.pass_s, 0);
    EXPECT_LT(fit.more, 1e6);
  }
}

// On a pipeline a list is given up where one rank is too slow. No list of one name is better than the choice.
TEST(FitMemory, OffloadOfAPipelineIsNoWorseThanAnyName) {
  const PlanMachine h100 = load_machine("h100", MOEBIUS_SOURCE_DIR "/machines");
  const Assumptions assume;
  PartLibrary parts;
  const auto fit = [&](const std::vector<std::string>& more) {
    std::vector<std::string> set{"parallel.pp=2", "memory.fit=54GiB"};
    set.insert(set.end(), more.begin(), more.end());
    return fit_memory(parts, run_of_8_layers(set), 2, h100, assume);
  };
  const MemoryFit chosen = fit({});
  int64_t num_that_fit = 0;
  for (const char* name : {"layer_input", "norm", "qkv", "attention", "expert_up", "layer"}) {
    for (const char* fraction : {"1", "0.5"}) {
      try {
        const MemoryFit named =
            fit({fmt::format("memory.offload=[\"{}\"]", name), fmt::format("memory.offload_fraction={}", fraction)});
        EXPECT_LE(chosen.pass_s, named.pass_s) << name << " of " << fraction;
        ++num_that_fit;
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::usage);  // it does not fit
      }
    }
  }
  EXPECT_GT(num_that_fit, 4);
}

// A host with little memory gets little, and one with a slow link nothing.
TEST(FitMemory, OffloadDependsOnTheHost) {
  const RunSpec run = run_of_8_layers({"memory.fit=108GiB", "checkpoint.async=false"});
  PartLibrary parts;
  const Assumptions assume;
  PlanMachine machine = load_machine("h200", MOEBIUS_SOURCE_DIR "/machines");
  const MemoryFit usual = fit_memory(parts, run, 1, machine, assume);
  ASSERT_TRUE(usual.run.memory.offload.any());
  ASSERT_GT(usual.host_bytes, int64_t{1} << 30);
  machine.host_memory_gb = 8;  // of 8 ranks, and a tenth is left to the system
  const MemoryFit little = fit_memory(parts, run, 1, machine, assume);
  EXPECT_LE(static_cast<double>(little.host_bytes), machine.host_memory_of_rank());
  EXPECT_GT(little.more, usual.more);
  machine.host_memory_gb = 2000;
  machine.link_gb_s = 0.5;
  EXPECT_FALSE(fit_memory(parts, run, 1, machine, assume).run.memory.offload.any());
}

TEST(FitMemory, UsualMachineIsAnH100) {
  const PlanMachine usual = usual_machine(/*is_gpu=*/true, /*rank_host_bytes=*/0),
                    h100 = load_machine("h100", MOEBIUS_SOURCE_DIR "/machines");
  for (const double PlanMachine::*figure :
       {&PlanMachine::bf16_tflops, &PlanMachine::fp8_tflops, &PlanMachine::memory_gb, &PlanMachine::memory_tb_s,
        &PlanMachine::exponentials_t_s, &PlanMachine::f32_tflops, &PlanMachine::multiprocessors, &PlanMachine::portable,
        &PlanMachine::kernel_us, &PlanMachine::domain_ranks, &PlanMachine::inside_gb_s, &PlanMachine::across_gb_s,
        &PlanMachine::inside_us, &PlanMachine::across_us, &PlanMachine::link_gb_s})
    EXPECT_DOUBLE_EQ(usual.*figure, h100.*figure);
  for (size_t i = 0; i < size_t{kNumShares}; ++i)
    EXPECT_NEAR(usual.of(PlanSystem::moebius)[i], h100.of(PlanSystem::moebius)[i], 0.05) << i;
}

// One layer less to recompute, and the run does not fit.
TEST(FitMemory, RecomputesNoLayerMoreThanItMust) {
  RunSpec run = run_of("tiny_cpu.toml", {"run.threads=1", "memory.fit=1TiB"});
  const MemoryFit all = fit_memory(run, 1);
  run.memory.fit_bytes = all.bytes - 1;
  const MemoryFit some = fit_memory(run, 1);
  int64_t layers = 0;
  for (const RecomputeRange& range : some.run.memory.recompute.ranges) layers += range.last - range.first + 1;
  EXPECT_EQ(layers, 1) << some.text();
  EXPECT_GT(some.more, 0);
}

// A small model whose backward pass of attention needs more scratch than any other op: on a Hopper GPU for its own
// kernels, on others for cuDNN, or nearly none if cuDNN is missing.
RunSpec run_with_attention_scratch() {
  RunSpec run = load_run_spec(
      kRecipes + "tiny_cpu.toml",
      {"run.device=cuda", "run.threads=1", "precision.compute=bf16", "model.head_dim=128", "model.hidden_size=64",
       "model.num_attention_heads=8", "model.num_key_value_heads=8", "model.max_position_embeddings=4096",
       "data.separate_documents=false", "train.seq_len=4096", "train.micro_batch=1", "memory.fit=1TiB"});
  run.memory.automatic = false;
  return run;
}

TEST(FitMemory, CountsScratchForTheGpuOfTheRun) {
  const RunSpec run = run_with_attention_scratch();
  for (const bool for_hopper : {true, false}) {
    EngineSpec spec = planned_engine_spec(run, 1);
    spec.counts_for_hopper = for_hopper;
    EXPECT_EQ(fit_memory(run, 1, {.gpus = {.hopper = for_hopper, .others = !for_hopper}}).bytes,
              Engine(spec).device_memory().total_bytes())
        << for_hopper;
  }
  const int64_t hopper = fit_memory(run, 1).bytes,
                other = fit_memory(run, 1, {.gpus = {.hopper = false, .others = true}}).bytes;
  EXPECT_EQ(other > hopper, has_cudnn());
  EXPECT_NE(other, hopper);
  EXPECT_EQ(fit_memory(run, 1, {.gpus = {.hopper = true, .others = true}}).bytes, std::max(hopper, other));
}

// With portable kernels alone all GPUs need the same.
TEST(FitMemory, FitsBothKindsOfGpusOfAMachine) {
  RunSpec run = run_with_attention_scratch();
  const auto bytes = [&](GpuKinds gpus) { return fit_memory(run, 1, {.gpus = gpus}).bytes; };
  const auto larger = [&] { return std::max(bytes({}), bytes({.hopper = false, .others = true})); };
  run.kernels = KernelChoice::portable;
  EXPECT_EQ(bytes({.hopper = true, .others = true}), bytes({}));
  EXPECT_EQ(bytes({.hopper = true, .others = true}), larger());
  run.kernels = KernelChoice::automatic;
  run.memory.fit_bytes = larger() - 1;
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { bytes({.hopper = true, .others = true}); }),
              HasSubstr("a rank needs"));
}

TEST(FitMemory, CountsScratchForTheGpuOfTheMachine) {
  RunSpec run = run_with_attention_scratch();
  const auto bytes = [&](int capability) {
    PlanMachine machine = load_machine("h100", MOEBIUS_SOURCE_DIR "/machines");
    machine.capability = capability;
    PartLibrary parts;
    const Assumptions assume;
    const int64_t fitted = fit_memory(parts, run, 1, machine, assume).bytes;
    EXPECT_EQ(predict(parts, run, 1, machine, assume).fullest_rank().total(), fitted) << capability;
    return fitted;
  };
  const int64_t hopper = bytes(90);
  EXPECT_EQ(bytes(0), hopper) << "it may be a Hopper GPU";
  EXPECT_EQ(bytes(80) > hopper, has_cudnn());
  EXPECT_NE(bytes(80), hopper);
  EXPECT_EQ(bytes(120), bytes(80));
  run.kernels = KernelChoice::portable;
  EXPECT_EQ(bytes(90), bytes(80)) << "a Hopper GPU runs the same kernels";
}

TEST(FitMemory, ErrorGivesTheMinimumIfNothingFits) {
  const auto error = [](const std::vector<std::string>& set) {
    return error_text(ErrorKind::usage, [&] { fit_memory(load_run_spec(kRecipes + "tiny_cpu.toml", set), 1); });
  };
  EXPECT_THAT(error({"memory.recompute=auto", "memory.fit=1MiB"}),
              testing::AllOf(HasSubstr("memory.fit = \"1MiB\": pipeline rank 0 needs at least "),
                             HasSubstr("of it are not of the passes: weights, gradients, the optimizer's state")));
  EXPECT_THAT(error({"memory.recompute=[\"norm\"]", "memory.fit=1MiB"}),
              testing::AllOf(HasSubstr("memory.fit = \"1MiB\": a rank needs "),
                             HasSubstr(" with memory.recompute = [\"norm\"]; recompute more, or set memory.recompute = "
                                       "\"auto\"")));
}

TEST(FitMemory, CommonMachinesHaveAllKindsAndTheLeastHostMemory) {
  const FitMachines hopper{.gpus = {.hopper = true, .others = false}, .rank_host_bytes = 64e9},
      other{.gpus = {.hopper = false, .others = true}, .rank_host_bytes = 32e9}, unknown{};
  const FitMachines both = common_machines({hopper, other, unknown});
  EXPECT_TRUE(both.gpus.hopper && both.gpus.others);
  EXPECT_EQ(both.rank_host_bytes, 32e9);
  EXPECT_FALSE(common_machines({hopper, hopper}).gpus.others);
  EXPECT_EQ(common_machines({unknown, hopper}).rank_host_bytes, 64e9);
}

}  // namespace
}  // namespace moebius
