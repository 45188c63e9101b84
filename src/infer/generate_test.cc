#include "infer/generate.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "io/testing.h"

namespace moebius {
namespace {

ModelSpec tiny() {
  return model_spec_from_hf({{"model_type", "qwen3_moe"},
                             {"vocab_size", 37},
                             {"hidden_size", 24},
                             {"intermediate_size", 20},
                             {"num_hidden_layers", 3},
                             {"num_attention_heads", 4},
                             {"num_key_value_heads", 2},
                             {"head_dim", 6},
                             {"num_experts", 5},
                             {"num_experts_per_tok", 2},
                             {"moe_intermediate_size", 9},
                             {"mlp_only_layers", {1}},
                             {"max_position_embeddings", 64},
                             {"initializer_range", 0.3}},
                            "test");
}

void init(Engine& engine) {
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
}

std::vector<int32_t> prompt_of(int64_t n) {
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < n; ++i) prompt.push_back(static_cast<int32_t>((i * 11 + 3) % 37));
  return prompt;
}

// Returns the logits of the last of these tokens, from one pass without a cache.
std::vector<float> full_logits(std::span<const int32_t> tokens) {
  const int64_t T = static_cast<int64_t>(tokens.size());
  Engine engine({.model = tiny(), .precision = {.compute = DType::f32}, .shape = {.batch = 1, .seq = T}});
  init(engine);
  for (int64_t i = 0; i < T; ++i) {
    engine.batch().token_T.ptr<int32_t>()[i] = tokens[i];
    engine.batch().pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(i);
  }
  std::vector<float> logits(tiny().vocab_size);
  engine.forward();
  engine.read_logits(logits.data(), T - 1, T);
  return logits;
}

std::vector<float> cached_logits(std::span<const int32_t> tokens, int64_t chunk, int64_t prefill) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 2, chunk));
  init(engine);
  std::vector<float> logits(tiny().vocab_size);
  feed_tokens(engine, tokens.first(prefill), 0, logits);
  for (size_t i = prefill; i < tokens.size(); ++i)
    feed_tokens(engine, tokens.subspan(i, 1), static_cast<int64_t>(i), logits);
  return logits;
}

// The sums are the same in another order. So the error is f32 rounding of a few dozen terms in each
// of three layers, on logits of a few units.
TEST(Generate, CachedLogitsEqualTheFullForward) {
  const std::vector<int32_t> tokens = prompt_of(23);
  const std::vector<float> want = full_logits(tokens);
  float largest = 0;
  for (const float x : want) largest = std::max(largest, std::abs(x));
  for (const int64_t chunk : {1, 4, 7, 40}) {
    for (const int64_t prefill : {1, 9, 22, 23}) {
      const std::vector<float> got = cached_logits(tokens, chunk, prefill);
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_NEAR(got[i], want[i], 100 * 0x1p-23f * largest)
            << "chunk " << chunk << ", prefill " << prefill << ", id " << i;
      }
    }
  }
}

TEST(Generate, GreedyTakesTheMostLikelyTokenOfTheFullForward) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 1, 8));
  init(engine);
  std::vector<int32_t> tokens = prompt_of(5);
  const Generated out = generate(engine, {.max_tokens = 6, .sampling = {.temperature = 0}}, tokens);
  ASSERT_EQ(out.tokens.size(), 6u);
  EXPECT_FALSE(out.ended);
  for (const int32_t id : out.tokens) {
    const std::vector<float> logits = full_logits(tokens);
    EXPECT_EQ(id, std::max_element(logits.begin(), logits.end()) - logits.begin());
    tokens.push_back(id);
  }
}

TEST(Generate, SameSeedSameTextWhateverTheChunksAndThreads) {
  std::set<std::vector<int32_t>> texts;
  for (const auto& [seed, threads, chunk] : {std::tuple{1, 1, 8}, {1, 2, 8}, {1, 1, 3}, {2, 1, 8}}) {
    Engine engine(generation_engine_spec(tiny(), DType::f32, 40, threads, chunk));
    init(engine);
    GenerateSpec spec{.max_tokens = 20};
    spec.sampling.seed = seed;
    const Generated first = generate(engine, spec, prompt_of(5));
    EXPECT_EQ(generate(engine, spec, prompt_of(5)).tokens, first.tokens)
        << "an engine must not remember the text before";
    texts.insert(first.tokens);
  }
  EXPECT_EQ(texts.size(), 2u) << "one text for each seed";
}

