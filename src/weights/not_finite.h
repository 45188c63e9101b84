// Weights that are NaN or infinite are no error by themselves, since a diverged model can be looked at; but nothing is
// computed from them without a word.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace moebius {

// Elements of one tensor that are NaN or infinite.
struct NotFinite {
  std::string name;
  int64_t count = 0;
  bool operator==(const NotFinite&) const = default;
};

// Among n elements of f32, bf16, f16 or f64, at any address; 0 for other dtypes. Counted as they are in `held`, f32 or
// bf16 where they are converted to it, so that what is too large for it counts.
int64_t count_not_finite(const void* elements, DType dtype, int64_t n, DType held);
inline int64_t count_not_finite(const void* elements, DType dtype, int64_t n) {
  return count_not_finite(elements, dtype, n, dtype);
}

// Adds to the count of the tensor, which comes last when it is there already. Nothing is added for a count of 0.
void add_not_finite(std::vector<NotFinite>* list, const std::string& name, int64_t count);

// What to warn of; empty when nothing was found.
std::string not_finite_warning(const std::string& path, const std::vector<NotFinite>& list);

}  // namespace moebius
