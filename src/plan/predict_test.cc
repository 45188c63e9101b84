#include "plan/predict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "io/files.h"
#include "plan/print.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

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

// Files have the sizes of their formats.
TEST(Plans, CountTheBytesOfDataAndCheckpoints) {
  const PlanMachine h100 = machine("h100");
  RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"checkpoint.every=10", "train.steps=25"});
  const FileWork w = file_work(run, h100, 16, 8e9, 5e8, 131072, 1.0);
  EXPECT_EQ(w.data_bytes, 2 * 131072);        // uint16 for fewer than 65500 ids
  EXPECT_EQ(w.checkpoint_bytes, 8e9 * 12.0);  // a master and two moments in f32
  EXPECT_DOUBLE_EQ(w.save_s, 5e8 * 12 * h100.host_ranks / (h100.write_gb_s * 1e9));
  EXPECT_EQ(w.saves, 3);  // after 10, 20 and 25 steps
  // A save that takes longer than the steps until the next save delays it.
  EXPECT_DOUBLE_EQ(w.stall_s, 5e8 * 12 / h100.one_way_link() + w.save_s - 10);
  run.checkpoint.async_save = false;
  EXPECT_EQ(file_work(run, h100, 16, 8e9, 5e8, 131072, 1.0).stall_s, w.save_s);
  run.model.vocab_size = 70000;
  EXPECT_EQ(token_bytes(run.model), 4);
  OptimizerSpec small;
  small.master = MasterFormat::bf16_stochastic;
  small.state = StateFormat::bf16;
  EXPECT_EQ(checkpoint_bytes(small), 6);
}

// Muon's products are those of Newton-Schulz: with r <= N five times S = X X^T, S S and B X.
TEST(Predict, CountsTheProductsOfMuon) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"optimizer.name=\"muon\"", "optimizer.momentum=0.95"});
  const RunSpec adamw = recipe("bench_olmoe_1b_7b.toml");
  const PlanMachine m = machine("h200");
  const auto optimizer = [&](const RunSpec& of, int64_t ranks) {
    return predict(parts, of, ranks, m, {}).phases.at("optimizer");
  };
  const EngineSpec spec = planned_engine_spec(run, 1);
  LayoutParts layout_parts(parts, spec);
  const RankParams params = rank_params(layout_parts, stages_of(spec), 0);
  const auto of = [](double r, double n) { return 5 * (4 * r * r * n + 2 * r * r * r); };
  const ModelSpec& model = run.model;
  const double D = static_cast<double>(model.hidden_size), F = static_cast<double>(model.moe_intermediate_size);
  const double experts = static_cast<double>(model.num_experts) * 3 * of(std::min(D, F), std::max(D, F));
  double flops = 0;
  for (const OpWork& op : params.matrices.ops)
    if (op.name == "newton_schulz") flops += op.cost.flops;
  EXPECT_DOUBLE_EQ(flops, static_cast<double>(model.num_layers) * (experts + 4 * of(D, D)));
  const double seconds = flops / (m.bf16_tflops * 1e12);
  EXPECT_GT(optimizer(run, 1), optimizer(adamw, 1) + seconds);
  // Each of two ranks computes the matrices that it updates, and has gathered them.
  EXPECT_NEAR(optimizer(run, 2) / optimizer(run, 1), 0.5, 0.02);
  EXPECT_GT(predict(parts, run, 2, m, {}).phases.at("matrices"), 0);
  EXPECT_EQ(predict(parts, adamw, 2, m, {}).phases.count("matrices"), 0U);
}

