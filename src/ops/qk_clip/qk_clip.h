// QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): after an update, the projections of queries and keys of a head
// whose largest attention logit of the step was above a threshold are scaled down.
//
//   gamma = min(1, threshold / largest)
//
// where `largest` is the largest logit of the query heads that share a key head. The query and key rows of a head are
// multiplied by sqrt(gamma), so that their logits are multiplied by gamma. Where all heads share keys, as the rotated
// keys of latent attention, these stay, and the query rows are multiplied by gamma.
#pragma once

#include "core/tensor.h"
#include "device/device.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {

// max[i] = max over r of x[r, i]
struct MaxOverRanks {
  Tensor max_N;  // out f32
  Tensor x_RN;   // in f32
};
void max_over_ranks(Stream& s, const MaxOverRanks& a);
Cost cost(const MaxOverRanks& a);

// Scales elements [first, first + n) of a matrix of heads, whose head h has the rows [h head_rows, (h + 1) head_rows):
//   rows [0, root_rows) of a head               w *= sqrt(gamma)
//   rows [root_rows, root_rows + whole_rows)    w *= gamma
//   the rest                                    stays
//
// The products are in f32, and stored as an update stores them. Elements with a gamma of 1 are not written. Nothing is
// written if scale[0] is NaN.
struct QkClip {
  UpdatedTensor tensor;  // inout [n]; moments and gradient are not read
  int64_t first = 0, cols = 1;
  int64_t head_rows = 1, root_rows = 0, whole_rows = 0;
  Tensor max_logit_H;    // in f32, of the query heads
  int64_t kv_group = 1;  // query heads that share a key head
  bool of_keys = false;  // a head of the matrix is a key head; otherwise a query head
  float threshold = 1;   // above 0
  Tensor scale_1;        // in f32
  Tensor lr_and_step_2;  // in f64 [lr, step], of stochastic rounding; may be empty: step 1
};
void qk_clip(Stream& s, const QkClip& a);
Cost cost(const QkClip& a);

}  // namespace moebius
