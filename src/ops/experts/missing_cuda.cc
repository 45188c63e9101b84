// Replaces the CUDA backend of these ops in a build without it.
#include "ops/experts/experts_backends.h"
#include "ops/experts/few_rows_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void expert_up(Stream&, const ExpertUp&) { missing_cuda("expert_up"); }
void expert_down(Stream&, const ExpertDown&) { missing_cuda("expert_down"); }
void expert_down_after_up(Stream&, const ExpertDown&) { missing_cuda("expert_down"); }
void d_expert_down(Stream&, const DExpertDown&) { missing_cuda("d_expert_down"); }
void d_expert_up(Stream&, const DExpertUp&) { missing_cuda("d_expert_up"); }
void expert_wgrad(Stream&, const ExpertWgrad&) { missing_cuda("expert_wgrad"); }
void expert_bias_grad(Stream&, const ExpertBiasGrad&) { missing_cuda("expert_bias_grad"); }
void d_expert_down_product(Stream&, const DExpertDownQuantised&) { missing_cuda("d_expert_down"); }
void d_gated_quantised(Stream&, const DExpertDownQuantised&) { missing_cuda("d_expert_down"); }
std::string kernel_text(const Stream&, const ExpertUp&) { missing_cuda("expert_up"); }
std::string kernel_text(const Stream&, const ExpertDown&) { missing_cuda("expert_down"); }
std::string kernel_text(const Stream&, const DExpertDown&) { missing_cuda("d_expert_down"); }
std::string kernel_text(const Stream&, const DExpertUp&) { missing_cuda("d_expert_up"); }
std::string kernel_text(const Stream&, const ExpertWgrad&) { missing_cuda("expert_wgrad"); }
bool adds_term(const Stream&, const ExpertUp&) { missing_cuda("expert_up"); }
bool adds_term(const Stream&, const ExpertDown&) { missing_cuda("expert_down"); }
bool adds_term(const Stream&, const DExpertDown&) { missing_cuda("d_expert_down"); }
bool adds_term(const Stream&, const DExpertUp&) { missing_cuda("d_expert_up"); }

}  // namespace moebius::cuda