// A step quantises its weights once. Its first micro-batch stores gradients, and the others read them too.
TEST(Predict, CountsWorkDoneOncePerStep) {
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

// The bytes that two and four H200 were measured to send (docs/measurements/performance/several-gpus.md).
TEST(Predict, SentBytesEqualMeasurements) {
  PartLibrary parts;
  const auto gib = [&](std::vector<std::string> set, int64_t ranks, const char* axis) {
    return predict(parts, recipe("bench_olmoe_1b_7b.toml", set), ranks, machine("h200"), {}).axes.at(axis).bytes /
           std::pow(2, 30);
  };
  EXPECT_NEAR(gib({"parallel.ep=2", "parallel.dispatcher=allgather"}, 2, "ep"), 20.1, 0.05);
  EXPECT_NEAR(gib({"parallel.ep=4", "parallel.dispatcher=allgather"}, 4, "ep"), 30.2, 0.05);
  EXPECT_NEAR(gib({"parallel.tp=2"}, 2, "tp"), 21.1, 0.05);
  EXPECT_NEAR(gib({"parallel.pp=2"}, 2, "pp"), 1.0, 0.05);
  EXPECT_NEAR(gib({}, 2, "edp") + gib({}, 2, "dp_cp"), 19.3, 0.05);
}

// A rank of eight has 8 of the 64 experts, and none of a token's 8 with the probability C(56, 8) / C(64, 8). Routes
// are sent with the rows.
TEST(Predict, DirectSendsATokenOnceToEachRank) {
  PartLibrary parts;
  const auto bytes = [&](const std::string& dispatcher, int ep) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {fmt::format("parallel.ep={}", ep),
                                                          fmt::format("parallel.dispatcher=\"{}\"", dispatcher)});
    return predict(parts, run, ep, machine("h200"), {}).axes.at("ep").bytes;
  };
  EXPECT_NEAR(bytes("direct", 8) / bytes("allgather", 8), 1 - 0.32093, 0.005);
  EXPECT_NEAR(bytes("direct", 2) / bytes("allgather", 2), 1, 0.005);  // every token is sent to both
}

// Each module of multi-token prediction has an MoE layer, whose rows are sent.
TEST(Predict, RowsOfMultiTokenPredictionAreSent) {
  PartLibrary parts;
  const auto bytes = [&](int modules) {
    const RunSpec run =
        recipe("deepseek_v3.toml",
               {"model.num_hidden_layers=5", "model.num_nextn_predict_layers=" + std::to_string(modules),
                "train.seq_len=1024", "train.micro_batch=1", "train.global_batch=4", "parallel.tp=1", "parallel.pp=1",
                "parallel.ep=4", "parallel.layout=\"\"", "parallel.dispatcher=\"direct\"", "run.graph=false"});
    return predict(parts, run, 4, machine("h200"), {}, {.simulate = false, .memory = PredictOptions::Memory::none})
        .axes.at("ep")
        .bytes;
  };
  EXPECT_GT(bytes(1), bytes(0));
  EXPECT_NEAR(bytes(2) - bytes(1), bytes(1) - bytes(0), 1e-6 * bytes(0));
}

// Rows in 8 bits are narrower only on the way to the experts: in three of the five exchanges of a layer.
TEST(Predict, RowsIn8BitsSendFewerBytes) {
  PartLibrary parts;
  const auto bytes = [&](const char* dispatcher, const char* format) {
    const RunSpec run =
        recipe("bench_olmoe_1b_7b.toml",
               {"parallel.ep=4", fmt::format("parallel.dispatcher=\"{}\"", dispatcher), "run.graph=false",
                "precision.recipe=\"fp8_block\"", fmt::format("precision.dispatch=\"{}\"", format)});
    return predict(parts, run, 4, machine("h200"), {}).axes.at("ep").bytes;
  };
  // 2048 elements of a byte and 16 scales of four, instead of 2048 of two bytes.
  const double saved = 3.0 / 5 * (1 - (2048.0 + 64) / 4096);
  for (const char* dispatcher : {"allgather", "alltoall", "direct"})
    EXPECT_NEAR(bytes(dispatcher, "recipe") / bytes(dispatcher, "compute"), 1 - saved, 0.01) << dispatcher;
}

