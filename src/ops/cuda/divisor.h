// Division by a number that is known before a launch.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "core/error.h"

namespace moebius::cuda {

// n / d for 0 <= n < 2^31, by a multiplication and a shift.
//
// With d <= 2^s and m = (2^(31 + s) + r) / d, where r < d, n m / 2^(31 + s) is n / d + n r / (d 2^(31 + s)). The second
// term is below 1 / d, so both have the same integer part.
class Divisor {
 public:
  explicit Divisor(int64_t d)
      : d_(static_cast<uint32_t>(narrow<int>(d))),
        shift_(std::bit_width(d_ - 1) - 1),
        multiplier_(static_cast<uint32_t>(((uint64_t{1} << (32 + shift_)) + d_ - 1) / d_)) {}
  __device__ __forceinline__ int quotient(int n) const {
    const auto dividend = static_cast<uint32_t>(n);
    return static_cast<int>(d_ == 1 ? dividend : __umulhi(dividend, multiplier_) >> shift_);
  }
  __device__ __forceinline__ int value() const { return static_cast<int>(d_); }

 private:
  uint32_t d_;
  int shift_;  // s - 1
  uint32_t multiplier_;
};

}  // namespace moebius::cuda
