// Draws the next token of texts from logits.
//
// Draws are in integers, so a GPU draws the same ids as the CPU from the same logits: the mass of id i is
//   floor(2^40 exp((logit[i] - largest) / temperature)),
// and the id is the first whose mass, with those of all lower ids, exceeds floor(u * the sum of all masses). u is a
// number in (0, 1). An id whose probability is below 2^-40 of the largest one is never drawn. With temperature 0 it is
// the id of the largest logit, of several the lowest.
#pragma once

#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The struct is plain data: it is copied whole to the device, so a replay of a CUDA graph reads new values.
struct DrawRule {
  double temperature = 1.0;
  int64_t num_ids = 0;                         // the ids [0, num_ids) are drawn from
  uint32_t key[2] = {}, counter_high[2] = {};  // key and counter of core/rng.h
};
// The uniform numbers are those of RngSite::sampling with this seed, indexed by the position of the drawn token.
DrawRule draw_rule(double temperature, int64_t num_ids, uint64_t seed);

// Draws an id for each row. The logits of row n are those after the token at position pos[n].
//   id[n] = the draw for position pos[n] + 1,    read[pos[n] % 2, n] = id[n],    pos[n] += 1
//
// Where one of a row's logits is not finite, its id is 0 and `read` gets -1. `read` may be pinned memory of the host,
// which then reads the ids of a call while the device runs the next one.
struct DrawTokens {
  Tensor id_N, read_2N;  // out, i32
  Tensor pos_N;          // inout, i32
  Tensor logits_NV;      // in, f32
  Tensor rule;           // in, u8 [sizeof(DrawRule)]: a DrawRule, with num_ids in [1, V]
};
void draw_tokens(Stream& s, const DrawTokens& a);
Cost cost(const DrawTokens& a);

// The draw from one row, on the host. uniform: u. REQUIRES: finite logits, at least one.
int32_t draw_token(std::span<const float> logits, double temperature, float uniform);

}  // namespace moebius
