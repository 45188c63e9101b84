#include "plan/search.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "io/files.h"
#include "io/testing.h"
#include "plan/fit.h"
#include "plan/sweep.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Search, FindsValidLayoutsThatFit) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml");
  const PlanMachine m = machine("h200");
  const SearchResult found = search(parts, run, 4, m, {}, {.keep = 5});
  ASSERT_EQ(found.layouts.size(), 5U);
  for (size_t i = 0; i < found.layouts.size(); ++i) {
    const FoundLayout& l = found.layouts[i];
    EXPECT_LE(static_cast<double>(l.prediction.fullest_rank().total()), 0.95 * m.memory_bytes());
    if (i > 0) {
      EXPECT_GE(l.prediction.step_s, found.layouts[i - 1].prediction.step_s);
    }
    // The keys make the recipe that layout.
    const RunSpec set = recipe("bench_olmoe_1b_7b.toml", l.set);
    Assumptions assume;
    if (!set.graph) assume.graphs = PlanGraphs::none;
    EXPECT_EQ(predict(parts, set, 4, m, assume).step_s, l.prediction.step_s);
  }
  EXPECT_THAT(refused([&] { search(parts, run, 4, m, {}, {.memory_gb = 1}); }), HasSubstr("each needs at least"));
  EXPECT_THAT(refused([&] { search(parts, run, 17, m, {}, {}); }), HasSubstr("no layout of 17 ranks is valid"));
  EXPECT_THAT(refused([&] { search(parts, run, 4, m, {.precision = PlanPrecision::nvfp4}, {}); }),
              HasSubstr("has no products in 4 bits"));
}

// The number of threads changes nothing but the time, and --recipes adds what the run would accept.
TEST(Search, IsTheSameOnAnyThreads) {
  PartLibrary one, two;
  const RunSpec run = recipe("tiny_cpu.toml", {"train.global_batch=16"});
  const PlanMachine m = machine("xeon2");
  const SearchResult a = search(one, run, 2, m, {}, {.threads = 1}), b = search(two, run, 2, m, {}, {.threads = 2});
  EXPECT_EQ(search_text(a), search_text(b));
  EXPECT_GT(a.num_possible, 10);
  PartLibrary parts;
  const SearchResult more = search(parts, run, 2, m, {}, {.recipes = {"none", "fp8_block"}});
  EXPECT_EQ(more.num_possible, 2 * a.num_possible);
  EXPECT_THAT(refused([&] { search(parts, run, 2, m, {}, {.recipes = {"fp9"}}); }),
              HasSubstr("expected some of none, fp8_block, fp8_tensor, mxfp8, nvfp4; got \"fp9\""));
}

// Bounds of time, and what cannot fit, leave layouts out. None of them is among the best.
void expect_same_without_pruning(const std::vector<std::string>& set, int64_t ranks, double memory_gb,
                                 const std::string& chosen) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", set);
  const auto found = [&](bool prunes) {
    return search(parts, run, ranks, machine("h200"), {}, {.memory_gb = memory_gb, .prunes = prunes});
  };
  const SearchResult pruned = found(true), whole = found(false);
  EXPECT_GT(pruned.num_slower, 0);
  EXPECT_EQ(whole.num_slower, 0);
  EXPECT_GT(whole.num_timed, pruned.num_timed);
  ASSERT_EQ(pruned.layouts.size(), whole.layouts.size());
  bool is_chosen = chosen.empty();
  for (size_t i = 0; i < whole.layouts.size(); ++i) {
    EXPECT_EQ(pruned.layouts[i].set, whole.layouts[i].set) << i;
    EXPECT_EQ(pruned.layouts[i].prediction.step_s, whole.layouts[i].prediction.step_s) << i;
    for (const std::string& key : whole.layouts[i].set) is_chosen |= key == chosen;
  }
  EXPECT_TRUE(is_chosen) << chosen;
}

TEST(Search, FindsTheSameWithoutPruning) {
  const std::vector<std::string> long_sequence{"model.max_position_embeddings=16384", "train.seq_len=16384",
                                               "train.global_batch=4"};
  expect_same_without_pruning(long_sequence, 4, 120, "");
  expect_same_without_pruning(long_sequence, 4, 45, "");
  std::vector<std::string> sharded = long_sequence;
  sharded.insert(sharded.end(), {"parallel.fsdp=true", "parallel.shard_gradients=true"});
  expect_same_without_pruning(sharded, 4, 45, "");
}

