#include "model/model.h"

#include <algorithm>

#include "model/attention/max_logits.h"
#include "model/attention/rope_frequencies.h"
#include "model/attention/token_runs.h"
#include "model/moe/chunked_experts.h"
#include "model/moe/direct_window.h"
#include "model/moe/expert_rows.h"
#include "model/quantize_stats.h"
#include "ops/rope/rope.h"

namespace moebius {

std::vector<HeldStage> whole_model(const ModelSpec& model) { return {{.spec = whole_stage(model)}}; }

namespace {

// Returns the tokens of a micro-batch that the experts take at a time.
int64_t tokens_of_experts(const ModelContext& c) {
  const MeshShape& mesh = c.mesh.shape();
  const int64_t T = rows_between_projections(c.shape, mesh);
  return c.expert_chunk > 0 ? std::min(c.expert_chunk, T) : expert_chunk(T, c.lora, mesh.etp * mesh.ep);
}

std::unique_ptr<DirectWindow> window_of(const ModelContext& c) {
  const DirectSizes sizes{.max_tokens = tokens_of_experts(c),
                          .num_experts = c.model.num_experts,
                          .top_k = c.model.top_k,
                          .width = c.model.hidden_size,
                          .dtype = c.precision.compute,
                          .training = c.use != ModelUse::inference};
  return make_direct_window(c.plan, c.mesh, sizes, c.dispatcher, c.model.num_moe_layers());
}

std::unique_ptr<ActivationOffload> offload_of(const ModelContext& c) {
  const bool is_on = c.use == ModelUse::training && c.plan.offload().any();
  return is_on ? std::make_unique<ActivationOffload>() : nullptr;
}

std::unique_ptr<ExpertRows> expert_rows_of(const ModelContext& c, const std::vector<HeldStage>& stages) {
  if (c.use != ModelUse::training) return nullptr;
  int64_t passes = 0, layers = 0;
  for (const HeldStage& held : stages) {
    layers += moe_layers_of(c.model, held.spec, c.shape.num_mtp);
    passes += held.num_saved * moe_layers_that_keep(c.model, held.spec, c.shape.num_mtp, c.plan.recompute_of_all());
  }
  if (c.moe_passes_in_flight > 0) passes = std::min(passes, c.moe_passes_in_flight);
  return make_expert_rows(c.model, c.mesh,
                          {.budget = c.expert_rows,
                           .max_tokens = rows_between_projections(c.shape, c.mesh.shape()),
                           .chunk = tokens_of_experts(c),
                           .dispatcher = c.dispatcher,
                           .rows_factor = c.balance.rank_rows_factor,
                           .dtype = c.precision.compute,
                           .passes_in_flight = passes,
                           .has_layers = layers > 0});
}

}  // namespace

Model::Model(const ModelContext& c)
    : spec_(c.model),
      balance_(c.balance),
      freeze_(c.freeze),
      lora_(c.lora),
      dtype_(c.precision.compute),
      tp_(c.mesh.shape().tp),
      stream_rows_(rows_between_projections(c.shape, c.mesh.shape())),
      num_mtp_(c.shape.num_mtp),
      params_(c.plan, c.use, with_idle_modules(c.freeze, c.model, c.shape.num_mtp)),
      held_(c.stages.empty() ? whole_model(c.model) : c.stages),
      window_(window_of(c)),
      expert_rows_(expert_rows_of(c, held_)),
      quantize_stats_(c.measures_precision ? std::make_unique<QuantizeStats>(c.plan) : nullptr),
      max_logits_(c.use == ModelUse::training && c.optimizer.qk_clip > 0 ? std::make_unique<MaxLogits>(c.plan)
                                                                         : nullptr),
      offload_(offload_of(c)) {
  if (expert_rows_) check_offload_of_rows(c.plan.offload());
  params_.set_formats(c.optimizer);
  MOEBIUS_ASSERT(num_mtp_ == 0 || num_mtp_ == c.model.num_mtp_layers);
  for (const HeldStage& held : held_) {
    // With two separate backward passes, other layers would overwrite the shared dw between them.
    MOEBIUS_ASSERT(c.optimizer.grad == GradFormat::f32 || !held.splits_backward);
    const size_t begin = params_.all().size();
    const LayerContext layers{.params = params_,
                              .plan = c.plan,
                              .model = spec_,
                              .balance = c.balance,
                              .mesh = c.mesh,
                              .rope_table_Pd = rope_table_Pd_,
                              .precision = c.precision,
                              .dtype = dtype_,
                              .shape = c.shape,
                              .seed = c.seed,
                              .dispatcher = c.dispatcher,
                              .expert_overlap = c.expert_overlap,
                              .kernels = c.kernels,
                              .fusion = c.fusion,
                              .window = window_.get(),
                              .expert_rows = expert_rows_.get(),
                              .expert_chunk = c.expert_chunk,
                              .quantize_stats = quantize_stats_.get(),
                              .lora = lora_,
                              .max_logits = max_logits_.get(),
                              .router_sums = &router_sums_,
                              .sharded_over = c.shards_weights ? c.mesh.shape() : MeshShape{}};
    stages_.emplace_back(
        StageContext{
            .layers = layers, .loss_sum_1 = loss_sum_1_, .mtp_loss_sum_D = mtp_loss_sum_D_, .offload = offload_.get()},
        held.spec);
    spans_.push_back({.begin = begin, .end = params_.all().size()});
    saved_.emplace_back(held.num_saved);
  }
  if (max_logits_) max_logits_->join();
  router_sums_.declare(c.plan);
  c.plan.declare(rope_table_Pd_, "rope_table", {c.max_positions, c.model.rope_dim()}, DType::f32, Life::state);
  if (expert_rows_) expert_rows_->declare(c.plan);
  for (size_t v = 0; v < stages_.size(); ++v) {
    c.plan.split_backward(held_[v].splits_backward);
    for (size_t set = 0; set < saved_[v].size(); ++set)
      stages_[v].declare_saved(c.plan, saved_[v].size() == 1 ? "" : fmt::format("set{}.", set), saved_[v][set]);
    stages_[v].declare_output(c.plan);
  }
  c.plan.declare(loss_sum_1_, "loss_sum", {1}, DType::f64, Life::metrics);
  if (num_mtp_ > 0) c.plan.declare(mtp_loss_sum_D_, "mtp_loss_sum", {num_mtp_}, DType::f64, Life::metrics);
}

Model::~Model() = default;

ModelCatalog Model::catalog(const LoraSpec& lora) const {
  return ModelCatalog({.model = spec_,
                       .use = params_.use(),
                       .balance = balance_,
                       .freeze = freeze_,
                       .holds_mtp = holds_mtp_modules(params_.use(), num_mtp_),
                       .num_mtp = num_mtp_,
                       .lora = lora});
}

void Model::init_state(Stream& s) const {
  const RopeFrequencies rope = rope_frequencies(spec_);
  rope_table(s, {.cos_sin_Pd = rope_table_Pd_,
                 .theta = spec_.rope_theta,
                 .frequencies = rope.values,
                 .magnitude = rope.magnitude});
  for (const Stage& stage : stages_) stage.init_state(s);
  if (expert_rows_) expert_rows_->init_state(s);
}

void Model::forward(Step& step, const StagePass& at, Tensor stream_TD, bool with_gradients) {
  stages_[at.virtual_stage].forward(step, stream_TD, saved_[at.virtual_stage][at.saved_set], with_gradients,
                                    at.backward_follows);
}

void Model::forward_loss(Step& step, const StagePass& at, bool with_gradients) {
  const Stage& stage = stages_[at.virtual_stage];
  if (stage.spec().loss) stage.forward_loss(step, saved_[at.virtual_stage][at.saved_set], with_gradients);
}

void Model::backward(Step& step, const StagePass& at, Tensor dstream_TD) {
  stages_[at.virtual_stage].backward(step, dstream_TD, saved_[at.virtual_stage][at.saved_set]);
}

void Model::backward_input(Step& step, const StagePass& at, Tensor dstream_TD) {
  MOEBIUS_ASSERT(held_[at.virtual_stage].splits_backward);
  stages_[at.virtual_stage].backward_input(step, dstream_TD, saved_[at.virtual_stage][at.saved_set]);
}

void Model::backward_weight(Step& step, const StagePass& at) {
  MOEBIUS_ASSERT(held_[at.virtual_stage].splits_backward);
  stages_[at.virtual_stage].backward_weight(step, saved_[at.virtual_stage][at.saved_set]);
}

void Model::begin_passes() {
  if (offload_) offload_->begin();
}

void Model::end_passes(Stream& s) {
  if (offload_) offload_->end(s);
}

void Model::fetch(Stream& s, const StagePass& at) const {
  if (offload_) stages_[at.virtual_stage].fetch(s, saved_[at.virtual_stage][at.saved_set]);
}

void Model::prepare_offload(const Stream& s) {
  if (offload_) offload_->prepare(s);
}

void Model::logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end, int64_t depth) const {
  stages_.back().logits(step, logits_CV, begin, end, depth);
}

