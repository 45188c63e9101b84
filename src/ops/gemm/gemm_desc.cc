#include "ops/gemm/gemm_desc.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace moebius {
namespace {

// Returns the alignment, up to the maximum that algorithms use, so that there are few different descs.
int alignment_of(const Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  return static_cast<int>(std::min<uint64_t>(16, uint64_t{1} << std::countr_zero(uint64_t{address} | 16)));
}

}  // namespace

GemmDesc describe(const Gemm& a) {
  return {.m = a.c_MN.dim(0),
          .n = a.c_MN.dim(1),
          .k = a.a.data.dim(a.trans_a ? 0 : 1),
          .dtype = a.a.data.dtype,
          .c_dtype = a.c_MN.dtype,
          .trans_a = a.trans_a,
          .trans_b = a.trans_b,
          .accumulate = a.accumulate,
          .bias = !a.bias_N.empty(),
          .align_a = alignment_of(a.a.data),
          .align_b = alignment_of(a.b.data),
          .align_c = alignment_of(a.c_MN)};
}

std::string to_string(const GemmDesc& d) {
  return fmt::format("{} x {} x {}, {} to {}{}{}{}{}{}, aligned to {}, {} and {}", d.m, d.n, d.k, name_of(d.dtype),
                     name_of(d.c_dtype), d.trans_a ? ", A transposed" : "", d.trans_b ? ", B transposed" : "",
                     d.accumulate ? ", accumulate" : "", d.bias ? ", bias" : "", d.batched ? ", batched" : "",
                     d.align_a, d.align_b, d.align_c);
}

size_t GemmDescHash::operator()(const GemmDesc& d) const {
  uint64_t hash = 0;
  const auto mix = [&](uint64_t x) { hash = (hash ^ x) * 0x9E3779B97F4A7C15u ^ (hash >> 29); };
  for (const int64_t x : {d.m, d.n, d.k}) mix(static_cast<uint64_t>(x));
  mix(static_cast<uint64_t>(d.dtype) << 8 | static_cast<uint64_t>(d.c_dtype));
  mix(uint64_t{d.trans_a} | uint64_t{d.trans_b} << 1 | uint64_t{d.accumulate} << 2 | uint64_t{d.bias} << 3 |
      uint64_t{d.batched} << 4);
  mix(static_cast<uint64_t>(d.align_a) << 16 | static_cast<uint64_t>(d.align_b) << 8 |
      static_cast<uint64_t>(d.align_c));
  return hash;
}

}  // namespace moebius
