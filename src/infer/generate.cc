#include "infer/generate.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>

#include "comm/control.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void check_prompt(const Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                  const std::string& who) {
  const int64_t context = engine.spec().cache_tokens - (engine.spec().mesh.tp - 1),
                vocab = engine.spec().model.vocab_size;
  MOEBIUS_CHECK(usage, !prompt.empty(), "{}: expected a prompt of at least one token; got none", who);
  const int64_t length = static_cast<int64_t>(prompt.size());
  MOEBIUS_CHECK(usage, spec.max_tokens <= context - length,
                "{}: prompt and continuation must fit the context of {} tokens; got {} + {}; shorten the prompt "
                "or lower max-tokens",
                who, context, length, spec.max_tokens);
  for (const int32_t id : prompt) {
    MOEBIUS_CHECK(input, id >= 0 && id < vocab, "{}: expected prompt ids in [0, {}); got {}; use the model's tokenizer",
                  who, vocab, id);
  }
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
  // Gives every rank the ids of draw(). Only one rank draws.
  void agree(std::span<int32_t> ids, const std::function<void()>& draw) {
    std::fill(ids.begin(), ids.end(), 0);
    run([&] {
      if (draws_) draw();
    });
    if (!control_) return;
    for (int32_t& id : ids) id = narrow<int32_t>(control_->sum(id));
  }

 private:
  bool draws_;
  std::optional<Control> control_;
};

// Writes tokens and positions of a pass into the engine's batch. The rows that pad to a multiple of tp
// come after the tokens, as more of the last run. In the cache, the next tokens overwrite them.
void fill_batch(Engine& engine, std::span<const int32_t> tokens, std::span<CachedRun> runs) {
  const auto n = std::ssize(tokens), T = rounded_up(n, engine.spec().mesh.tp);
  runs.back().count += T - n;
  MicroBatch& batch = engine.batch();
  batch.training = false;
  int32_t *ids = batch.token_T.ptr<int32_t>(), *pos = batch.pos_T.ptr<int32_t>(),
          *sequence = batch.segment_T.ptr<int32_t>();
  std::fill(std::copy(tokens.begin(), tokens.end(), ids), ids + T, 0);
  for (const CachedRun& run : runs) {
    std::iota(pos, pos + run.count, static_cast<int32_t>(run.first));
    pos += run.count;
    sequence = std::fill_n(sequence, run.count, narrow<int32_t>(run.sequence));
  }
}

}  // namespace

EngineSpec generation_engine_spec(const ModelSpec& model, DType compute, int64_t context, int threads, int64_t chunk,
                                  const MeshShape& mesh, int64_t sequences) {
  MOEBIUS_CHECK(usage, mesh.cp == 1,
                "generate: expected parallel.cp = 1, because the tokens of a sequence come one by one; got {}; "
                "split heads (tp), experts (ep, etp) or layers (pp)",
                mesh.cp);
  MOEBIUS_CHECK(usage, sequences >= 1 && sequences <= kMaxSequences,
                "generate: expected 1 to {} sequences at once; got {}", kMaxSequences, sequences);
  const int64_t seq = rounded_up(std::max(std::min(chunk, context), sequences), mesh.tp);
  return {.model = model,
          .precision = {.compute = compute},
          .use = ModelUse::inference,
          .shape = {.batch = 1, .seq = seq, .max_segments = 1, .documents = false},
          .cache_tokens = std::max(context + mesh.tp - 1, seq),
          .cache_sequences = sequences,
          .mesh = mesh,
          .threads = threads};
}

void feed_tokens(Engine& engine, std::span<const int32_t> tokens, int64_t first, std::span<float> logits,
                 int64_t sequence) {
  const int64_t chunk = engine.spec().shape.seq, n = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t count = std::min(chunk, n - begin);
    CachedRun run{sequence, first + begin, count};
    fill_batch(engine, tokens.subspan(begin, count), std::span(&run, 1));
    engine.forward_cached(std::span(&run, 1));
    if (begin + count == n) engine.read_row_logits(logits.data(), count - 1, 1, run.count);
  }
}

