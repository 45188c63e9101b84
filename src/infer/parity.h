// Runs one forward pass, and on request one backward pass, over given tokens, and writes all
// results to a file.
// The file serves to compare a model with another implementation of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "core/tensor.h"
#include "device/kernel_choice.h"
#include "weights/not_finite.h"
#include "weights/source.h"

namespace moebius {

struct ParitySpec {
  std::string out;    // safetensors file to write
  std::string model;  // path of the model, as in weights/load.h
  AddedAdapter adapter = {};
  std::string tokens;  // safetensors file with `tokens` I32 or I64 [B, S], and optionally `doc_start` of the same shape
  bool gradients = false;
  double mtp_coeff = 0.0;  // weight of multi-token prediction in the objective of the gradients; 0: without it
  DType compute = DType::f32;
  DeviceKind device = DeviceKind::cpu;
  KernelChoice kernels = KernelChoice::automatic;  // kernels that a GPU uses
  int threads = 1;
};

struct ParityResult {
  double loss = 0;
  int64_t batch = 0, seq = 0;
  std::vector<NotFinite> not_finite;  // non-finite weights, for a warning
  std::string fallback_kernels;       // the text of Engine::fallback_kernels_text()
};

// Writes these tensors to the file:
//   logits F32 [B,S,V]
//   loss F32 [1], the mean next-token cross-entropy over B (S-1) targets, without auxiliary losses
//   router.{layer}.topk I32 [B*S, k] of each MoE layer
//   grad.{hugging face name} F32 of each trained tensor, with gradients; with an adapter these are
//   its A and B, as grad.{module}.lora_A.weight
//   mtp_loss F32 [1], the mean over the depths, with mtp_coeff
//   mtp.{depth - 1}.logits like logits, with mtp_coeff
// With mtp_coeff the gradients are those of loss + mtp_coeff * mtp_loss.
// doc_start has, for each token, the index in the row of its document's first token. Positions
// restart there, and attention does not cross documents. Targets that cross a border still count.
// Throws Error{input} for tokens outside the vocabulary and for an invalid doc_start.
ParityResult write_parity(const ParitySpec& spec);

// The tokens of the file, checked.
struct ParityTokens {
  int64_t batch = 0, seq = 0;
  std::vector<int32_t> token, doc_start;  // [batch * seq] each
};
ParityTokens read_parity_tokens(const std::string& path, const ModelSpec& model);

}  // namespace moebius
