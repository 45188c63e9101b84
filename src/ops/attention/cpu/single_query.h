// Attention of one query of several heads that read the same keys and values in bf16, as in generation: with the CPU's
// products of pairs (vdpbf16ps) and no packing. A sum runs over the width, or over the keys of a tile, in order and two
// at a time, in one lane. So the bits of a head do not depend on the heads that are computed with it.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/attention/attention_tiles.h"

namespace moebius::cpu {

constexpr int64_t kHeadsTogether = 4;

// The memory of a thread.
struct SingleQueryArrays {
  SingleQueryArrays(Slice slice, int64_t width)
      : scores(slice.take<float>(kHeadsTogether * kRow)),
        out(slice.take<float>(kHeadsTogether * width)),
        probabilities(slice.take<bf16>(kHeadsTogether * kRow)),
        num_bytes(slice.used()) {}
  static constexpr int64_t kRow = kKeyTile + 32;  // of a head: registers and pairs may end after the tile
  float *scores, *out;
  bf16* probabilities;
  int64_t num_bytes;
};

// Heads that share keys and values.
struct SingleQuery {
  const bf16* q;             // [num_heads, width]
  const bf16 *k, *v;         // row j is at j * row_stride: `width` elements each
  bf16* o;                   // [num_heads, width]
  float* lse;                // [num_heads]
  int64_t num_heads, width;  // num_heads <= kHeadsTogether
  int64_t row_stride;        // elements
  Range keys;                // rows to attend to, at least one
  float scale;
  bool prefetches_next_head;  // its keys and values follow in each row
};

// Returns whether this CPU and a width have the kernels.
bool has_single_query(int64_t width);
void single_query_fwd(const SingleQuery& a, const SingleQueryArrays& arrays);

}  // namespace moebius::cpu
