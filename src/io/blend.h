// Which dataset gives sample i of a weighted blend, and how many it gave before: at every step the one that is furthest
// behind its share, argmax_j (w_j max(i, 1) - count_j), ties to the lowest j (the rule of Megatron's BlendedDataset).
//
// Weights are rounded to 2^-32 of their sum and the rest is integer arithmetic: the same picks on every machine, and
// after any number of steps each count is within the number of datasets of its share.
#pragma once

#include <cstdint>
#include <vector>

namespace moebius {

class Blend {
 public:
  struct Pick {
    int dataset = 0;
    int64_t ordinal = 0;  // picks of this dataset before this one
  };

  explicit Blend(const std::vector<double>& weights);  // Error{usage} unless all are finite and > 0; need not sum to 1
  // The pick of step `index`. Walks there from the last one asked for, or from 0 when that lies behind: O(distance *
  // datasets), some 6 ns for each. Two Blends of the same weights always agree.
  Pick at(int64_t index);

 private:
  void restart();
  int furthest_behind() const;
  void advance();

  std::vector<int64_t> share_, error_, count_;
  int64_t total_ = 0;  // of share_: what one pick is worth
  int64_t index_ = 0;  // the step that error_ and count_ stand before
};

}  // namespace moebius