// The search chooses sharded layers and activations on the host where little memory is left.
TEST(Search, FindsTheSameShardedLayersWithoutPruning) {
  const std::vector<std::string> few{"model.num_hidden_layers=4", "train.global_batch=8", "optimizer.offload=false"};
  expect_same_without_pruning(few, 4, 10, "memory.offload=[\"layer_input\"]");
  expect_same_without_pruning(few, 8, 4.85, "parallel.fsdp=true");  // with etp up to 8
}

// With less memory the search recomputes more, and no subset of its choice would fit.
TEST(Search, RecomputesTheLeastThatFits) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml");
  const PlanMachine m = machine("h200");
  const SearchResult found = search(parts, run, 1, m, {}, {.memory_gb = 140, .keep = 1});
  const FoundLayout& best = found.layouts.at(0);
  EXPECT_LE(static_cast<double>(best.prediction.fullest_rank().total()), 140e9);
  const SearchResult roomy = search(parts, run, 1, m, {}, {.memory_gb = 1000, .keep = 1});
  EXPECT_THAT(roomy.layouts.at(0).set, testing::Contains("memory.recompute=[]"));
  EXPECT_GE(best.prediction.step_s, roomy.layouts.at(0).prediction.step_s);
}

// Names of memory.offload that a found layout recomputes are left out, and its keys make that run.
// check_grad() refuses sums on the host to which products add.
TEST(Search, KeepsFusedGradientsOnTheDevice) {
  const auto choices = [](const std::vector<std::string>& set) {
    return offload_choices(recipe("bench_olmoe_1b_7b.toml", set), {});
  };
  const auto on_host = [](const OffloadChoice& choice) { return choice.offload_grad; };
  const std::vector<OffloadChoice> sums = choices({"optimizer.grad=bf16"});
  const std::vector<OffloadChoice> fused = choices({"optimizer.grad=bf16", "optimizer.fuse_grad=true"});
  EXPECT_TRUE(std::any_of(sums.begin(), sums.end(), on_host));
  EXPECT_TRUE(std::none_of(fused.begin(), fused.end(), on_host));
}

TEST(Search, RecomputedTensorsAreNotOffloaded) {
  PartLibrary parts;
  const std::vector<std::string> set{"memory.offload=[\"attention\", \"expert_up\"]"};
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", set);
  const PlanMachine m = machine("h200");
  const SearchResult found = search(parts, run, 1, m, {}, {.memory_gb = 120, .keep = 2});
  ASSERT_FALSE(found.layouts.empty());
  for (const FoundLayout& l : found.layouts) {
    std::vector<std::string> keys = set;
    keys.insert(keys.end(), l.set.begin(), l.set.end());
    EXPECT_EQ(predict(parts, recipe("bench_olmoe_1b_7b.toml", keys), 1, m, {}).step_s, l.prediction.step_s);
  }
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A recipe's own sharding is kept.
TEST(Search, SearchesShardedLayers) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  for (const std::vector<std::string>& set :
       std::vector<std::vector<std::string>>{{"parallel.fsdp=true"},
                                             {"parallel.shard_gradients=true"},
                                             {"parallel.fsdp=true", "parallel.shard_gradients=true"}}) {
    const SearchResult found = search(parts, recipe("bench_olmoe_1b_7b.toml", set), 4, m, {}, {.keep = 3});
    ASSERT_FALSE(found.layouts.empty());
    for (const FoundLayout& l : found.layouts) {
      const RunSpec run = recipe("bench_olmoe_1b_7b.toml", joined(set, l.set));
      EXPECT_EQ(run.parallel.fsdp, set[0] == "parallel.fsdp=true");
      EXPECT_EQ(predict(parts, run, 4, m, {}).step_s, l.prediction.step_s);
    }
  }
}

