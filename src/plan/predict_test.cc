#include "plan/predict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "io/files.h"
#include "io/testing.h"
#include "plan/fit.h"
#include "plan/print.h"
#include "plan/search.h"
#include "plan/sweep.h"
#include "plan/timeline.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kSource = MOEBIUS_SOURCE_DIR;
const std::string kRecipes = kSource + "/recipes/";

PlanMachine machine(const char* name) { return load_machine(name, kSource + "/machines"); }

RunSpec recipe(const char* name, std::vector<std::string> set = {}) { return load_run_spec(kRecipes + name, set); }

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "not refused";
}

double sum(const std::map<std::string, double>& phases) {
  double s = 0;
  for (const auto& [name, seconds] : phases) s += seconds;
  return s;
}

TEST(Predict, PhasesAddUpToTheStep) {
  PartLibrary parts;
  for (const std::vector<std::string>& set : std::vector<std::vector<std::string>>{
           {}, {"parallel.ep=2"}, {"parallel.pp=2"}, {"parallel.tp=2", "parallel.ep=2"}}) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", set);
    const Prediction p = predict(parts, run, 2, machine("h200"), {});
    EXPECT_NEAR(sum(p.phases), p.step_s, 1e-9 * p.step_s);
    EXPECT_NEAR(p.tokens_per_s_per_gpu, 131072 / p.step_s / 2, 1e-6 * p.tokens_per_s_per_gpu);
    const auto json = plan_json(p, machine("h200"), {});
    for (const char* key : {"step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "memory_peak_bytes",
                            "phases", "axes", "bubble"})
      EXPECT_TRUE(json.contains(key)) << key;
  }
}

// Adds the keys of a plan as the table of docs/reference/commands.md writes them.
void add_keys(const nlohmann::ordered_json& json, const std::string& path, std::set<std::string>& keys) {
  static const std::set<std::string> named{"phases", "kernels", "axes"};
  if (json.is_array() && !json.empty() && json[0].is_object()) return add_keys(json[0], path + "[]", keys);
  if (!json.is_object()) {
    keys.insert(path);
    return;
  }
  for (const auto& [key, value] : json.items()) {
    bool is_name = named.contains(path);
    for (int life = 0; life < kNumLives; ++life)
      is_name = is_name || (path == "memory[]" && key == name_of(static_cast<Life>(life)));
    add_keys(value, (path.empty() ? "" : path + ".") + (is_name ? "NAME" : key), keys);
  }
}

TEST(Plans, HaveTheDocumentedKeys) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2"});
  std::set<std::string> keys, documented;
  const PlanMachine h200 = machine("h200");
  add_keys(plan_json(predict(parts, run, 2, h200, {}), h200, {}), "", keys);
  std::string text = read_file(kSource + "/docs/reference/commands.md");
  text = text.substr(text.find("### plan --json"));
  text = text.substr(0, text.find("\n## "));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| `")) continue;
    const std::string cell = line.substr(2, line.find(" | ", 2) - 2);
    for (size_t at = 0; (at = cell.find('`', at)) != std::string::npos;) {
      const size_t end = cell.find('`', at + 1);
      documented.insert(cell.substr(at + 1, end - at - 1));
      at = end + 1;
    }
  }
  EXPECT_EQ(keys, documented);
  // The names that scripts rely on.
  for (const char* key : {"step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "memory_peak_bytes",
                          "phases.NAME", "axes.NAME.bytes", "axes.NAME.exposed_s", "axes.NAME.hidden_s", "bubble"})
    EXPECT_TRUE(keys.contains(key)) << key;
}