// One call of Generator::run.
class Generator::Run {
 public:
  Run(Generator& of, const GenerateSpec& spec, std::span<const std::vector<int32_t>> prompts, const OnToken& on_token,
      const OnEnd& on_end)
      : of_(of),
        engine_(of.engine_),
        spec_(spec),
        prompts_(prompts),
        on_token_(on_token),
        on_end_(on_end),
        ranks_(engine_),
        vocab_(engine_.spec().model.vocab_size),
        memory_(engine_.spec().device, engine_.spec().cache_sequences * vocab_ * int64_t{sizeof(float)}),
        logits_(static_cast<float*>(memory_.data()), static_cast<size_t>(engine_.spec().cache_sequences * vocab_)),
        results_(prompts.size()) {}

  std::vector<Generated> run() {
    ranks_.run([&] { check(); });
    if (spec_.max_tokens == 0) return results_;
    for (int64_t s = engine_.spec().cache_sequences; s-- > 0;) free_.push_back(s);
    size_t next = 0;
    while (next < prompts_.size() || !growing_.empty()) {
      while (next < prompts_.size() && !free_.empty()) begin(next++);
      if (growing_.empty()) continue;
      engine_.draws_on_device() && is_plain(spec_.sampling) ? grow_ahead() : grow();
    }
    return std::move(results_);
  }

 private:
  // A sequence whose last token is not fed yet.
  struct Growing {
    size_t prompt;
    int64_t sequence;
    int32_t last;
  };

  void check() const {
    check_sampling(spec_.sampling);
    MOEBIUS_CHECK(usage, spec_.max_tokens >= 0, "generate: max-tokens must be 0 or more; got {}", spec_.max_tokens);
    for (size_t i = 0; i < prompts_.size(); ++i)
      check_prompt(engine_, spec_, prompts_[i],
                   prompts_.size() == 1 ? "generate" : fmt::format("generate: prompt {}", i + 1));
  }

  std::vector<int32_t>& cached(const Growing& g) { return of_.cached_[static_cast<size_t>(g.sequence)]; }

  // Feeds a prompt, and draws its first token.
  void begin(size_t prompt) {
    const auto start = Clock::now();
    Growing g{prompt, free_.back(), 0};
    free_.pop_back();
    const std::vector<int32_t>& tokens = prompts_[prompt];
    int64_t known = 0;
    if (spec_.reuse_cache)
      known =
          std::mismatch(tokens.begin(), tokens.end() - 1, cached(g).begin(), cached(g).end()).first - tokens.begin();
    cached(g).resize(known);
    feed_tokens(engine_, std::span(tokens).subspan(known), known, logits_, g.sequence);
    cached(g) = tokens;
    of_.times_.prompt_tokens += std::ssize(tokens) - known;
    draw(std::span(&g, 1));
    of_.times_.prompt_s += seconds_since(start);
    if (is_growing(g)) growing_.push_back(g);
  }

  // Writes the last token of every sequence into the engine's batch.
  std::vector<CachedRun> feed_last() {
    std::vector<int32_t> tokens;
    std::vector<CachedRun> runs;
    for (const Growing& g : growing_) {
      tokens.push_back(g.last);
      runs.push_back({g.sequence, std::ssize(cached(g)), 1});
    }
    fill_batch(engine_, tokens, runs);
    return runs;
  }

  // Adds a token to every sequence.
  void grow() {
    const auto start = Clock::now();
    const std::vector<CachedRun> runs = feed_last();
    for (const Growing& g : growing_) cached(g).push_back(g.last);
    engine_.forward_cached(runs);
    engine_.read_row_logits(logits_.data(), 0, std::ssize(growing_),
                            rounded_up(std::ssize(growing_), engine_.spec().mesh.tp));
    draw(growing_);
    of_.times_.tokens += std::ssize(growing_);
    std::erase_if(growing_, [&](const Growing& g) { return !is_growing(g); });
    of_.times_.tokens_s += seconds_since(start);
  }