// Layouts with one stage a rank are tried with both schedules, unless --set names one.
TEST(Search, TriesBothSchedules) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  std::vector<std::string> set{"parallel.pp=4", "parallel.vpp=1", "train.global_batch=8"};
  const SearchResult both = search(parts, recipe("bench_olmoe_1b_7b.toml", set), 4, m, {}, {.keep = 20});
  const auto is_split = [](const FoundLayout& l) {
    return std::find(l.set.begin(), l.set.end(), "parallel.schedule=\"zb_h1\"") != l.set.end();
  };
  EXPECT_TRUE(is_split(both.layouts.at(0)));
  EXPECT_FALSE(std::all_of(both.layouts.begin(), both.layouts.end(), is_split));
  const RunSpec best = recipe("bench_olmoe_1b_7b.toml", joined(set, both.layouts[0].set));
  EXPECT_EQ(predict(parts, best, 4, m, {}).step_s, both.layouts[0].prediction.step_s);
  set.push_back("parallel.schedule=1f1b");
  const SearchResult one = search(parts, recipe("bench_olmoe_1b_7b.toml", set), 4, m, {}, {.keep = 20});
  EXPECT_TRUE(std::none_of(one.layouts.begin(), one.layouts.end(), is_split));
  EXPECT_LT(one.num_possible, both.num_possible);
}

// Where nothing else fits, layers are sharded, and a run that names the keys is left as it is.
TEST(Search, ShardsLayersWhereNothingElseFits) {
  const std::string name = "bench_olmoe_1b_7b.toml", on_gpu = "optimizer.offload=false";
  const PlanMachine m = machine("h200");
  const SearchOptions limits{.memory_gb = 26, .keep = 3};
  PartLibrary parts;
  const SearchResult found = search(parts, recipe(name.c_str(), {on_gpu}), 8, m, {}, limits);
  const std::vector<std::string>& best = found.layouts.at(0).set;
  const auto has = [&](const char* key) { return std::find(best.begin(), best.end(), key) != best.end(); };
  EXPECT_TRUE(has("parallel.fsdp=true") || has("parallel.shard_gradients=true"));
  const Prediction p = predict(parts, recipe(name.c_str(), joined({on_gpu}, best)), 8, m, {});
  EXPECT_EQ(p.step_s, found.layouts[0].prediction.step_s);
  EXPECT_LE(p.fullest_rank().total(), 26e9);
  const RunSpec whole = recipe(name.c_str(), {on_gpu, "parallel.fsdp=false", "parallel.shard_gradients=false"});
  try {
    for (const FoundLayout& l : search(parts, whole, 8, m, {}, limits).layouts)
      EXPECT_THAT(l.set, testing::Not(testing::Contains("parallel.fsdp=true")));
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("each needs at least"));
  }
  // The rules of a run leave choices out.
  const auto choices = [](const char* set) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {set});
    return sharding_choices(run, 8, run.precision.recipe, {}).size();
  };
  EXPECT_EQ(choices("run.graph=true"), 4U);
  EXPECT_EQ(choices("precision.recipe=\"fp8_block\""), 4U);
  EXPECT_EQ(choices("optimizer.grad=\"bf16\""), 4U);
  EXPECT_EQ(choices("optimizer.name=\"muon\""), 2U);
}

// The search moves states to the host where nothing else fits, and its keys make that run.
TEST(Search, PutsStatesOnTheHost) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  const SearchOptions limits{.memory_gb = 60, .keep = 2};
  const SearchResult found = search(parts, recipe("bench_olmoe_1b_7b.toml"), 1, m, {}, limits);
  const FoundLayout& best = found.layouts.at(0);
  EXPECT_THAT(best.set, testing::Contains("optimizer.offload=true"));
  EXPECT_THAT(best.set, testing::Contains("checkpoint.async=false"));
  // masters and moments in f32, but for the buffer
  const double buffer = recipe("bench_olmoe_1b_7b.toml", best.set).optimizer.offload_buffer.value();
  EXPECT_GT(best.prediction.host_bytes + buffer * 0x1p30, 12.0 * 6.9e9);
  EXPECT_TRUE(best.prediction.host_fits());
  EXPECT_EQ(predict(parts, recipe("bench_olmoe_1b_7b.toml", best.set), 1, m, {}).step_s, best.prediction.step_s);
  // Keys that the recipe or --set names are kept.
  const RunSpec named = recipe("bench_olmoe_1b_7b.toml", {"optimizer.offload=false"});
  EXPECT_THAT(refused([&] { search(parts, named, 1, m, {}, limits); }), HasSubstr("each needs at least"));
  // A host that has too little memory for them holds none.
  PlanMachine small = m;
  small.host_memory_gb = 100;
  EXPECT_THAT(refused([&] { search(parts, recipe("bench_olmoe_1b_7b.toml"), 1, small, {}, limits); }),
              HasSubstr("and 11.25 GB of the host's memory for states"));
}

