// A blend is a weighted sequence of datasets. It says which dataset gives sample i, and how many
// samples that dataset gave before.
// Each step picks the dataset that is furthest below its share, and the lowest j where several are:
//   argmax_j (w_j max(i, 1) - count_j)
// This is the rule of Megatron's BlendedDataset.
//
// Weights are rounded to 12 digits of their sum, and all further arithmetic is on integers. So the
// picks are the same on every machine.
// After any number of steps, each count differs from its share by less than the number of datasets.
//
// Let the weights be integers w_j without a common factor, and W their sum.
// After each W steps every dataset has exactly its share, for three reasons:
// - Every w_j i - W count_j is then a multiple of W.
// - It is above -W, since a dataset above its share is never picked.
// - The sum over j is 0.
// So the picks repeat with period W, and a walk can start from every multiple of W.
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

  // Throws Error{usage} unless all weights are finite and > 0. They need not sum to 1.
  explicit Blend(const std::vector<double>& weights);
  // Returns the pick of step `index`.
  // It walks there from the last step asked for or from the last multiple of W, whichever is
  // nearer. The cost is O(distance * datasets), some 6 ns for each.
  // Weights such as 3:7 or 0.25:0.75 are reached at once. Only weights of many digits need long
  // walks. Two Blends of the same weights always agree.
  Pick at(int64_t index);

 private:
  void start_before(int64_t index);
  int furthest_behind() const;
  void advance();

  std::vector<int64_t> share_, error_, count_;
  int64_t total_ = 0;  // the sum W of share_, which is what one pick is worth
  int64_t index_ = 0;  // the next step; error_ and count_ are those before it
};

}  // namespace moebius
