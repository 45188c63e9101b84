// An A that gate_proj and up_proj of a routed expert share. They have one where lora.targets names gate_up_proj and
// neither of the two, as where PEFT adapts the tensor of all experts (hub/peft_experts.h):
//
//   A  model.layers.0.mlp.experts.3.gate_up_proj.lora_A.weight   [rank, in]
//   B  model.layers.0.mlp.experts.3.gate_proj.lora_B.weight      [out, rank], and the same of up_proj
//
// The two are then one block of the adapter (AdapterBlock in adapter_params.h).
#pragma once

#include <string>

namespace moebius {

// Returns the name of gate_up_proj for gate_proj and up_proj of a routed expert, and the name itself for other
// matrices. Names are without ".weight".
std::string matrix_of_shared_a(const std::string& matrix);

}  // namespace moebius
