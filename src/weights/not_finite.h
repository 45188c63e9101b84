// Weights that are NaN or infinite. They are no error, since one may want to look at a diverged
// model, but the user is warned of them.
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

// Counts n elements of f32, bf16, f16 or f64, at any address; 0 for other dtypes. An element counts
// too when it becomes infinite by conversion to `held`, f32 or bf16.
int64_t count_not_finite(const void* elements, DType dtype, int64_t n, DType held);
inline int64_t count_not_finite(const void* elements, DType dtype, int64_t n) {
  return count_not_finite(elements, dtype, n, dtype);
}

// Adds to the count of the tensor, which is the last of the list if it has an entry. Nothing is
// added for a count of 0.
void add_not_finite(std::vector<NotFinite>* list, const std::string& name, int64_t count);

// Returns the text of the warning; empty when nothing was found.
std::string not_finite_warning(const std::string& path, const std::vector<NotFinite>& list);

}  // namespace moebius
