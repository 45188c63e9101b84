#include "engine/engine_spec.h"

#include <algorithm>

#include "config/check/expert_rows_bound.h"
#include "device/gpu_limits.h"
#include "model/device_support.h"
#include "model/gpu_products.h"

namespace moebius {
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

namespace {

// Exchanges of tp and cp overlap with products on CPUs, and between nodes. Inside a node the kernels of NCCL would take
// more from the products than they hide (docs/measurements/performance/several-gpus.md).
MeshShape with_overlap(MeshShape mesh, const RunSpec& run) {
  const auto overlaps = [&](int64_t ranks) {
    return run.parallel.overlap && (run.device == DeviceKind::cpu || ranks > mesh.ranks_per_node);
  };
  mesh.tp_overlap = overlaps(mesh.tp);
  mesh.cp_overlap = overlaps(mesh.tp * mesh.cp);
  return mesh;
}

}  // namespace

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
      .mesh = with_overlap(mesh, run),
      .pipeline = {.schedule = run.parallel.schedule, .num_virtual = run.parallel.vpp, .layout = run.parallel.layout},
      .dispatcher = resolve_dispatcher(run).kind,
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
  return spec;
}

// Inference is eager, so that it may read counts back on the host.
DispatcherChoice dispatcher_choice(const EngineSpec& spec, const PeerReach& peers) {
  const DeviceKind target = spec.device == DeviceKind::null ? spec.target : spec.device;
  return resolve_dispatcher({.asked = spec.dispatcher,
                             .ep = spec.mesh.ep,
                             .etp = spec.mesh.etp,
                             .top_k = spec.model.top_k,
                             .num_experts = spec.model.num_experts,
                             .has_moe_layers = spec.model.num_moe_layers() > 0,
                             .captures = target == DeviceKind::cuda && spec.graph && spec.use == ModelUse::training,
                             .on_gpu = target == DeviceKind::cuda,
                             .ranks_per_node = spec.mesh.ranks_per_node,
                             .element_bytes = static_cast<double>(size_of(spec.precision.compute)),
                             .peers = peers});
}

}  // namespace moebius
