// The parameters of the adapter of a matrix W: their names, shapes, and the parts that tp, ep and etp split.
//
// W may consist of several matrices that read the same x, stacked by rows, such as q, k and v. Each of these that
// lora.targets names has its own A and B. The A matrices are stacked by rows, and so are the B matrices. Each expert
// has an A and a B.
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

// A matrix of W that has an adapter. Its outputs are the columns [column, column + count) of y, and its B is rows
// [row, row + count) of the stacked Bs.
struct AdapterBlock {
  int64_t column = 0, row = 0, count = 0;
  std::string name;  // name of the matrix, the same on every rank; of experts "...experts.gate_up_proj.1"
};

struct AdapterParams {
  std::vector<AdapterBlock> blocks;  // empty: W has no adapter, and a and b must not be declared
  ParamSpec a, b;
};

// Returns the adapter of a matrix [out, in], or of this rank's experts [e, out, in]. Throws Error{usage} when some
// experts of a layer are targets and others are not.
AdapterParams adapter_params(const LoraSpec& lora, const ParamSpec& w);

// Returns whether a pattern matches the name of a matrix without ".weight", or the end of the name after a dot:
// "q_proj", "mlp.experts.*", "model.layers.0.*".
bool is_lora_target(const std::vector<std::string>& targets, const std::string& matrix);

inline constexpr const char *kLoraA = ".lora_A.weight", *kLoraB = ".lora_B.weight";
// Returns the name of the matrix, without ".weight", that a part of an adapter belongs to.
std::string adapted_matrix(const std::string& adapter_part);

}  // namespace moebius
