// The host side of the grouped products of compute capability 8.0 and later.
#pragma once

#include "core/tensor.h"
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/grouped_gemm/sm80/kernel.h"

namespace moebius::cuda::sm80 {

// Returns whether rows and chunks can be counted in 32 bits, including those of tiles past the last row.
inline bool takes_matrix(const Tensor& t) {
  return t.dtype == DType::bf16 && t.dim(0) < INT32_MAX / 2 && t.numel() / 8 < INT32_MAX;
}
inline bool takes_weights(const Tensor& t) {
  return t.dtype == DType::bf16 && t.dim(0) <= kMaxPortableExperts && t.dim(1) * t.dim(2) / 8 < INT32_MAX;
}

inline uint16_t* halves(const Tensor& t) { return static_cast<uint16_t*>(t.data); }
inline RowWidth width_of(const Tensor& rows) {
  const int64_t width = rows.shape[rows.shape.rank() - 1];
  return {.elements = static_cast<uint32_t>(width),
          .chunks = static_cast<uint32_t>(div_ceil(width, 8)),
          .unit = copy_unit(rows.data, width)};
}
// Returns whether all of the rows are in chunks.
inline bool is_in_chunks(const Tensor& rows) { return width_of(rows).unit == 16; }
template <class... Tensors>
bool are_in_chunks(const Tensors&... rows) {
  return (is_in_chunks(rows) && ...);
}

// Allows a kernel all the shared memory that its GPU has, once.
template <class Op>
struct PortableLaunch {
  bool is_allowed = false;
};

template <class Op>
void launch_portable(Stream& s, const typename Op::Params& p, const char* who) {
  constexpr PortableGemmConfig kConfig = Op::kConfig;
  const GpuLimits& limits = gpu_limits(s);
  const auto shared_bytes = narrow<int>(kConfig.shared_bytes(p.tiles.num_experts));
  PortableLaunch<Op>& state = op_state<PortableLaunch<Op>>(s);
  if (!state.is_allowed) {
    MOEBIUS_CUDA(cudaFuncSetAttribute(portable_gemm_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      narrow<int>(query_gpu_limits().shared_bytes_per_block)));
    state.is_allowed = true;
  }
  const int64_t blocks_each = blocks_of_multiprocessor(kConfig, p.tiles.num_experts, limits);
  const int blocks = limited_blocks(s, narrow<int>(limits.num_multiprocessors * blocks_each));
  portable_gemm_kernel<Op><<<blocks, kConfig.threads(), shared_bytes, cuda_stream(s)>>>(p);
  check_launch(who);
}

// Calls body<config, in_chunks>() for the config that the product gets on this GPU. in_chunks: all rows of its operands
// and results are in chunks.
template <class Body>
void with_portable_config(const Stream& s, const GroupedGemmDesc& desc, bool in_chunks, Body&& body) {
  if (!in_chunks) return body.template operator()<kPortableSmall, false>();
  const PortableGemmConfig config = choose_portable_config(desc, gpu_limits(s));
  if (config == kPortablePair) return body.template operator()<kPortablePair, true>();
  if (config == kPortableDeep) return body.template operator()<kPortableDeep, true>();
  if (config == kPortableWide) return body.template operator()<kPortableWide, true>();
  MOEBIUS_ASSERT(config == kPortableSmall);
  body.template operator()<kPortableSmall, true>();
}

}  // namespace moebius::cuda::sm80
