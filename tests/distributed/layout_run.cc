#include "tests/distributed/layout_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <span>

#include "core/rng.h"
#include "engine/engine_testing.h"
#include "tests/distributed/choice_gap.h"
#include "tests/distributed/elements.h"

namespace moebius {
namespace {

constexpr int64_t kMicroBatch = 2;
constexpr double kRate = 1e-2;

PrecisionSpec precision_of(const LayoutModel& what) {
  PrecisionSpec precision{.compute = DType::f32};
  if (!what.quantised) return precision;
  precision.recipe = what.recipe;
  precision.weight_gradients = what.weight_gradients;
  precision.keep = what.keep;
  if (what.narrow_rows) precision.dispatch = PrecisionChoice::recipe;
  if (what.held_in_8_bits) precision.weights = PrecisionChoice::recipe;
  if (what.saved_in_8_bits) precision.activations = PrecisionChoice::recipe;
  return precision;
}

// eps is far above the noise of f32 sums in the gradients, so that an update follows its gradient
// smoothly. With 1e-8, an element whose gradient is nearly zero would move by lr in the direction
// of that noise.
EngineSpec engine_spec(const LayoutModel& what, const MeshShape& mesh, const ParallelSpec& layout = {}) {
  OptimizerSpec optimizer;
  optimizer.eps = 1e-3;
  optimizer.clip = 0.5;
  return {.model = layout_model_spec(what),
          .balance = {.aux = !what.sinkhorn,
                      .seq_aux = !what.sinkhorn,
                      .global_aux = !what.sinkhorn,
                      .bias = what.sigmoid,
                      .sinkhorn = what.sinkhorn,
                      .aux_coeff = what.sinkhorn ? 0 : 0.05,
                      .z_coeff = 0.01,
                      .bias_rate = 0.01,
                      .capacity_factor = what.capacity || what.by_weight ? 0.9 : 0,
                      .drop_policy = what.by_weight ? DropPolicy::probs : DropPolicy::position,
                      .jitter = what.jitter ? 0.1 : 0},
          .precision = precision_of(what),
          .use = ModelUse::training,
          .shape = {.batch = kMicroBatch,
                    .seq = what.seq / mesh.cp,
                    .max_segments = kMicroBatch * what.seq,
                    .cp_comm = layout.cp_comm,
                    .cp_comm_window = layout.cp_comm_of_window(),
                    .num_mtp = what.mtp},
          .num_micro_batches = what.sequences / (kMicroBatch * mesh.dp),
          .optimizer = optimizer,
          .freeze = what.freeze,
          .lora = what.lora ? LoraSpec{.rank = 3, .alpha = 4.5, .dropout = what.dropout ? 0.25 : 0, .targets = {"*"}}
                            : LoraSpec{},
          .mesh = mesh,
          .pipeline = {.num_virtual = layout.vpp, .layout = layout.layout},
          .dispatcher = layout.dispatcher,
          .expert_overlap = layout.expert_overlap,
          .threads = 1,
          .seed = layout_seed(what)};
}

// Sequence `sequence` of a global batch has two documents. The second one begins here.
int64_t second_document(const LayoutModel& what, int64_t sequence) { return 1 + sequence % (what.seq - 1); }

// Returns whether token i + k + 1 is predicted from row i: it is a target, and both are
// in one document.
bool counts(const LayoutModel& what, int64_t sequence, int64_t i, int64_t k) {
  const int64_t target = i + k + 1, cut = second_document(what, sequence);
  const bool apart = k > 0 && i < cut && target >= cut;
  return (sequence * 3 + target - 1) % 5 != 2 && !apart && target <= what.seq;
}

// The tokens of a sequence that a rank has, and the row of the sequence in its micro-batch.
// With zig-zag, context rank c has the pieces c and 2 cp - 1 - c of 2 cp pieces.
struct Placed {
  std::vector<int64_t> positions;
  int64_t index = 0;
};

std::vector<int64_t> positions_of(const DataShare& share, int64_t seq) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < seq; ++i) {
    const int64_t piece = i * 2 * share.cp / seq;
    if (share.cp == 1 || piece == share.cp_rank || piece == 2 * share.cp - 1 - share.cp_rank) positions.push_back(i);
  }
  return positions;
}

