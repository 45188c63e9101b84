#include "model/stage.h"

#include <algorithm>
#include <initializer_list>

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// Runs a part of a pass while the weights of these parameters are on this rank.
template <class Body>
void with_weights_of(ParamTable& params, Stream& s, std::initializer_list<ParamSpan> spans, Body&& body) {
  for (const ParamSpan& span : spans) params.ready(s, span);
  body();
  for (const ParamSpan& span : spans) params.release(s, span);
}

MicroBatch in_backward(const MicroBatch& batch) {
  MicroBatch backward = batch;
  backward.backward = true;
  return backward;
}

}  // namespace

Stage::Stage(const StageContext& context, const StageSpec& spec)
    : spec_(spec),
      params_(context.layers.params),
      model_(context.layers.model),
      dtype_(context.layers.dtype),
      shape_(context.layers.shape),
      stream_rows_(context.layers.stream_rows()),
      use_(context.layers.params.use()),
      loss_sum_1_(context.loss_sum_1),
      mtp_loss_sum_D_(context.mtp_loss_sum_D),
      offload_(context.offload) {
  const LayerContext& c = context.layers;
  // The parameters that `declare` adds to the table.
  const auto span_of = [&](const auto& declare) {
    const size_t begin = params_.all().size();
    declare();
    return ParamSpan{.begin = begin, .end = params_.all().size()};
  };
  if (spec.embedding) of_embedding_ = span_of([&] { embedding_.emplace(c.params, c.model, dtype_, c.mesh); });
  for (int64_t i = spec.first_layer; i < spec.first_layer + spec.num_layers; ++i)
    of_block_.push_back(span_of([&] { c.params.layer([&] { blocks_.emplace_back(c, i); }); }));
  find_lowest_trained(c);
  share_block_sets();
  if (spec.norm || spec.loss) of_end_ = span_of([&] { declare_end(c); });
  for (int64_t depth = 1; depth <= spec.num_mtp; ++depth)
    of_mtp_.push_back(span_of([&] { mtp_.emplace_back(without_adapters(c), depth); }));
  if (offload_) choose_offloaded(c.plan);
}

// Blocks without backward passes save nothing, so they have no slot.
void Stage::choose_offloaded(const MemoryPlan& plan) {
  slot_of_block_.assign(blocks_.size(), -1);
  const auto n = static_cast<int64_t>(blocks_.size() - first_backward_);
  for (int64_t i = 0; i < n; ++i)
    if (plan.offload().moves(i, n)) slot_of_block_[first_backward_ + static_cast<size_t>(i)] = offload_->next_slot();
}

// Below the lowest trained parameter of the first stage no gradient is used. Experts whose rows are in pages free them
// in backward, so all of their layers have a backward pass.
void Stage::find_lowest_trained(const LayerContext& c) {
  if (!embedding_ || trains_embedding()) return;
  is_gradient_used_ = false;
  const auto is_trained = [&](const ParamSpan& span) {
    return std::any_of(params_.all().begin() + static_cast<ptrdiff_t>(span.begin),
                       params_.all().begin() + static_cast<ptrdiff_t>(span.end),
                       [](const Param& p) { return p.has_grad; });
  };
  if (c.expert_rows) return;
  first_backward_ = std::find_if(of_block_.begin(), of_block_.end(), is_trained) - of_block_.begin();
}

// A layer with backward passes has its own set. All others of a kind share one: in inference, and below the lowest
// trained parameter.
void Stage::share_block_sets() {
  std::optional<size_t> dense, moe;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    std::optional<size_t>& of_kind = blocks_[i].moe() ? moe : dense;
    const bool shares = use_ == ModelUse::inference || i < first_backward_;
    if (!shares || !of_kind) of_kind = num_block_sets_++;
    set_of_block_.push_back(*of_kind);
  }
}

void Stage::declare_end(const LayerContext& c) {
  if (spec_.norm) final_norm_.emplace(c.params, "model.norm.weight", c.model.hidden_size, dtype_, c.norm_eps());
  if (spec_.loss) head_.emplace(c.params, c.model, dtype_, c.mesh, embedding());
  if (spec_.num_mtp > 0 && shape_.num_mtp > 0 && !embedding_)
    embedding_copy_.emplace(Embedding::copy(c.params, c.model, dtype_, c.mesh, head()));
}

