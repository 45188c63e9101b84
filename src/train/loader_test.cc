#include "train/loader.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "engine/engine.h"
#include "train/testing.h"

namespace moebius {
namespace {

using moebius::testing::tiny_run;
using moebius::testing::write_dataset;

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Weights without a common factor are walked to. A step then begins where the last one ended, also
// with documents apart.
TEST(Loader, AStepCostsTheSameHoweverFarTheRunIs) {
  const TestDir dir;
  RunSpec run = tiny_run();
  run.data.separate_documents = true;
  Engine engine(training_engine_spec(run));
  Loader loader({{write_dataset(dir, "a", 47), 0.6180339887}, {write_dataset(dir, "b", 24), 0.3819660113}}, run, true);
  const int64_t far = 500'000;
  const auto step = [&](int64_t at) {
    loader.begin_step(at);
    for (int64_t m = 0; m < 2; ++m) loader.fill(engine.batch(), m);
  };
  const double walk = seconds_of([&] { step(far); });
  const double steps = seconds_of([&] {
    for (int64_t i = 1; i <= 20; ++i) step(far + i);
  });
  EXPECT_LT(steps, walk) << "20 steps against the walk of 2,000,000 picks to the first; each walked as far before";
}

// The contents of a step do not depend on the steps before it. The picks that are kept are those of
// the order.
TEST(Loader, AResumedStepIsTheSameStep) {
  const TestDir dir;
  RunSpec run = tiny_run();
  run.data.separate_documents = true;
  const std::vector<DatasetSpec> sets{{write_dataset(dir, "a", 47), 0.7}, {write_dataset(dir, "b", 24), 0.31}};
  Engine engine(training_engine_spec(run));
  Loader through(sets, run, true);
  DatasetOrder order = [&] {
    std::vector<WeightedDataset> datasets;
    for (const DatasetSpec& set : sets) datasets.push_back({TokenDataset::open(set.prefix), set.weight});
    return DatasetOrder(std::move(datasets), {.seq_len = 7, .vocab_size = 11, .seed = run.seed});
  }();
  const int32_t* token = engine.batch().token_T.ptr<int32_t>();
  const auto expect_batch = [&](int64_t step, int64_t m) {
    std::vector<int32_t> want(8);
    for (int64_t row = 0; row < 2; ++row) {
      order.fill((step - 1) * 4 + m * 2 + row, want.data());
      const std::vector<int32_t> got(token + row * 7, token + row * 7 + 7);
      ASSERT_EQ(got, std::vector<int32_t>(want.begin(), want.begin() + 7)) << step << " " << m << " " << row;
    }
  };
  for (int64_t step = 1; step <= 9; ++step) {
    Loader resumed(sets, run, true);
    through.begin_step(step);
    resumed.begin_step(step);
    for (const int64_t m : {1, 0, 1}) {  // in any order
      for (Loader* loader : {&through, &resumed}) {
        loader->fill(engine.batch(), m);
        expect_batch(step, m);
      }
    }
  }
}

// The sequences of a step in their places: tokens, and the pairs of tokens in one document.
struct PlacedSequence {
  std::vector<int32_t> tokens;
  int64_t cost = 0;
  auto operator<=>(const PlacedSequence&) const = default;
};
std::vector<PlacedSequence> sequences_of(Loader& loader, MicroBatch& batch, int64_t step) {
  std::vector<PlacedSequence> sequences;
  loader.begin_step(step);
  for (const int64_t m : {0, 1}) {
    loader.fill(batch, m);
    for (int64_t row = 0; row < 2; ++row) {
      PlacedSequence sequence;
      for (int64_t i = row * 7; i < row * 7 + 7; ++i) {
        sequence.tokens.push_back(batch.token_T.ptr<int32_t>()[i]);
        sequence.cost += 2 * batch.pos_T.ptr<int32_t>()[i] + 1;  // the sum of odd numbers is a square
      }
      sequences.push_back(sequence);
    }
  }
  return sequences;
}

TEST(Loader, SequencesOfAStepAreSortedByFallingCost) {
  const TestDir dir;
  RunSpec run = tiny_run();
  run.data.separate_documents = true;
  const std::vector<DatasetSpec> sets{{write_dataset(dir, "a", 47), 1}};
  Engine engine(training_engine_spec(run));
  Loader plain(sets, run, true);
  run.data.order_by_cost = true;
  Loader sorted(sets, run, true);
  bool moved = false;
  for (int64_t step = 1; step <= 5; ++step) {
    std::vector<PlacedSequence> as_read = sequences_of(plain, engine.batch(), step),
                                by_cost = sequences_of(sorted, engine.batch(), step);
    EXPECT_TRUE(
        std::is_sorted(by_cost.begin(), by_cost.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; }));
    Loader resumed(sets, run, true);
    EXPECT_EQ(sequences_of(resumed, engine.batch(), step), by_cost);
    moved |= as_read != by_cost;
    std::sort(as_read.begin(), as_read.end());
    std::sort(by_cost.begin(), by_cost.end());
    EXPECT_EQ(as_read, by_cost) << "the same sequences";
  }
  EXPECT_TRUE(moved);
}

TEST(Loader, AMissingDatasetIsNamedWithItsKey) {
  const TestDir dir;
  const RunSpec run = tiny_run();
  const std::string there = write_dataset(dir, "a", 47), gone = dir.path("gone");
  expect_error(ErrorKind::input,
               "data.train: " + gone + ": expected " + gone + ".bin and " + gone + ".idx; " + gone +
                   ".bin is not there; correct the prefix, or make the dataset with `moebius data build --input FILES "
                   "--tokenizer bytes --out " +
                   gone + "`",
               [&] {
                 Loader({{there, 1}, {gone, 1}}, run, true);
               });
  expect_error(ErrorKind::input, "data.valid: " + gone, [&] { Loader({{gone, 1}}, run, false); });
  expect_error(ErrorKind::input, "--data: " + gone, [&] { Loader({{gone, 1}}, run, false, {}, "--data"); });
  for (const char* file : {".bin", ".idx"})
    expect_error(ErrorKind::input, there + file + ": expected the prefix of a dataset; got one of its files; leave",
                 [&] {
                   Loader({{there + file, 1}}, run, true);
                 });
  std::filesystem::remove(there + ".idx");
  expect_error(ErrorKind::input, "a.idx is not there", [&] { Loader({{there, 1}}, run, true); });
}

TEST(Loader, TheFingerprintHasALineForEachDataset) {
  const TestDir dir;
  const RunSpec run = tiny_run();
  const std::string a = write_dataset(dir, "a", 47), b = write_dataset(dir, "b", 24);
  const Loader both({{a, 1}, {b, 1}}, run, true);
  EXPECT_EQ(both.fingerprint(),
            TokenDataset::open(a).fingerprint() + "\n" + TokenDataset::open(b).fingerprint() + "\n");
  EXPECT_NE(Loader({{b, 1}, {a, 1}}, run, true).fingerprint(), both.fingerprint());
}

RunSpec mtp_run() {
  RunSpec run = tiny_run();  // 7 tokens, 2 sequences at a time, 4 to a step
  run.model.family = "moebius";
  run.model.num_mtp_layers = 3;
  return run;
}

// Checks the targets of each row, `depth` tokens after the next one, against their definition. It
// uses the tokens of the sequence and the document of each.
void expect_mtp(const MicroBatch& b, const std::vector<int32_t>& tokens, const std::vector<int64_t>& document,
                const std::vector<int64_t>& positions, int64_t first_row) {
  const int64_t S = std::ssize(tokens) - 1;
  for (int64_t k = 0; k <= std::ssize(b.mtp_targets); ++k) {
    for (int64_t n = 0; n < std::ssize(positions); ++n) {
      const int64_t i = positions[n], target = i + k + 1;
      const bool counts = target <= S && document[i] == document[target];
      ASSERT_EQ(b.targets(k).target_T.ptr<int32_t>()[first_row + n], target <= S ? tokens[target] : 0) << k << " " << i;
      ASSERT_EQ(b.targets(k).weight_T.ptr<float>()[first_row + n], counts ? 1.0f : 0.0f) << k << " " << i;
    }
  }
}

DatasetOrder in_order_of_file(const std::string& data, int64_t seq_len) {
  std::vector<WeightedDataset> sets;
  sets.push_back({TokenDataset::open(data), 1});
  return DatasetOrder(std::move(sets), {.seq_len = seq_len, .vocab_size = 11, .shuffle = false});
}

// Documents of 5 tokens, apart or not, in sequences of 7 and 8.
TEST(LoaderMtp, TargetsStopAtTheEndOfDocumentAndSequence) {
  for (const bool apart : {false, true}) {
    const TestDir dir;
    RunSpec run = mtp_run();
    run.data.separate_documents = apart;
    const std::string data = write_dataset(dir, "a", 47);
    DatasetOrder order = in_order_of_file(data, 7);
    Engine engine(training_engine_spec(run));
    Loader loader({{data, 1}}, run, /*shuffle=*/false);
    std::vector<double> weights(4);
    loader.begin_step(1);
    for (int64_t m = 0; m < 2; ++m) {
      loader.fill(engine.batch(m), m);
      for (int64_t row = 0; row < 2; ++row) {
        std::vector<int32_t> tokens(8);
        const Sample sample = order.fill(m * 2 + row, tokens.data());
        std::vector<int64_t> document(8);
        for (int64_t i = 0; i < 8 && apart; ++i) document[i] = (sample.token_begin + i) / 5;
        expect_mtp(engine.batch(m), tokens, document, {0, 1, 2, 3, 4, 5, 6}, row * 7);
      }
      for (int64_t k = 0; k < 4; ++k) {
        for (int64_t t = 0; t < 14; ++t) weights[k] += engine.batch(m).targets(k).weight_T.ptr<float>()[t];
      }
    }
    for (int64_t k = 0; k < 4; ++k) EXPECT_DOUBLE_EQ(engine.batch().scalars.loss_scale[k], 1 / weights[k]) << k;
    for (int64_t k = 1; k < 4; ++k)
      EXPECT_FLOAT_EQ(engine.batch().scalars.objective_scale[k], 0.1 / 3 / weights[k]) << k;
  }
}

// The rows of a context rank bring the tokens that follow them along, so no other rank needs to
// send any.
TEST(LoaderMtp, AContextRankHasTheTargetsOfItsRows) {
  const TestDir dir;
  RunSpec run = mtp_run();
  run.train.seq_len = 8;
  run.data.separate_documents = true;
  const std::string data = write_dataset(dir, "a", 47);
  DatasetOrder order = in_order_of_file(data, 8);
  const std::vector<std::vector<int64_t>> positions{{0, 1, 6, 7}, {2, 3, 4, 5}};
  for (int64_t c = 0; c < 2; ++c) {
    EngineSpec spec = training_engine_spec(run);
    spec.shape.seq = 4;
    spec.max_positions = 8;
    Engine engine(spec);
    Loader loader({{data, 1}}, run, /*shuffle=*/false, {.cp_rank = c, .cp = 2});
    loader.begin_step(1);
    loader.fill(engine.batch(), 0);
    for (int64_t row = 0; row < 2; ++row) {
      std::vector<int32_t> tokens(9);
      const Sample sample = order.fill(row, tokens.data());
      std::vector<int64_t> document(9);
      for (int64_t i = 0; i < 9; ++i) document[i] = (sample.token_begin + i) / 5;
      expect_mtp(engine.batch(), tokens, document, positions[c], row * 4);
    }
  }
}

TEST(LoaderMtp, IsEmptyWhenOff) {
  RunSpec run = mtp_run();
  run.train.mtp_coeff = 0;
  Engine engine(training_engine_spec(run));
  EXPECT_TRUE(engine.batch().mtp_targets.empty());
}

// Documents of 4 tokens, whose last 2 are a completion, and one of 9 without a completion.
std::string write_prompts(const TestDir& dir) {
  TokenDatasetWriter writer(dir.path("prompts"), TokenType::u16);
  const std::vector<int32_t> ids{1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (int i = 0; i < 3; ++i) {
    writer.add_tokens(std::span(ids).first(2), /*are_targets=*/false);
    writer.add_tokens(std::span(ids).subspan(2, 2));
    writer.end_document();
  }
  writer.add_tokens(ids);
  writer.end_document();
  writer.close();
  return dir.path("prompts");
}

RunSpec prompt_run() {
  RunSpec run = tiny_run();  // 7 tokens, 2 sequences at a time, 4 to a step
  run.data.separate_documents = true;
  return run;
}

TEST(LoaderOfPrompts, TheLossIsOnCompletionsOfWholeDocuments) {
  const TestDir dir;
  const RunSpec run = prompt_run();
  Engine engine(training_engine_spec(run));
  Loader loader({{write_prompts(dir)}}, run, /*shuffle=*/false);
  ASSERT_EQ(loader.num_sequences(0), 4);  // two documents; one; the long one, cut in two
  const MicroBatch& b = engine.batch();
  const auto row = [&](const Tensor& t, int64_t r) {
    return std::vector<int32_t>(t.ptr<int32_t>() + 7 * r, t.ptr<int32_t>() + 7 * r + 7);
  };
  const auto weights = [&](int64_t r) {
    return std::vector<float>(b.weight_T.ptr<float>() + 7 * r, b.weight_T.ptr<float>() + 7 * r + 7);
  };
  loader.fill_pass(engine.batch(), 0, 0, 2);
  EXPECT_THAT(row(b.token_T, 0), ::testing::ElementsAre(1, 2, 3, 4, 1, 2, 3));
  EXPECT_THAT(row(b.target_T, 0), ::testing::ElementsAre(2, 3, 4, 1, 2, 3, 4));
  EXPECT_THAT(weights(0), ::testing::ElementsAre(0, 1, 1, 0, 0, 1, 1));
  EXPECT_THAT(row(b.pos_T, 0), ::testing::ElementsAre(0, 1, 2, 3, 0, 1, 2));
  EXPECT_THAT(row(b.doc_start_T, 0), ::testing::ElementsAre(0, 0, 0, 0, 4, 4, 4));
  // Filled up with itself, as a document of its own, without weight.
  EXPECT_THAT(row(b.token_T, 1), ::testing::ElementsAre(1, 2, 3, 4, 1, 2, 3));
  EXPECT_THAT(weights(1), ::testing::ElementsAre(0, 1, 1, 0, 0, 0, 0));
  EXPECT_THAT(row(b.doc_start_T, 1), ::testing::ElementsAre(0, 0, 0, 0, 4, 4, 4));
  loader.fill_pass(engine.batch(), 0, 2, 2);
  EXPECT_THAT(row(b.token_T, 0), ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(weights(0), ::testing::ElementsAre(1, 1, 1, 1, 1, 1, 1));
  EXPECT_THAT(row(b.token_T, 1), ::testing::ElementsAre(8, 9, 8, 9, 8, 9, 8));
  EXPECT_THAT(weights(1), ::testing::ElementsAre(1, 0, 0, 0, 0, 0, 0));
}

TEST(LoaderOfPrompts, LossScaleIsOneOverTheTargetsOfTheGlobalBatch) {
  const TestDir dir;
  const RunSpec run = prompt_run();
  Engine engine(training_engine_spec(run));
  Loader loader({{write_prompts(dir)}}, run, /*shuffle=*/true);
  loader.begin_step(1);
  double targets = 0;
  for (int64_t m = 0; m < 2; ++m) {
    loader.fill(engine.batch(m), m);
    for (int64_t t = 0; t < 14; ++t) targets += engine.batch(m).weight_T.ptr<float>()[t];
  }
  EXPECT_EQ(targets, 4 + 2 + 7 + 1) << "an epoch is four sequences";
  EXPECT_DOUBLE_EQ(engine.batch().scalars.loss_scale[0], 1 / targets);
}

// The scale of a depth counts the completions' tokens that are that far after a token
// of their document.
TEST(LoaderOfPrompts, EachDepthHasAScaleOfItsOwn) {
  const TestDir dir;
  RunSpec run = mtp_run();
  run.data.separate_documents = true;
  Engine engine(training_engine_spec(run));
  Loader loader({{write_prompts(dir)}}, run, /*shuffle=*/true);
  loader.begin_step(1);
  std::vector<double> weights(4);
  for (int64_t m = 0; m < 2; ++m) {
    loader.fill(engine.batch(m), m);
    for (int64_t k = 0; k < 4; ++k) {
      for (int64_t t = 0; t < 14; ++t) weights[k] += engine.batch(m).targets(k).weight_T.ptr<float>()[t];
    }
  }
  // Three documents of which tokens 2 and 3 are targets; one of eight tokens and one of two, all
  // of them targets.
  EXPECT_EQ(weights, (std::vector<double>{3 * 2 + 7 + 1, 3 * 2 + 6, 3 * 1 + 5, 4}));
  for (int64_t k = 0; k < 4; ++k) EXPECT_DOUBLE_EQ(engine.batch().scalars.loss_scale[k], 1 / weights[k]) << k;
}

TEST(LoaderOfPrompts, NeedsSeparateDocuments) {
  const TestDir dir;
  RunSpec run = prompt_run();
  run.data.separate_documents = false;
  expect_error(ErrorKind::usage, "data.separate_documents: expected true for " + dir.path("prompts"),
               [&] { Loader({{write_prompts(dir)}}, run, true); });
}

}  // namespace
}  // namespace moebius