// What is read and written, by the formats of the files.
TEST(Plans, CountFiles) {
  const PlanMachine h100 = machine("h100");
  RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"checkpoint.every=10", "train.steps=25"});
  const FileWork w = file_work(run, h100, 16, 8e9, 5e8, 131072, 1.0);
  EXPECT_EQ(w.data_bytes, 2 * 131072);        // uint16 for fewer than 65500 ids
  EXPECT_EQ(w.checkpoint_bytes, 8e9 * 12.0);  // a master and two moments in f32
  EXPECT_DOUBLE_EQ(w.save_s, 5e8 * 12 * h100.host_ranks / (h100.write_gb_s * 1e9));
  EXPECT_EQ(w.saves, 3);  // after 10, 20 and 25 steps
  // A save that takes longer than the steps until the next holds that up.
  EXPECT_DOUBLE_EQ(w.stall_s, 5e8 * 12 / (h100.link_gb_s * 1e9) + w.save_s - 10);
  run.checkpoint.async_save = false;
  EXPECT_EQ(file_work(run, h100, 16, 8e9, 5e8, 131072, 1.0).stall_s, w.save_s);
  run.model.vocab_size = 70000;
  EXPECT_EQ(token_bytes(run.model), 4);
  OptimizerSpec small;
  small.master = MasterFormat::bf16_stochastic;
  small.state = StateFormat::bf16;
  EXPECT_EQ(checkpoint_bytes(small), 6);
}

// A step quantises its weights once. Its first micro-batch stores gradients, and the others read them too.
TEST(Predict, CountsWhatAStepDoesOnce) {
  PartLibrary parts;
  const auto phases = [&](int64_t micro_batches, const char* system) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"train.micro_batch=1", "precision.recipe=\"fp8_block\"",
                                                          fmt::format("train.global_batch={}", micro_batches)});
    return predict(parts, run, 1, machine("h200"), parse_assumptions({fmt::format("system={}", system)})).phases;
  };
  const auto one = phases(1, "moebius"), two = phases(2, "moebius"), three = phases(3, "moebius");
  EXPECT_GT(one.at("copies"), 0);
  EXPECT_DOUBLE_EQ(one.at("copies"), three.at("copies"));
  EXPECT_NEAR(two.at("forward"), 2 * one.at("forward"), 1e-9);
  const double other = three.at("backward") - two.at("backward");
  EXPECT_NEAR(two.at("backward") - one.at("backward"), other, 1e-9);
  // The gradients of OLMoE are 27.6 GB, which H200 reads in at least 5.8 ms.
  EXPECT_GT(other - one.at("backward"), 0.003);
  EXPECT_NEAR(phases(2, "megatron").at("backward"), 2 * phases(1, "megatron").at("backward"), 1e-9);
}

// The bytes that two and four H200 were measured to send (docs/measurements/performance.md).
TEST(Predict, SendsWhatWasMeasured) {
  PartLibrary parts;
  const auto gib = [&](std::vector<std::string> set, int64_t ranks, const char* axis) {
    return predict(parts, recipe("bench_olmoe_1b_7b.toml", set), ranks, machine("h200"), {}).axes.at(axis).bytes /
           std::pow(2, 30);
  };
  EXPECT_NEAR(gib({"parallel.ep=2"}, 2, "ep"), 20.1, 0.05);
  EXPECT_NEAR(gib({"parallel.ep=4"}, 4, "ep"), 30.2, 0.05);
  EXPECT_NEAR(gib({"parallel.tp=2"}, 2, "tp"), 21.1, 0.05);
  EXPECT_NEAR(gib({"parallel.pp=2"}, 2, "pp"), 1.0, 0.05);
  EXPECT_NEAR(gib({}, 2, "edp") + gib({}, 2, "dp_cp"), 19.3, 0.05);
}

// A rank of four has none of a token's 8 experts with the probability (3/4)^8, as it is counted.
TEST(Predict, DirectSendsATokenOnceToEachRank) {
  PartLibrary parts;
  const auto bytes = [&](const std::string& dispatcher) {
    const RunSpec run =
        recipe("bench_olmoe_1b_7b.toml", {"parallel.ep=4", "parallel.dispatcher=\"" + dispatcher + "\""});
    return predict(parts, run, 4, machine("h200"), {}).axes.at("ep").bytes;
  };
  EXPECT_NEAR(bytes("direct") / bytes("allgather"), 1 - std::pow(0.75, 8), 0.01);
}

