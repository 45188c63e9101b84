// Checks a few rows of attention against plain loops in double.
#pragma once

#include "bench/check.h"
#include "ops/attention/attention.h"

namespace moebius {

// The keys that each query attends to, for sequences of S rows one after the other.
class AttendedKeys {
 public:
  AttendedKeys(int64_t S, const BenchMask& mask) : document_(S / mask.documents), window_(mask.window) {}
  int64_t first_key(int64_t t) const;   // the first key of query t, whose last key is t
  int64_t last_query(int64_t u) const;  // the last query that attends to key u; the first is u
  // Returns a row in the second half of each of a few documents, the first and the last document
  // among them. The results of late rows are of similar size, and depend on every edge of the mask.
  std::vector<int64_t> late_rows(int64_t T) const;
  // Returns the middle row of each of those documents, to which later queries attend.
  std::vector<int64_t> middle_rows(int64_t T) const;

 private:
  int64_t document_, window_;
};

// Compares o and lse with attention under `mask`, whatever the mask of the arguments. Throws Error{numerics} if wrong.
void check_attention(Stream& s, BenchLine& line, const AttentionFwd& a, const BenchMask& mask);
// Compares dq, dk and dv, computed from the o and lse that the op was given.
void check_attention(Stream& s, BenchLine& line, const AttentionBwd& a, const BenchMask& mask);

}  // namespace moebius