  // Adds tokens to every sequence until one of them ends. The GPU draws them, and computes a pass while the host reads
  // the ids that the pass before it drew. So if an end token is drawn, the GPU has begun a pass that is not used.
  void grow_ahead() {
    const auto start = Clock::now();
    const int64_t N = std::ssize(growing_);
    std::vector<CachedRun> runs = feed_last();
    std::vector<bool> has_ended(growing_.size());
    int64_t launched = 0, num_read = 0;
    const auto launch = [&] {
      if (launched > 0)
        for (CachedRun& run : runs) ++run.first;
      engine_.draw_cached(runs, launched++, rule());
    };
    launch();
    try {
      for (; num_read < launched; ++num_read) {
        const bool none_ended = std::find(has_ended.begin(), has_ended.end(), true) == has_ended.end();
        if (none_ended && all_need(launched - num_read + 1)) launch();
        engine_.draws().wait(num_read);
        for (int64_t i = 0; i < N; ++i) {
          Growing& g = growing_[i];
          if (has_ended[i]) continue;
          const int64_t pos = std::ssize(cached(g));
          cached(g).push_back(g.last);
          g.last = engine_.draws().id(i, N, pos);
          if (g.last < 0) fail_not_finite(pos + 1);
          ++of_.times_.tokens;
          has_ended[i] = !is_growing(g);
        }
      }
    } catch (...) {
      engine_.draws().wait(launched - 1);  // a pass in flight writes to memory that the exception may free
      throw;
    }
    std::vector<Growing> rest;
    for (int64_t i = 0; i < N; ++i)
      if (!has_ended[i]) rest.push_back(growing_[i]);
    growing_ = std::move(rest);
    of_.times_.tokens_s += seconds_since(start);
  }

  // Returns whether every text may have `count` more tokens.
  bool all_need(int64_t count) const {
    return std::all_of(growing_.begin(), growing_.end(), [&](const Growing& g) {
      return std::ssize(results_[g.prompt].tokens) + count <= spec_.max_tokens;
    });
  }

  int64_t num_ids() const { return spec_.num_ids > 0 ? std::min(spec_.num_ids, vocab_) : vocab_; }
  DrawRule rule() const { return draw_rule(spec_.sampling.temperature, num_ids(), spec_.sampling.seed); }

  // Draws the next token of each, from the rows of the logits.
  void draw(std::span<Growing> sequences) {
    std::vector<int32_t> ids(sequences.size());
    ranks_.agree(ids, [&] {
      Stream s = engine_.stream();
      s.pool().run(std::ssize(ids), [&](int64_t i, int) {
        const std::vector<int32_t>& text = cached(sequences[i]);
        ids[i] = sample_token(logits_.subspan(i * vocab_, num_ids()), spec_.sampling, std::ssize(text), text);
      });
    });
    for (size_t i = 0; i < ids.size(); ++i) sequences[i].last = ids[i];
  }

  // Gives the last token to the caller. Returns false, and frees the sequence, where the text ends.
  bool is_growing(const Growing& g) {
    Generated& result = results_[g.prompt];
    result.ended = std::find(spec_.end_ids.begin(), spec_.end_ids.end(), g.last) != spec_.end_ids.end();
    if (!result.ended) {
      result.tokens.push_back(g.last);
      result.ended = on_token_ && !on_token_(g.prompt, g.last);
    }
    if (!result.ended && std::ssize(result.tokens) < spec_.max_tokens) return true;
    free_.push_back(g.sequence);
    if (on_end_) on_end_(g.prompt, result);
    return false;
  }

  Generator& of_;
  Engine& engine_;
  const GenerateSpec& spec_;
  std::span<const std::vector<int32_t>> prompts_;
  const OnToken& on_token_;
  const OnEnd& on_end_;
  GeneratingRanks ranks_;
  int64_t vocab_;
  HostBuffer memory_;        // of the logits; a GPU copies into it at full speed
  std::span<float> logits_;  // [sequences, V]
  std::vector<Generated> results_;
  std::vector<int64_t> free_;  // sequences of the cache
  std::vector<Growing> growing_;
};

Generator::Generator(Engine& engine) : engine_(engine), cached_(engine.spec().cache_sequences) {}

std::vector<Generated> Generator::run(const GenerateSpec& spec, std::span<const std::vector<int32_t>> prompts,
                                      const OnToken& on_token, const OnEnd& on_end) {
  times_ = {};
  return Run(*this, spec, prompts, on_token, on_end).run();
}

Generated generate(Engine& engine, const GenerateSpec& spec, std::span<const int32_t> prompt,
                   const std::function<void(int32_t)>& on_token) {
  const std::vector<std::vector<int32_t>> prompts{{prompt.begin(), prompt.end()}};
  return Generator(engine).run(spec, prompts, [&](size_t, int32_t id) {
    if (on_token) on_token(id);
    return true;
  })[0];
}

}  // namespace moebius