const Param* Stage::embedding_copy() const {
  if (embedding_copy_) return &embedding_copy_->table();
  return head_ && !embedding_ && model_.tie_word_embeddings ? &head_->table() : nullptr;
}

void Stage::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  const bool shared = use_ == ModelUse::inference;
  saved.blocks.resize(num_block_sets_);
  std::vector<bool> declared(num_block_sets_);
  saved.on_host.resize(slot_of_block_.size());
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (declared[set_of_block_[i]]) continue;
    declared[set_of_block_[i]] = true;
    const int64_t layer = spec_.first_layer + static_cast<int64_t>(i);
    plan.enter_layer(layer);
    if (is_offloaded(i)) {
      saved.on_host[i].slot = slot_of_block_[i];
      plan.offload_to(&saved.on_host[i]);
    }
    blocks_[i].declare_saved(plan, fmt::format("{}layer{}", prefix, layer), saved_of(saved, i));
    plan.offload_to(nullptr);
  }
  const Shape TD{stream_rows_, model_.hidden_size};
  if (spec_.norm) final_norm_->declare_saved(plan, prefix + "final_norm", stream_rows_, saved.final_norm);
  if ((spec_.norm || spec_.loss) && !shared) plan.declare(saved.dfinal_TD, prefix + "dfinal", TD, dtype_, Life::saved);
  if (!spec_.norm) saved.dmtp_TD.resize(num_mtp_depths());
  for (Tensor& d_TD : saved.dmtp_TD) plan.declare(d_TD, prefix + "dmtp", TD, dtype_, Life::saved);
  if (!predicts_mtp()) return;
  saved.mtp.resize(mtp_.size());
  for (size_t k = 0; k < mtp_.size(); ++k) {
    plan.enter_layer(mtp_[k].layer());
    mtp_[k].declare_saved(plan, fmt::format("{}layer{}", prefix, mtp_[k].layer()), saved.mtp[k]);
  }
}

void Stage::declare_output(MemoryPlan& plan) {
  if (!spec_.norm && !spec_.loss) return;
  plan.declare(final_TD_, "final", {stream_rows_, model_.hidden_size}, dtype_, Life::saved);
  if (spec_.loss) plan.declare(loss_T_, "loss", {shape_.tokens()}, DType::f32, Life::saved);
  mtp_TD_.resize(num_mtp_depths());
  for (Tensor& h_TD : mtp_TD_) plan.declare(h_TD, "mtp", {stream_rows_, model_.hidden_size}, dtype_, Life::saved);
}

void Stage::init_state(Stream& s) const {
  for (const Block& block : blocks_) {
    if (block.moe()) block.moe()->router().init_state(s);
  }
  for (const Mtp& mtp : mtp_) {
    if (mtp.block().moe()) mtp.block().moe()->router().init_state(s);
  }
}

// The last layer's output is not added yet. The final norm adds it, or it is added before the
// stream is sent.
void Stage::leave(Step& step, const Residual& residual, Saved& saved) const {
  const int64_t T = residual.delta_TD.dim(0);
  if (spec_.norm) {
    final_norm_->forward(step, final_TD_.rows(0, T), residual.delta_TD, residual.base_TD, saved.final_norm);
  } else if (!residual.base_TD.empty()) {
    add(step.stream, residual.delta_TD, residual.base_TD);
  }
}

// Copies the norms' outputs into the stream, from which the stage of the head reads them. In
// generation a stream may be shorter than a micro-batch.
void Stage::write_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const {
  const int64_t t = std::min(stream_TD.dim(0), stream_rows_);
  copy(step.stream, stream_TD.rows(0, t), final_TD_.rows(0, t));
  for (int64_t depth = 1; with_gradients && depth <= num_mtp_depths(); ++depth)
    copy(step.stream, hidden_TD(stream_TD, depth), output_TD(depth));
}

void Stage::read_hidden_states(Step& step, Tensor stream_TD, bool with_gradients) const {
  const int64_t t = std::min(stream_TD.dim(0), stream_rows_);
  copy(step.stream, final_TD_.rows(0, t), stream_TD.rows(0, t));
  for (int64_t depth = 1; with_gradients && depth <= num_mtp_depths(); ++depth)
    copy(step.stream, output_TD(depth), hidden_TD(stream_TD, depth));
}

