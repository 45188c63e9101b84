#include "plan/part.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>
#include <tuple>

#include "comm/group_cost.h"
#include "comm/transport/transport.h"
#include "core/block_code.h"
#include "model/attention/gqa_params.h"
#include "model/attention/max_logits.h"
#include "model/moe/chunked_experts.h"
#include "model/moe/direct_window.h"
#include "model/moe/expert_rows.h"
#include "model/quantize_stats.h"
#include "model/stage.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "plan/cost/composed_part.h"
#include "plan/cost/launches.h"
#include "plan/cost/part_key.h"
#include "plan/memory/rank_memory.h"

namespace moebius {
namespace {

// Returns the smallest mesh of one stage in which a rank's share of the model is the same as in `whole`.
MeshShape stage_mesh(const MeshShape& whole) {
  MeshShape m = whole;
  m.pp = 1;
  const int64_t all = std::lcm(m.tp * m.cp, m.etp * m.ep);
  m.dp = all / (m.tp * m.cp);
  m.edp = all / (m.etp * m.ep);
  m.fsdp_shard = 0;  // it need not divide these groups, and passes of a stage gather nothing
  return m;
}

GroupCall group_call(const std::string& name) {
  if (name == "all_gather") return GroupCall::all_gather;
  if (name == "reduce_scatter_sum") return GroupCall::reduce_scatter;
  if (name == "all_reduce_sum") return GroupCall::all_reduce;
  return name == "all_to_all_v" ? GroupCall::all_to_all : GroupCall::send;
}

// Blocks of cp ("cp_2") count as cp, and the nodes of experts ("ep_node") as the axis that they are parts of.
Axis axis_named(std::string_view group) {
  for (const std::string_view name : {group, group.substr(0, group.rfind('_'))})
    for (int i = 0; i < kNumAxes; ++i)
      if (name == name_of(static_cast<Axis>(i))) return static_cast<Axis>(i);
  MOEBIUS_FAIL(internal, "plan: a group {} that is not known", group);
}

void add_sent(PassWork& work, Axis axis, const std::string& call, double bytes) {
  constexpr std::string_view kStart = "start_";
  const bool starts = call.starts_with(kStart);
  const GroupCall kind = group_call(starts ? call.substr(kStart.size()) : call);
  const auto found = std::find_if(work.sent.begin(), work.sent.end(), [&](const SentWork& s) {
    return s.axis == axis && s.call == kind && s.overlaps == starts;
  });
  SentWork& sent = found != work.sent.end()
                       ? *found
                       : work.sent.emplace_back(SentWork{.axis = axis, .call = kind, .overlaps = starts});
  ++sent.calls;
  sent.wire_bytes += bytes;
}

int64_t aligned_bytes(const Tensor& f32) {
  const int64_t align = MemoryPlan::kAlign * size_of(DType::f32);
  return div_ceil(f32.num_bytes(), align) * align;
}

// Groups are named by their axis, and a trace names their calls "axis call". Equal ops become one entry, since the time
// of each call is the longer of its arithmetic and its bytes.
PassWork work_of(const Trace& trace, const StepStack& stack, const LaunchesOfPass& launches) {
  PassWork work{.stack_bytes = stack.high_water()};
  std::map<std::tuple<double, double, std::string_view>, size_t> known;  // the entry of an op of that cost and name
  const TraceEvent* before = nullptr;                                    // the op before, which is often the same
  size_t entry = 0;                                                      // and its entry
  for (const TraceEvent& event : trace.events()) {
    if (before && before->cost.flops == event.cost.flops && before->cost.bytes == event.cost.bytes &&
        before->name == event.name) {
      ++work.ops[entry].calls;
      work.ops[entry].cost += event.cost;
      continue;
    }
    const size_t space = event.name.find(' ');
    if (space != std::string::npos) {
      add_sent(work, axis_named(std::string_view(event.name).substr(0, space)), event.name.substr(space + 1),
               event.cost.bytes);
      continue;
    }
    const auto [found, is_new] = known.try_emplace({event.cost.flops, event.cost.bytes, event.name}, work.ops.size());
    if (is_new)
      work.ops.push_back(
          {.name = event.name, .kind = kernel_class(event.name), .kernels = launches_of(event.name, launches)});
    before = &event;
    entry = found->second;
    OpWork& op = work.ops[entry];
    ++op.calls;
    op.cost += event.cost;
  }
  return work;
}

// A stage on the null device, with the memory that it declares.
class DryStage {
 public:
  DryStage(const EngineSpec& spec, const StageSpec& stage, bool splits, ThreadPool& pool)
      : spec_(spec),
        pool_(pool),
        mesh_shape_(stage_mesh(spec.mesh)),
        world_(make_dry_run_transport(rank(), static_cast<int>(mesh_shape_.world()))),
        mesh_(mesh_shape_, *world_),
        plan_(spec.recompute, spec.offload),
        params_(plan_, ModelUse::training, with_idle_modules(spec.freeze, spec.model, spec.shape.num_mtp)) {
    params_.set_formats(spec.optimizer.value_or(OptimizerSpec{}));
    plan_.declare(rope_, "rope_table", {spec.max_positions, spec.model.rope_dim()}, DType::f32, Life::state);
    plan_.declare(loss_sum_, "loss_sum", {1}, DType::f64, Life::state);
    if (spec.shape.num_mtp > 0)
      plan_.declare(mtp_loss_sum_, "mtp_loss_sum", {spec.shape.num_mtp}, DType::f64, Life::state);
    const int64_t T = rows_between_projections(spec.shape, mesh_shape_);
    const int64_t chunk = expert_chunk(T, spec.lora, mesh_shape_.etp * mesh_shape_.ep);
    const DirectSizes sizes{.max_tokens = chunk,
                            .num_experts = spec.model.num_experts,
                            .top_k = spec.model.top_k,
                            .width = spec.model.hidden_size,
                            .dtype = spec.precision.compute};
    window_ = make_direct_window(plan_, mesh_, sizes, spec.dispatcher, spec.model.num_moe_layers());
    rows_ = make_expert_rows(
        spec.model, mesh_,
        {.budget = spec.expert_rows,
         .max_tokens = T,
         .chunk = chunk,
         .dispatcher = spec.dispatcher,
         .rows_factor = spec.balance.rank_rows_factor,
         .dtype = spec.precision.compute,
         .passes_in_flight = moe_layers_that_keep(spec.model, stage, spec.shape.num_mtp, spec.recompute),
         .has_layers = moe_layers_of(spec.model, stage, spec.shape.num_mtp) > 0});
    if (spec.measures_precision) quantize_stats_.emplace(plan_);
    if (spec.optimizer && spec.optimizer->qk_clip > 0) max_logits_.emplace(plan_);
    const LayerContext layers{.params = params_,
                              .plan = plan_,
                              .model = spec.model,
                              .balance = spec.balance,
                              .mesh = mesh_,
                              .rope_table_Pd = rope_,
                              .precision = spec.precision,
                              .dtype = spec.precision.compute,
                              .shape = spec.shape,
                              .seed = spec.seed,
                              .dispatcher = spec.dispatcher,
                              .expert_overlap = spec.expert_overlap,
                              .kernels = gpu_kernels(spec),
                              .fusion = spec.fusion,
                              .window = window_.get(),
                              .expert_rows = rows_.get(),
                              .quantize_stats = quantize_stats_ ? &*quantize_stats_ : nullptr,
                              .lora = spec.lora,
                              .max_logits = max_logits_ ? &*max_logits_ : nullptr,
                              .router_sums = &router_sums_,
                              .sharded_over = spec.fsdp ? spec.mesh : MeshShape{}};
    if (rows_) check_offload_of_rows(spec.offload);
    stage_.emplace(StageContext{.layers = layers,
                                .loss_sum_1 = loss_sum_,
                                .mtp_loss_sum_D = mtp_loss_sum_,
                                .offload = spec.offload.any() ? &offload_ : nullptr},
                   stage);
    metrics_bytes_ = plan_.bytes(Life::metrics);  // without those of the routers, which all layers share
    router_sums_.declare(plan_);
    bytes_before_rows_ = plan_.bytes(Life::metrics);
    if (rows_) rows_->declare(plan_);
    plan_.split_backward(splits);
    stage_->declare_saved(plan_, "", saved_);
    saved_bytes_ = plan_.bytes(Life::saved);
    stage_->declare_output(plan_);
    declare_micro_batch(plan_, spec.shape, batch_);
    batch_.training = true;
  }

