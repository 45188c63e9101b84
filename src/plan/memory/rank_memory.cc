#include "plan/memory/rank_memory.h"

#include <algorithm>
#include <map>

#include "core/block_code.h"
#include "engine/engine_memory.h"
#include "memory/alignment.h"
#include "model/moe/expert_rows.h"
#include "parallel/optim/matrix_batches.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/streamed_update.h"
#include "plan/sharding/param_buckets.h"

namespace moebius {
namespace {

// Adds weights that are joined, which begin at a multiple of MemoryPlan::kAlign of their own elements.
void add_weights(RankMemory& m, int64_t numel, DType dtype) {
  int64_t& bytes = m.life[static_cast<size_t>(Life::param)];
  const int64_t align = MemoryPlan::kAlign * size_of(dtype);
  bytes = div_ceil(bytes, align) * align + numel * size_of(dtype);
}

void add(RankMemory& m, Life life, int64_t bytes) { m.life[static_cast<size_t>(life)] += bytes; }

// Adds a tensor after the others of its life, as the plan places it.
void place(RankMemory& m, Life life, int64_t numel, DType dtype) {
  int64_t& bytes = m.life[static_cast<size_t>(life)];
  const int64_t align = align_bytes(dtype);
  bytes = div_ceil(bytes, align) * align + div_ceil(bytes_of(dtype, numel), align) * align;
}

template <class Body>
void for_parts(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank, Body&& body) {
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    for (int64_t i = 0; i < stage.num_layers; ++i) body(v, parts.layer(stage.first_layer + i));
    body(v, parts.ends(stage));
  }
}

// Does the same once for neighbours that are the same part.
template <class Body>
void for_each_part(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank, Body&& body) {
  const PartWork* before = nullptr;
  for_parts(parts, layout, pp_rank, [&](int64_t, const PartWork& part) {
    if (&part != before) body(part);
    before = &part;
  });
}

// Returns the number of matrices that have elements in [begin, end).
int64_t num_touched(const MatrixWork& m, int64_t begin, int64_t end) {
  const int64_t first = std::max(begin, m.begin), last = std::min(end, m.begin + m.count * m.numel) - 1;
  return first > last ? 0 : (last - m.begin) / m.numel - (first - m.begin) / m.numel + 1;
}

// Adds the work of `times` matrices. An op is one launch for several of them, except that each has a norm of its own.
void add_matrices(PassWork& sum, const MatrixWork& m, int64_t times) {
  if (times == 0) return;
  const PassWork& work = m.each;
  const double n = static_cast<double>(times);
  const int64_t launches = div_ceil(times, matrices_at_once(m.numel, times));
  for (OpWork op : work.ops) {
    op.calls *= op.name == "sum_squares" ? times : launches;
    op.cost = {.flops = n * op.cost.flops, .bytes = n * op.cost.bytes};
    sum.ops.push_back(std::move(op));
  }
  for (SentWork sent : work.sent) {
    sent.calls *= times;
    sent.wire_bytes *= n;
    sum.sent.push_back(std::move(sent));
  }
}

void add_moments(RankMemory& m, const OptimizerSpec& optimizer, const ParamSize& p, int64_t owned, bool keeps_states) {
  const Life life = optimizer.offload && !keeps_states ? Life::host : Life::optimizer;
  for (int64_t i = 0; i < num_moments(optimizer, p.of_matrices); ++i) {
    const bool is_coded = optimizer.state == StateFormat::blocks_8bit && p.has_blocks;
    place(m, life, owned, is_coded ? DType::u8 : optimizer.state == StateFormat::bf16 ? DType::bf16 : DType::f32);
    if (is_coded) place(m, life, owned / kCodeBlock, DType::f32);
  }
}

// Adds the slots through which states on the host pass, and lr and step of their update.
void add_streamed(RankMemory& m, int64_t states_bytes) {
  for (int i = 0; i < kStreamedSlots; ++i) place(m, Life::optimizer, streamed_slot_bytes(states_bytes), DType::u8);
  place(m, Life::optimizer, 2, DType::f64);
}

void add_master(RankMemory& m, const OptimizerSpec& optimizer, DType weights, int64_t owned, bool keeps_states) {
  const int64_t bytes = master_bytes(optimizer, weights);
  const Life life = keeps_states ? Life::optimizer : optimizer.offload ? Life::host : Life::master;
  if (bytes > 0) place(m, life, owned, bytes == 4 ? DType::f32 : DType::u16);
}

// The states of the parameters that train, in the order of their declaration.
struct RankStates {
  std::vector<const ParamSize*> params;
  std::vector<StatesOf> owned;
  std::vector<bool> kept;  // kept_states()
};

// Buckets hold parameters from the last to the first. A layer's sizes may represent several layers.
RankStates rank_states(const EngineSpec& spec, const RankHeld& held, const RankPlace& rank) {
  std::map<const ParamSize*, std::vector<StatesOf>> owned_of;
  for (const ParamBucket& bucket : held.trained)
    for_owned(spec, rank, bucket, [&](const ParamSize& p, int64_t, int64_t owned) {
      owned_of[&p].push_back(
          {.weights = bucket.dtype, .count = owned, .of_matrices = p.of_matrices, .has_blocks = p.has_blocks});
    });
  RankStates states;
  for (const HeldParam& p : held.params) {
    if (!p->has_grad) continue;
    states.params.push_back(p.size);
    states.owned.push_back(owned_of.at(p.size).back());
    owned_of.at(p.size).pop_back();
  }
  states.kept = kept_states(spec.optimizer.value(), states.owned);
  return states;
}

// Adds moments and slots, after all masters.
void add_moments_and_slots(RankMemory& m, const OptimizerSpec& optimizer, const RankStates& states) {
  int64_t streamed = 0;
  bool needs_any = false;
  for (size_t i = 0; i < states.params.size(); ++i) {
    const ParamSize& p = *states.params[i];
    add_moments(m, optimizer, p, states.owned[i].count, states.kept[i]);
    const int64_t bytes = streamed_bytes(optimizer, states.owned[i].weights, states.owned[i].count);
    streamed += bytes;
    needs_any = needs_any || needs_slots(optimizer, bytes, states.kept[i], p.sums_apart);
  }
  if (needs_any) add_streamed(m, streamed);
}

// Adds the f32 gradients of the largest layer, if sums are in bf16.
void add_layer_gradients(RankMemory& m, const PartWork& layer) {
  RankMemory one;
  for (const ParamSize& p : layer.params)
    if (p.sums_apart && !p.fuses_grad) place(one, Life::layer_grad, p.numel, DType::f32);
  int64_t& most = m.life[static_cast<size_t>(Life::layer_grad)];
  most = std::max(most, one.of(Life::layer_grad));
}

// Adds the metrics of all routers of the rank (model/moe/router/router_sums.h).
void add_router_sums(RankMemory& m, const EngineSpec& spec, const StageLayout& layout, int64_t pp_rank) {
  int64_t layers = 0;
  for (int64_t v = 0; v < layout.num_virtual(); ++v)
    layers += moe_layers_of(spec.model, layout.at(pp_rank, v), spec.shape.num_mtp);
  if (layers > 0)
    add(m, Life::metrics, 8 * (aligned_numel(layers * (spec.model.num_experts + 1)) + aligned_numel(3 * layers)));
}

// Adds the tensors that passes save. Layers of a kind share them below the lowest trained one.
void add_saved(RankMemory& m, LayoutParts& parts, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  const auto shares = [&](int64_t layer) {
    if (layer >= parts.first_backward()) return false;
    for (int64_t i = 0; i < layer; ++i)
      if (spec.model.is_moe_layer(i) == spec.model.is_moe_layer(layer)) return true;
    return false;
  };
  const auto add_part = [&](int64_t v, const PartWork& part, bool is_shared) {
    const int64_t sets = is_shared ? 0 : use.num_saved[static_cast<size_t>(v)];
    add(m, Life::saved, part.saved_bytes * sets + part.output_bytes);
    add(m, Life::metrics, part.metrics_bytes);
  };
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i)
      add_part(v, parts.layer(i), shares(i));
    add_part(v, parts.ends(stage), false);
  }
}

