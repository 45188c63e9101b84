// The share of cuDNN in the attention of a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/attention.h"

namespace moebius {

// 9.19, by cudnnGetVersion(): the one whose workspace was measured. Of another, own kernels take every call.
constexpr bool is_measured_cudnn(int64_t version) { return version / 100 == 919; }
// Returns whether cuDNN can compute the call, with a workspace that has a bound. In a build without
// it, it can compute none.
bool cudnn_can(const AttentionFwd& a);
bool cudnn_can(const AttentionBwd& a);
// Returns whether cuDNN is to compute the call: it can, and a.kernels asks for it or leaves the
// choice to attention_choice.h. A function of the arguments alone. Throws Error{usage} where
// a.kernels asks for cuDNN, and it cannot.
bool cudnn_takes(const AttentionFwd& a);
bool cudnn_takes(const AttentionBwd& a);
// The version of the library as cudnnGetVersion() gives it, such as 91900; 0 in a build without cuDNN.
int64_t cudnn_version();
// For people: "9.19.0", "9.20.0 (not used: attention takes 9.19 alone)", "not part of this build".
std::string cudnn_text(int64_t version);

}  // namespace moebius
