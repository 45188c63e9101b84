#include "ops/draw/draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "ops/draw/draw_backends.h"

namespace moebius {
namespace {

constexpr int64_t kBlock = 512;  // ids whose masses are summed together

// floor(2^40 e^z) for z <= 0. It has the bits of cuda/draw.cu: the same polynomial and the same fused multiply-adds.
inline int64_t mass_of(double z) {
  z = std::max(z, -30.0);
  const double n = std::rint(z * 1.4426950408889634);
  const double r = std::fma(-n, 1.9082149292705877e-10, std::fma(-n, 6.93147180369123816490e-01, z));
  double p = 1.0 / 479001600.0;
  p = std::fma(p, r, 1.0 / 39916800.0);
  p = std::fma(p, r, 1.0 / 3628800.0);
  p = std::fma(p, r, 1.0 / 362880.0);
  p = std::fma(p, r, 1.0 / 40320.0);
  p = std::fma(p, r, 1.0 / 5040.0);
  p = std::fma(p, r, 1.0 / 720.0);
  p = std::fma(p, r, 1.0 / 120.0);
  p = std::fma(p, r, 1.0 / 24.0);
  p = std::fma(p, r, 1.0 / 6.0);
  p = std::fma(p, r, 0.5);
  p = std::fma(p, r, 1.0);
  p = std::fma(p, r, 1.0);
  return static_cast<int64_t>(p * std::bit_cast<double>((static_cast<int64_t>(n) + 40 + 1023) << 52));
}

int64_t mass_of_block(std::span<const float> logits, double largest, double temperature) {
  int64_t sum = 0;
  for (const float logit : logits) sum += mass_of((static_cast<double>(logit) - largest) / temperature);
  return sum;
}

bool all_finite(std::span<const float> logits) {
  return std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace

int32_t draw_token(std::span<const float> logits, double temperature, float uniform) {
  const auto top = std::max_element(logits.begin(), logits.end());
  if (temperature == 0) return static_cast<int32_t>(top - logits.begin());
  const double largest = *top;
  const auto block = [&](int64_t i) {
    return logits.subspan(i * kBlock, std::min(kBlock, std::ssize(logits) - i * kBlock));
  };
  std::vector<int64_t> masses(div_ceil(std::ssize(logits), kBlock));
  int64_t total = 0;
  for (size_t i = 0; i < masses.size(); ++i) {
    masses[i] = mass_of_block(block(static_cast<int64_t>(i)), largest, temperature);
    total += masses[i];
  }
  const int64_t wanted =
      std::min(static_cast<int64_t>(static_cast<double>(uniform) * static_cast<double>(total)), total - 1);
  int64_t passed = 0;
  size_t i = 0;
  while (passed + masses[i] <= wanted) passed += masses[i++];
  const std::span<const float> last = block(static_cast<int64_t>(i));
  int64_t j = 0;
  while ((passed += mass_of((static_cast<double>(last[j]) - largest) / temperature)) <= wanted) ++j;
  return narrow<int32_t>(static_cast<int64_t>(i) * kBlock + j);
}

namespace cpu {

void draw_tokens(Stream& s, const DrawTokens& a) {
  const int64_t N = a.logits_NV.dim(0), V = a.logits_NV.dim(1);
  DrawRule rule;
  std::memcpy(&rule, a.rule.data, sizeof rule);
  int32_t *id = a.id_N.ptr<int32_t>(), *read = a.read_2N.ptr<int32_t>(), *pos = a.pos_N.ptr<int32_t>();
  s.pool().run(N, [&](int64_t n, int) {
    const std::span logits(a.logits_NV.ptr<float>() + n * V, static_cast<size_t>(rule.num_ids));
    const bool finite = all_finite(logits);
    const auto index = static_cast<uint64_t>(pos[n] + 1);
    const auto bits = philox4x32(
        {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), rule.counter_high[0], rule.counter_high[1]},
        {rule.key[0], rule.key[1]});
    const float uniform = (static_cast<float>(bits[0] >> 9) + 0.5f) * 0x1p-23f;
    id[n] = finite ? draw_token(logits, rule.temperature, uniform) : 0;
    read[pos[n] % 2 * N + n] = finite ? id[n] : -1;
    ++pos[n];
  });
}

}  // namespace cpu
}  // namespace moebius
