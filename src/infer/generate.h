// Text generation: one sequence, token by token, with cached keys and values.
//
// With several ranks, all ranks call these functions together with equal arguments, and get equal
// results. Heads, experts and layers are divided by the mesh, and each rank caches keys and values
// of its heads in its layers.
// Ranks of dp compute the same sequence and share its experts. A token passes through the stages of
// a pipeline one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace moebius {

// The rule by which the next token is drawn from the logits.
struct Sampling {
  double temperature = 1.0;  // 0: the most likely token
  double top_p = 1.0;        // draws among the most likely tokens that together have this probability
  uint64_t seed = 0;
};

// Returns an id in [0, logits.size()). The draw is a pure function of logits, sampling and
// position, where position is the token's index in the sequence.
// Ties go to the lower id.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position);

struct GenerateSpec {
  int64_t max_tokens = 256;
  Sampling sampling;
  int32_t end_id = -1;  // ends the text; -1: no id does
  int64_t num_ids = 0;  // ids that may be drawn, those of the tokenizer; 0: the whole vocabulary
};

struct Generated {
  std::vector<int32_t> tokens;  // without the end id
  bool ended = false;           // by the end id, not by max_tokens
};

// Returns the spec of an engine for sequences of up to context tokens.
// The prompt is fed in chunks of at most about `chunk` tokens, of which tp ranks take equal parts.
// Throws Error{usage} with cp > 1, because it could split nothing.
EngineSpec generation_engine_spec(const ModelSpec& model, DType compute, int64_t context, int threads,
                                  int64_t chunk = 256, const MeshShape& mesh = {});

// Feeds tokens at positions first, first + 1, ... Earlier positions must be cached already.
// On the ranks that have the head, `logits` receives those after the last token, one for each id of
// the vocabulary.
void feed_tokens(Engine& engine, std::span<const int32_t> tokens, int64_t first, std::span<float> logits);

// Continues the prompt. on_token, unless empty, is called with each new token.
// Throws Error{usage} for an empty prompt, for settings out of range, and when prompt and
// max_tokens do not fit the engine's context.
// Throws Error{input} for an id of the prompt outside the vocabulary.
Generated generate(Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                   const std::function<void(int32_t)>& on_token = {});

}  // namespace moebius