void Stage::forward(Step& step, Tensor stream_TD, Saved& saved, bool with_gradients, bool backward_follows) const {
  if (spec_.loss && !spec_.norm) {
    params_.gather(step.stream, of_end_);
    return read_hidden_states(step, stream_TD, with_gradients);
  }
  {
    StackScope scope(step.stack);
    const Tensor here_TD = stream_TD.rows(0, std::min(stream_TD.dim(0), stream_rows_));
    forward_layers(step, {.delta_TD = here_TD, .buffer_TD = step.alloc(here_TD.shape, dtype_)}, saved,
                   [&](size_t i, Residual& residual) {
                     if (with_gradients && is_offloaded(i))
                       return run_offloaded(step, i, residual, saved, backward_follows);
                     blocks_[i].forward(step, residual, saved_of(saved, i));
                   });
  }
  if (!spec_.norm || spec_.loss) return;
  if (with_gradients && predicts_mtp()) forward_mtp(step, saved);
  write_hidden_states(step, stream_TD, with_gradients);
}

void Stage::run_offloaded(Step& step, size_t i, Residual& residual, Saved& saved, bool backward_follows) const {
  offload_->open(step.stream, saved.on_host[i]);
  blocks_[i].forward(step, residual, saved_of(saved, i));
  const auto later = std::count_if(slot_of_block_.begin() + static_cast<ptrdiff_t>(i) + 1, slot_of_block_.end(),
                                   [](int slot) { return slot >= 0; });
  const bool stays_on_device = backward_follows && later < SideCopies::kSlots;
  if (!stays_on_device) offload_->park(step.stream, saved.on_host[i]);
}

void Stage::fetch(Stream& s, const Saved& saved) const { fetch_below(s, blocks_.size(), saved); }

// Starts to copy the activations of the last offloaded block before `end` that has a backward pass.
void Stage::fetch_below(Stream& s, size_t end, const Saved& saved) const {
  for (size_t i = end; i-- > first_backward_;)
    if (is_offloaded(i)) return offload_->fetch(s, saved.on_host[i]);
}

void Stage::forward_cached(Step& step, Tensor stream_tD, Saved& saved, std::span<const KvCache> caches,
                           const CachedRows& rows) const {
  if (spec_.loss && !spec_.norm) return read_hidden_states(step, stream_tD, /*with_gradients=*/false);
  forward_layers(step, {.delta_TD = stream_tD}, saved, [&](size_t i, Residual& residual) {
    blocks_[i].forward_cached(step, residual, saved_of(saved, i), caches[i], rows);
  });
  if (spec_.norm && !spec_.loss) write_hidden_states(step, stream_tD, /*with_gradients=*/false);
}

template <class RunBlock>
void Stage::forward_layers(Step& step, Residual residual, Saved& saved, RunBlock run_block) const {
  with_weights_of(params_, step.stream, {of_embedding_}, [&] {
    if (embedding_) embedding_->forward(step, residual.delta_TD, step.batch.token_T);
  });
  for (size_t i = 0; i < blocks_.size(); ++i) {
    gather_block(step, i + 1);
    with_weights_of(params_, step.stream, {of_block_[i]}, [&] {
      PhaseScope phase(step.stream, "forward", spec_.first_layer + static_cast<int64_t>(i));
      run_block(i, residual);
    });
  }
  with_weights_of(params_, step.stream, {of_end_}, [&] { leave(step, residual, saved); });
}

// Starts to gather the weights of block i, if the stage has one.
void Stage::gather_block(Step& step, size_t i) const {
  if (i < of_block_.size()) params_.gather(step.stream, of_block_[i]);
}

void Stage::forward_loss(Step& step, Saved& saved, bool with_gradients) const {
  with_weights_of(params_, step.stream, {of_head()}, [&] {
    head_->loss(step, /*depth=*/0, loss_T_, with_gradients ? saved.dfinal_TD : Tensor{}, final_TD_);
    sum_into(step.stream, {.out_1 = loss_sum_1_, .x = loss_T_});
    if (with_gradients && predicts_mtp()) forward_mtp(step, saved);
    if (with_gradients) mtp_loss(step, saved);
  });
}

void Stage::forward_mtp(Step& step, Saved& saved) const {
  for (size_t k = 0; k < mtp_.size(); ++k) {
    PhaseScope phase(step.stream, "forward", mtp_[k].layer());
    with_weights_of(params_, step.stream, {of_mtp_[k], of_mtp_embedding()}, [&] {
      mtp_[k].forward(step, mtp_embedding(), mtp_TD_[k], output_TD(static_cast<int64_t>(k)), saved.mtp[k]);
    });
  }
}

