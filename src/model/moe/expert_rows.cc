#include "model/moe/expert_rows.h"

#include <algorithm>

#include "config/check/expert_rows_bound.h"
#include "model/layers/pre_activation.h"
#include "model/moe/block_operands.h"
#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantized_rows.h"

namespace moebius {
namespace {

SharedExperts shared_experts(const MeshShape& mesh, int64_t num_experts, int64_t top_k, int64_t T, double rows_factor) {
  return {.ep = mesh.ep,
          .etp = mesh.etp,
          .num_experts = num_experts,
          .top_k = top_k,
          .tokens = T,
          .rows_factor = rows_factor};
}

int64_t tokens_of_chunk(const ExpertRowsSpec& spec) { return spec.chunk > 0 ? spec.chunk : spec.max_tokens; }

}  // namespace

int64_t even_expert_rows(const MeshShape& mesh, const ModelSpec& model, int64_t T) {
  return even_rows(shared_experts(mesh, model.num_experts, model.top_k, T, 0));
}

int64_t max_expert_rows(const MeshShape& mesh, int64_t num_experts, int64_t top_k, int64_t T, double rows_factor) {
  return max_rows(shared_experts(mesh, num_experts, top_k, T, rows_factor));
}

int64_t moe_layers_of(const ModelSpec& model, const StageSpec& stage, int64_t num_mtp) {
  int64_t count = num_mtp > 0 && model.is_moe_layer(model.num_layers) ? stage.num_mtp : 0;
  for (int64_t i = 0; i < stage.num_layers; ++i) count += model.is_moe_layer(stage.first_layer + i) ? 1 : 0;
  return count;
}

namespace {

bool recomputes_rows(const RecomputeSpec& of_layer) { return of_layer.covers(&RecomputeSpec::expert_up); }

std::vector<int64_t> moe_layers(const ModelSpec& model) {
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < model.num_layers_and_mtp(); ++i)
    if (model.is_moe_layer(std::min(i, model.num_layers))) layers.push_back(i);
  return layers;
}

}  // namespace

int64_t moe_layers_that_keep(const ModelSpec& model, const StageSpec& stage, int64_t num_mtp,
                             const RecomputeSpec& recompute) {
  int64_t count = 0;
  const auto add = [&](int64_t layer, bool is_moe) {
    count += is_moe && !recomputes_rows(recompute.of(layer)) ? 1 : 0;
  };
  for (int64_t i = 0; i < (num_mtp > 0 ? stage.num_mtp : 0); ++i)
    add(model.num_layers + i, model.is_moe_layer(model.num_layers));
  for (int64_t i = 0; i < stage.num_layers; ++i) add(stage.first_layer + i, model.is_moe_layer(stage.first_layer + i));
  return count;
}

ExpertRows::ExpertRows(const ModelSpec& model, const Mesh& mesh, const ExpertRowsSpec& spec)
    : D_(model.hidden_size),
      F_(model.moe_intermediate_size / mesh.shape().etp),
      R_(max_expert_rows(mesh.shape(), model.num_experts, model.top_k, tokens_of_chunk(spec), spec.rows_factor)),
      near_rows_(
          bounded_rows(kRowsOfALayer * spec.budget, even_expert_rows(mesh.shape(), model, tokens_of_chunk(spec)), R_)),
      pages_of_chunk_(div_ceil(
          bounded_rows(spec.budget, even_expert_rows(mesh.shape(), model, tokens_of_chunk(spec)), R_), kStashPageRows)),
      chunks_(spec.max_tokens / tokens_of_chunk(spec)),
      passes_(spec.passes_in_flight),
      dtype_(spec.dtype),
      is_all_to_all_(spec.dispatcher == DispatcherKind::alltoall),
      has_layers_(spec.has_layers),
      moe_layers_(moe_layers(model)),
      world_(mesh.group(Axis::world)),
      even_rows_(even_expert_rows(mesh.shape(), model, tokens_of_chunk(spec))) {}

