#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/command.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "data/data_build.h"
#include "infer/generate.h"
#include "tokenizer/tokenizer.h"
#include "train/rank_report.h"
#include "weights/load.h"

namespace moebius {
namespace {

struct Options {
  std::string model, prompt, tokenizer, device = "cpu", dtype = "bf16";
  GenerateSpec spec;
  LayoutOptions layout;
  int threads = 0;
  bool json = false;
};

// The tokenizer that belongs to the model: that of its run, else the one in its folder.
std::string own_tokenizer(const Options& o) {
  const auto trained = read_run_spec(o.model);
  return trained ? trained->data.tokenizer : o.model;
}

std::unique_ptr<Tokenizer> model_tokenizer(const Options& o) {
  if (!o.tokenizer.empty()) return open_tokenizer(o.tokenizer);
  const std::string own = own_tokenizer(o);
  MOEBIUS_CHECK(input, own != o.model || !tokenizer_hash(own).empty(),
                "generate: expected a tokenizer.json in the model's folder; {} has none; give --tokenizer DIR, or "
                "--tokenizer bytes for a model of bytes",
                own);
  return open_tokenizer(own);
}

// A warning if ids mean something else to the model; empty if the model's own tokenizer
// is not known.
std::string other_tokenizer_notice(const Options& o) {
  if (o.tokenizer.empty()) return "";
  const std::string own = own_tokenizer(o), hash = tokenizer_hash(own);
  if (hash.empty() || hash == tokenizer_hash(o.tokenizer)) return "";
  return fmt::format("--tokenizer {} is not the tokenizer of the model, {}: the text may be garbage", o.tokenizer, own);
}

void show(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

struct Request {
  std::unique_ptr<Tokenizer> tokenizer;
  GenerateSpec spec;
  std::vector<int32_t> prompt;
};

Request request_of(const Options& o) {
  Request r{.tokenizer = model_tokenizer(o), .spec = o.spec};
  r.spec.end_id = r.tokenizer->eod_id();
  r.spec.num_ids = r.tokenizer->vocab_size();
  r.tokenizer->encode(o.prompt, &r.prompt);
  if (r.prompt.empty()) r.prompt.push_back(r.tokenizer->eod_id());  // a document begins where another ends
  return r;
}

// The layout must split the model: copies of it would do the work of one rank many times. So dp is
// no larger than experts need that are spread over more ranks than tp has.
ParallelSpec layout_of(const Options& o, const ModelSpec& model, int num_ranks) {
  RunSpec run;
  run.model = model;
  ParallelSpec layout = parallel_of("generate", o.layout.overrides, run);
  layout.check(num_ranks);
  if (layout.cp > 1) return layout;  // generation_engine_spec refuses it with a reason
  MOEBIUS_CHECK(
      usage, num_ranks == 1 || layout.tp * layout.pp * layout.ep * layout.etp > 1,
      "generate: expected a layout that splits the model over {} ranks; got none, so that each rank would compute the "
      "same; use --set parallel.tp={}, or start one rank",
      num_ranks, num_ranks);
  const int64_t experts = layout.ep * layout.etp;
  const int64_t needed = layout.tp * layout.pp * (experts / std::gcd(layout.tp, experts));
  MOEBIUS_CHECK(usage, num_ranks == needed,
                "generate: expected {} ranks, parallel.tp * pp = {} * {} times those that ep * etp = {} * {} needs "
                "beside tp; got {}, of which the others would repeat the work; start {}, or split the model further",
                needed, layout.tp, layout.pp, layout.ep, layout.etp, num_ranks, needed);
  return layout;
}

EngineSpec engine_spec(const Options& o, const Request& request, int num_ranks) {
  const ModelSpec model = read_model_spec(o.model);
  const ParallelSpec layout = layout_of(o, model, num_ranks);
  const int64_t wanted = std::ssize(request.prompt) + std::max<int64_t>(request.spec.max_tokens, 1);
  const int64_t context = std::min(model.max_position_embeddings, wanted);  // caches no longer than the text can get
  EngineSpec spec = generation_engine_spec(model, compute_dtype(o.dtype), context, num_threads(o.threads),
                                           /*chunk=*/256, mesh_shape(layout, num_ranks));
  spec.pipeline = {.num_virtual = layout.vpp, .layout = layout.layout};
  spec.num_micro_batches = layout.vpp > 1 ? layout.pp : 1;
  spec.dispatcher = layout.dispatcher;
  spec.device = device_kind(o.device);
  check_weights(o.model, model);
  return spec;
}

// Prints on the first rank: the text as it comes, or all of it as one JSON object.
class Printer {
 public:
  Printer(const Options& o, const Tokenizer& tokenizer, bool prints) : o_(o), tokenizer_(tokenizer), prints_(prints) {}

  // Nothing is printed before the first token, so that a bad request prints nothing.
  void token(int32_t id) {
    if (!prints_ || o_.json) return;
    show_prompt();
    show(tokenizer_.decode(std::span(&id, 1)));
  }
  void end(const Generated& result) {
    if (!prints_) return;
    if (o_.json) {
      const nlohmann::ordered_json object{{"prompt", o_.prompt},
                                          {"text", tokenizer_.decode(result.tokens)},
                                          {"tokens", result.tokens},
                                          {"ended", result.ended}};
      return print_json(object);
    }
    show_prompt();
    std::fputc('\n', stdout);
  }

 private:
  void show_prompt() {
    if (!shown_) show(o_.prompt);
    shown_ = true;
  }

  const Options& o_;
  const Tokenizer& tokenizer_;
  bool prints_, shown_ = false;
};

void generate_rank(const Options& o, Transport& world, Log& log) {
  Control control(world);
  check_same_program(control, "generate");
  Request request;
  EngineSpec spec;
  control.together([&] {
    request = request_of(o);
    spec = engine_spec(o, request, world.size());
  });
  if (control.is_root()) {
    warn_if_any(log, request.tokenizer->notice());
    warn_if_any(log, other_tokenizer_notice(o));
  }
  if (world.size() > 1) spec.world = &world;
  if (world.size() > 1 && o.threads == 0) spec.threads = cpu_share(control);
  Engine engine(spec);
  std::vector<NotFinite> not_finite;
  Stream s = engine.stream();
  control.together([&] { not_finite = load_weights(s, engine.model(), o.model); });
  warn_of_not_finite(log, control, o.model, not_finite);
  Printer printer(o, *request.tokenizer, control.is_root());
  printer.end(generate(engine, request.spec, request.prompt, [&](int32_t id) { printer.token(id); }));
  warn_of_fallback_kernels(log, control, engine);
}

int run_generate(const Options& o, Log& log) {
  Launch launch = detect_launch(process_environment());
  if (o.layout.ranks != 1) launch = launch_threads(o.layout.ranks, launch);
  const WorldOptions options = world_options(o.layout.timeout_s, [&] {
    return mesh_shape(layout_of(o, read_model_spec(o.model), launch.num_ranks), launch.num_ranks);
  });
  run_ranks(launch, options, [&](Transport& world) { generate_rank(o, world, log); });
  return 0;
}

}  // namespace

void add_generate(Cli& cli) {
  CLI::App* command = cli.app.add_subcommand("generate", "continues a text");
  const auto o = std::make_shared<Options>();
  command->add_option("MODEL", o->model, "checkpoint, run folder or Hugging Face folder")->required();
  command->add_option("--prompt", o->prompt, "the text to continue; empty: a new document")->required();
  command->add_option("--max-tokens", o->spec.max_tokens, "most tokens to add")->capture_default_str();
  command->add_option("--temperature", o->spec.sampling.temperature, "0: always the most likely token")
      ->capture_default_str();
  command->add_option("--top-p", o->spec.sampling.top_p, "draw among the most likely tokens of this total probability")
      ->capture_default_str();
  command->add_option("--seed", o->spec.sampling.seed, "the same seed gives the same text")->capture_default_str();
  command->add_option("--tokenizer", o->tokenizer, "bytes or a folder; default: the model's");
  add_device_option(*command, o->device);
  add_dtype_option(*command, o->dtype);
  add_threads_option(*command, o->threads);
  add_json_option(*command, o->json);
  add_layout_options(*command, o->layout);
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_generate(*o, cli.log); }; });
}

}  // namespace moebius
