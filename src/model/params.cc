#include "model/params.h"

#include <fnmatch.h>

#include <algorithm>

#include "core/quantized.h"
#include "core/rng.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/fill_zeros.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/rounding.h"

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

// Returns whether the first gradient of a step is added to zeros.
bool adds_first(const Param& p) {
  return p.has_grad && !p.spec.grad_stored_first && !p.sums_apart() && !p.shards_gradient();
}
}  // namespace

Tensor Param::master() const { return has_master ? master_n : owned_weights(); }

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
  plan_.withdraw(params_[i].w);
  params_[i].kept_weights = piece;
}

void ParamTable::keep_owned_gradient(size_t i, const OwnedPiece& piece) {
  plan_.withdraw(params_[i].grad());
  params_[i].kept_gradient = piece;
}

void ParamTable::set_weights(size_t i, void* data, DeviceKind device) {
  params_[i].w.data = data;
  params_[i].w.device = device;
}

void ParamTable::set_gradient(size_t i, void* data, DeviceKind device) {
  Tensor& grad = params_[i].sums_apart() ? params_[i].grad_sum : params_[i].dw;
  grad.data = data;
  grad.device = device;
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

// Draws masters in f32 and splits them into halves, through scratch for some of them.
class HalvesDraw {
 public:
  HalvesDraw(Stream& s, const ParamTable& table, int64_t piece) : s_(s), piece_(piece) {
    int64_t most = 0;
    for (const Param& p : table.all()) most = std::max(most, p.has_remainder ? p.w.numel() : 0);
    scratch_ = Buffer(s.device(), std::min(most, piece_) * size_of(DType::f32));
  }
  // Draws into the weights of the elements `of`, and into their remainders unless that tensor is empty.
  void operator()(const Tensor& weight_n, const Tensor& remainder_n, const ElementRange& of, const Piece& piece,
                  const FillNormal& how) {
    const ElementRange range = common(of, piece.here);
    for (int64_t done = 0; done < range.count; done += piece_) {
      const ElementRange now{.begin = range.begin + done, .count = std::min(piece_, range.count - done)};
      const Tensor master_n{
          .data = scratch_.data(), .shape = {now.count}, .dtype = DType::f32, .device = weight_n.device};
      draw(s_, master_n, now, piece, how);
      const auto here = [&](const Tensor& t) {
        return t.empty() ? Tensor{} : t.rows(now.begin - of.begin, now.end() - of.begin);
      };
      split_master(s_, {.weight_n = here(weight_n), .remainder_n = here(remainder_n), .master_n = master_n});
    }
  }

 private:
  Stream& s_;
  int64_t piece_;  // elements of scratch
  Buffer scratch_;
};

void init_part(Stream& s, const Param& p, const ParamPart& part, uint64_t seed, HalvesDraw& draw_halves) {
  const bool uniform = p.spec.init == ParamInit::uniform, drawn = uniform || p.spec.init == ParamInit::normal;
  const FillNormal how{.rng = Rng(seed, RngSite::init, 0, key_of(part.name.c_str())),
                       .mean = p.spec.init == ParamInit::ones ? 1.0f : 0.0f,
                       .std = drawn ? p.spec.init_std : 0.0f,
                       .uniform = uniform};
  // Sharded weights have no memory for those of other owners, which passes gather. Elsewhere these are rounded from f32
  // in the same way as on their owners.
  const Tensor whole = p.shards_weights() ? p.owned_weights() : p.w.view({p.w.numel()});
  const ElementRange of = p.shards_weights() ? p.owned : ElementRange{.begin = 0, .count = p.w.numel()};
  for (const Piece& piece : pieces_of(part)) {
    if (p.has_remainder) {
      if (!p.shards_weights()) draw_halves(whole, {}, of, piece, how);
      draw_halves(p.owned_weights(), p.remainder_n, p.owned, piece, how);
    } else if (!p.is_quantised()) {  // otherwise from the masters, in Engine::gather_weights()
      draw(s, whole, of, piece, how);
    }
    if (p.has_master) draw(s, p.master_n, p.owned, piece, how);
  }
}

template <class Asked>
void init_params(Stream& s, const ParamTable& table, uint64_t seed, int64_t piece, const Asked& is_asked) {
  HalvesDraw draw_halves(s, table, piece);
  for (const Param& p : table.all()) {
    if (!is_asked(p)) continue;
    for (const ParamPart& part : p.spec.parts) init_part(s, p, part, seed, draw_halves);
  }
  synchronize(s);  // scratch is in use until then
}

// Calls body(first, host halves) for pieces of the range [0, n).
struct HostHalves {
  std::vector<bf16> weights;
  std::vector<uint16_t> remainders;
  int64_t bytes() const { return std::ssize(weights) * static_cast<int64_t>(sizeof(bf16)); }
};
template <class Body>
void for_halves(int64_t n, int64_t piece, Body&& body) {
  HostHalves halves;
  for (int64_t at = 0; at < n; at += piece) {
    const auto count = static_cast<size_t>(std::min(piece, n - at));
    halves.weights.resize(count);
    halves.remainders.resize(count);
    body(at, halves);
  }
}

}  // namespace

