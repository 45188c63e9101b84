#include "parallel/optim/trained_params.h"

#include <algorithm>

#include "core/rng.h"
#include "parallel/optim/param_groups.h"

namespace moebius {
namespace {

constexpr std::string_view kNames[] = {".m", ".v"};  // in the memory plan
constexpr BlockCode kCodes[] = {BlockCode::with_sign, BlockCode::without_sign};

// The layout must not cut a block of codes: bits would depend on it.
void check_blocks(const ParamPart& part) {
  const int last = part.shape.rank() - 1;
  if (part.shard.dim != last) return;
  MOEBIUS_CHECK(usage, part.shard.begin % kCodeBlock == 0 && part.shard.count % kCodeBlock == 0,
                "optimizer.state: \"8bit\" has a scale for each {} elements of a row, and this layout cuts the rows of "
                "{}, {} elements, into {}; lower parallel.tp or parallel.etp, or set optimizer.state = \"bf16\"",
                kCodeBlock, part.name, part.shape[last], part.shard.count);
}

DType moment_dtype(const Param& p, StateFormat format) {
  if (format == StateFormat::bf16) return DType::bf16;
  if (format == StateFormat::f32) return DType::f32;
  const std::vector<ParamPart>& parts = p.spec.parts;
  if (!std::all_of(parts.begin(), parts.end(), [](const ParamPart& part) { return has_code_blocks(part.shape); }))
    return DType::f32;
  for (const ParamPart& part : parts) check_blocks(part);
  MOEBIUS_ASSERT(p.owned.begin % kCodeBlock == 0 && p.owned.count % kCodeBlock == 0);
  return DType::u8;
}

// The draws of the owned elements of a part, whose shard is `outer` runs of the global tensor.
RoundingDraws draws_of(const ParamPart& part, const ElementRange& owned, uint64_t seed) {
  const Shape local = part.local_shape();
  const int dim = std::max(part.shard.dim, 0);
  int64_t run = 1;
  for (int i = dim; i < local.rank(); ++i) run *= local[i];
  RoundingDraws draws{
      .seed = seed, .key = key_of(("optimizer." + part.name).c_str()), .begin = owned.begin, .run = run, .stride = run};
  if (part.shard.dim < 0) return draws;
  const int64_t row = run / local[dim];
  draws.stride = row * part.shape[dim];
  draws.first = row * part.shard.begin;
  return draws;
}

}  // namespace

UpdatedTensor rows_of(UpdatedTensor all, int64_t begin, int64_t end) {
  for (Tensor* each : {&all.param_n, &all.master_n, &all.m_n, &all.v_n, &all.grad_n, &all.remainder_n})
    if (!each->empty()) *each = each->rows(begin, end);
  for (Tensor* each : {&all.m_scale_b, &all.v_scale_b})
    if (!each->empty()) *each = each->rows(begin / kCodeBlock, end / kCodeBlock);
  all.draws.begin += begin;
  return all;
}

TrainedParams::TrainedParams(const OptimizerContext& context, std::span<const std::string_view> prefixes,
                             const std::function<bool(const ParamSpec&)>& of)
    : prefixes_(prefixes), seed_(context.seed) {
  MOEBIUS_ASSERT(prefixes.size() <= std::size(kNames));
  const std::vector<ParamGroup> groups = param_groups(context.spec);
  for (const Param& p : context.params.all()) {
    if (!p.spec.trainable || (of && !of(p.spec))) continue;
    const Life life = context.spec.offload && !p.keeps_states ? Life::host : Life::optimizer;
    Trained& trained = all_.emplace_back();
    trained.param = &p;
    trained.weight_decay = static_cast<float>(group_of(groups, p.spec.kind).weight_decay);
    const DType dtype = moment_dtype(p, context.spec.state);
    for (size_t i = 0; i < prefixes.size(); ++i) {
      const std::string name = p.spec.name + std::string(kNames[i]);
      context.plan.declare(trained.moments[i], name, {p.owned.count}, dtype, life);
      if (dtype == DType::u8)
        context.plan.declare(trained.scales[i], name + ".scales", {p.owned.count / kCodeBlock}, DType::f32, life);
    }
  }
}

UpdatedTensor TrainedParams::whole(const Trained& each) const {
  const Param& p = *each.param;
  const bool has_f32 = p.has_master || p.w.dtype == DType::f32;
  return {.param_n = p.is_quantised() ? p.master() : p.owned_weights(),
          .master_n = has_f32 ? p.master() : Tensor{},
          .m_n = each.moments[0],
          .v_n = each.moments[1],
          .grad_n = p.owned_gradient(),
          .weight_decay = each.weight_decay,
          .remainder_n = p.remainder_n,
          .m_scale_b = each.scales[0],
          .v_scale_b = each.scales[1]};
}

void TrainedParams::add_parts(std::vector<OfPart>& parts, const Trained& each) const {
  const Param& p = *each.param;
  const UpdatedTensor all = whole(each);
  for (const ParamPart& part : p.spec.parts) {
    const ElementRange owned = owned_of(p, part);
    if (owned.count == 0) continue;
    const int64_t first = part.offset + owned.begin - p.owned.begin;
    parts.push_back({.param = &p, .part = &part, .owned = owned, .tensor = rows_of(all, first, first + owned.count)});
    parts.back().tensor.draws = draws_of(part, owned, seed_);
  }
}

std::vector<TrainedParams::OfPart> TrainedParams::parts() const {
  std::vector<OfPart> parts;
  for (const Trained& each : all_) add_parts(parts, each);
  return parts;
}

std::vector<UpdatedTensor> TrainedParams::tensors_of(const Trained& each) const {
  const UpdatedTensor all = whole(each);
  if (!all.draws_bits()) return {all};
  std::vector<OfPart> parts;
  add_parts(parts, each);
  std::vector<UpdatedTensor> tensors;
  for (const OfPart& part : parts) tensors.push_back(part.tensor);
  return tensors;
}

std::vector<TrainedParams::OfParam> TrainedParams::of_params() const {
  std::vector<OfParam> all;
  for (const Trained& each : all_) all.push_back({.param = each.param, .tensors = tensors_of(each)});
  return all;
}

std::vector<UpdatedTensor> TrainedParams::tensors() const {
  std::vector<UpdatedTensor> tensors;
  for (const Trained& each : all_)
    for (const UpdatedTensor& tensor : tensors_of(each)) tensors.push_back(tensor);
  return tensors;
}

std::vector<OptimizerState> TrainedParams::state() const {
  std::vector<OptimizerState> state;
  for (const Trained& each : all_)
    for (size_t i = 0; i < prefixes_.size(); ++i)
      state.push_back({.prefix = prefixes_[i],
                       .param = each.param,
                       .values = each.moments[i],
                       .scales = each.scales[i],
                       .code = kCodes[i]});
  return state;
}

}  // namespace moebius