// Returns the maximum number of magnitudes in an exchange: one per rank and block of quantised weights of a bucket.
int64_t most_magnitudes(const EngineSpec& spec, const std::vector<ParamBucket>& buckets) {
  int64_t most = 0;
  for (const ParamBucket& bucket : buckets) {
    int64_t blocks = 0;
    for (const HeldParam& p : bucket.params) blocks += p->num_scales;
    most = std::max(most, blocks * group_size(spec.mesh, bucket.axis));
  }
  return most;
}

// Adds the buffers that sharded layers share (parallel/sharding/layer_buffers.h), each as large as the largest of its
// layers. Returns the bytes of the largest.
int64_t add_layer_buffers(RankMemory& m, Life life, const std::map<int64_t, int64_t>& bytes_of_layer, bool overlap) {
  std::array<int64_t, 2> buffers{};
  for (const auto& [layer, bytes] : bytes_of_layer) {
    int64_t& buffer = buffers[overlap ? static_cast<size_t>(layer % 2) : 0];
    buffer = std::max(buffer, bytes);
  }
  for (const int64_t bytes : buffers)
    if (bytes > 0) place(m, life, bytes, DType::u8);
  return std::max(buffers[0], buffers[1]);
}

void add_sharded_layers(RankMemory& m, const EngineSpec& spec, const std::vector<ParamBucket>& trained,
                        const std::vector<ParamBucket>& frozen) {
  std::map<int64_t, int64_t> weights, staged, gradients, staged_gradients;
  bool any_apart = false;
  for (const auto* buckets : {&trained, &frozen})
    for (const ParamBucket& bucket : *buckets) {
      if (!bucket.shards_weights) continue;
      weights[bucket.layer] += bytes_of(bucket.dtype, bucket.numel);
      // In staging memory a rank has what it gives to gathers: its share, or the larger shard.
      if (spec.offload_weights && group_size(spec.mesh, bucket.axis) > 1)
        staged[bucket.layer] += bytes_of(bucket.dtype, bucket.numel / shard_size(spec.mesh, bucket.axis));
    }
  for (const ParamBucket& bucket : trained)
    if (bucket.shards_gradients) {
      gradients[bucket.layer] += bucket.numel * size_of(bucket.grad());
      any_apart = any_apart || bucket.sums_apart;
      if (bucket.sums_apart && spec.optimizer->offload_grad)
        staged_gradients[bucket.layer] += bucket.numel / group_size(spec.mesh, bucket.axis) * size_of(bucket.grad());
    }
  add_layer_buffers(m, Life::comm, weights, spec.overlap);
  add_layer_buffers(m, Life::comm, staged, spec.overlap);
  const int64_t arrived = add_layer_buffers(m, any_apart ? Life::comm : Life::layer_grad, gradients, spec.overlap);
  if (spec.overlap && arrived > 0) place(m, Life::comm, arrived, DType::u8);
  add_layer_buffers(m, Life::comm, staged_gradients, spec.overlap);
}

