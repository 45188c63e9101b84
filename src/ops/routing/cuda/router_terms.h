// The parts that the router's kernels for the tensor cores share: matrices as sums of bf16 terms,
// and their tensor maps.
#pragma once

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/sm90/sm90.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {

constexpr int kGateRows = 128, kGateDepth = 64, kBoxBytes = 64 * 128;  // a box: 64 rows of 128 bytes
constexpr int kGateGroups = 2, kMultipliers = kGateGroups * 128;       // warpgroups of a block that multiply

// Boxes of 64 elements of `rows` rows of all terms.
inline CUtensorMap map_of(const GateOperand& x, int rows, int terms) {
  return make_tensor_map<3>(x.data, {BoxDim{x.width, 1, 64}, BoxDim{x.rows, x.width, static_cast<uint32_t>(rows)},
                                     BoxDim{terms, x.rows * x.width, static_cast<uint32_t>(terms)}});
}

inline int num_multiprocessors(const Stream& s) {
  int device = 0, count = 0;
  MOEBIUS_CUDA(cudaGetDevice(&device));
  MOEBIUS_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return limited_blocks(s, count);
}

// sm90/router_dx.cu: dx += dlogits w, for at most kMaxExpertsOfDx experts. dlogits has 2 terms, w
// as many as said.
constexpr int64_t kMaxExpertsOfDx = 256;
void add_router_dx(Stream& s, const Tensor& dx_TD, const GateOperand& dlogits, const GateOperand& w, int terms_of_w);

}  // namespace moebius::cuda