TEST(Predict, SimulatesWhatTheFormulaBounds) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2"});
  const Prediction simulated = predict(parts, run, 2, machine("h200"), {});
  const Prediction formula = predict(parts, run, 2, machine("h200"), {}, {.simulate = false});
  EXPECT_NEAR(formula.step_s, simulated.step_s, 0.05 * simulated.step_s);
  EXPECT_GT(simulated.bubble, 0.05);
  // Micro-batches that are not simulated take the time of those that are.
  const RunSpec many = recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2", "train.global_batch=512"});
  const Prediction few = predict(parts, many, 2, machine("h200"), {}, {.max_simulated = 16});
  const Prediction all = predict(parts, many, 2, machine("h200"), {}, {.max_simulated = 1000});
  EXPECT_NEAR(few.step_s, all.step_s, 0.005 * all.step_s);
}

// The rows of x once more, and those of dx, are two of the five ways of a micro-batch.
TEST(Predict, ExpertOverlapHidesTwoWays) {
  PartLibrary parts;
  const auto step = [&](const char* overlap) {
    return predict(parts,
                   recipe("bench_olmoe_1b_7b.toml", {"parallel.ep=2", "parallel.dispatcher=\"direct\"",
                                                     fmt::format("parallel.expert_overlap=\"{}\"", overlap)}),
                   2, machine("h200"), {})
        .step_s;
  };
  EXPECT_LT(step("layer"), 0.995 * step("none"));
  EXPECT_GT(step("layer"), 0.9 * step("none"));
}

// A score takes an exponential beside its products, and scalar operations backward.
TEST(Predict, NarrowHeadsTakeLongerForAMultiplyAdd) {
  const PlanMachine h100 = machine("h100"), gb200 = machine("gb200"), gb300 = machine("gb300");
  const double wide = beside_products(h100, {128, 128}, false), narrow = beside_products(h100, {64, 64}, false);
  EXPECT_NEAR(wide, 1 + 989e12 / (2 * 256) / 3.9e12, 1e-9);
  EXPECT_NEAR(narrow - 1, 2 * (wide - 1), 1e-9);
  // Blackwell Ultra has twice the exponentials, which the forward pass shows more than the backward pass.
  const double forward = beside_products(gb200, {128, 128}, false) / beside_products(gb300, {128, 128}, false);
  const double backward = beside_products(gb200, {128, 128}, true) / beside_products(gb300, {128, 128}, true);
  EXPECT_GT(forward, 1.3);
  EXPECT_GT(backward, 1.05);
  EXPECT_LT(backward, forward);
  EXPECT_EQ(beside_products(machine("xeon2"), {64, 64}, false), 1);
}

// Both messages of a merged pass leave at its end, so that a slower link costs a merged schedule more.
TEST(Predict, MergedPassesWaitForMessages) {
  PartLibrary parts;
  const RunSpec run = recipe("qwen3_235b_a22b.toml",
                             {"run.device=\"cuda\"", "run.graph=false", "parallel.ep=32", "parallel.pp=8", "parallel.layout=\"Et*11|(t*12|)*6t*11L\"",
                              "parallel.dispatcher=\"alltoall\"", "moe.rank_rows_factor=1.0", "train.global_batch=512"});
  PlanMachine slow = machine("h100");
  slow.across_gb_s /= 4;
  const auto step = [&](const PlanMachine& m, const char* overlap) {
    return predict(parts, run, 256, m,
                   parse_assumptions({"system=megatron", "dispatcher=hybridep", fmt::format("expert_overlap={}", overlap)}));
  };
  const Prediction fast = step(machine("h100"), "merged");
  EXPECT_GT(fast.axes.at("pp").exposed_s, 0);
  EXPECT_NEAR(step(slow, "merged").axes.at("pp").exposed_s / fast.axes.at("pp").exposed_s, 4, 0.2);
  EXPECT_EQ(step(slow, "none").axes.at("pp").exposed_s, 0);
}

