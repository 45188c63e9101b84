#include "core/dtype.h"

#include "core/error.h"

namespace moebius {

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::u16:
    case DType::i16:
      return 2;
    case DType::u8:
    case DType::i8:
    case DType::boolean:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::e8m0:
      return 1;
    case DType::f4_e2m1:
      MOEBIUS_ASSERT(!"f4_e2m1 has two elements a byte: bytes_of() counts them");
  }
  MOEBIUS_ASSERT(!"unknown dtype");
}

int64_t bytes_of(DType dtype, int64_t count) {
  return dtype == DType::f4_e2m1 ? (count + 1) / 2 : count * size_of(dtype);
}

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
    case DType::u16:
      return "u16";
    case DType::i8:
      return "i8";
    case DType::i16:
      return "i16";
    case DType::u32:
      return "u32";
    case DType::u64:
      return "u64";
    case DType::boolean:
      return "bool";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::f8_e5m2:
      return "f8_e5m2";
    case DType::f4_e2m1:
      return "f4_e2m1";
    case DType::e8m0:
      return "e8m0";
  }
  MOEBIUS_ASSERT(!"unknown dtype");
}

}  // namespace moebius
