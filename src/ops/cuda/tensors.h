// Kernels over many tensors at once. Each tensor is cut into pieces, which are distributed over the blocks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <span>

#include "core/error.h"

namespace moebius::cuda {

// Tensors of one launch. Their descriptions are kernel parameters, of which every driver
// supports 4 KiB.
template <class T>
inline constexpr int kMaxTensors = std::min(56, 3900 / static_cast<int>(sizeof(T)));

template <class T>
struct Tensors {
  T of[kMaxTensors<T>];
  int num = 0;
};

// Returns the tensor that a piece belongs to; pieces of tensor i begin at of[i].first, and of[0].first is 0.
template <class T>
__device__ __forceinline__ const T& owner_of(const Tensors<T>& tensors, int piece) {
  int low = 0, high = tensors.num - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tensors.of[middle].first <= piece)
      low = middle;
    else
      high = middle - 1;
  }
  return tensors.of[low];
}

// Calls launch(tensors, number of pieces) for up to kMaxTensors<Made> at a time. make(t): one of them,
// without `first`; pieces(t).
template <class Made, class From, class Make, class Pieces, class Launch>
void for_each_group(std::span<const From> all, Make&& make, Pieces&& pieces, Launch&& launch) {
  Tensors<Made> group;
  int first = 0;
  const auto flush = [&] {
    if (group.num > 0) launch(group, first);
    group.num = first = 0;
  };
  for (const From& t : all) {
    const int num = narrow<int>(pieces(t));
    if (num == 0) continue;
    if (group.num == kMaxTensors<Made> || first > INT_MAX - num) flush();
    group.of[group.num] = make(t);
    group.of[group.num++].first = first;
    first += num;
  }
  flush();
}

}  // namespace moebius::cuda
