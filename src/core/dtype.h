// Element types. bf16 is a bit pattern: arithmetic is done in f32.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace moebius {

// The last four are the elements and scales of quantised tensors (core/narrow_float.h).
enum class DType : uint8_t {
  f32,
  bf16,
  f16,
  f64,
  i32,
  i64,
  u8,
  u16,
  i8,
  i16,
  u32,
  u64,
  boolean,
  f8_e4m3,
  f8_e5m2,
  f4_e2m1,
  e8m0
};

int64_t size_of(DType dtype);  // bytes of an element; throws Error{internal} for f4_e2m1, which has half a byte
// Returns the bytes of count elements, rounded up to whole bytes.
int64_t bytes_of(DType dtype, int64_t count);
std::string_view name_of(DType dtype);  // "f32", "bf16", ...

struct bf16 {
  uint16_t bits;
};

inline float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float to_f32(float x) { return x; }

// Rounds to nearest even; a NaN stays a (quiet) NaN. It has no branches, so that loops over it vectorise.
inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return bf16{static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

template <class T>
T from_f32(float x);
template <>
inline float from_f32<float>(float x) {
  return x;
}
template <>
inline bf16 from_f32<bf16>(float x) {
  return to_bf16(x);
}

template <class T>
inline constexpr DType dtype_of = [] {
  static_assert(sizeof(T) == 0, "no DType for this type");
  return DType::f32;
}();
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::u8;
template <>
inline constexpr DType dtype_of<uint16_t> = DType::u16;

}  // namespace moebius
