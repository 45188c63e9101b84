// One forward and, when asked, one backward pass over given tokens, everything written to a file: how a model is
// compared with another implementation of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "core/tensor.h"
#include "weights/not_finite.h"

namespace moebius {

struct ParitySpec {
  std::string out;     // safetensors file to write
  std::string model;   // as in weights/load.h
  std::string tokens;  // safetensors file with `tokens` I32 or I64 [B, S], and maybe `doc_start` alike
  bool gradients = false;
  double mtp_coeff = 0.0;  // with gradients: of multi-token prediction in the objective; 0: without it
  DType compute = DType::f32;
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;
};

struct ParityResult {
  double loss = 0;
  int64_t batch = 0, seq = 0;
  std::vector<NotFinite> not_finite;  // of the weights, to be warned of
  std::string fallback_kernels;       // as Engine::fallback_kernels_text()
};

// Writes logits F32 [B,S,V]; loss F32 [1], the mean next-token cross-entropy over B (S-1) targets, without auxiliary
// losses; router.{layer}.topk I32 [B*S, k] of each MoE layer; and with gradients grad.{hugging face name} F32 of each
// trained tensor. With mtp_coeff the gradients are of loss + mtp_coeff * mtp_loss, and there are mtp_loss F32 [1], the
// mean over the depths, and mtp.{depth - 1}.logits like logits. doc_start: index in the row of the first token of each
// token's document; positions restart there and nothing attends across, while the targets that cross a border still
// count. Error{input} for tokens outside the vocabulary and for doc_start that is none.
ParityResult write_parity(const ParitySpec& spec);

// The file's tokens, checked.
struct ParityTokens {
  int64_t batch = 0, seq = 0;
  std::vector<int32_t> token, doc_start;  // [batch * seq] each
};
ParityTokens read_parity_tokens(const std::string& path, const ModelSpec& model);

}  // namespace moebius
