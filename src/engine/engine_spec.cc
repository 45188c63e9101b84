#include "engine/engine_spec.h"

#include <algorithm>

#include "comm/collective_levels.h"
#include "config/check/expert_rows_bound.h"
#include "device/gpu_limits.h"
#include "model/attention/token_runs.h"
#include "model/device_support.h"
#include "model/gpu_products.h"
#include "model/moe/exchange_estimate.h"
#include "model/moe/wire_rows.h"

namespace moebius {
namespace {

DeviceKind target_of(const EngineSpec& spec) { return spec.device == DeviceKind::null ? spec.target : spec.device; }

// Returns the estimates of the dispatchers where ranks reach each other's memory in whole nodes alone.
std::optional<ExchangeEstimates> estimates_of(const EngineSpec& spec, const PeerReach& peers) {
  const MeshShape& mesh = spec.mesh;
  const ModelSpec& m = spec.model;
  if (!peers.in_nodes || m.num_experts == 0 || !has_nodes(mesh.ep, mesh.etp, mesh.ranks_per_node)) return {};
  const bool on_gpu = target_of(spec) == DeviceKind::cuda;
  const auto D = static_cast<double>(m.hidden_size);
  const WireRows wire(spec.precision, spec.precision.compute, m.hidden_size);
  return exchange_estimates({.rows = {.T = static_cast<double>(rows_between_projections(spec.shape, mesh)),
                                      .D = D,
                                      .K = static_cast<double>(m.top_k),
                                      .E = static_cast<double>(m.num_experts),
                                      .W = mesh.ep * mesh.etp,
                                      .ep = mesh.ep,
                                      .node = mesh.ranks_per_node,
                                      .element_bytes = static_cast<double>(size_of(spec.precision.compute)),
                                      .round_robin = spec.balance.force_balance},
                             .sent_element_bytes = static_cast<double>(wire.num_bytes()) / D,
                             .on_gpu = on_gpu,
                             .captures = on_gpu && spec.graph && spec.use == ModelUse::training,
                             .rings = spec.sums == GpuSums::nccl},
                            spec.rates.value_or(usual_exchange_rates(on_gpu)));
}

}  // namespace

MeshShape mesh_shape(const ParallelSpec& p, int64_t world_size) {
  return {.tp = p.tp,
          .cp = p.cp,
          .dp = p.dp(world_size),
          .pp = p.pp,
          .etp = p.etp,
          .ep = p.ep,
          .edp = p.edp(world_size),
          .cp_inner = p.cp_inner,
          .cp_dynamic = p.dynamic_cp,
          .ranks_per_node = p.ranks_per_node,
          .fsdp_shard = p.fsdp_shard};
}

ShardingSpec sharding_spec(const EngineSpec& spec) {
  return {.overlap = spec.overlap,
          .bucket_numel = spec.bucket_numel,
          .shards_weights = spec.fsdp,
          .shards_gradients = spec.shard_gradients,
          .weights_on_host = spec.offload_weights,
          .gradients_on_host = spec.optimizer && spec.optimizer->offload_grad};
}

bool can_overlap_update(const EngineSpec& spec) {
  return spec.optimizer && spec.optimizer->offload && spec.optimizer->kind != OptimizerKind::muon &&
         spec.optimizer->qk_clip == 0 && spec.precision.weights != PrecisionChoice::recipe &&
         spec.mesh.world() == spec.mesh.pp && !spec.offload_weights;
}

EngineSpec training_engine_spec(const RunSpec& run, const MeshShape& mesh) {
  MOEBIUS_CHECK(usage, !run.memory.automatic,
                "memory.recompute = \"auto\" is chosen by `train`, `config`, `plan`, and `bench step` with one rank or "
                "with --ranks; here give the list that `moebius config` prints");
  const int64_t B = run.train.micro_batch, S = run.train.seq_len;
  return {
      .model = run.model,
      .balance = run.moe,
      .precision = run.precision,
      .use = ModelUse::training,
      .shape = {.batch = B,
                .seq = S / mesh.cp,
                .max_segments = run.data.separate_documents ? B * S : B,
                .documents = run.data.separate_documents,
                .cp_comm = run.parallel.cp_comm,
                .cp_comm_window = run.parallel.cp_comm_of_window(),
                .num_mtp = run.num_mtp()},
      .num_micro_batches = std::max<int64_t>(1, run.train.global_batch / (B * mesh.dp)),
      .optimizer = run.optimizer,
      .recompute = run.memory.recompute,
      .offload = run.memory.offload,
      .expert_rows = expert_rows_budget(run),
      .freeze = run.train.freeze,
      .lora = run.lora,
      .mesh = mesh,
      .pipeline = {.schedule = run.parallel.schedule, .num_virtual = run.parallel.vpp, .layout = run.parallel.layout},
      .dispatcher = resolve_dispatcher(run).kind,
      .rates = run.rates,
      .expert_overlap = run.parallel.expert_overlap,
      .sums = run.parallel.sums == RankSums::nccl ? GpuSums::nccl : GpuSums::ranks,
      .overlap = run.parallel.overlap,
      .fsdp = run.parallel.fsdp,
      .shard_gradients = run.parallel.shard_gradients,
      .device = run.device,
      .target = run.device,
      .graph = run.graph,
      .kernels = run.kernels,
      .measures_precision = run.log.precision,
      .offload_weights = run.offload_weights,
      .threads = run.threads > 0 ? narrow<int>(run.threads) : num_available_cpus(),
      .seed = run.seed};
}

GpuLimits limits_of_gpu(const EngineSpec& spec) { return spec.gpu_limits ? *spec.gpu_limits : query_gpu_limits(); }

GpuKernels gpu_kernels(const EngineSpec& spec) {
  const bool is_gpu = spec.device == DeviceKind::cuda;
  return {.is_hopper = is_gpu ? limits_of_gpu(spec).is_hopper() : spec.counts_for_hopper, .choice = spec.kernels};
}

EngineSpec on_other_gpu(EngineSpec spec) {
  spec.counts_for_hopper = false;
  spec.precision.has_f8_kernels = false;
  return spec;
}

namespace {

// Exchanges of tp and cp overlap with products on CPUs in groups of one level (comm/collective_levels.h), and on GPUs
// between nodes. Inside a node the kernels of NCCL would take more from the products than they hide
// (docs/measurements/performance/several-gpus.md). NCCL's own sums might add in another order beside products.
void choose_overlap(EngineSpec& spec) {
  MeshShape& mesh = spec.mesh;
  // span: consecutive ranks from the first to the last of a group.
  const auto overlaps = [&](Axis axis, int64_t span) {
    const auto ranks = static_cast<int>(group_size(mesh, axis)), on_node = static_cast<int>(ranks_on_node(mesh, axis));
    if (spec.use != ModelUse::training || !spec.overlap || ranks == 1) return false;
    if (target_of(spec) != DeviceKind::cuda) return CollectiveLevels(ranks, on_node).is_direct();
    return span > mesh.ranks_per_node && spec.sums == GpuSums::ranks;
  };
  mesh.tp_overlap = overlaps(Axis::tp, mesh.tp);
  const bool gathers = spec.shape.cp_comm == CpComm::allgather || spec.shape.cp_comm_window == CpComm::allgather;
  mesh.cp_overlap = gathers && overlaps(Axis::cp, mesh.tp * mesh.cp);
}

}  // namespace

EngineSpec resolved(EngineSpec spec) {
  if (spec.device != DeviceKind::null) spec.target = spec.device;
  if (spec.kernels != KernelChoice::automatic) spec.precision.has_f8_kernels = false;
  check_device(spec.model, spec.target, {.batch = spec.shape.batch, .tp = spec.mesh.tp});
  if (spec.device != DeviceKind::null) check_quantised_products(spec.model, spec.precision, spec.lora, spec.device);
  if (spec.offload_weights)
    spec.precision.weight_copies = false;  // the device has the weights of a few layers at a time
  spec.dispatcher = dispatcher_choice(spec).kind;
  if (spec.lora.is_on()) spec.freeze = {"*"};
  if (spec.max_positions == 0) spec.max_positions = std::max(spec.shape.seq * spec.mesh.cp, spec.cache_tokens);
  // One stage runs the micro-batches of a step one after the other; several stages have all of them
  // in flight.
  spec.pipeline.num_micro_batches = spec.mesh.pp > 1 ? spec.num_micro_batches : 1;
  spec.pipeline.overlap = spec.overlap;
  choose_overlap(spec);
  return spec;
}

// Inference is eager, so that it may read counts back on the host.
DispatcherChoice dispatcher_choice(const EngineSpec& spec, const PeerReach& peers) {
  const DeviceKind target = target_of(spec);
  return resolve_dispatcher({.asked = spec.dispatcher,
                             .ep = spec.mesh.ep,
                             .etp = spec.mesh.etp,
                             .top_k = spec.model.top_k,
                             .num_experts = spec.model.num_experts,
                             .has_moe_layers = spec.model.num_moe_layers() > 0,
                             .captures = target == DeviceKind::cuda && spec.graph && spec.use == ModelUse::training,
                             .ranks_per_node = spec.mesh.ranks_per_node,
                             .peers = peers,
                             .estimates = estimates_of(spec, peers)});
}

DispatcherChoice dispatcher_choice(const RunSpec& run, const PeerReach& peers) {
  const ParallelSpec& p = run.parallel;
  const int64_t S = run.train.seq_len > 0 ? run.train.seq_len : run.model.max_position_embeddings;
  const EngineSpec spec{
      .model = run.model,
      .balance = run.moe,
      .precision = run.precision,
      .use = ModelUse::training,
      .shape = {.batch = std::max<int64_t>(1, run.train.micro_batch), .seq = std::max<int64_t>(1, S / p.cp)},
      .mesh = {.tp = p.tp, .cp = p.cp, .etp = p.etp, .ep = p.ep, .ranks_per_node = p.ranks_per_node},
      .rates = run.rates,
      .sums = p.sums == RankSums::nccl ? GpuSums::nccl : GpuSums::ranks,
      .device = run.device,
      .graph = run.graph};
  DispatcherChoiceInputs inputs = dispatcher_inputs(run, peers);
  inputs.estimates = estimates_of(spec, peers);
  return resolve_dispatcher(inputs);
}

}  // namespace moebius
