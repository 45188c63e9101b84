// The methods of an engine that generate text (engine.h).
#include <algorithm>

#include "engine/engine.h"

namespace moebius {

void Engine::declare_generation() {
  model_->declare_caches(plan_, caches_, spec_.cache_sequences * spec_.cache_tokens);
  if (spec_.target == DeviceKind::cuda) draws_.declare(plan_);
}

void Engine::run_cached(Step& step, std::span<const CachedRun> runs) {
  int64_t num_tokens = 0;
  for (const CachedRun& run : runs) num_tokens += run.count;
  pipeline_->run_cached(step.stream, step.stack, step.batch,
                        {.caches = caches_, .rows = {runs, spec_.cache_tokens}, .num_tokens = num_tokens});
}

// The first chunk of a prompt, one in the middle, and a single token may be computed in different
// ways, and so may one token of every sequence.
void Engine::dry_run_cached(Step& step) {
  const int64_t T = spec_.shape.tokens(), one = spec_.mesh.tp, S = spec_.cache_sequences, U = spec_.cache_tokens;
  for (const CachedRun& run : {CachedRun{0, 0, T}, CachedRun{0, U - T, T}, CachedRun{0, U - one, one}})
    run_cached(step, std::span(&run, 1));
  std::vector<CachedRun> every;
  for (int64_t s = 0; s < S; ++s) every.push_back({s, U - one, 1});
  every.back().count += div_ceil(S, one) * one - S;
  run_cached(step, every);
  StackScope scope(step.stack);
  if (model_->has_head()) model_->row_logits(step, step.alloc({1, spec_.model.vocab_size}, DType::f32), 0, one);
}

void Engine::forward_cached(std::span<const CachedRun> runs) {
  const bool captures = CachedRows{runs}.are_single() && captures_tokens();
  Stream s = stream();
  batches_->upload(s, 0, 1);
  synchronize(s);  // from here on the caller may fill the next batch
  const auto body = [&](Stream& on) {
    Step step{on, plan_.stack(), batches_->on_device(0)};
    run_cached(step, runs);
  };
  with_memory_advice([&] {
    if (!captures) return body(s);
    graphs_.run(StepPart::single_tokens(std::ssize(runs)), s, body);
  });
}

bool Engine::captures_tokens() const { return !links_ && !spec_.model.is_latent(); }

bool Engine::draws_on_device() const { return gpu_ && !links_ && spec_.cache_tokens > 0 && model_->has_head(); }

// The op that draws leaves tokens and positions where the next pass reads them.
void Engine::draw_cached(std::span<const CachedRun> runs, int64_t pass, const DrawRule& rule) {
  MOEBIUS_ASSERT(draws_on_device() && CachedRows{runs}.are_single());
  const int64_t N = std::ssize(runs);
  Stream s = stream();
  if (pass == 0) {
    batches_->upload(s, 0, 1);
    draws_.set_rule(s, rule);
    synchronize(s);  // from here on the caller may fill the next batch
  }
  const auto body = [&](Stream& on) {
    Step step{on, plan_.stack(), batches_->on_device(0)};
    run_cached(step, runs);
    StackScope scope(plan_.stack());
    const Tensor logits_NV = step.alloc({N, spec_.model.vocab_size}, DType::f32);
    model_->logits(step, logits_NV, 0, N);
    draw_tokens(on, draws_.op(logits_NV, step.batch.token_T.rows(0, N), step.batch.pos_T.rows(0, N)));
  };
  with_memory_advice([&] { captures_tokens() ? graphs_.run(StepPart::drawn_tokens(N), s, body) : body(s); });
  draws_.launched(*gpu_, pass);
}

void Engine::read_logits(float* logits, int64_t begin, int64_t end, int64_t depth) {
  Stream s = stream();
  const int64_t V = spec_.model.vocab_size;
  for (int64_t first = begin; first < end; first += kLogitRows) {
    StackScope scope(plan_.stack());
    const int64_t last = std::min(end, first + kLogitRows);
    float* const to = logits + (first - begin) * V;
    const bool is_on_host = s.device() == DeviceKind::cpu;  // then the op writes them where the caller reads them
    const Tensor chunk_CV =
        is_on_host ? tensor_of(to, {last - first, V}) : plan_.stack().alloc({last - first, V}, DType::f32);
    Step step{s, plan_.stack(), batches_->on_device(0)};
    with_memory_advice([&] { model_->logits(step, chunk_CV, first, last, depth); });
    if (!is_on_host) copy_to_host(s, to, chunk_CV.data, chunk_CV.num_bytes());
  }
}

void Engine::read_row_logits(float* logits, int64_t first, int64_t num_rows, int64_t num_tokens) {
  if (!model_->has_head()) return;
  if (spec_.mesh.tp == 1) return read_logits(logits, first, first + num_rows);
  Stream s = stream();
  StackScope scope(plan_.stack());
  const Tensor logits_1V = plan_.stack().alloc({1, spec_.model.vocab_size}, DType::f32);
  Step step{s, plan_.stack(), batches_->on_device(0)};
  for (int64_t i = 0; i < num_rows; ++i) {
    with_memory_advice([&] { model_->row_logits(step, logits_1V, first + i, num_tokens); });
    copy_to_host(s, logits + i * spec_.model.vocab_size, logits_1V.data, logits_1V.num_bytes());
  }
}

}  // namespace moebius
