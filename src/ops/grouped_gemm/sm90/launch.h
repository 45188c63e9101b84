// The host side of the grouped products on sm_90a.
#pragma once

#include "core/tensor.h"
#include "device/cuda/cuda.h"
#include "ops/grouped_gemm/sm90/kernel.h"
#include "ops/grouped_gemm/sm90/tiles.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {

// Checks the requirements of the copy engine and of 16-byte accesses: bf16, rows of a multiple of 16
// bytes, at such an address.
inline bool takes_rows(const Tensor& t) {
  return t.dtype == DType::bf16 && t.shape[t.shape.rank() - 1] % 8 == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Returns whether rows can be counted in 32 bits, including those of tiles past the last one.
inline bool takes_num_rows(const Tensor& t) { return t.dim(0) < INT32_MAX - 2 * kSm90Rows.tile_m; }

// Maps of operands have elements of bf16, or of 8 bits.
inline MapOptions operand_map(const GroupedGemmConfig& config) {
  if (config.element_bytes == 2) return {};
  return {.type = CU_TENSOR_MAP_DATA_TYPE_UINT8, .element_bytes = 1};
}

// Returns the tensor map of a matrix of rows of A, in boxes of the size of a slot.
inline CUtensorMap rows_map(const Tensor& t, const GroupedGemmConfig& config) {
  const auto tile_k = static_cast<uint32_t>(config.tile_k), tile_m = static_cast<uint32_t>(config.tile_m);
  return make_tensor_map<2>(t.data, {{{t.dim(1), 1, tile_k}, {t.dim(0), t.dim(1), tile_m}}}, operand_map(config));
}

// Returns the tensor map of weights B [e, N, K], in boxes of `columns` of the N.
inline CUtensorMap weights_map(const Tensor& t, const GroupedGemmConfig& config, int columns) {
  const auto tile_k = static_cast<uint32_t>(config.tile_k), tile_n = static_cast<uint32_t>(columns);
  const int64_t e = t.dim(0), N = t.dim(1), K = t.dim(2);
  return make_tensor_map<3>(t.data, {{{K, 1, tile_k}, {N, K, tile_n}, {e, N * K, 1}}}, operand_map(config));
}

// Returns the tensor map of weights B [e, K, N], which are MN-major: boxes of one column block and as many rows as a
// slot is deep.
inline CUtensorMap mn_major_weights_map(const Tensor& t, const GroupedGemmConfig& config) {
  const auto tile_k = static_cast<uint32_t>(config.tile_k);
  const int64_t e = t.dim(0), K = t.dim(1), N = t.dim(2);
  return make_tensor_map<3>(t.data, {{{N, 1, kMnMajorCols}, {K, N, tile_k}, {e, N * K, 1}}}, operand_map(config));
}

// Appends the K steps of the product of rows [R, L] with other weights to that of p, whose num_k is set. Empty weights:
// none. map_of(w) returns the map of weights w, in the boxes of p.b.
template <class Params, class MapOf>
void add_product(Params& p, const Tensor& rows_RL, const Tensor& w, const MapOf& map_of) {
  if (w.empty()) return;
  constexpr GroupedGemmConfig kConfig = kSm90Rows;  // the slots of all products of bf16 are its slots
  p.added = {.a = rows_map(rows_RL, kConfig),
             .b = map_of(w),
             .num_k = static_cast<int32_t>(div_ceil(rows_RL.dim(1), kConfig.tile_k))};
  p.num_k += p.added.num_k;
}

inline Gather gather_of(const Tensor& x, const Tensor& token_R) {
  return {static_cast<const char*>(x.data), token_R.empty() ? nullptr : token_R.ptr<int32_t>(),
          static_cast<int32_t>(x.dim(1) * size_of(x.dtype) / 16)};
}

// The launch parameters of a kernel, found once on a device.
template <class Op>
struct GroupedLaunch {
  int blocks =
      sm90::persistent_blocks(reinterpret_cast<const void*>(&grouped_gemm_kernel<Op>), GemmShared<Op::kConfig>::kBytes);
};

template <class Op>
void launch_grouped(Stream& s, const typename Op::Params& p, const char* who) {
  const int blocks = sm90::blocks_in_clusters(s, op_state<GroupedLaunch<Op>>(s).blocks);
  grouped_gemm_kernel<Op><<<blocks, Op::kConfig.threads, GemmShared<Op::kConfig>::kBytes, cuda_stream(s)>>>(p);
  check_launch(who);
}

}  // namespace moebius::cuda
