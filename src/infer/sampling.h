// Sampling: the rule by which the next token is drawn from the logits.
#pragma once

#include <cstdint>
#include <span>

namespace moebius {

// The rules apply in this order, as in transformers. A token of the text so far has its logit divided
// by repetition_penalty where it is positive, and multiplied by it where it is negative (Keskar et
// al., arXiv 1909.05858). Then probabilities are softmax(logits / temperature).
struct Sampling {
  double temperature = 1.0;         // 0: the most likely token
  int64_t top_k = 0;                // samples among this many of the most likely tokens; 0: all
  double top_p = 1.0;               // of these, keeps the fewest most likely that have this share of their probability
  double min_p = 0.0;               // of these, keeps those at least this many times as likely as the most likely one
  double repetition_penalty = 1.0;  // 1: none
  uint64_t seed = 0;
};

// Throws Error{usage} for settings out of range.
void check_sampling(const Sampling& sampling);

// Returns whether no rule changes logits, or leaves ids out. Then a token is drawn by ops/draw/draw.h.
bool is_plain(const Sampling& sampling);

// Throws the error of a position whose logits are not finite.
[[noreturn]] void fail_not_finite(int64_t position);

// Returns an id in [0, logits.size()). The draw is a pure function of logits, sampling, text and
// position, where position is the token's index in the sequence.
// Ties go to the lower id.
int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position,
                     std::span<const int32_t> text = {});

}  // namespace moebius
