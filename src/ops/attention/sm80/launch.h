// The host side of the attention kernels of compute capability 8.0 and later.
#pragma once

#include <algorithm>

#include "device/cuda/cuda.h"
#include "ops/attention/portable_attention_config.h"
#include "ops/attention/sm80/tiles.h"

namespace moebius::cuda::sm80 {

inline Operand operand(const Tensor& x) {
  return {static_cast<const Half*>(x.data), narrow<int>(x.dim(1)), narrow<int>(x.dim(2)),
          x.dim(2) % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0};
}
inline Result result(const Tensor& x) {
  return {static_cast<Half*>(x.data), narrow<int>(x.dim(1)), narrow<int>(x.dim(2)),
          x.dim(2) % 2 == 0 && reinterpret_cast<uintptr_t>(x.data) % 4 == 0};
}

// Calls body<width>(config) for the config that a pass over these sizes gets on the GPU of s.
template <class Body>
void with_attention_config(const Stream& s, AttentionPass pass, const AttentionSizes& z, const Body& body) {
  const PortableAttentionConfig config = choose_portable_attention(pass, std::max(z.width, z.v_width), gpu_limits(s));
  switch (config.width) {
    case 32:
      return body.template operator()<32>(config);
    case 64:
      return body.template operator()<64>(config);
    case 96:
      return body.template operator()<96>(config);
    case 128:
      return body.template operator()<128>(config);
    case 192:
      return body.template operator()<192>(config);
    default:
      return body.template operator()<256>(config);
  }
}

// Runs a kernel with the threads and the shared memory of a config.
template <class... Params>
void launch_attention(Stream& s, const char* who, void (*kernel)(Params...), dim3 blocks,
                      const PortableAttentionConfig& config, const Params&... params) {
  const int shared_bytes = narrow<int>(config.shared_bytes());
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<blocks, config.threads(), shared_bytes, cuda_stream(s)>>>(params...);
  check_launch(who);
}

}  // namespace moebius::cuda::sm80
