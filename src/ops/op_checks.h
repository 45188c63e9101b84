// Checks of arguments that several ops share. Each throws Error{usage} that begins with `who`, the name of the op.
#pragma once

#include "core/error.h"
#include "core/tensor.h"

namespace moebius {

// "who: scratch must have N bytes; got M" where scratch has less than num_bytes bytes, of any dtype.
inline void check_scratch(const char* who, const Tensor& scratch, int64_t num_bytes) {
  MOEBIUS_CHECK(usage, scratch.num_bytes() >= num_bytes, "{}: scratch must have {} bytes; got {}", who, num_bytes,
                scratch.num_bytes());
}

// "who: name must be an f32 or bf16 matrix; got ...".
inline void check_matrix(const char* who, const char* name, const Tensor& t) {
  MOEBIUS_CHECK(usage, (t.dtype == DType::f32 || t.dtype == DType::bf16) && t.shape.rank() == 2,
                "{}: {} must be an f32 or bf16 matrix; got {}", who, name, to_string(t));
  check_tensor(who, name, t, t.dtype, t.shape);
}

// "who: name must be f32 or bf16; got ...".
inline void check_float(const char* who, const char* name, const Tensor& t) {
  MOEBIUS_CHECK(usage, t.dtype == DType::f32 || t.dtype == DType::bf16, "{}: {} must be f32 or bf16; got {}", who, name,
                to_string(t));
  check_tensor(who, name, t, t.dtype, t.shape);
}

}  // namespace moebius
