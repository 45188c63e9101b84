// The draws of core/rng.h on the device: the same counter, key and formulas, so the same numbers
// (normal ones up to the last bit of log and cos).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <numbers>

#include "core/rng.h"

namespace moebius::cuda {

class DeviceRng {
 public:
  DeviceRng() = default;
  explicit DeviceRng(const Rng& rng) {
    const Rng::Words words = rng.words();
    key_[0] = words.key[0];
    key_[1] = words.key[1];
    high_[0] = words.counter_high[0];
    high_[1] = words.counter_high[1];
  }
  // REQUIRES: this one is of step 0.
  __device__ __forceinline__ DeviceRng at_step(uint64_t step) const {
    DeviceRng rng = *this;
    rng.high_[0] = static_cast<uint32_t>(step);
    rng.key_[1] ^= static_cast<uint32_t>(step >> 32);
    return rng;
  }
  // Returns the first two of the four words of an index.
  __device__ __forceinline__ uint2 bits(uint64_t index) const {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = high_[0], c3 = high_[1];
    uint32_t k0 = key_[0], k1 = key_[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
      const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
      c0 = high1 ^ c1 ^ k0;
      c1 = low1;
      c2 = high0 ^ c3 ^ k1;
      c3 = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {c0, c1};
  }
  __device__ __forceinline__ float uniform(uint64_t index) const {
    return (static_cast<float>(bits(index).x >> 9) + 0.5f) * 0x1p-23f;
  }
  __device__ __forceinline__ float normal(uint64_t index) const {
    const uint2 b = bits(index);
    const double u = (static_cast<double>(b.x) + 0.5) * 0x1p-32, v = static_cast<double>(b.y) * 0x1p-32;
    return static_cast<float>(sqrt(-2.0 * log(u)) * cos(2.0 * std::numbers::pi * v));
  }

 private:
  uint32_t key_[2], high_[2];
};

}  // namespace moebius::cuda
