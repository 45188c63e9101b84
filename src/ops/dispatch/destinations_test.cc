// The ranks that tokens go to, and the places of the tokens there, against plain loops.
#include <algorithm>
#include <set>

#include "io/testing.h"
#include "ops/cpu/testing.h"
#include "ops/dispatch/dispatch.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t T = 5, P = 2, e = 2, K = 2;
  bool drops = false;
  int64_t E() const { return P * e; }
  int64_t J() const { return std::min(K, P); }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Case c : {Case{}, Case{.T = 0, .P = 3}, Case{.T = 1, .P = 1, .e = 3}, Case{.T = 129, .P = 2, .e = 32, .K = 8},
                 Case{.T = 300, .P = 64, .e = 1, .K = 5}, Case{.T = 257, .P = 65, .e = 2, .K = 9},
                 Case{.T = 140, .P = 200, .e = 3, .K = 34}, Case{.T = 520, .P = 8, .e = 16, .K = 8},
                 Case{.T = 16500, .P = 66, .e = 1, .K = 3}}) {  // blocks of a GPU go over several chunks
    for (const bool drops : {false, true}) {
      c.drops = drops;
      all.push_back(c);
    }
  }
  return all;
}

class DestinationsTest : public testing::DeviceTest<Case> {};

TEST_P(DestinationsTest, EqualTheDefinition) {
  const auto [T, P, e, K, drops] = c();
  const int64_t J = c().J(), E = c().E();
  const Rng rng(7, RngSite::bench);
  std::vector<int32_t> topk, kept;
  Values dest, slot, count(P);
  for (int64_t t = 0; t < T; ++t) {
    const auto first = static_cast<int64_t>(rng.below(t, E)), step = 1 + 2 * (t % 3);
    std::set<int64_t> ranks;
    for (int64_t k = 0; k < K; ++k) {
      topk.push_back(static_cast<int32_t>((first + k * step) % E));
      kept.push_back(drops && (t + k) % 3 == 1 ? -1 : 5);
      if (kept.back() >= 0) ranks.insert(topk.back() / e);
    }
    for (const int64_t p : ranks) {
      dest.push_back(static_cast<double>(p));
      slot.push_back(count[p]++);
    }
    dest.resize((t + 1) * J, -1);
    slot.resize((t + 1) * J, -1);
  }
  Array topk_TK = Array::of_ints({T, K}, topk), kept_TK = Array::of_ints({T, K}, kept);
  Array dest_TJ = Array::poisoned({T, J}, DType::i32), slot_TJ = Array::of_ints({T, J}, std::vector<int32_t>(T * J, 9));
  Array count_P = Array::poisoned({P}, DType::i32);
  Array scratch = Array::poisoned({Destinations::scratch_bytes(T, P, s_)}, DType::u8);
  destinations(s_, {.dest_TJ = dest_TJ.tensor(),
                    .slot_TJ = slot_TJ.tensor(),
                    .count_P = count_P.tensor(),
                    .scratch = scratch.tensor(),
                    .topk_TK = topk_TK.tensor(),
                    .kept_TK = drops ? kept_TK.tensor() : Tensor{},
                    .experts_of_rank = e});
  EXPECT_EQ(dest_TJ.values(), dest);
  EXPECT_EQ(slot_TJ.values(), slot);
  EXPECT_EQ(count_P.values(), count);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DestinationsTest, ::testing::ValuesIn(testing::on_each_device(cases())));

}  // namespace
}  // namespace moebius
