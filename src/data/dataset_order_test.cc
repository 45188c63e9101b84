#include "data/dataset_order.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "data/permutation.h"
#include "io/testing.h"

namespace moebius {
namespace {

// Writes a dataset of `tokens` ids that count up from `first`. A document ends
// every `document` tokens.
TokenDataset counting(const TestDir& dir, const std::string& name, int64_t tokens, int32_t first = 0,
                      int64_t document = 5) {
  TokenDatasetWriter writer(dir.path(name), TokenType::i32);
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t id = first + static_cast<int32_t>(i);
    writer.add_tokens({&id, 1});
    if ((i + 1) % document == 0 || i + 1 == tokens) writer.end_document();
  }
  writer.close();
  return TokenDataset::open(dir.path(name));
}

DatasetOrder order_of(std::vector<WeightedDataset> datasets, DatasetOrder::Options options) {
  return DatasetOrder(std::move(datasets), options);
}

std::vector<WeightedDataset> one(TokenDataset data) {
  std::vector<WeightedDataset> datasets;
  datasets.push_back({std::move(data), 1});
  return datasets;
}

std::vector<WeightedDataset> two(const TestDir& dir, double w0, double w1) {
  std::vector<WeightedDataset> datasets = one(counting(dir, "a", 101));
  datasets[0].weight = w0;
  datasets.push_back({counting(dir, "b", 71, 1000), w1});
  return datasets;
}

Rng keyed(uint64_t seed) { return Rng(seed, RngSite::data_order); }

TEST(Permutation, IsABijectionForEverySizeAndDependsOnTheKey) {
  for (const int64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) seen.insert(permuted(i, size, keyed(42)));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
    EXPECT_EQ(*seen.rbegin(), size - 1);
  }
  int same = 0;
  for (int64_t i = 0; i < 1000; ++i) same += permuted(i, 1000, keyed(1)) == permuted(i, 1000, keyed(2));
  EXPECT_LT(same, 10);  // one expected
}

TEST(Permutation, LooksRandom) {
  // The mean of |place - index| over a random permutation is n/3, with a standard deviation of
  // about n/sqrt(45 n) * 1.3.
  const int64_t n = 10000;
  double distance = 0;
  int adjacent = 0;
  for (int64_t i = 0; i < n; ++i) {
    distance += std::abs(permuted(i, n, keyed(7)) - i);
    adjacent += i > 0 && std::abs(permuted(i, n, keyed(7)) - permuted(i - 1, n, keyed(7))) == 1;
  }
  EXPECT_NEAR(distance / n, n / 3.0, n * 0.01);
  EXPECT_LT(adjacent, 12);  // two expected
}

TEST(Permutation, HugeSizes) {
  const int64_t size = (int64_t{1} << 61) + 12345;
  for (int64_t i = 0; i < 50; ++i) {
    const int64_t place = permuted(i, size, keyed(3));
    EXPECT_GE(place, 0);
    EXPECT_LT(place, size);
  }
}

TEST(Blend, FollowsTheGreedyRule) {
  const std::vector<double> w{0.5, 0.3, 0.2};
  std::vector<double> count(3, 0);
  Blend blend({5, 3, 2});
  for (int i = 0; i < 200; ++i) {
    int best = 0;
    for (int j = 1; j < 3; ++j) {
      // The margin is for ties, which are exact in integers but rounded here.
      if (w[j] * std::max(i, 1) - count[j] > w[best] * std::max(i, 1) - count[best] + 1e-6) best = j;
    }
    const Blend::Pick pick = blend.at(i);
    ASSERT_EQ(pick.dataset, best) << i;
    ASSERT_EQ(pick.ordinal, count[best]) << i;
    ++count[best];
  }
}

TEST(Blend, TiesGoToTheLowest) {
  Blend blend({1, 1, 1});
  for (int i = 0; i < 12; ++i) EXPECT_EQ(blend.at(i).dataset, i % 3);
}

TEST(Blend, CountsStayNearTheirShares) {
  const std::vector<double> w{0.61, 0.003, 0.087, 0.3};
  Blend blend(w);
  std::vector<int64_t> count(4, 0);
  for (int64_t i = 0; i < 20000; ++i) {
    ++count[blend.at(i).dataset];
    for (int j = 0; j < 4; ++j) ASSERT_NEAR(count[j], w[j] * (i + 1), 4) << i;
  }
}

