#include "model/attention/gqa_params.h"

namespace moebius {
namespace {

// The sizes of this rank's heads, and its block of dimension dim of a tensor.
struct Heads {
  explicit Heads(const LayerContext& c)
      : tp(c.mesh.shape().tp), place(c.mesh.place().tp), q(c.model.q_size() / tp), kv(c.model.kv_size() / tp) {}
  Shard shard(const Shape& whole, int dim) const { return shard_of(whole, dim, place, tp); }
  int64_t tp, place, q, kv;
};

}  // namespace

ParamSpec qkv_spec(const LayerContext& c, const std::string& prefix) {
  const ModelSpec& m = c.model;
  const Heads here(c);
  const int64_t D = m.hidden_size;
  const auto part = [&](const char* name, int64_t rows, int64_t first_row) -> ParamPart {
    return {prefix + name, {rows, D}, first_row * D, here.shard({rows, D}, 0)};
  };
  return {.name = prefix + ".qkv_proj.weight",
          .shape = {here.q + 2 * here.kv, D},
          .dtype = c.dtype,
          .parts = {part(".q_proj.weight", m.q_size(), 0), part(".k_proj.weight", m.kv_size(), here.q),
                    part(".v_proj.weight", m.kv_size(), here.q + here.kv)},
          .init_std = c.init_std()};
}

ParamSpec qkv_bias_spec(const LayerContext& c, const std::string& prefix) {
  const ModelSpec& m = c.model;
  const Heads here(c);
  const auto part = [&](const char* name, int64_t size, int64_t offset) -> ParamPart {
    return {prefix + name, {size}, offset, here.shard({size}, 0)};
  };
  return {.name = prefix + ".qkv_proj.bias",
          .shape = {here.q + 2 * here.kv},
          .dtype = c.dtype,
          .parts = {part(".q_proj.bias", m.q_size(), 0), part(".k_proj.bias", m.kv_size(), here.q),
                    part(".v_proj.bias", m.kv_size(), here.q + here.kv)},
          .init = ParamInit::zeros,
          .kind = ParamKind::bias};
}

ParamSpec o_spec(const LayerContext& c, const std::string& prefix) {
  const std::string name = prefix + ".o_proj.weight";
  const Shape whole{c.model.hidden_size, c.model.q_size()};
  const Heads here(c);
  return {.name = name,
          .shape = {c.model.hidden_size, here.q},
          .dtype = c.dtype,
          .parts = {{name, whole, 0, here.shard(whole, 1)}},
          .init_std = c.init_std()};
}

ParamSpec o_bias_spec(const LayerContext& c, const std::string& prefix) {
  return {.name = prefix + ".o_proj.bias",
          .shape = {c.model.hidden_size},
          .dtype = c.dtype,
          .init = ParamInit::zeros,
          .kind = ParamKind::bias,
          .grad_axis = Axis::tp_cp_dp};
}

ParamSpec sinks_spec(const LayerContext& c, const std::string& prefix) {
  const std::string name = prefix + ".sinks";
  const Shape whole{c.model.num_heads};
  const ParamPart part{name, whole, 0, Heads(c).shard(whole, 0)};
  return {
      .name = name, .shape = part.local_shape(), .parts = {part}, .init_std = c.init_std(), .kind = ParamKind::sink};
}

ParamSpec qk_norm_spec(const LayerContext& c, const std::string& name, int64_t heads) {
  const bool whole = c.model.qk_norm == QkNorm::whole;
  const Shape shape{whole ? heads * c.model.head_dim : c.model.head_dim};
  const ParamPart part{name, shape, 0, whole ? Heads(c).shard(shape, 0) : Shard{}};
  return {.name = name,
          .shape = part.local_shape(),
          .dtype = c.dtype,
          .parts = {part},
          .init = ParamInit::ones,
          .kind = ParamKind::norm,
          .grad_axis = whole ? Axis::dp_cp : Axis::tp_cp_dp};
}

bool norms_in_rope(const ModelSpec& m, int64_t tp) {
  return m.qk_norm == QkNorm::per_head || (m.qk_norm == QkNorm::whole && tp == 1 && m.clip_qkv == 0);
}

}  // namespace moebius
