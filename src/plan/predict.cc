#include "plan/predict.h"

#include <algorithm>
#include <numeric>

#include "comm/group_cost.h"
#include "ops/attention/attention_scratch.h"
#include "parallel/pipeline/step_schedule.h"
#include "plan/cost/critical_path.h"
#include "plan/cost/megatron_memory.h"
#include "plan/cost/row_exchange.h"
#include "plan/cost/update_cost.h"
#include "plan/search/passes_bound.h"
#include "plan/sharding/sharded_layers.h"

namespace moebius {
namespace {

class Predicting {
 public:
  Predicting(PartLibrary& parts, RunSpec run, int64_t ranks, const PlanMachine& machine, const Assumptions& assume,
             RunChecks checks)
      : run_(std::move(run)),
        spec_(planned_engine_spec_on(run_, ranks, machine, checks)),
        parts_(parts, spec_),
        layout_(stages_of(spec_)),
        machine_(machine.of_rank(spec_.threads)),
        context_{.machine = machine_, .assume = assume, .spec = spec_} {
    result_.mesh = spec_.mesh;
    result_.memory_bytes = machine_.memory_bytes();
    result_.is_gpu = machine_.is_gpu;
    result_.assumes_cudnn = machine_.is_gpu && plans_cudnn(gpu_kernels(spec_));
    result_.threads = spec_.threads;
    result_.num_pp_ranks = layout_.num_ranks;
    result_.ranks = ranks;
    result_.num_micro_batches = spec_.num_micro_batches;
  }

  Prediction run(const PredictOptions& options) {
    check_nodes_of_machine(context_);
    times_ = options.times;
    if (options.memory == PredictOptions::Memory::none && options.composes) parts_.use_times_only();
    time_stages();
    add_memory(options);
    add_passes(options);
    add_update();
    add_totals();
    if (options.simulate) add_files();
    return std::move(result_);
  }
  double run_passes(const PredictOptions& options) {
    check_nodes_of_machine(context_);
    times_ = options.times;
    if (options.composes) parts_.use_times_only();
    time_stages();
    add_passes({.simulate = false});
    add_totals();
    return result_.step_s;
  }

 private:
  void time_stages() {
    PartTimes own;
    result_.stages = stage_works(context_, parts_, layout_, times_ ? *times_ : own);
  }
  void add_memory(const PredictOptions& options);
  void add_passes(const PredictOptions& options);
  void simulate_passes(int64_t max_simulated);
  void estimate_passes();
  void add_rank(int64_t pp_rank);
  void add_once(int64_t pp_rank);
  void add_update();
  double offload_seconds(int64_t pp_rank);
  void add_host_link(const RankParams& params);
  double offloaded_bytes(const StageSpec& stage);
  void add_sharded_layers(const ShardedTime& time);
  void add_matrices(const RankParams& params);
  double exchange_before(const std::map<Axis, double>& bytes, const std::map<Axis, int64_t>& buckets);
  void add_kernels(const PassTime& pass, double times);
  void add_files();
  void add_totals();
  double message_seconds() const;
  double busy(int64_t pp_rank) const;
  const StageWork& stage_of(int64_t pp_rank, int64_t v) const {
    return result_.stages[static_cast<size_t>(v * layout_.num_ranks + pp_rank)];
  }
  PipelineTimes pipeline_times() const;

