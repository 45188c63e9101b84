#include "model/attention/mla_params.h"

namespace moebius {

ParamSpec whole_matrix(const LayerContext& c, const std::string& name, int64_t out, int64_t in) {
  return {.name = name, .shape = {out, in}, .dtype = c.dtype, .init_std = c.init_std(), .grad_axis = Axis::tp_cp_dp};
}

ParamSpec whole_row(const LayerContext& c, const std::string& name, int64_t width, ParamInit init) {
  return {.name = name,
          .shape = {width},
          .dtype = c.dtype,
          .init = init,
          .kind = init == ParamInit::ones ? ParamKind::norm : ParamKind::bias,
          .grad_axis = Axis::tp_cp_dp};
}

ParamSpec heads_matrix(const LayerContext& c, const std::string& name, const Shape& whole, int dim) {
  const ParamPart part{name, whole, 0, shard_of(whole, dim, c.mesh.place().tp, c.mesh.shape().tp)};
  return {.name = name, .shape = part.local_shape(), .dtype = c.dtype, .parts = {part}, .init_std = c.init_std()};
}

ParamSpec query_up(const LayerContext& c, const std::string& prefix) {
  const ModelSpec& m = c.model;
  if (m.q_lora_rank == 0) return heads_matrix(c, prefix + ".q_proj.weight", {m.q_size(), m.hidden_size}, 0);
  return heads_matrix(c, prefix + ".q_b_proj.weight", {m.q_size(), m.q_lora_rank}, 0);
}

}  // namespace moebius
