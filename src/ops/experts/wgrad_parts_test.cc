#include "ops/experts/wgrad_parts.h"

#include <gtest/gtest.h>

#include <array>

namespace moebius {
namespace {

TEST(WgradParts, CutTilesThatDoNotFillARound) {
  const WgradParts narrow = wgrad_parts(1024, 1024, 65536);  // 16 tiles
  EXPECT_EQ(narrow.whole, 0);
  EXPECT_EQ(narrow.cut, 16);
  EXPECT_EQ(narrow.parts, 4);
  EXPECT_EQ(narrow.scratch_bytes(), int64_t{64} * 256 * 256 * 4);

  const WgradParts wide = wgrad_parts(2560, 2048, 32768);  // 80 tiles
  EXPECT_EQ(wide.whole, 66);
  EXPECT_EQ(wide.cut, 14);
  EXPECT_EQ(wide.parts, 4);
}

TEST(WgradParts, AreNotCutWhereThatSavesLittle) {
  for (const auto& [M, N, K] : {std::array<int64_t, 3>{2048, 2048, 32768},  // 64 tiles
                                {256 * 66, 256, 65536},                     // a whole round
                                {256, 256, 1920},                           // parts would have fewer than 8 K steps
                                {256, 256, 0}}) {
    const WgradParts p = wgrad_parts(M, N, K);
    EXPECT_EQ(p.cut, 0) << M << " " << N << " " << K;
    EXPECT_EQ(p.parts, 1);
    EXPECT_EQ(p.whole, div_ceil(M, int64_t{256}) * div_ceil(N, int64_t{256}));
    EXPECT_EQ(p.scratch_bytes(), 0);
  }
}

TEST(WgradParts, FitTheirScratch) {
  for (int64_t tiles = 1; tiles < 200; ++tiles) {
    for (const int64_t K : {128, 2048, 5000, 32768, 1 << 20}) {
      const WgradParts p = wgrad_parts(256 * tiles, 1, K);
      EXPECT_EQ(p.whole + p.cut, tiles);
      EXPECT_EQ(p.whole % 66 == 0 || p.cut == 0, true) << tiles;
      EXPECT_LE(p.in_all(), WgradParts::kMaxParts);
      EXPECT_EQ(p.cut == 0, p.parts == 1);
      EXPECT_GE(div_ceil(K, int64_t{128}), p.parts) << "each part has a K step";
    }
  }
}

}  // namespace
}  // namespace moebius