// The bound by which a layout is left out at once counts the formats of states: here 6 bytes a parameter, and not 18.
TEST(Search, CountsStatesInTheirFormats) {
  PartLibrary parts;
  const RunSpec run =
      recipe("bench_olmoe_1b_7b.toml", {"optimizer.state=\"8bit\"", "optimizer.master=\"bf16_stochastic\"",
                                        "optimizer.grad=\"bf16\"", "optimizer.offload=false"});
  const SearchResult found = search(parts, run, 1, machine("h200"), {}, {.memory_gb = 70, .keep = 1});
  EXPECT_LE(found.layouts.at(0).prediction.fullest_rank().total(), 70e9);
}

// Without a budget a step is faster, and with one it needs less.
TEST(Search, ChoosesTheBudgetOfExpertRows) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml");
  const ParallelSpec alone, apart{.ep = 4};
  EXPECT_THAT(row_budgets(run, alone, {}), ElementsAre(std::nullopt));
  EXPECT_THAT(row_budgets(run, apart, {}), ElementsAre(0, 1.25));
  EXPECT_THAT(row_budgets(run, apart, {.chooses_rows = false}), ElementsAre(std::nullopt));
  SearchLimits skewed;
  skewed.load.stated = 2;
  EXPECT_THAT(row_budgets(run, apart, skewed), ElementsAre(0, 2.5));
  PartLibrary parts;
  const auto budget_within = [&](double memory_gb) {
    const SearchResult found = search(
        parts, recipe("bench_olmoe_1b_7b.toml", {"parallel.dispatcher=\"allgather\"", "optimizer.offload=false"}), 4,
        machine("h200"), {}, {.memory_gb = memory_gb, .keep = 40});
    std::set<std::string> budgets;
    for (const FoundLayout& l : found.layouts)
      for (const std::string& key : l.set)
        if (key.starts_with("memory.expert_rows=")) budgets.insert(key);
    return budgets;
  };
  EXPECT_THAT(budget_within(1000), ElementsAre("memory.expert_rows=0"));
  // A key that is the recipe's own is not repeated.
  const SearchResult tight = search(parts, run, 4, machine("h200"), {}, {.memory_gb = 50, .keep = 40});
  int with_budget = 0;
  for (const FoundLayout& l : tight.layouts) {
    const bool is_apart = l.prediction.mesh.ep * l.prediction.mesh.etp > 1;
    const bool is_zero = std::find(l.set.begin(), l.set.end(), "memory.expert_rows=0") != l.set.end();
    with_budget += is_apart && !is_zero ? 1 : 0;
  }
  EXPECT_GT(with_budget, 0);
}

// Hierarchical exchanges of cp are tried where cp is more than a domain, or than the heads that ranks may share.
TEST(Search, TriesHierarchicalContextParallelism) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"train.seq_len=32768", "model.max_position_embeddings=32768"});
  std::set<std::pair<int64_t, int64_t>> tried;
  for (const auto& group : search_space(run, 8, {.domain_ranks = 4})) {
    for (const Candidate& c : group) {
      if (c.parallel.tp > 1) continue;
      if (c.parallel.cp_comm != CpComm::hierarchical) continue;
      tried.insert({c.parallel.cp, c.parallel.cp_inner});
      EXPECT_THAT(keys_of(run, c), testing::Contains("parallel.cp_comm=\"hierarchical\""));
      EXPECT_THAT(keys_of(run, c), testing::Contains(fmt::format("parallel.cp_inner={}", c.parallel.cp_inner)));
      EXPECT_NO_THROW(run_of(run, c).parallel.check(8));
    }
  }
  EXPECT_THAT(tried, ElementsAre(std::pair(4, 2), std::pair(8, 4)));
}

