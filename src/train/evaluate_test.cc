#include "train/evaluate.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>

#include "train/testing.h"

namespace moebius {
namespace {

using moebius::testing::tiny_run;
using moebius::testing::write_dataset;

void write_info(const std::string& prefix, int64_t tokens, int64_t text_bytes) {
  const nlohmann::json info{{"tokenizer", "bytes"}, {"vocab_size", 11}, {"append_eod", false},
                            {"documents", 1},       {"tokens", tokens}, {"text_bytes", text_bytes}};
  write_file_atomic(prefix + ".json", info.dump());
}

// Two sets with sizes that are not in proportion to their weights: 6 and 3 sequences, 3 and 2 batches.
class Evaluate : public ::testing::Test {
 protected:
  Evaluate() : engine_(training_engine_spec(run_)) {
    Stream s = engine_.stream();
    engine_.model().params().init(s, 7);
    write_info(a_, 47, 94);
    write_info(b_, 24, 72);
  }
  EvalResult evaluate_sets(const std::vector<DatasetSpec>& sets, int64_t max_batches = 0,
                           const std::function<bool()>& stop = {}) {
    Loader loader(sets, run_, /*shuffle=*/false);
    return evaluate(engine_, loader, max_batches, stop);
  }
  // Returns the loss of each sequence by itself, through the model's batch alone.
  double nats_of(const std::string& prefix, int64_t num_sequences) {
    const TokenDataset data = TokenDataset::open(prefix);
    MicroBatch& batch = engine_.batch();
    double nats = 0;
    std::vector<int32_t> ids(8);
    for (int64_t n = 0; n < num_sequences; ++n) {
      data.read(n * 7, 8, ids.data());
      for (int32_t t = 0; t < 14; ++t) {
        batch.token_T.ptr<int32_t>()[t] = ids[t % 7];
        batch.target_T.ptr<int32_t>()[t] = ids[t % 7 + 1];
        batch.weight_T.ptr<float>()[t] = t < 7 ? 1.0f : 0.0f;
        batch.pos_T.ptr<int32_t>()[t] = t % 7;
        batch.doc_start_T.ptr<int32_t>()[t] = 0;
        batch.segment_T.ptr<int32_t>()[t] = t / 7;
      }
      batch.training = false;
      engine_.forward();
      nats += std::exchange(*engine_.model().loss_sum().ptr<double>(), 0.0);
    }
    return nats;
  }

  TestDir dir_;
  RunSpec run_ = tiny_run();
  Engine engine_;
  std::string a_ = write_dataset(dir_, "a", 47), b_ = write_dataset(dir_, "b", 24);
};

// f32 rounding of the same sums in other batches.
constexpr double kTolerance = 1e-5;

TEST_F(Evaluate, ReadsEverySequenceOfEverySetOnce) {
  const double nats_a = nats_of(a_, 6), nats_b = nats_of(b_, 3);
  const EvalResult r = evaluate_sets({{a_, 0.1}, {b_, 0.9}});
  EXPECT_TRUE(r.complete);
  ASSERT_EQ(r.datasets.size(), 2u);
  EXPECT_EQ(r.datasets[0].prefix, a_);
  EXPECT_EQ(r.datasets[0].tokens, 42);
  EXPECT_NEAR(r.datasets[0].loss, nats_a / 42, kTolerance);
  EXPECT_EQ(r.datasets[1].tokens, 21);
  EXPECT_NEAR(r.datasets[1].loss, nats_b / 21, kTolerance);
  EXPECT_GT(std::abs(nats_a / 42 - nats_b / 21), 100 * kTolerance) << "the sets must differ for the test to see";
  EXPECT_EQ(r.tokens, 63);
  EXPECT_NEAR(r.loss, (nats_a + nats_b) / 63, kTolerance);
  // 2 and 3 bytes a token.
  EXPECT_NEAR(r.datasets[0].bits_per_byte.value(), nats_a / std::numbers::ln2 / 84, kTolerance);
  EXPECT_NEAR(r.datasets[1].bits_per_byte.value(), nats_b / std::numbers::ln2 / 63, kTolerance);
  EXPECT_NEAR(r.bits_per_byte.value(), (nats_a + nats_b) / std::numbers::ln2 / (84 + 63), kTolerance);
}

TEST_F(Evaluate, BatchesAreLimitedPerSet) {
  const EvalResult r = evaluate_sets({{a_, 1}, {b_, 1}}, 1);
  EXPECT_EQ(r.datasets[0].tokens, 14);
  EXPECT_EQ(r.datasets[1].tokens, 14);
  EXPECT_EQ(evaluate_sets({{a_, 1}, {b_, 1}}, std::numeric_limits<int64_t>::max()).tokens, 63);
}

TEST_F(Evaluate, OneSetWithoutBytesLeavesTheTotalWithoutBitsPerByte) {
  std::filesystem::remove(b_ + ".json");
  const EvalResult r = evaluate_sets({{a_, 1}, {b_, 1}});
  EXPECT_TRUE(r.datasets[0].bits_per_byte.has_value());
  EXPECT_FALSE(r.datasets[1].bits_per_byte.has_value());
  EXPECT_FALSE(r.bits_per_byte.has_value());
}

TEST_F(Evaluate, FirstTokensOfSeparateDocumentsAreNotEvaluated) {
  run_.data.separate_documents = true;
  Loader loader({{b_, 1}}, run_, false);
  Engine engine(training_engine_spec(run_));
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  // Documents begin at 5, 10, 15 and 20: each is a target of one of the sequences over [0, 21].
  EXPECT_EQ(evaluate(engine, loader, 0).tokens, 21 - 4);
}

TEST_F(Evaluate, StopsWhenAskedAndSaysSo) {
  const EvalResult r = evaluate_sets({{a_, 1}, {b_, 1}}, 0, [] { return true; });
  EXPECT_FALSE(r.complete);
  EXPECT_EQ(r.tokens, 0);
  EXPECT_TRUE(evaluate_sets({{a_, 1}, {b_, 1}}, 0, [] { return false; }).complete);
}

// Nothing predicts the first token of a document. In `late` the first 30 documents have one token each.
TEST_F(Evaluate, RefusesSequencesWithoutALoss) {
  run_.data.separate_documents = true;
  const std::string ones = dir_.path("ones"), late = dir_.path("late");
  for (const std::string& prefix : {ones, late}) {
    TokenDatasetWriter writer(prefix, TokenType::u16);
    for (int32_t i = 0; i < 40; ++i) {
      writer.add_tokens({&i, 1});
      if (prefix == ones || i < 30) writer.end_document();
    }
    writer.end_document();
    writer.close();
  }
  const auto load = [&](const std::string& prefix, bool shuffle) {
    run_.model.vocab_size = 40;
    return Loader({{prefix, 1}}, run_, shuffle);
  };
  for (const bool shuffle : {true, false})
    expect_error(ErrorKind::input, "dataset " + ones + ": expected a token with a loss that others of its document",
                 [&] { load(ones, shuffle); });
  const Loader loader = load(late, false);
  loader.check_evaluation(0, "train.eval_batches");
  loader.check_evaluation(3, "train.eval_batches");
  expect_error(
      ErrorKind::input,
      "expected a token with a loss among 4 sequences at its start, which train.eval_batches = 2 evaluates; got none",
      [&] { loader.check_evaluation(2, "train.eval_batches"); });
}

}  // namespace
}  // namespace moebius
