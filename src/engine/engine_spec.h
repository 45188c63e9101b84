// The description of an engine, as a value. It is made from a recipe, or filled in by hand.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/gpu/nccl.h"
#include "comm/mesh.h"
#include "config/dispatcher_choice.h"
#include "config/run_spec.h"
#include "model/model.h"
#include "parallel/pipeline/pipeline.h"
#include "parallel/sharding/sharding.h"

namespace moebius {

struct EngineSpec {
  ModelSpec model;
  BalanceSpec balance;
  PrecisionSpec precision;
  ModelUse use = ModelUse::inference;
  BatchShape shape;                        // of a micro-batch on this rank: 1 / cp of each sequence
  int64_t num_micro_batches = 1;           // of a step
  int64_t max_positions = 0;               // 0: those of the whole sequence
  int64_t cache_tokens = 0;                // > 0: key/value caches for generation, of so many tokens a sequence
  int64_t cache_sequences = 1;             // that are generated at once
  std::optional<OptimizerSpec> optimizer;  // with ModelUse::training
  RecomputeSpec recompute;                 // what backward recomputes instead of keeping it
  OffloadSpec offload;                     // what it reads from the host; with ModelUse::training
  double expert_rows = 0;                  // rows of experts that are planned, over the even share; 0: the worst case
  std::vector<std::string> freeze;         // patterns of parameters that are not trained (model/params.h)
  LoraSpec lora;                           // with adapters nothing else is trained
  MeshShape mesh;
  PipelineSpec pipeline;  // num_micro_batches and overlap are set by the engine
  // The engine is a rank of this world, which has mesh.world() ranks. Null: it is the only rank, or
  // on the null device the first rank of a dry run.
  Transport* world = nullptr;
  // The dispatcher of the MoE layers. Engine::spec() has the kind that is used. In training on several ranks the
  // ranks of etp x ep find out whether "auto" can be direct.
  DispatcherKind dispatcher = DispatcherKind::automatic;
  ExpertOverlap expert_overlap = ExpertOverlap::none;  // work beside the rows of MoE layers on their way; the same bits
  GpuSums sums = GpuSums::ranks;                       // who adds the numbers of ranks with GPUs
  bool overlap = true;                                // communication overlaps with compute where it can; the same bits
  bool fsdp = false;                                  // parallel.fsdp: training shards the weights of layers
  bool shard_gradients = false;                       // parallel.shard_gradients: and the sums of their gradients
  int64_t bucket_numel = ShardingSpec::kBucketNumel;  // of gradients that are reduced together
  DeviceKind device = DeviceKind::cpu;
  DeviceKind target = DeviceKind::cpu;  // the device that the null device counts for
  bool graph = true;                    // a GPU's training step, and its tokens one by one: CUDA graphs, or eager
  KernelChoice kernels = KernelChoice::automatic;  // of a GPU
  bool fusion = true;                              // of the dense layers (model/layers/mlp.h)
  bool measures_precision = false;                 // log.precision
  int threads = 1;
  uint64_t seed = 0;
};

// The mesh of a run on world_size ranks. dp and edp are what remains after the other axes.
MeshShape mesh_shape(const ParallelSpec& parallel, int64_t world_size);
// The engine that trains this run on a mesh.
EngineSpec training_engine_spec(const RunSpec& run, const MeshShape& mesh = {});

// Returns the spec with every open choice resolved; every engine is built from such a spec. `auto` is a dispatcher for
// ranks that do not reach each other's memory.
// Error{usage} when the target cannot run it.
EngineSpec resolved(EngineSpec spec);

// The dispatcher of an engine of this spec, and why.
DispatcherChoice dispatcher_choice(const EngineSpec& spec, const PeerReach& peers = {});

}  // namespace moebius
