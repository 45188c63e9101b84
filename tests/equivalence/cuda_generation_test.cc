// Generation on a GPU: captured and eager, with tokens drawn by the GPU and by the host, and compared with the CPU.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/trace.h"
#include "device/accelerator.h"
#include "device/gpu_limits.h"
#include "infer/generate.h"
#include "tests/equivalence/gpu_specs.h"

namespace moebius {
namespace {

// The tokens of a chunk are copied while the chunk before it may still run. The host's batch must
// not change meanwhile.
TEST(OnGpuGeneration, PromptInChunksGivesTheSameLogits) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  std::vector<int32_t> prompt(40);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 7 % 61);
  for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
    const auto logits_with = [&](int64_t chunk) {
      EngineSpec spec = generation_engine_spec(tiny_model(), DType::f32, 48, 2, chunk);
      spec.device = DeviceKind::cuda;
      spec.kernels = kernels;
      Engine engine(spec);
      initialised(engine);
      std::vector<float> logits(61);
      feed_tokens(engine, prompt, 0, logits);
      return logits;
    };
    const std::vector<float> whole = logits_with(48), chunks = logits_with(3);
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(chunks[i], whole[i], 1e-4) << i << name_of(kernels);
  }
}

// The first chunk of a prompt uses cuDNN or the kernels of one architecture, and later chunks use
// those for parts.
// There are no experts, because one chosen by a narrow margin would change everything.
TEST(OnGpuGeneration, InBf16ALongPromptIsThatOfTheCpu) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  ModelSpec model = wide_spec_on(DeviceKind::cuda, DType::bf16).model;
  model.moe_layers = {false, false, false};
  model.max_position_embeddings = 400;
  std::vector<int32_t> prompt(330);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i * 37 % 127);
  const auto logits_of = [&](DeviceKind device, const Way& way, int64_t chunk) {
    EngineSpec spec = generation_engine_spec(model, way.compute, 340, 2, chunk);
    spec.device = device;
    spec.kernels = way.kernels;
    Engine engine(spec);
    initialised(engine);
    std::vector<float> logits(model.vocab_size);
    feed_tokens(engine, std::span(prompt).first(328), 0, logits);
    feed_tokens(engine, std::span(prompt).subspan(328, 1), 328, logits);
    feed_tokens(engine, std::span(prompt).subspan(329, 1), 329, logits);
    EXPECT_LE(EngineTestAccess::stack_high_water(engine), engine.plan().bytes(Life::stack)) << chunk;
    return logits;
  };
  const std::vector<float> want = logits_of(DeviceKind::cpu, {DType::f32}, 512);
  // The tolerance of the goldens in bf16.
  for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
    for (const int64_t chunk : {512, 256, 100}) {
      const std::vector<float> got = logits_of(DeviceKind::cuda, {DType::bf16, kernels}, chunk);
      double both = 0, mine = 0, theirs = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        both += double{got[i]} * want[i];
        mine += double{got[i]} * got[i];
        theirs += double{want[i]} * want[i];
      }
      EXPECT_GE(both / std::sqrt(mine * theirs), 0.999) << "chunks of " << chunk << ", " << name_of(kernels);
    }
  }
}