void read_masters(Stream& s, const Param& p, int64_t first, std::span<float> values, int64_t piece) {
  MOEBIUS_ASSERT(p.has_remainder && first + std::ssize(values) <= p.owned.count);
  for_halves(std::ssize(values), piece, [&](int64_t at, HostHalves& halves) {
    const int64_t begin = first + at, end = begin + std::ssize(halves.weights);
    copy_to_host(s, halves.weights.data(), p.owned_weights().rows(begin, end).data, halves.bytes());
    copy_to_host(s, halves.remainders.data(), p.remainder_n.rows(begin, end).data, halves.bytes());
    for (size_t i = 0; i < halves.weights.size(); ++i)
      values[static_cast<size_t>(at) + i] = joined(halves.weights[i], halves.remainders[i]);
  });
}

void write_masters(Stream& s, const Param& p, int64_t first, std::span<const float> values, int64_t piece) {
  MOEBIUS_ASSERT(p.has_remainder && first + std::ssize(values) <= p.owned.count);
  for_halves(std::ssize(values), piece, [&](int64_t at, HostHalves& halves) {
    for (size_t i = 0; i < halves.weights.size(); ++i) {
      const WeightAndRemainder both = split(values[static_cast<size_t>(at) + i]);
      halves.weights[i] = both.weight;
      halves.remainders[i] = both.remainder;
    }
    const int64_t begin = first + at, end = begin + std::ssize(halves.weights);
    copy_to_device(s, p.owned_weights().rows(begin, end).data, halves.weights.data(), halves.bytes());
    copy_to_device(s, p.remainder_n.rows(begin, end).data, halves.remainders.data(), halves.bytes());
    synchronize(s);
  });
}

void ParamTable::init(Stream& s, uint64_t seed, int64_t piece) const {
  init_params(s, *this, seed, piece, [](const Param& p) { return (p.spec.trainable || p.frozen) && is_drawn(p); });
}

void ParamTable::init_adapters(Stream& s, uint64_t seed) const {
  init_params(s, *this, seed, kMastersPiece, [](const Param& p) { return p.spec.kind == ParamKind::adapter; });
}

void ParamTable::sync(Stream& s) const {
  for (const Param& p : params_) {
    if (p.has_master && !p.is_quantised()) copy(s, p.owned_weights(), p.master_n);
  }
}

void ParamTable::zero_grads(Stream& s) const {
  for (const Param& p : params_) {
    if (!p.has_grad) continue;
    if (p.shards_gradient()) {
      fill_zero(s, p.owned_gradient());
      continue;
    }
    if (!p.fuses_grad()) fill_zero(s, p.dw);
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
                     .adds = !first_of_step && !p.shards_gradient(),
                     .on_host = optimizer_.offload_grad && !p.shards_gradient()});
  }
}

void ParamTable::zero_added_grads(Stream& s) const {
  std::vector<Tensor> added;
  for (const Param& p : params_)
    if (adds_first(p)) added.push_back(p.dw);
  fill_zeros(s, added);
}

void ParamTable::zero_added_grad(Stream& s, size_t i) const {
  if (adds_first(params_[i])) fill_zero(s, params_[i].dw);
}

}  // namespace moebius