// Returns token i of a sequence of the global batch of a step, as a function of these only. Tokens are drawn unevenly.
int32_t uneven_token(int64_t step, int64_t sequence, int64_t i) {
  const Rng rng(11, RngSite::bench, static_cast<uint64_t>(step), static_cast<uint32_t>(sequence));
  return static_cast<int32_t>(rng.below(i, i % 3 == 0 ? kLayoutVocab : 5));
}

// Returns the same, but all tokens of a micro-batch differ. The stride has no factor in common with the
// size of the vocabulary.
int32_t distinct_token(const LayoutModel& what, int64_t step, int64_t sequence, int64_t i) {
  const Rng rng(11, RngSite::bench, static_cast<uint64_t>(step), static_cast<uint32_t>(sequence / kMicroBatch));
  constexpr std::array<int64_t, 6> kStride = {7, 11, 13, 17, 19, 23};
  const int64_t stride = kStride[rng.below(0, kStride.size())];
  return static_cast<int32_t>((rng.below(1, kLayoutVocab) + stride * (sequence % kMicroBatch * what.seq + i)) %
                              kLayoutVocab);
}

// Fills in sequence `sequence` of the global batch of a step, with two documents.
void fill_sequence(MicroBatch& b, const Placed& at, const LayoutModel& what, int64_t step, int64_t sequence) {
  const auto token = [&](int64_t i) {
    return what.by_weight ? distinct_token(what, step, sequence, i) : uneven_token(step, sequence, i);
  };
  const int64_t cut = second_document(what, sequence);
  for (int64_t k = 0; k < std::ssize(at.positions); ++k) {
    const int64_t i = at.positions[k], t = at.index * std::ssize(at.positions) + k, begin = i < cut ? 0 : cut;
    b.token_T.ptr<int32_t>()[t] = token(i);
    for (int64_t k = 0; k <= what.mtp; ++k) {
      b.targets(k).target_T.ptr<int32_t>()[t] = i + k < what.seq ? token(i + k + 1) : 0;
      b.targets(k).weight_T.ptr<float>()[t] = counts(what, sequence, i, k) ? 1.0f : 0.0f;
    }
    b.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(i - begin);
    b.doc_start_T.ptr<int32_t>()[t] = static_cast<int32_t>(begin);
    b.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(2 * at.index + (i < cut ? 0 : 1));
  }
}

double target_weight(const LayoutModel& what, int64_t depth) {
  double sum = 0;
  for (int64_t sequence = 0; sequence < what.sequences; ++sequence)
    for (int64_t i = 0; i < what.seq; ++i) sum += counts(what, sequence, i, depth);
  return sum;
}

constexpr double kMtpCoeff = 0.3;  // of each depth of multi-token prediction

void fill(Engine& engine, const LayoutModel& what, int64_t m, int64_t step) {
  MicroBatch& b = engine.batch(m);
  const DataShare share = engine.data_share();
  const int64_t batch = engine.spec().shape.batch, first = (m * share.dp + share.dp_rank) * batch;
  Placed at{.positions = positions_of(share, what.seq)};
  for (; at.index < batch; ++at.index) fill_sequence(b, at, what, step, first + at.index);
  b.scalars.set_loss_scale(0, 1.0 / target_weight(what, 0));
  for (int64_t k = 1; k <= what.mtp; ++k) b.scalars.set_loss_scale(k, 1.0 / target_weight(what, k), kMtpCoeff);
  b.scalars.total_tokens = static_cast<double>(what.sequences * what.seq);
  b.scalars.set_step(step);
  b.scalars.set_first_token(first * what.seq);
  b.training = true;
}

