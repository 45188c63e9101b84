#include "engine/engine.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "config/check/hopper_check.h"
#include "core/fault.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "engine/pinned_advice.h"
#include "model/moe/expert_rows.h"
#include "model/quantize_stats.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/cublas_lt.h"
#include "ops/gemm/gemm_device.h"
#include "parallel/optim/kept_states.h"

namespace moebius {
namespace {

// Modules of multi-token prediction that are not computed use no memory, except in training, which
// saves them.
std::vector<HeldStage> held_stages(const EngineSpec& spec, const PipelineRank& rank) {
  std::vector<HeldStage> stages = rank.stages();
  for (HeldStage& stage : stages) {
    if (!holds_mtp_modules(spec.use, spec.shape.num_mtp)) stage.spec.num_mtp = 0;
  }
  return stages;
}

// Returns the maximum over a step of the micro-batches in flight in MoE layers.
int64_t moe_passes_in_flight(const EngineSpec& spec, const PipelineRank& rank) {
  std::vector<int64_t> layers;
  for (const HeldStage& stage : held_stages(spec, rank))
    layers.push_back(moe_layers_that_keep(spec.model, stage.spec, spec.shape.num_mtp, spec.recompute));
  return most_in_use(sets_in_use(rank.step), layers);
}

std::unique_ptr<Transport> dry_run_world(const EngineSpec& spec) {
  if (spec.world || spec.device != DeviceKind::null) return nullptr;
  spec.mesh.check();
  return make_dry_run_transport(0, static_cast<int>(spec.mesh.world()));
}

Mesh make_mesh(const MeshShape& shape, Transport* world, GpuLinks* links) {
  return world ? Mesh(shape, *world, links) : Mesh(shape);
}

// During unwinding, aborts the communication that the GPU waits for; otherwise freeing device memory would block.
class AbortCommOnUnwind {
 public:
  explicit AbortCommOnUnwind(GpuLinks* links) : links_(links) {}
  ~AbortCommOnUnwind() {
    if (links_ && std::uncaught_exceptions() > before_) links_->abandon();
  }
  AbortCommOnUnwind(const AbortCommOnUnwind&) = delete;

