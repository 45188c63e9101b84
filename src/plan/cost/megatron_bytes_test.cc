// The ops that Megatron Core launches beside those of Moebius.
#include "plan/cost/megatron_bytes.h"

#include <gmock/gmock.h>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// 10 reads and writes more than the fused kernel in the forward pass, and 11 in the backward pass, of q and k.
TEST(MegatronBytes, OfRopeThatScales) {
  const PlanMachine m = machine("h100");
  const Assumptions assume;
  EngineSpec spec;
  spec.model = {.num_heads = 4, .num_kv_heads = 2, .head_dim = 8};
  spec.shape = {.batch = 2, .seq = 16};
  const TimeContext c{.machine = m, .assume = assume, .spec = spec};
  EXPECT_EQ(rope_bytes(c).forward, 0) << "one kernel rotates";
  spec.model.rope_scaling = {.type = RopeType::yarn, .factor = 32, .original_positions = 4096};
  EXPECT_EQ(rope_bytes(c).forward, 2 * 10 * 32 * 6 * 8);
  EXPECT_EQ(rope_bytes(c).backward, 2 * 11 * 32 * 6 * 8);
  spec.mesh.tp = 2;
  EXPECT_EQ(rope_bytes(c).forward, 2 * 10 * 32 * 3 * 8);
  spec.model.rope_scaling.attention_factor = 1;
  EXPECT_EQ(rope_bytes(c).forward, 0) << "cosines and sines are not scaled";
}

double memory_of(const std::vector<std::string>& set, std::vector<std::string> texts) {
  PartLibrary parts;
  std::vector<std::string> all{"model.num_hidden_layers=1", "train.micro_batch=1", "train.global_batch=8"};
  all.insert(all.end(), set.begin(), set.end());
  texts.emplace_back("system=megatron");
  return predict(parts, recipe("qwen3_30b_a3b.toml", all), 8, machine("h100"), parse_assumptions(texts),
                 {.simulate = false})
      .kernels.at("memory");
}

// The logits of a micro-batch are written and read, whether ranks share a vocabulary or not.
TEST(MegatronBytes, OfLogits) {
  const PlanMachine m = machine("h100");
  const double rate = m.memory_tb_s * 1e12 * m.of(PlanSystem::megatron)[static_cast<size_t>(Share::memory)];
  const double logits = 4096.0 * 151936;
  const std::vector<std::string> device{"run.device=\"cuda\"", "run.graph=false"};
  const auto seconds = [&](int64_t tp, int64_t vocab, const char* loss) {
    std::vector<std::string> set = device;
    set.push_back("parallel.tp=" + std::to_string(tp));
    set.push_back("model.vocab_size=" + std::to_string(vocab));
    return memory_of(set, {std::string("cross_entropy=") + loss}) * static_cast<double>(tp);
  };
  const double more = (kLogitBytesOfNativeLoss - kLogitBytesOfLoss) * logits / rate;
  EXPECT_NEAR(seconds(1, 151936, "native") - seconds(1, 151936, "te"), more, 1e-3 * more);
  // With tp = 2 the global batch of 8 has two micro-batches, each on half of the vocabulary.
  EXPECT_NEAR(seconds(2, 151936, "native") - seconds(2, 151936, "te"), 2 * more, 2e-3 * more);
  const double half = seconds(1, 151936, "te") - seconds(1, 151936 / 2, "te");
  const double of_half = (kLogitBytesOfProducts + kLogitBytesOfLoss) * logits / 2 / rate;
  EXPECT_NEAR(half, of_half, 1e-3 * of_half);
}

TEST(MegatronBytes, LossOfMegatronNeedsItsSystem) {
  EXPECT_THAT(refused([] { parse_assumptions({"cross_entropy=native"}); }),
              testing::HasSubstr("add --assume system=megatron"));
  EXPECT_NO_THROW(parse_assumptions({"cross_entropy=native", "system=megatron"}));
  EXPECT_THAT(refused([] { parse_assumptions({"cross_entropy=fast"}); }),
              testing::HasSubstr("expected one of te, native"));
}

}  // namespace
}  // namespace moebius
