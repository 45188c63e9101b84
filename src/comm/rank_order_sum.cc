#include "comm/rank_order_sum.h"

#include <algorithm>

namespace moebius {
namespace {

// These say how an element is added. Sum is the type of the running sum; i64 wraps.
struct F32 {
  using Element = float;
  using Sum = float;
  static Sum load(Element x) { return x; }
  static Element store(Sum x) { return x; }
};
struct F64 {
  using Element = double;
  using Sum = double;
  static Sum load(Element x) { return x; }
  static Element store(Sum x) { return x; }
};
struct I64 {
  using Element = int64_t;
  using Sum = uint64_t;
  static Sum load(Element x) { return static_cast<Sum>(x); }
  static Element store(Sum x) { return static_cast<Element>(x); }
};
struct Bf16 {
  using Element = bf16;
  using Sum = float;
  static Sum load(Element x) { return to_f32(x); }
  static Element store(Sum x) { return to_bf16(x); }
};

constexpr int64_t kBlock = 512;  // running sums, few enough for the first-level cache
constexpr int64_t kGrain = 32 * kBlock;

template <class Rule>
void sum_block(typename Rule::Element* out, std::span<const void* const> parts, int64_t begin, int64_t size) {
  typename Rule::Sum sums[kBlock];
  const auto elements = [&](size_t part) { return static_cast<const typename Rule::Element*>(parts[part]) + begin; };
  for (int64_t i = 0; i < size; ++i) sums[i] = Rule::load(elements(0)[i]);
  for (size_t part = 1; part < parts.size(); ++part) {
    const auto* const x = elements(part);
    for (int64_t i = 0; i < size; ++i) sums[i] += Rule::load(x[i]);
  }
  for (int64_t i = 0; i < size; ++i) out[begin + i] = Rule::store(sums[i]);
}

template <class Rule>
void sum(Stream& s, Tensor out, std::span<const void* const> parts) {
  auto* const elements = static_cast<typename Rule::Element*>(out.data);
  parallel_rows(s.pool(), out.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock) sum_block<Rule>(elements, parts, i, std::min(kBlock, end - i));
  });
}

}  // namespace

bool can_sum(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i64 || dtype == DType::bf16;
}

void sum_in_rank_order(Stream& s, Tensor out, std::span<const void* const> parts) {
  MOEBIUS_ASSERT(!parts.empty() && can_sum(out.dtype));
  if (out.dtype == DType::f32) return sum<F32>(s, out, parts);
  if (out.dtype == DType::f64) return sum<F64>(s, out, parts);
  if (out.dtype == DType::i64) return sum<I64>(s, out, parts);
  sum<Bf16>(s, out, parts);
}

}  // namespace moebius
