// Numbers of files in other dtypes than those that are computed with.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace moebius {

// Converts n elements in host memory, rounding to nearest even. to_dtype: f32 or bf16; from_dtype: f32, bf16, f16
// or f64.
// Throws Error{input} that names `who` for any other dtype of from.
void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t n, const std::string& who);

}  // namespace moebius
