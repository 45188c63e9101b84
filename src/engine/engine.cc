#include "engine/engine.h"

#include <algorithm>
#include <exception>

#include "config/dispatcher_choice.h"
#include "device/fallback_kernels.h"
#include "model/device_support.h"
#include "ops/attention/cuda/attention.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/cuda/cublas_lt.h"
#include "ops/gemm/cuda/gemm.h"

namespace moebius {

MeshShape mesh_shape(const ParallelSpec& p, int64_t world_size) {
  return {
      .tp = p.tp, .cp = p.cp, .dp = p.dp(world_size), .pp = p.pp, .etp = p.etp, .ep = p.ep, .edp = p.edp(world_size)};
}

namespace {

// Inference launches its kernels one by one, so that it may read counts back.
DispatcherKind dispatcher_of(const EngineSpec& spec) {
  const bool captures = spec.target == DeviceKind::cuda && spec.graph && spec.use == ModelUse::training;
  return resolve_dispatcher({.asked = spec.dispatcher,
                             .ep = spec.mesh.ep,
                             .etp = spec.mesh.etp,
                             .top_k = spec.model.top_k,
                             .has_moe_layers = spec.model.num_moe_layers() > 0,
                             .captures = captures})
      .kind;
}

}  // namespace

EngineSpec training_engine_spec(const RunSpec& run, const MeshShape& mesh) {
  const int64_t B = run.train.micro_batch, S = run.train.seq_len;
  return {.model = run.model,
          .balance = run.moe,
          .precision = run.precision,
          .use = ModelUse::training,
          .shape = {.batch = B,
                    .seq = S / mesh.cp,
                    .max_segments = run.data.separate_documents ? B * S : B,
                    .documents = run.data.separate_documents,
                    .cp_comm = run.parallel.cp_comm,
                    .num_mtp = run.num_mtp()},
          .num_micro_batches = std::max<int64_t>(1, run.train.global_batch / (B * mesh.dp)),
          .optimizer = run.optimizer,
          .recompute = run.memory.recompute,
          .freeze = run.train.freeze,
          .mesh = mesh,
          .pipeline = {.num_virtual = run.parallel.vpp, .layout = run.parallel.layout},
          .dispatcher = resolve_dispatcher(run).kind,
          .overlap = run.parallel.overlap,
          .device = run.device,
          .target = run.device,
          .graph = run.graph,
          .threads = run.threads > 0 ? narrow<int>(run.threads) : num_available_cpus(),
          .seed = run.seed};
}

namespace {

constexpr int64_t kLogitRows = 64;  // at once, on their way to the host

// t inside a buffer that is laid out like the one that begins at `base`.
Tensor rebased(Tensor t, const void* base, const HostBuffer& host) {
  if (t.data) t.data = static_cast<char*>(host.data()) + (static_cast<char*>(t.data) - static_cast<const char*>(base));
  t.device = DeviceKind::cpu;
  return t;
}

// The m-th, or the one that serves all micro-batches in turn.
template <class All>
auto& of_micro_batch(All& all, int64_t m) {
  return all[all.size() == 1 ? 0 : m];
}

MicroBatch rebased(MicroBatch b, const void* base, const HostBuffer& host) {
  const auto rebase = [&](std::initializer_list<Tensor*> tensors) {
    for (Tensor* t : tensors) *t = rebased(*t, base, host);
  };
  rebase({&b.token_T, &b.target_T, &b.weight_T, &b.pos_T, &b.doc_start_T, &b.segment_T, &b.loss_scale_1, &b.draw_2});
  for (Targets& t : b.mtp_targets) rebase({&t.target_T, &t.weight_T, &t.loss_scale_1});
  return b;
}

// Modules of multi-token prediction that nothing computes take no room, but in training, which saves what it was given.
std::vector<HeldStage> held_stages(const EngineSpec& spec, const std::optional<PipelineRank>& rank) {
  std::vector<HeldStage> stages = rank ? rank->stages() : whole_model(spec.model);
  for (HeldStage& stage : stages) {
    if (!holds_mtp_modules(spec.use, spec.shape.num_mtp)) stage.spec.num_mtp = 0;
  }
  return stages;
}

std::unique_ptr<Transport> dry_run_world(const EngineSpec& spec) {
  if (spec.world || spec.device != DeviceKind::null) return nullptr;
  spec.mesh.check();
  return make_dry_run_transport(0, static_cast<int>(spec.mesh.world()));
}

Mesh make_mesh(const MeshShape& shape, Transport* world, GpuLinks* links) {
  return world ? Mesh(shape, *world, links) : Mesh(shape);
}

// When an exception passes by, what the GPU awaits of other ranks is given up: it would hold up whatever frees memory.
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

EngineSpec checked(EngineSpec spec) {
  if (spec.device != DeviceKind::null) spec.target = spec.device;
  spec.dispatcher = dispatcher_of(spec);
  check_device(spec.model, spec.target, {.batch = spec.shape.batch, .tp = spec.mesh.tp});
  if (spec.device == DeviceKind::cuda && Accelerator::why_missing().empty()) cuda::open_cublas_lt();
  return spec;
}

std::unique_ptr<GpuRanks> gpu_ranks(const EngineSpec& spec) {
  const bool several = spec.world && spec.world->size() > 1;
  return several && spec.device == DeviceKind::cuda ? std::make_unique<GpuRanks>(*spec.world) : nullptr;
}

}  // namespace

Engine::Engine(const EngineSpec& spec)
    : spec_(checked(spec)),
      pool_(spec.threads),
      gpu_ranks_(gpu_ranks(spec)),
      gpu_(spec.device == DeviceKind::cuda ? std::make_unique<Accelerator>(gpu_ranks_ ? gpu_ranks_->index() : 0)
                                           : nullptr),
      links_(gpu_ranks_ ? std::make_unique<GpuLinks>(*spec.world, *gpu_, *gpu_ranks_) : nullptr),
      dry_run_world_(dry_run_world(spec)),
      mesh_(make_mesh(spec.mesh, spec.world ? spec.world : dry_run_world_.get(), links_.get())),
      plan_(spec.recompute) {
  if (gpu_) other_bytes_ = gpu_->info().memory_bytes - gpu_->info().free_bytes;
  if (spec_.max_positions == 0) spec_.max_positions = std::max(spec_.shape.seq * spec_.mesh.cp, spec_.cache_tokens);
  // A GPU has one, which each micro-batch of the host is copied into; but a pipeline has several in flight.
  const bool in_turn = spec_.target == DeviceKind::cuda && spec_.mesh.pp == 1;
  batches_.resize(in_turn ? 1 : spec_.num_micro_batches);
  for (MicroBatch& batch : batches_) declare_micro_batch(plan_, spec_.shape, batch);
  make_model();
  if (spec_.optimizer) {
    optimizer_ = make_optimizer(*spec_.optimizer, model_->params(), mesh_, plan_,
                                {.overlap = spec_.overlap, .bucket_numel = spec_.bucket_numel});
    if (const Param* tied = model_->tied_elsewhere()) optimizer_->exchange().hold(*tied);
    plan_.declare(schedule_2_, "schedule", {2}, DType::f64, Life::batch);
  }
  if (spec_.cache_tokens > 0) model_->declare_caches(plan_, caches_, spec_.cache_tokens);
  const int64_t stack_bytes = measure_stack();
  if (spec_.device == DeviceKind::cpu) check_host_memory(plan_, stack_bytes, available_memory_bytes(), memory_use());
  if (gpu_) check_gpu_memory(stack_bytes);
  with_memory_advice([&] { allocate(stack_bytes); });
  if (links_ && pipeline_ && optimizer_) with_memory_advice([&] { warm_up(); });
  Stream s = stream();
  with_memory_advice([&] { model_->init_state(s); });
}

// As AbortCommOnUnwind, of what else runs on the engine.
Engine::~Engine() {
  if (links_ && std::uncaught_exceptions() > 0) links_->abandon();
}

// Loading a kernel waits for all that its GPU does, which may be a receive: of what another rank sends only once it has
// got what this one would compute with that kernel.
void Engine::warm_up() {
  Stream s = stream();
  MicroBatch batch = device_batch(0);
  batch.loss_scale = batch.total_tokens = 1;
  batch.training = true;
  pipeline_->run_once(s, plan_.stack(), batch);
  for (int life = 0; life < kNumLives; ++life) {
    const int64_t bytes = plan_.bytes(static_cast<Life>(life));
    if (bytes == 0) continue;
    Tensor all = tensor_of(static_cast<uint8_t*>(plan_.base(static_cast<Life>(life))), {bytes});
    all.device = s.device();
    fill_zero(s, all);
  }
  synchronize(s);
}

MemoryUse Engine::memory_use() const {
  return {.model = spec_.model,
          .training = spec_.use == ModelUse::training,
          .batch = spec_.shape.batch,
          .recompute = spec_.recompute,
          .freezes = !spec_.freeze.empty()};
}

// Ranks that share a GPU ask for theirs together, before any of them has taken it.
void Engine::check_gpu_memory(int64_t stack_bytes) {
  const int64_t free = gpu_->info().free_bytes;
  if (!gpu_ranks_) return check_device_memory(plan_, stack_bytes, free, memory_use());
  const int64_t mine = needed_bytes(plan_, stack_bytes), others = gpu_ranks_->sum_of_sharing(mine) - mine;
  gpu_ranks_->control().together([&] { check_device_memory(plan_, stack_bytes, free - others, memory_use()); });
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

std::string Engine::fallback_kernels_text() const {
  return gpu_ ? moebius::fallback_kernels_text(gpu_->state<FallbackKernels>(), spec_.precision.compute) : "";
}

std::string Engine::links_text() const {
  if (!links_) return "";
  return fmt::format("ranks exchange by {}; steps are {}", links_->text(),
                     records() ? "recorded" : "launched op by op");
}

void Engine::allocate(int64_t stack_bytes) {
  plan_.bind(spec_.device, stack_bytes);
  host_batches_ = batches_;
  host_batches_.resize(spec_.num_micro_batches, batches_[0]);
  if (!gpu_) return;
  Stream s = stream();
  cuda::prepare_gemm(s);
  mirror_on_host();
}

void Engine::mirror_on_host() {
  metrics_ = HostBuffer(DeviceKind::cuda, plan_.bytes(Life::metrics));
  inputs_.resize(batches_.size() == 1 ? spec_.num_micro_batches : 1);
  for (HostBuffer& inputs : inputs_) inputs = HostBuffer(DeviceKind::cuda, plan_.bytes(Life::batch));
  host_batches_.clear();
  for (int64_t m = 0; m < spec_.num_micro_batches; ++m)
    host_batches_.push_back(rebased(of_micro_batch(batches_, m), plan_.base(Life::batch), of_micro_batch(inputs_, m)));
}

void Engine::make_model() {
  std::optional<PipelineRank> rank;
  spec_.pipeline.num_micro_batches = spec_.num_micro_batches;
  spec_.pipeline.overlap = spec_.overlap;
  if (mesh_.shape().pp > 1) rank = pipeline_rank(spec_.pipeline, spec_.model, mesh_.shape().pp, mesh_.place().pp);
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
                                                .fusion = spec_.fusion});
  if (!spec_.freeze.empty()) check_freeze(model_->whole_catalog(), spec_.freeze);
  if (rank) pipeline_ = std::make_unique<Pipeline>(*rank, *model_, mesh_, plan_);
  tied_embedding_ = std::make_unique<TiedEmbedding>(*model_, mesh_, rank ? &rank->layout : nullptr);
}

