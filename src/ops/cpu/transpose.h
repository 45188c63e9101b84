// The transpose of as many registers as one has lanes.
#pragma once

#include <cstddef>
#include <utility>

namespace moebius::cpu {

// Selects from the lanes l of a and b: lanes with bit `Step` 0 keep their position in a, the others in b.
template <int Step, class V, size_t... l>
[[gnu::always_inline]] inline void exchange(V& a, V& b, std::index_sequence<l...>) {
  constexpr int kLanes = sizeof...(l);
  const V x = a, y = b;
  a = __builtin_shufflevector(x, y, (l & Step ? kLanes + l - Step : l)...);
  b = __builtin_shufflevector(x, y, (l & Step ? kLanes + l : l + Step)...);
}

template <int Step, class V, int N>
[[gnu::always_inline]] inline void exchange_rows(V (&m)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if ((i & Step) == 0) exchange<Step>(m[i], m[i + Step], std::make_index_sequence<N>{});
  }
}

// Transposes m, whose registers have N <= 16 lanes, by recursive halving: 64 shuffles for 256 words of 16 lanes.
template <class V, int N>
[[gnu::always_inline]] inline void transpose(V (&m)[N]) {
  static_assert((N == 4 || N == 8 || N == 16) && sizeof(V) == N * sizeof(m[0][0]));
  if constexpr (N > 8) exchange_rows<8>(m);
  if constexpr (N > 4) exchange_rows<4>(m);
  exchange_rows<2>(m);
  exchange_rows<1>(m);
}

}  // namespace moebius::cpu
