// The description of an engine, made from a recipe or filled in by a program.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/gpu/nccl.h"
#include "comm/mesh.h"
#include "config/dispatcher_choice.h"
#include "config/run_spec.h"
#include "device/gpu_kernels.h"
#include "device/gpu_limits.h"
#include "model/model.h"
#include "parallel/pipeline/pipeline.h"
#include "parallel/sharding/sharding.h"

namespace moebius {

struct EngineSpec {
  ModelSpec model;
  BalanceSpec balance;
  PrecisionSpec precision;
  ModelUse use = ModelUse::inference;
  BatchShape shape;                        // shape of a micro-batch on this rank: 1 / cp of each sequence
  int64_t num_micro_batches = 1;           // micro-batches of a step
  int64_t max_positions = 0;               // rows of the RoPE table; 0: the sequence length
  int64_t cache_tokens = 0;                // > 0: key-value caches for generation, with this many tokens per sequence
  int64_t cache_sequences = 1;             // sequences that are generated at once
  std::optional<OptimizerSpec> optimizer;  // set with ModelUse::training
  RecomputeSpec recompute;                 // what backward recomputes instead of keeping it
  OffloadSpec offload;                     // what backward reads from the host; with ModelUse::training
  double expert_rows = 0;                  // planned rows of experts over the even share; 0: the worst case
  std::vector<std::string> freeze;         // patterns of parameters that are not trained (model/params.h)
  LoraSpec lora;                           // adapters; nothing else is trained with them
  MeshShape mesh;
  PipelineSpec pipeline;  // num_micro_batches and overlap are set by the engine
  // The transport of the world, of mesh.world() ranks. Null: this is the only rank, or on the null device the first
  // rank of a dry run.
  Transport* world = nullptr;
  // The dispatcher of the MoE layers; Engine::spec() has the resolved kind. In training on several ranks the ranks of
  // etp x ep test whether "auto" can be direct.
  DispatcherKind dispatcher = DispatcherKind::automatic;
  std::optional<ExchangeRates> rates;  // the rates by which "auto" compares dispatchers; none: the usual ones
  ExpertOverlap expert_overlap = ExpertOverlap::none;  // work that overlaps with the exchange of rows; changes no bit
  GpuSums sums = GpuSums::ranks;                       // the order of sums over ranks with GPUs
  bool overlap = true;                                 // overlaps communication with compute; changes no bit
  // With optimizer.offload, the update of a step may overlap with the first passes of the next one; changes no bit.
  // Code that reads weights or states after a step must call Engine::finish_update() first.
  bool overlaps_update = false;
  bool fsdp = false;                                  // parallel.fsdp: training shards the weights of layers
  bool shard_gradients = false;                       // parallel.shard_gradients: and the sums of their gradients
  int64_t bucket_numel = ShardingSpec::kBucketNumel;  // elements of a gradient bucket
  DeviceKind device = DeviceKind::cpu;
  DeviceKind target = DeviceKind::cpu;  // the device that the null device counts for
  bool graph = true;                    // a GPU captures training steps and token generation as CUDA graphs; else eager
  KernelChoice kernels = KernelChoice::automatic;  // kernels that a GPU uses
  // For tests: a GPU runs the kernels that another one with these limits would run. Empty: its own limits.
  std::optional<GpuLimits> gpu_limits;
  bool counts_for_hopper = true;    // with a null device: false counts the memory of a GPU other than Hopper
  bool fusion = true;               // fuses ops of dense layers (model/layers/mlp.h)
  bool measures_precision = false;  // log.precision
  bool offload_weights = false;     // "weights" in memory.offload: training keeps those of layers on the host
  int threads = 1;
  uint64_t seed = 0;
};

// Returns the limits by which this spec's GPU chooses kernels: gpu_limits, else those of the thread's current GPU.
GpuLimits limits_of_gpu(const EngineSpec& spec);

// Returns the kernels of the thread's current GPU with this spec. On the null device: of the GPU that it counts for.
GpuKernels gpu_kernels(const EngineSpec& spec);

// Returns the spec that counts the memory of a GPU other than Hopper, which emulates quantised products.
EngineSpec on_other_gpu(EngineSpec spec);

// Returns whether an update of this spec can be pending (EngineSpec::overlaps_update). It cannot if other work on
// weights follows the whole update: messages to other ranks, QK-clip, or the quantising of weights held in 8 bits. Nor
// can it with weights on the host, which passes copy to the device when the update has written them.
bool can_overlap_update(const EngineSpec& spec);

// Returns the sharding of a run that trains, without ShardingSpec::held.
ShardingSpec sharding_spec(const EngineSpec& spec);

// Returns the mesh of a run on world_size ranks: dp and edp are what remains after the other axes.
MeshShape mesh_shape(const ParallelSpec& parallel, int64_t world_size);
// Returns the spec of an engine that trains this run on a mesh.
EngineSpec training_engine_spec(const RunSpec& run, const MeshShape& mesh = {});

// Returns the spec with every automatic choice resolved; `auto` dispatchers are resolved as if ranks could not access
// each other's memory. Throws Error{usage} when the target cannot run it.
EngineSpec resolved(EngineSpec spec);

// Returns the dispatcher of an engine of this spec, with the reason.
DispatcherChoice dispatcher_choice(const EngineSpec& spec, const PeerReach& peers = {});
// Returns the same for training this run, by the rates of its machine file. A batch that is not given counts as one
// sequence of the model's context.
DispatcherChoice dispatcher_choice(const RunSpec& run, const PeerReach& peers);

}  // namespace moebius