// Kernels that any GPU runs are slower, and heads of 96 have no others.
TEST(Predict, PortableKernelsAreSlower) {
  PartLibrary parts;
  const auto step = [&](std::vector<std::string> set) {
    return predict(parts, recipe("moe_24gb.toml", std::move(set)), 1, machine("h100"), {});
  };
  const Prediction own = step({}), portable = step({"run.kernels=\"portable\""});
  const double share = machine("h100").portable;
  EXPECT_NEAR(own.kernels.at("attention_backward") / portable.kernels.at("attention_backward"), share, 0.01);
  EXPECT_GT(portable.step_s, 1.3 * own.step_s);
  const Prediction odd = step({"model.head_dim=96"});
  EXPECT_GT(odd.kernels.at("attention_forward"), 1.5 * own.kernels.at("attention_forward"));
}

// States on the host cost their bytes over its link, and sums of gradients as many again for each micro-batch.
TEST(Predict, CountsTheHostsLink) {
  PartLibrary parts;
  const auto link = [&](std::vector<std::string> set) {
    set.insert(set.end(), {"optimizer.master=\"bf16_stochastic\"", "optimizer.state=\"8bit\""});
    const auto phases = predict(parts, recipe("bench_qwen3_30b_a3b_8layers.toml", set), 1, machine("h100"), {}).phases;
    return phases.contains("host link") ? phases.at("host link") : 0;
  };
  EXPECT_EQ(link({}), 0);
  // 5.61e9 elements of two codes and two scales for 256 of them.
  EXPECT_NEAR(link({"optimizer.offload=true"}), 5.61e9 * (2 + 8.0 / 256) / (machine("h100").link_gb_s * 1e9), 0.01);
  EXPECT_GT(link({"optimizer.offload=true", "optimizer.grad=\"bf16\"", "optimizer.offload_grad=true"}),
            3 * link({"optimizer.offload=true"}));
}

TEST(Predict, AssumptionsActAsTheySay) {
  PartLibrary parts;
  const RunSpec run = recipe("qwen3_30b_a3b.toml", {"run.device=\"cuda\"", "run.graph=false", "parallel.ep=16",
                                                    "parallel.dispatcher=\"alltoall\"", "moe.rank_rows_factor=1.0"});
  const auto step = [&](std::vector<std::string> texts) {
    texts.emplace_back("system=megatron");
    return predict(parts, run, 16, machine("h100"), parse_assumptions(texts)).step_s;
  };
  const double plain = step({"dispatcher=alltoall"});
  EXPECT_LT(step({"dispatcher=hybridep"}), plain);
  EXPECT_LT(step({"dispatcher=alltoall", "expert_overlap=merged"}), plain);
  EXPECT_LT(step({"dispatcher=alltoall", "graphs=full"}), step({"dispatcher=alltoall", "graphs=partial"}));
  EXPECT_GT(step({"dispatcher=alltoall", "load=zipf:1"}), plain);
  EXPECT_NEAR(step({"dispatcher=alltoall", "jitter=0", "straggler=0.5"}),
              1.5 * step({"dispatcher=alltoall", "jitter=0"}), 1e-6 * plain);
  EXPECT_THAT(refused([] { parse_assumptions({"weather=good"}); }), HasSubstr("unknown key \"weather\"; the keys are"));
  EXPECT_THAT(refused([] {
                parse_assumptions({"jitter=0.1", "jitter=0.2"});
              }),
              HasSubstr("--assume: expected each key once; got jitter twice"));
  EXPECT_THAT(refused([] { parse_assumptions({"graphs=some"}); }),
              HasSubstr("expected one of recipe, none, partial, full"));
  EXPECT_THAT(refused([&] { predict(parts, run, 12, machine("h100"), {}); }), HasSubstr("12"));
  EXPECT_THAT(refused([&] { predict(parts, run, 16, machine("xeon2"), parse_assumptions({"system=megatron"})); }),
              HasSubstr("has no table [share.megatron]"));
}

