#include "ops/attention/sm90/query_tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace moebius {
namespace {

constexpr int kMultiprocessors = 132;  // of an H100 and an H200

// Returns the tiles of a block, in its order.
std::vector<QueryTile> tiles_of(const QueryTileOrder& order, int block) {
  std::vector<QueryTile> tiles;
  for (int round = 0; round < order.rounds(); ++round) {
    const QueryTile tile = order.tile_of(round, block);
    if (tile.head >= 0) tiles.push_back(tile);
  }
  return tiles;
}

// Returns the work of the block that has the most, as a multiple of the mean. A causal tile with index i has i + 1
// tiles of keys, and half of one stands for its beginning and end.
double imbalance(const QueryTileOrder& order) {
  std::vector<double> work(order.blocks);
  for (int block = 0; block < order.blocks; ++block) {
    for (const QueryTile& tile : tiles_of(order, block)) work[block] += tile.tile + 1.5;
  }
  return *std::max_element(work.begin(), work.end()) * order.blocks / std::accumulate(work.begin(), work.end(), 0.0);
}

TEST(QueryTileOrder, GivesEachTileToOneBlock) {
  for (const QueryTileOrder order : {QueryTileOrder{5, 7, 3, 4}, {5, 7, 7, 4}, {1, 9, 2, 16}, {256, 16, 1, 132}}) {
    std::vector<int> count(order.tiles());
    for (int block = 0; block < order.blocks; ++block) {
      for (const QueryTile& tile : tiles_of(order, block)) ++count.at(tile.head * order.tiles_of_head + tile.tile);
    }
    EXPECT_EQ(count, std::vector<int>(order.tiles(), 1))
        << order.tiles_of_head << " tiles, " << order.heads << " heads";
  }
}

// With all sections from long to short, and rounds in both directions, the first five of these had 1.51, 1.54, 1.78,
// 1.88 and 1.10.
TEST(QueryTileOrder, GivesAllBlocksTheSameWorkOfCausalHeads) {
  for (const auto& [tiles, heads, section] :
       {std::tuple{256, 16, 1}, {128, 16, 1}, {64, 16, 2}, {32, 16, 4}, {64, 32, 16}, {1024, 32, 8}, {256, 128, 1}}) {
    EXPECT_LT(imbalance({tiles, heads, section, kMultiprocessors}), 1.01) << tiles << " tiles of " << heads << " heads";
  }
  // One section of 7.8 rounds.
  EXPECT_LT(imbalance({32, 32, 32, kMultiprocessors}), 1.01);
}

TEST(QueryTileOrder, EndsWithTheShortestTiles) {
  for (const int heads : {3, 4, 5}) {
    const QueryTileOrder order{.tiles_of_head = 8, .heads = heads, .section = 1, .blocks = 8};
    for (int block = 0; block < order.blocks; ++block) EXPECT_EQ(tiles_of(order, block).back().tile, 7 - block);
  }
}

}  // namespace
}  // namespace moebius
