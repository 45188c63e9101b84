#include "model/params.h"

#include <fnmatch.h>

#include <algorithm>

#include "core/quantized.h"
#include "core/rng.h"
#include "ops/elementwise/elementwise.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {

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

namespace {
// Quantised weights and their scales are loaded, never initialised randomly.
bool is_drawn(const Param& p) { return p.spec.dtype == DType::f32 || p.spec.dtype == DType::bf16; }

Tensor owned_in(const Param& p, const OwnedPiece& piece, const Tensor& whole) {
  return piece.of ? piece.of->rows(piece.first, piece.first + p.owned.count) : owned_elements(p, whole);
}
}  // namespace

Tensor Param::master() const {
  if (has_master) return master_n;
  return has_remainder ? owned_in(*this, kept_gradient, dw) : owned_weights();
}

Tensor Param::owned_weights() const { return owned_in(*this, kept_weights, w); }

Tensor Param::owned_gradient() const { return owned_in(*this, kept_gradient, grad()); }

ParamSpec stored_first(ParamSpec spec) {
  spec.grad_stored_first = true;
  return spec;
}

Tensor part_of(const Tensor& whole, const ParamPart& part) {
  const Shape local = part.local_shape();
  MOEBIUS_ASSERT(part.offset + local.numel() <= whole.numel());
  return whole.view({whole.numel()}).rows(part.offset, part.offset + local.numel()).view(local);
}

Tensor owned_elements(const Param& param, const Tensor& whole) {
  return whole.view({whole.numel()}).rows(param.owned.begin, param.owned.end());
}

ElementRange owned_of(const Param& param, const ParamPart& part) {
  ElementRange range = common(param.owned, {.begin = part.offset, .count = part.local_shape().numel()});
  range.begin -= part.offset;
  return range.count > 0 ? range : ElementRange{};
}

Tensor owned_part_of(const Tensor& owned, const Param& param, const ParamPart& part) {
  MOEBIUS_ASSERT(owned.numel() == param.owned.count);
  const ElementRange range = owned_of(param, part);
  if (range.count == 0) return owned.view({owned.numel()}).rows(0, 0);
  const int64_t first = part.offset + range.begin - param.owned.begin;
  return owned.view({owned.numel()}).rows(first, first + range.count);
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
  });
}

bool ParamTable::is_frozen(const ParamSpec& spec) const {
  if (spec.kind == ParamKind::adapter) return false;
  const ParamPart *in = nullptr, *out = nullptr;
  for (const ParamPart& part : spec.parts) (matches_any(freeze_, part.name) ? in : out) = &part;
  MOEBIUS_CHECK(
      usage, !in || !out,
      "train.freeze: expected patterns that match all parts of {} or none; got some that match {} and not {}; "
      "they are one in memory, freeze them together",
      spec.name, in->name, out->name);
  return in != nullptr;
}

const Param& ParamTable::declare(ParamSpec spec) { return declare(std::move(spec), /*can_fuse_grad=*/false); }

const Param& ParamTable::declare(ParamSpec spec, bool can_fuse_grad) {
  if (spec.parts.empty()) spec.parts.push_back({spec.name, spec.shape, 0});
  Param& p = params_.emplace_back();
  p.spec = std::move(spec);
  p.layer = in_layer_ ? num_layers_ - 1 : -1;
  p.frozen = p.spec.trainable && is_frozen(p.spec);
  const Life life = p.spec.trainable ? Life::param : Life::state;
  p.spec.trainable = p.spec.trainable && !p.frozen;
  p.has_grad = p.spec.trainable && use_ != ModelUse::inference;
  p.owned = {.begin = 0, .count = p.spec.shape.numel()};
  const bool quantised = p.spec.is_quantised && p.has_grad && use_ == ModelUse::training;
  plan_.declare(p.w, p.spec.name, p.spec.shape, quantised ? DType::f8_e4m3 : p.spec.dtype, life);
  if (quantised)
    plan_.declare(p.scales, p.spec.name + ".scales", scale_shape(ScaleLayout::square_blocks, p.spec.shape), DType::f32,
                  Life::state);
  if (p.has_grad) declare_gradient(p, can_fuse_grad);
  return p;
}

void ParamTable::declare_gradient(Param& p, bool can_fuse) {
  const bool apart = in_layer_ && optimizer_.grad == GradFormat::bf16 && p.spec.dtype == DType::bf16;
  const bool fuses = apart && can_fuse && optimizer_.fuse_grad;
  if (!fuses)
    plan_.declare(p.dw, p.spec.name + ".grad", p.spec.shape, DType::f32, apart ? Life::layer_grad : Life::grad);
  if (apart)
    plan_.declare(p.grad_sum, p.spec.name + ".grad_sum", p.spec.shape, DType::bf16,
                  optimizer_.offload_grad ? Life::host : Life::grad);
}

