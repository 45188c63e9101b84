// Random numbers by counter: each value is a pure function of its key and index.
// There is no state to save, and draws do not depend on the layout, the order or the number of threads.
//   Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11.
#pragma once

#include <array>
#include <cstdint>

namespace moebius {

// The purpose of a stream of numbers; it is part of the key.
enum class RngSite : uint32_t {
  init = 1,
  jitter = 2,
  data_order = 3,
  sampling = 4,
  bench = 5,
  rounding = 6,
  dropout = 7
};

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A stream is keyed by (seed, step, layer, site) and indexed by a global element index.
class Rng {
 public:
  Rng(uint64_t seed, RngSite site, uint64_t step = 0, uint32_t layer = 0)
      : seed_(seed), site_(site), step_(step), layer_(layer) {}
  std::array<uint32_t, 4> bits(uint64_t index) const;
  float uniform(uint64_t index) const;  // (0, 1)
  float normal(uint64_t index) const;   // mean 0, variance 1 (Box-Muller)
  // Returns an integer, uniform in [0, n).
  uint64_t below(uint64_t index, uint64_t n) const;

  // The arguments that bits() gives philox4x32, without the 64 bits of the index. Kernels draw with them.
  struct Words {
    std::array<uint32_t, 2> counter_high, key;
  };
  Words words() const;

 private:
  uint64_t seed_;
  RngSite site_;
  uint64_t step_;
  uint32_t layer_;
};

// Returns a 32-bit key of a name (FNV-1a), for streams that belong to a named parameter.
uint32_t key_of(const char* name);

}  // namespace moebius