// A rank keeps the weights that it updates, and a shard where fewer ranks gather them.
void add_shares(RankMemory& m, const EngineSpec& spec, const ParamBucket& bucket) {
  const int64_t ranks = group_size(spec.mesh, bucket.axis), shard = shard_size(spec.mesh, bucket.axis);
  const Life life = spec.offload_weights ? Life::host : Life::param;
  place(m, life, bucket.numel / ranks, bucket.dtype);
  if (shard < ranks) place(m, life, bucket.numel / shard, bucket.dtype);
}

void add_params(RankMemory& m, const EngineSpec& spec, const RankHeld& held, const RankPlace& rank) {
  const std::vector<HeldParam>& params = held.params;
  for (const HeldParam& p : params) {  // before the buckets, as in the engine's plan
    if (p->has_grad || is_sharded_frozen(spec, p)) continue;
    if (p->kind == ParamKind::state)
      add(m, Life::state, aligned_numel(p->numel) * size_of(p->dtype));
    else
      place(m, Life::param, p->numel, p->dtype);
  }
  const OptimizerSpec& optimizer = spec.optimizer.value();
  const std::vector<ParamBucket>&buckets = held.trained, &frozen = held.frozen;
  const RankStates states = rank_states(spec, held, rank);
  std::map<const ParamSize*, std::vector<bool>> kept_of;
  for (size_t i = 0; i < states.params.size(); ++i) kept_of[states.params[i]].push_back(states.kept[i]);
  int64_t largest = 0;
  for (const ParamBucket& bucket : buckets) {
    const int64_t ranks = group_size(spec.mesh, bucket.axis);
    if (ranks > 1 && !bucket.shards_gradients) largest = std::max(largest, bucket.numel);
    if (bucket.shards_weights)
      add_shares(m, spec, bucket);
    else
      add_weights(m, bucket.numel, bucket.dtype);
    place(m, bucket.sums_apart && optimizer.offload_grad ? Life::host : Life::grad,
          bucket.shards_gradients ? bucket.numel / ranks : bucket.numel, bucket.grad());
    for_owned(spec, rank, bucket, [&](const ParamSize& p, int64_t, int64_t owned) {
      add_master(m, optimizer, bucket.dtype, owned, kept_of.at(&p).back());
      kept_of.at(&p).pop_back();
    });
  }
  for (const ParamBucket& bucket : frozen) add_shares(m, spec, bucket);
  add_moments_and_slots(m, optimizer, states);
  for (const HeldParam& p : params) add(m, Life::state, p->copies_bytes);
  if (const int64_t most = most_magnitudes(spec, buckets); most > 0) place(m, Life::comm, most, DType::i32);
  add_sharded_layers(m, spec, buckets, frozen);
  if (spec.overlap && largest > 0)
    for (int i = 0; i < 2; ++i) place(m, Life::comm, largest, DType::f32);
}

