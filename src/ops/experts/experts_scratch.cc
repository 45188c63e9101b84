#include "ops/experts/experts_scratch.h"

#include "ops/experts/experts_backends.h"

namespace moebius::cuda {

int64_t scratch_bytes(const ExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertDown&) { return 0; }
int64_t scratch_bytes(const DExpertDown& a) { return num_dweight_partials(a) * a.dweight_R.numel() * 4; }
int64_t scratch_bytes(const DExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertWgrad& a) {
  return a.dw_eMN.dtype == DType::bf16 ? kMaxWgradBlocks * kWgradTileBytes : 0;
}

}  // namespace moebius::cuda
