// Weights that are on the rank only while a pass uses them: the same bits, so each use is between
// ready and release.
#include <gtest/gtest.h>

#include <cstring>

#include "infer/generate.h"
#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

using namespace testing;

// Keeps the weights of a model elsewhere. Between uses their memory holds NaN.
class AwayBetweenUses final : public ParamResidency {
 public:
  explicit AwayBetweenUses(Engine& engine) : params_(engine.model().params()) {
    for (const Param& p : params_.all()) {
      Away& away = away_.emplace_back();
      away.bytes.resize(p.w.num_bytes());
      std::memcpy(away.bytes.data(), p.w.data, away.bytes.size());
      send_away(p);
    }
    params_.set_residency(this);
  }
  ~AwayBetweenUses() override { params_.set_residency(nullptr); }

  void gather(Stream&, const ParamSpan&) override { ++num_gathers; }
  void ready(Stream&, const ParamSpan& span) override {
    for (size_t i = span.begin; i < span.end; ++i) {
      ++away_[i].num_ready;
      if (away_[i].uses++ == 0) std::memcpy(params_.all()[i].w.data, away_[i].bytes.data(), away_[i].bytes.size());
    }
  }
  void release(Stream&, const ParamSpan& span) override {
    for (size_t i = span.begin; i < span.end; ++i)
      if (--away_[i].uses == 0) send_away(params_.all()[i]);
  }
  void begin_gradient(Stream&, const ParamSpan& span, bool) override {
    for (size_t i = span.begin; i < span.end; ++i) ++away_[i].num_begun;
  }
  void grad_ready(Stream&, const ParamSpan& span) override {
    for (size_t i = span.begin; i < span.end; ++i) ++away_[i].num_gradients;
  }

  struct Away {
    std::vector<char> bytes;
    int uses = 0, num_ready = 0, num_begun = 0, num_gradients = 0;
  };
  const std::deque<Away>& away() const { return away_; }
  int num_gathers = 0;

 private:
  // Routers change their state between passes: it stays.
  static void send_away(const Param& p) {
    if (p.spec.kind != ParamKind::state) std::memset(p.w.data, 0xff, p.w.num_bytes());
  }

  ParamTable& params_;
  std::deque<Away> away_;
};

std::vector<char> bytes_of(const Tensor& t) {
  const char* data = static_cast<const char*>(t.data);
  return {data, data + t.num_bytes()};
}

void expect_the_same_gradients(const ModelSpec& model) {
  const EngineSpec spec = tiny_engine(model, 2, DType::bf16, 2);
  Engine here(spec), away(spec);
  init_params(here);
  init_params(away);
  const double loss = run_micro_batches(here, 1, 4);
  AwayBetweenUses residency(away);
  EXPECT_EQ(run_micro_batches(away, 1, 4), loss);
  EXPECT_TRUE(away.model().params().is_idle());
  auto want = here.model().params().all().begin();
  size_t i = 0;
  for (const Param& p : away.model().params().all()) {
    const AwayBetweenUses::Away& seen = residency.away()[i++];
    EXPECT_GE(seen.num_ready, 4) << p.spec.name;      // both passes of two micro-batches
    EXPECT_EQ(seen.num_gradients, 2) << p.spec.name;  // once a micro-batch
    EXPECT_EQ(seen.num_begun, p.layer >= 0 ? 2 : 0) << p.spec.name;
    if (p.has_grad) {
      EXPECT_EQ(bytes_of(p.dw), bytes_of(want->dw)) << p.spec.name;
    }
    ++want;
  }
  EXPECT_GT(residency.num_gathers, 0);
}

TEST(Residency, ATrainingStepReadsWeightsBetweenReadyAndRelease) {
  ModelSpec tied = tiny_model();
  tied.tie_word_embeddings = true;
  for (const ModelSpec& model : {tiny_model(), tied, latent_model(), mtp_model(), mtp_model(tied)})
    expect_the_same_gradients(model);
}

TEST(Residency, GenerationReadsWeightsBetweenReadyAndRelease) {
  const EngineSpec spec = generation_engine_spec(tiny_model(), DType::f32, 16, 2, 4);
  Engine here(spec), away(spec);
  init_params(here);
  init_params(away);
  const std::vector<int32_t> tokens{3, 1, 4, 1, 5, 9, 2};
  std::vector<float> want(spec.model.vocab_size), got(spec.model.vocab_size);
  feed_tokens(here, tokens, 0, want);
  const AwayBetweenUses residency(away);
  feed_tokens(away, tokens, 0, got);
  EXPECT_EQ(got, want);
  EXPECT_TRUE(away.model().params().is_idle());
}

}  // namespace
}  // namespace moebius