Stream Engine::stream() {
  if (gpu_) return Stream(*gpu_, pool_, trace_);
  return Stream(spec_.device, pool_, trace_, spec_.target);
}

// Everything a step can do, on tensors that have no memory yet.
int64_t Engine::measure_stack() {
  Stream null_stream(DeviceKind::null, pool_, nullptr, spec_.target);
  StepStack null_stack(DeviceKind::null, nullptr, 0);
  MicroBatch batch = batches_[0];
  batch.training = spec_.use == ModelUse::training;
  Step step{null_stream, null_stack, batch};
  run_step(step);
  // The first chunk of a prompt, one in the middle, and a single token may be computed in different ways.
  const int64_t T = spec_.shape.tokens(), one = spec_.mesh.tp, V = spec_.model.vocab_size;
  if (spec_.cache_tokens > 0) {
    forward_cached(step, 0, T);
    forward_cached(step, spec_.cache_tokens - T, T);
    forward_cached(step, spec_.cache_tokens - one, one);
    StackScope scope(null_stack);
    if (model_->has_head()) model_->row_logits(step, step.alloc({1, V}, DType::f32), 0, one);
  }
  if (spec_.use != ModelUse::training) {
    StackScope scope(null_stack);
    step.alloc({kLogitRows, V}, DType::f32);
  }
  return null_stack.high_water();
}

