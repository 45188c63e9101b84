// Collectives of groups of more than 8 ranks, which go in levels (comm/collective_levels.h), over threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "comm/collective_levels.h"
#include "comm/control.h"
#include "comm/group_cost.h"
#include "comm/message_group.h"
#include "comm/transport/counting_testing.h"
#include "comm/transport/threads.h"

namespace moebius {
namespace {

// --- levels ---------------------------------------------------------------------------------------------------------

std::vector<int> radices(int size, int node = CollectiveLevels::kMaxRadix) {
  const CollectiveLevels levels(size, node);
  std::vector<int> radices;
  for (int l = 0; l < levels.count(); ++l) radices.push_back(levels.radix(l));
  return radices;
}

TEST(CollectiveLevels, HaveTheLargestDivisorsAsRadices) {
  EXPECT_EQ(radices(1), std::vector<int>({1}));
  EXPECT_EQ(radices(8), std::vector<int>({8}));
  EXPECT_EQ(radices(12), std::vector<int>({6, 2}));
  EXPECT_EQ(radices(16), std::vector<int>({8, 2}));
  EXPECT_EQ(radices(256), std::vector<int>({8, 8, 4}));
  EXPECT_EQ(radices(1024), std::vector<int>({8, 8, 8, 2}));
  EXPECT_EQ(radices(11), std::vector<int>({11}));
  EXPECT_EQ(radices(22), std::vector<int>({2, 11}));
  EXPECT_EQ(CollectiveLevels(1024).messages(), 7 + 7 + 7 + 1);
}

TEST(CollectiveLevels, BeginWithTheRanksOfANode) {
  EXPECT_EQ(radices(4, 2), std::vector<int>({2, 2}));
  EXPECT_EQ(radices(8, 4), std::vector<int>({4, 2}));
  EXPECT_EQ(radices(64, 4), std::vector<int>({4, 8, 2}));
  // Groups that have no whole nodes, or one, go in levels as without nodes.
  EXPECT_EQ(radices(6, 4), std::vector<int>({6}));
  EXPECT_EQ(radices(4, 4), std::vector<int>({4}));
  EXPECT_EQ(radices(4, 1), std::vector<int>({4}));
}

TEST(CollectiveLevels, PlacesAreAPermutationWithContiguousBlocks) {
  for (const int size : {1, 5, 12, 24, 96, 250}) {
    const CollectiveLevels levels(size);
    std::vector<int> ranks(static_cast<size_t>(size), -1);
    for (int r = 0; r < size; ++r) ranks[levels.place(r)] = r;
    for (int place = 0; place < size; ++place) {
      ASSERT_GE(ranks[place], 0) << size;
      // A rank sends to one other at level 0 the slices of the ranks with that rank's last digit.
      EXPECT_EQ(levels.digit(ranks[place], 0), place / levels.width(0)) << size;
    }
  }
}

TEST(CollectiveLevels, MembersDifferInOneDigit) {
  const CollectiveLevels levels(24);  // 8, 3
  EXPECT_EQ(levels.members(13, 0), std::vector<int>({8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(levels.members(13, 1), std::vector<int>({5, 13, 21}));
}

// --- collectives ----------------------------------------------------------------------------------------------------

// Magnitudes differ so much that the order of a sum shows.
float value(int rank, int64_t i) {
  std::mt19937_64 random(1000003ULL * static_cast<uint64_t>(rank) + static_cast<uint64_t>(i));
  const int exponent = static_cast<int>(random() % 40) - 20;
  return std::ldexp(static_cast<float>(random() % 4001) - 2000, exponent);
}

// Defines the result: returns the sum over the digits of level `level` and below, each in its order, in f32.
float sum_over(const CollectiveLevels& levels, const std::vector<float>& values, int level, int first, int stride) {
  if (level < 0) return values[first];
  const int below = stride / levels.radix(level);
  float sum = 0;
  for (int d = 0; d < levels.radix(level); ++d) {
    const float part = sum_over(levels, values, level - 1, first + d * below, below);
    sum = d == 0 ? part : sum + part;
  }
  return sum;
}

float wanted_sum(int size, int64_t i, bool of_bf16, int node = CollectiveLevels::kMaxRadix) {
  const CollectiveLevels levels(size, node);
  std::vector<float> values;
  for (int r = 0; r < size; ++r) values.push_back(of_bf16 ? to_f32(to_bf16(value(r, i))) : value(r, i));
  return sum_over(levels, values, levels.count() - 1, 0, size);
}

struct Rank {
  explicit Rank(Transport& world) : transport(world) {
    std::vector<int> all(static_cast<size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    group = std::make_unique<MessageGroup>(transport, MessageGroupSpec{.name = "dp", .ranks = all});
  }
  testing::CountingTransport transport;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  std::unique_ptr<MessageGroup> group;
};

class LargeGroup : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  void run(const std::function<void(Rank&)>& body) const {
    run_threads(size(), {.timeout_s = 120}, [&](Transport& world) {
      Rank rank(world);
      body(rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, LargeGroup, ::testing::Values(9, 11, 12, 16, 40), ::testing::PrintToStringParamName());

TEST_P(LargeGroup, AddsInTheOrderOfTheLevels) {
  run([&](Rank& rank) {
    const int64_t n = 83, me = rank.group->rank();
    std::vector<float> x(static_cast<size_t>(n));
    std::vector<bf16> y(x.size());
    for (int64_t i = 0; i < n; ++i) x[i] = value(static_cast<int>(me), i), y[i] = to_bf16(x[i]);
    rank.group->all_reduce_sum(rank.s, tensor_of(x.data(), {n}));
    rank.group->all_reduce_sum(rank.s, tensor_of(y.data(), {n}));
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(x[i], wanted_sum(size(), i, false)) << i;
      ASSERT_EQ(to_f32(y[i]), to_f32(to_bf16(wanted_sum(size(), i, true)))) << i;
    }
  });
}

// A small group of several nodes adds the ranks of each node first.
TEST(GroupOfNodes, AddsEachNodeFirst) {
  for (const int node : {2, 3}) {
    run_threads(6, {.timeout_s = 60}, [&](Transport& world) {
      const auto group = world.make_group("ep", {0, 1, 2, 3, 4, 5}, node);
      ThreadPool pool(1);
      Stream s(DeviceKind::cpu, pool);
      const int64_t rows = 31, n = 6 * rows, begin = world.rank() * rows;
      std::vector<float> x(static_cast<size_t>(n)), out(static_cast<size_t>(rows));
      std::vector<bf16> y(x.size()), low(out.size());
      for (int64_t i = 0; i < n; ++i) x[i] = value(world.rank(), i), y[i] = to_bf16(x[i]);
      group->reduce_scatter_sum(s, tensor_of(out.data(), {rows}), tensor_of(x.data(), {n}));
      const int64_t before = group->sent_bytes();
      group->reduce_scatter_sum(s, tensor_of(low.data(), {rows}), tensor_of(y.data(), {n}));
      EXPECT_EQ(static_cast<double>(group->sent_bytes() - before),
                reduce_scatter_cost(static_cast<double>(2 * n), 6, DType::bf16, node).wire_bytes);
      for (int64_t i = 0; i < rows; ++i) {
        ASSERT_EQ(out[i], wanted_sum(6, begin + i, false, node)) << i;
        ASSERT_EQ(to_f32(low[i]), to_f32(to_bf16(wanted_sum(6, begin + i, true, node)))) << i;
      }
    });
  }
}

TEST_P(LargeGroup, ReduceScatterInPlaceAndNotIsThisRanksRowsOfTheSum) {
  run([&](Rank& rank) {
    const int64_t rows = 3, me = rank.group->rank();
    std::vector<float> in(static_cast<size_t>(rows * size()));
    std::vector<bf16> low(in.size()), low_out(static_cast<size_t>(rows));
    for (int64_t i = 0; i < std::ssize(in); ++i) in[i] = value(static_cast<int>(me), i), low[i] = to_bf16(in[i]);
    std::vector<float> out(static_cast<size_t>(rows)), begun(out.size()), arrived(in.size());
    const Tensor whole = tensor_of(in.data(), {rows * size()});
    rank.group->reduce_scatter_sum(rank.s, tensor_of(out.data(), {rows}), whole);
    rank.group->reduce_scatter_sum(rank.s, tensor_of(low_out.data(), {rows}), tensor_of(low.data(), {rows * size()}));
    Pending pending = rank.group->start_reduce_scatter_sum(rank.s, tensor_of(begun.data(), {rows}), whole,
                                                           tensor_of(arrived.data(), {rows * size()}));
    pending.wait();
    rank.group->reduce_scatter_sum(rank.s, whole.rows(rows * me, rows * (me + 1)), whole);
    for (int64_t i = 0; i < rows; ++i) {
      const float want = wanted_sum(size(), rows * me + i, false);
      EXPECT_EQ(out[i], want);
      EXPECT_EQ(begun[i], want);
      EXPECT_EQ(in[rows * me + i], want);
      EXPECT_EQ(to_f32(low_out[i]), to_f32(to_bf16(wanted_sum(size(), rows * me + i, true))));
    }
  });
}

TEST_P(LargeGroup, GathersInTheOrderOfTheRanks) {
  run([&](Rank& rank) {
    const int64_t rows = 5, me = rank.group->rank();
    std::vector<float> in(static_cast<size_t>(rows)), out(static_cast<size_t>(rows * size())), begun(out.size());
    for (int64_t i = 0; i < rows; ++i) in[i] = value(static_cast<int>(me), i);
    std::copy(in.begin(), in.end(), begun.begin() + rows * me);
    const Tensor place = tensor_of(begun.data(), {rows * size()});
    rank.group->all_gather(rank.s, tensor_of(out.data(), {rows * size()}), tensor_of(in.data(), {rows}));
    rank.group->start_all_gather(rank.s, place, place.rows(rows * me, rows * (me + 1))).wait();
    for (int r = 0; r < size(); ++r) {
      for (int64_t i = 0; i < rows; ++i) {
        ASSERT_EQ(out[r * rows + i], value(r, i));
        ASSERT_EQ(begun[r * rows + i], value(r, i));
      }
    }
  });
}

TEST_P(LargeGroup, BroadcastsFromEveryRoot) {
  run([&](Rank& rank) {
    for (int root = 0; root < size(); ++root) {
      int64_t x = rank.group->rank() == root ? 100 + root : -1;
      rank.group->broadcast(rank.s, tensor_of(&x, {1}), root);
      ASSERT_EQ(x, 100 + root);
    }
  });
}

TEST_P(LargeGroup, ABarrierWaitsForEveryRank) {
  std::atomic<int> entered = 0;
  run([&](Rank& rank) {
    for (int round = 1; round <= 3; ++round) {
      ++entered;
      rank.group->barrier();
      ASSERT_GE(entered.load(), round * size());
    }
  });
}

// A sum of several pieces: what arrives at once is bounded, whatever the size of the group.
TEST(LargeGroups, SumManyPieces) {
  run_threads(12, {.timeout_s = 120}, [&](Transport& world) {
    Rank rank(world);
    const int64_t n = Group::kSumPiece * 9 + 5;
    std::vector<int64_t> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[i] = i * (rank.group->rank() + 1);
    rank.group->all_reduce_sum(rank.s, tensor_of(x.data(), {n}));
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], i * 78);
  });
}

// --- messages, bytes and time ---------------------------------------------------------------------------------------

// 256 ranks: each sends the messages and bytes of the formulas, some dozens instead of 255.
TEST(LargeGroups, OfManyRanksSendTheMessagesOfTheFormulas) {
  constexpr int kRanks = 256;
  run_threads(kRanks, {.timeout_s = 300}, [&](Transport& world) {
    Rank rank(world);
    const int64_t part = 12;
    std::vector<float> a(part * kRanks), b(a.size());
    std::vector<bf16> c(a.size());
    const Tensor whole = tensor_of(a.data(), {part * kRanks}), own = tensor_of(b.data(), {part});
    const auto expect = [&](const GroupCost& cost, const std::function<void()>& call) {
      const int64_t messages = rank.transport.sent, bytes = rank.group->sent_bytes();
      call();
      EXPECT_EQ(rank.transport.sent - messages, cost.messages);
      EXPECT_EQ(static_cast<double>(rank.group->sent_bytes() - bytes), cost.wire_bytes);
    };
    const double bytes = static_cast<double>(whole.num_bytes());
    expect(all_gather_cost(bytes, kRanks), [&] { rank.group->all_gather(rank.s, whole, own); });
    expect(reduce_scatter_cost(bytes, kRanks), [&] { rank.group->reduce_scatter_sum(rank.s, own, whole); });
    expect(all_reduce_cost(bytes, kRanks), [&] { rank.group->all_reduce_sum(rank.s, whole); });
    expect(all_reduce_cost(bytes / 2, kRanks, DType::bf16),
           [&] { rank.group->all_reduce_sum(rank.s, tensor_of(c.data(), {part * kRanks})); });
    expect({.messages = 7 + 7 + 3}, [&] { rank.group->barrier(); });
  });
}

// Agreeing takes one call of the group, if the texts are short.
TEST(LargeGroups, AgreeInOneExchange) {
  run_threads(16, {.timeout_s = 60}, [&](Transport& world) {
    testing::CountingTransport transport(world);
    Control control(transport);
    const auto sent_by = [&](const std::function<void()>& call) {
      const int64_t before = transport.sent;
      call();
      return transport.sent - before;
    };
    EXPECT_EQ(sent_by([&] { control.together([] {}); }), 7 + 1);
    EXPECT_EQ(sent_by([&] { EXPECT_EQ(control.max(control.rank()), 15); }), 7 + 1);
    const std::string text(300, static_cast<char>('a' + control.rank()));
    std::vector<std::string> texts;
    EXPECT_EQ(sent_by([&] { texts = control.gather(text); }), 2 * (7 + 1));
    for (int r = 0; r < 16; ++r) EXPECT_EQ(texts[r], std::string(300, static_cast<char>('a' + r)));
    EXPECT_EQ(control.from_root(text), texts[0]);
    EXPECT_EQ(control.from_root("x" + std::to_string(control.rank())), "x0");
  });
}

}  // namespace
}  // namespace moebius
