#include "model/layers/precision_of.h"

#include <algorithm>

#include "core/rng.h"
#include "model/layers/precision_of_rows.h"
#include "model/quantize_stats.h"
#include "ops/quantize/quantize.h"

namespace moebius {
namespace {

void check_split(PrecisionRecipe recipe, const ParamPart& part) {
  if (part.shard.dim < 0) return;
  const int64_t multiple = split_multiple(recipe), whole = part.shape[part.shard.dim];
  MOEBIUS_CHECK(
      usage, part.shard.count % multiple == 0,
      "precision.recipe = \"{}\" has blocks of {} that ranks cannot share: the {} {} of {} are split into {}; "
      "choose a smaller parallel.tp or etp, or add the name to precision.keep",
      name_of(recipe), multiple, whole, part.shard.dim == 0 ? "rows" : "columns", part.name, part.shard.count);
}

Group* unless_alone(Group& ranks) { return ranks.size() == 1 ? nullptr : &ranks; }

bool is_split_along(const ParamSpec& spec, int dim) {
  return std::any_of(spec.parts.begin(), spec.parts.end(),
                     [&](const ParamPart& part) { return part.shard.dim == dim; });
}

// The ranks that share the tensors of a parameter's products. A rank that has a whole tensor takes part too: its copy
// does not change the largest magnitude.
ScaleRanks ranks_of(const LayerContext& c, const ParamSpec& spec) {
  const bool is_expert = spec.kind == ParamKind::experts;
  const bool is_split = is_split_along(spec, 0) || is_split_along(spec, 1);
  return {.rows = unless_alone(c.mesh.group(is_expert ? axis_of_expert_scales(c.mesh.shape()) : Axis::tp_cp)),
          .weights = is_split ? unless_alone(c.mesh.group(is_expert ? Axis::etp : Axis::tp)) : nullptr};
}

// A rank has some rows of the matrix, and so some columns of dy, or of an expert's. Their parts follow one another.
WholeColumns columns_of_dy(const ParamSpec& spec) {
  WholeColumns columns{.num_runs = 0};
  const int64_t width = spec.shape[spec.shape.rank() - 1], here = spec.shape[spec.shape.rank() - 2];
  for (const ParamPart& part : spec.parts) {
    if (part.offset >= here * width) break;  // the parts of the next expert
    MOEBIUS_ASSERT(columns.num_runs < WholeColumns::kMaxRuns);
    const int64_t begin = part.shard.dim == 0 ? part.shard.begin : 0;
    columns.runs[columns.num_runs++] = {.here = part.offset / width, .whole = columns.count + begin};
    columns.count += part.shape[0];
  }
  return columns.num_runs == 0 ? WholeColumns{} : columns;
}

WholePlaces places_of(const LayerContext& c, const ParamSpec& spec) {
  if (c.precision.recipe != PrecisionRecipe::nvfp4) return {};
  const MeshShape& mesh = c.mesh.shape();
  const int64_t batches = spec.kind == ParamKind::experts ? mesh.etp * mesh.ep / (mesh.tp * mesh.cp) : 1;
  WholePlaces places{.batch_tokens = c.shape.tokens() * mesh.cp, .dy_columns = columns_of_dy(spec)};
  if (batches > 1) places.num_batches = batches;
  return places;
}

// Each element of an operand is counted once on all ranks of tp, cp and dp, or of etp, ep and edp. A matrix that tp
// splits by rows multiplies x of all tp ranks, and one split by columns dy of all of them. Experts count their rows
// of x and dy where their tokens are (RowGroups::counts_measured); in dW, and where etp splits the columns, they have
// them all.
OperandCounts counts_of(const LayerContext& c, const ParamSpec& spec) {
  if (!c.quantize_stats) return {};
  OperandCounts counts{.sums_5 = c.quantize_stats->of(spec.name)};
  const RankPlace& place = c.mesh.place();
  const bool is_expert = spec.kind == ParamKind::experts, is_first = (is_expert ? place.etp : place.tp) == 0;
  const bool by_rows = is_split_along(spec, 0), by_columns = is_split_along(spec, 1);
  counts.x_for_dw = !by_rows || is_first;
  counts.dy_for_dw = !by_columns || is_first;
  counts.x = is_expert || counts.x_for_dw;
  counts.dy = is_expert || counts.dy_for_dw;
  counts.w = (by_rows || by_columns || is_first) && (is_expert ? place.edp == 0 : place.cp == 0 && place.dp == 0);
  return counts;
}

ProductPrecision precision_at(const LayerContext& c, const ParamSpec& spec, ExpertRange experts,
                              const WholePlaces& places) {
  if (c.precision.recipe == PrecisionRecipe::none || keeps_product(c.precision, spec)) return {};
  for (const ParamPart& part : spec.parts) check_split(c.precision.recipe, part);
  const GpuProducts gpu = c.dtype == DType::bf16 ? gpu_products_of(c.precision, c.model, spec) : GpuProducts::emulated;
  return {c.precision.recipe, c.seed, key_of(spec.name.c_str()), experts, c.precision.weight_gradients,
          counts_of(c, spec), gpu,    ranks_of(c, spec),         places};
}

}  // namespace

bool keeps_product(const PrecisionSpec& precision, const ParamSpec& spec) {
  const std::string *in = nullptr, *out = nullptr;
  const auto sort = [&](const std::string& name) { (matches_any(precision.keep, name) ? in : out) = &name; };
  for (const ParamPart& part : spec.parts) sort(part.name);
  if (spec.parts.empty()) sort(spec.name);
  MOEBIUS_CHECK(usage, !in || !out,
                "precision.keep: expected patterns that match all parts of {} or none; got some that match {} and not "
                "{}; they are one product, keep them together",
                spec.name, *in, *out);
  return in != nullptr;
}

bool has_f8_parts(const ModelSpec& model, const ParamSpec& spec) {
  return !spec.name.ends_with(".kv_a_proj_with_mqa.weight") ||
         (has_f8_products({model.kv_lora_rank, model.hidden_size}) &&
          has_f8_products({model.qk_rope_head_dim, model.hidden_size}));
}

bool has_quantised_product(const ParamSpec& spec, const ParamPart& part) {
  if (spec.kind != ParamKind::matrix && spec.kind != ParamKind::experts) return false;
  return part.shape.rank() == 2 && part.shape[0] > 1 && !part.name.ends_with(".eh_proj.weight");
}

GpuProducts gpu_products_of(const PrecisionSpec& precision, const ModelSpec& model, const ParamSpec& spec) {
  const bool is_swiglu = spec.kind != ParamKind::experts || (model.swiglu_limit == 0 && !model.expert_proj_bias);
  const bool has = precision.has_f8_kernels && precision.compute == DType::bf16 && is_swiglu &&
                   has_f8_products(spec.shape) && has_f8_parts(model, spec);
  return has ? GpuProducts::f8_kernels : GpuProducts::emulated;
}

ProductPrecision precision_of(const LayerContext& c, const ParamSpec& spec, ExpertRange experts) {
  return precision_at(c, spec, experts, places_of(c, spec));
}

ProductPrecision precision_of_rows(const LayerContext& c, const ParamSpec& spec, int64_t first) {
  WholePlaces places = places_of(c, spec);
  places.dy_columns = {.runs = {ColumnRun{.here = 0, .whole = first}}, .count = spec.shape[0]};
  return precision_at(c, spec, {}, places);
}

Axis axis_of_expert_scales(const MeshShape& mesh) {
  return mesh.etp * mesh.ep > mesh.tp * mesh.cp ? Axis::etp_ep : Axis::tp_cp;
}

std::string scales_name(const std::string& param) { return param + "_scale_inv"; }

ScaleLayout held_layout(DType held) {
  if (held == DType::f8_e4m3) return ScaleLayout::square_blocks;
  return held == DType::f4_e2m1 ? ScaleLayout::mx_blocks : ScaleLayout::none;
}

ParamSpec held_as_weights(const LayerContext& c, ParamSpec spec) {
  spec.is_quantised = c.precision.recipe != PrecisionRecipe::none && c.precision.weights == PrecisionChoice::recipe &&
                      !keeps_product(c.precision, spec);
  if (!c.lora.is_on() || c.params.use() != ModelUse::training) return spec;
  if (c.lora.base == LoraBase::compute || (c.lora.base == LoraBase::mxfp4 && spec.kind != ParamKind::experts))
    return spec;
  spec.dtype = c.lora.base == LoraBase::mxfp4 ? DType::f4_e2m1 : DType::f8_e4m3;
  const char* name = c.lora.base == LoraBase::mxfp4 ? "mxfp4" : "fp8_block";
  const BlockSize block = block_size(held_layout(spec.dtype));
  for (const ParamPart& part : spec.parts) {
    const int64_t rows = part.local_shape()[0];
    const bool is_alone = spec.shape[spec.shape.rank() - 2] == rows;
    MOEBIUS_CHECK(usage, is_alone || rows % block.rows == 0,
                  "lora.base = \"{}\" has blocks of {} rows: {} has {} and is stored with other matrices; set "
                  "lora.base = \"compute\"",
                  name, block.rows, part.name, rows);
    if (part.shard.dim < 0) continue;
    const int64_t multiple = part.shard.dim == 0 ? block.rows : block.cols;
    MOEBIUS_CHECK(usage, part.shard.begin % multiple == 0 && part.shard.count % multiple == 0,
                  "lora.base = \"{}\" has blocks of {} that ranks cannot share: the {} {} of {} are split into {}; "
                  "choose a smaller parallel.tp or etp, or set lora.base = \"compute\"",
                  name, multiple, part.shape[part.shard.dim], part.shard.dim == 0 ? "rows" : "columns", part.name,
                  part.shard.count);
  }
  return spec;
}

namespace {

// Returns the operand of weights that are held quantised.
Operand operand_of(const Param& param) { return {param.w, param.scales, ScaleLayout::square_blocks}; }

}  // namespace

class WeightOperands::Copies : public WeightCopies {
 public:
  Copies(MemoryPlan& plan, const Param& param, const ProductPrecision& precision)
      : w(precision.w_form(param.spec.shape)),
        w_for_dx(precision.w_for_dx_form(param.spec.shape)),
        param_(param),
        precision_(precision) {
    if (!param.is_quantised()) declare(plan, w, ".quantised");
    declare(plan, w_for_dx, ".quantised_transposed");
    const int64_t ranks = precision.num_weight_ranks(), e = param.spec.shape.rank() == 3 ? param.spec.shape[0] : 1;
    if (ranks == 1) return;
    declare(plan, own_e_, ".magnitude", {e}, DType::i32);
    declare(plan, all_We_, ".magnitudes", {ranks, e}, DType::i32);
  }
  void make(Stream& s) override {
    if (param_.is_quantised()) return transpose_quantized(s, {.out = w_for_dx, .in = operand_of(param_)});
    if (!all_We_.empty()) precision_.exchange_weights(s, all_We_, own_e_, param_.w);
    precision_.quantise_weights(s, w, param_.w, all_We_);
    precision_.quantise_weights(s, w_for_dx, param_.w, all_We_);
  }
  int64_t num_bytes() const override { return bytes_; }