// Returns the elements of an f32 tensor on any device.
// Biases begin at 0, which allows no relative distance. So they get values like those
// of other weights.
void draw_biases(Engine& engine, const Param& p) {
  std::vector<float> drawn(p.w.numel());
  for (const ParamPart& part : p.spec.parts) {
    const Rng rng(13, RngSite::bench, std::hash<std::string>()(part.name));
    for (int64_t i = 0; i < part.local_shape().numel(); ++i)
      drawn[part.offset + i] = 0.3f * rng.normal(flat_index(part, i));
  }
  Stream s = engine.stream();
  const Tensor here = p.shards_weights() ? p.owned_weights() : p.w;
  const auto first = drawn.begin() + (p.shards_weights() ? p.owned.begin : 0);
  set_elements(s, here, {first, first + here.numel()});
  if (p.has_master) copy_to_device(s, p.master_n.data, drawn.data() + p.owned.begin, p.master_n.num_bytes());
  synchronize(s);
}

struct Holder {
  const Param* param;
  const ParamPart* part;
};

std::map<std::string, Holder> holders_of(Engine& engine) {
  std::map<std::string, Holder> holders;
  for (const Param& p : engine.model().params().all())
    for (const ParamPart& part : p.spec.parts) holders[part.name] = {&p, &part};
  return holders;
}

// Adds this rank's share of a global tensor: the part that it owns of a trained tensor or of sharded weights, or
// another tensor if it is the first of its holders.
// A tied copy belongs to another stage.
void give(Engine& engine, const Holder& holder, std::span<float> global, std::span<float> givers) {
  const Param& p = *holder.param;
  if (p.spec.tied_copy) return;
  const RankPlace& at = engine.mesh().place();
  const bool first = p.frozen ? engine.mesh().group(p.spec.grad_axis).rank() == 0 : at.cp + at.dp + at.tp == 0;
  if (!p.has_grad && !p.shards_weights() && !first) return;
  const ElementRange range = owned_of(p, *holder.part);
  const std::vector<float> owned = elements(engine, owned_part_of(p.master(), p, *holder.part));
  for (int64_t i = 0; i < range.count; ++i) {
    const int64_t at = flat_index(*holder.part, range.begin + i);
    global[at] += owned[i];
    givers[at] += 1;
  }
}

// Returns the weights that passes of this rank read, but those that are held in 8 bits.
std::map<const Param*, std::vector<float>> weights_in_passes(Engine& engine) {
  Stream s = engine.stream();
  ParamTable& params = engine.model().params();
  std::map<const Param*, std::vector<float>> weights;
  for (size_t i = 0; i < params.all().size(); ++i) {
    const Param& p = params.all()[i];
    params.ready(s, {i, i + 1});  // with overlap, weights are gathered during the next forward pass
    weights[&p] = p.is_quantised() ? std::vector<float>{} : elements(engine, p.w);
    params.release(s, {i, i + 1});
  }
  return weights;
}

void expect_held(const std::vector<float>& weights, const Holder& holder, const std::vector<float>& global) {
  if (holder.param->is_quantised()) return;  // they are rounded
  const bool is_bf16 = holder.param->w.dtype == DType::bf16;
  int64_t different = 0;
  for (int64_t i = 0; i < holder.part->local_shape().numel(); ++i) {
    const float owned = global[flat_index(*holder.part, i)];
    different += weights[static_cast<size_t>(holder.part->offset + i)] != (is_bf16 ? to_f32(to_bf16(owned)) : owned);
  }
  EXPECT_EQ(different, 0) << holder.part->name << ": weights that are not their owner's";
}

