// The host side of grouped products of FP8 operands with scales.
#pragma once

#include <type_traits>

#include "ops/grouped_gemm/sm90/block_scaled.h"
#include "ops/grouped_gemm/sm90/launch.h"

namespace moebius::cuda {

// The scales of rows a, and of b [e, N, K] in memory.
inline void set_scales(BlockScales& scales, const Operand& a, const Operand& b) {
  scales = {a.scales.ptr<float>(), b.scales.ptr<float>(), static_cast<int32_t>(b.scales.dim(1))};
}
template <class MultiplyA>
void set_scales(TensorScales<MultiplyA>& scales, const Operand& a, const Operand& b) {
  scales = {a.scales.ptr<float>(), b.scales.ptr<float>()};
}

// Calls body(std::type_identity<Scales>()) with the kind of scales of a product whose left operand is a, of those that
// a kernel has.
template <class... All, class Body>
void with_scales_of(const Operand& a, Body&& body) {
  const auto is_kind = [&]<class Scales>(std::type_identity<Scales>) {
    if constexpr (std::is_same_v<Scales, BlockScales>)
      return a.layout != ScaleLayout::per_tensor;
    else if constexpr (std::is_same_v<Scales, TensorScales<WgmmaE4m3>>)
      return a.layout == ScaleLayout::per_tensor && a.data.dtype == DType::f8_e4m3;
    else
      return a.layout == ScaleLayout::per_tensor && a.data.dtype == DType::f8_e5m2;
  };
  const bool found = ((is_kind(std::type_identity<All>()) && (body(std::type_identity<All>()), true)) || ...);
  MOEBIUS_ASSERT(found);
}

}  // namespace moebius::cuda
