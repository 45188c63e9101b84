#include "plan/cost/update_cost.h"

#include "parallel/optim/optimizer.h"

namespace moebius {

double update_bytes(const OptimizerSpec& optimizer) {
  const double kept = static_cast<double>(master_bytes(optimizer, DType::bf16)) + state_bytes(optimizer);
  const int64_t weight = optimizer.master == MasterFormat::f32 ? 2 : 4;  // which is read too, unless it has a master
  return static_cast<double>(4 + weight + 4) + 2 * kept;
}

double host_update_bytes(const OptimizerSpec& optimizer) {
  const double kept = static_cast<double>(master_bytes(optimizer, DType::bf16)) + state_bytes(optimizer);
  return (optimizer.offload ? kept : 0) + (optimizer.offload_grad ? 2 : 0);
}

}  // namespace moebius