  RunSpec run_;
  EngineSpec spec_;
  LayoutParts parts_;
  StageLayout layout_;
  PlanMachine machine_;
  TimeContext context_;
  PartTimes* times_ = nullptr;
  double passes_s_ = 0;
  int64_t slowest_ = 0;
  std::array<AxisTime, kNumAxes> axes_{};            // result_.axes
  std::array<AxisTime, kNumAxes> of_passes_{};       // the part of it that passes have
  std::array<double, kNumKernelClasses> kernels_{};  // result_.kernels
  Prediction result_;
};

void Predicting::add_memory(const PredictOptions& options) {
  if (options.memory == PredictOptions::Memory::none) return;
  for (int64_t r = 0; r < layout_.num_ranks; ++r) {
    // The first two ranks hold the most sets of saved tensors, and the last has the loss.
    const bool may_be_fullest = r < 2 || r == layout_.num_ranks - 1;
    if (options.memory == PredictOptions::Memory::fullest_stages && !may_be_fullest) continue;
    PipelineUse use = parts_.pipeline(r);
    const bool is_megatron = context_.assume.system == PlanSystem::megatron;
    if (is_megatron) use.num_saved = megatron_sets_in_flight(context_, use);
    result_.memory.push_back(rank_memory(parts_, layout_, use, r));
    if (is_megatron) {
      RankMemory& memory = result_.memory.back();
      // With a budget of rows (memory.expert_rows) the tensors that recomputing an MoE layer frees are in the pool.
      int64_t& saved = memory.life[static_cast<size_t>(Life::saved)];
      int64_t& pool = memory.life[static_cast<size_t>(Life::rows)];
      saved += megatron_extra_bytes(context_, layout_, use, r);
      pool = std::max<int64_t>(0, pool + std::min<int64_t>(0, saved));
      saved = std::max<int64_t>(0, saved);
      memory.life[static_cast<size_t>(Life::comm)] = 0;  // it reduces gradients in their own buffer
    }
    if (result_.memory.back().total() > result_.fullest_rank().total()) result_.fullest = result_.memory.size() - 1;
    result_.host_bytes = std::max(result_.host_bytes, static_cast<double>(result_.memory.back().host_bytes()));
  }
  const double left = machine_.memory_bytes() - static_cast<double>(result_.fullest_rank().total());
  result_.host_memory_bytes = machine_.is_gpu ? machine_.host_memory_of_rank() : std::max(0.0, left);
}

double Predicting::message_seconds() const {
  const double rows = static_cast<double>(rows_between_projections(spec_.shape, spec_.mesh));
  const double bytes = rows * static_cast<double>(spec_.model.hidden_size * size_of(spec_.precision.compute));
  return group_seconds(context_, span_of(spec_.mesh, Axis::pp), GroupCall::send, bytes);
}

double Predicting::busy(int64_t pp_rank) const {
  double sum = 0;
  for (int64_t v = 0; v < layout_.num_virtual(); ++v)
    sum += stage_of(pp_rank, v).forward.total() + stage_of(pp_rank, v).backward.total();
  return sum;
}

PipelineTimes Predicting::pipeline_times() const {
  PipelineTimes times{.transfer = message_seconds()};
  for (size_t s = 0; s < result_.stages.size(); ++s) {
    const StageWork& stage = result_.stages[s];
    times.stages.push_back({.forward = stage.forward.total(),
                            .backward_input = std::max(0.0, stage.backward.total() - stage.backward_weight.total()),
                            .backward_weight = stage.backward_weight.total()});
  }
  return times;
}

// Adds the passes of a step, on the slowest rank.
void Predicting::add_passes(const PredictOptions& options) {
  for (int64_t r = 1; r < layout_.num_ranks; ++r)
    if (busy(r) > busy(slowest_)) slowest_ = r;
  if (layout_.num_ranks == 1) {
    passes_s_ = busy(0) * static_cast<double>(spec_.num_micro_batches);
    constexpr int64_t kShown = 4;
    const int64_t shown = std::min(spec_.num_micro_batches, kShown);
    if (options.simulate) result_.schedule = simulate(schedule_1f1b({.num_micro_batches = shown}), pipeline_times());
  } else if (options.simulate) {
    simulate_passes(options.max_simulated);
  } else {
    estimate_passes();
  }
  if (context_.assume.merged_overlap && layout_.num_ranks > 1) passes_s_ += merged_passes(spec_) * message_seconds();
  add_rank(slowest_);
  add_once(slowest_);
}

// Simulates a step of M micro-batches. Each micro-batch beyond those that are simulated adds the slowest rank's work.
void Predicting::simulate_passes(int64_t max_simulated) {
  const int64_t M = spec_.num_micro_batches, P = layout_.num_ranks;
  const int64_t few = std::max<int64_t>(4, max_simulated / P) * P + M % P;
  PipelineShape shape{.num_ranks = P, .num_virtual = layout_.num_virtual(), .num_micro_batches = std::min(M, few)};
  shape.check();
  const Schedule schedule = step_schedule(spec_.pipeline.schedule, shape);
  result_.schedule = simulate(spec_.overlap ? schedule : without_overlap(schedule), pipeline_times());
  passes_s_ = result_.schedule.duration + static_cast<double>(M - shape.num_micro_batches) * busy(slowest_);
}

// Estimates the passes: every rank computes M micro-batches, and the pipeline takes P - 1 times of one stage to fill
// and drain. With zb_h1 this is F + B - W of a stage instead of F + B + W, so twice the weight gradients is subtracted.
void Predicting::estimate_passes() {
  const double M = static_cast<double>(spec_.num_micro_batches), P = static_cast<double>(layout_.num_ranks);
  const double V = static_cast<double>(layout_.num_virtual());
  double weights = 0;
  for (const StageWork& stage : result_.stages.kinds()) weights = std::max(weights, stage.backward_weight.total());
  const double of_stage = std::max(0.0, busy(slowest_) / V - 2 * weights);
  passes_s_ = busy(slowest_) * M + (P - 1) * (of_stage + 2 * message_seconds());
}

// Adds the work of a step that is done once: weights are quantised before its passes, for which ranks may exchange
// largest magnitudes, and the first backward pass stores gradients.
void Predicting::add_once(int64_t pp_rank) {
  PassTime copies;
  double saved = 0;
  for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
    const StageWork& stage = stage_of(pp_rank, v);
    copies += stage.copies;
    saved += stage.stored_first.compute();
    add_kernels(stage.copies, 1);
    add_kernels(stage.stored_first, -1);
  }
  double copies_s = copies.compute();
  for (size_t i = 0; i < axes_.size(); ++i) {
    copies_s += copies.groups[i];
    axes_[i].exposed_s += copies.groups[i];
    axes_[i].bytes += copies.wire_bytes[i];
  }
  result_.messages += copies.messages;
  if (copies_s > 0) result_.phases["copies"] = copies_s;
  result_.phases["backward"] -= saved;
  passes_s_ -= saved;
}

void Predicting::add_kernels(const PassTime& pass, double times) {
  for (size_t k = 0; k < kernels_.size(); ++k) kernels_[k] += times * pass.kernels[k];
}

void Predicting::add_rank(int64_t pp_rank) {
  const double M = static_cast<double>(spec_.num_micro_batches);
  double compute = 0, host = 0;
  for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
    const StageWork& stage = stage_of(pp_rank, v);
    result_.phases["forward"] += M * stage.forward.compute();
    result_.phases["backward"] += M * stage.backward.compute();
    for (const PassTime* pass : {&stage.forward, &stage.backward}) {
      add_kernels(*pass, M);
      result_.messages += M * pass->messages;
      result_.launch_s += M * pass->launches;
      compute += M * pass->compute();
      host += M * pass->host;
      const double all = std::accumulate(pass->groups.begin(), pass->groups.end(), 0.0);
      for (size_t i = 0; i < axes_.size(); ++i) {
        const double seconds = pass->groups[i], hidden = all > 0 ? pass->hidden * seconds / all : 0;
        axes_[i].hidden_s += M * hidden;
        axes_[i].exposed_s += M * (seconds - hidden);
        axes_[i].bytes += M * pass->wire_bytes[i];
      }
    }
  }
  if (host > 0) result_.phases["host"] = host;
  const double exposed = busy(pp_rank) * M - compute - host;
  result_.bubble = passes_s_ > 0 ? std::max(0.0, 1 - busy(pp_rank) * M / passes_s_) : 0;
  result_.phases["communication"] = std::max(0.0, exposed);
  result_.phases["bubble"] = std::max(0.0, passes_s_ - busy(pp_rank) * M);
  if (layout_.num_ranks > 1) {
    const double rows = static_cast<double>(rows_between_projections(spec_.shape, spec_.mesh));
    const double sends = 2 * M * static_cast<double>(layout_.num_virtual());
    AxisTime& pp = axes_[static_cast<size_t>(Axis::pp)];
    result_.message_bytes = rows * static_cast<double>(spec_.model.hidden_size * size_of(spec_.precision.compute));
    pp.bytes = sends * result_.message_bytes;
    // Both messages of a merged pass leave at its end, and the next pass of a neighbour waits for one of them.
    const double waits = context_.assume.merged_overlap ? merged_passes(spec_) : 0;
    pp.exposed_s = waits * message_seconds();
    pp.hidden_s = spec_.overlap ? (sends - waits) * message_seconds() : 0;
    result_.messages += sends;
    result_.transfer_s = message_seconds();
  }
  of_passes_ = axes_;
}