void ParamTable::own(size_t i, const ElementRange& range) {
  Param& p = params_[i];
  MOEBIUS_ASSERT(!p.has_master && !p.has_remainder && range.begin >= 0 && range.end() <= p.w.numel());
  MOEBIUS_ASSERT(p.has_grad || p.frozen);
  p.owned = range;
  if (p.frozen) return;
  if (p.spec.dtype == DType::f32 && !p.is_quantised()) return;
  MOEBIUS_ASSERT(!p.is_quantised() || optimizer_.master == MasterFormat::f32);
  p.has_master = optimizer_.master == MasterFormat::f32;
  p.has_remainder = optimizer_.master == MasterFormat::bf16_remainder;
  declare_master(p, optimizer_.offload ? Life::host : Life::master);
}

void ParamTable::declare_master(Param& p, Life life) {
  if (p.has_master) plan_.declare(p.master_n, p.spec.name + ".master", {p.owned.count}, DType::f32, life);
  if (p.has_remainder) plan_.declare(p.remainder_n, p.spec.name + ".remainder", {p.owned.count}, DType::u16, life);
}

void ParamTable::keep_states(size_t i) {
  Param& p = params_[i];
  MOEBIUS_ASSERT(optimizer_.offload && p.has_grad && !p.keeps_states);
  p.keeps_states = true;
  if (p.has_master) plan_.withdraw(p.master_n);
  if (p.has_remainder) plan_.withdraw(p.remainder_n);
  declare_master(p, Life::optimizer);
}

void ParamTable::keep_owned_weights(size_t i, const OwnedPiece& piece) {
  MOEBIUS_ASSERT(is_drawn(params_[i]));  // a quantised frozen base is read whole
  plan_.withdraw(params_[i].w);
  params_[i].kept_weights = piece;
}

void ParamTable::keep_owned_gradient(size_t i, const OwnedPiece& piece) {
  MOEBIUS_ASSERT(!params_[i].sums_apart());
  plan_.withdraw(params_[i].dw);
  params_[i].kept_gradient = piece;
}

void ParamTable::set_weights(size_t i, void* data, DeviceKind device) {
  params_[i].w.data = data;
  params_[i].w.device = device;
}

void ParamTable::set_gradient(size_t i, void* data, DeviceKind device) {
  params_[i].dw.data = data;
  params_[i].dw.device = device;
}

void ParamTable::gather(Stream& s, const ParamSpan& span) {
  if (residency_) residency_->gather(s, span);
}

void ParamTable::ready(Stream& s, const ParamSpan& span) {
  order_.ready(span);
  if (residency_) residency_->ready(s, span);
  if (!copies_hold_ || made_.size() == copies_.size()) return;
  for (const CopiesOf& of : copies_) {
    if (of.param < span.begin || of.param >= span.end || !made_.insert(of.copies.get()).second) continue;
    of.copies->make(s);
  }
}

WeightCopies& ParamTable::own_copies(const Param& param, std::unique_ptr<WeightCopies> copies) {
  const auto at = std::find_if(params_.begin(), params_.end(), [&](const Param& p) { return &p == &param; });
  MOEBIUS_ASSERT(at != params_.end());
  return *copies_.emplace_back(CopiesOf{static_cast<size_t>(at - params_.begin()), std::move(copies)}).copies;
}

int64_t ParamTable::copies_bytes(const Param& param) const {
  int64_t bytes = 0;
  for (const CopiesOf& of : copies_)
    if (&params_[of.param] == &param) bytes += of.copies->num_bytes();
  return bytes;
}

void ParamTable::make_copies(Stream& s) {
  for (const CopiesOf& of : copies_) of.copies->make(s);
}

void ParamTable::make_copies_when_ready() {
  made_.clear();
  copies_hold_ = true;
}

void ParamTable::hold_copies() {
  for (const CopiesOf& of : copies_) made_.insert(of.copies.get());
  copies_hold_ = true;
}

void ParamTable::release(Stream& s, const ParamSpan& span) {
  order_.release(span);
  if (residency_) residency_->release(s, span);
}

void ParamTable::begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step) {
  order_.begin_gradient(span);
  if (residency_) residency_->begin_gradient(s, span, first_of_step);
  // Other layers left their gradients in this memory.
  for (size_t i = span.begin; i < span.end; ++i) {
    const Param& p = params_[i];
    if (p.sums_apart() && !p.fuses_grad() && !p.spec.grad_stored_first) fill_zero(s, p.dw);
  }
}

void ParamTable::grad_ready(Stream& s, const ParamSpan& span) {
  order_.grad_ready(span);
  if (residency_) residency_->grad_ready(s, span);
}

namespace {

// The pieces of a part that are contiguous both here and in the global tensor.
struct Piece {
  ElementRange here;        // of the parameter
  int64_t first_index = 0;  // of its first element in the global tensor
};

std::vector<Piece> pieces_of(const ParamPart& part) {
  const Shape local = part.local_shape();
  const int dim = std::max(part.shard.dim, 0);
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < local.rank(); ++i) (i < dim ? outer : inner) *= local[i];
  const int64_t global_inner = part.shard.dim < 0 ? inner : inner / local[dim] * part.shape[dim];
  const int64_t skipped = part.shard.dim < 0 ? 0 : inner / local[dim] * part.shard.begin;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < outer; ++i) {
    pieces.push_back(
        {.here = {.begin = part.offset + i * inner, .count = inner}, .first_index = i * global_inner + skipped});
  }
  return pieces;
}