// Returns every global tensor, summed over the ranks that own some of it. `alone` says which
// tensors there are.
std::map<std::string, std::vector<float>> gather(Engine& engine, Engine& alone) {
  Group& world = engine.mesh().group(Axis::world);
  Stream on_device = engine.stream(), s(DeviceKind::cpu, on_device.pool());
  const std::map<const Param*, std::vector<float>> weights = weights_in_passes(engine);
  const std::map<std::string, Holder> here = holders_of(engine), wanted = holders_of(alone);
  int64_t numel = 0;
  for (const auto& [name, holder] : wanted) numel += holder.part->shape.numel();
  std::vector<float> globals(numel), givers(numel);  // exact: one rank gives each element
  const auto for_each = [&](const auto& body) {
    size_t begin = 0;
    for (const auto& [name, holder] : wanted) {
      const size_t count = holder.part->shape.numel();
      const auto found = here.find(name);
      body(name, found == here.end() ? nullptr : &found->second, std::span(globals).subspan(begin, count),
           std::span(givers).subspan(begin, count));
      begin += count;
    }
  };
  for_each([&](const std::string&, const Holder* holder, std::span<float> global, std::span<float> giver) {
    if (holder != nullptr) give(engine, *holder, global, giver);
  });
  world.all_reduce_sum(s, tensor_of(globals.data(), {numel}));
  world.all_reduce_sum(s, tensor_of(givers.data(), {numel}));
  std::map<std::string, std::vector<float>> all;
  for_each([&](const std::string& name, const Holder* holder, std::span<float> global, std::span<float> giver) {
    EXPECT_EQ(std::ssize(giver) - std::ranges::count(giver, 1.0f), 0)
        << name << ": elements that are not owned by one rank";
    all[name].assign(global.begin(), global.end());
    if (holder != nullptr) expect_held(weights.at(holder->param), *holder, all[name]);
  });
  return all;
}

const float* bias_of(const Model::MoeLayer& layer, const std::map<std::string, Holder>& holders) {
  const auto at = holders.find(fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", layer.layer));
  return at == holders.end() ? nullptr : at->second.param->w.ptr<float>();
}

// Engine::step on one rank. Returns the smallest gap of its choices.
double watched_step(Engine& engine, int64_t step, double lr) {
  double gap = std::numeric_limits<double>::infinity();
  const std::map<std::string, Holder> holders = holders_of(engine);
  const BalanceSpec& balance = engine.spec().balance;
  const bool by_weight = balance.capacity_factor > 0 && balance.drop_policy == DropPolicy::probs;
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) {
    engine.forward_backward(m);
    for (const Model::MoeLayer& layer : engine.model().moe_layers()) {
      gap = std::min(gap, choice_gap(layer, engine.spec(), bias_of(layer, holders)));
      if (by_weight) gap = std::min(gap, drop_gap(layer, engine.spec()));
    }
  }
  EngineTestAccess::optimizer_step(engine, step, lr);
  return gap;
}

std::map<std::string, std::vector<float>> frozen_weights(Engine& engine) {
  std::map<std::string, std::vector<float>> weights;
  for (const Param& p : engine.model().params().all())
    if (p.frozen) weights[p.spec.name] = elements(engine, p.owned_weights());
  return weights;
}

StepReport report_of(Engine& engine) {
  StepReport report = read_step(engine, /*step_time_s=*/1.0);
  engine.end_of_step();
  return report;
}

void fill_step(Engine& engine, const LayoutModel& what, int64_t step) {
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) fill(engine, what, m, step);
}

// Returns the global numbers of reports, of which each rank has the same.
std::vector<double> numbers_of(const std::vector<StepReport>& steps) {
  std::vector<double> all;
  for (const StepReport& step : steps) {
    const auto dropped = static_cast<double>(step.dropped_tokens);
    all.insert(all.end(), {step.loss, step.aux_loss, step.z_loss, step.mtp_loss, step.grad_norm, dropped});
    for (const MoeLayerReport& layer : step.layers) {
      all.insert(all.end(), {static_cast<double>(layer.layer), layer.entropy, layer.aux_loss});
      all.insert(all.end(), layer.load.begin(), layer.load.end());
    }
  }
  return all;
}

void expect_same_on_each_rank(Engine& engine, const std::vector<StepReport>& steps) {
  Group& world = engine.mesh().group(Axis::world);
  Stream on_device = engine.stream(), s(DeviceKind::cpu, on_device.pool());
  std::vector<double> own = numbers_of(steps), all(own.size() * world.size());
  const auto bits_of = [](auto& x) { return Tensor{.data = x.data(), .shape = {std::ssize(x)}, .dtype = DType::i64}; };
  world.all_gather(s, bits_of(all), bits_of(own));
  for (int r = 0; r < world.size(); ++r)
    EXPECT_EQ(std::memcmp(own.data(), &all[r * own.size()], own.size() * sizeof own[0]), 0)
        << "ranks " << world.rank() << " and " << r << " report different numbers";
}

