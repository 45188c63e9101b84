// The parameters of the adapter of a matrix W: names, shapes and the parts that tp, ep and etp split.
//
// W may hold several maps that read the same x, one below the other, as q, k and v are. Each of them
// that lora.targets names has matrices A and B of its own. Their A are stored one below the other, and
// so are their B. Of experts there are such matrices for each expert.
//
//   W  model.layers.0.self_attn.q_proj.weight         [out, in]
//   A  model.layers.0.self_attn.q_proj.lora_A.weight  [rank, in], as W split over the ranks of in
//   B  model.layers.0.self_attn.q_proj.lora_B.weight  [out, rank], as W split over the ranks of out
//
// These are the names of PEFT (hub/peft.h) without its prefix.
#pragma once

#include <string>
#include <vector>

#include "config/lora_spec.h"
#include "model/params.h"

namespace moebius {

// A map of W that has an adapter: its outputs are the columns [column, column + count) of y, and its B
// is the rows [row, row + count).
struct AdapterBlock {
  int64_t column = 0, row = 0, count = 0;
  std::string name;  // the same on every rank: that of the matrix, or of experts "...experts.gate_up_proj.1"
};

struct AdapterParams {
  std::vector<AdapterBlock> blocks;  // none: W has no adapter, and a and b are not to be declared
  ParamSpec a, b;
};

// The adapter of a matrix [out, in], or of those of the experts here [e, out, in]. Error{usage} when
// some experts of a layer are targets and others not.
AdapterParams adapter_params(const LoraSpec& lora, const ParamSpec& w);

// Returns whether one of the patterns matches the name of a matrix, without ".weight", or its end
// after a dot: "q_proj", "mlp.experts.*", "model.layers.0.*".
bool is_lora_target(const std::vector<std::string>& targets, const std::string& matrix);

inline constexpr const char *kLoraA = ".lora_A.weight", *kLoraB = ".lora_B.weight";
// The name of the matrix, without ".weight", that a part of an adapter belongs to.
std::string adapted_matrix(const std::string& adapter_part);

}  // namespace moebius
