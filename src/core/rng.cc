#include "core/rng.h"

#include <cmath>
#include <numbers>

#include "core/philox.h"

namespace moebius {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  philox_rounds(c[0], c[1], c[2], c[3], k[0], k[1]);
  return c;
}

// The counter holds 64 bits of the index, 32 of the step and 32 of the layer.
// The key holds the seed, combined with the site and the high half of the step.
Rng::Words Rng::words() const {
  const uint32_t site = static_cast<uint32_t>(site_) * 0x85EBCA6Bu;
  return {
      {static_cast<uint32_t>(step_), layer_},
      {static_cast<uint32_t>(seed_) ^ site, static_cast<uint32_t>(seed_ >> 32) ^ static_cast<uint32_t>(step_ >> 32)}};
}

std::array<uint32_t, 4> Rng::bits(uint64_t index) const {
  const Words w = words();
  return philox4x32(
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), w.counter_high[0], w.counter_high[1]}, w.key);
}

float Rng::uniform(uint64_t index) const { return (static_cast<float>(bits(index)[0] >> 9) + 0.5f) * 0x1p-23f; }

float Rng::normal(uint64_t index) const {
  const auto b = bits(index);
  const double u = (static_cast<double>(b[0]) + 0.5) * 0x1p-32, v = static_cast<double>(b[1]) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
}

uint64_t Rng::below(uint64_t index, uint64_t n) const {
  const auto b = bits(index);
  const uint64_t x = uint64_t{b[0]} << 32 | b[1];
  return static_cast<uint64_t>((static_cast<unsigned __int128>(x) * n) >> 64);
}

uint32_t key_of(const char* name) {
  uint32_t h = 2166136261u;
  for (; *name; ++name) h = (h ^ static_cast<unsigned char>(*name)) * 16777619u;
  return h;
}

}  // namespace moebius