// Keys of the recipe that the search does not choose are kept, and have their defaults where they would do nothing.
TEST(Search, OtherRecipeKeysAreKept) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml",
                             {"parallel.ep=2", "parallel.dispatcher=\"allgather\"", "parallel.expert_overlap=\"layer\"",
                              "parallel.sums=\"nccl\"", "memory.expert_rows=2"});
  for (const auto& group : search_space(run, 2, {})) {
    for (const Candidate& c : group) {
      const bool exchanges = c.parallel.ep * c.parallel.etp > 1;
      const RunSpec found = run_of(run, c);
      EXPECT_EQ(found.parallel.sums, RankSums::nccl);
      EXPECT_EQ(found.parallel.expert_overlap, exchanges ? ExpertOverlap::layer : ExpertOverlap::none);
      const auto set = keys_of(run, c);
      EXPECT_EQ(std::count(set.begin(), set.end(), "parallel.expert_overlap=\"none\""), exchanges ? 0 : 1);
      if (!exchanges) {
        EXPECT_THAT(set, testing::Contains("memory.expert_rows=\"auto\""));
      }
    }
  }
}

// Limits of the recipe and of the command both hold, so that the keys can be pasted.
TEST(Search, KeepsToMemoryFit) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"memory.fit=\"60GiB\""});
  const SearchResult found = search(parts, run, 2, machine("h200"), {}, {.memory_gb = 100, .keep = 1});
  EXPECT_LE(found.layouts.at(0).prediction.fullest_rank().total(), int64_t{60} << 30);
}

// Direct reaches the ranks of one host: a domain of more than 8 ranks is of several.
TEST(Search, TriesEveryDispatcher) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml");
  const auto kinds = [&](int64_t max_direct_ranks) {
    std::set<DispatcherKind> found;
    for (const auto& group : search_space(run, 4, {.max_direct_ranks = max_direct_ranks}))
      for (const Candidate& c : group) found.insert(c.parallel.dispatcher);
    return found;
  };
  using enum DispatcherKind;
  EXPECT_THAT(kinds(8), ElementsAre(automatic, allgather, alltoall, direct));
  EXPECT_THAT(kinds(1), ElementsAre(automatic, allgather, alltoall));
  const SearchLimits limits{.max_direct_ranks = 8};
  for (const auto& group : search_space(run, 4, limits))
    for (const Candidate& c : group)
      if (c.parallel.dispatcher == direct) {
        EXPECT_THAT(keys_of(run, c), testing::Contains("parallel.dispatcher=\"direct\""));
      }
}

// The ranks of a node of two-level share a host of the machine.
TEST(Search, TriesNodesOfAHost) {
  const RunSpec run = recipe("tiny_cpu.toml", {"parallel.ranks_per_node=2", "train.global_batch=8"});
  const auto has_two_level = [&](int64_t most) {
    for (const auto& group : search_space(run, 4, {.max_two_level_ranks = most}))
      for (const Candidate& c : group)
        if (c.parallel.dispatcher == DispatcherKind::two_level) return true;
    return false;
  };
  EXPECT_TRUE(has_two_level(2));
  EXPECT_FALSE(has_two_level(1));
  EXPECT_FALSE(has_two_level(0));
}

TEST(Search, BalancesStages) {
  const ModelSpec qwen = recipe("qwen3_30b_a3b.toml").model, deepseek = recipe("deepseek_v3.toml").model;
  EXPECT_EQ(balanced_layout(qwen, 4), "E t*13 | t*13 | t*14 | t*8 L");  // its head costs as much as five layers
  EXPECT_THAT(balanced_layout(deepseek, 32), testing::StartsWith("E t*2 | t*2 |"));
  EXPECT_THAT(balanced_layout(deepseek, 32), testing::EndsWith("| t*2 | t*1m | L"));
  for (const int64_t stages : {2, 4, 8, 16, 32}) {
    for (const ModelSpec& m : {qwen, deepseek}) {
      const StageLayoutRequest request{.text = balanced_layout(m, stages),
                                       .num_ranks = stages,
                                       .num_layers = m.num_layers,
                                       .num_mtp = m.num_mtp_layers};
      EXPECT_NO_THROW(check_mtp_stage(stage_layout(request))) << request.text;
    }
  }
}