// Returns the exposed time of offloaded activations.
double Predicting::offload_seconds(int64_t pp_rank) {
  double exposed = 0;
  for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
    // Each of two separate backward passes copies them back.
    const double copies_back = parts_.pipeline(pp_rank).splits[static_cast<size_t>(v)] ? 2 : 1;
    const double bytes = offloaded_bytes(layout_.at(pp_rank, v));
    exposed += exposed_copies(context_, stage_of(pp_rank, v), bytes, copies_back);
  }
  return exposed * static_cast<double>(spec_.num_micro_batches);
}

// Adds the time of masters, states and sums of gradients on the host. They are read and written over its link in both
// directions at once. An update may overlap with the first forward pass of layers, whose activations share the link;
// the head needs weights that come last. Each micro-batch except the first reads the sums to which it adds.
void Predicting::add_host_link(const RankParams& params) {
  const OptimizerSpec& o = run_.optimizer;
  const double link = machine_.link_gb_s * 1e9;
  if (const double activations = spec_.offload.any() ? offload_seconds(slowest_) : 0; activations > 0)
    result_.phases["host link"] = activations;
  if (!machine_.is_gpu || (!o.offload && !o.offload_grad && !spec_.offload_weights)) return;
  const double kernels = o.offload && o.kind != OptimizerKind::muon ? result_.phases["optimizer"] : 0;
  double pass = 0;
  for (int64_t v = 0; v < layout_.num_virtual() && can_overlap_update(spec_); ++v)
    pass += stage_of(slowest_, v).layers_forward.total() - offloaded_bytes(layout_.at(slowest_, v)) / link;
  const auto exposed = [&](double bytes) { return exposed_update_seconds(bytes / link, kernels, pass); };
  const double states = host_states_bytes(o, static_cast<double>(params.owned));
  double update = host_update_bytes(o, static_cast<double>(params.owned));
  if (spec_.offload_weights) update += static_cast<double>(params.owned * size_of(spec_.precision.compute));
  result_.states_link_s = exposed(update) - exposed(update - states);
  const double sums = o.offload_grad ? 2.0 * static_cast<double>(spec_.num_micro_batches * params.sums_apart) : 0;
  result_.phases["host link"] += exposed(update) + sums / link;
}

