// The host side of the grouped products on sm_90a.
#pragma once

#include "core/tensor.h"
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/grouped_gemm/sm90/kernel.h"
#include "ops/grouped_gemm/sm90/tiles.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {

// The requirements of the copy engine and of 16-byte accesses: bf16, rows of a multiple of 16
// bytes, at such an address.
inline bool takes_rows(const Tensor& t) {
  return t.dtype == DType::bf16 && t.shape[t.shape.rank() - 1] % 8 == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Rows are counted in 32 bits, including those of tiles past the last one.
inline bool takes_num_rows(const Tensor& t) { return t.dim(0) < INT32_MAX - 2 * kSm90Rows.tile_m; }

// The tensor map of a matrix of rows of A, in boxes of the size of a slot.
inline CUtensorMap rows_map(const Tensor& t, const GroupedGemmConfig& config) {
  const auto tile_k = static_cast<uint32_t>(config.tile_k), tile_m = static_cast<uint32_t>(config.tile_m);
  return make_tensor_map<2>(t.data, {{{t.dim(1), 1, tile_k}, {t.dim(0), t.dim(1), tile_m}}});
}

// The launch parameters of a kernel, found once on a device.
template <class Op>
struct GroupedLaunch {
  int blocks =
      sm90::persistent_blocks(reinterpret_cast<const void*>(&grouped_gemm_kernel<Op>), GemmShared<Op::kConfig>::kBytes);
};

template <class Op>
void launch_grouped(Stream& s, const typename Op::Params& p, const char* who) {
  const int blocks = limited_blocks(s, op_state<GroupedLaunch<Op>>(s).blocks);
  grouped_gemm_kernel<Op><<<blocks, Op::kConfig.threads, GemmShared<Op::kConfig>::kBytes, cuda_stream(s)>>>(p);
  check_launch(who);
}

}  // namespace moebius::cuda
