#include "model/moe/routed_experts_params.h"

#include <string>
#include <utility>

#include "model/layers/precision_of.h"

namespace moebius {
namespace {

// The experts of this rank: first, first + 1, ..., and of each the shard etp of ETP of its inner width.
struct Experts {
  explicit Experts(const LayerContext& c)
      : ETP(c.mesh.shape().etp),
        etp(c.mesh.place().etp),
        D(c.model.hidden_size),
        F(c.model.moe_intermediate_size),
        F_here(F / ETP),
        count(c.model.num_experts / c.mesh.shape().ep),
        first(count * c.mesh.place().ep) {}
  int64_t ETP, etp, D, F, F_here, count, first;
};

// A planner declares many layers, and these names cost most of the time. So they are not made by fmt::format().
std::string expert_name(const std::string& prefix, int64_t e, const char* matrix, const char* what = "weight") {
  std::string name;
  name.reserve(prefix.size() + 48);
  name.append(prefix).append(".experts.").append(std::to_string(e)).append(".").append(matrix).append(".").append(what);
  return name;
}

ParamSpec weight_spec(const LayerContext& c, const std::string& name, Shape shape) {
  return {.name = name,
          .shape = shape,
          .dtype = c.dtype,
          .init_std = c.init_std(),
          .kind = ParamKind::experts,
          .grad_axis = Axis::edp};
}

ParamSpec bias_spec(const LayerContext& c, const std::string& name, Shape shape) {
  return {.name = name,
          .shape = shape,
          .dtype = c.dtype,
          .init = ParamInit::zeros,
          .kind = ParamKind::bias,
          .grad_axis = Axis::edp};
}

}  // namespace

void check_expert_degrees(const ModelSpec& m, const MeshShape& mesh) {
  MOEBIUS_CHECK(usage, m.num_experts % mesh.ep == 0,
                "parallel.ep must divide model.num_experts: {} % {} must be 0; choose another ep", m.num_experts,
                mesh.ep);
  MOEBIUS_CHECK(usage, m.moe_intermediate_size % mesh.etp == 0,
                "parallel.etp must divide model.moe_intermediate_size: {} % {} must be 0; choose another etp",
                m.moe_intermediate_size, mesh.etp);
}

ParamSpec w1_spec(const LayerContext& c, const std::string& prefix) {
  const Experts x(c);
  const Shape whole{x.F, x.D};
  ParamSpec spec = weight_spec(c, prefix + ".experts.gate_up_proj", {x.count, 2 * x.F_here, x.D});
  spec.parts.reserve(static_cast<size_t>(2 * x.count));
  for (int64_t i = 0; i < 2 * x.count; ++i) {
    const char* matrix = i % 2 == 0 ? "gate_proj" : "up_proj";
    spec.parts.push_back({.name = expert_name(prefix, x.first + i / 2, matrix),
                          .shape = whole,
                          .offset = i * x.F_here * x.D,
                          .shard = shard_of(whole, 0, x.etp, x.ETP)});
  }
  return spec;
}

ParamSpec w2_spec(const LayerContext& c, const std::string& prefix) {
  const Experts x(c);
  const Shape whole{x.D, x.F};
  ParamSpec spec = weight_spec(c, prefix + ".experts.down_proj", {x.count, x.D, x.F_here});
  spec.parts.reserve(static_cast<size_t>(x.count));
  for (int64_t i = 0; i < x.count; ++i) {
    spec.parts.push_back({.name = expert_name(prefix, x.first + i, "down_proj"),
                          .shape = whole,
                          .offset = i * x.D * x.F_here,
                          .shard = shard_of(whole, 1, x.etp, x.ETP)});
  }
  return spec;
}

ParamSpec b1_spec(const LayerContext& c, const std::string& prefix) {
  const Experts x(c);
  ParamSpec spec = bias_spec(c, prefix + ".experts.gate_up_proj_bias", {x.count, 2 * x.F_here});
  for (int64_t i = 0; i < 2 * x.count; ++i) {
    const char* matrix = i % 2 == 0 ? "gate_proj" : "up_proj";
    spec.parts.push_back({.name = expert_name(prefix, x.first + i / 2, matrix, "bias"),
                          .shape = {x.F},
                          .offset = i * x.F_here,
                          .shard = shard_of({x.F}, 0, x.etp, x.ETP)});
  }
  return spec;
}

ParamSpec b2_spec(const LayerContext& c, const std::string& prefix) {
  const Experts x(c);
  const Shard columns = shard_of({x.D}, 0, x.etp, x.ETP);
  const int64_t here = columns.dim < 0 ? x.D : columns.count;
  ParamSpec spec = bias_spec(c, prefix + ".experts.down_proj_bias", {x.count, here});
  for (int64_t i = 0; i < x.count; ++i) {
    spec.parts.push_back({.name = expert_name(prefix, x.first + i, "down_proj", "bias"),
                          .shape = {x.D},
                          .offset = i * here,
                          .shard = columns});
  }
  return spec;
}

int64_t first_b2_column(const LayerContext& c) {
  return shard_of({c.model.hidden_size}, 0, c.mesh.place().etp, c.mesh.shape().etp).begin;
}

const Param& declare_expert_weights(const LayerContext& c, ParamSpec spec, int64_t max_tokens) {
  const bool can_fuse = max_tokens == c.stream_rows() && c.precision.has_plain_dw();
  return c.params.declare(stored_first(held_as_weights(c, std::move(spec))), can_fuse);
}

}  // namespace moebius
