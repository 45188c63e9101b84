// Which dataset gives sample i of a weighted blend, and how many it gave before: at every step the one that is furthest
// behind its share, argmax_j (w_j max(i, 1) - count_j), ties to the lowest j (the rule of Megatron's BlendedDataset).
//
// Weights are rounded to 12 digits of their sum and the rest is integer arithmetic: the same picks on every machine,
// and after any number of steps each count is within the number of datasets of its share.
//
// With the weights as integers of sum W (without a common factor), every dataset stands
// exactly at its share after each W steps. For then every w_j i - W count_j is a multiple of
// W; it is above -W, since only a dataset that is not ahead is picked; and they sum to 0.
// Hence the picks repeat from step W on, and every multiple of W is a place to start from.
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
  // The pick of step `index`. Walks there from the last one asked for or from the last multiple of W, whichever is
  // nearer: O(distance * datasets), some 6 ns for each, so that 3:7 or 0.25:0.75 are reached at once, and only weights
  // of many digits are walked to. Two Blends of the same weights always agree.
  Pick at(int64_t index);

 private:
  void start_before(int64_t index);
  int furthest_behind() const;
  void advance();

  std::vector<int64_t> share_, error_, count_;
  int64_t total_ = 0;  // of share_, W: what one pick is worth
  int64_t index_ = 0;  // the step that error_ and count_ stand before
};

}  // namespace moebius
