#include "ops/cpu/lane_pairs.h"

#include <gtest/gtest.h>

#include <bit>
#include <vector>

namespace moebius::cpu {
namespace {

TEST(LanePairs, EveryBf16RoundTrips) {
  for (uint32_t first = 0; first < 65536; first += kNumPaired) {
    bf16 x[kNumPaired], y[kNumPaired];
    for (int64_t i = 0; i < kNumPaired; ++i) x[i] = bf16{static_cast<uint16_t>(first + i)};
    store_pair(y, load_pair(x));
    for (int64_t i = 0; i < kNumPaired; ++i) ASSERT_EQ(y[i].bits, x[i].bits) << first + i;
  }
}

// Ties to even, values that round up to the next binade and to infinity.
TEST(LanePairs, RoundsAsTheScalarConversion) {
  for (const uint32_t high :
       {0x0000u, 0x0001u, 0x3f80u, 0x3f81u, 0x3fffu, 0x7f7fu, 0x7f80u, 0x7fc1u, 0x7fffu, 0xbf81u, 0xff80u, 0xffffu}) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      if ((high & 0x7f80u) == 0x7f80u && low != 0) continue;  // a NaN that store_pair does not take
      LanePair v;
      v.a = v.b = lanes_of(LaneBits{} + (high << 16 | low));
      bf16 y[kNumPaired];
      store_pair(y, v);
      const bf16 want = to_bf16(std::bit_cast<float>(high << 16 | low));
      for (const bf16 each : y) ASSERT_EQ(each.bits, want.bits) << high << " " << low;
    }
  }
}

TEST(LanePairs, FloatsKeepTheirOrder) {
  std::vector<float> x(kNumPaired), y(kNumPaired);
  for (int64_t i = 0; i < kNumPaired; ++i) x[i] = static_cast<float>(i) + 0.25f;
  store_pair(y.data(), load_pair(x.data()));
  EXPECT_EQ(x, y);
}

}  // namespace
}  // namespace moebius::cpu
