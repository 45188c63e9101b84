#include "model/params.h"

#include <algorithm>

#include "core/rng.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {

Shard shard_of(const Shape& global, int dim, int64_t r, int64_t n) {
  MOEBIUS_ASSERT(dim < global.rank() && 0 <= r && r < n);
  if (n == 1) return {};
  const int64_t begin = global[dim] * r / n;
  return {.dim = dim, .begin = begin, .count = global[dim] * (r + 1) / n - begin};
}

Shape ParamPart::local_shape() const {
  const auto size = [&](int dim) { return dim == shard.dim ? shard.count : shape[dim]; };
  switch (shape.rank()) {
    case 1:
      return {size(0)};
    case 2:
      return {size(0), size(1)};
    default:
      MOEBIUS_ASSERT(shape.rank() == 3);
      return {size(0), size(1), size(2)};
  }
}

Tensor part_of(const Tensor& whole, const ParamPart& part) {
  const Shape local = part.local_shape();
  MOEBIUS_ASSERT(part.offset + local.numel() <= whole.numel());
  return whole.view({whole.numel()}).rows(part.offset, part.offset + local.numel()).view(local);
}

const Param& ParamTable::declare(ParamSpec spec) {
  if (spec.parts.empty()) spec.parts.push_back({spec.name, spec.shape, 0});
  Param& p = params_.emplace_back();
  p.spec = std::move(spec);
  p.has_grad = p.spec.trainable && use_ != ModelUse::inference;
  p.has_master = p.spec.trainable && use_ == ModelUse::training && p.spec.dtype != DType::f32;
  plan_.declare(p.w, p.spec.name, p.spec.shape, p.spec.dtype, p.spec.trainable ? Life::param : Life::state);
  if (p.has_grad) plan_.declare(p.dw, p.spec.name + ".grad", p.spec.shape, DType::f32, Life::grad);
  if (p.has_master) plan_.declare(p.master_storage, p.spec.name + ".master", p.spec.shape, DType::f32, Life::master);
  return p;
}

namespace {

// Draws a part, run by run of what follows each other in the global tensor: a number belongs to its place there.
void fill_part(Stream& s, Tensor local, const ParamPart& part, FillNormal draw) {
  const int dim = std::max(part.shard.dim, 0);
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < part.shape.rank(); ++i) (i < dim ? outer : inner) *= part.shape[i];
  const int64_t row = inner / part.shape[dim], run = local.dim(dim) * row;
  const Tensor runs = local.view({outer, run});
  for (int64_t i = 0; i < outer; ++i) {
    draw.x = runs.rows(i, i + 1);
    draw.first_index = static_cast<uint64_t>(i * inner + part.shard.begin * row);
    fill_normal(s, draw);
  }
}

}  // namespace

void ParamTable::init(Stream& s, uint64_t seed) const {
  for (const Param& p : params_) {
    if (!p.spec.trainable) continue;
    for (const ParamPart& part : p.spec.parts) {
      const bool drawn = p.spec.init == ParamInit::normal;
      fill_part(s, part_of(p.master(), part), part,
                {.rng = Rng(seed, RngSite::init, 0, key_of(part.name.c_str())),
                 .mean = p.spec.init == ParamInit::ones ? 1.0f : 0.0f,
                 .std = drawn ? p.spec.init_std : 0.0f});
    }
  }
  sync(s);
}

void ParamTable::sync(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_master) copy(s, p.w, p.master_storage);
  }
}

void ParamTable::zero_grads(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_grad) fill_zero(s, p.dw);
  }
}

}  // namespace moebius
