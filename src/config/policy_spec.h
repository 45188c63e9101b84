// Policies of a step that do not change what is computed: precision and recompute.
#pragma once

#include <utility>

#include "core/dtype.h"

namespace moebius {

struct PrecisionSpec {
  DType compute = DType::bf16;  // f32 | bf16; master weights, gradients and optimizer state are f32
  bool operator==(const PrecisionSpec&) const = default;
};

// The tensors that backward recomputes, so that forward need not keep them. The bits are the same;
// a step takes less memory and more time.
struct RecomputeSpec {
  bool norm = false;           // outputs of a layer's norms
  bool qkv = false;            // queries, keys and values, the outputs of their projection
  bool attention = false;      // attention's output
  bool mlp = false;            // pre-activations of dense feed-forward layers
  bool shared_expert = false;  // pre-activations of shared experts, and their gated output
  bool expert_up = false;      // pre-activations of the experts
  bool layer = false;          // all of these and the residual between attention and feed-forward
  bool operator==(const RecomputeSpec&) const = default;
};

// The names that memory.recompute has for them.
inline constexpr std::pair<const char*, bool RecomputeSpec::*> kRecomputeNames[] = {
    {"norm", &RecomputeSpec::norm},
    {"qkv", &RecomputeSpec::qkv},
    {"attention", &RecomputeSpec::attention},
    {"mlp", &RecomputeSpec::mlp},
    {"shared_expert", &RecomputeSpec::shared_expert},
    {"expert_up", &RecomputeSpec::expert_up},
    {"layer", &RecomputeSpec::layer}};

struct MemorySpec {
  RecomputeSpec recompute;
  bool operator==(const MemorySpec&) const = default;
};

}  // namespace moebius