void add_batch(RankMemory& m, LayoutParts& parts) {
  const EngineSpec& spec = parts.spec();
  const bool share_buffer = spec.target == DeviceKind::cuda && spec.mesh.pp == 1;
  add(m, Life::batch, parts.batch_bytes(share_buffer ? 1 : spec.num_micro_batches));
  const auto f64 = [](int64_t n) { return 8 * aligned_numel(n); };
  add(m, Life::metrics, f64(1) + (spec.shape.num_mtp > 0 ? f64(spec.shape.num_mtp) : 0));  // sums of losses
  add(m, Life::metrics, f64(1) + 2 * 4 * MemoryPlan::kAlign);                              // of the gradient norm
  add(m, Life::state, 4 * aligned_numel(spec.max_positions * spec.model.rope_dim()));
}

// Adds offloaded activations: on the host for every layer and each micro-batch in flight, and on the device the
// largest layer of each slot.
void add_offloaded(RankMemory& m, LayoutParts& parts, const StageLayout& layout, const PipelineUse& use) {
  int64_t num_layers = 0;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(m.pp_rank, v);
    const auto layer = [&](int64_t i) -> const PartWork& { return parts.layer(stage.first_layer + i); };
    for (int64_t i = 0; i < stage.num_layers; ++i) {
      if (layer(i).offloaded.empty()) continue;
      const Life slot = num_layers++ % 2 == 0 ? Life::offload_even : Life::offload_odd;
      RankMemory one;
      for (const auto& [numel, dtype] : layer(i).offloaded) place(one, slot, numel, dtype);
      int64_t& most = m.life[static_cast<size_t>(slot)];
      most = std::max(most, one.of(slot));
    }
    for (int64_t set = 0; set < use.num_saved[static_cast<size_t>(v)]; ++set)
      for (int64_t i = 0; i < stage.num_layers; ++i)
        for (const auto& [numel, dtype] : layer(i).offloaded) place(m, Life::host, numel, dtype);
  }
}

// Adds the messages of hidden states: the widest that the rank's stages receive or send.
void add_messages(RankMemory& m, const EngineSpec& spec, const StageLayout& layout, const PipelineUse& use) {
  if (layout.stages.size() == 1) return;
  const int64_t last = std::ssize(layout.stages) - 1;
  int64_t depths = 1;
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const int64_t stage = v * layout.num_ranks + m.pp_rank;
    if (layout.mtp_is_apart() && (stage == last || stage == last - 1)) depths = 1 + spec.shape.num_mtp;
  }
  const int64_t rows = rows_between_projections(spec.shape, spec.mesh) * depths;
  add(m, Life::saved, use.num_buffers * aligned_numel(rows * spec.model.hidden_size) * size_of(spec.precision.compute));
}

