// The order in which the thread blocks of Hopper's forward kernels take their tiles of queries. Nothing is
// decided at run time: a block knows all its tiles when it begins. Host code compiles this header too.
//
// In causal attention the last tile of a head has the most keys and the first one the fewest. A block must not get more
// long tiles than another, since the pass takes as long as the block with the most work.
#pragma once

namespace moebius {

struct QueryTile {
  int head;  // counted over all sequences; -1: none
  int tile;  // of the head
};

// Blocks that run together take the tiles of one section of heads, so that L2 has its keys and values.
struct QueryTileOrder {
  int tiles_of_head, heads;  // heads of all sequences
  int section;               // heads of a section; the last one may have fewer
  int blocks;

  constexpr int tiles() const { return tiles_of_head * heads; }
  constexpr int rounds() const { return (tiles() + blocks - 1) / blocks; }
  constexpr int sections() const { return (heads + section - 1) / section; }

  // Returns what a block does in a round.
  //
  // Every other section has its shortest tiles first, and the last one its longest: lengths go up and down, and no
  // number of blocks always meets the long ones. With a single section the rounds alternate their direction instead.
  constexpr QueryTile tile_of(int round, int block) const {
    const bool is_reversed = sections() == 1 && round % 2 == 1;
    const int place = round * blocks + (is_reversed ? blocks - 1 - block : block);
    if (place >= tiles()) return {-1, 0};
    const int of_section = section * tiles_of_head, index = place / of_section, first = index * section,
              in_section = heads - first < section ? heads - first : section, in = place % of_section;
    const bool is_longest_first = (sections() - 1 - index) % 2 == 0;
    const int tile = in / in_section;
    return {first + in % in_section, is_longest_first ? tiles_of_head - 1 - tile : tile};
  }
};

}  // namespace moebius