void Model::declare_caches(MemoryPlan& plan, std::vector<KvCache>& caches, int64_t num_tokens) const {
  for (const Stage& stage : stages_) caches.resize(caches.size() + stage.blocks().size());
  auto cache = caches.begin();
  for (const Stage& stage : stages_) {
    for (size_t i = 0; i < stage.blocks().size(); ++i) {
      const std::string prefix = fmt::format("layer{}", stage.spec().first_layer + static_cast<int64_t>(i));
      stage.blocks()[i].declare_cache(plan, prefix, num_tokens, *cache++);
    }
  }
}

void Model::forward_cached(Step& step, const StagePass& at, Tensor stream_tD, std::span<const KvCache> caches,
                           const CachedRows& rows) {
  size_t before = 0;
  for (int64_t v = 0; v < at.virtual_stage; ++v) before += stages_[v].blocks().size();
  const Stage& stage = stages_[at.virtual_stage];
  stage.forward_cached(step, stream_tD, saved_[at.virtual_stage][0], caches.subspan(before, stage.blocks().size()),
                       rows);
}

void Model::row_logits(Step& step, Tensor logits_1V, int64_t row, int64_t T) const {
  stages_.back().row_logits(step, logits_1V, row, T / tp_);
}

const Param* Model::tied_elsewhere() const {
  if (const Param* copy = stages_.back().embedding_copy()) return copy;
  const bool has_copy = !stages_.back().spec().loss && (spec_.tie_word_embeddings || num_mtp_ > 0);
  return has_copy ? stages_.front().embedding() : nullptr;
}

std::vector<Model::MoeLayer> Model::moe_layers() const {
  std::vector<MoeLayer> layers;
  for (size_t v = 0; v < stages_.size(); ++v) {
    const Stage& stage = stages_[v];
    const auto add = [&](int64_t layer, const Block& block, const Block::Saved& saved) {
      if (block.moe()) layers.push_back({layer, block.moe(), block.moe_saved(saved)});
    };
    for (size_t i = 0; i < stage.blocks().size(); ++i)
      add(stage.spec().first_layer + static_cast<int64_t>(i), stage.blocks()[i], stage.saved_of(saved_[v][0], i));
    for (size_t k = 0; k < saved_[v][0].mtp.size(); ++k)
      add(stage.mtp()[k].layer(), stage.mtp()[k].block(), saved_[v][0].mtp[k].block);
  }
  return layers;
}

std::vector<KeptTensor> Model::kept_tensors(size_t virtual_stage) const {
  return stages_[virtual_stage].kept(saved_[virtual_stage][0]);
}

}  // namespace moebius