// Adds the rows of experts: one scratch buffer, and a pool for the maximum number of passes that keep rows.
void add_expert_rows(RankMemory& m, LayoutParts& parts, const StageLayout& layout, const PipelineUse& use,
                     int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  RowsWork rows;
  for_each_part(parts, layout, pp_rank, [&](const PartWork& part) {
    rows = {.scratch_bytes = std::max(rows.scratch_bytes, part.rows.scratch_bytes),
            .spill_bytes = std::max(rows.spill_bytes, part.rows.spill_bytes),
            .counts_ranks = rows.counts_ranks || part.rows.counts_ranks,
            .pages_of_pass = std::max(rows.pages_of_pass, part.rows.pages_of_pass),
            .h_columns = std::max(rows.h_columns, part.rows.h_columns),
            .low_columns = std::max(rows.low_columns, part.rows.low_columns)};
  });
  std::vector<int64_t> layers;
  for (int64_t v = 0; v < layout.num_virtual(); ++v)
    layers.push_back(moe_layers_that_keep(spec.model, layout.at(pp_rank, v), spec.shape.num_mtp, spec.recompute));
  const int64_t pages = rows.pages_of_pass * most_in_use(use.in_use, layers);
  add(m, Life::rows,
      rows.scratch_bytes + stash_bytes(pages, rows.h_columns + rows.low_columns, spec.precision.compute));
  m.spill_bytes = rows.spill_bytes;
  if (rows.counts_ranks) add(m, Life::metrics, stash_counts_bytes(spec.mesh.world()));
}

// Returns the bytes for gradients of a tied embedding: each stage that has it receives the gradients of the other
// stages (parallel/sharding/tied_embedding.h).
int64_t tied_gradient_bytes(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank,
                            const std::vector<HeldParam>& params) {
  const EngineSpec& spec = parts.spec();
  const int64_t last = spec.mesh.pp - 1;
  const bool apart = layout.mtp_is_apart(), mtp = spec.shape.num_mtp > 0;
  std::vector<int64_t> holders{0};
  if (apart && mtp) holders.push_back(last - 1);
  if (spec.model.tie_word_embeddings || (mtp && !apart)) holders.push_back(last);
  if (last == 0 || std::find(holders.begin(), holders.end(), pp_rank) == holders.end()) return 0;
  const auto is_copy = [](const HeldParam& p) { return p->tied_copy; };
  const auto table = pp_rank == 0 ? params.begin() : std::find_if(params.begin(), params.end(), is_copy);
  if (table == params.end() || !(*table)->has_grad) return 0;
  const int64_t bytes = div_ceil((*table)->numel * size_of(DType::f32), StepStack::kAlign) * StepStack::kAlign;
  return (std::ssize(holders) - 1) * bytes;
}

int64_t num_logits(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  int64_t logits = 0;
  for_parts(parts, layout, pp_rank, [&](int64_t, const PartWork& part) { logits += part.logits; });
  return logits;
}

// Returns the bytes for the largest logits of all dp_cp ranks (parallel/optim/qk_clipping.h).
int64_t gathered_logits_bytes(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const int64_t ranks = group_size(parts.spec().mesh, Axis::dp_cp), logits = num_logits(parts, layout, pp_rank);
  return ranks == 1 ? 0 : div_ceil(ranks * logits * size_of(DType::f32), StepStack::kAlign) * StepStack::kAlign;
}

// Returns the bytes of the step stack: the maximum of the passes, of that exchange, and of the optimizer.
int64_t stack_bytes(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank,
                    const std::vector<HeldParam>& params) {
  const EngineSpec& spec = parts.spec();
  const int64_t rows = rows_between_projections(spec.shape, spec.mesh);
  const int64_t stream_bytes = rows * spec.model.hidden_size * size_of(spec.precision.compute);
  const int64_t stream = layout.stages.size() == 1 ? div_ceil(stream_bytes, StepStack::kAlign) * StepStack::kAlign : 0;
  UpdateScratch scratch;
  for (const HeldParam& p : params) scratch.at_least(p->scratch);
  int64_t most = std::max({tied_gradient_bytes(parts, layout, pp_rank, params), scratch.stack_bytes(),
                           gathered_logits_bytes(parts, layout, pp_rank)});
  const auto take = [&](const PartWork& part, bool has_backward) {
    most = std::max({most, stream + part.forward.stack_bytes, part.loss.stack_bytes});
    if (has_backward) most = std::max(most, stream + part.backward.stack_bytes);
  };
  for (int64_t v = 0; v < layout.num_virtual(); ++v) {
    const StageSpec& stage = layout.at(pp_rank, v);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i)
      take(parts.layer(i), i >= parts.first_backward());
    take(parts.ends(stage), true);
  }
  return most;
}

}  // namespace