LayoutOutcome train(Engine& engine, Engine& alone, const LayoutModel& what, int64_t num_steps) {
  LayoutOutcome outcome;
  init_layout(engine, what);
  const std::map<std::string, std::vector<float>> frozen = frozen_weights(engine);
  for (int64_t step = 1; step <= num_steps; ++step) {
    if (&engine == &alone) {
      fill_step(engine, what, step);
      outcome.choice_gap = std::min(outcome.choice_gap, watched_step(engine, step, kRate));
      outcome.steps.push_back(report_of(engine));
    } else {
      outcome.steps.push_back(layout_step(engine, what, step));
    }
    if (step == 1) outcome.first = gather(engine, alone);
  }
  expect_same_on_each_rank(engine, outcome.steps);
  outcome.last = num_steps == 1 ? outcome.first : gather(engine, alone);
  EXPECT_EQ(frozen_weights(engine), frozen) << "weights that are frozen have changed";
  return outcome;
}

double relative_l2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / (norm + 1e-12));
}

void expect_same_params(const std::map<std::string, std::vector<float>>& got,
                        const std::map<std::string, std::vector<float>>& alone, double bound) {
  ASSERT_EQ(got.size(), alone.size());
  for (const auto& [name, expected] : alone) EXPECT_LT(relative_l2(got.at(name), expected), bound) << name;
}

}  // namespace

int64_t flat_index(const ParamPart& part, int64_t local) {
  if (part.shard.dim < 0) return local;
  int64_t inner = 1;
  for (int i = part.shape.rank() - 1; i > part.shard.dim; --i) inner *= part.shape[i];
  const int64_t local_run = part.shard.count * inner, run = part.shape[part.shard.dim] * inner;
  return local / local_run * run + part.shard.begin * inner + local % local_run;
}

void init_layout(Engine& engine, const LayoutModel& what) {
  Stream s = engine.stream();
  engine.model().params().init(s, engine.spec().seed);
  if (what.held_in_8_bits) engine.gather_weights(s);
  const bool has_biases = what.gpt_oss || what.latent_bias || what.clipped || what.lora;  // B of adapters
  for (const Param& p : engine.model().params().all()) {
    if (has_biases && p.spec.init == ParamInit::zeros) draw_biases(engine, p);
  }
  if (!what.skewed) return;
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.name.find("e_score_correction_bias") == std::string::npos) continue;
    std::vector<float> bias = elements(engine, p.w);
    bias[1] = bias[6] = 100;
    copy_to_device(s, p.w.data, bias.data(), p.w.num_bytes());
    synchronize(s);
  }
}

StepReport layout_step(Engine& engine, const LayoutModel& what, int64_t step) {
  fill_step(engine, what, step);
  engine.step(step, kRate);
  return report_of(engine);
}

EngineSpec layout_engine_spec(Transport& world, const LayoutModel& what, const ParallelSpec& layout,
                              const LayoutWay& way) {
  layout.check(world.size());
  EngineSpec spec = engine_spec(what, mesh_shape(layout, world.size()), layout);
  spec.world = &world;
  spec.overlap = way.overlap;
  spec.recompute = way.recompute;
  spec.offload = way.offload;
  spec.expert_rows = way.expert_rows;
  spec.device = spec.target = way.device;
  spec.graph = way.graph;
  spec.precision.compute = way.compute;
  spec.kernels = way.kernels;
  spec.fsdp = way.fsdp;
  spec.shard_gradients = way.shard_gradients;
  spec.mesh.fsdp_shard = way.fsdp_shard;
  spec.offload_weights = way.offload_weights;
  spec.optimizer->qk_clip = way.qk_clip;
  if (way.num_micro_batches > 0) spec.num_micro_batches = way.num_micro_batches;
  if (way.micro_batch > 0) {
    spec.shape.batch = way.micro_batch;
    spec.shape.max_segments = way.micro_batch * what.seq;
    spec.num_micro_batches = what.sequences / (way.micro_batch * spec.mesh.dp);
    spec.balance.aux = false;
  }
  spec.bucket_numel = 2000;  // several in each layer
  // A layout that names no dispatcher gets one that sends messages: others name direct.
  spec.dispatcher = resolved(spec).dispatcher;
  return spec;
}