TEST(Blend, FastForwardAndBackAreExact) {
  Blend walked({0.7, 0.2, 0.1});
  std::vector<Blend::Pick> picks;
  for (int i = 0; i < 500; ++i) picks.push_back(walked.at(i));
  Blend jumped({0.7, 0.2, 0.1});
  for (const int i : {499, 3, 250, 250, 0, 1}) {
    const Blend::Pick pick = jumped.at(i);
    EXPECT_EQ(pick.dataset, picks[i].dataset);
    EXPECT_EQ(pick.ordinal, picks[i].ordinal);
  }
}

// The picks equal those of the rule itself, also after several of the steps that at()
// may start from.
TEST(Blend, StartsFromAnyMultipleOfTheSum) {
  const std::vector<int64_t> w{3, 7, 1};
  std::vector<int64_t> count(3, 0);
  for (int64_t i = 0; i < 60; ++i) {
    int best = 0;
    const auto deficit = [&](int j) { return w[j] * std::max<int64_t>(i, 1) - 11 * count[j]; };
    for (int j = 1; j < 3; ++j) best = deficit(j) > deficit(best) ? j : best;
    const Blend::Pick pick = Blend({0.3, 0.7, 0.1}).at(i);
    ASSERT_EQ(pick.dataset, best) << i;
    ASSERT_EQ(pick.ordinal, count[best]) << i;
    ++count[best];
  }
}

// A walk from step 0 would take days.
TEST(Blend, ADistantSampleIsFoundWithoutStepping) {
  Blend blend({0.25, 0.75});
  const int64_t far = int64_t{1} << 50;
  EXPECT_EQ(blend.at(far).dataset, 0);
  EXPECT_EQ(blend.at(far).ordinal, far / 4);
  EXPECT_EQ(blend.at(far + 1).dataset, 1);
  EXPECT_EQ(blend.at(far - 1).dataset, 1);
}

TEST(Blend, RefusesInvalidWeights) {
  expect_error(ErrorKind::usage, "expected at least one dataset", [] { Blend({}); });
  expect_error(ErrorKind::usage, "finite weights > 0; got 0", [] { Blend({1, 0}); });
  expect_error(ErrorKind::usage, "got -1", [] { Blend({-1}); });
  expect_error(ErrorKind::usage, "got nan", [] { Blend({std::nan("")}); });
  const double huge = std::numeric_limits<double>::max();
  expect_error(ErrorKind::usage, "finite sum; got inf", [=] { Blend({huge, huge}); });
}