Tensor Stage::dhidden_TD(const Saved& saved, int64_t depth) const {
  if (depth == 0) return saved.dfinal_TD;
  return spec_.norm ? saved.mtp[depth - 1].dh_TD : saved.dmtp_TD[depth - 1];
}

void Stage::mtp_loss(Step& step, const Saved& saved) const {
  StackScope scope(step.stack);
  const Tensor loss_T = step.alloc(loss_T_.shape, DType::f32);
  for (int64_t depth = 1; depth <= num_mtp_depths(); ++depth) {
    head_->loss(step, depth, loss_T, dhidden_TD(saved, depth), output_TD(depth));
    sum_into(step.stream, {.out_1 = mtp_loss_sum_D_.rows(depth - 1, depth), .x = loss_T});
  }
}

void Stage::backward(Step& step, Tensor dstream_TD, Saved& saved) const {
  run_backward(step, dstream_TD, saved, /*with_weights=*/true);
}

void Stage::backward_input(Step& step, Tensor dstream_TD, Saved& saved) const {
  run_backward(step, dstream_TD, saved, /*with_weights=*/false);
}

void Stage::run_backward(Step& base, Tensor dstream_TD, Saved& saved, bool with_weights) const {
  const MicroBatch batch = in_backward(base.batch);
  Step step{base.stream, base.stack, batch};
  if (spec_.norm != spec_.loss) exchange_hidden_gradients(step, dstream_TD, saved);
  if (spec_.norm || !spec_.loss) {
    backward_layers(step, dstream_TD.rows(0, stream_rows_), saved, with_weights);
  } else if (with_weights) {
    end_gradients(step);  // the head's gradient was made with the loss
  }
}

void Stage::end_gradients(Step& step) const {
  with_weights_of(params_, step.stream, {of_end_}, [&] { params_.grad_ready(step.stream, of_end_); });
}

// Copies between the stream's buffer and this stage's own tensors, if the norm and the loss are on different stages.
void Stage::exchange_hidden_gradients(Step& step, Tensor dstream_TD, const Saved& saved) const {
  for (int64_t depth = 0; depth <= num_mtp_depths(); ++depth) {
    const Tensor here_TD = dhidden_TD(saved, depth), there_TD = hidden_TD(dstream_TD, depth);
    copy(step.stream, spec_.loss ? there_TD : here_TD, spec_.loss ? here_TD : there_TD);
  }
}

void Stage::backward_mtp(Step& step, Saved& saved, bool with_weights) const {
  for (size_t k = mtp_.size(); k-- > 0;) {
    PhaseScope phase(step.stream, "backward", mtp_[k].layer());
    const Tensor dbefore_TD = k == 0 ? saved.dfinal_TD : saved.mtp[k - 1].dh_TD;
    with_weights_of(params_, step.stream, {of_mtp_[k], of_mtp_embedding()}, [&] {
      if (!with_weights) return mtp_[k].backward_input(step, mtp_embedding(), dbefore_TD, saved.mtp[k]);
      mtp_[k].backward(step, mtp_embedding(), dbefore_TD, saved.mtp[k]);
      params_.grad_ready(step.stream, of_mtp_[k]);
    });
  }
}

void Stage::backward_layers(Step& step, Tensor dstream_TD, Saved& saved, bool with_weights) const {
  fetch(step.stream, saved);
  if (predicts_mtp()) backward_mtp(step, saved, with_weights);
  if (spec_.norm) {
    fill_zero(step.stream, dstream_TD);
    with_weights_of(params_, step.stream, {of_end_}, [&] {
      final_norm_->backward(step, dstream_TD, saved.dfinal_TD, saved.final_norm);
      if (with_weights) params_.grad_ready(step.stream, of_end_);
    });
  }
  for (size_t i = blocks_.size(); i-- > first_backward_;) backward_block(step, i, dstream_TD, saved, with_weights);
  if (trains_embedding()) embedding_gradient(step, dstream_TD);
}