  PartWork work() {
    PartWork work{.recompute = recompute_of(spec_, stage_->spec()),
                  .splits = plan_.splits_backward(),
                  .saved_bytes = saved_bytes_,
                  .output_bytes = plan_.bytes(Life::saved) - saved_bytes_,
                  .metrics_bytes = metrics_bytes_,
                  .logits = max_logits_ ? max_logits_->num_padded() : 0,
                  .window_bytes = plan_.bytes(Life::comm)};
    if (rows_) work.rows = rows_work();
    for (const OffloadedLayer& layer : saved_.on_host)
      for (const OffloadedTensor& t : layer.tensors) work.offloaded.emplace_back(t.on_host.numel(), t.on_host.dtype);
    run_passes(work);
    if (params_.has_copies()) {
      // The engine plans its stack for passes that quantise weights themselves, as evaluation does.
      const PartWork planned = work;
      work.copies = run([&](Step& step) { params_.make_copies(step.stream); });
      params_.hold_copies();
      run_passes(work);
      for (PassWork PartWork::*pass : {&PartWork::forward, &PartWork::loss, &PartWork::backward})
        (work.*pass).stack_bytes = (planned.*pass).stack_bytes;
    }
    batch_.first_of_step = true;
    work.first_backward = run_backward();
    for (const Param& p : params_.all())
      work.params.push_back(
          {.axis = p.spec.grad_axis,
           .dtype = p.w.dtype,
           .numel = p.w.numel(),
           .copies_bytes = params_.copies_bytes(p) + aligned_bytes(p.scales),
           .num_scales = p.scales.numel(),
           .kind = p.spec.kind,
           .has_grad = p.has_grad,
           .trainable = p.spec.trainable,
           .tied_copy = p.spec.tied_copy,
           .sums_apart = p.sums_apart(),
           .grad_stored_first = p.spec.grad_stored_first,
           .has_blocks = std::all_of(p.spec.parts.begin(), p.spec.parts.end(),
                                     [](const ParamPart& part) { return has_code_blocks(part.shape); }),
           .of_matrices = is_of_matrices(p.spec),
           .fuses_grad = p.fuses_grad(),
           .scratch = update_scratch(spec_.optimizer.value_or(OptimizerSpec{}), p.spec),
           .matrices = matrices_of(p)});
    return work;
  }

