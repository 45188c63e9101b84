// The attention calls that cuDNN computes on a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/attention.h"

namespace moebius {

// Returns whether this is cuDNN 9.19, the only version whose workspace was measured. Other versions are not used.
// version: as cudnnGetVersion() returns it.
constexpr bool is_measured_cudnn(int64_t version) { return version / 100 == 919; }
// Returns whether plans and runs use cuDNN's attention: true in a build with the measured version, and in a build
// without CUDA, which cannot run on a GPU and plans for a build with cuDNN 9.19.
bool has_cudnn();
// Returns whether cuDNN can compute the call with a bounded workspace. Returns false if has_cudnn() returns false.
bool cudnn_can(const AttentionFwd& a);
bool cudnn_can(const AttentionBwd& a);
// Returns whether cuDNN has the call on GPUs other than Hopper too: heads of at most 128. If it refuses the call there
// all the same, other kernels run it.
bool cudnn_can_elsewhere(const AttentionBwd& a);
// Returns whether cuDNN computes the call: it can, and a.kernels is cudnn, or is chosen and the table of
// attention_choice.h prefers it. Depends on the arguments alone. Throws Error{usage} if a.kernels is cudnn and cuDNN
// cannot compute the call.
bool cudnn_is_chosen(const AttentionFwd& a);
bool cudnn_is_chosen(const AttentionBwd& a);
// Returns the same for GPUs other than Hopper, where nothing was measured. A forward pass: cudnn_is_chosen(), or the
// table leaves the call to Hopper's own kernels and cuDNN can compute it. A backward pass: cuDNN supports it there.
bool cudnn_is_chosen_elsewhere(const AttentionFwd& a);
bool cudnn_is_chosen_elsewhere(const AttentionBwd& a);
// Returns whether Hopper GPUs have kernels for heads of these widths: bf16, 64 or 128, or 192 with values of 128.
// q and v: [rows, heads, width].
bool has_hopper_kernel(const Tensor& q_THd, const Tensor& v_UGd);
// Returns the version of the library as cudnnGetVersion() gives it, such as 91900; 0 in a build without cuDNN.
int64_t cudnn_version();
// Returns a message that says whether plans for a GPU assume cuDNN, by has_cudnn().
std::string planned_cudnn_text();
// Returns "9.19.0", "9.20.0 (not used: attention uses only 9.19)" or "not part of this build", for messages.
std::string cudnn_text(int64_t version);

}  // namespace moebius