TEST(Generate, EndsAtTheEndIdAndShowsEachTokenAsItComes) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 1, 8));
  init(engine);
  GenerateSpec spec{.max_tokens = 12};
  spec.sampling.seed = 5;
  const std::vector<int32_t> text = generate(engine, spec, prompt_of(5)).tokens;
  spec.end_id = text[4];
  const size_t first = std::find(text.begin(), text.end(), spec.end_id) - text.begin();
  std::vector<int32_t> seen;
  const Generated out = generate(engine, spec, prompt_of(5), [&](int32_t id) { seen.push_back(id); });
  EXPECT_TRUE(out.ended);
  EXPECT_EQ(out.tokens, std::vector<int32_t>(text.begin(), text.begin() + first));
  EXPECT_EQ(seen, out.tokens);
}

TEST(Generate, OnlyIdsThatTheTokenizerKnows) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 1, 8));
  init(engine);
  for (const int32_t id :
       generate(engine, {.max_tokens = 30, .sampling = {.temperature = 5}, .num_ids = 4}, prompt_of(5)).tokens)
    EXPECT_LT(id, 4);
}

TEST(Generate, RefusesWhatDoesNotFit) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 10, 1, 8));
  init(engine);
  expect_error(ErrorKind::usage, "must fit the context of 10 tokens; got 5 + 6",
               [&] { generate(engine, {.max_tokens = 6}, prompt_of(5)); });
  EXPECT_EQ(generate(engine, {.max_tokens = 5}, prompt_of(5)).tokens.size(), 5u);
  EXPECT_EQ(generate(engine, {.max_tokens = 0}, prompt_of(10)).tokens.size(), 0u);
  expect_error(ErrorKind::usage, "expected a prompt of at least one token",
               [&] { generate(engine, {.max_tokens = 1}, {}); });
  expect_error(ErrorKind::input, "expected prompt ids in [0, 37); got 37",
               [&] { generate(engine, {.max_tokens = 1}, std::vector<int32_t>{37}); });
  expect_error(ErrorKind::usage, "temperature must be 0 or more; got -1",
               [&] { generate(engine, {.max_tokens = 1, .sampling = {.temperature = -1}}, prompt_of(1)); });
  expect_error(ErrorKind::usage, "top-p must be in (0, 1]; got 0",
               [&] { generate(engine, {.max_tokens = 1, .sampling = {.top_p = 0}}, prompt_of(1)); });
  expect_error(ErrorKind::usage, "max-tokens must be 0 or more; got -1",
               [&] { generate(engine, {.max_tokens = -1}, prompt_of(1)); });
}

TEST(Sampling, FrequenciesFollowTheProbabilities) {
  const std::vector<float> logits{std::log(0.5f), std::log(0.2f), std::log(0.3f)};
  std::vector<int> count(3);
  const int n = 20000;
  for (int i = 0; i < n; ++i) ++count[sample_token(logits, {.seed = 9}, i)];
  // Four standard deviations of a binomial: 4 sqrt(p (1 - p) n) <= 2 sqrt(n) = 283.
  EXPECT_NEAR(count[0], 0.5 * n, 283);
  EXPECT_NEAR(count[1], 0.2 * n, 283);
  EXPECT_NEAR(count[2], 0.3 * n, 283);
}

TEST(Sampling, NucleusKeepsTheFewestThatReachTopP) {
  const std::vector<float> logits{std::log(0.5f), std::log(0.2f), std::log(0.3f)};
  const auto kept = [&](double top_p, double temperature = 1.0) {
    std::set<int32_t> ids;
    for (int i = 0; i < 500; ++i)
      ids.insert(sample_token(logits, {.temperature = temperature, .top_p = top_p, .seed = 9}, i));
    return ids;
  };
  EXPECT_EQ(kept(0.4), (std::set<int32_t>{0}));
  EXPECT_EQ(kept(0.7), (std::set<int32_t>{0, 2}));
  EXPECT_EQ(kept(0.9), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(kept(1.0, 1e-3), (std::set<int32_t>{0}));  // cold: only the most likely
}

TEST(Sampling, TiesGoToTheLowerIdAndNaNIsRefused) {
  EXPECT_EQ(sample_token(std::vector<float>{1, 3, 3}, {.temperature = 0}, 0), 1);
  EXPECT_EQ(sample_token(std::vector<float>{1, 3, 3}, {.top_p = 1e-9}, 0), 1);
  expect_error(ErrorKind::numerics, "expected finite logits for position 4", [] {
    sample_token(std::vector<float>{1, NAN}, {}, 4);
  });
}

}  // namespace
}  // namespace moebius
