#include "config/check/offload_check.h"

#include <fmt/format.h>

#include <string>

#include "config/check/expert_rows_bound.h"
#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

// Returns whether some layer of the model saves the tensors of the name.
bool has_layers_for(const ModelSpec& m, bool RecomputeSpec::*what) {
  if (what == &RecomputeSpec::mla_up_proj) return m.kv_lora_rank > 0;
  if (what == &RecomputeSpec::mlp) return m.num_moe_layers() < m.num_layers;
  if (what == &RecomputeSpec::expert_up) return m.num_experts > 0;
  if (what == &RecomputeSpec::shared_expert) return m.shared_intermediate_size > 0;
  return true;
}

void check_name(const RunSpec& s, const char* name, bool RecomputeSpec::*what) {
  const std::string where = origin(s, "memory.offload");
  MOEBIUS_CHECK(usage, what == &RecomputeSpec::layer || !s.memory.recompute.covers(what),
                "memory.offload \"{}\" would do nothing: memory.recompute covers it, so it is not kept; remove it from "
                "one of the two{}",
                name, where);
  MOEBIUS_CHECK(usage, has_layers_for(s.model, what),
                "memory.offload \"{}\" would do nothing: the model has no layer that keeps it; remove it{}", name,
                where);
}

}  // namespace

void check_offload(const RunSpec& s) {
  const OffloadSpec& o = s.memory.offload;
  MOEBIUS_CHECK(
      usage, o.any() || o.fraction == 1,
      "memory.offload_fraction = {} would do nothing: memory.offload names {}; name something, or remove it{}",
      o.fraction, s.offload_weights ? "no activations" : "nothing", origin(s, "memory.offload_fraction"));
  for (const auto& [name, field] : kRecomputeNames)
    if (o.tensors.*field) check_name(s, name, field);
  MOEBIUS_CHECK(usage, !o.tensors.expert_up || !pools_expert_rows(s),
                "memory.offload \"expert_up\" cannot move the rows of experts that several ranks share: they are in "
                "the pool of memory.expert_rows, on the device; remove the name, or set memory.expert_rows = 0, which "
                "plans and moves the worst case{}",
                origin(s, "memory.offload"));
}

void check_offload_weights(const RunSpec& s, int64_t world_size) {
  if (!s.offload_weights) return;
  const std::string where = origin(s, "memory.offload");
  MOEBIUS_CHECK(usage, s.parallel.fsdp || world_size == s.parallel.pp,
                "memory.offload \"weights\": {} ranks hold the weights of a stage, and each would keep a copy of "
                "some of them in host memory; set parallel.fsdp = true, so that each keeps a shard{}",
                world_size / s.parallel.pp, where);
}

}  // namespace moebius
