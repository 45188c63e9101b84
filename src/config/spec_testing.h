// Shared by the tests of this folder: a tiny model and the text of an expected error.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "config/model_spec.h"
#include "core/error.h"

namespace moebius {

// Odd sizes, every number different: 3 layers, the first dense; 3 experts, top 2, a gated shared expert.
inline ModelSpec tiny_model() {
  return {.vocab_size = 11,
          .hidden_size = 12,
          .num_layers = 3,
          .num_heads = 2,
          .num_kv_heads = 1,
          .head_dim = 4,
          .intermediate_size = 20,
          .max_position_embeddings = 33,
          .qk_norm = true,
          .moe_layers = {false, true, true},
          .num_experts = 3,
          .top_k = 2,
          .moe_intermediate_size = 6,
          .shared_intermediate_size = 5,
          .shared_expert_gate = true};
}

// The text of the Error that call throws; the test fails when it throws none or one of another kind.
inline std::string error_text(ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace moebius
