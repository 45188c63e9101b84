#include "plan/memory/state_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine.h"
#include "plan/memory/chosen_memory.h"
#include "plan/memory/fit_memory.h"
#include "plan/search.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

// 8 layers of Qwen3-30B-A3B with states on the host: 10.6 GiB of moments in 8 bits.
RunSpec run_on_host(std::vector<std::string> set = {}) {
  set.insert(set.begin(), {"train.micro_batch=4", "optimizer.master=\"bf16_stochastic\"", "optimizer.state=\"8bit\"",
                           "optimizer.offload=true", "checkpoint.async=false"});
  return recipe("bench_qwen3_30b_a3b_8layers.toml", std::move(set));
}

RunSpec with_buffer(RunSpec run, double gib) {
  run.optimizer.offload_buffer = gib;
  return run;
}

// Returns the most that a rank of any pipeline stage needs, as the engine of a run says.
int64_t engine_bytes(const RunSpec& run, int64_t ranks = 1) {
  EngineSpec spec = planned_engine_spec(run, ranks);
  spec.counts_for_hopper = true;
  int64_t most = 0;
  for (int64_t pp = 0; pp < spec.mesh.pp; ++pp) {
    const auto world = make_dry_run_transport(rank_in_dense_view(spec.mesh, {.pp = pp}), static_cast<int>(ranks));
    spec.world = world.get();
    most = std::max(most, Engine(spec).device_memory().total_bytes());
  }
  return most;
}

RunSpec with_fit(RunSpec run, int64_t bytes) {
  run.memory.fit_bytes = bytes;
  return run;
}

// Returns the chosen buffer for a GPU with this memory; -1: it was not chosen.
double gib_for(const RunSpec& run, std::optional<int64_t> gpu_bytes, int64_t ranks = 1) {
  return choose_memory(run, ranks, {.gpu_bytes = gpu_bytes}).run.optimizer.offload_buffer.value_or(-1);
}

// The choice is the largest: each buffer that holds more needs more than the limit. It is counted to the byte.
TEST(StateBuffer, IsTheLargestThatFits) {
  const RunSpec run = run_on_host();
  PartLibrary parts;
  const RunMemory memory(parts, run, 1, usual_machine_of(DeviceKind::cuda, {}), /*others_too=*/false);
  const auto bytes = [&](double gib) { return memory.bytes(0, memory.spec().recompute, gib); };
  const int64_t least = bytes(0), all = bytes(1000);
  ASSERT_GT(all, least + 8 * kGiB);
  double before = 0;
  for (const double share : {0.1, 0.5, 0.9}) {
    const int64_t limit = least + static_cast<int64_t>(share * static_cast<double>(all - least));
    const MemoryFit fit = fit_memory(with_fit(run, limit), 1);
    const double gib = fit.run.optimizer.offload_buffer.value();
    EXPECT_GT(gib, before);
    before = gib;
    EXPECT_LE(fit.buffer->bytes, limit);
    EXPECT_EQ(fit.buffer->bytes, engine_bytes(fit.run));
    EXPECT_EQ(fit.bytes, least);
    EXPECT_LT(bytes(gib - 0.01), fit.buffer->bytes) << "states fill it";
    for (double more = gib; more < 11; more += 0.01)
      EXPECT_TRUE(bytes(more) > limit || bytes(more) == fit.buffer->bytes) << more;
  }
}

// All states fit into a GPU with enough memory: then they are as without optimizer.offload, and have no slots.
TEST(StateBuffer, HoldsAllStatesWhereTheyFit) {
  const RunSpec run = run_on_host();
  const ChosenMemory all = choose_memory(run, 1, {.gpu_bytes = 141 * kGiB});
  const double gib = all.run.optimizer.offload_buffer.value();
  EXPECT_NEAR(gib, 10.6, 0.1);
  EXPECT_EQ(all.buffer_limit, "the memory of the GPU");
  EXPECT_THAT(all.text, HasSubstr("optimizer.offload_buffer = 10.6"));
  EXPECT_THAT(all.text, HasSubstr("of 133.95 GiB, 95 % of 141.00 GiB that the GPU has for it"));
  RunSpec on_gpu = run;
  on_gpu.optimizer.offload = false;
  EXPECT_EQ(engine_bytes(all.run), engine_bytes(on_gpu));
  // Slots take a quarter GiB, so the memory in which all states fit is less than that of nearly all and slots.
  const int64_t limit = engine_bytes(all.run);
  EXPECT_EQ(fit_memory(with_fit(run, limit), 1).run.optimizer.offload_buffer, gib);
  EXPECT_LT(fit_memory(with_fit(run, limit - 1), 1).run.optimizer.offload_buffer, gib - 0.2);
}

