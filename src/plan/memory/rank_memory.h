// The memory of a rank of any layout, as its engine would plan it (memory/plan.h), from the parts of
// its stages. No engine is built.
#pragma once

#include <array>
#include <map>

#include "parallel/optim/kept_states.h"
#include "plan/layout.h"
#include "plan/part.h"

namespace moebius {

struct RankMemory {
  int64_t pp_rank = 0;
  std::array<int64_t, kNumLives> life{};  // planned bytes by life
  int64_t unplanned_bytes = 0;            // device memory outside the plan: workspaces and kernels of a GPU
  int64_t spill_bytes = 0;                // host memory for expert rows beyond their budget, in the worst case
  int64_t total() const;                  // device memory: everything but Life::host and spill_bytes
  int64_t host_bytes() const { return of(Life::host) + spill_bytes; }
  int64_t of(Life l) const { return life[static_cast<size_t>(l)]; }
};

// The parameters of a rank, and the bytes that exchanging them sends.
struct RankParams {
  int64_t owned = 0;         // elements that this rank's optimizer updates
  int64_t held = 0;          // elements of this rank that have a gradient
  int64_t stored_first = 0;  // elements whose gradients the first micro-batch of a step stores
  int64_t sums_apart = 0;    // elements whose gradients it accumulates in bf16
  int64_t logits = 0;        // with QK-clip: elements that dp_cp ranks exchange (PartWork::logits)
  // Bytes that this rank sends, by axis, to reduce gradients and gather weights, and the number of buckets. Sharded
  // layers are not included (plan/sharding/sharded_layers.h).
  std::map<Axis, double> grad_wire_bytes, weight_wire_bytes;
  std::map<Axis, int64_t> grad_buckets, weight_buckets;
  // With Muon: elements of the matrices that it updates, the work on whole matrices, and the exchange before that.
  int64_t owned_of_matrices = 0;
  PassWork matrices;
  std::map<Axis, double> matrix_wire_bytes;
  std::map<Axis, int64_t> matrix_buckets;
  // With precision.weights = "recipe": elements that it quantises, and the exchange of magnitudes before that.
  int64_t quantised = 0;
  std::map<Axis, double> magnitude_wire_bytes;
  std::map<Axis, int64_t> magnitude_buckets;
};

// REQUIRES: layout is that of the parts' spec.
RankMemory rank_memory(LayoutParts& parts, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank);
// Returns the states of the parameters that a rank trains, in the order of their declaration.
std::vector<StatesOf> states_of_rank(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);
RankParams rank_params(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);

// Returns the layout of a resolved spec's stages.
StageLayout stages_of(const EngineSpec& spec);

}  // namespace moebius
