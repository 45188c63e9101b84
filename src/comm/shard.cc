#include "comm/shard.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {

Shard shard_of(const Shape& global, int dim, int64_t r, int64_t n) {
  MOEBIUS_ASSERT(dim < global.rank() && 0 <= r && r < n);
  if (n == 1) return {};
  const int64_t begin = global[dim] * r / n;
  return {.dim = dim, .begin = begin, .count = global[dim] * (r + 1) / n - begin};
}

ElementRange common(const ElementRange& a, const ElementRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {.begin = begin, .count = std::max<int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

}  // namespace moebius
