// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cuda {

void sum_squares(Stream&, const SumSquares&) { missing_cuda("sum_squares"); }
void clip_scale(Stream&, const ClipScale&) { missing_cuda("clip_scale"); }
void adamw(Stream&, const AdamW&) { missing_cuda("adamw"); }
void sgd(Stream&, const Sgd&) { missing_cuda("sgd"); }
void join_master(Stream&, const JoinMaster&) { missing_cuda("join_master"); }
void split_master(Stream&, const SplitMaster&) { missing_cuda("split_master"); }
void sum_gradient(Stream&, const SumGradient&) { missing_cuda("sum_gradient"); }

}  // namespace moebius::cuda