  Operand w, w_for_dx;

 private:
  void declare(MemoryPlan& plan, Operand& q, const char* what) {
    const auto one = [&](Tensor& t, const char* part) {
      if (!t.empty()) declare(plan, t, std::string(what) + part, t.shape, t.dtype);
    };
    one(q.data, "");
    one(q.scales, ".scales");
    one(q.tensor_scale, ".tensor_scale");
  }

  void declare(MemoryPlan& plan, Tensor& t, const std::string& what, const Shape& shape, DType dtype) {
    plan.declare(t, param_.spec.name + what, shape, dtype, Life::state);
    bytes_ += div_ceil(t.num_bytes(), kAlignBytes) * kAlignBytes;
  }

  static constexpr int64_t kAlignBytes = MemoryPlan::kAlign * 4;  // of quantised elements and f32

  Tensor own_e_, all_We_;  // i32: the largest magnitudes here and on all ranks that have parts of w; may be empty
  const Param& param_;
  ProductPrecision precision_;
  int64_t bytes_ = 0;
};

WeightOperands::WeightOperands(const LayerContext& c, const Param& param, const ProductPrecision& precision)
    : param_(param), precision_(precision), dtype_(c.dtype), params_(&c.params) {
  if (const ScaleLayout layout = held_layout(param.spec.dtype); layout != ScaleLayout::none) {
    ParamSpec scales{.name = scales_name(param.spec.name),
                     .shape = scale_shape(layout, param.spec.shape),
                     .dtype = scale_dtype(layout),
                     .init = ParamInit::ones,
                     .kind = param.spec.kind,
                     .grad_axis = param.spec.grad_axis};
    scales_ = &c.params.declare(std::move(scales));
  }
  if (precision_.is_plain() || c.params.use() != ModelUse::training) return;
  if (c.shards_weights(param) || !c.precision.weight_copies) return;
  auto copies = std::make_unique<Copies>(c.plan, param, precision);
  copies_ = copies.get();
  c.params.own_copies(param, std::move(copies));
}

Tensor WeightOperands::plain(Step& step) const {
  const Tensor x = step.alloc(param_.w.shape, dtype_);
  dequantize(step.stream, {.x = x, .q = Operand(param_.w, scales_->w, held_layout(param_.w.dtype))});
  return x;
}

Operand WeightOperands::transposed(Step& step) const {
  Operand w = precision_.w_for_dx_form(param_.spec.shape);
  w.data = step.alloc(w.data.shape, w.data.dtype);
  w.scales = step.alloc(w.scales.shape, w.scales.dtype);
  transpose_quantized(step.stream, {.out = w, .in = operand_of(param_)});
  return w;
}

Operand WeightOperands::w(Step& step) const {
  if (scales_) return plain(step);
  if (param_.is_quantised()) return operand_of(param_);
  if (copies_ && params_->holds(*copies_)) return precision_.for_products(quantize_context(step), copies_->w, dtype_);
  return precision_.w(quantize_context(step), param_.w);
}

Operand WeightOperands::w_for_dx(Step& step) const {
  if (scales_) return plain(step);
  if (copies_ && params_->holds(*copies_))
    return precision_.for_products(quantize_context(step), copies_->w_for_dx, dtype_);
  if (param_.is_quantised()) return transposed(step);
  return precision_.w_for_dx(quantize_context(step), param_.w);
}

}  // namespace moebius
