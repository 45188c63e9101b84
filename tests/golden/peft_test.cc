// Compares models with adapters with PEFT and transformers, in every case of tests/golden/data/peft.
// README.md there describes the cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "comm/transport/threads.h"
#include "engine/engine.h"
#include "infer/parity.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "weights/adapter.h"
#include "weights/load.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data/peft";

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kData))
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<float> read(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.at(name);
  EXPECT_EQ(entry.dtype, DType::f32) << name;
  std::vector<float> values(entry.bytes / sizeof(float));
  file.read(entry, values.data());
  return values;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return std::sqrt(sum);
}
double norm(const std::vector<float>& a) { return distance(a, std::vector<float>(a.size())); }

class Peft : public testing::TestWithParam<std::string> {
 protected:
  const std::string folder_ = kData + "/" + GetParam(), adapter_ = folder_ + "/adapter";
  SafetensorsFile expected_ = SafetensorsFile::open(folder_ + "/expected.safetensors");
  TestDir dir_;

  SafetensorsFile forward(DType compute, const std::string& model, const std::string& adapter) {
    const std::string out = dir_.path(fmt::format("{}.safetensors", name_of(compute)));
    write_parity({.out = out,
                  .model = model,
                  .adapter = {.path = adapter},
                  .tokens = folder_ + "/tokens.safetensors",
                  .gradients = !adapter.empty(),
                  .compute = compute,
                  .threads = 2});
    return SafetensorsFile::open(out);
  }
  EngineSpec training_spec(DType compute) const {
    const ModelSpec model = read_model_spec(folder_);
    const std::unique_ptr<AdapterReader> adapters = open_adapter(adapter_, model);
    LoraSpec lora = adapters->lora();
    lora.targets = adapters->matrices();
    OptimizerSpec optimizer;
    optimizer.weight_decay = 0;
    optimizer.clip = 0;
    return {.model = model,
            .precision = {.compute = compute},
            .use = ModelUse::training,
            .shape = {.batch = 2, .seq = 9, .max_segments = 18},
            .optimizer = optimizer,
            .lora = lora,
            .threads = 2};
  }
};

// The tolerances are those of golden_test.cc.
TEST_P(Peft, LogitsLossAndGradientsInF32) {
  const SafetensorsFile got = forward(DType::f32, folder_, adapter_);
  const std::vector<float> logits = read(expected_, "logits");
  EXPECT_LE(distance(read(got, "logits"), logits), 1e-5 * norm(logits));
  EXPECT_NEAR(read(got, "loss")[0], read(expected_, "loss")[0], 1e-6 * read(expected_, "loss")[0]);
  size_t gradients = 0;
  for (const SafetensorsEntry& entry : expected_.entries()) {
    if (!entry.name.starts_with("grad.")) continue;
    const std::vector<float> want = read(expected_, entry.name);
    ASSERT_NE(got.find(entry.name), nullptr) << entry.name;
    EXPECT_LE(distance(read(got, entry.name), want), 1e-4 * norm(want) + 1e-9) << entry.name;
    ++gradients;
  }
  const auto mine = std::count_if(got.entries().begin(), got.entries().end(),
                                  [](const SafetensorsEntry& e) { return e.name.starts_with("grad."); });
  EXPECT_EQ(static_cast<size_t>(mine), gradients) << "a gradient was written that the reference does not have";
  EXPECT_GT(gradients, 0u);
}

// Logits jump where bf16 moves a choice of experts, so those of the same choices are compared.
TEST_P(Peft, LogitsInBf16) {
  const SafetensorsFile exact = forward(DType::f32, folder_, adapter_), got = forward(DType::bf16, folder_, adapter_);
  for (const SafetensorsEntry& entry : exact.entries()) {
    if (!entry.name.starts_with("router.")) continue;
    std::vector<int32_t> of_f32(entry.bytes / 4), of_bf16(entry.bytes / 4);
    exact.read(entry, of_f32.data());
    got.read(got.at(entry.name), of_bf16.data());
    if (of_f32 != of_bf16) GTEST_SKIP() << "bf16 moved a choice of experts in " << entry.name;
  }
  const std::vector<float> want = read(expected_, "logits");
  EXPECT_LE(distance(read(got, "logits"), want), 0.05 * norm(want));
}

void fill(MicroBatch& b, const ParityTokens& t) {
  const int64_t S = t.seq;
  for (int64_t i = 0; i < t.batch * S; ++i) {
    const bool counts = i % S + 1 < S;
    b.token_T.ptr<int32_t>()[i] = t.token[i];
    b.target_T.ptr<int32_t>()[i] = counts ? t.token[i + 1] : 0;
    b.weight_T.ptr<float>()[i] = counts ? 1.0f : 0.0f;
    b.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(i % S);
    b.doc_start_T.ptr<int32_t>()[i] = 0;
    b.segment_T.ptr<int32_t>()[i] = static_cast<int32_t>(i / S);
  }
  b.scalars.set_loss_scale(0, 1.0 / static_cast<double>(t.batch * (S - 1)));
  b.scalars.total_tokens = static_cast<double>(t.batch * S);
  b.training = true;
}

// Twenty steps of AdamW. Rounding moves a loss of the f32 run by less than 1e-5; bf16 keeps 8 bits
// of weights and activations.
TEST_P(Peft, LossesOfTraining) {
  for (const auto& [compute, bound] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 0.03}}) {
    Engine engine(training_spec(compute));
    Stream s = engine.stream();
    load_weights(s, engine.model(), folder_);
    load_adapter(s, engine.model(), engine.spec().lora, adapter_);
    const ParityTokens tokens = read_parity_tokens(folder_ + "/tokens.safetensors", engine.spec().model);
    const std::vector<float> want = read(expected_, "losses");
    for (size_t step = 0; step < want.size(); ++step) {
      fill(engine.batch(), tokens);
      engine.step(static_cast<int64_t>(step) + 1, 1e-3);
      EXPECT_NEAR(engine.loss(), want[step], bound * want[step]) << name_of(compute) << ", step " << step + 1;
      engine.end_of_step();
    }
    EXPECT_LT(want.back(), 0.95 * want.front());
  }
}

// Ranks of sharded layers read their shares of the base and of the adapters.
TEST_P(Peft, SharesOfWeights) {
  const auto load = [&](Engine& engine) {
    Stream s = engine.stream();
    load_weights(s, engine.model(), folder_);
    load_adapter(s, engine.model(), engine.spec().lora, adapter_);
  };
  Engine whole(training_spec(DType::bf16));
  load(whole);
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    EngineSpec spec = training_spec(DType::bf16);
    spec.mesh = {.dp = 2, .edp = 2};
    spec.world = &world;
    spec.fsdp = true;
    Engine engine(spec);
    load(engine);
    int64_t adapters = 0, frozen = 0;
    auto of_whole = whole.model().params().all().begin();
    for (const Param& p : engine.model().params().all()) {
      const Tensor all = (of_whole++)->w;
      if (!p.shards_weights() || p.owned.count == 0) continue;
      const Tensor share = p.owned_weights(), want = owned_elements(p, all);
      EXPECT_EQ(std::memcmp(share.data, want.data, static_cast<size_t>(want.num_bytes())), 0) << p.spec.name;
      (p.frozen ? frozen : adapters) += 1;
    }
    EXPECT_GT(adapters, 0);
    EXPECT_GT(frozen, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, Peft, testing::ValuesIn(cases()), [](const auto& info) { return info.param; });

TEST(PeftData, HasAllItsCases) { EXPECT_EQ(cases().size(), 6u); }

}  // namespace
}  // namespace moebius
