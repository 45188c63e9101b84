// What attention gives for a few rows, by plain loops in double.
#pragma once

#include "bench/check.h"
#include "ops/attention/attention.h"

namespace moebius {

// The keys that queries see, of sequences of S rows; sequences follow each other.
class SeenKeys {
 public:
  SeenKeys(int64_t S, const BenchMask& mask) : document_(S / mask.documents), window_(mask.window) {}
  int64_t first_key(int64_t t) const;   // of query t; the last is t
  int64_t last_query(int64_t u) const;  // that sees key u; the first is u
  // Of a few documents, the first and the last among them, a row of the second half: late ones, whose results are of
  // one size and depend on every edge of the mask.
  std::vector<int64_t> late_rows(int64_t T) const;
  // One in the middle of each of those documents, which later queries see.
  std::vector<int64_t> middle_rows(int64_t T) const;

 private:
  int64_t document_, window_;
};

// Compare o and lse. Error{numerics} where they are not what the mask says, whatever a has of one.
void check_attention(Stream& s, BenchLine& line, const AttentionFwd& a, const BenchMask& mask);
// Compare dq, dk and dv, from the o and lse that the op was given.
void check_attention(Stream& s, BenchLine& line, const AttentionBwd& a, const BenchMask& mask);

}  // namespace moebius
