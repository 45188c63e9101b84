#include "engine/engine_spec.h"

#include <algorithm>

#include "config/nearest.h"
#include "device/accelerator.h"
#include "model/device_support.h"
#include "ops/gemm/cuda/cublas_lt.h"

namespace moebius {
namespace {

// A captured step reads nothing back on the host, so "auto" is all-gather there.
std::string resolved_dispatcher(const EngineSpec& spec) {
  const bool graphs = spec.target == DeviceKind::cuda && spec.graph && spec.use == ModelUse::training;
  if (!graphs) return spec.dispatcher;
  const bool exchanges = spec.mesh.ep * spec.mesh.etp > 1;
  MOEBIUS_CHECK(usage, spec.dispatcher != "alltoall" || !exchanges,
                "engine: the dispatcher \"alltoall\" reads its counts on the host, so its steps cannot be captured in "
                "CUDA graphs; got it with graph = true; set run.graph = false, or parallel.dispatcher = \"allgather\"");
  return spec.dispatcher == "auto" ? "allgather" : spec.dispatcher;
}

struct ParamNames {
  std::vector<std::string> trainable;
  bool any_trained = false;
};

// The names of the whole model's parameters, with freeze applied.
ParamNames names_of_params(const EngineSpec& spec) {
  const Mesh one_rank{MeshShape{}};
  MemoryPlan plan;
  const Model whole({.model = spec.model,
                     .balance = spec.balance,
                     .precision = spec.precision,
                     .mesh = one_rank,
                     .plan = plan,
                     .shape = spec.shape,
                     .max_positions = spec.max_positions,
                     .freeze = spec.freeze});
  ParamNames names;
  for (const Param& p : whole.params().all()) {
    names.any_trained = names.any_trained || p.spec.trainable;
    if (!p.spec.trainable && !p.frozen) continue;
    for (const ParamPart& part : p.spec.parts) names.trainable.push_back(part.name);
  }
  return names;
}

}  // namespace

MeshShape mesh_shape(const ParallelSpec& p, int64_t world_size) {
  return {
      .tp = p.tp, .cp = p.cp, .dp = p.dp(world_size), .pp = p.pp, .etp = p.etp, .ep = p.ep, .edp = p.edp(world_size)};
}

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
          .dispatcher = run.parallel.dispatcher,
          .overlap = run.parallel.overlap,
          .device = run.device,
          .target = run.device,
          .graph = run.graph,
          .threads = run.threads > 0 ? narrow<int>(run.threads) : num_available_cpus(),
          .seed = run.seed};
}

EngineSpec resolved(EngineSpec spec) {
  if (spec.device != DeviceKind::null) spec.target = spec.device;
  check_device(spec.model, spec.target, {.batch = spec.shape.batch, .tp = spec.mesh.tp});
  if (spec.device == DeviceKind::cuda && Accelerator::why_missing().empty()) cuda::open_cublas_lt();
  spec.dispatcher = resolved_dispatcher(spec);
  if (spec.max_positions == 0) spec.max_positions = std::max(spec.shape.seq * spec.mesh.cp, spec.cache_tokens);
  // One stage takes the micro-batches of a step in turn, several have all of them in flight.
  spec.pipeline.num_micro_batches = spec.mesh.pp > 1 ? spec.num_micro_batches : 1;
  spec.pipeline.overlap = spec.overlap;
  return spec;
}

void check_freeze(const EngineSpec& spec) {
  if (spec.freeze.empty()) return;
  const auto [names, any_trained] = names_of_params(spec);
  for (const std::string& pattern : spec.freeze) {
    const bool found =
        std::any_of(names.begin(), names.end(), [&](const std::string& name) { return matches_any({pattern}, name); });
    MOEBIUS_CHECK(usage, found,
                  "train.freeze: expected patterns (*, ? and [classes]) of parameter names; \"{}\" matches none, the "
                  "nearest is {}",
                  pattern, nearest(pattern, names));
  }
  MOEBIUS_CHECK(usage, any_trained,
                "train.freeze: expected to leave something to train; got patterns that match every parameter; freeze "
                "less");
}

}  // namespace moebius
