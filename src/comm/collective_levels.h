// Hierarchical collectives: in a large group a collective runs in levels, and a rank has few partners at each.
//
// A rank of a group of n = r_0 r_1 ... r_(L-1) ranks is a number with mixed radices:
//
//   rank = d_0 + r_0 (d_1 + r_1 (d_2 + ...)),   0 <= d_l < r_l
//
// At level l a rank exchanges with the r_l ranks that differ from it in digit d_l alone. Sums go up: level 0 adds the
// parts of consecutive ranks, level 1 adds these sums, and so on, each in the order of the digit. Gathers go down, from
// the last level to level 0. If consecutive ranks share a machine, level 0 stays inside it, and the levels above send
// 1 / r_0 of the bytes.
// With 256 ranks the radices are 8, 8 and 4, and an all-gather or a reduce-scatter has 7 + 7 + 3 messages instead of
// 255. A group of at most 8 ranks on one node has one level.
//
// If a group is on several nodes, with the same number of ranks on each (ranks_on_node in comm/layout.h), level 0 is
// the ranks of a node: a sum first adds these, and then the nodes.
#pragma once

#include <cstdint>
#include <vector>

namespace moebius {

// A rank's exchange at a level. The member with digit d has the places [begin(d), begin(d) + width) of the slices: a
// sum gives it their sums, and a gather has them from it.
struct LevelStep {
  int level = 0;
  int digit = 0;             // this rank's: its index in members
  std::vector<int> members;  // ranks of the group, by digit
  int first = 0, width = 0;
  int radix() const { return static_cast<int>(members.size()); }
  int begin(int d) const { return first + d * width; }
};

class CollectiveLevels {
 public:
  static constexpr int kMaxRadix = 8;  // maximum ranks that exchange at a level

  // node: ranks of the group on a node, at most kMaxRadix. It is the first radix if it is above 1, below size, and
  // divides size. Each other radix is the largest divisor, up to kMaxRadix, of the remaining factor. A remaining factor
  // without such a divisor, such as a prime above kMaxRadix, is one level.
  explicit CollectiveLevels(int size, int node = kMaxRadix);

  int size() const { return size_; }
  int count() const { return static_cast<int>(radices_.size()); }
  int radix(int level) const { return radices_[level]; }
  bool is_direct() const { return count() == 1; }
  // Returns the messages that a rank sends in one pass over the levels: the sum of r_l - 1.
  int64_t messages() const;

  int digit(int rank, int level) const;
  // Returns the ranks that exchange with `rank` at a level, including itself, by digit.
  std::vector<int> members(int rank, int level) const;
  // Returns the position of a rank's slice in a tensor of n slices, chosen so that the slices that two ranks exchange
  // are contiguous: d_0 n / r_0 + d_1 n / (r_0 r_1) + ... With one level it is the rank.
  int place(int rank) const;
  int rank_at(int place) const;  // the rank whose place it is
  // Returns the number of slices that two ranks exchange at a level: n / (r_0 ... r_level).
  int width(int level) const;
  // Returns the exchanges of a sum, from level 0 up. Those of a gather are the same in reverse.
  std::vector<LevelStep> steps(int rank) const;

 private:
  int size_;
  std::vector<int> radices_;
};

}  // namespace moebius