// Texts of several prompts that end one after the other, so that passes of three, two and one rows
// are captured. Windows begin to cut keys off on the way.
TEST(OnGpuGeneration, CapturedTokensAreTheEagerOnes) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const auto texts_with = [&](DeviceKind device, const Way& way, bool graph, int64_t sequences, int64_t top_k) {
    ModelSpec model = wide_spec_on(device, way.compute).model;
    model.max_position_embeddings = 400;
    model.sliding_window = 40;
    model.sliding_layers = {false, true, false};
    EngineSpec spec = generation_engine_spec(model, way.compute, 330, 2, 256, {}, sequences);
    spec.device = spec.target = device;
    spec.kernels = way.kernels;
    spec.graph = graph;
    Engine engine(spec);
    initialised(engine);
    std::vector<std::vector<int32_t>> prompts;
    for (const int64_t length : {3, 260, 31}) {
      std::vector<int32_t>& prompt = prompts.emplace_back(length);
      for (int64_t i = 0; i < length; ++i) prompt[i] = static_cast<int32_t>((i * 37 + length) % 127);
    }
    std::vector<std::vector<int32_t>> texts;
    for (const Generated& text :
         Generator(engine).run({.max_tokens = 40, .sampling = {.temperature = 0.7, .top_k = top_k}}, prompts,
                               [&, given = 0](size_t prompt, int32_t) mutable { return ++given < 100 || prompt < 2; }))
      texts.push_back(text.tokens);
    return texts;
  };
  // The GPU draws tokens itself, but for those of the 50 largest logits.
  for (const int64_t top_k : {0, 50}) {
    for (const Way& way : kWays) {
      SCOPED_TRACE(name_of(way));
      const auto captured = texts_with(DeviceKind::cuda, way, true, 3, top_k);
      EXPECT_EQ(captured, texts_with(DeviceKind::cuda, way, false, 3, top_k));
      EXPECT_LT(captured[2].size(), captured[0].size());
    }
    EXPECT_EQ(texts_with(DeviceKind::cuda, {DType::f32}, true, 1, top_k),
              texts_with(DeviceKind::cpu, {DType::f32}, true, 1, top_k));
  }
}

// A model for which a Hopper GPU runs the kernels of one token, and other numbers of rows run the separate ops.
ModelSpec one_token_model(bool has_sinks) {
  ModelSpec m = wide_spec_on(DeviceKind::cuda, DType::bf16).model;
  m.num_heads = 8;
  m.num_kv_heads = 2;
  m.head_dim = 128;
  m.moe_layers = {true, true, true};
  m.shared_intermediate_size = 0;
  m.shared_expert_gate = false;
  m.max_position_embeddings = 150;
  m.sliding_window = 40;
  m.sliding_layers = {false, true, false};
  m.attention_sinks = has_sinks;
  m.check();
  return m;
}

// Logits of a text's tokens, fed one by one. others: how many other texts have a row in each pass.
struct FedText {
  std::vector<std::vector<float>> logits;
  std::map<std::string, OpTotal> ops;
  bool on_hopper = false;
};
FedText feed_text(const ModelSpec& model, bool graph, int64_t others) {
  EngineSpec spec = generation_engine_spec(model, DType::bf16, 150, 2, 256, {}, 2);
  spec.device = spec.target = DeviceKind::cuda;
  spec.graph = graph;
  Engine engine(spec);
  initialised(engine);
  const int64_t N = 1 + others, first[] = {5, 70};
  std::vector<float> logits(N * model.vocab_size);
  for (int64_t n = 0; n < N; ++n) {
    std::vector<int32_t> prompt(first[n]);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>((i * 37 + n) % 127);
    feed_tokens(engine, prompt, 0, logits, n);
  }
  FedText text;
  Trace trace;
  if (!graph) engine.set_trace(&trace);  // traced passes are eager
  for (int64_t i = 0; i < 70; ++i) {
    std::vector<CachedRun> runs;
    MicroBatch& batch = engine.batch();
    batch.training = false;
    for (int64_t n = 0; n < N; ++n) {
      runs.push_back({n, first[n] + i, 1});
      batch.token_T.ptr<int32_t>()[n] = static_cast<int32_t>((i * 13 + 5 * n) % 127);
      batch.pos_T.ptr<int32_t>()[n] = static_cast<int32_t>(first[n] + i);
      batch.segment_T.ptr<int32_t>()[n] = static_cast<int32_t>(n);
    }
    engine.forward_cached(runs);
    engine.read_row_logits(logits.data(), 0, N, N);
    text.logits.emplace_back(logits.begin(), logits.begin() + model.vocab_size);
  }
  text.ops = trace.totals();
  text.on_hopper = uses_hopper_kernels(engine.stream());
  return text;
}