// Draws the values of the piece that are in `of` into x_n, which is laid out like `of`.
void draw(Stream& s, const Tensor& x_n, const ElementRange& of, const Piece& piece, const FillNormal& how) {
  const ElementRange range = common(of, piece.here);
  if (range.count == 0) return;
  FillNormal fill = how;
  fill.x = x_n.rows(range.begin - of.begin, range.end() - of.begin);
  fill.first_index = static_cast<uint64_t>(piece.first_index + range.begin - piece.here.begin);
  fill_normal(s, fill);
}

// Returns whether only the owned elements are drawn: there is no memory for the other weights, or for their masters.
// Engine::gather_weights() sends them.
bool draws_owned(const Param& p) { return p.shards_weights() || (p.has_remainder && p.shards_gradient()); }

void init_part(Stream& s, const Param& p, const ParamPart& part, uint64_t seed) {
  const bool uniform = p.spec.init == ParamInit::uniform, drawn = uniform || p.spec.init == ParamInit::normal;
  const FillNormal how{.rng = Rng(seed, RngSite::init, 0, key_of(part.name.c_str())),
                       .mean = p.spec.init == ParamInit::ones ? 1.0f : 0.0f,
                       .std = drawn ? p.spec.init_std : 0.0f,
                       .uniform = uniform};
  // The weights of other owners are rounded from f32 in the same way as on their owners.
  const Tensor& whole = p.has_remainder ? p.dw : p.w;
  for (const Piece& piece : pieces_of(part)) {
    if (p.is_quantised()) {  // from the masters, in Engine::gather_weights()
    } else if (draws_owned(p)) {
      draw(s, p.has_remainder ? p.master() : p.owned_weights(), p.owned, piece, how);
    } else {
      draw(s, whole.view({whole.numel()}), {.begin = 0, .count = whole.numel()}, piece, how);
    }
    if (p.has_master) draw(s, p.master_n, p.owned, piece, how);
  }
}

// The masters of the owned elements wait in p.dw for split_masters() where there is a remainder.
void init_param(Stream& s, const Param& p, uint64_t seed) {
  for (const ParamPart& part : p.spec.parts) init_part(s, p, part, seed);
  if (!p.has_remainder || draws_owned(p)) return;
  const Shape all{p.w.numel()};
  split_master(s, {.weight_n = p.w.view(all), .remainder_n = {}, .master_n = p.dw.view(all)});
}

}  // namespace

void ParamTable::init(Stream& s, uint64_t seed) const {
  for (const Param& p : params_)
    if ((p.spec.trainable || p.frozen) && is_drawn(p)) init_param(s, p, seed);
  split_masters(s);
}

void ParamTable::init_adapters(Stream& s, uint64_t seed) const {
  for (const Param& p : params_)
    if (p.spec.kind == ParamKind::adapter) init_param(s, p, seed);
  split_masters(s);
}

void ParamTable::sync(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_master && !p.is_quantised()) copy(s, p.owned_weights(), p.master_n);
  }
  split_masters(s);
}

void ParamTable::join_masters(Stream& s) const {
  for (const Param& p : params_) {
    if (!p.has_remainder) continue;
    join_master(s, {.master_n = p.master(), .weight_n = p.owned_weights(), .remainder_n = p.remainder_n});
  }
}

void ParamTable::split_masters(Stream& s) const {
  for (const Param& p : params_) {
    if (!p.has_remainder) continue;
    split_master(s, {.weight_n = p.owned_weights(), .remainder_n = p.remainder_n, .master_n = p.master()});
  }
  clear_masters(s);
}

void ParamTable::clear_masters(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_remainder) fill_zero(s, p.shards_gradient() ? p.owned_gradient() : p.dw);
  }
}

void ParamTable::zero_grads(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_grad && !p.fuses_grad()) fill_zero(s, p.shards_gradient() ? p.owned_gradient() : p.dw);
    if (p.sums_apart()) fill_zero(s, p.grad_sum);
  }
}

void ParamTable::sum_gradients(Stream& s, const ParamSpan& span, bool first_of_step) const {
  for (size_t i = span.begin; i < span.end; ++i) {
    const Param& p = params_[i];
    if (!p.sums_apart() || p.fuses_grad()) continue;
    const Shape all{p.w.numel()};
    sum_gradient(s, {.sum_n = p.grad_sum.view(all),
                     .grad_n = p.dw.view(all),
                     .adds = !first_of_step,
                     .on_host = optimizer_.offload_grad});
  }
}

void ParamTable::zero_added_grads(Stream& s) const {
  for (size_t i = 0; i < params_.size(); ++i) zero_added_grad(s, i);
}

void ParamTable::zero_added_grad(Stream& s, size_t i) const {
  const Param& p = params_[i];
  if (p.has_grad && !p.spec.grad_stored_first && !p.sums_apart() && !p.shards_gradient()) fill_zero(s, p.dw);
}

}  // namespace moebius