// Returns the bytes of activations that a forward pass of a stage moves to the host.
double Predicting::offloaded_bytes(const StageSpec& stage) {
  double bytes = 0;
  for (int64_t i = 0; i < stage.num_layers; ++i) bytes += parts_.layer(stage.first_layer + i).offloaded_bytes();
  return bytes;
}

// Adds the update. The exchange of gradients overlaps with the last backward pass, and the exchange of weights with
// the first forward pass.
void Predicting::add_update() {
  const RankParams params = rank_params(parts_, layout_, slowest_);
  const double memory = context_.machine.memory_tb_s * 1e12 *
                        context_.machine.of(context_.assume.system)[static_cast<size_t>(Share::memory)];
  const bool stores = context_.assume.system == PlanSystem::moebius;
  const double cleared = static_cast<double>(params.held - (stores ? params.stored_first : 0));
  result_.phases["optimizer"] =
      (update_bytes(run_.optimizer) * static_cast<double>(params.owned) + kClearBytes * cleared) / memory;
  if (machine_.is_gpu && stores && machine_.f32_tflops > 0) {
    const double operations = update_operations(run_.optimizer) * static_cast<double>(params.owned);
    result_.phases["optimizer"] = std::max(result_.phases["optimizer"], operations / (machine_.f32_tflops * 1e12));
  }
  if (machine_.is_gpu && stores) {
    const EndOfStep end = end_of_step(parts_, layout_, slowest_);
    result_.phases["optimizer"] += machine_.kernel_us * 1e-6 * static_cast<double>(end.kernels) +
                                   norm_path(static_cast<double>(end.tensors)).seconds();
  }
  if (params.owned_of_matrices > 0) {
    result_.phases["optimizer"] += kMomentumBytes * static_cast<double>(params.owned_of_matrices) / memory;
    add_matrices(params);
  }
  if (params.quantised > 0) {
    result_.phases["optimizer"] += kQuantiseBytes * static_cast<double>(params.quantised) / memory;
    result_.phases["weight scales"] = exchange_before(params.magnitude_wire_bytes, params.magnitude_buckets);
  }
  if (params.logits > 0) {
    const double others = static_cast<double>(group_size(spec_.mesh, Axis::dp_cp) - 1);
    const double sent = others * static_cast<double>(params.logits * size_of(DType::f32));
    result_.phases["attention logits"] = exchange_before({{Axis::dp_cp, sent}}, {{Axis::dp_cp, 1}});
  }
  double forward = 0, backward = 0;
  for (int64_t v = 0; v < layout_.num_virtual(); ++v) {
    forward += stage_of(slowest_, v).forward.total();
    backward += stage_of(slowest_, v).backward.total();
  }
  add_host_link(params);
  const auto exchange = [&](const std::map<Axis, double>& bytes, const std::map<Axis, int64_t>& buckets, GroupCall call,
                            double window) {
    double all = 0, memory_s = 0;
    AxisFigures seconds{};
    for (const auto& [axis, sent] : bytes) {
      const RankSpan span = span_of_gradients(spec_, axis);
      if (span.size == 1) continue;
      const double calls = static_cast<double>(buckets.at(axis));
      const double s = calls * group_seconds(context_, span, call, sent / calls);
      seconds[static_cast<size_t>(axis)] = s;
      axes_[static_cast<size_t>(axis)].bytes += sent;
      result_.messages += calls * group_messages(context_, span, call);
      all += s;
      memory_s += memory_seconds(context_, span, call, sent);
    }
    const double hidden = spec_.overlap ? std::min(all, window) : 0;
    for (size_t i = 0; i < axes_.size(); ++i) {
      axes_[i].hidden_s += seconds[i] * (all > 0 ? hidden / all : 0);
      axes_[i].exposed_s += seconds[i] * (all > 0 ? 1 - hidden / all : 0);
    }
    return all - hidden + lost_beside(context_, hidden, all, memory_s);
  };
  const ShardedTime sharded = sharded_time(context_, parts_, layout_, slowest_);
  // Sums overlap with one pass of each micro-batch, gathers with two.
  const double M = static_cast<double>(spec_.num_micro_batches);
  backward = std::max(0.0, backward - (sharded.gradients.all_s - sharded.gradients.exposed_s) / M);
  forward = std::max(0.0, forward - (sharded.weights.all_s - sharded.weights.exposed_s) / (2 * M));
  result_.phases["gradients"] =
      exchange(params.grad_wire_bytes, params.grad_buckets, GroupCall::reduce_scatter, backward);
  result_.phases["weights"] = exchange(params.weight_wire_bytes, params.weight_buckets, GroupCall::all_gather, forward);
  add_sharded_layers(sharded);
}