TEST(Sweeps, AreTablesOfAllCombinations) {
  const SweptKey key = parse_sweep("memory.recompute=[],[\"norm\",\"qkv\"]");
  EXPECT_THAT(key.values, ElementsAre("[]", "[\"norm\",\"qkv\"]"));
  EXPECT_THAT(refused([] { parse_sweep("parallel.ep"); }), HasSubstr("expected KEY=VALUE,VALUE"));
  EXPECT_THAT(refused([] { parse_sweep("parallel.ep=1,,2"); }), HasSubstr("expected values between the commas"));
  PartLibrary parts;
  const SweepBase base{.recipe = kRecipes + "bench_olmoe_1b_7b.toml", .ranks = 4};
  const Sweep s =
      sweep(parts, base, {parse_sweep("parallel.ep=1,2,3"), parse_sweep("train.micro_batch=1,2")}, machine("h200"), {});
  ASSERT_EQ(s.points.size(), 6U);
  EXPECT_TRUE(s.points[3].prediction && s.points[3].prediction->fits());
  EXPECT_THAT(s.points[4].refused, HasSubstr("3"));  // ep = 3 divides neither
  const auto swept = [&](std::vector<SweptKey> keys) { sweep(parts, base, keys, machine("h200"), {}); };
  EXPECT_THAT(refused([&] {
                swept({parse_sweep("parallel.ep=1"), parse_sweep("parallel.ep=2")});
              }),
              HasSubstr("parallel.ep is given twice"));
  EXPECT_THAT(refused([&] { swept({parse_sweep("parallel.epp=1,2")}); }),
              HasSubstr("none of 2 points can be predicted; the first: "));
  EXPECT_THAT(refused([&] { swept({parse_sweep("ranks=0,99999999999")}); }), HasSubstr("none of 2 points"));
  const std::string csv = sweep_csv(s), svg = sweep_svg(s);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 7);
  EXPECT_THAT(svg, HasSubstr("train.micro_batch = 2"));
}

// "How many GPUs": the best layout of each number of ranks.
TEST(Sweeps, SearchAtEveryNumberOfRanks) {
  PartLibrary parts;
  const SweepBase base{.recipe = kRecipes + "bench_olmoe_1b_7b.toml", .search = SearchOptions{.keep = 1}};
  const Sweep s = sweep(parts, base, {parse_sweep("ranks=2,17,4,x")}, machine("h200"), {});
  ASSERT_EQ(s.points.size(), 4U);
  EXPECT_EQ(s.points[0].prediction->ranks, 2);
  EXPECT_EQ(s.points[2].prediction->ranks, 4);
  EXPECT_LT(s.points[2].prediction->run_s, s.points[0].prediction->run_s);
  EXPECT_FALSE(s.points[0].set.empty());
  EXPECT_THAT(s.points[1].refused, HasSubstr("no layout of 17 ranks is valid"));
  EXPECT_THAT(s.points[3].refused, HasSubstr("--sweep ranks: expected whole numbers from 1 on; got \"x\""));
  EXPECT_THAT(sweep_text(s), HasSubstr("best layout"));
}

// Rows that were made with other shares are fitted to those shares.
TEST(Fits, RecoverTheSharesThatRowsWereMadeWith) {
  PartLibrary parts;
  PlanMachine truth = machine("h200");
  truth.of(PlanSystem::moebius)[static_cast<size_t>(Share::products)] = 0.5;
  std::vector<FitRow> rows;
  for (const char* name : {"bench_dense_3b.toml", "bench_olmoe_1b_7b.toml", "bench_qwen3_30b_a3b_8layers.toml"}) {
    FitRow row{.name = name, .source = "made", .family = "h200", .relatives = {"h200"}, .run = recipe(name)};
    row.machine = "h200";
    row.measured = predict(parts, row.run, 1, truth, {}).model_tflops_per_gpu;
    rows.push_back(row);
  }
  const FitResult result = fit(parts, rows, {{"h200", machine("h200")}}, /*leave_one_out=*/true);
  for (const FittedRow& r : result.rows) {
    EXPECT_LT(std::abs(FittedRow::error(r.after, r.row->measured)),
              std::abs(FittedRow::error(r.before, r.row->measured)));
    EXPECT_GT(r.left_out, 0);
  }
  EXPECT_LT(summary_of(result.rows, PlanSystem::moebius, &FittedRow::after).worst, 0.03);
  EXPECT_LT(result.machines.at("h200").of(PlanSystem::moebius)[0], 0.6);
}

