// A loop whose counter is a constant, for indices of registers and template arguments.
#pragma once

#include <type_traits>

namespace moebius::cuda {

// Calls fn(std::integral_constant<int, i>) for i in [kFirst, kEnd).
template <int kFirst, int kEnd, class Fn>
__device__ __forceinline__ void for_each_constant(Fn&& fn) {
  if constexpr (kFirst < kEnd) {
    fn(std::integral_constant<int, kFirst>{});
    for_each_constant<kFirst + 1, kEnd>(fn);
  }
}

}  // namespace moebius::cuda
