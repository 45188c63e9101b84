#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/elementwise/copy_columns.h"

namespace moebius::cpu {

void copy_columns(Stream& s, const CopyColumns& a) {
  const int64_t size = size_of(a.to_TA.dtype), to_row = a.to_TA.dim(1) * size, from_row = a.from_TB.dim(1) * size;
  char* to = static_cast<char*>(a.to_TA.data) + a.to_first * size;
  const char* from = static_cast<const char*>(a.from_TB.data) + a.from_first * size;
  parallel_rows(s.pool(), a.to_TA.dim(0), 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(to + t * to_row, from + t * from_row, a.count * size);
  });
}

}  // namespace moebius::cpu
