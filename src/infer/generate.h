// Text generation: one sequence, token by token, with keys and values cached.
//
// On several ranks all call these together with the same words, and get the same. Heads, experts and layers lie where
// the mesh says, and each rank caches what its heads of its layers need; ranks of dp compute the same sequence, whose
// experts they share. A token goes through the stages of a pipeline one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace moebius {

// How the next token is drawn from the logits.
struct Sampling {
  double temperature = 1.0;  // 0: the most likely token
  double top_p = 1.0;        // the draw is among the most likely tokens that together have this probability
  uint64_t seed = 0;
};

// One of ids [0, logits.size()). The draw is a pure function of logits, sampling and position (the token's index in the
// sequence); ties go to the lower id.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position);

struct GenerateSpec {
  int64_t max_tokens = 256;
  Sampling sampling;
  int32_t end_id = -1;  // ends the text; -1: none does
  int64_t num_ids = 0;  // ids that may come: those the tokenizer knows; 0: the vocabulary
};

struct Generated {
  std::vector<int32_t> tokens;  // without the end id
  bool ended = false;           // by the end id, not by max_tokens
};

// An engine for sequences of up to context tokens. The prompt is taken in chunks of about `chunk` tokens at most: tp
// ranks take theirs in equal parts. Error{usage} with cp > 1, which would have nothing to split.
EngineSpec generation_engine_spec(const ModelSpec& model, DType compute, int64_t context, int threads,
                                  int64_t chunk = 256, const MeshShape& mesh = {});

// Feeds tokens at positions first, first + 1, ...; those before must be cached already. logits, one for each id of the
// vocabulary, are those after the last token, on the ranks that have the head.
void feed_tokens(Engine& engine, std::span<const int32_t> tokens, int64_t first, std::span<float> logits);

// Continues the prompt. on_token, unless empty, sees each token as it comes. Error{usage} for an empty prompt, for
// settings out of range and when prompt and max_tokens do not fit the engine's context; Error{input} for a prompt's id
// outside the vocabulary.
Generated generate(Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                   const std::function<void(int32_t)>& on_token = {});

}  // namespace moebius
