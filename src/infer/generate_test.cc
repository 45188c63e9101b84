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

TEST(Generate, SameSeedSameTextForAnyChunksAndThreads) {
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
  spec.end_ids = {36, text[4]};
  const size_t first = std::find(text.begin(), text.end(), text[4]) - text.begin();
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

TEST(Generate, RefusesInvalidRequests) {
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

TEST(Generate, SettingsOfSamplingOutOfRangeAreRefused) {
  const auto refuse = [](const Sampling& sampling, const std::string& text) {
    expect_error(ErrorKind::usage, text, [&] { check_sampling(sampling); });
  };
  refuse({.top_k = -1}, "top-k must be 0 or more; got -1");
  refuse({.min_p = 1.5}, "min-p must be in [0, 1]; got 1.5");
  refuse({.repetition_penalty = 0}, "repetition-penalty must be above 0; got 0");
}

std::vector<std::vector<int32_t>> prompts_of(std::initializer_list<int64_t> lengths) {
  std::vector<std::vector<int32_t>> prompts;
  for (const int64_t n : lengths) {
    prompts.push_back(prompt_of(n));
    prompts.back().back() = static_cast<int32_t>(n);  // so that prompts of equal lengths would differ too
  }
  return prompts;
}

// The sequences of a batch, of which some wait until others end. Latent attention caches other things.
TEST(Generate, ASequenceIsTheSameAloneAndInABatch) {
  ModelSpec latent = model_spec_from_hf({{"model_type", "deepseek_v3"},
                                         {"vocab_size", 37},
                                         {"hidden_size", 24},
                                         {"intermediate_size", 20},
                                         {"num_hidden_layers", 2},
                                         {"num_attention_heads", 4},
                                         {"num_key_value_heads", 4},
                                         {"q_lora_rank", 8},
                                         {"kv_lora_rank", 6},
                                         {"qk_nope_head_dim", 6},
                                         {"qk_rope_head_dim", 4},
                                         {"v_head_dim", 6},
                                         {"n_routed_experts", 4},
                                         {"num_experts_per_tok", 2},
                                         {"moe_intermediate_size", 9},
                                         {"n_shared_experts", 1},
                                         {"n_group", 1},
                                         {"topk_group", 1},
                                         {"first_k_dense_replace", 1},
                                         {"max_position_embeddings", 64},
                                         {"num_nextn_predict_layers", 0},
                                         {"initializer_range", 0.3}},
                                        "test");
  const auto prompts = prompts_of({3, 17, 1, 9, 30, 2, 5, 5, 11});
  for (const ModelSpec& model : {tiny(), latent}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      GenerateSpec spec{.max_tokens = 14, .end_ids = {3}};
      spec.sampling = {.temperature = 1.5, .repetition_penalty = 1.1, .seed = 4};
      const auto texts = [&](int64_t sequences, int threads) {
        Engine engine(generation_engine_spec(model, dtype, 48, threads, 8, {}, sequences));
        init(engine);
        std::vector<std::vector<int32_t>> tokens;
        for (const Generated& one : Generator(engine).run(spec, prompts)) tokens.push_back(one.tokens);
        return tokens;
      };
      const auto alone = texts(1, 1);
      EXPECT_GT(std::set(alone.begin(), alone.end()).size(), 5u);
      EXPECT_EQ(texts(4, 2), alone);
      EXPECT_EQ(texts(9, 1), alone);
      EXPECT_EQ(texts(32, 2), alone);
    }
  }
}

TEST(Generate, ATextEndsWhereTheCallerSays) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 1, 8, {}, 2));
  init(engine);
  const auto prompts = prompts_of({3, 4, 5});
  std::vector<int> seen(3);
  const auto made = Generator(engine).run({.max_tokens = 9}, prompts, [&](size_t i, int32_t) {
    ++seen[i];
    return !(i == 1 && seen[1] == 2);
  });
  EXPECT_EQ(seen, (std::vector<int>{9, 2, 9}));
  EXPECT_EQ(made[1].tokens.size(), 2u);
  EXPECT_TRUE(made[1].ended);
  EXPECT_FALSE(made[0].ended);
}

// In a chat, every prompt begins with the one before.
TEST(Generate, CachedTokensAreNotFedAgain) {
  Engine engine(generation_engine_spec(tiny(), DType::f32, 40, 1, 8));
  init(engine);
  Generator generator(engine);
  const GenerateSpec spec{.max_tokens = 5, .sampling = {.temperature = 0}, .reuse_cache = true};
  std::vector<std::vector<int32_t>> prompt{prompt_of(6)};
  const std::vector<int32_t> first = generator.run(spec, prompt)[0].tokens;
  EXPECT_EQ(generator.times().prompt_tokens, 6);
  prompt[0].insert(prompt[0].end(), first.begin(), first.end());
  prompt[0].push_back(2);
  const std::vector<int32_t> second = generator.run(spec, prompt)[0].tokens;
  EXPECT_EQ(generator.times().prompt_tokens, 2) << "the last token of the answer was not fed yet";
  Engine other(generation_engine_spec(tiny(), DType::f32, 40, 1, 8));
  init(other);
  EXPECT_EQ(Generator(other).run(spec, prompt)[0].tokens, second);
  prompt[0].resize(3);
  generator.run(spec, prompt);
  EXPECT_EQ(generator.times().prompt_tokens, 1) << "at least one token must be fed";
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

TEST(Sampling, TopKAndMinPKeepTheMostLikely) {
  const std::vector<float> logits{std::log(0.5f), std::log(0.1f), std::log(0.3f), std::log(0.1f)};
  const auto kept = [&](const Sampling& sampling) {
    std::set<int32_t> ids;
    for (int i = 0; i < 500; ++i) ids.insert(sample_token(logits, sampling, i));
    return ids;
  };
  EXPECT_EQ(kept({.top_k = 1}), (std::set<int32_t>{0}));
  EXPECT_EQ(kept({.top_k = 3}), (std::set<int32_t>{0, 1, 2})) << "of two equal ones the lower id";
  EXPECT_EQ(kept({.top_k = 99}), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept({.min_p = 0.5}), (std::set<int32_t>{0, 2}));
  EXPECT_EQ(kept({.min_p = 1}), (std::set<int32_t>{0}));
  // 0.5 / 0.8 of the probability of the first two is at least 0.6.
  EXPECT_EQ(kept({.top_k = 2, .top_p = 0.6}), (std::set<int32_t>{0}));
  EXPECT_EQ(kept({.top_p = 0.6}), (std::set<int32_t>{0, 2}));
}

TEST(Sampling, APenaltyMakesTokensOfTheTextRarer) {
  const std::vector<float> logits{2, 1.5f, -1, -1.5f};
  const Sampling penalised{.temperature = 0, .repetition_penalty = 2};
  EXPECT_EQ(sample_token(logits, penalised, 0), 0);
  EXPECT_EQ(sample_token(logits, penalised, 0, std::vector<int32_t>{0}), 1);
  EXPECT_EQ(sample_token(logits, penalised, 0, std::vector<int32_t>{0, 0, 0}), 1) << "2 / 2 is less than 1.5";
  EXPECT_EQ(sample_token(std::vector<float>{-1, -1.5f}, penalised, 0, std::vector<int32_t>{0, 7}), 1);
  EXPECT_EQ(sample_token(std::vector<float>{1, 0.3f}, penalised, 0, std::vector<int32_t>{0, 0, 0}), 0) << "once";
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
