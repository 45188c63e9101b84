// The common arguments of layer constructors. The objects that they refer to must outlive the layers.
#pragma once

#include <cstdint>

#include "comm/mesh.h"
#include "config/lora_spec.h"
#include "config/model_spec.h"
#include "config/parallel_spec.h"
#include "config/policy_spec.h"
#include "config/train_spec.h"
#include "device/gpu_kernels.h"
#include "model/attention/token_runs.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

class DirectWindow;
class ExpertRows;
class MaxLogits;
class QuantizeStats;
class RouterSums;

struct LayerContext {
  ParamTable& params;  // the table in which layers declare their parameters
  MemoryPlan& plan;
  const ModelSpec& model;
  const BalanceSpec& balance;
  const Mesh& mesh;
  const Tensor& rope_table_Pd;
  const PrecisionSpec& precision;  // how the products of layers are quantised
  DType dtype = DType::f32;        // dtype of the computation
  BatchShape shape;
  // Shape of the whole micro-batch, if the layer computes it in chunks and `shape` is that of a chunk. Else its
  // batch is 0.
  BatchShape micro_batch_shape = {.batch = 0};
  uint64_t seed = 0;                                      // seed of random draws in training
  DispatcherKind dispatcher = DispatcherKind::automatic;  // how MoE layers exchange rows
  ExpertOverlap expert_overlap = ExpertOverlap::none;     // what overlaps with the exchange of rows
  GpuKernels kernels = {};                                // kernels of a GPU, whose scratch a dry run counts
  bool fusion = true;                                     // fuses ops of dense layers (model/layers/mlp.h)
  DirectWindow* window = nullptr;                         // used by the direct dispatcher (model/moe/direct_window.h)
  ExpertRows* expert_rows = nullptr;                      // used by MoE layers with a budget (model/moe/expert_rows.h)
  // Rows of a chunk, and the tokens of a sequence that is not long; 0: by the rules of model/layers/row_chunks.h and
  // model/moe/chunked_experts.h. Others are for tests.
  int64_t expert_chunk = 0;
  QuantizeStats* quantize_stats = nullptr;  // collects log.precision (model/quantize_stats.h)
  LoraSpec lora = {};                       // names the matrices that have adapters (model/lora/adapter.h)
  MaxLogits* max_logits = nullptr;          // used by optimizer.qk_clip (model/attention/max_logits.h)
  RouterSums* router_sums = nullptr;        // metrics of all MoE layers; null: each router has its own
  // With parallel.fsdp the mesh over which the weights of layers are sharded; else one rank.
  MeshShape sharded_over = {};

  // Returns the rows of the residual stream: t of this rank, and T of all tp ranks.
  int64_t stream_rows() const { return rows_between_projections(shape, mesh.shape()); }
  int64_t rows() const { return stream_rows() * mesh.shape().tp; }
  // Returns whether the rank has the whole weights only while a pass uses the layer.
  bool shards_weights(const Param& p) const { return p.layer >= 0 && group_size(sharded_over, p.spec.grad_axis) > 1; }
  float init_std() const { return static_cast<float>(model.initializer_range); }
  float norm_eps() const { return static_cast<float>(model.rms_norm_eps); }
};

// Returns the context for layers that never have adapters, whatever lora.targets is.
inline LayerContext without_adapters(LayerContext c) {
  c.lora = {};
  return c;
}

}  // namespace moebius