// Weights of layers are gathered in every pass, and their gradients are summed after every micro-batch.
void Predicting::add_sharded_layers(const ShardedTime& time) {
  const auto add = [&](const char* phase, const LayerExchange& e) {
    const double hidden = e.all_s - e.exposed_s;
    result_.phases[phase] += e.exposed_s + lost_beside(context_, hidden, e.all_s, e.memory_s);
    result_.messages += e.messages;
    for (size_t i = 0; i < axes_.size() && e.all_s > 0; ++i) {
      axes_[i].bytes += e.bytes[i];
      axes_[i].exposed_s += e.seconds[i] / e.all_s * e.exposed_s;
      axes_[i].hidden_s += e.seconds[i] / e.all_s * hidden;
    }
  };
  add("weights", time.weights);
  add("gradients", time.gradients);
}

// Returns the seconds of all-gathers that overlap with nothing.
double Predicting::exchange_before(const std::map<Axis, double>& bytes, const std::map<Axis, int64_t>& buckets) {
  double all = 0;
  for (const auto& [axis, sent] : bytes) {
    const RankSpan span = span_of(spec_.mesh, axis);
    if (span.size == 1) continue;
    const double calls = static_cast<double>(buckets.at(axis));
    const double seconds = calls * group_seconds(context_, span, GroupCall::all_gather, sent / calls);
    axes_[static_cast<size_t>(axis)].exposed_s += seconds;
    axes_[static_cast<size_t>(axis)].bytes += sent;
    result_.messages += calls * group_messages(context_, span, GroupCall::all_gather);
    all += seconds;
  }
  return all;
}

// Adds the work of Muon, which gathers the matrices that it updates and makes each semi-orthogonal. It
// overlaps with nothing.
void Predicting::add_matrices(const RankParams& params) {
  const PassTime time = pass_time(context_, params.matrices);
  result_.phases["optimizer"] += time.compute();
  double& exchange = result_.phases["matrices"];
  for (size_t i = 0; i < axes_.size(); ++i) {
    exchange += time.groups[i];
    axes_[i].exposed_s += time.groups[i];
    axes_[i].bytes += time.wire_bytes[i];
  }
  result_.messages += time.messages;
  exchange += exchange_before(params.matrix_wire_bytes, params.matrix_buckets);
}