TEST(DatasetOrder, EveryEpochVisitsEverySampleInAnotherOrder) {
  const TestDir dir;
  DatasetOrder order = order_of(one(counting(dir, "a", 102)), {.seq_len = 7, .vocab_size = 200, .seed = 3});
  const int64_t n = order.samples_per_epoch(0);
  EXPECT_EQ(n, 14);  // 14 * 7 + 1 <= 102
  std::vector<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> seen;
    orders.emplace_back();
    for (int64_t i = 0; i < n; ++i) {
      const Sample s = order.sample(epoch * n + i);
      EXPECT_EQ(s.epoch, epoch);
      EXPECT_EQ(s.token_begin % 7, 0);
      seen.insert(s.token_begin);
      orders.back().push_back(s.token_begin);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
    EXPECT_EQ(*seen.rbegin(), (n - 1) * 7);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
}

TEST(DatasetOrder, NeighboursShareATokenAndTheLastTokenCanBeReached) {
  const TestDir dir;
  // 15 = 2 * 7 + 1 tokens are exactly two samples.
  DatasetOrder order = order_of(one(counting(dir, "a", 15)), {.seq_len = 7, .vocab_size = 15, .shuffle = false});
  EXPECT_EQ(order.samples_per_epoch(0), 2);
  std::vector<int32_t> a(8), b(8);
  order.fill(0, a.data());
  order.fill(1, b.data());
  EXPECT_THAT(a, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(b, testing::ElementsAre(7, 8, 9, 10, 11, 12, 13, 14));
}

TEST(DatasetOrder, DependsOnlyOnSeedAndIndex) {
  const TestDir dir;
  const DatasetOrder::Options options{.seq_len = 4, .vocab_size = 2000, .seed = 11};
  DatasetOrder walked = order_of(two(dir, 0.8, 0.2), options);
  std::vector<std::vector<int32_t>> samples(300, std::vector<int32_t>(5));
  for (int i = 0; i < 300; ++i) walked.fill(i, samples[i].data());
  DatasetOrder resumed = order_of(two(dir, 0.8, 0.2), options);
  std::vector<int32_t> tokens(5);
  for (const int i : {150, 151, 299, 7}) {
    resumed.fill(i, tokens.data());
    EXPECT_EQ(tokens, samples[i]);
  }
  DatasetOrder other = order_of(two(dir, 0.8, 0.2), {.seq_len = 4, .vocab_size = 2000, .seed = 12});
  int same = 0;
  for (int i = 0; i < 300; ++i) {
    other.fill(i, tokens.data());
    same += tokens == samples[i];
  }
  EXPECT_LT(same, 60);  // about 300 / 20 expected by chance
}

TEST(DatasetOrder, BlendsInProportion) {
  const TestDir dir;
  DatasetOrder order = order_of(two(dir, 3, 1), {.seq_len = 4, .vocab_size = 2000});
  int64_t from_b = 0;
  std::vector<int32_t> tokens(5);
  for (int i = 0; i < 400; ++i) {
    const Sample s = order.fill(i, tokens.data());
    EXPECT_EQ(s.dataset == 1, tokens[0] >= 1000);
    from_b += s.dataset;
  }
  EXPECT_NEAR(from_b, 100, 1);
}

TEST(DatasetOrder, ADatasetCanBeReadFromItsFrontWhateverTheBlend) {
  const TestDir dir;
  const DatasetOrder order = order_of(two(dir, 0.9, 0.1), {.seq_len = 10, .vocab_size = 2000, .seed = 5});
  std::vector<int32_t> tokens(11);
  for (int64_t i = 0; i < order.samples_per_epoch(1); ++i) {
    const Sample sample = order.sample_in_order(1, i);
    EXPECT_EQ(sample.dataset, 1);
    order.fill(sample, tokens.data());
    EXPECT_EQ(tokens.front(), 1000 + 10 * i);
    EXPECT_EQ(tokens.back(), 1000 + 10 * i + 10);
  }
}

TEST(DatasetOrder, DocumentStartsInsideASample) {
  const TestDir dir;
  TokenDatasetWriter writer(dir.path("a"), TokenType::u16);
  const std::vector<int32_t> ids{1, 2, 3, 4};
  for (const int length : {4, 2, 0, 0, 3, 4}) {  // begins 0 4 6 6 6 9, end 13
    writer.add_tokens(std::span(ids).first(length));
    writer.end_document();
  }
  writer.close();
  DatasetOrder order =
      order_of(one(TokenDataset::open(dir.path("a"))), {.seq_len = 6, .vocab_size = 9, .shuffle = false});
  EXPECT_THAT(order.document_starts(order.sample(0)), testing::ElementsAre(4, 6));  // tokens 0..6
  EXPECT_THAT(order.document_starts(order.sample(1)), testing::ElementsAre(3));     // tokens 6..12; 13 is the end
}

TEST(DatasetOrder, RefusesWhatItCannotServe) {
  const TestDir dir;
  expect_error(ErrorKind::usage, "expected more than seq_len = 15 tokens in",
               [&] { order_of(one(counting(dir, "a", 15)), {.seq_len = 15, .vocab_size = 9}); });
  expect_error(ErrorKind::usage, "expected seq_len > 0; got 0",
               [&] { order_of(one(counting(dir, "a", 15)), {.vocab_size = 9}); });
  expect_error(ErrorKind::usage, "expected vocab_size > 0; got 0",
               [&] { order_of(one(counting(dir, "a", 15)), {.seq_len = 1}); });
  DatasetOrder order = order_of(one(counting(dir, "a", 15)), {.seq_len = 7, .vocab_size = 14, .shuffle = false});
  std::vector<int32_t> tokens(8);
  order.fill(0, tokens.data());
  expect_error(ErrorKind::input, "expected ids in [0, 14), the model's vocabulary; got 14 at token 14",
               [&] { order.fill(1, tokens.data()); });
}

}  // namespace
}  // namespace moebius