void Stage::backward_block(Step& step, size_t i, Tensor dstream_TD, Saved& saved, bool with_weights) const {
  PhaseScope phase(step.stream, "backward", spec_.first_layer + static_cast<int64_t>(i));
  const bool with_input = is_gradient_used_ || i > first_backward_;
  if (i > first_backward_) gather_block(step, i - 1);  // none before: the embedding backward reads no weights
  if (is_offloaded(i)) offload_->ready(step.stream, saved.on_host[i]);
  fetch_below(step.stream, i, saved);
  with_weights_of(params_, step.stream, {of_block_[i]}, [&] {
    if (!with_weights) return blocks_[i].backward_input(step, dstream_TD, saved_of(saved, i), with_input);
    params_.begin_gradient(step.stream, of_block_[i], step.batch.first_of_step);
    blocks_[i].backward(step, dstream_TD, saved_of(saved, i), with_input);
    params_.sum_gradients(step.stream, of_block_[i], step.batch.first_of_step);
    params_.grad_ready(step.stream, of_block_[i]);
  });
}

// The first backward pass adds it, so that the order of sums does not depend on when weights follow: modules of
// multi-token prediction may add to the same table.
void Stage::embedding_gradient(Step& step, Tensor dstream_TD) const {
  with_weights_of(params_, step.stream, {of_embedding_}, [&] {
    embedding_->backward_weight(step, dstream_TD, step.batch.token_T);
    params_.grad_ready(step.stream, of_embedding_);
  });
}

void Stage::backward_weight(Step& base, Saved& saved) const {
  const MicroBatch batch = in_backward(base.batch);
  Step step{base.stream, base.stack, batch};
  for (size_t k = predicts_mtp() ? mtp_.size() : 0; k-- > 0;) {
    PhaseScope phase(step.stream, "backward weight", mtp_[k].layer());
    with_weights_of(params_, step.stream, {of_mtp_[k]}, [&] {
      mtp_[k].backward_weight(step, saved.mtp[k]);
      params_.grad_ready(step.stream, of_mtp_[k]);
    });
  }
  if (spec_.norm || spec_.loss) end_gradients(step);
  for (size_t i = blocks_.size(); i-- > first_backward_;) {
    PhaseScope phase(step.stream, "backward weight", spec_.first_layer + static_cast<int64_t>(i));
    if (is_offloaded(i)) offload_->ready(step.stream, saved.on_host[i]);
    fetch_below(step.stream, i, saved);
    with_weights_of(params_, step.stream, {of_block_[i]}, [&] {
      blocks_[i].backward_weight(step, saved_of(saved, i));
      params_.grad_ready(step.stream, of_block_[i]);
    });
  }
}

void Stage::row_logits(Step& step, Tensor logits_1V, int64_t row, int64_t t) const {
  with_weights_of(params_, step.stream, {of_head()},
                  [&] { head_->row_logits(step, logits_1V, final_TD_.rows(0, t), row); });
}

void Stage::logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end, int64_t depth) const {
  const Tensor& x_TD = depth == 0 ? final_TD_ : mtp_TD_[static_cast<size_t>(depth - 1)];
  with_weights_of(params_, step.stream, {of_head()}, [&] { head_->logits(step, logits_CV, x_TD.rows(begin, end)); });
}

std::vector<KeptTensor> Stage::kept(const Saved& saved) const {
  std::vector<KeptTensor> all;
  const auto add_layer = [&](int64_t number, const std::vector<KeptTensor>& layer) {
    for (const KeptTensor& t : layer)
      if (!t.tensor.empty()) all.push_back({fmt::format("layer {} {}", number, t.name), t.tensor});
  };
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const bool was_overwritten = std::find(set_of_block_.begin() + static_cast<ptrdiff_t>(i) + 1, set_of_block_.end(),
                                           set_of_block_[i]) != set_of_block_.end();
    if (!was_overwritten) add_layer(spec_.first_layer + static_cast<int64_t>(i), blocks_[i].kept(saved_of(saved, i)));
  }
  if (spec_.norm) all.push_back({"final residual", saved.final_norm.sum_TD});
  if (spec_.norm) all.push_back({"final norm output", final_TD_});
  if (spec_.loss) all.push_back({"token loss", loss_T_});
  for (size_t k = 0; k < saved.mtp.size(); ++k) {
    add_layer(mtp_[k].layer(), mtp_[k].block().kept(saved.mtp[k].block));
    all.push_back({fmt::format("multi-token prediction's output at depth {}", k + 1), mtp_TD_[k]});
  }
  return all;
}

}  // namespace moebius
