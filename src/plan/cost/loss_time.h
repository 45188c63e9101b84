// The time of the loss, whose op is several kernels: products, and between them a pass over the logits.
#pragma once

#include "plan/work_time.h"

namespace moebius {

// The loads of a product's block with rows that are not whole vectors of 8 elements: asynchronous copies take 4 bytes
// or more, so it loads each step of this many terms before it multiplies. An assumption about cuBLASLt's kernels.
inline constexpr double kTermsOfLoad = 16;

// Returns the seconds of the kernels of lm_loss, lm_logits_block or lm_loss_block of Moebius on a GPU, one after
// another and without launches; 0 for other ops. The logits are written in f32, read by the loss, and their gradients
// written and read twice; each chunk of tokens adds to dw as a whole (LmLoss::chunk()). The ops' own bytes have none
// of these. In bf16, a rank's part of the vocabulary that is no multiple of 8 makes products load whole steps of K
// before they multiply, in tiles of 128 x 128 that do not split K. That was compared with the demo alone.
// rate: FLOPs a second of products. memory: bytes a second.
double loss_seconds(const TimeContext& c, const OpWork& op, double rate, double memory);

}  // namespace moebius