// A run that fits a GPU only without a buffer gets none, and one that does not fit at all is refused later, with
// its plan.
TEST(StateBuffer, IsZeroWhereNoStateFits) {
  const RunSpec run = run_on_host();
  EXPECT_EQ(gib_for(run, 44 * kGiB), 0);
  EXPECT_EQ(gib_for(run, 8 * kGiB), 0);
  EXPECT_THAT(choose_memory(run, 1, {.gpu_bytes = 8 * kGiB}).text,
              HasSubstr("optimizer.offload_buffer = 0: a rank needs"));
  EXPECT_THAT(choose_memory(run, 1, {.gpu_bytes = 8 * kGiB}).text,
              HasSubstr("of 7.60 GiB, 95 % of 8.00 GiB that the GPU has for it, which leaves nothing for a buffer"));
  EXPECT_EQ(gib_for(run, 0), 0) << "other programs hold all of the GPU";
}

// A GPU with less memory than memory.fit limits the buffer, so that a run that fits it starts with a buffer too.
TEST(StateBuffer, IsLimitedByTheGpuToo) {
  const RunSpec run = with_fit(run_on_host({"train.micro_batch=8"}), 60 * kGiB);
  const ChosenMemory unknown = choose_memory(run, 1, {}), large = choose_memory(run, 1, {.gpu_bytes = 141 * kGiB});
  const ChosenMemory small = choose_memory(run, 1, {.gpu_bytes = 58 * kGiB});
  EXPECT_GT(engine_bytes(unknown.run), without_margin(58 * kGiB));
  EXPECT_EQ(large.run.optimizer.offload_buffer, unknown.run.optimizer.offload_buffer);
  EXPECT_EQ(large.buffer_limit, "memory.fit");
  EXPECT_GT(small.run.optimizer.offload_buffer, 0);
  EXPECT_LE(engine_bytes(small.run), without_margin(58 * kGiB));
  EXPECT_EQ(small.buffer_limit, "the memory of the GPU");
  EXPECT_THAT(small.text, HasSubstr("; the buffer is for 55.10 GiB, 95 % of the memory of the GPU"));
}

// Megatron Core has no such buffer.
TEST(StateBuffer, IsOfMoebiusAlone) {
  PartLibrary parts;
  const PlanMachine h200 = machine("h200");
  Assumptions megatron;
  megatron.system = PlanSystem::megatron;
  for (const int64_t fit : {int64_t{0}, 100 * kGiB}) {
    const RunSpec run = with_fit(run_on_host({"run.graph=false"}), fit);
    EXPECT_EQ(choose_memory(parts, run, 1, h200, megatron).run.optimizer.offload_buffer, std::nullopt) << fit;
    EXPECT_GT(choose_memory(parts, run, 1, h200, {}).run.optimizer.offload_buffer.value(), 0) << fit;
  }
}

TEST(StateBuffer, OfAChoiceIsAppliedToARun) {
  RunSpec run = run_on_host(), other = run_on_host({"train.steps=7"});
  ChosenMemory{.run = with_buffer(run, 3)}.apply(other);
  EXPECT_EQ(other.optimizer.offload_buffer, std::nullopt) << "nothing was chosen";
  choose_memory(run, 1, {.gpu_bytes = 141 * kGiB}).apply(other);
  EXPECT_GT(other.optimizer.offload_buffer, 10);
  EXPECT_EQ(other.train.steps, 7);
}

TEST(StateBuffer, IsChosenOnlyWhereTheRunLeavesItAndItHelps) {
  const int64_t gpu = 80 * kGiB;
  EXPECT_GT(gib_for(run_on_host(), gpu), 0);
  EXPECT_GT(gib_for(run_on_host({"optimizer.offload_buffer=auto"}), gpu), 0);
  EXPECT_EQ(gib_for(run_on_host({"optimizer.offload_buffer=2"}), gpu), 2) << "numbers stay what they are";
  EXPECT_EQ(gib_for(run_on_host({"optimizer.offload_buffer=0"}), gpu), 0);
  EXPECT_EQ(gib_for(run_on_host({"optimizer.offload_buffer=2", "memory.fit=80GiB"}), gpu), 2);
  EXPECT_EQ(gib_for(run_on_host({"optimizer.offload=false"}), gpu), -1);
  EXPECT_EQ(gib_for(run_on_host({"run.device=cpu"}), gpu), -1);
  EXPECT_EQ(gib_for(run_on_host({"run.device=cpu", "memory.fit=1TiB"}), gpu), -1);
  EXPECT_EQ(gib_for(run_on_host(), {}), -1) << "the memory of the GPU is not known";
  // Without a choice the engine has no buffer.
  EXPECT_EQ(engine_bytes(run_on_host()), engine_bytes(run_on_host({"optimizer.offload_buffer=0"})));
}

// Recompute and offload are those of a run without a buffer, which gets what they leave.
TEST(StateBuffer, NeverCausesRecompute) {
  for (const char* fit : {"memory.fit=40GiB", "memory.fit=37GiB"}) {
    const std::vector<std::string> set{"memory.recompute=auto", fit};
    const MemoryFit chosen = fit_memory(run_on_host(set), 1);
    const MemoryFit none = fit_memory(with_buffer(run_on_host(set), 0), 1);
    EXPECT_EQ(chosen.run.memory, none.run.memory) << chosen.text();
    EXPECT_NE(none.run.memory, MemorySpec{}) << none.text();
    EXPECT_EQ(chosen.bytes, none.bytes);
    EXPECT_LE(chosen.buffer->bytes, chosen.fit_bytes);
    EXPECT_EQ(chosen.buffer->bytes, engine_bytes(chosen.run));
    EXPECT_THAT(chosen.text(), HasSubstr(", optimizer.offload_buffer = "));
    EXPECT_THAT(none.text(), testing::Not(HasSubstr("buffer")));
  }
}

