// The masters and moments that stay in device memory with optimizer.offload: as many as optimizer.offload_buffer holds.
// They never cross the link to the host, so an update takes less time by their share of the bytes. They are those of
// the parameters that a forward pass reads first, since its first layers then begin while the rest is still moved.
#pragma once

#include <span>
#include <vector>

#include "config/train_spec.h"
#include "model/params.h"

namespace moebius {

// A parameter with what decides the size of its states.
struct StatesOf {
  DType weights = DType::bf16;  // dtype of the weights that ops read
  int64_t count = 0;            // elements that this rank owns
  bool of_matrices = false;     // is_of_matrices()
  bool has_blocks = false;      // moments may be 8-bit codes
};
StatesOf states_of(const Param& p);

// Returns the bytes that a master and moments take in a plan, at most: each tensor is rounded up to 1 KiB.
int64_t states_bytes(const OptimizerSpec& spec, const StatesOf& of);

// Returns for each parameter whether its states stay on the device. params: those that train, in the order of their
// declaration. A parameter that does not fit is left out, and later ones may still fit.
std::vector<bool> kept_states(const OptimizerSpec& spec, std::span<const StatesOf> params);

// Marks these parameters (Param::keeps_states), whose masters move to device memory. Call it after make_sharding(), and
// before make_optimizer().
void keep_states(const OptimizerSpec& spec, ParamTable& params);

}  // namespace moebius
