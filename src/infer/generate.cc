#include "infer/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "comm/control.h"
#include "core/rng.h"

namespace moebius {
namespace {

void check(const Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt) {
  const int64_t context = engine.spec().cache_tokens - (engine.spec().mesh.tp - 1),
                vocab = engine.spec().model.vocab_size;
  const Sampling& s = spec.sampling;
  MOEBIUS_CHECK(usage, std::isfinite(s.temperature) && s.temperature >= 0,
                "generate: temperature must be 0 or more; got {}", s.temperature);
  MOEBIUS_CHECK(usage, s.top_p > 0 && s.top_p <= 1, "generate: top-p must be in (0, 1]; got {}", s.top_p);
  MOEBIUS_CHECK(usage, spec.max_tokens >= 0, "generate: max-tokens must be 0 or more; got {}", spec.max_tokens);
  MOEBIUS_CHECK(usage, !prompt.empty(), "generate: expected a prompt of at least one token; got none");
  const int64_t length = static_cast<int64_t>(prompt.size());
  MOEBIUS_CHECK(usage, spec.max_tokens <= context - length,
                "generate: prompt and continuation must fit the context of {} tokens; got {} + {}; shorten the prompt "
                "or lower max-tokens",
                context, length, spec.max_tokens);
  for (const int32_t id : prompt) {
    MOEBIUS_CHECK(input, id >= 0 && id < vocab,
                  "generate: expected prompt ids in [0, {}); got {}; use the model's tokenizer", vocab, id);
  }
}

// Token ids by falling probability, and exp((logit - max) / temperature) of each.
struct Ranked {
  std::vector<int32_t> ids;
  std::vector<double> mass;
};

Ranked rank_tokens(std::span<const float> logits, double temperature) {
  Ranked r;
  r.ids.resize(logits.size());
  std::iota(r.ids.begin(), r.ids.end(), 0);
  std::stable_sort(r.ids.begin(), r.ids.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const double top = logits[r.ids[0]];
  for (const int32_t id : r.ids) r.mass.push_back(std::exp((logits[id] - top) / temperature));
  return r;
}

// Rounds up to a multiple of tp, because tp ranks compute equal parts.
int64_t rounded_up(int64_t tokens, int64_t tp) { return div_ceil(tokens, tp) * tp; }

// The operations that the ranks of a world do together. On one rank they only do the work itself.
class GeneratingRanks {
 public:
  explicit GeneratingRanks(const Engine& engine) : draws_(engine.model().has_head()) {
    Transport* world = engine.spec().world;
    if (!world || world->size() == 1) return;
    const RankPlace& at = engine.mesh().place();
    draws_ = draws_ && at.tp == 0 && at.cp == 0 && at.dp == 0;
    control_.emplace(*world);
  }

  void run(const std::function<void()>& body) {
    if (control_) return control_->together(body);
    body();
  }
  // Returns the result of draw() on every rank. Only one rank draws.
  int32_t agree(const std::function<int32_t()>& draw) {
    int32_t id = 0;
    run([&] {
      if (draws_) id = draw();
    });
    return control_ ? narrow<int32_t>(control_->sum(id)) : id;
  }

 private:
  bool draws_;
  std::optional<Control> control_;
};

}  // namespace

int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position) {
  MOEBIUS_ASSERT(!logits.empty());
  MOEBIUS_CHECK(numerics, std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }),
                "generate: expected finite logits for position {}; got NaN or Inf; "
                "the model is damaged or its dtype is too narrow",
                position);
  if (sampling.temperature == 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const Ranked r = rank_tokens(logits, sampling.temperature);
  const double wanted = sampling.top_p * std::accumulate(r.mass.begin(), r.mass.end(), 0.0);
  size_t kept = 0;
  double nucleus = 0;
  while (kept < r.mass.size() && nucleus < wanted) nucleus += r.mass[kept++];
  const double draw = nucleus * Rng(sampling.seed, RngSite::sampling).uniform(static_cast<uint64_t>(position));
  double passed = 0;
  for (size_t i = 0; i + 1 < kept; ++i) {
    passed += r.mass[i];
    if (draw < passed) return r.ids[i];
  }
  return r.ids[kept - 1];
}

// The rows that pad to a multiple of tp come after the tokens. In the cache, the next
// tokens overwrite them.
EngineSpec generation_engine_spec(const ModelSpec& model, DType compute, int64_t context, int threads, int64_t chunk,
                                  const MeshShape& mesh) {
  MOEBIUS_CHECK(usage, mesh.cp == 1,
                "generate: expected parallel.cp = 1, because the tokens of a sequence come one by one; got {}; "
                "split heads (tp), experts (ep, etp) or layers (pp)",
                mesh.cp);
  const int64_t seq = rounded_up(std::min(chunk, context), mesh.tp);
  return {.model = model,
          .precision = {.compute = compute},
          .use = ModelUse::inference,
          .shape = {.batch = 1, .seq = seq, .max_segments = 1, .documents = false},
          .cache_tokens = context + mesh.tp - 1,
          .mesh = mesh,
          .threads = threads};
}

void feed_tokens(Engine& engine, std::span<const int32_t> tokens, int64_t first, std::span<float> logits) {
  MicroBatch& batch = engine.batch();
  batch.training = false;
  const int64_t chunk = engine.spec().shape.seq, n = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t count = std::min(chunk, n - begin), T = rounded_up(count, engine.spec().mesh.tp);
    int32_t* ids = batch.token_T.ptr<int32_t>();
    std::fill(std::copy_n(tokens.data() + begin, count, ids), ids + T, 0);
    std::iota(batch.pos_T.ptr<int32_t>(), batch.pos_T.ptr<int32_t>() + T, static_cast<int32_t>(first + begin));
    engine.forward_cached(first + begin, T);
    if (begin + count == n) engine.read_row_logits(logits.data(), count - 1, T);
  }
}

Generated generate(Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                   const std::function<void(int32_t)>& on_token) {
  GeneratingRanks ranks(engine);
  ranks.run([&] { check(engine, spec, prompt); });
  const int64_t vocab = engine.spec().model.vocab_size,
                num_ids = spec.num_ids > 0 ? std::min(spec.num_ids, vocab) : vocab;
  std::vector<float> logits(vocab);
  Generated out;
  if (spec.max_tokens == 0) return out;
  feed_tokens(engine, prompt, 0, logits);
  int64_t position = static_cast<int64_t>(prompt.size());
  for (;; ++position) {
    const int32_t id =
        ranks.agree([&] { return sample_token(std::span(logits).first(num_ids), spec.sampling, position); });
    out.ended = id == spec.end_id;
    if (out.ended) return out;
    out.tokens.push_back(id);
    if (on_token) on_token(id);
    if (static_cast<int64_t>(out.tokens.size()) == spec.max_tokens) return out;
    feed_tokens(engine, std::span(&id, 1), position, logits);
  }
}

}  // namespace moebius
