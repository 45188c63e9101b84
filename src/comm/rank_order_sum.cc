#include "comm/rank_order_sum.h"

#include <algorithm>
#include <type_traits>

namespace moebius {
namespace {

// Element is the type of the parts, Sum that of the running sum (i64 wraps), and Out that of the result.
template <class ElementT, class SumT, class OutT = ElementT>
struct Rule {
  using Element = ElementT;
  using Sum = SumT;
  using Out = OutT;
};

template <class Sum, class Element>
Sum load(Element x) {
  if constexpr (std::is_same_v<Element, bf16>)
    return to_f32(x);
  else
    return static_cast<Sum>(x);
}

template <class Out, class Sum>
Out store(Sum x) {
  if constexpr (std::is_same_v<Out, bf16>)
    return to_bf16(x);
  else
    return static_cast<Out>(x);
}

constexpr int64_t kBlock = 512;  // running sums, few enough for the first-level cache
constexpr int64_t kGrain = 32 * kBlock;

template <class R>
void sum_block(typename R::Out* out, std::span<const void* const> parts, int64_t begin, int64_t size) {
  using Sum = typename R::Sum;
  Sum sums[kBlock];
  const auto elements = [&](size_t part) { return static_cast<const typename R::Element*>(parts[part]) + begin; };
  for (int64_t i = 0; i < size; ++i) sums[i] = load<Sum>(elements(0)[i]);
  for (size_t part = 1; part < parts.size(); ++part) {
    const auto* const x = elements(part);
    for (int64_t i = 0; i < size; ++i) sums[i] += load<Sum>(x[i]);
  }
  for (int64_t i = 0; i < size; ++i) out[begin + i] = store<typename R::Out>(sums[i]);
}

template <class R>
void sum(Stream& s, Tensor out, std::span<const void* const> parts) {
  auto* const elements = static_cast<typename R::Out*>(out.data);
  parallel_rows(s.pool(), out.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock) sum_block<R>(elements, parts, i, std::min(kBlock, end - i));
  });
}

}  // namespace

bool can_sum(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::i64 || dtype == DType::bf16;
}

void sum_in_rank_order(Stream& s, Tensor out, std::span<const void* const> parts, DType dtype) {
  MOEBIUS_ASSERT(!parts.empty() && can_sum(dtype));
  const bool widens = dtype == DType::bf16 && out.dtype == DType::f32;
  const bool narrows = dtype == DType::f32 && out.dtype == DType::bf16;
  MOEBIUS_ASSERT(out.dtype == dtype || widens || narrows);
  if (widens) return sum<Rule<bf16, float, float>>(s, out, parts);
  if (narrows) return sum<Rule<float, float, bf16>>(s, out, parts);
  if (dtype == DType::f32) return sum<Rule<float, float>>(s, out, parts);
  if (dtype == DType::f64) return sum<Rule<double, double>>(s, out, parts);
  if (dtype == DType::i64) return sum<Rule<int64_t, uint64_t>>(s, out, parts);
  sum<Rule<bf16, float>>(s, out, parts);
}

}  // namespace moebius