// A token is sent once to each node, and is written to the memory of the ranks there. Nodes are the recipe's, also
// where parts are known already.
TEST(Predict, TwoLevelSendsATokenOnceToEachNode) {
  PartLibrary parts;
  const auto run = [](int64_t node, int64_t threads) {
    return recipe("tiny_cpu.toml",
                  {"parallel.ep=4", "parallel.dispatcher=\"two_level\"", "train.global_batch=8",
                   fmt::format("run.threads={}", threads), fmt::format("parallel.ranks_per_node={}", node)});
  };
  const PlanMachine m = machine("xeon2");
  const Prediction apart = predict(parts, run(1, 1), 4, m, {}), pairs = predict(parts, run(2, 1), 4, m, {});
  PartLibrary fresh;
  EXPECT_EQ(predict(fresh, run(2, 1), 4, m, {}).axes.at("ep").bytes, pairs.axes.at("ep").bytes);
  // A rank of two experts has one of a token's two with 13 of 28, and a pair of ranks with 22 of 28.
  EXPECT_NEAR(pairs.axes.at("ep").bytes / apart.axes.at("ep").bytes, (1 * 22 + 2 * 13) / (3 * 13.0), 0.03);
  EXPECT_LT(pairs.messages, apart.messages);
  EXPECT_THAT(refused([&] { predict(parts, run(2, 2), 4, m, {}); }),
              HasSubstr("have parallel.ranks_per_node = 2 ranks, which write to each other's memory; on the machine"));
}