// Ranks of a pipeline have different states, and different memory left. The key is one number for all of them.
TEST(StateBuffer, FitsEachRankOfAPipeline) {
  const RunSpec run = run_on_host({"parallel.pp=2", "parallel.ep=2", "parallel.dispatcher=allgather"});
  const int64_t least = engine_bytes(with_buffer(run, 0), 4), all = engine_bytes(with_buffer(run, 1000), 4);
  ASSERT_GT(all, least + kGiB);
  for (const double share : {0.3, 0.7}) {
    const MemoryFit fit =
        fit_memory(with_fit(run, least + static_cast<int64_t>(share * static_cast<double>(all - least))), 4);
    EXPECT_GT(fit.run.optimizer.offload_buffer, 0);
    EXPECT_LE(fit.buffer->bytes, fit.fit_bytes);
    EXPECT_EQ(fit.buffer->bytes, engine_bytes(fit.run, 4));
    EXPECT_EQ(fit_memory(with_fit(run, fit.fit_bytes), 4).run.optimizer.offload_buffer,
              fit.run.optimizer.offload_buffer);
  }
}

TEST(StateBuffer, IsPlannedForTheMachine) {
  PartLibrary parts;
  const PlanMachine h200 = machine("h200");
  const ChosenMemory chosen = choose_memory(parts, run_on_host(), 1, h200, {});
  EXPECT_GT(chosen.run.optimizer.offload_buffer, 10);
  EXPECT_EQ(predict(parts, chosen.run, 1, h200, {}).phases.at("host link"), 0);
  EXPECT_GT(predict(parts, run_on_host(), 1, h200, {}).phases.at("host link"), 0);
}

// Contexts of CUDA do not count, and memory that other programs hold does, in whole GiB: so a rank that starts later
// gets the same figure.
TEST(StateBuffer, CountsTheGpuOfARank) {
  const auto bytes = [](int64_t free, int64_t num_sharing) {
    return gpu_bytes_of_rank({.memory_bytes = 140 * kGiB, .free_bytes = free}, num_sharing);
  };
  EXPECT_EQ(bytes(140 * kGiB - 600'000'000, 1), 140 * kGiB);
  EXPECT_EQ(bytes(140 * kGiB - 1'200'000'000, 2), 70 * kGiB);
  EXPECT_EQ(bytes(100 * kGiB + 5, 1), 100 * kGiB);
  EXPECT_EQ(bytes(100 * kGiB + 500'000'000, 1), 100 * kGiB);
  EXPECT_EQ(bytes(100 * kGiB + 5, 4), 25 * kGiB);
  const FitMachines large{.gpu_bytes = 140 * kGiB}, small{.gpu_bytes = 80 * kGiB}, unknown{};
  EXPECT_EQ(common_machines({large, small}).gpu_bytes, 80 * kGiB);
  EXPECT_EQ(common_machines({large, unknown}).gpu_bytes, std::nullopt);
}

// A rank that described other ranks' GPUs would hold contexts on them.
TEST(StateBuffer, LeavesGpusToTheirRanks) {
  EXPECT_EQ(fit_machine(DeviceKind::cuda, 8).gpu_bytes, std::nullopt);
  EXPECT_EQ(ranks_of_gpu(1, 8), 1);
  EXPECT_EQ(ranks_of_gpu(8, 8), 1);
  EXPECT_EQ(ranks_of_gpu(8, 4), 2);
  EXPECT_EQ(ranks_of_gpu(9, 4), 3);
}

// A search puts states on the host first. What a layout leaves of the memory is its buffer.
TEST(StateBuffer, IsPartOfAFoundLayout) {
  PartLibrary parts;
  const PlanMachine h200 = machine("h200");
  const RunSpec run = run_on_host({"parallel.dispatcher=\"allgather\""});
  const double limit = 40e9;
  const SearchResult found = search(parts, run, 2, h200, {}, {.memory_gb = limit / 1e9, .keep = 4});
  const SearchResult all = search(parts, run, 2, h200, {}, {.memory_gb = limit / 1e9, .keep = 4, .prunes = false});
  ASSERT_FALSE(found.layouts.empty());
  EXPECT_EQ(found.layouts[0].set, all.layouts[0].set);
  for (const FoundLayout& l : found.layouts) {
    EXPECT_LE(static_cast<double>(l.prediction.fullest_rank().total()), limit);
    EXPECT_THAT(l.set, testing::Contains(testing::StartsWith("optimizer.offload_buffer=")));
    EXPECT_EQ(predict(parts, run_on_host(l.set), 2, h200, {}).step_s, l.prediction.step_s);
  }
}

}  // namespace
}  // namespace moebius
