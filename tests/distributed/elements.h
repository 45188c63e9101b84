// The elements of a tensor of an engine's device, as floats on the host and back. Tensors are f32 or bf16.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/engine.h"

namespace moebius {

inline std::vector<float> elements(Engine& engine, const Tensor& x) {
  std::vector<float> values(x.numel());
  Stream s = engine.stream();
  if (x.dtype == DType::f32) {
    copy_to_host(s, values.data(), x.data, x.num_bytes());
    return values;
  }
  MOEBIUS_ASSERT(x.dtype == DType::bf16);
  std::vector<bf16> rounded(x.numel());
  copy_to_host(s, rounded.data(), x.data, x.num_bytes());
  std::transform(rounded.begin(), rounded.end(), values.begin(), [](bf16 v) { return to_f32(v); });
  return values;
}

// Rounds them where x is bf16, and returns when they are there.
inline void set_elements(Stream& s, const Tensor& x, const std::vector<float>& values) {
  std::vector<bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return to_bf16(v); });
  const void* from = x.dtype == DType::bf16 ? static_cast<const void*>(rounded.data()) : values.data();
  copy_to_device(s, x.data, from, x.num_bytes());
  synchronize(s);
}

}  // namespace moebius
