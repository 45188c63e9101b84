// The schedule of collectives over levels, and sums in memory of a fixed size, with an exchange of threads that share
// memory instead of messages.
#include "comm/level_collectives.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>

#include "comm/group_cost.h"
#include "comm/rank_order_sum.h"
#include "comm/reduce_parts.h"

namespace moebius {
namespace {

TEST(LevelSteps, OfMembersAgreeAndEndAtTheOwnSlice) {
  for (const auto& [size, node] : {std::pair(1, 8), {8, 8}, {12, 8}, {24, 8}, {250, 8}, {8, 2}, {1024, 8}}) {
    const CollectiveLevels levels(size, node);
    for (int rank = 0; rank < size; ++rank) {
      ASSERT_EQ(levels.rank_at(levels.place(rank)), rank);
      int first = 0, width = size;
      for (const LevelStep& step : levels.steps(rank)) {
        // The slices of a step are those of this rank in the step before.
        ASSERT_EQ(step.first, first);
        ASSERT_EQ(step.radix() * step.width, width);
        ASSERT_EQ(step.members[step.digit], rank);
        for (const int member : step.members) ASSERT_EQ(levels.steps(member)[step.level].first, first);
        first = step.begin(step.digit), width = step.width;
      }
      ASSERT_EQ(first, levels.place(rank));
      ASSERT_EQ(width, 1);
    }
  }
}

TEST(LevelSteps, ExchangeInsideTheNodeAndThenBetweenNodes) {
  const CollectiveLevels levels(24);
  const std::vector<LevelStep> steps = levels.steps(13);
  EXPECT_EQ(steps[0].members, std::vector<int>({8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(steps[1].members, std::vector<int>({5, 13, 21}));
  // Member 5 of the node gets the sums for ranks 5, 13 and 21.
  EXPECT_EQ(steps[0].begin(5), 15);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(levels.rank_at(steps[0].begin(5) + i), 5 + 8 * i);
}

// --- sums in memory of a fixed size ---------------------------------------------------------------------------------

// Ranks are threads. An exchange shows the others what this rank sends, and copies what they show.
struct Ranks {
  explicit Ranks(const CollectiveLevels& levels) : levels(levels), barrier(levels.size()), shown(levels.size()) {}
  const CollectiveLevels& levels;
  std::barrier<> barrier;
  std::vector<std::vector<Spans>> shown;  // by rank
};

struct Sent {
  int64_t bytes = 0, messages = 0;
};

PartCalls calls_of(Ranks& ranks, int rank, Stream s, Sent& sent) {
  const auto exchange = [&ranks, &sent, rank](const LevelStep& step, const std::vector<Spans>& to,
                                              const std::vector<Spans>& from) {
    ranks.shown[rank] = to;
    ranks.barrier.arrive_and_wait();
    for (int d = 0; d < step.radix(); ++d) {
      if (d == step.digit) continue;
      const Spans& shown = ranks.shown[step.members[d]][step.digit];
      ASSERT_EQ(shown.size(), from[d].size());
      for (size_t i = 0; i < shown.size(); ++i) {
        ASSERT_EQ(shown[i].num_bytes, from[d][i].num_bytes);
        std::memcpy(from[d][i].data, shown[i].data, shown[i].num_bytes);
      }
      for (const Span& span : to[d]) sent.bytes += span.num_bytes, ++sent.messages;
    }
    ranks.barrier.arrive_and_wait();
  };
  const auto one_each = [](const Spans& spans) {
    std::vector<Spans> each;
    for (const Span& span : spans) each.push_back({span});
    return each;
  };
  const auto sum = [s](const Tensor& out, const RankParts& parts) mutable {
    std::vector<const void*> all;
    for (int r = 0; r < parts.count; ++r) all.push_back(parts.at(r));
    sum_in_rank_order(s, out, all, parts.dtype);
  };
  const auto exchange_spans = [=](const LevelStep& step, const Spans& to, const Spans& from) {
    exchange(step, one_each(to), one_each(from));
  };
  return {.levels = {.exchange = exchange_spans, .sum = sum}, .exchange = exchange, .copy = [](Span to, Span from) {
            std::memcpy(to.data, from.data, from.num_bytes);
          }};
}

// Magnitudes differ so much that the order of a sum shows.
float value(int rank, int64_t i) {
  uint64_t x = 0x9e3779b97f4a7c15ULL * (1 + static_cast<uint64_t>(rank) + 4096 * static_cast<uint64_t>(i));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 31;
  return std::ldexp(static_cast<float>(x % 4001) - 2000, static_cast<int>(x / 4001 % 40) - 20);
}

// Defines the result: sums of the values of r_0 neighbours, sums of r_1 of these sums, and so on.
float sum_over(const CollectiveLevels& levels, std::vector<float> values) {
  for (int l = 0; l < levels.count(); ++l) {
    std::vector<float> sums;
    for (size_t at = 0; at < values.size(); at += levels.radix(l)) {
      float sum = values[at];
      for (int d = 1; d < levels.radix(l); ++d) sum += values[at + d];
      sums.push_back(sum);
    }
    values = sums;
  }
  return values[0];
}

template <class T>
T of_float(float x) {
  if constexpr (std::is_same_v<T, bf16>)
    return to_bf16(x);
  else
    return x;
}

template <class T>
void check_rank(Ranks& ranks, int rank, int64_t own, int64_t memory_bytes) {
  constexpr int64_t kGuard = 64;
  const int size = ranks.levels.size();
  std::vector<T> in(static_cast<size_t>(own * size)), out(static_cast<size_t>(own));
  for (int64_t i = 0; i < std::ssize(in); ++i) in[i] = of_float<T>(value(rank, i));
  const std::vector<T> before = in;
  std::vector<uint8_t> memory(static_cast<size_t>(memory_bytes + 2 * kGuard), 0xa5);
  auto* const begin = reinterpret_cast<std::byte*>(memory.data()) + kGuard;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Sent sent;
  const DType dtype = dtype_of<T>;
  const Tensor whole = tensor_of(in.data(), {own * size});
  reduce_parts(calls_of(ranks, rank, s, sent), ranks.levels, rank, tensor_of(out.data(), {own}), whole,
               {.data = begin, .num_bytes = memory_bytes});
  for (int64_t i = 0; i < own; ++i) {
    std::vector<float> values;
    for (int r = 0; r < size; ++r) values.push_back(to_f32(of_float<T>(value(r, rank * own + i))));
    ASSERT_EQ(to_f32(out[i]), to_f32(of_float<T>(sum_over(ranks.levels, values)))) << i;
  }
  EXPECT_EQ(std::memcmp(in.data(), before.data(), in.size() * sizeof(T)), 0) << "the parts were overwritten";
  for (int64_t i = 0; i < kGuard; ++i) {
    ASSERT_EQ(memory[i], 0xa5);
    ASSERT_EQ(memory[kGuard + memory_bytes + i], 0xa5);
  }
  const double bytes = static_cast<double>(whole.num_bytes());
  EXPECT_EQ(static_cast<double>(sent.bytes), reduce_scatter_cost(bytes, size, dtype, ranks.levels.radix(0)).wire_bytes);
}

template <class T>
void check(int size, int node, int64_t own, int64_t memory_bytes) {
  const CollectiveLevels levels(size, node);
  Ranks ranks(levels);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back([&, r] { check_rank<T>(ranks, r, own, memory_bytes); });
  for (std::thread& thread : threads) thread.join();
}

struct GroupShape {
  int size, node = 8;
};

class ReduceParts : public ::testing::TestWithParam<GroupShape> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ReduceParts,
                         ::testing::Values(GroupShape{1}, GroupShape{8}, GroupShape{12}, GroupShape{16}, GroupShape{22},
                                           GroupShape{24}, GroupShape{32, 2}, GroupShape{4, 2}, GroupShape{6, 3}),
                         [](const auto& info) {
                           return std::to_string(info.param.size) + "_nodes_of_" + std::to_string(info.param.node);
                         });

// Memory of the size of the parts is enough: sums of f32 take one pass, and those of bf16 two.
TEST_P(ReduceParts, FitInMemoryOfTheirSize) {
  const auto [size, node] = GetParam();
  const CollectiveLevels levels(size, node);
  for (const int64_t own : {0, 1, 3, 37}) {
    check<float>(size, node, own, own * size * 4);
    EXPECT_EQ(elements_that_fit(levels, own, DType::f32, own * size * 4), own);
    // The address of the memory is not aligned for sums, which costs up to 15 bytes.
    if (own > 1) check<bf16>(size, node, own, own * size * 2 + 15);
  }
}

// Memory for a few elements is used again and again.
TEST_P(ReduceParts, AreSummedInPieces) {
  const auto [size, node] = GetParam();
  const CollectiveLevels levels(size, node);
  check<float>(size, node, 101, sum_bytes(levels, 32, DType::f32));
  check<bf16>(size, node, 101, sum_bytes(levels, 17, DType::bf16) + 15);
  check<bf16>(size, node, 5, sum_bytes(levels, 1, DType::bf16) + 15);
}

TEST(ElementsThatFit, AreNoneInMemoryThatIsTooSmall) {
  const CollectiveLevels levels(16);
  EXPECT_EQ(elements_that_fit(levels, 1, DType::bf16, 32), 0);  // parts of 32 bytes, and sums of 8
  EXPECT_EQ(elements_that_fit(levels, 1, DType::bf16, 40), 1);
  EXPECT_EQ(elements_that_fit(levels, 1000, DType::f32, 64 * 40), 32);
}

}  // namespace
}  // namespace moebius
