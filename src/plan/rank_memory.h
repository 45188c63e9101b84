// The memory of a rank of any layout, as its engine would plan it (memory/plan.h), from the parts of
// its stages. No engine is built.
#pragma once

#include <array>
#include <map>

#include "plan/layout.h"
#include "plan/part.h"

namespace moebius {

struct RankMemory {
  int64_t pp_rank = 0;
  std::array<int64_t, kNumLives> life{};  // bytes
  int64_t beside_bytes = 0;               // on a GPU: workspaces and kernels
  int64_t spill_bytes = 0;                // of the host: rows of experts beyond their budget, at the worst
  int64_t total() const;                  // of the device: all of it but Life::host and spill_bytes
  int64_t host_bytes() const { return of(Life::host) + spill_bytes; }
  int64_t of(Life l) const { return life[static_cast<size_t>(l)]; }
};

// The parameters of a rank, and the bytes that their exchange sends.
struct RankParams {
  int64_t owned = 0;         // elements that it updates
  int64_t held = 0;          // elements that have a gradient
  int64_t stored_first = 0;  // those of them that the first micro-batch of a step stores
  int64_t sums_apart = 0;    // those of them whose gradients are accumulated in bf16
  // Bytes that the exchange of gradients and of weights sends, by axis, and its buckets; without what is sharded
  // (plan/sharding/sharded_layers.h).
  std::map<Axis, double> grad_wire_bytes, weight_wire_bytes;
  std::map<Axis, int64_t> grad_buckets, weight_buckets;
  // With Muon: elements of matrices that it updates, the work of whole matrices, and what ranks exchange before it.
  int64_t owned_of_matrices = 0;
  PassWork matrices;
  std::map<Axis, double> matrix_wire_bytes;
  std::map<Axis, int64_t> matrix_buckets;
  // With precision.weights = "recipe": elements that it quantises, and what ranks exchange before it.
  int64_t quantised = 0;
  std::map<Axis, double> magnitude_wire_bytes;
  std::map<Axis, int64_t> magnitude_buckets;
};

// REQUIRES: layout is that of the parts' spec.
RankMemory rank_memory(LayoutParts& parts, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank);
RankParams rank_params(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);

// Returns the layout of a resolved spec's stages.
StageLayout stages_of(const EngineSpec& spec);

}  // namespace moebius