// A copy of a row would decide what is fitted without the row.
TEST(Fits, RefuseARowThatIsGivenTwice) {
  TestDir dir;
  nlohmann::json file = nlohmann::json::parse(read_file(kSource + "/docs/measurements/plan_rows.json"));
  file["rows"].push_back(file["rows"][0]);
  write_file_atomic(dir.path("rows.json"), file.dump());
  try {
    read_fit_rows(dir.path("rows.json"), kSource);
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::input);
    EXPECT_THAT(e.what(), HasSubstr("is a row already"));
  }
}

TEST(Fits, RefuseFilesThatAreNotRows) {
  TestDir dir;
  const std::string path = dir.path("rows.json");
  const auto answer = [&](const std::string& row, const std::string& beside = "") {
    write_file_atomic(path, R"({)" + beside +
                                R"("rows": [{"name": "a", "source": "b", "recipe": "recipes/bench_cpu.toml",
        "machine": "epyc2", "tokens_per_s": 400)" +
                                row + "}]}");
    try {
      read_fit_rows(path, kSource);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::input);
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  EXPECT_EQ(answer(""), "not refused");
  EXPECT_THAT(answer(R"(, "fit": "no")"), HasSubstr("row 1: expected true or false in \"fit\"; got \"no\""));
  EXPECT_THAT(answer(R"(, "asume": [])"), HasSubstr("row 1: unknown key \"asume\""));
  EXPECT_THAT(answer(R"(, "assume": ["graphs=some"])"), HasSubstr("row 1, \"a\": --assume graphs: expected one of"));
  EXPECT_THAT(answer(R"(, "ranks": 1.5)"), HasSubstr("row 1: expected a whole number"));
  EXPECT_THAT(answer(R"(, "model_tflops_per_gpu": 1)"), HasSubstr("row 1: expected one of model_tflops_per_gpu"));
  EXPECT_THAT(answer(R"(, "set": "x")"), HasSubstr("row 1: expected a list of texts in \"set\""));
  EXPECT_THAT(answer("", R"("families": 3, )"), HasSubstr("expected an object in \"families\""));
  EXPECT_THAT(answer("", R"("families": {"x": [1]}, )"), HasSubstr("expected a list of machines in families.x"));
  EXPECT_THAT(answer("", R"("before": {"epyc2": 3}, )"), HasSubstr("expected an object of shares in before.epyc2"));
}

// The errors that docs/measurements/plan.md gives for the machines as they are shipped.
TEST(Fits, ShippedMachinesPredictTheRows) {
  PartLibrary parts;
  std::vector<FittedRow> predicted;
  const std::vector<FitRow> rows = read_fit_rows(kSource + "/docs/measurements/plan_rows.json", kSource);
  for (const FitRow& row : rows) {
    const Prediction p = predict(parts, row.run, row.ranks, machine(row.machine.c_str()), row.assume);
    predicted.push_back({.row = &row, .after = p.model_tflops_per_gpu});
  }
  EXPECT_LT(summary_of(predicted, PlanSystem::megatron, &FittedRow::after, /*fitted=*/false).median, 0.15);
  EXPECT_LT(summary_of(predicted, PlanSystem::moebius, &FittedRow::after).median, 0.05);
  EXPECT_LT(summary_of(predicted, PlanSystem::moebius, &FittedRow::after).worst, 0.12);
  EXPECT_LT(summary_of(predicted, PlanSystem::moebius, &FittedRow::after, /*fitted=*/false).worst, 0.4);
  EXPECT_LT(summary_of(predicted, PlanSystem::megatron, &FittedRow::after).median, 0.08);
}

}  // namespace
}  // namespace moebius