void Predicting::add_totals() {
  double sum = 0;
  for (const auto& [name, seconds] : result_.phases) sum += seconds;
  const double wait = sum * (context_.assume.slowest_of(result_.ranks, context_.machine) - 1);
  if (wait > 0) result_.phases["slowest rank"] = wait;
  result_.step_s = sum + wait;
  const double ranks = static_cast<double>(result_.ranks);
  const MeshShape& m = spec_.mesh;
  const int64_t seq = spec_.shape.seq * m.cp;
  result_.tokens = static_cast<double>(spec_.num_micro_batches * spec_.shape.batch * seq * m.dp);
  result_.tokens_per_s_per_gpu = result_.tokens / result_.step_s / ranks;
  const double all =
      context_.assume.tokens > 0 ? context_.assume.tokens : result_.tokens * static_cast<double>(run_.train.steps);
  result_.run_s = all / result_.tokens * result_.step_s;
  result_.model_tflops_per_gpu = result_.tokens_per_s_per_gpu * run_.model.train_flops_per_token(seq) / 1e12;
  result_.mfu = result_.model_tflops_per_gpu / context_.machine.bf16_tflops;
  result_.imbalance = context_.assume.load.busiest_rank(spec_.model.num_experts, m.ep);
  result_.imbalance_s = kernels_[static_cast<size_t>(KernelClass::experts)] * (1 - 1 / result_.imbalance);
  for (size_t k = 0; k < kernels_.size(); ++k) result_.kernels[name_of(static_cast<KernelClass>(k))] = kernels_[k];
  for (size_t i = 0; i < axes_.size(); ++i) {
    const std::string name(name_of(static_cast<Axis>(i)));
    if (axes_[i].is_used()) result_.axes[name] = axes_[i];
    const AxisTime beside{.bytes = axes_[i].bytes - of_passes_[i].bytes,
                          .exposed_s = axes_[i].exposed_s - of_passes_[i].exposed_s,
                          .hidden_s = axes_[i].hidden_s - of_passes_[i].hidden_s};
    if (beside.is_used()) result_.axes_beside_passes[name] = beside;
  }
  result_.start_up = start_up(m, machine_);
}

void Predicting::add_files() {
  double saved = 0, most = 0;
  for (int64_t r = 0; r < layout_.num_ranks; ++r) {
    const auto owned = static_cast<double>(rank_params(parts_, layout_, r).owned);
    saved += owned * static_cast<double>(result_.ranks / layout_.num_ranks);
    most = std::max(most, owned);
  }
  result_.files = file_work(run_, machine_, result_.ranks, saved, most, result_.tokens, result_.step_s);
  result_.run_s += static_cast<double>(result_.files.saves) * result_.files.stall_s;
}

}  // namespace

namespace {

void check_schedule(const RunSpec& run, const Assumptions& assume) {
  MOEBIUS_CHECK(usage, assume.system != PlanSystem::megatron || run.parallel.schedule == PipelineSchedule::one_f_one_b,
                "plan: Megatron Core has only 1F1B; got parallel.schedule = \"{}\" with --assume system=megatron; set "
                "parallel.schedule = \"1f1b\"",
                name_of(run.parallel.schedule));
}

}  // namespace

Prediction predict(PartLibrary& parts, RunSpec run, int64_t ranks, const PlanMachine& machine,
                   const Assumptions& assume, const PredictOptions& options) {
  check_machine(machine, assume);
  check_schedule(run, assume);
  run = run_of_ranks_on(std::move(run), ranks, machine, assume.system);
  check_kernels(run, machine, assume.system);
  return Predicting(parts, std::move(run), ranks, machine, assume, options.checks).run(options);
}

double passes_seconds(PartLibrary& parts, RunSpec run, int64_t ranks, const PlanMachine& machine,
                      const Assumptions& assume, const PredictOptions& options) {
  check_machine(machine, assume);
  check_schedule(run, assume);
  run = run_of_ranks_on(std::move(run), ranks, machine, assume.system);
  check_kernels(run, machine, assume.system);
  return Predicting(parts, std::move(run), ranks, machine, assume, options.checks).run_passes(options);
}

}  // namespace moebius
