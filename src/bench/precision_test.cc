#include "bench/precision.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "io/testing.h"

namespace moebius {
namespace {

constexpr const char* kRecipe = R"(
[model]
vocab_size = 64
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 32
max_position_embeddings = 32
[train]
steps = 1
global_batch = 4
micro_batch = 2
seq_len = 16
[precision]
compute = "f32"
)";

RunSpec run_of(const std::vector<std::string>& overrides) {
  RunSpec run = parse_run_spec(kRecipe, "a recipe", overrides);
  run.threads = 1;
  return run;
}

const PrecisionLine& line_of(const PrecisionBench& bench, const std::string& part) {
  for (const PrecisionLine& line : bench.lines)
    if (line.name.find(part) != std::string::npos) return line;
  throw std::runtime_error("no line of " + part);
}

TEST(BenchPrecision, TimesEachShapeOnceAndTheExperts) {
  const PrecisionBench bench = bench_precision(run_of({"precision.recipe=mxfp8"}), 1);
  EXPECT_EQ(bench.rows, 32);
  EXPECT_EQ(bench.micro_batches, 2);
  EXPECT_EQ(line_of(bench, "self_attn").count, 2);
  EXPECT_EQ(line_of(bench, "self_attn").rows, 32);
  EXPECT_EQ(line_of(bench, "experts").rows, 16);
  EXPECT_EQ(line_of(bench, "experts").shape, "[4, 64, 32]");
  EXPECT_EQ(line_of(bench, "experts").count, 2);
  for (const PrecisionLine& line : bench.lines) {
    EXPECT_GT(line.plain.total_ms(), 0) << line.name;
    EXPECT_GT(line.quantised.total_ms(), 0) << line.name;
    EXPECT_GT(line.weights_ms, 0) << line.name;
  }
}

TEST(BenchPrecision, TimesEveryRecipe) {
  for (const char* recipe : {"fp8_block", "fp8_tensor", "nvfp4"}) {
    const PrecisionBench bench = bench_precision(run_of({fmt::format("precision.recipe={}", recipe)}), 1);
    for (const PrecisionLine& line : bench.lines) {
      EXPECT_GT(line.quantised.total_ms(), 0) << recipe << " " << line.name;
      EXPECT_GT(line.weights_ms, 0) << recipe << " " << line.name;
    }
  }
}

// A micro-batch of 65536 tokens is two chunks. Each of them has a time of its own for weight gradients.
TEST(BenchPrecision, TimesAllPassesOfExpertsInChunks) {
  const PrecisionBench bench =
      bench_precision(run_of({"precision.recipe=mxfp8", "precision.keep=[\"*.self_attn.*\"]", "train.seq_len=16384",
                              "train.micro_batch=4", "train.global_batch=4", "model.max_position_embeddings=16384"}),
                      1);
  const PrecisionLine& experts = line_of(bench, "experts");
  for (const PassTimes& t : {experts.plain, experts.quantised}) {
    EXPECT_GT(t.forward_ms, 0);
    EXPECT_GT(t.backward_input_ms, 0);
    EXPECT_GT(t.backward_weight_ms, 0);
  }
}

// Experts save what backward reads in 8 bits, and each of the two micro-batches is timed.
TEST(BenchPrecision, TimesActivationsInEightBits) {
  const PrecisionBench bench =
      bench_precision(run_of({"precision.recipe=fp8_block", "precision.activations=recipe"}), 1);
  EXPECT_EQ(bench.micro_batches, 2);
  EXPECT_GT(line_of(bench, "experts").quantised.total_ms(), 0);
  EXPECT_GT(line_of(bench, "experts").quantised.backward_input_ms, 0);
}

// Shapes and patterns that a run refuses are refused here too, with the same texts.
TEST(BenchPrecision, ShapesAndPatternsAreCheckedAsInARun) {
  const auto refused = [](const std::vector<std::string>& overrides, const char* text) {
    expect_error(ErrorKind::usage, text, [&] { bench_precision(run_of(overrides), 1); });
  };
  refused({"precision.recipe=nvfp4", "model.moe_intermediate_size=33"},
          "stores two elements in a byte, so model.layers.*.mlp.experts.down_proj needs even rows and columns");
  refused({"precision.recipe=mxfp8", "precision.keep=[\"*.q_prj.*\"]"}, "precision.keep: expected patterns");
}

TEST(BenchPrecision, KeptProductsAreTimedOnce) {
  const PrecisionBench bench =
      bench_precision(run_of({"precision.recipe=mxfp8", "precision.keep=[\"*.self_attn.*\"]"}), 1);
  const PrecisionLine& kept = line_of(bench, "self_attn");
  EXPECT_TRUE(kept.is_kept);
  EXPECT_GT(kept.plain.total_ms(), 0);
  EXPECT_EQ(kept.quantised.total_ms(), 0);
  EXPECT_FALSE(line_of(bench, "experts").is_kept);
}

// A pass that has no time of its own is the median of differences between neighbouring runs, never below zero.
// The time of weight gradients is that of the backward pass without the part for inputs, run by run.
TEST(BenchPrecision, WeightGradientsTakeTheMedianOfPairedDifferences) {
  EXPECT_EQ(median_of_rest({1, 10, 4}, {3, 12, 5}), 2) << "the medians differ by 1";
  EXPECT_EQ(median_of_rest({9, 3, 9}, {2, 6, 3}), 0) << "a negative time is 0";
}

TEST(BenchPrecision, RatioCountsWeightsOncePerStep) {
  PrecisionBench bench{.micro_batches = 4};
  bench.lines.push_back({.count = 2,
                         .plain = {.forward_ms = 1, .backward_input_ms = 1, .backward_weight_ms = 2},
                         .quantised = {.forward_ms = 0.5, .backward_input_ms = 0.5, .backward_weight_ms = 1},
                         .weights_ms = 4});
  bench.lines.push_back({.is_kept = true, .plain = {.forward_ms = 100}});
  EXPECT_DOUBLE_EQ(bench.lines[0].ratio(4), 0.75);
  EXPECT_DOUBLE_EQ(bench.ratio(), 0.75);
}

TEST(BenchPrecision, RefusesPatternsThatKeepAllProductsOrAPartOfOne) {
  const auto error = [](const std::string& keep) {
    try {
      bench_precision(run_of({"precision.recipe=mxfp8", "precision.keep=" + keep}), 1);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(error("[\"*\", \"*.o_proj.*\"]"),
            "bench precision: expected products to quantise; precision.keep names every product; remove patterns");
  EXPECT_EQ(
      error("[\"*.q_proj.*\"]"),
      "precision.keep: expected patterns that match all parts of model.layers.0.self_attn.qkv_proj.weight or none; "
      "got some that match model.layers.0.self_attn.q_proj.weight and not model.layers.0.self_attn.v_proj.weight; "
      "they are one product, keep them together");
}

TEST(BenchPrecision, RefusesARunWithoutARecipe) {
  try {
    bench_precision(run_of({}), 1);
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "bench precision: expected a recipe that quantises; got precision.recipe = \"none\"; add for example "
                 "--set precision.recipe=fp8_block");
  }
}

}  // namespace
}  // namespace moebius