void ExpertRows::add_layer(int64_t w1_columns, int64_t w2_columns, bool in_8_bits) {
  h_columns_ = std::max(h_columns_, in_8_bits ? packed_columns(2 * F_, dtype_) : 2 * F_);
  low1_ = std::max(low1_, w1_columns);
  low2_ = std::max(low2_, w2_columns);
}

void ExpertRows::declare(MemoryPlan& plan) {
  const RecomputeSpec& recompute = plan.recompute_of_all();
  keeps_ = !recomputes_rows(recompute);
  if (!recompute.ranges.empty())
    keeps_ = std::any_of(moe_layers_.begin(), moe_layers_.end(),
                         [&](int64_t layer) { return !recomputes_rows(recompute.of(layer)); });
  const auto rows = [&](Tensor& t, const char* name, int64_t columns) {
    if (columns > 0 && has_layers_)
      plan.declare_rows(t, std::string("experts.") + name, {R_, columns}, dtype_, near_rows_);
  };
  rows(scratch_.h, "h", 2 * F_);
  rows(scratch_.dh, "dh", 2 * F_);
  rows(scratch_.act, "act", F_);
  rows(scratch_.y, "y", D_);
  rows(scratch_.low, "low", low1_);
  rows(scratch_.dlow1, "dlow1", low1_);
  rows(scratch_.dlow2, "dlow2", low2_);
  rows(scratch_.g, "g", low2_ > 0 ? F_ : 0);
  for (const auto& [tensor, name] :
       {std::pair{&scratch_.tokens, "tokens"}, {&scratch_.grads, "grads"}, {&scratch_.sent, "sent"}})
    rows(*tensor, name, is_all_to_all_ ? D_ : 0);
  if (!keeps_) return;
  const int64_t P = passes_ * pages_of_pass();
  plan.declare(counts_W3_, "experts.stash.counts", {world_.size(), 3}, DType::f64, Life::metrics);
  if (P == 0) return;
  plan.declare_rows(pool_SM_, "experts.stash", {P * kStashPageRows, stash_columns()}, dtype_, P * kStashPageRows);
  plan.declare_rows(free_P_, "experts.stash.free", {P}, DType::i32, P);
  plan.declare_rows(state_2_, "experts.stash.state", {2}, DType::i64, 2);
}

int64_t stash_bytes(int64_t num_pages, int64_t num_columns, DType dtype) {
  if (num_pages * num_columns == 0) return 0;
  const auto aligned = [](int64_t n) { return div_ceil(n, SpillBuffer::kAlignBytes) * SpillBuffer::kAlignBytes; };
  return aligned(num_pages * kStashPageRows * num_columns * size_of(dtype)) + aligned(num_pages * size_of(DType::i32)) +
         aligned(2 * size_of(DType::i64));
}

int64_t stash_counts_bytes(int64_t num_ranks) {
  return div_ceil(3 * num_ranks, MemoryPlan::kAlign) * MemoryPlan::kAlign * size_of(DType::f64);
}

Tensor ExpertRows::counts_here() const {
  const int64_t rank = world_.rank();
  return counts_W3_.rows(rank, rank + 1).view({3});
}

void ExpertRows::init_state(Stream& s) const {
  if (!pool_SM_.empty()) clear_stash(s, {.free_P = free_P_, .state_2 = state_2_, .counts_3 = counts_here()});
}

void ExpertRows::reduce_counts(Stream& s) const {
  if (keeps_) world_.all_reduce_sum(s, counts_W3_);
}

void ExpertRows::end_of_step(Stream& s) const {
  if (keeps_) fill_zero(s, counts_W3_);
}

void ExpertRows::declare_saved(MemoryPlan& plan, const std::string& prefix, Held& held, bool in_8_bits) const {
  held.in_8_bits = in_8_bits;
  held.keeps = !recomputes_rows(plan.recompute());
  if (!held.keeps) return;
  plan.declare(held.page_Q, prefix + ".pages", {div_ceil(R_, kStashPageRows)}, DType::i32, Life::saved);
  plan.declare(held.held_3, prefix + ".held", {3}, DType::i32, Life::saved);
}