void Engine::run_step(Step& step) {
  if (spec_.cache_tokens > 0) return;
  if (spec_.use == ModelUse::inference) return forward(step);
  forward_backward(step);
  tied_embedding_->sum_gradients(step.stream, step.stack);
  if (optimizer_) optimizer_->step(step.stream, step.stack, {.train_step = 1});
}

// The scalars of a batch belong to the host; what a recorded step must read anew goes along in memory.
void Engine::put_scales(int64_t m) {
  if (spec_.device == DeviceKind::null) return;
  MicroBatch& batch = host_batches_[m];
  if (!batch.loss_scale_1.empty()) *batch.loss_scale_1.ptr<float>() = static_cast<float>(batch.loss_scale);
  for (Targets& t : batch.mtp_targets)
    *t.loss_scale_1.ptr<float>() = static_cast<float>(batch.mtp_coeff * t.loss_scale);
  if (batch.draw_2.empty()) return;
  batch.draw_2.ptr<int64_t>()[0] = static_cast<int64_t>(batch.train_step);
  batch.draw_2.ptr<int64_t>()[1] = static_cast<int64_t>(batch.first_token);
}

// Of micro-batch m, or of all where they have one buffer.
void Engine::upload(Stream& s, int64_t m) {
  put_scales(m);
  if (gpu_) copy_to_device(s, plan_.base(Life::batch), of_micro_batch(inputs_, m).data(), plan_.bytes(Life::batch));
}

