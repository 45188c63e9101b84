// generation_config.json of a model's folder, as transformers writes it: where texts end, and how tokens are drawn.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "infer/sampling.h"

namespace moebius {

// The rules of Sampling that are given, by the command line or by a model's folder.
struct SamplingChoices {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
};

struct GenerationConfig {
  std::vector<int32_t> end_ids;  // eos_token_id, an id or a list of them
  SamplingChoices sampling;
};

// Returns an empty one if `dir` is empty or has no such file. Ids outside [0, vocab_size) are left out, and so are the
// rules that `given` has. With "do_sample": false the temperature is 0.
// Throws Error{input} that names the file and the key for values that are not ids or numbers, or out of range.
GenerationConfig read_generation_config(const std::string& dir, int64_t vocab_size, const SamplingChoices& given);

// Returns the rules of `given`, and for those that it lacks the rules of `otherwise`, or the defaults of Sampling.
Sampling sampling_of(const SamplingChoices& given, const SamplingChoices& otherwise);

// Returns the rules of `otherwise` that `given` lacks, such as "temperature 0.6, top-k 20"; empty if there are none. At
// temperature 0 the rules that have no effect are left out.
std::string added_rules(const SamplingChoices& given, const SamplingChoices& otherwise);

}  // namespace moebius
