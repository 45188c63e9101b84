// Adapters of routed experts in PEFT's format for transformers 5, where all experts of a layer are one parameter, which
// target_parameters of adapter_config.json names:
//
//   mlp.experts.gate_up_proj [E, 2I, H]   A [E * rank, H]   B [2I, rank * E]
//   mlp.experts.down_proj    [E, H, I]    A [E * rank, I]   B [H, rank * E]
//
// Row e * rank + j of A is row j of the A of expert e, and column j * E + e of B is column j of its B.
// Rows of gate_up_proj's B are those of gate, then those of up; in gpt_oss they alternate.
// So gate and up of an expert share one A (model/lora/adapter_params.h). If each has its own, the tensors have twice
// the rank: the A of gate above the A of up, and a B with 0 where rows of gate meet columns of up, and the reverse.
// PEFT 0.21 with transformers 5 trains target_modules of gate_proj and up_proj in the same shapes and without these
// zeros: gate and up share an A of twice the rank.
//
// PEFT before 0.19 interprets each [out, in] of the parameter as [in, out], which is right only for gpt_oss. In its
// adapters of other families A and B are exchanged: A [E * rank, 2I] and B [H, rank * E] of gate_up_proj. Such
// adapters are read, not written.
//
// Names do not identify the parameters: PEFT wraps gate_up_proj first, so its tensors are those of
// "mlp.experts.base_layer" if down_proj has an adapter too, and else of "mlp.experts". Shapes identify them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/fused_experts.h"
#include "hub/hf_names.h"
#include "io/safetensors.h"

namespace moebius {

// The sizes that determine where the adapters of experts are stored.
struct ExpertAdapters {
  HfFamily family = HfFamily::canonical;
  int64_t num_experts = 0, hidden = 0, intermediate = 0, rank = 0;
  bool is_exchanged = false;  // written by PEFT before 0.19
  bool has_down = true;       // whether down_proj of the layer has an adapter, which changes names
  bool are_stacked = false;   // whether gate_proj and up_proj of the layer each have their own A
  bool share_wide_a = false;  // whether they share an A of twice the rank
  int64_t rank_of_gate_up() const { return are_stacked || share_wide_a ? 2 * rank : rank; }
};

enum class ExpertMatrix : uint8_t { gate_up, down };

// Returns the place of one expert's A or B, which is [rank, in] or [out, rank], or has twice the rank where
// share_wide_a. part: its canonical name,
// "{prefix}mlp.experts.{e}.gate_up_proj.lora_A.weight", "...gate_proj.lora_B.weight" and so on. The name of the place
// is that of the tensor without PEFT's prefix. Returns nothing for other names. gate_proj or up_proj may have its own
// A where they are stacked, or where the other one has no adapter.
std::optional<FusedPlace> expert_adapter_place(const ExpertAdapters& x, const std::string& part);

// Returns the layer's prefix for a module of experts; nothing for other modules.
std::optional<std::string> layer_of_expert_adapter(std::string_view module);

// The tensors of one wrapper.
struct ExpertAdapterPair {
  std::string prefix;  // prefix of the layer's names
  SafetensorsEntry a, b;
};

// Returns whether the adapters were written by PEFT before 0.19. The shapes of one pair show it, unless all of them fit
// both orders; then `version` of PEFT ("0.18.1") decides. Throws Error{input} naming `who` when a pair has another
// shape, and when two pairs disagree.
bool is_exchanged(const ExpertAdapters& x, const std::vector<ExpertAdapterPair>& pairs, const std::string& version,
                  const std::string& who);
// REQUIRES of these: is_exchanged() accepted the pair.
ExpertMatrix matrix_of_pair(const ExpertAdapters& x, const ExpertAdapterPair& pair);
bool is_stacked(const ExpertAdapters& x, const ExpertAdapterPair& pair);
// Returns whether the B of a stacked pair, as it is stored, is 0 outside the two blocks.
bool has_two_blocks(const ExpertAdapters& x, const std::vector<std::byte>& b, DType dtype);

// Returns the canonical names of the parts that a pair holds. x: with are_stacked or share_wide_a where is_stacked().
std::vector<std::string> parts_of_pair(const ExpertAdapters& x, const ExpertAdapterPair& pair);

}  // namespace moebius