// A recording has it as an argument of its kernels.
void Engine::check_total_tokens(double total_tokens) {
  if (total_tokens_ == 0) total_tokens_ = total_tokens;
  MOEBIUS_CHECK(
      usage, total_tokens == total_tokens_,
      "engine: a recorded step has the same tokens in its global batch each time: {}; got {}; set run.graph = false",
      total_tokens_, total_tokens);
}

const MicroBatch& Engine::device_batch(int64_t m) {
  MicroBatch& batch = of_micro_batch(batches_, m);
  const MicroBatch& host = host_batches_[m];
  batch.loss_scale = host.loss_scale;
  batch.total_tokens = host.total_tokens;
  if (host.training && records()) check_total_tokens(host.total_tokens);
  batch.train_step = host.train_step;
  batch.first_token = host.first_token;
  batch.training = host.training;
  return batch;
}

void Engine::forward(Step& step) {
  if (pipeline_) return pipeline_->run_forward(step.stream, step.stack, step.batch);
  model_->forward_hidden(step, spec_.shape.tokens());
  model_->forward_loss(step, false);
}

void Engine::forward_backward(Step& step) {
  if (pipeline_) return pipeline_->run_one_micro_batch(step.stream, step.stack, step.batch);
  model_->forward_hidden(step, spec_.shape.tokens());
  model_->forward_loss(step, true);
  model_->backward(step);
}

void Engine::forward(int64_t m) {
  run([&](Step& step) { forward(step); }, m);
}

void Engine::forward_backward(int64_t m) {
  run([&](Step& step) { forward_backward(step); }, m);
}

void Engine::fill_batch(const Fill& fill, int64_t m) {
  if (!fill) return;
  const double begin = now_us();
  fill(batch(m), m);
  fill_s_ += (now_us() - begin) * 1e-6;
}

// read_metrics waits for the uploads.
void Engine::all_passes(Stream& s, const Fill& fill) {
  const int64_t M = spec_.num_micro_batches;
  const bool overlaps = optimizer_->exchange().overlaps();
  if (pipeline_) {
    for (int64_t m = 0; m < M; ++m) {
      fill_batch(fill, m);
      put_scales(m);
    }
    upload(s, 0);  // once all are filled
    const auto batch = [&](int64_t m) -> const MicroBatch& { return device_batch(m); };
    return passes(passes_[3], true, M, [&](Stream& on) { pipeline_->run_step(on, plan_.stack(), batch); });
  }
  for (int64_t m = 0; m < M; ++m) {
    fill_batch(fill, m);
    PhaseScope phase(s, "micro-batch", m);
    upload(s, m);
    const MicroBatch& batch = device_batch(m);
    const bool first = m == 0, last = m == M - 1;
    passes(passes_[overlaps ? (first ? 1 : 0) + (last ? 2 : 0) : 0], first, last ? 1 : 0, [&](Stream& on) {
      Step step{on, plan_.stack(), batch};
      forward_backward(step);
    });
  }
}

