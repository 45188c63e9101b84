// The collectives of a large group go in levels, so that a rank exchanges messages with few others.
//
// The ranks of a group of n = r_0 r_1 ... r_(L-1) are numbers with mixed radices:
//
//   rank = d_0 + r_0 (d_1 + r_1 (d_2 + ...)),   0 <= d_l < r_l
//
// At level l a rank exchanges with the r_l ranks that differ from it in the digit d_l alone. A sum goes
// up: level 0 adds the parts of consecutive ranks, level 1 adds these sums, and so on, each in the order
// of the digit. So level 0 is inside a machine where a group's consecutive ranks are, and the levels above
// it send 1 / r_0 of the bytes. A gather goes down, from the last level to level 0.
// With 256 ranks the radices are 8, 8 and 4, and a half of a collective has 7 + 7 + 3 messages instead
// of 255. A group of at most 8 ranks has one level, where each rank exchanges with each other.
//
// The nodes of a group are blocks of consecutive ranks that one machine holds. Where a group has whole nodes of
// fewer ranks than 8, level 0 is a node. So a sum first adds the ranks of each node, and then the nodes.
#pragma once

#include <cstdint>
#include <vector>

namespace moebius {

class CollectiveLevels {
 public:
  static constexpr int kMostAtOnce = 8;

  // node: the ranks of a node, at most kMostAtOnce. It is the first radix where it is above 1, below size, and
  // divides size. Each other radix is the largest divisor, up to kMostAtOnce, of what the radices before it leave.
  // A rest without such a divisor, as a prime above kMostAtOnce, is one level.
  explicit CollectiveLevels(int size, int node = kMostAtOnce);

  int size() const { return size_; }
  int count() const { return static_cast<int>(radices_.size()); }
  int radix(int level) const { return radices_[level]; }
  bool is_direct() const { return count() == 1; }
  // The messages that a rank sends in one pass over the levels: the sum of r_l - 1.
  int64_t messages() const;

  int digit(int rank, int level) const;
  // The ranks that exchange with `rank` at a level, itself included, by digit.
  std::vector<int> members(int rank, int level) const;
  // A tensor that is cut into n slices has them in the order of place(), so that what a rank exchanges
  // with one other is contiguous: place = d_0 n / r_0 + d_1 n / (r_0 r_1) + ... The identity with one level.
  int place(int rank) const;
  // The slices that a rank has of what one other gets or gives at a level: n / (r_0 ... r_level).
  int width(int level) const;

 private:
  int size_;
  std::vector<int> radices_;
};

}  // namespace moebius
