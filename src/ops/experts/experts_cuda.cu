// Which kernel runs an expert op, and what it needs.
#include "ops/experts/experts_cuda.h"

#include "ops/backends_moe.h"

namespace moebius::cuda {
namespace {

// The epilogues of the sm_90 kernels know SwiGLU without biases.
bool is_plain(const ExpertUp& a) { return a.b1_e2F.empty() && a.activation == GatedActivation{}; }
bool is_plain(const ExpertDown& a) { return a.b2_eC.empty(); }
bool is_plain(const DExpertDown& a) { return a.b2_eC.empty() && a.activation == GatedActivation{}; }

template <class Op>
bool by_sm90(const Op& a) {
  return is_plain(a) && sm90::takes(a);
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) { by_sm90(a) ? sm90::expert_up(s, a) : generic::expert_up(s, a); }

void expert_down(Stream& s, const ExpertDown& a) { by_sm90(a) ? sm90::expert_down(s, a) : generic::expert_down(s, a); }

void d_expert_down(Stream& s, const DExpertDown& a) {
  by_sm90(a) ? sm90::d_expert_down(s, a) : generic::d_expert_down(s, a);
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  sm90::takes(a) ? sm90::d_expert_up(s, a) : generic::d_expert_up(s, a);
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  sm90::takes(a) ? sm90::expert_wgrad(s, a) : generic::expert_wgrad(s, a);
}

int64_t scratch_bytes(const ExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertDown&) { return 0; }
int64_t scratch_bytes(const DExpertDown& a) { return num_dweight_partials(a) * a.dweight_R.numel() * 4; }
int64_t scratch_bytes(const DExpertUp&) { return 0; }
int64_t scratch_bytes(const ExpertWgrad&) { return 0; }

}  // namespace moebius::cuda