int64_t RankMemory::total() const {
  int64_t sum = unplanned_bytes;
  for (const int64_t bytes : life) sum += bytes;
  return sum - of(Life::host);
}

StageLayout stages_of(const EngineSpec& spec) {
  StageLayout layout = stage_layout({.text = spec.pipeline.layout,
                                     .num_ranks = spec.mesh.pp,
                                     .num_virtual = spec.pipeline.num_virtual,
                                     .num_layers = spec.model.num_layers,
                                     .num_mtp = spec.model.num_mtp_layers});
  check_mtp_stage(layout);
  return layout;
}

RankMemory rank_memory(LayoutParts& parts, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  RankMemory m{.pp_rank = pp_rank};
  int64_t window = 0;
  for_each_part(parts, layout, pp_rank, [&](const PartWork& part) {
    window = std::max(window, part.window_bytes);
    add_layer_gradients(m, part);
  });
  add(m, Life::comm, window);
  add_offloaded(m, parts, layout, use);
  const RankHeld held = held_by(parts, layout, pp_rank);
  add_params(m, spec, held, counted_place(spec, pp_rank));
  add_saved(m, parts, layout, use, pp_rank);
  add_router_sums(m, spec, layout, pp_rank);
  add_expert_rows(m, parts, layout, use, pp_rank);
  add_messages(m, spec, layout, use);
  add_batch(m, parts);
  add(m, Life::stack, stack_bytes(parts, layout, pp_rank, held.params));
  m.unplanned_bytes = device_memory(m.life, runs_cudnn(spec)).total_bytes() - m.total();
  if (spec.target != DeviceKind::cuda) m.unplanned_bytes = 0;
  return m;
}

std::vector<StatesOf> states_of_rank(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  return rank_states(spec, held_by(parts, layout, pp_rank), counted_place(spec, pp_rank)).owned;
}

RankParams rank_params(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank) {
  const EngineSpec& spec = parts.spec();
  RankParams r;
  if (spec.optimizer && spec.optimizer->qk_clip > 0) r.logits = num_logits(parts, layout, pp_rank);
  const RankPlace place = counted_place(spec, pp_rank);
  const RankHeld held = held_by(parts, layout, pp_rank);
  for (const ParamBucket& bucket : held.trained) {
    const double n = static_cast<double>(group_size(spec.mesh, bucket.axis));
    const double numel = static_cast<double>(bucket.numel);
    r.held += bucket.sum;
    if (bucket.sums_apart)
      r.sums_apart += bucket.shards_gradients ? bucket.numel / group_size(spec.mesh, bucket.axis) : bucket.sum;
    for (const HeldParam& p : bucket.params) r.stored_first += p->grad_stored_first ? p->numel : 0;
    if (!bucket.shards_gradients) {
      r.grad_wire_bytes[bucket.axis] += gradient_wire_bytes(spec, bucket);
      ++r.grad_buckets[bucket.axis];
    }
    if (!bucket.shards_weights) {
      r.weight_wire_bytes[bucket.axis] += static_cast<double>(size_of(bucket.dtype)) * numel * (n - 1) / n;
      ++r.weight_buckets[bucket.axis];
    }
    const bool has_matrices = std::any_of(bucket.params.begin(), bucket.params.end(),
                                          [](const HeldParam& p) { return !p->matrices.empty(); });
    if (has_matrices) {
      r.matrix_wire_bytes[bucket.axis] += static_cast<double>(size_of(bucket.grad())) * numel * (n - 1) / n;
      ++r.matrix_buckets[bucket.axis];
    }
    int64_t blocks = 0;
    for (const auto& p : bucket.params) blocks += p->num_scales;
    if (blocks > 0) {
      r.magnitude_wire_bytes[bucket.axis] += static_cast<double>(blocks * size_of(DType::i32)) * (n - 1);
      ++r.magnitude_buckets[bucket.axis];
    }
    for_owned(spec, place, bucket, [&](const ParamSize& p, int64_t first, int64_t owned) {
      r.owned += owned;
      if (p.num_scales > 0) r.quantised += owned;
      if (!p.matrices.empty()) r.owned_of_matrices += owned;
      for (const MatrixWork& m : p.matrices) add_matrices(r.matrices, m, num_touched(m, first, first + owned));
    });
  }
  return r;
}

}  // namespace moebius
