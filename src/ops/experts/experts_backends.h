// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include <string>

#include "device/device.h"

namespace moebius {

struct ExpertUp;
struct ExpertDown;
struct DExpertDown;
struct DExpertDownQuantised;
struct DExpertUp;
struct ExpertWgrad;
struct ExpertBiasGrad;

namespace cpu {
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);
void expert_bias_grad(Stream& s, const ExpertBiasGrad& a);
int64_t scratch_bytes(const ExpertUp& a, int num_threads);
int64_t scratch_bytes(const ExpertDown& a, int num_threads);
int64_t scratch_bytes(const DExpertDown& a, int num_threads);
int64_t scratch_bytes(const DExpertUp& a, int num_threads);
int64_t scratch_bytes(const ExpertWgrad& a, int num_threads);
}  // namespace cpu

namespace cuda {
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);
void expert_bias_grad(Stream& s, const ExpertBiasGrad& a);
// The two parts of d_expert_down_quantised: g, and then all else from g.
void d_expert_down_product(Stream& s, const DExpertDownQuantised& a);
void d_gated_quantised(Stream& s, const DExpertDownQuantised& a);
// The config of the kernel that runs the op on the GPU of s, or "fallback kernel".
std::string kernel_text(const Stream& s, const ExpertUp& a);
std::string kernel_text(const Stream& s, const ExpertDown& a);
std::string kernel_text(const Stream& s, const DExpertDown& a);
std::string kernel_text(const Stream& s, const DExpertUp& a);
std::string kernel_text(const Stream& s, const ExpertWgrad& a);
// These answer adds_term() of experts.h on the GPU of s.
bool adds_term(const Stream& s, const ExpertUp& a);
bool adds_term(const Stream& s, const ExpertDown& a);
bool adds_term(const Stream& s, const DExpertDown& a);
bool adds_term(const Stream& s, const DExpertUp& a);
int64_t scratch_bytes(const ExpertUp& a);
int64_t scratch_bytes(const ExpertDown& a);
int64_t scratch_bytes(const DExpertDown& a);
int64_t scratch_bytes(const DExpertUp& a);
int64_t scratch_bytes(const ExpertWgrad& a);
}  // namespace cuda

}  // namespace moebius
