#include "plan/cost/composed_part.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>

#include "plan/cost/part_key.h"

namespace moebius {
namespace {

EngineSpec with_simple_exchange(EngineSpec spec) {
  spec.shape.cp_comm = spec.shape.cp_comm_window = CpComm::allgather;
  spec.mesh.cp_inner = 1;
  return spec;
}

EngineSpec with_local_experts(EngineSpec spec) {
  spec.mesh.ep = spec.mesh.etp = 1;
  spec.dispatcher = DispatcherKind::automatic;
  spec.expert_overlap = ExpertOverlap::none;
  spec.expert_rows = 0;
  return spec;
}

std::tuple<std::string_view, double, double> key_of(const OpWork& op) {
  return {op.name, op.each.flops, op.each.bytes};
}
std::tuple<std::string_view, GroupCall> key_of(const SentWork& sent) { return {sent.axis, sent.call}; }

// Calls of the same kind are one entry. False where there are fewer than are taken away.
template <class Work>
bool add(std::vector<Work>& sum, const std::vector<Work>& more, const std::vector<Work>& less) {
  sum.reserve(sum.size() + more.size());  // keys refer to names in it
  std::map<decltype(key_of(sum[0])), size_t> known;
  for (size_t i = 0; i < sum.size(); ++i) known.emplace(key_of(sum[i]), i);
  for (const Work& work : more) {
    const auto [found, is_new] = known.try_emplace(key_of(work), sum.size());
    if (is_new)
      sum.push_back(work);
    else
      sum[found->second] += work;
  }
  for (const Work& work : less) {
    const auto found = known.find(key_of(work));
    if (found == known.end() || sum[found->second].calls < work.calls) return false;
    sum[found->second] -= work;
  }
  std::erase_if(sum, [](const Work& work) { return work.calls == 0; });
  return true;
}

}  // namespace

std::optional<SimplerSpecs> simpler_specs(const EngineSpec& spec, const StageSpec& stage) {
  const bool has_both = spec.mesh.cp > 1 && spec.mesh.ep * spec.mesh.etp > 1 && uses_of(spec, stage).experts;
  const bool is_simple = spec.shape.cp_comm == CpComm::allgather && spec.shape.cp_comm_window == CpComm::allgather;
  if (!has_both || is_simple || spec.offload.any()) return std::nullopt;
  return SimplerSpecs{.experts = with_simple_exchange(spec),
                      .attention = with_local_experts(spec),
                      .neither = with_simple_exchange(with_local_experts(spec))};
}

std::unique_ptr<PartWork> composed_part(const SimplerParts& of) {
  auto part = std::make_unique<PartWork>(of.experts);
  for (PassWork PartWork::*pass :
       {&PartWork::forward, &PartWork::loss, &PartWork::backward, &PartWork::first_backward, &PartWork::copies}) {
    PassWork& sum = (*part).*pass;
    if (!add(sum.ops, (of.attention.*pass).ops, (of.neither.*pass).ops)) return nullptr;
    if (!add(sum.sent, (of.attention.*pass).sent, (of.neither.*pass).sent)) return nullptr;
  }
  return part;
}

}  // namespace moebius