// A token goes once to each rank that has some of its experts.
TEST(Predict, CountsRanksOfAToken) {
  const ModelSpec free{.top_k = 8}, grouped{.top_k = 8, .n_group = 8, .topk_group = 4};
  EXPECT_EQ(units_of_token(free, 1), 0);
  EXPECT_NEAR(units_of_token(free, 2), 0.5 * 2 * (1 - std::pow(0.5, 8)), 1e-12);
  EXPECT_NEAR(units_of_token(grouped, 8), 4 * 7.0 / 8, 1e-12);  // a group a rank: four of eight
  EXPECT_NEAR(units_of_token(grouped, 4), 4 * (1 - 15.0 / 70) * 3 / 4, 1e-12);
}

// Largest layouts: 10^5 ranks within a moment.
TEST(Predict, TakesManyRanks) {
  PartLibrary parts;
  const RunSpec run = recipe("deepseek_v3.toml", {"parallel.tp=2", "parallel.pp=16", "parallel.vpp=2", "parallel.ep=64",
                                                  "parallel.layout=\"Et*3|(tt|)*29m|L\"", "train.global_batch=102400"});
  const Prediction p = predict(parts, run, 102400, machine("gb200"), {});
  EXPECT_EQ(p.ranks, 102400);
  EXPECT_GT(p.step_s, 0);
  EXPECT_GT(p.messages, 1000);
  // Rank 0 takes a greeting of each other and sends each a table of all; all others greet each other.
  EXPECT_GT(p.start_up.messages_rank_0, 5 * 102399);
  EXPECT_GE(p.start_up.messages_rank, 1 + 4 * 102399);
  EXPECT_DOUBLE_EQ(p.start_up.table_bytes, 22.0 * 102400 * 102399);
  EXPECT_GT(p.start_up.seconds, 9 * 102398 * 40e-6);
  EXPECT_EQ(start_up({}, machine("gb200")).seconds, 0);
}

// The messages of a step are those of the groups' calls: the bytes and counts of comm/group_cost.h.
TEST(Predict, CountsMessages) {
  PartLibrary parts;
  const RunSpec run =
      recipe("tiny_cpu.toml", {"parallel.ep=2", "train.global_batch=16", "parallel.dispatcher=\"alltoall\""});
  const Prediction p = predict(parts, run, 2, machine("xeon2"), {});
  EXPECT_GT(p.messages, 0);
  EXPECT_EQ(p.messages, std::floor(p.messages));
  EXPECT_EQ(group_messages({.size = 8}, GroupCall::all_reduce), 14);
  EXPECT_EQ(group_messages({.size = 8}, GroupCall::all_gather), 7);
  EXPECT_EQ(group_messages({.size = 2}, GroupCall::send), 1);
  EXPECT_EQ(predict(parts, recipe("tiny_cpu.toml"), 1, machine("xeon2"), {}).messages, 0);
}

// The machine decides the device, and ranks of a CPU share it.
TEST(Predict, RunsOnTheMachine) {
  PartLibrary parts;
  const RunSpec cpu = recipe("bench_cpu.toml", {"run.threads=1"});
  EXPECT_TRUE(predict(parts, cpu, 1, machine("h100"), {}).is_gpu);
  const Prediction half = predict(parts, cpu, 1, machine("xeon2"), {});
  const Prediction whole = predict(parts, recipe("bench_cpu.toml"), 1, machine("xeon2"), {});
  EXPECT_EQ(whole.threads, 2);
  EXPECT_DOUBLE_EQ(half.memory_bytes, whole.memory_bytes / 2);
  EXPECT_GT(half.step_s, 1.5 * whole.step_s);
}

