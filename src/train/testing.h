// For the tests of this folder: a tiny model and run, and datasets for them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "config/run_spec.h"
#include "core/rng.h"
#include "data/token_data.h"
#include "io/testing.h"

namespace moebius::testing {

// Returns a run of a model of odd sizes; 2 sequences of 7 tokens at a time, 4 per step.
inline RunSpec tiny_run() {
  RunSpec run;
  run.model = model_spec_from_hf({{"model_type", "mixtral"},
                                  {"vocab_size", 11},
                                  {"hidden_size", 8},
                                  {"intermediate_size", 5},
                                  {"num_hidden_layers", 1},
                                  {"num_attention_heads", 2},
                                  {"num_key_value_heads", 1},
                                  {"num_local_experts", 3},
                                  {"num_experts_per_tok", 2},
                                  {"initializer_range", 0.5},
                                  {"max_position_embeddings", 16}},
                                 "test");
  run.precision.compute = DType::f32;
  run.train.seq_len = 7;
  run.train.micro_batch = 2;
  run.train.global_batch = 4;
  return run;
}

// Random ids below 11 in documents of 5 tokens; returns the prefix.
inline std::string write_dataset(const TestDir& dir, const std::string& name, int64_t tokens) {
  TokenDatasetWriter writer(dir.path(name), TokenType::u16);
  const Rng rng(5, RngSite::bench, static_cast<uint64_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) {
    const auto id = static_cast<int32_t>(rng.below(i, 11));
    writer.add_tokens({&id, 1});
    if (i % 5 == 4 || i == tokens - 1) writer.end_document();
  }
  writer.close();
  return dir.path(name);
}

}  // namespace moebius::testing