// What passes communicate beside compute belongs to their recording: the first of a step gather the weights that the
// last one changed, the last reduce gradients, and all of it has ended where the recording does.
void Engine::passes(StepPart& part, bool first, int64_t last_micro_batches, const std::function<void(Stream&)>& body) {
  BucketExchange& exchange = optimizer_->exchange();
  exchange.begin_passes(last_micro_batches);
  if (gpu_ && first) began_.record(*gpu_);
  const bool replayed = replay(part, [&](Stream& s) {
    if (records() && first) exchange.expect_gather();
    body(s);
    if (records()) exchange.join(s);
  });
  if (replayed) exchange.replayed(first, last_micro_batches);
}

void Engine::optimizer_pass(Stream& s, int64_t train_step, double lr) {
  PhaseScope phase(s, "optimizer");
  for (const auto& layer : model_->moe_layers()) layer.moe->router().reduce_metrics(s);
  reduce_loss(s);
  tied_embedding_->sum_gradients(s, plan_.stack());
  optimizer_->step(s, plan_.stack(), {.train_step = train_step, .lr = lr, .schedule_2 = gpu_ ? schedule_2_ : Tensor{}});
}

void Engine::reduce_loss(Stream& s) {
  for (const Tensor& sum : {model_->loss_sum(), model_->mtp_loss_sum()}) {
    if (sum.empty()) continue;
    mesh_.group(Axis::dp_cp).all_reduce_sum(s, sum);
    mesh_.group(Axis::pp).all_reduce_sum(s, sum);  // it is made on the last stage
  }
}

// Messages that are staged are exchanged by the host.
bool Engine::records() const {
  const bool can = !links_ || links_->records();
  return gpu_ && can && spec_.graph;
}

// The first two launches go op by op: they choose algorithms, and are steps like any other; so does a traced one. A
// traced launch counts, too: all ranks record a part at the same time. Whether it was a replay.
bool Engine::replay(StepPart& part, const std::function<void(Stream&)>& body) {
  Stream s = stream();
  ++part.launches;
  if (!records() || trace_ || part.launches <= 2) {
    body(s);
    return false;
  }
  if (part.recording.empty()) {
    const auto record = [&] { part.recording = CudaGraph(*gpu_, [&] { body(s); }); };
    if (links_)
      part.traffic = links_->record(record);
    else
      record();
  }
  part.recording.replay(*gpu_);
  if (links_) links_->replayed(part.traffic);
  return true;
}

void Engine::schedule(int64_t train_step, double lr) {
  if (!gpu_) return;
  for (const HostBuffer& inputs : inputs_) {  // each copy of a micro-batch takes it along
    double* values = rebased(schedule_2_, plan_.base(Life::batch), inputs).ptr<double>();
    values[0] = lr;
    values[1] = static_cast<double>(train_step);
  }
}

void Engine::optimizer_step(int64_t train_step, double lr) {
  Stream s = stream();
  schedule(train_step, lr);
  upload(s, 0);  // read_metrics waits for it
  optimizer_pass(s, train_step, lr);
  read_metrics();
}

void Engine::train_step(int64_t train_step, double lr) { this->train_step(train_step, lr, nullptr); }

// A micro-batch has a buffer of its own on the host: one may be filled while those before it are copied and computed.
void Engine::train_step(int64_t train_step, double lr, const Fill& fill) {
  const AbortCommOnUnwind given_up(links_.get());
  Stream s = stream();
  PhaseScope phase(s, "step", train_step);
  ++num_steps_;
  schedule(train_step, lr);
  fill_s_ = 0;
  const double begin = now_us();
  with_memory_advice([&] { all_passes(s, fill); });
  const double between = now_us();
  if (gpu_) passed_.record(*gpu_);
  with_memory_advice([&] {
    const bool replayed = replay(update_, [&](Stream& on) { optimizer_pass(on, train_step, lr); });
    if (replayed) optimizer_->exchange().expect_gather();
  });
  const double end = now_us();
  if (gpu_) updated_.record(*gpu_);
  // A rank whose host stands still is named here; the wait for the GPU alone would not say which it is.
  if (links_) mesh_.group(Axis::world).barrier();
  read_metrics();
  passes_s_ = gpu_ ? passed_.seconds_since(began_) : (between - begin) * 1e-6 - fill_s_;
  optimizer_s_ = gpu_ ? updated_.seconds_since(passed_) : (end - between) * 1e-6;
}