// The merged schedule hides nothing of the first and last P micro-batches, and takes the memory's time.
TEST(Predict, MergedOverlapNeedsOtherMicroBatches) {
  PartLibrary parts;
  const auto hidden = [&](int64_t global_batch) {
    const RunSpec run =
        recipe("qwen3_30b_a3b.toml", {"parallel.ep=16", "run.graph=false", "parallel.dispatcher=\"alltoall\"",
                                      "moe.rank_rows_factor=1.0", fmt::format("train.global_batch={}", global_batch)});
    const Assumptions assume = parse_assumptions({"system=megatron", "dispatcher=deepep", "expert_overlap=merged"});
    const AxisTime ep = predict(parts, run, 16, machine("h100"), assume).axes.at("ep");
    return ep.hidden_s / (ep.hidden_s + ep.exposed_s);
  };
  EXPECT_EQ(hidden(16), 0);  // one micro-batch has no other beside it
  EXPECT_NEAR(hidden(32) / hidden(64), 0.5 / 0.75, 1e-9);
  EXPECT_GT(hidden(1024), 0.95);
}

// Published memory of Megatron Core (arXiv 2603.07685; pull request 6429), in units as they are given.
TEST(Predict, PublishedMemory) {
  PartLibrary parts;
  const auto megatron = [&](std::vector<std::string> set, int64_t ranks, std::vector<std::string> texts) {
    for (const char* key : {"run.device=\"cuda\"", "run.graph=false", "parallel.dispatcher=\"alltoall\"",
                            "moe.rank_rows_factor=1.0", "parallel.pp=4"})
      set.emplace_back(key);
    texts.emplace_back("system=megatron");
    return predict(parts, recipe("deepseek_v3.toml", set), ranks, machine("h100"), parse_assumptions(texts));
  };
  const Prediction whole = megatron({"parallel.vpp=4", "parallel.ep=64", "parallel.layout=\"Et*4|(tttt|)*14tmL\""}, 256,
                                    {"permutation=plain"});
  // The paper's rank: weights and gradients, masters and moments, in GiB.
  const RankMemory& rank = whole.memory.at(2);
  const double gib = std::pow(2, 30);
  EXPECT_NEAR(static_cast<double>(rank.of(Life::param) + rank.of(Life::grad)) / gib, 36.4, 0.03 * 36.4);
  EXPECT_NEAR(static_cast<double>(rank.of(Life::master) + rank.of(Life::optimizer)) / gib, 32.1, 0.03 * 32.1);
  EXPECT_NEAR(static_cast<double>(rank.of(Life::saved)) / gib, 131.0, 0.03 * 131.0);
  const auto cut = [&](const char* recompute) {
    return static_cast<double>(
               megatron({"parallel.ep=16", "model.num_hidden_layers=14", "model.num_nextn_predict_layers=0",
                         "train.seq_len=2048", "train.global_batch=1024", "parallel.layout=\"Et*3|t*4|t*4|t*3L\"",
                         std::string("memory.recompute=") + recompute},
                        64, {})
                   .fullest_rank()
                   .total()) /
           1e9;
  };
  EXPECT_NEAR(cut("[]"), 68.7, 0.03 * 68.7);
  EXPECT_NEAR(cut("[\"layer\"]"), 60.2, 0.03 * 60.2);
}

TEST(Search, FindsLegalLayoutsThatFit) {
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
  EXPECT_THAT(refused([&] { search(parts, run, 4, m, {}, {.memory_gb = 1}); }),
              HasSubstr("the least that one needs is"));
  EXPECT_THAT(refused([&] { search(parts, run, 17, m, {}, {}); }), HasSubstr("no layout of 17 ranks is legal"));
}

