#include "plan/cost/composed_part.h"

#include <numeric>

#include "plan/cost/part_key.h"

namespace moebius {
namespace {

constexpr int64_t kShort = 1024;  // tokens of a simple sequence, at most

}  // namespace

bool has_simpler_parts(const EngineSpec& spec, const StageSpec& stage) {
  return spec.mesh.cp > 1 && spec.mesh.ep * spec.mesh.etp > 1 && uses_of(spec, stage).experts && !spec.offload.any();
}

EngineSpec with_simple_attention(EngineSpec spec) {
  const int64_t tokens = spec.shape.tokens();
  spec.shape.seq = std::gcd(tokens, kShort);
  spec.shape.batch = spec.shape.max_segments = tokens / spec.shape.seq;
  spec.shape.cp_comm = spec.shape.cp_comm_window = CpComm::allgather;
  spec.mesh.cp = spec.mesh.cp_inner = 1;
  return spec;
}

EngineSpec with_local_experts(EngineSpec spec) {
  spec.mesh.ep = spec.mesh.etp = 1;
  spec.dispatcher = DispatcherKind::automatic;
  spec.expert_overlap = ExpertOverlap::none;
  spec.expert_rows = 0;
  return spec;
}

std::unique_ptr<PartWork> composed_part(const SimplerParts& of) {
  auto part = std::make_unique<PartWork>();
  part->simpler = of;
  part->recompute = of.experts->recompute;
  part->splits = of.experts->splits;
  part->leave = of.experts->leave;
  part->params = of.experts->params;
  part->logits = of.attention->logits;
  return part;
}

}  // namespace moebius
