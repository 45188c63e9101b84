#include "checkpoint/tensor_slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Dims = std::vector<int64_t>;

TensorSlice slice(Dims shape, Shard shard, int64_t begin, int64_t end) {
  return {.shape = std::move(shape), .shard = shard, .begin = begin, .end = end};
}

// Defines the order of elements: returns the global element of each position, by loops over indices.
Dims elements_of(const TensorSlice& s) {
  Dims all;
  const int64_t numel = numel_of(s.shape);
  for (int64_t e = 0; e < numel; ++e) {
    int64_t rest = e, index = 0;
    for (int dim = static_cast<int>(s.shape.size()) - 1; dim >= 0; --dim) {
      if (dim == s.shard.dim) index = rest % s.shape[dim];
      rest /= s.shape[dim];
    }
    const bool inside = s.shard.dim < 0 || (index >= s.shard.begin && index < s.shard.begin + s.shard.count);
    if (inside) all.push_back(e);
  }
  return {all.begin() + s.begin, all.begin() + s.end};
}

TEST(TensorSlice, NamesAreIndexExpressionsOfNumpy) {
  EXPECT_EQ(slice_name("w", whole_slice({3, 4})), "w");
  EXPECT_EQ(slice_name("w", slice({4, 6}, {0, 0, 4}, 0, 24)), "w");
  EXPECT_EQ(slice_name("w", slice({4, 6}, {0, 2, 2}, 0, 12)), "w[2:4]");
  EXPECT_EQ(slice_name("w", slice({4, 6}, {1, 3, 3}, 0, 12)), "w[:, 3:6]");
  EXPECT_EQ(slice_name("w", slice({4, 6}, {1, 3, 3}, 5, 9)), "w[:, 3:6].flat[5:9]");
  EXPECT_EQ(slice_name("w", slice({4, 6}, {}, 5, 9)), "w.flat[5:9]");
}

TEST(TensorSlice, OnlySlicesInsideTheTensorAreLegal) {
  EXPECT_TRUE(is_legal(whole_slice({})));
  EXPECT_TRUE(is_legal(whole_slice({0, 7})));
  EXPECT_FALSE(is_legal(slice({-1}, {}, 0, 0)));
  EXPECT_FALSE(is_legal(slice({int64_t{1} << 40, int64_t{1} << 40}, {}, 0, 0)));
  EXPECT_FALSE(is_legal(slice({4}, {1, 0, 1}, 0, 1)));
  EXPECT_FALSE(is_legal(slice({4}, {0, 3, 2}, 0, 2)));
  EXPECT_FALSE(is_legal(slice({4}, {0, -1, 2}, 0, 2)));
  EXPECT_FALSE(is_legal(slice({4}, {0, INT64_MAX, 2}, 0, 2)));
  EXPECT_FALSE(is_legal(slice({4}, {0, 1, 2}, 0, 3)));
  EXPECT_FALSE(is_legal(slice({4}, {}, 3, 2)));
}

TEST(TensorSlice, CommonRunsAreAsLongAsPossible) {
  const TensorSlice all = whole_slice({4, 6}), right = slice({4, 6}, {1, 3, 3}, 0, 12);
  EXPECT_THAT(common_runs(all, all), ElementsAre(CommonRun{0, 0, 24}));
  EXPECT_THAT(common_runs(right, right), ElementsAre(CommonRun{0, 0, 12}));
  EXPECT_THAT(common_runs(all, right),
              ElementsAre(CommonRun{3, 0, 3}, CommonRun{9, 3, 3}, CommonRun{15, 6, 3}, CommonRun{21, 9, 3}));
  EXPECT_THAT(common_runs(slice({4, 6}, {1, 0, 3}, 0, 12), right), ElementsAre());
  EXPECT_THAT(common_runs(slice({4, 6}, {}, 5, 10), right), ElementsAre(CommonRun{0, 2, 1}, CommonRun{4, 3, 1}));
  EXPECT_THAT(common_runs(whole_slice({}), whole_slice({})), ElementsAre(CommonRun{0, 0, 1}));
  EXPECT_THAT(common_runs(whole_slice({0, 3}), whole_slice({0, 3})), ElementsAre());
}

Dims random_shape(std::mt19937& random) {
  Dims shape(1 + random() % 3);
  for (int64_t& dim : shape) dim = 1 + static_cast<int64_t>(random() % 7);
  return shape;
}

// Returns the slices of one tensor on a random layout: equal blocks of a dimension, each cut into ranges
// of any length.
std::vector<TensorSlice> random_layout(std::mt19937& random, const Dims& shape) {
  std::vector<Shard> blocks{{}};
  if (random() % 3 != 0) {
    const int dim = static_cast<int>(random() % shape.size());
    int64_t n = 1 + static_cast<int64_t>(random() % shape[dim]);
    while (shape[dim] % n != 0) --n;
    blocks.clear();
    for (int64_t r = 0; r < n; ++r) blocks.push_back({dim, r * (shape[dim] / n), shape[dim] / n});
  }
  std::vector<TensorSlice> slices;
  for (const Shard& block : blocks) {
    TensorSlice s = slice(shape, block, 0, 0);
    const int64_t numel = block_numel(s);
    while (s.end < numel) {
      s.begin = s.end;
      s.end = std::min<int64_t>(numel, s.begin + 1 + static_cast<int64_t>(random() % (2 * numel)));
      slices.push_back(s);
    }
  }
  std::shuffle(slices.begin(), slices.end(), random);
  return slices;
}

// From one random layout to another: each element arrives once, where it belongs.
TEST(TensorSlice, AnyLayoutCoversTheSlicesOfAnyOther) {
  std::mt19937 random(3);
  for (int round = 0; round < 400; ++round) {
    const Dims shape = random_shape(random);
    const std::vector<TensorSlice> from = random_layout(random, shape), to = random_layout(random, shape);
    ASSERT_EQ(partition_problem(from), "") << round;
    for (const TensorSlice& b : to) {
      ASSERT_TRUE(is_legal(b));
      Dims got(b.numel(), -1);
      for (const TensorSlice& a : from) {
        const Dims held = elements_of(a);
        for (const CommonRun& run : common_runs(a, b)) {
          for (int64_t i = 0; i < run.count; ++i) {
            ASSERT_EQ(got[run.in_b + i], -1) << "twice, round " << round;
            got[run.in_b + i] = held[run.in_a + i];
          }
        }
      }
      ASSERT_EQ(got, elements_of(b)) << slice_name("", b) << " round " << round;
    }
  }
}

TEST(TensorSlice, PartitionsWithGapsOrOverlapsAreFound) {
  std::mt19937 random(4);
  for (int round = 0; round < 400; ++round) {
    const Dims shape = random_shape(random);
    std::vector<TensorSlice> slices = random_layout(random, shape);
    std::vector<TensorSlice> twice = slices;
    twice.push_back(slices[0]);
    EXPECT_NE(partition_problem(twice), "") << round;
    std::vector<TensorSlice> shorter = slices;
    --shorter[0].end;
    EXPECT_NE(partition_problem(shorter), "") << round;
    slices.pop_back();
    EXPECT_NE(partition_problem(slices), "") << round;
  }
  EXPECT_EQ(partition_problem({}), "nothing holds it");
  EXPECT_EQ(partition_problem({whole_slice({0, 2})}), "");
  EXPECT_THAT(partition_problem({slice({4}, {0, 0, 2}, 0, 2), slice({4}, {}, 2, 4)}),
              HasSubstr("do not tile the block of it.flat[2:4]"));
}

}  // namespace
}  // namespace moebius