// The number of threads changes nothing but the time, and --recipes adds what the run would accept.
TEST(Search, IsTheSameOnAnyThreads) {
  PartLibrary one, two;
  const RunSpec run = recipe("tiny_cpu.toml", {"train.global_batch=16"});
  const PlanMachine m = machine("xeon2");
  const SearchResult a = search(one, run, 2, m, {}, {.threads = 1}), b = search(two, run, 2, m, {}, {.threads = 2});
  EXPECT_EQ(search_text(a), search_text(b));
  EXPECT_GT(a.num_legal, 10);
  PartLibrary parts;
  const SearchResult more = search(parts, run, 2, m, {}, {.recipes = {"none", "fp8_block"}});
  EXPECT_EQ(more.num_legal, 2 * a.num_legal);
  EXPECT_THAT(refused([&] { search(parts, run, 2, m, {}, {.recipes = {"fp9"}}); }),
              HasSubstr("expected some of none, fp8_block, fp8_tensor, mxfp8, nvfp4; got \"fp9\""));
}

// With less memory the search recomputes more, and no subset of what it chose would fit.
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

// Direct reaches the ranks of one host: a domain of more than 8 ranks is of several.
TEST(Search, TriesEveryDispatcher) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml");
  const auto kinds = [&](int64_t most_direct) {
    std::set<DispatcherKind> found;
    for (const auto& group : search_space(run, 4, {.most_direct = most_direct}))
      for (const Candidate& c : group) found.insert(c.parallel.dispatcher);
    return found;
  };
  using enum DispatcherKind;
  EXPECT_THAT(kinds(8), ElementsAre(automatic, allgather, alltoall, direct));
  EXPECT_THAT(kinds(1), ElementsAre(automatic, allgather, alltoall));
  const SearchLimits limits{.most_direct = 8};
  for (const auto& group : search_space(run, 4, limits))
    for (const Candidate& c : group)
      if (c.parallel.dispatcher == direct) {
        EXPECT_THAT(keys_of(run, c), testing::Contains("parallel.dispatcher=\"direct\""));
      }
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
  EXPECT_THAT(s.points[1].refused, HasSubstr("no layout of 17 ranks is legal"));
  EXPECT_THAT(s.points[3].refused, HasSubstr("--sweep ranks: expected whole numbers from 1 on; got \"x\""));
  EXPECT_THAT(sweep_text(s), HasSubstr("best layout"));
}

TEST(Timelines, ShowEveryPass) {
  PartLibrary parts;
  const Prediction p = predict(parts, recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2"}), 2, machine("h200"), {});
  const auto trace = nlohmann::json::parse(plan_trace(p));
  int64_t passes = 0;
  for (const auto& event : trace["traceEvents"])
    passes += event["name"].get<std::string>().find(", stage ") == std::string::npos ? 0 : 1;
  EXPECT_EQ(passes, 2 * 2 * p.num_micro_batches);
  const std::string html = plan_html(p, "a <title>", "text");
  EXPECT_THAT(html, HasSubstr("a &lt;title&gt;"));
  EXPECT_EQ(html.find("http"), std::string::npos);  // no other file, no network
}

// Rows that were made with other shares are fitted to those shares.
TEST(Fits, FindTheSharesOfRows) {
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

// The errors that docs/measurements/plan.md gives for the machines as they are shipped.
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
  EXPECT_THAT(answer(R"(, "ranks": 1.5)"), HasSubstr("row 1: expected a whole number"));
  EXPECT_THAT(answer(R"(, "set": "x")"), HasSubstr("row 1: expected a list of texts in \"set\""));
  EXPECT_THAT(answer("", R"("families": 3, )"), HasSubstr("expected an object in \"families\""));
  EXPECT_THAT(answer("", R"("families": {"x": [1]}, )"), HasSubstr("expected a list of machines in families.x"));
  EXPECT_THAT(answer("", R"("before": {"epyc2": 3}, )"), HasSubstr("expected an object of shares in before.epyc2"));
}

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
  EXPECT_LT(summary_of(predicted, PlanSystem::megatron, &FittedRow::after).median, 0.08);
}

}  // namespace
}  // namespace moebius
