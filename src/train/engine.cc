#include "train/engine.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace moebius {

EngineSpec training_engine_spec(const RunSpec& run) {
  const int64_t B = run.train.micro_batch, S = run.train.seq_len;
  return {.model = run.model,
          .balance = run.moe,
          .precision = run.precision,
          .use = ModelUse::training,
          .shape = {.batch = B, .seq = S, .max_segments = run.data.separate_documents ? B * S : B},
          .optimizer = run.optimizer,
          .device = run.device,
          .threads = run.threads > 0 ? narrow<int>(run.threads) : num_available_cpus(),
          .seed = run.seed};
}

namespace {

// The system promises memory that it does not have, and ends the process when it is used: so the plan is compared
// first.
void check_memory(const MemoryPlan& plan, int64_t stack_bytes) {
  const int64_t needed = plan.total_bytes() + stack_bytes, available = available_memory_bytes();
  MOEBIUS_CHECK(usage, needed <= available,
                "out of memory: {} are needed, {} of them for the step stack, and {} are available; use a smaller "
                "train.micro_batch, train.seq_len or model (--batch, --seq-len), or a larger machine\n{}",
                bytes_text(needed), bytes_text(stack_bytes), bytes_text(available), plan.table());
}

}  // namespace

Engine::Engine(const EngineSpec& spec) : spec_(spec), pool_(spec.threads), mesh_(spec.mesh) {
  if (spec_.max_positions == 0) spec_.max_positions = std::max(spec_.shape.seq, spec_.cache_tokens);
  declare_micro_batch(plan_, spec_.shape, batch_);
  model_ = std::make_unique<Model>(spec_.model, spec_.balance, spec_.precision, mesh_, plan_, spec_.use, spec_.shape,
                                   spec_.max_positions, spec_.seed);
  if (spec_.optimizer) optimizer_ = std::make_unique<Optimizer>(*spec_.optimizer, model_->params(), mesh_, plan_);
  if (spec_.cache_tokens > 0) model_->declare_caches(plan_, caches_, spec_.cache_tokens);
  const int64_t stack_bytes = measure_stack();
  if (spec_.device == DeviceKind::cpu) check_memory(plan_, stack_bytes);
  plan_.bind(spec_.device, stack_bytes);
  Stream s = stream();
  model_->init_state(s);
}

// Everything a step can do, on tensors that have no memory yet.
int64_t Engine::measure_stack() {
  Stream null_stream(DeviceKind::null, pool_);
  StepStack null_stack(DeviceKind::null, nullptr, 0);
  MicroBatch batch = batch_;
  batch.training = spec_.use == ModelUse::training;
  Step step{null_stream, null_stack, batch};
  run_step(step);
  if (spec_.cache_tokens > 0)
    model_->forward_cached(step, caches_, spec_.cache_tokens - spec_.shape.tokens(), spec_.shape.tokens());
  return null_stack.high_water();
}

void Engine::run_step(Step& step) {
  if (spec_.cache_tokens > 0) return;
  model_->forward_hidden(step, spec_.shape.tokens());
  model_->forward_loss(step, spec_.use != ModelUse::inference);
  if (spec_.use != ModelUse::inference) model_->backward(step);
  if (optimizer_) optimizer_->step(step.stream, step.stack, 1, 0.0);
}

void Engine::forward_backward() {
  run([&](Step& step) {
    model_->forward_hidden(step, spec_.shape.tokens());
    model_->forward_loss(step, true);
    model_->backward(step);
  });
}

void Engine::optimizer_step(int64_t train_step, double lr) {
  Stream s = stream();
  for (const auto& layer : model_->moe_layers()) layer.moe->router().reduce_metrics(s);
  mesh_.group(Axis::dp_cp).all_reduce_sum(s, model_->loss_sum());
  optimizer_->step(s, plan_.stack(), train_step, lr);
}

void Engine::end_of_step() {
  Stream s = stream();
  for (const auto& layer : model_->moe_layers()) layer.moe->router().end_of_step(s);
  fill_zero(s, model_->loss_sum());
  model_->params().zero_grads(s);
}

}  // namespace moebius