 private:
  GpuLinks* links_;
  int before_ = std::uncaught_exceptions();
};

std::unique_ptr<GpuRanks> gpu_ranks(const EngineSpec& spec) {
  const bool several = spec.world && spec.world->size() > 1;
  return several && spec.device == DeviceKind::cuda ? std::make_unique<GpuRanks>(*spec.world) : nullptr;
}

// The library of matrix products is opened first: it must outlive the handles that the accelerator keeps.
std::unique_ptr<Accelerator> accelerator(const EngineSpec& spec, const GpuRanks* ranks) {
  if (spec.device != DeviceKind::cuda) return nullptr;
  if (Accelerator::why_missing().empty()) open_cublas_lt();
  auto gpu = std::make_unique<Accelerator>(ranks ? ranks->index() : 0);
  set_kernel_choice(*gpu, spec.kernels);
  const GpuLimits limits = limits_of_gpu(spec);
  if (spec.gpu_limits) set_gpu_limits(*gpu, limits);
  const bool splits = spec.use == ModelUse::training && spec.model.num_moe_layers() > 0 &&
                      spec.mesh.ep * spec.mesh.etp > 1 && spec.expert_overlap == ExpertOverlap::batch_split &&
                      spec.precision.compute == DType::bf16;
  check_hopper_needs({.recipe = spec.precision.recipe,
                      .fuses_grad = spec.optimizer && spec.optimizer->fuse_grad,
                      .splits_batch = splits,
                      .kernels = spec.kernels},
                     limits.capability_major, limits.capability_minor);
  return gpu;
}

// The micro-batches of a step are in memory before it begins.
class LoadedBatch final : public BatchSource {
 public:
  void fill(MicroBatch&, int64_t) override {}
};

}  // namespace

Engine::Engine(const EngineSpec& spec)
    : spec_(resolved(spec)),
      pool_(spec.threads),
      gpu_ranks_(gpu_ranks(spec)),
      gpu_(accelerator(spec, gpu_ranks_.get())),
      links_(gpu_ranks_ ? std::make_unique<GpuLinks>(*spec.world, *gpu_, *gpu_ranks_, spec.sums) : nullptr),
      dry_run_world_(dry_run_world(spec)),
      mesh_(make_mesh(spec_.mesh, spec.world ? spec.world : dry_run_world_.get(), links_.get())),
      plan_(spec.recompute, spec.offload),
      peak_(gpu_.get()) {
  if (gpu_ && !limits_of_gpu(spec_).is_hopper()) spec_.precision.has_f8_kernels = false;
  // A GPU has one micro-batch, and the host's are copied into it one after the other. With several
  // stages all are in flight.
  const bool share_buffer = spec_.target == DeviceKind::cuda && spec_.mesh.pp == 1;
  batches_ = std::make_unique<BatchBuffers>(plan_, spec_.shape, spec_.num_micro_batches, share_buffer);
  choose_dispatcher(spec.dispatcher);
  make_model();
  if (spec_.optimizer) make_optimizer();
  if (spec_.cache_tokens > 0) declare_generation();
  const int64_t stack_bytes = measure_stack();
  check_memory(plan_, stack_bytes, spec_, gpu_.get(), gpu_ranks_.get());
  with_memory_advice([&] { allocate(stack_bytes); });
  if (links_ && spec_.mesh.pp > 1 && optimizer_) with_memory_advice([&] { warm_up(); });
  Stream s = stream();
  with_memory_advice([&] { model_->init_state(s); });
}

// It also aborts when it is destroyed during unwinding.
Engine::~Engine() {
  if (links_ && std::uncaught_exceptions() > 0) links_->abandon();
}

void Engine::make_model() {
  const PipelineRank rank = pipeline_rank(spec_.pipeline, spec_.model, mesh_.shape().pp, mesh_.place().pp);
  model_ = std::make_unique<Model>(ModelContext{.model = spec_.model,
                                                .balance = spec_.balance,
                                                .precision = spec_.precision,
                                                .mesh = mesh_,
                                                .plan = plan_,
                                                .use = spec_.use,
                                                .shape = spec_.shape,
                                                .max_positions = spec_.max_positions,
                                                .seed = spec_.seed,
                                                .stages = held_stages(spec_, rank),
                                                .freeze = spec_.freeze,
                                                .dispatcher = spec_.dispatcher,
                                                .expert_overlap = spec_.expert_overlap,
                                                .kernels = gpu_kernels(spec_),
                                                .fusion = spec_.fusion,
                                                .lora = spec_.lora,
                                                .shards_weights = spec_.fsdp,
                                                .expert_rows = spec_.expert_rows,
                                                .moe_passes_in_flight = moe_passes_in_flight(spec_, rank),
                                                .optimizer = spec_.optimizer.value_or(OptimizerSpec{}),
                                                .measures_precision = spec_.measures_precision});
  if (spec_.lora.is_on()) check_lora_targets(model_->whole_catalog(), spec_.lora);
  if (!spec_.freeze.empty()) check_freeze(model_->whole_catalog(), spec_.freeze);
  if (!spec_.precision.keep.empty()) check_keep(model_->whole_catalog(), spec_.precision.keep);
  pipeline_ = std::make_unique<Pipeline>(rank, *model_, mesh_, plan_);
  tied_embedding_ = std::make_unique<TiedEmbedding>(*model_, mesh_, rank.layout);
}

void Engine::make_optimizer() {
  ParamTable& params = model_->params();
  ShardingSpec spec = sharding_spec(spec_);
  spec.held = model_->tied_elsewhere();
  sharding_ = make_sharding(params, mesh_, plan_, spec);
  keep_states(*spec_.optimizer, params);
  grad_norm_ = std::make_unique<GradNorm>(params, mesh_, plan_, spec_.optimizer->clip);
  const OptimizerContext context{*spec_.optimizer, params, plan_, spec_.seed, &mesh_, sharding_.get()};
  optimizer_ = moebius::make_optimizer(context);
  if (model_->max_logits()) qk_clipping_ = std::make_unique<QkClipping>(context, *model_->max_logits());
  // On the null device the update of a step is counted in that step.
  const bool overlaps = spec_.overlaps_update && can_overlap_update(spec_) && spec_.device != DeviceKind::null;
  if (overlaps && optimizer_->streamed()) pending_ = std::make_unique<PendingUpdate>(*optimizer_->streamed(), params);
}

void Engine::allocate(int64_t stack_bytes) {
  with_pinned_advice(plan_, kept_on_host(spec_), [&] {
    plan_.bind(spec_.device, stack_bytes);
    batches_->bind(plan_, spec_.device);
    if (gpu_) metrics_ = HostMirror(plan_, Life::metrics);
    if (gpu_ && spec_.cache_tokens > 0) draws_.bind(spec_.cache_sequences);
  });
  Stream s = stream();
  model_->prepare_offload(s);
  if (!gpu_) return;
  prepare_gemm(s);
  if (spec_.graph && (!links_ || links_->can_capture())) graphs_ = StepGraphs(graph_device(*gpu_));
}

// Runs the passes once, so that all kernels are loaded before the first step. Loading one waits for all work of the
// GPU, which in a step may include a receive from a rank that waits for a result of that kernel: a deadlock.
void Engine::warm_up() {
  Stream s = stream();
  MicroBatch batch = batches_->on_device(0);
  batch.scalars = {};
  batch.training = true;
  pipeline_->run_once(s, plan_.stack(), batch);
  for (int life = 0; life < kNumLives; ++life) {
    // Each pass writes its rows and its messages before it reads them. The memory of messages can also have the
    // addresses of other ranks' windows (comm/peer_window.h), which must stay.
    if (static_cast<Life>(life) == Life::rows || static_cast<Life>(life) == Life::comm) continue;
    const int64_t bytes = plan_.bytes(static_cast<Life>(life));
    if (bytes == 0) continue;
    Tensor all = tensor_of(static_cast<uint8_t*>(plan_.base(static_cast<Life>(life))), {bytes});
    all.device = s.device();
    fill_zero(s, all);
  }
  // The weights that the passes left in the layer buffers are cleared too.
  if (spec_.fsdp || spec_.offload_weights) gather_weights(s);
}

DeviceMemory Engine::shared_device_memory() {
  DeviceMemory memory = device_memory();
  if (!gpu_ranks_) return memory;
  memory.num_ranks = gpu_ranks_->num_sharing();
  memory.plan_bytes = gpu_ranks_->sum_of_sharing(memory.plan_bytes);
  memory.workspace_bytes = gpu_ranks_->sum_of_sharing(memory.workspace_bytes);
  memory.code_bytes *= gpu_ranks_->num_processes();
  return memory;
}

// --- the dry run: everything that a step can do, on tensors without memory ------------------------------------------

int64_t Engine::measure_stack() {
  Stream null_stream(DeviceKind::null, pool_, nullptr, spec_.target);
  StepStack null_stack(DeviceKind::null, nullptr, 0);
  MicroBatch batch = batches_->on_device(0);
  batch.training = spec_.use == ModelUse::training;
  Step step{null_stream, null_stack, batch};
  spec_.cache_tokens > 0 ? dry_run_cached(step) : dry_run(step);
  if (spec_.use != ModelUse::training) {
    StackScope scope(null_stack);
    step.alloc({kLogitRows, spec_.model.vocab_size}, DType::f32);
  }
  return null_stack.high_water();
}

void Engine::dry_run(Step& step) {
  if (spec_.use == ModelUse::inference) return pipeline_->run_forward(step.stream, step.stack, step.batch);
  pipeline_->run_one_micro_batch(step.stream, step.stack, step.batch);
  tied_embedding_->sum_gradients(step.stream, step.stack);
  if (optimizer_) update(step.stream, step.stack, step.batch.lr_and_step_2());
}

// --- the step -------------------------------------------------------------------------------------------------------

void Engine::load_batch(BatchSource& source, int64_t step) {
  batches_->set_lr_and_step(step, /*lr=*/0);
  source.begin_step(step);
  for (int64_t m = 0; m < spec_.num_micro_batches; ++m) source.fill(batch(m), m);
}

void Engine::step(int64_t step, double lr) {
  LoadedBatch loaded;
  this->step(loaded, step, lr);
}

void Engine::step(BatchSource& source, int64_t step, double lr) {
  const AbortCommOnUnwind on_unwind(links_.get());
  Stream s = stream();
  PhaseScope phase(s, "step", step);
  clock_.begin_step();
  const bool had_pending = is_pending_;
  batches_->set_lr_and_step(step, lr);
  with_memory_advice([&] { launch_step(s, source, step); });
  has_gradients_ = true;
  // If the host of a rank hangs, the barrier names that rank; the wait for the GPU would not.
  if (links_) mesh_.group(Axis::world).barrier();
  read_metrics();  // the host waits for the device only here
  read_clock(had_pending);
  ++num_steps_;
}

void Engine::read_clock(bool had_pending) {
  clock_.read(gpu_.get());
  if (!optimizer_ || !spec_.optimizer->offload || spec_.device == DeviceKind::null) return;
  if (plan_.bytes(Life::host) == plan_.offloaded_bytes()) return;  // all states are on the device
  const StreamedUpdate* streamed = optimizer_->streamed();
  const bool ran = !pending_ || had_pending;
  clock_.set_states(!ran ? 0 : streamed ? streamed->seconds() : clock_.times().optimizer_s, had_pending);
}

void Engine::launch_step(Stream& s, BatchSource& source, int64_t step) {
  clock_.load([&] { source.begin_step(step); });
  const int64_t count = spec_.pipeline.num_micro_batches;
  quantise_weights(s);
  for (Round round{0, count}; round.first < spec_.num_micro_batches; round.first += count) {
    load_batch(s, source, round);
    forward_backward(s, round);
    close_heap_gaps();
    if (model_->params().has_copies()) model_->params().hold_copies();
  }
  model_->params().drop_copies();
  clock_.end_passes(gpu_.get());
  PhaseScope phase(s, "optimizer");
  graphs_.run(StepPart::update(), s, [&](Stream& on) {
    reduce(on);
    const Tensor& lr_and_step_2 = batches_->on_device(0).lr_and_step_2();
    if (!pending_) return update(on, plan_.stack(), lr_and_step_2);
    pending_->keep(on, measure_gradients(on, plan_.stack(), lr_and_step_2));
  });
  is_pending_ = pending_ != nullptr;
  clock_.end_update(gpu_.get());
}

// Quantises the weights once for all passes of a step, which do not change them. Weights that arrive during the first
// passes, or that a pending update changes, are quantised on arrival.
void Engine::quantise_weights(Stream& s) {
  ParamTable& params = model_->params();
  if (!params.has_copies()) return;
  if (sharding_->overlaps() || is_pending_) return params.make_copies_when_ready();
  graphs_.run(StepPart::weights(), s, [&](Stream& on) { params.make_copies(on); });
  params.hold_copies();
}

void Engine::load_batch(Stream& s, BatchSource& source, const Round& round) {
  for (int64_t m = round.first; m < round.first + round.count; ++m) {
    fault_point("train.mid_step");
    clock_.load([&] { source.fill(batch(m), m); });
  }
  batches_->upload(s, round.first, round.count);
}

// The action list of the pipeline gives the order of the forward and backward passes of the round.
void Engine::forward_backward(Stream& s, const Round& round) {
  PhaseScope phase(s, "micro-batch", round.first);
  const bool first = round.first == 0, last = round.first + round.count == spec_.num_micro_batches;
  const StepPasses passes{.first = first, .last_micro_batches = last ? round.count : 0, .closed = graphs_.captures()};
  if (first) clock_.begin_passes(gpu_.get());
  const bool is_pending = std::exchange(is_pending_, false);  // nothing starts the update again if a pass throws
  const bool overlaps = sharding_->overlaps();                // otherwise the last passes are like those before them
  std::vector<int64_t> cps;
  for (int64_t m = 0; m < round.count; ++m) cps.push_back(batch(round.first + m).cp);
  const StepPart part = StepPart::passes(first, overlaps && last, std::move(cps), is_pending);
  graphs_.run(part, s, [&](Stream& on) {
    const auto batch = [&](int64_t m) -> const MicroBatch& { return batches_->on_device(round.first + m); };
    const auto run = [&] { sharding_->run_passes(on, passes, [&] { pipeline_->run_step(on, plan_.stack(), batch); }); };
    is_pending ? pending_->run(on, run) : run();
  });
}

// Reduces the sums of a step over all ranks.
void Engine::reduce(Stream& s) {
  model_->router_sums().reduce(s, mesh_);
  for (const auto& layer : model_->moe_layers()) layer.moe->router().reduce_metrics(s);
  if (model_->expert_rows()) model_->expert_rows()->reduce_counts(s);
  reduce_loss(s);
  tied_embedding_->sum_gradients(s, plan_.stack());
}

void Engine::reduce_loss(Stream& s) {
  for (const Tensor& sum : {model_->loss_sum(), model_->mtp_loss_sum()}) {
    if (sum.empty()) continue;
    mesh_.group(Axis::dp_cp).all_reduce_sum(s, sum);
    mesh_.group(Axis::pp).all_reduce_sum(s, sum);  // the last stage computes it
  }
}

// Reduces the gradients, and measures their norm.
OptimizerStepArgs Engine::measure_gradients(Stream& s, StepStack& stack, const Tensor& lr_and_step_2) {
  sharding_->reduce(s);
  grad_norm_->measure(s, stack);
  return {.scale_1 = grad_norm_->scale(), .lr_and_step_2 = lr_and_step_2};
}

// Reduces and clips the gradients, and updates the weights.
void Engine::update(Stream& s, StepStack& stack, const Tensor& lr_and_step_2) {
  const OptimizerStepArgs args = measure_gradients(s, stack, lr_and_step_2);
  optimizer_->update(s, stack, args);
  if (qk_clipping_) qk_clipping_->update(s, stack, args);
  sharding_->weights_changed(s);
}

void Engine::finish_update() {
  if (!std::exchange(is_pending_, false)) return;
  Stream s = stream();
  with_memory_advice(
      [&] { graphs_.run(StepPart::pending_update(), s, [&](Stream& on) { pending_->run(on, [] {}); }); });
  synchronize(s);  // the host may read the states
}

void Engine::init_weights(Stream& s, uint64_t seed) {
  finish_update();
  const ParamTable& params = model_->params();
  params.init(s, seed);
  // Weights in other formats have the same bits on every rank, so nothing is sent for them.
  const auto is_quantised = [](const Param& p) { return p.is_quantised(); };
  if (std::any_of(params.all().begin(), params.all().end(), is_quantised)) gather_weights(s);
}

void Engine::gather_weights(Stream& s) {
  finish_update();
  sharding_->weights_changed(s);
  sharding_->wait_for_weights(s);
}

void Engine::end_of_step() {
  Stream s = stream();
  PhaseScope phase(s, "end of step");
  with_memory_advice([&] { graphs_.run(StepPart::end_of_step(is_pending_), s, [&](Stream& on) { clear_sums(on); }); });
  if (ActivationOffload* offload = model_->offload()) offload->clear_bytes();
  has_gradients_ = false;
}

void Engine::clear_sums(Stream& s) {
  for (const auto& layer : model_->moe_layers()) layer.moe->router().end_of_step(s);
  if (model_->expert_rows()) model_->expert_rows()->end_of_step(s);
  if (const auto* stats = model_->quantize_stats()) stats->clear(s);
  if (const auto* logits = model_->max_logits()) logits->clear(s);
  fill_zero(s, model_->loss_sum());
  if (!model_->mtp_loss_sum().empty()) fill_zero(s, model_->mtp_loss_sum());
  if (!is_pending_) model_->params().zero_added_grads(s);  // a pending update still reads them
}

double Engine::loss() const { return *on_host(model_->loss_sum()).ptr<double>() * batch().scalars.loss_scale[0]; }

double Engine::mtp_loss() const {
  const int64_t depths = model_->num_mtp_depths();
  if (depths == 0) return 0;
  const double* sums = on_host(model_->mtp_loss_sum()).ptr<double>();
  double loss = 0;
  for (int64_t k = 0; k < depths; ++k) loss += sums[k] * batch().scalars.loss_scale[k + 1];
  return loss / static_cast<double>(depths);
}

// --- parts of a step ------------------------------------------------------------------------------------------------

void Engine::forward(int64_t m) {
  run([&](Step& step) { pipeline_->run_forward(step.stream, step.stack, step.batch); }, m);
  close_heap_gaps();
}

// Products on a CPU leave gaps.
void Engine::close_heap_gaps() {
  if (spec_.device == DeviceKind::cpu) heap_gaps_.close();
}

void Engine::forward_backward(int64_t m) {
  run(
      [&](Step& step) {
        MicroBatch batch = step.batch;
        batch.first_of_step = !has_gradients_;
        pipeline_->run_one_micro_batch(step.stream, step.stack, batch);
      },
      m);
  has_gradients_ = true;
}

// --- results --------------------------------------------------------------------------------------------------------

void Engine::read_metrics() {
  if (!gpu_) return;
  Stream s = stream();
  metrics_.to_host(s);
}

// --- construction and state -----------------------------------------------------------------------------------------

DataShare Engine::data_share() const {
  const RankPlace& at = mesh_.place();
  return {.dp_rank = at.dp, .dp = mesh_.shape().dp, .cp_rank = at.cp, .cp = mesh_.shape().cp};
}

Stream Engine::stream() {
  if (gpu_) return Stream(*gpu_, pool_, trace_);
  return Stream(spec_.device, pool_, trace_, spec_.target);
}

std::string Engine::fallback_kernels_text() const {
  return gpu_ ? moebius::fallback_kernels_text(gpu_->state<FallbackKernels>(), spec_.precision.compute) : "";
}

std::string Engine::links_text() const {
  const char* steps = graphs_.captures() ? "CUDA graphs" : "eager";
  return links_ ? fmt::format("ranks exchange by {}; steps are {}", links_->text(), steps) : "";
}

int64_t Engine::peak_bytes() {
  if (num_steps_ <= 4) sample_peak_memory();
  return peak_.bytes();
}

int64_t Engine::pinned_bytes() const {
  if (spec_.target != DeviceKind::cuda) return 0;
  return batches_->num_mirrors() * plan_.bytes(Life::batch) + plan_.bytes(Life::metrics) + plan_.bytes(Life::host);
}

}  // namespace moebius