LayoutOutcome train_on(Transport& world, const LayoutModel& what, const ParallelSpec& layout, int64_t num_steps,
                       const LayoutWay& way) {
  Engine engine(layout_engine_spec(world, what, layout, way));
  EngineSpec counted = engine_spec(what, {});
  counted.device = DeviceKind::null;
  Engine alone(counted);
  return train(engine, alone, what, num_steps);
}

LayoutOutcome train_alone(const LayoutModel& what, int64_t num_steps) {
  Engine engine(engine_spec(what, {}));
  return train(engine, engine, what, num_steps);
}

LayoutOutcome train_briefly(Transport& world, const LayoutModel& what, const ParallelSpec& layout, LayoutWay way) {
  const MeshShape mesh = mesh_shape(layout, world.size());
  const int64_t all = what.sequences / (kMicroBatch * mesh.dp), few = (4 + mesh.pp - 1) / mesh.pp * mesh.pp;
  if (way.num_micro_batches == 0) way.num_micro_batches = std::min(all, few);
  return train_on(world, what, layout, 2, way);
}

void expect_same_step(const StepReport& got, const StepReport& alone, double bound) {
  const auto near = [&](const char* what, double a, double b) {
    EXPECT_NEAR(a, b, bound * std::abs(b)) << what << " of step " << alone.step;
  };
  near("loss", got.loss, alone.loss);
  near("aux_loss", got.aux_loss, alone.aux_loss);
  near("z_loss", got.z_loss, alone.z_loss);
  near("mtp_loss", got.mtp_loss, alone.mtp_loss);
  near("grad_norm", got.grad_norm, alone.grad_norm);
  EXPECT_EQ(got.dropped_tokens, alone.dropped_tokens) << "step " << alone.step;
  ASSERT_EQ(got.layers.size(), alone.layers.size());
  for (size_t i = 0; i < got.layers.size(); ++i) {
    EXPECT_EQ(got.layers[i].layer, alone.layers[i].layer);
    EXPECT_EQ(got.layers[i].load, alone.layers[i].load) << "layer " << alone.layers[i].layer << ", step " << alone.step;
    near("entropy", got.layers[i].entropy, alone.layers[i].entropy);
    near("layer's aux_loss", got.layers[i].aux_loss, alone.layers[i].aux_loss);
  }
}

void expect_same(const LayoutOutcome& got, const LayoutOutcome& alone) {
  // A sum of about 10^3 f32 products in another order differs by some 2^-24 sqrt(1000) = 2e-6 of its size.
  // An update moves a weight by at most lr / eps = 10 times the change of its clipped gradient. The
  // norm is 0.5 over 10^4 elements of weights of about 0.3, so that is 1e-7 of a weight.
  // Each step adds its own change and the effect of the changed weights.
  const double first = 4e-6, each = 4e-6;
  // In measurements, a layout moved the scores of half of the tokens by at most 7e-7, of 99 in 100
  // by at most 7e-6, and of the most sensitive one by 8e-5.
  // With a nearer tie all later results would be luck. A wider gap than this is hard to find.
  EXPECT_GT(alone.choice_gap, 1e-5)
      << "on one rank a choice of experts is near a tie: take another seed_of() the model";
  ASSERT_EQ(got.steps.size(), alone.steps.size());
  for (size_t i = 0; i < got.steps.size(); ++i)
    expect_same_step(got.steps[i], alone.steps[i], first + static_cast<double>(i) * each);
  expect_same_params(got.first, alone.first, first);
  expect_same_params(got.last, alone.last, static_cast<double>(got.steps.size()) * each);
}

void expect_same_bits(const LayoutOutcome& got, const LayoutOutcome& expected) {
  EXPECT_EQ(got.first, expected.first);
  EXPECT_EQ(got.last, expected.last);
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    EXPECT_EQ(got.steps[i].loss, expected.steps[i].loss);
    EXPECT_EQ(got.steps[i].aux_loss, expected.steps[i].aux_loss);
    EXPECT_EQ(got.steps[i].grad_norm, expected.steps[i].grad_norm);
  }
}

}  // namespace moebius