// Positions pass pieces of the cache and the window.
TEST(OnGpuGeneration, OneTextHasTheBitsThatItHasBesideAnother) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  for (const bool has_sinks : {false, true}) {
    const ModelSpec model = one_token_model(has_sinks);
    const FedText want = feed_text(model, /*graph=*/false, 1);
    for (const bool graph : {false, true}) {
      const FedText got = feed_text(model, graph, 0);
      for (size_t i = 0; i < want.logits.size(); ++i) EXPECT_EQ(got.logits[i], want.logits[i]) << i << graph;
      if (graph || !got.on_hopper) continue;
      for (const char* op : {"norm_gemm", "rotated_attention", "norm_router_logits", "token_experts"}) {
        EXPECT_TRUE(got.ops.contains(op)) << op;
        EXPECT_FALSE(want.ops.contains(op)) << op;
      }
    }
  }
}

// The GPU draws ids while the host reads those of the pass before. They are the ids that the host draws from the logits
// of each token. A text ends at its length, at an end id, and where the caller says.
TEST(OnGpuGeneration, TokensThatTheGpuDrawsAreThoseOfTheHost) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  std::vector<std::vector<int32_t>> prompts;
  for (const int64_t length : {3, 60, 31, 1}) {
    std::vector<int32_t>& prompt = prompts.emplace_back(length);
    for (int64_t i = 0; i < length; ++i) prompt[i] = static_cast<int32_t>((i * 37 + length) % 127);
  }
  for (const auto& [compute, kernels] : kWays) {
    for (const double temperature : {0.0, 0.9}) {
      GenerateSpec generate{.max_tokens = 30, .sampling = {.temperature = temperature, .seed = 5}, .num_ids = 120};
      ModelSpec model = wide_spec_on(DeviceKind::cuda, compute).model;
      model.max_position_embeddings = 100;
      const auto engine_of = [&, compute = compute, kernels = kernels](int64_t sequences, bool graph) {
        EngineSpec spec = generation_engine_spec(model, compute, 100, 2, 256, {}, sequences);
        spec.device = spec.target = DeviceKind::cuda;
        spec.kernels = kernels;
        spec.graph = graph;
        return spec;
      };
      std::vector<std::vector<int32_t>> want;
      Engine one(engine_of(1, true));
      initialised(one);
      std::vector<float> logits(model.vocab_size);
      for (const std::vector<int32_t>& prompt : prompts) {
        std::vector<int32_t> text = prompt, &made = want.emplace_back();
        feed_tokens(one, prompt, 0, logits);
        while (std::ssize(made) < generate.max_tokens) {
          made.push_back(sample_token(std::span(logits).first(120), generate.sampling, std::ssize(text)));
          feed_tokens(one, std::span(&made.back(), 1), std::ssize(text), logits);
          text.push_back(made.back());
        }
      }
      const int32_t end_id = want[1][12];
      const auto cut = [&](std::vector<int32_t> text) {
        text.erase(std::find(text.begin(), text.end(), end_id), text.end());
        return text;
      };
      // In bf16 some products of a GPU round by the number of rows.
      for (const int64_t sequences : {1, 2, 4}) {
        if (compute == DType::bf16 && sequences > 1) continue;
        for (const bool graph : {true, false}) {
          SCOPED_TRACE(fmt::format("{}, {} sequences, graph {}, temperature {}", name_of(kernels), sequences, graph,
                                   temperature));
          Engine engine(engine_of(sequences, graph));
          ASSERT_TRUE(engine.draws_on_device());
          initialised(engine);
          Generator generator(engine);
          std::vector<Generated> made = generator.run(generate, prompts);
          for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i].tokens, want[i]) << i;
          EXPECT_EQ(generator.times().tokens, 4 * 29);
          EXPECT_LE(EngineTestAccess::stack_high_water(engine), engine.plan().bytes(Life::stack));
          generate.end_ids = {end_id};
          made = generator.run(generate, prompts);
          for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i].tokens, cut(want[i])) << i;
          generate.end_ids = {};
          std::vector<size_t> given(prompts.size());
          made = generator.run(generate, prompts, [&](size_t i, int32_t) { return ++given[i] < 7 + 3 * i; });
          for (size_t i = 0; i < made.size(); ++i)
            EXPECT_EQ(made[i].tokens, std::vector(want[i].begin(), want[i].begin() + 7 + 3 * static_cast<int>(i))) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moebius