template <class Copy>
void ExpertRows::for_each_kept(const Held& held, Copy&& copy) const {
  copy(held.in_8_bits ? packed_h() : scratch_.h, 0);
  if (low1_ > 0) copy(scratch_.low, h_columns_);
}

Tensor ExpertRows::packed_h() const { return first_elements(scratch_.dh, {R_, packed_columns(2 * F_, dtype_)}); }

void ExpertRows::pack(Stream& s, const Held& held, const Tensor& offsets_e1) const {
  if (!held.in_8_bits) return;
  pack_quantized_rows(s, {.rows_TB = packed_bytes(packed_h()), .x_TD = scratch_.h, .offsets_e1 = offsets_e1});
}

void ExpertRows::unpack(Stream& s, const Held& held, const Tensor& offsets_e1) const {
  if (!held.in_8_bits) return;
  unpack_quantized_rows(s, {.x_TD = scratch_.h, .rows_TB = packed_bytes(packed_h()), .offsets_e1 = offsets_e1});
}

int64_t ExpertRows::expected_rows() const { return std::min(even_rows_, pages_of_chunk_ * kStashPageRows); }

void ExpertRows::stash(Step& step, const Held& held, const Tensor& offsets_e1) const {
  if (!held.keeps) return;
  Stream& s = step.stream;
  alloc_pages(s, {.page_Q = held.page_Q,
                  .held_3 = held.held_3,
                  .free_P = free_P_,
                  .state_2 = state_2_,
                  .counts_3 = counts_here(),
                  .offsets_e1 = offsets_e1});
  pack(s, held, offsets_e1);
  for_each_kept(held, [&](const Tensor& x_RC, int64_t first) {
    stash_rows(s, {.pool_SM = pool_SM_,
                   .x_RC = x_RC,
                   .page_Q = held.page_Q,
                   .held_3 = held.held_3,
                   .first = first,
                   .expected_rows = expected_rows()});
  });
}

void ExpertRows::bring_back(Stream& s, const Held& held) const {
  for_each_kept(held, [&](const Tensor& x_RC, int64_t first) {
    unstash_rows(s, {.x_RC = x_RC,
                     .pool_SM = pool_SM_,
                     .page_Q = held.page_Q,
                     .held_3 = held.held_3,
                     .first = first,
                     .expected_rows = expected_rows()});
  });
}

ExpertRows::Spilled ExpertRows::begin_spill(Step& step, const Held& held, const Tensor& offsets_e1) const {
  const Spilled spilled{.offsets_e1 = step.alloc(offsets_e1.shape, DType::i32), .since_1 = step.alloc({1}, DType::i64)};
  free_pages(step.stream, {.spilled_e1 = spilled.offsets_e1,
                           .since_1 = spilled.since_1,
                           .free_P = free_P_,
                           .state_2 = state_2_,
                           .page_Q = held.page_Q,
                           .held_3 = held.held_3,
                           .offsets_e1 = offsets_e1});
  return spilled;
}

Stream ExpertRows::without_trace(const Stream& s) {
  if (s.device() != DeviceKind::cuda) return Stream(s.device(), s.pool(), nullptr, s.target());
  Stream quiet(s.accelerator(), s.pool());
  quiet.set_capture(s.capture());
  return quiet;
}

void check_offload_of_rows(const OffloadSpec& offload) {
  MOEBIUS_CHECK(
      usage, !offload.tensors.expert_up,
      "memory.offload \"expert_up\" cannot move the rows of experts that several ranks share: they are in the "
      "pool of memory.expert_rows, on the device; remove the name, or set memory.expert_rows = 0, which "
      "plans and moves the worst case");
}

std::unique_ptr<ExpertRows> make_expert_rows(const ModelSpec& model, const Mesh& mesh, const ExpertRowsSpec& spec) {
  const SharedExperts experts =
      shared_experts(mesh.shape(), model.num_experts, model.top_k, spec.max_tokens, spec.rows_factor);
  if (!pools_rows(spec.budget, experts)) return nullptr;
  return std::make_unique<ExpertRows>(model, mesh, spec);
}

}  // namespace moebius