 private:
  RowsWork rows_work() const {
    const int64_t pages = rows_->pages_of_pass() *
                          moe_layers_that_keep(spec_.model, stage_->spec(), spec_.shape.num_mtp, spec_.recompute);
    const int64_t stash = stash_bytes(pages, rows_->stash_columns(), spec_.precision.compute);
    return {.scratch_bytes = plan_.bytes(Life::rows) - stash,
            .spill_bytes = plan_.spill_bytes(),
            .counts_ranks = plan_.bytes(Life::metrics) > bytes_before_rows_,
            .pages_of_pass = rows_->pages_of_pass(),
            .h_columns = rows_->h_columns(),
            .low_columns = rows_->low_columns()};
  }
  // Returns the parts of a parameter that Muon makes semi-orthogonal, neighbours of one shape together.
  std::vector<MatrixWork> matrices_of(const Param& p) {
    std::vector<MatrixWork> all;
    const bool is_muon = spec_.optimizer && spec_.optimizer->kind == OptimizerKind::muon;
    if (!is_muon || !p.has_grad || !is_of_matrices(p.spec)) return all;
    std::vector<ParamPart> parts = p.spec.parts;
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    Shape shape;
    for (const ParamPart& part : parts) {
      const int64_t numel = part.local_shape().numel();
      const bool is_next = !all.empty() && shape == part.shape && all.back().numel == numel &&
                           all.back().begin + all.back().count * numel == part.offset;
      if (!is_next) all.push_back({.begin = part.offset, .numel = numel, .each = orthogonalised(p, part)});
      shape = part.shape;
      ++all.back().count;
    }
    return all;
  }
  // Returns the work of a matrix, as MuonOptimizer computes it (parallel/optim/muon.cc). Its products
  // are never quantised.
  PassWork orthogonalised(const Param& p, const ParamPart& part) {
    const auto on_null = [](Shape shape, DType dtype) {
      return Tensor{.shape = shape, .dtype = dtype, .device = DeviceKind::null};
    };
    const int64_t M = part.shape[0], N = part.shape[1];
    const Tensor u = on_null({1, M, N}, DType::f32);
    const int64_t scratch = NewtonSchulz::scratch_bytes({1, M, N}, p.spec.dtype);
    PassWork work = run([&](Step& step) {
      newton_schulz(step.stream,
                    {.o_BMN = u, .u_BMN = u, .scratch = on_null({scratch}, DType::u8), .compute = p.spec.dtype});
    });
    for (OpWork& op : work.ops)
      if (op.name == "batched_gemm") op.name = "newton_schulz";
    const bool is_expert = p.spec.kind == ParamKind::experts;
    const int64_t shards = part.local_shape().numel() == part.shape.numel() ? 1
                           : is_expert                                      ? mesh_shape_.etp
                                                                            : mesh_shape_.tp;
    if (shards > 1) {
      const double bytes = static_cast<double>(u.num_bytes());
      add_sent(work, is_expert ? Axis::etp : Axis::tp, "all_gather", all_gather_cost(bytes, shards).wire_bytes);
    }
    return work;
  }
  // The last ranks of tp have more rows of a vocabulary that tp does not divide.
  int rank() const {
    const bool uneven = spec_.model.vocab_size % mesh_shape_.tp != 0;
    return rank_in_dense_view(mesh_shape_, {.tp = uneven ? mesh_shape_.tp - 1 : 0});
  }
  void run_passes(PartWork& work) {
    work.forward = run([&](Step& step) { stage_->forward(step, stream(), saved_, /*with_gradients=*/true); });
    if (stage_->spec().loss)
      work.loss = run([&](Step& step) { stage_->forward_loss(step, saved_, /*with_gradients=*/true); });
    work.backward = run_backward();
    if (plan_.splits_backward()) work.backward_weight = run([&](Step& step) { stage_->backward_weight(step, saved_); });
  }
  // Runs both backward passes. If other passes may run between them, each of them recomputes its inputs.
  PassWork run_backward() {
    return run([&](Step& step) {
      if (!plan_.splits_backward()) return stage_->backward(step, stream(), saved_);
      stage_->backward_input(step, stream(), saved_);
      stage_->backward_weight(step, saved_);
    });
  }
  // Returns the message between stages, which may have the hidden states of every depth.
  Tensor stream() const {
    const int64_t rows = rows_between_projections(spec_.shape, mesh_shape_) * (1 + spec_.shape.num_mtp);
    return {.shape = {rows, spec_.model.hidden_size}, .dtype = spec_.precision.compute, .device = DeviceKind::null};
  }
  template <class Body>
  PassWork run(Body&& body) {
    trace_.clear();
    Stream s(DeviceKind::null, pool_, &trace_, spec_.target);
    StepStack stack(DeviceKind::null, nullptr, 0);
    Step step{s, stack, batch_};
    body(step);
    return work_of(trace_, stack,
                   {.clears_experts = batch_.first_of_step && clears_experts(),
                    .norms_in_rope = norms_in_rope(spec_.model, spec_.mesh.tp),
                    .biases_router = spec_.model.router_bias});
  }
  // Returns whether Hopper's bf16 kernel stores the gradients of expert weights (ops/experts/sm90/expert_wgrad.cu).
  bool clears_experts() const { return spec_.precision.has_plain_dw() && spec_.precision.compute == DType::bf16; }