TEST(Predict, SimulationAgreesWithTheFormula) {
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

// Sharded layers take less memory, and their exchanges take time: gathers in every pass, sums in every micro-batch.
TEST(Predict, ShardedLayers) {
  PartLibrary parts;
  const auto predicted = [&](std::vector<std::string> set) {
    set.insert(set.end(), {"run.graph=false", "train.micro_batch=1", "train.global_batch=32"});
    return predict(parts, recipe("bench_olmoe_1b_7b.toml", set), 8, machine("h200"), {});
  };
  const std::string fsdp = "parallel.fsdp=true", gradients = "parallel.shard_gradients=true",
                    serial = "parallel.overlap=false";
  const Prediction whole = predicted({}), weights = predicted({fsdp}), both = predicted({fsdp, gradients}),
                   shown = predicted({fsdp, gradients, serial});
  EXPECT_LT(weights.fullest_rank().of(Life::param), whole.fullest_rank().of(Life::param) / 3);
  EXPECT_LT(both.fullest_rank().total(), weights.fullest_rank().total());
  const auto of_experts = [](const Prediction& p) { return p.axes.at("edp"); };
  // 4 micro-batches of 16 layers: 2 + (16 - 2) + 7 (16 - 2) gathers instead of 16, of 2 bytes each; gradients have 4.
  const double bytes = of_experts(whole).bytes;
  EXPECT_NEAR(of_experts(weights).bytes / bytes, (4 + 2 * (2 + 8 * 14) / 16.0) / 6, 0.01);
  EXPECT_NEAR(of_experts(both).bytes / bytes, (4 * 4 + 2 * (2 + 8 * 14) / 16.0) / 6, 0.01);
  EXPECT_NEAR(of_experts(shown).hidden_s, 0, 1e-9);
  EXPECT_GT(of_experts(both).hidden_s, 0);
  EXPECT_GT(shown.step_s, both.step_s);
  EXPECT_GT(both.step_s, whole.step_s);
  double sum = 0;
  for (const auto& [phase, seconds] : both.phases) sum += seconds;
  EXPECT_NEAR(sum, both.step_s, 1e-9);
}

// The second exchange of x's rows and the exchange of dx's are two of the five of a micro-batch.
TEST(Predict, ExpertOverlapHidesTwoExchanges) {
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

// The ranks of each axis, and how many of them are in a domain of 8.
TEST(Predict, AxisSpansCountRanksInsideADomain) {
  const MeshShape mesh{.tp = 2, .cp = 2, .dp = 8, .pp = 2, .etp = 2, .ep = 4, .edp = 4};
  const auto place = [&](Axis axis) {
    const RankSpan span = span_of(mesh, axis);
    return std::pair(span.size, span.local(machine("h100")));
  };
  EXPECT_EQ(place(Axis::tp), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(place(Axis::dp_cp), std::pair(int64_t{16}, int64_t{4}));
  EXPECT_EQ(place(Axis::edp), std::pair(int64_t{4}, int64_t{1}));
  EXPECT_EQ(place(Axis::etp_edp), std::pair(int64_t{8}, int64_t{2})) << "two of one expert, in each of four domains";
  EXPECT_EQ(place(Axis::pp), std::pair(int64_t{2}, int64_t{1})) << "two neighbours";
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    if (axis == Axis::pp || axis == Axis::pp_back || axis == Axis::tp_pp || axis == Axis::etp_ep_pp) continue;
    EXPECT_EQ(span_of(mesh, axis).size, group_size(mesh, axis)) << name_of(axis);
  }
}

// Megatron recomputes its part of the experts in each module of multi-token prediction.
TEST(Predict, MegatronRecomputesInEveryModule) {
  PartLibrary parts;
  const auto more = [&](int modules, const char* what) {
    const RunSpec run =
        recipe("deepseek_v3.toml", {"run.device=\"cuda\"", "run.graph=false", "parallel.ep=64", "train.global_batch=64",
                                    "parallel.dispatcher=\"alltoall\"", "moe.rank_rows_factor=1.0",
                                    fmt::format("model.num_nextn_predict_layers={}", modules)});
    const auto backward = [&](const char* recompute) {
      return predict(parts, run, 64, machine("gb200"),
                     parse_assumptions({"system=megatron", "dispatcher=hybridep", recompute}))
          .stages.at(0)
          .backward.total();
    };
    return backward(what) - backward("recompute=recipe");
  };
  for (const char* what : {"recompute=activation", "recompute=moe"})
    EXPECT_NEAR(more(2, what) / more(1, what), 60.0 / 59, 1e-3) << what;  // 58 layers and the modules
}

// A score costs an exponential in addition to its products, and scalar operations backward.
TEST(Predict, NarrowHeadsTakeLongerForAMultiplyAdd) {
  const PlanMachine h100 = machine("h100"), gb200 = machine("gb200"), gb300 = machine("gb300");
  const double wide = attention_over_products(h100, {128, 128}, false),
               narrow = attention_over_products(h100, {64, 64}, false);
  EXPECT_NEAR(wide, 1 + 989e12 / (2 * 256) / 3.9e12, 1e-9);
  EXPECT_NEAR(narrow - 1, 2 * (wide - 1), 1e-9);
  // Blackwell Ultra has twice the exponentials, which the forward pass shows more than the backward pass.
  const double forward =
      attention_over_products(gb200, {128, 128}, false) / attention_over_products(gb300, {128, 128}, false);
  const double backward =
      attention_over_products(gb200, {128, 128}, true) / attention_over_products(gb300, {128, 128}, true);
  EXPECT_GT(forward, 1.3);
  EXPECT_GT(backward, 1.05);
  EXPECT_LT(backward, forward);
  EXPECT_EQ(attention_over_products(machine("xeon2"), {64, 64}, false), 1);
}

// Both messages of a merged pass leave at its end, so that a slower link costs a merged schedule more.
TEST(Predict, MergedPassesWaitForMessages) {
  PartLibrary parts;
  const RunSpec run =
      recipe("qwen3_235b_a22b.toml", {"run.device=\"cuda\"", "run.graph=false", "parallel.ep=32", "parallel.pp=8",
                                      "parallel.layout=\"Et*11|(t*12|)*6t*11L\"", "parallel.dispatcher=\"alltoall\"",
                                      "moe.rank_rows_factor=1.0", "train.global_batch=512"});
  PlanMachine slow = machine("h100");
  slow.across_gb_s /= 4;
  const auto step = [&](const PlanMachine& m, const char* overlap) {
    return predict(
        parts, run, 256, m,
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
  // cuDNN supports widths that our kernels do not, if rows are whole vectors of 16 bytes.
  const Prediction odd = step({"model.head_dim=92"}), even = step({"model.head_dim=96"});
  EXPECT_GT(odd.kernels.at("attention_forward"), 1.5 * even.kernels.at("attention_forward"));
  EXPECT_GT(odd.kernels.at("attention_backward"), 1.5 * even.kernels.at("attention_backward"));
}

// Activations on the host cost the time by which their copies exceed the passes of their stage.
TEST(Predict, CountsCopiesOfActivationsThatAreNotHidden) {
  PartLibrary parts;
  const auto predicted = [&](std::vector<std::string> set, double link_gb_s) {
    PlanMachine slow = machine("h100");
    slow.link_gb_s = link_gb_s;
    slow.link_one_way_gb_s = 0;
    return predict(parts, recipe("bench_qwen3_30b_a3b_8layers.toml", set), 1, slow, {});
  };
  const auto link = [](const Prediction& p) { return p.phases.contains("host link") ? p.phases.at("host link") : 0; };
  const std::vector<std::string> inputs{"memory.offload=[\"layer_input\"]"};
  const Prediction plain = predicted({}, 50), fast = predicted(inputs, 50), slow = predicted(inputs, 0.5);
  EXPECT_EQ(link(fast), 0);
  EXPECT_GT(link(slow), 0);
  EXPECT_NEAR(slow.step_s, fast.step_s + link(slow), 1e-6 * slow.step_s);
  EXPECT_LT(link(predicted({inputs[0], "memory.offload_fraction=0.5"}, 0.5)), 0.6 * link(slow));
  EXPECT_EQ(fast.step_s, plain.step_s);
  EXPECT_LT(fast.fullest_rank().total(), plain.fullest_rank().total());
}

TEST(Predict, AssumptionsChangeTheStepTime) {
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
TEST(Predict, SupportsManyRanks) {
  PartLibrary parts;
  const RunSpec run = recipe("deepseek_v3.toml", {"parallel.tp=2", "parallel.pp=16", "parallel.vpp=2", "parallel.ep=64",
                                                  "parallel.layout=\"Et*3|(tt|)*29m|L\"", "train.global_batch=102400"});
  const Prediction p = predict(parts, run, 102400, machine("gb200"), {});
  EXPECT_EQ(p.ranks, 102400);
  EXPECT_GT(p.step_s, 0);
  EXPECT_GT(p.messages, 1000);
  // Rank 0 receives a greeting from each other rank and sends it a table of all. The others are connected only to it,
  // and the identities of their groups.
  EXPECT_GT(p.start_up.messages_rank_0, 5 * 102399);
  EXPECT_GE(p.start_up.messages_rank, 1 + 4);
  EXPECT_LE(p.start_up.messages_rank, 1 + 4 + kNumAxes);
  EXPECT_EQ(p.start_up.connections, 102399);
  EXPECT_DOUBLE_EQ(p.start_up.table_bytes, 22.0 * 102400 * 102399);
  EXPECT_GT(p.start_up.seconds, 5 * 102399 * 40e-6);
  EXPECT_EQ(start_up({}, machine("gb200")).seconds, 0);
}

// The messages of a step are the groups' calls: the bytes and counts of comm/group_cost.h.
TEST(Predict, CountsMessages) {
  PartLibrary parts;
  const RunSpec run =
      recipe("tiny_cpu.toml", {"parallel.ep=2", "train.global_batch=16", "parallel.dispatcher=\"alltoall\""});
  const Prediction p = predict(parts, run, 2, machine("xeon2"), {});
  EXPECT_GT(p.messages, 0);
  EXPECT_EQ(p.messages, std::floor(p.messages));
  EXPECT_EQ(predict(parts, recipe("tiny_cpu.toml"), 1, machine("xeon2"), {}).messages, 0);
}

// The machine decides the device, and ranks of a CPU share it.
TEST(Predict, DeviceFollowsTheMachine) {
  PartLibrary parts;
  const RunSpec cpu = recipe("bench_cpu.toml", {"run.threads=1"});
  EXPECT_TRUE(predict(parts, cpu, 1, machine("h100"), {}).is_gpu);
  const Prediction half = predict(parts, cpu, 1, machine("xeon2"), {});
  const Prediction whole = predict(parts, recipe("bench_cpu.toml"), 1, machine("xeon2"), {});
  EXPECT_EQ(whole.threads, 2);
  EXPECT_DOUBLE_EQ(half.memory_bytes, whole.memory_bytes / 2);
  EXPECT_GT(half.step_s, 1.5 * whole.step_s);
}

// The merged schedule hides nothing of the first and last P micro-batches, and costs the memory's time.
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
  EXPECT_EQ(hidden(16), 0);  // one micro-batch overlaps with no other
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

}  // namespace
}  // namespace moebius
