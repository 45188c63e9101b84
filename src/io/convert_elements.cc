#include "io/convert_elements.h"

#include <bit>
#include <cstring>

#include "core/error.h"

namespace moebius {
namespace {

struct Half {
  uint16_t bits;
};

float to_f32(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  // After the shift the exponent is 127 - 15 = 112 too small; the product corrects this, also for subnormals.
  const float value = std::bit_cast<float>(magnitude << 13) * std::bit_cast<float>((112u + 127u) << 23);
  const uint32_t infinite = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | infinite | sign);
}
float to_f32(double x) { return static_cast<float>(x); }

template <class To, class From>
void convert(To* to, const void* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    From x;
    std::memcpy(&x, static_cast<const char*>(from) + i * sizeof(From), sizeof(From));
    to[i] = from_f32<To>(to_f32(x));
  }
}

template <class To>
void convert_to(To* to, const void* from, DType from_dtype, int64_t n, const std::string& who) {
  switch (from_dtype) {
    case DType::f32:
      return convert<To, float>(to, from, n);
    case DType::bf16:
      return convert<To, bf16>(to, from, n);
    case DType::f16:
      return convert<To, Half>(to, from, n);
    case DType::f64:
      return convert<To, double>(to, from, n);
    default:
      MOEBIUS_FAIL(input, "{}: expected f32, bf16, f16 or f64; got {}; convert the weights first", who,
                   name_of(from_dtype));
  }
}

}  // namespace

void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n, const std::string& who) {
  if (to_dtype == DType::f32) return convert_to(static_cast<float*>(to), from, from_dtype, n, who);
  MOEBIUS_ASSERT(to_dtype == DType::bf16);
  convert_to(static_cast<bf16*>(to), from, from_dtype, n, who);
}

}  // namespace moebius
