// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct SumSquares;
struct ClipScale;
struct AdamW;
struct Sgd;
struct SumGradient;
struct JoinMaster;
struct SplitMaster;

namespace cpu {
void sum_squares(Stream& s, const SumSquares& a);
void clip_scale(Stream& s, const ClipScale& a);
void adamw(Stream& s, const AdamW& a);
void sgd(Stream& s, const Sgd& a);
void sum_gradient(Stream& s, const SumGradient& a);
void join_master(Stream& s, const JoinMaster& a);
void split_master(Stream& s, const SplitMaster& a);
}  // namespace cpu

namespace cuda {
void sum_squares(Stream& s, const SumSquares& a);
void clip_scale(Stream& s, const ClipScale& a);
void adamw(Stream& s, const AdamW& a);
void sgd(Stream& s, const Sgd& a);
void sum_gradient(Stream& s, const SumGradient& a);
void join_master(Stream& s, const JoinMaster& a);
void split_master(Stream& s, const SplitMaster& a);
}  // namespace cuda

}  // namespace moebius