  const EngineSpec& spec_;
  ThreadPool& pool_;
  MeshShape mesh_shape_;
  std::unique_ptr<Transport> world_;
  Mesh mesh_;
  MemoryPlan plan_;
  ParamTable params_;
  Tensor rope_, loss_sum_, mtp_loss_sum_;
  std::unique_ptr<DirectWindow> window_;
  std::unique_ptr<ExpertRows> rows_;
  std::optional<QuantizeStats> quantize_stats_;
  std::optional<MaxLogits> max_logits_;
  ActivationOffload offload_;
  RouterSums router_sums_;
  std::optional<Stage> stage_;
  Stage::Saved saved_;
  MicroBatch batch_;
  Trace trace_;  // of the pass that runs
  int64_t saved_bytes_ = 0, metrics_bytes_ = 0, bytes_before_rows_ = 0;
};

// Moves the work of Stage::leave() to its own field: the last layer adds its output to the stream, except in a stage
// that ends with the norm.
void take_leave(PartWork& layer) {
  const auto last = std::find_if(layer.forward.ops.rbegin(), layer.forward.ops.rend(),
                                 [](const OpWork& op) { return op.name == "add"; });
  MOEBIUS_ASSERT(last != layer.forward.ops.rend());
  const double n = static_cast<double>(last->calls);
  layer.leave = {.name = last->name, .kind = last->kind, .calls = 1};
  layer.leave.cost = {.flops = last->cost.flops / n, .bytes = last->cost.bytes / n};
  last->cost = {.flops = last->cost.flops - layer.leave.cost.flops, .bytes = last->cost.bytes - layer.leave.cost.bytes};
  if (--last->calls == 0) layer.forward.ops.erase(std::next(last).base());
}

}  // namespace

const char* name_of(KernelClass kind) {
  constexpr const char* names[kNumKernelClasses] = {"products", "experts", "attention_forward", "attention_backward",
                                                    "memory"};
  return names[static_cast<int>(kind)];
}

KernelClass kernel_class(const std::string& op) {
  if (op == "attention_fwd") return KernelClass::attention_forward;
  if (op == "attention_bwd") return KernelClass::attention_backward;
  for (const char* name : {"expert_up", "expert_down", "d_expert_down", "d_expert_up", "expert_wgrad"})
    if (op == name) return KernelClass::experts;
  for (const char* name : {"gemm", "batched_gemm", "gated_up", "d_gated_down", "lm_loss", "lm_loss_block",
                           "lm_logits_block", "router_logits_fwd", "router_logits_bwd"})
    if (op == name) return KernelClass::products;
  return KernelClass::memory;
}

double PartWork::offloaded_bytes() const {
  double sum = 0;
  for (const auto& [numel, dtype] : offloaded) sum += static_cast<double>(bytes_of(dtype, numel));
  return sum;
}

double PassWork::flops() const {
  double sum = 0;
  for (const OpWork& op : ops) sum += op.cost.flops;
  return sum;
}

// Two threads may run the same part, and the first one's is kept.
template <class Make>
const PartWork& PartLibrary::known_or_new(Parts& known, const PartKey& key, Make&& make) {
  {
    const std::scoped_lock lock(mutex_);
    if (const auto found = known.find(key); found != known.end()) return *found->second;
  }
  std::unique_ptr<PartWork> made = make();
  const std::scoped_lock lock(mutex_);
  return *known.try_emplace(key, std::move(made)).first->second;
}

const PartWork& PartLibrary::timed_part(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits) {
  if (!has_simpler_parts(spec, stage)) return part(spec, stage, policy, splits);
  return known_or_new(composed_, part_key(spec, stage, policy, splits), [&] {
    const EngineSpec local = with_local_experts(spec);
    return composed_part({.experts = &part(with_simple_attention(spec), stage, policy, splits),
                          .attention = &part(local, stage, policy, splits),
                          .neither = &part(with_simple_attention(local), stage, policy, splits)});
  });
}

const PartWork& PartLibrary::part(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits) {
  return known_or_new(parts_, part_key(spec, stage, policy, splits), [&] {
    auto part = std::make_unique<PartWork>(DryStage(spec, stage, splits, pool(spec.threads)).work());
    if (stage.num_layers > 0) take_leave(*part);
    return part;
  });
}

const PipelineUse& PartLibrary::pipeline(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank) {
  const std::scoped_lock lock(mutex_);
  return pipelines_.of(spec, num_ranks, pp_rank);
}

size_t PartLibrary::policy_of(const EngineSpec& spec) {
  const std::scoped_lock lock(mutex_);
  const auto known = std::find_if(policies_.begin(), policies_.end(), [&](const Policy& p) {
    return p.model == spec.model && p.balance == spec.balance && p.precision == spec.precision &&
           p.freeze == spec.freeze && p.lora == spec.lora && p.measures_precision == spec.measures_precision;
  });
  if (known != policies_.end()) return static_cast<size_t>(known - policies_.begin());
  policies_.push_back({spec.model, spec.balance, spec.precision, spec.freeze, spec.lora, spec.measures_precision});
  return policies_.size() - 1;
}

// Ops on the null device read only its size, so that threads may share it.
ThreadPool& PartLibrary::pool(int threads) {
  const std::scoped_lock lock(mutex_);
  return pools_.try_emplace(threads, threads).first->second;
}

// Micro-batches follow one another, each aligned as its first tensor is.
int64_t PartLibrary::batch_bytes(const BatchShape& shape, int64_t count) {
  const std::array<int64_t, 7> key{shape.batch,
                                   shape.seq,
                                   shape.max_segments,
                                   shape.documents,
                                   static_cast<int64_t>(shape.cp_comm),
                                   static_cast<int64_t>(shape.cp_comm_window),
                                   shape.num_mtp};
  const std::scoped_lock lock(mutex_);
  auto found = batches_.find(key);
  if (found == batches_.end()) {
    MemoryPlan plan;
    MicroBatch first, second;
    declare_micro_batch(plan, shape, first);
    const int64_t bytes = plan.bytes(Life::batch);
    declare_micro_batch(plan, shape, second);
    found = batches_.emplace(key, std::pair(bytes, plan.bytes(Life::batch) - bytes)).first;
  }
  const auto [one, more] = found->second;
  return one + (count - 1) * more;
}

}  // namespace moebius