void Engine::end_of_step() {
  Stream on_step = stream();
  PhaseScope phase(on_step, "end of step");
  with_memory_advice([&] { replay(end_, [&](Stream& s) { clear_sums(s); }); });
}

void Engine::clear_sums(Stream& s) {
  for (const auto& layer : model_->moe_layers()) layer.moe->router().end_of_step(s);
  fill_zero(s, model_->loss_sum());
  if (!model_->mtp_loss_sum().empty()) fill_zero(s, model_->mtp_loss_sum());
  model_->params().zero_grads(s);
}

Tensor Engine::on_host(const Tensor& t) const { return gpu_ ? rebased(t, plan_.base(Life::metrics), metrics_) : t; }

void Engine::read_metrics() {
  if (!gpu_) return;
  Stream s = stream();
  copy_to_host(s, metrics_.data(), plan_.base(Life::metrics), metrics_.num_bytes());
}

void Engine::read_logits(float* logits, int64_t begin, int64_t end, int64_t depth) {
  Stream s = stream();
  const int64_t V = spec_.model.vocab_size;
  for (int64_t first = begin; first < end; first += kLogitRows) {
    StackScope scope(plan_.stack());
    const int64_t last = std::min(end, first + kLogitRows);
    const Tensor chunk_CV = plan_.stack().alloc({last - first, V}, DType::f32);
    Step step{s, plan_.stack(), device_batch(0)};
    with_memory_advice([&] { model_->logits(step, chunk_CV, first, last, depth); });
    copy_to_host(s, logits + (first - begin) * V, chunk_CV.data, chunk_CV.num_bytes());
  }
}

void Engine::forward_cached(Step& step, int64_t first, int64_t T) {
  if (pipeline_) return pipeline_->run_cached(step.stream, step.stack, step.batch, caches_, first, T);
  model_->forward_cached(step, caches_, first, T);
}

void Engine::forward_cached(int64_t first, int64_t num_tokens) {
  run([&](Step& step) { forward_cached(step, first, num_tokens); });
}

void Engine::read_row_logits(float* logits, int64_t row, int64_t num_tokens) {
  if (!model_->has_head()) return;
  Stream s = stream();
  StackScope scope(plan_.stack());
  const Tensor logits_1V = plan_.stack().alloc({1, spec_.model.vocab_size}, DType::f32);
  Step step{s, plan_.stack(), device_batch(0)};
  with_memory_advice([&] { model_->row_logits(step, logits_1V, row, num_tokens); });
  copy_to_host(s, logits, logits_1V.data, logits_1V.num_bytes());
}

int64_t Engine::peak_bytes() {
  if (!gpu_) return peak_rss_bytes();
  if (num_steps_ <= 4) sample_peak_memory();
  return peak_bytes_;
}

void Engine::sample_peak_memory() {
  if (!gpu_) return;
  const AcceleratorInfo info = gpu_->info();
  peak_bytes_ = std::max(peak_bytes_, info.memory_bytes - info.free_bytes - other_bytes_);
}

// In a training step.
bool Engine::runs_cudnn() const {
  const ModelSpec& m = spec_.model;
  const int64_t T = spec_.shape.tokens();
  const auto heads = [&](int64_t n, int64_t width) {
    return Tensor{.shape = {T, n, width}, .dtype = spec_.precision.compute};
  };
  AttentionFwd attention{.q_THd = heads(m.num_heads, m.head_dim),
                         .k_UGd = heads(m.num_kv_heads, m.head_dim),
                         .v_UGd = heads(m.num_kv_heads, m.is_latent() ? m.v_head_dim : m.head_dim),
                         .batch = spec_.shape.batch};
  if (spec_.shape.documents) attention.doc_start_T = {.shape = {T}, .dtype = DType::i32};
  return spec_.target == DeviceKind::cuda && cuda::cudnn_takes(attention);
}

int64_t Engine::pinned_bytes() const {
  if (spec_.target != DeviceKind::cuda) return 0;
  const int64_t of_batches = batches_.size() == 1 ? spec_.num_micro_batches : 1;
  return of_batches * plan_.bytes(Life::batch) + plan_.bytes(Life::metrics);
}

}  // namespace moebius
