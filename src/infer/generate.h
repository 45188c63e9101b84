// Text generation, token by token, for several sequences at once, with a key-value cache.
//
// All ranks call these functions together with equal arguments, and get equal results. The mesh divides heads, experts
// and layers; each rank caches keys and values of its own heads and layers. dp ranks compute the same sequences, and
// share the experts. A token passes the stages of a pipeline one after another.
//
// On CPUs the bits of a sequence do not depend on the other sequences, unless products are quantised or the model is
// divided among ranks: prompts are fed one after another, and decoding uses products with independent rows
// (Gemm::few_rows in ops/gemm/gemm.h).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "infer/sampling.h"

namespace moebius {

struct GenerateSpec {
  int64_t max_tokens = 256;
  Sampling sampling;
  std::vector<int32_t> end_ids;  // each of them ends the text
  int64_t num_ids = 0;           // ids that may be drawn, those of the tokenizer; 0: the whole vocabulary
  bool reuse_cache = false;      // reuses the cached prefix that a prompt shares with the call before
};

struct Generated {
  std::vector<int32_t> tokens;  // the end id is not included
  bool ended = false;           // by an end id or by on_token, not by max_tokens
};

// The tokens and the time of Generator::run.
struct GenerateTimes {
  int64_t prompt_tokens = 0;  // tokens of prompts that were computed, without cached ones
  double prompt_s = 0;        // includes the first token of each text
  int64_t tokens = 0;         // the later ones
  double tokens_s = 0;
};

// The maximum number of sequences at once (kFewRows of ops/gemm/gemm.h).
constexpr int64_t kMaxSequences = 32;

// Returns the spec of an engine for that many sequences of up to context tokens each.
// A prompt is fed in chunks of at most about `chunk` tokens, of which tp ranks take equal parts.
// Throws Error{usage} with cp > 1, which has nothing to split, and for sequences outside
// [1, kMaxSequences].
EngineSpec generation_engine_spec(const ModelSpec& model, DType compute, int64_t context, int threads,
                                  int64_t chunk = 256, const MeshShape& mesh = {}, int64_t sequences = 1);

// Feeds tokens of a sequence at positions first, first + 1, ... Earlier positions must be cached
// already. On the ranks that have the head, `logits` receives those after the last token, one for each
// id of the vocabulary.
void feed_tokens(Engine& engine, std::span<const int32_t> tokens, int64_t first, std::span<float> logits,
                 int64_t sequence = 0);

class Generator {
 public:
  explicit Generator(Engine& engine);

  // Receives each new token, and the index of its prompt. Returns false to end that text.
  using OnToken = std::function<bool(size_t prompt, int32_t id)>;
  // Receives each text once it is complete.
  using OnEnd = std::function<void(size_t prompt, const Generated& text)>;
  // Continues the prompts. The number of texts that are generated at the same time is the engine's number of
  // sequences. When one ends, the next prompt takes its place.
  // Throws Error{usage} for an empty prompt, for settings out of range, and when a prompt and
  // max_tokens do not fit the engine's context.
  // Throws Error{input} for an id of a prompt outside the vocabulary.
  std::vector<Generated> run(const GenerateSpec& spec, std::span<const std::vector<int32_t>> prompts,
                             const OnToken& on_token = {}, const OnEnd& on_end = {});
  const GenerateTimes& times() const { return times_; }  // of the last run()

 private:
  class Run;
  Engine& engine_;
  std::vector<std::vector<int32_t>> cached_;  // the tokens that the cache holds of each sequence
  GenerateTimes times_;
};

// Continues one prompt. on_token, unless empty, is called with each new token.
Generated generate(Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                   const std::function<void(int32_t)>& on_token = {});

}  // namespace moebius
