#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <sstream>

#include "cli/command.h"
#include "cli/generation/options.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "data/document.h"
#include "infer/text_stream.h"
#include "io/files.h"
#include "io/json_text.h"
#include "train/rank_report.h"
#include "weights/load.h"

namespace moebius {
namespace {

struct Options : GenerationOptions {
  std::string prompt, prompts;
  int64_t batch = kMaxSequences;
  LayoutOptions layout;
  bool json = false;
};

// The texts that are printed, and the ids that are continued.
struct Prompts {
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> ids;
};

void add_line(ModelTokenizer& tokenizer, const std::string& line, const std::string& who, bool is_json, Prompts* to) {
  check_utf8(line, who);
  if (!is_json) {
    to->texts.push_back(line);
    return to->ids.push_back(tokenizer.prompt_ids(line));
  }
  const nlohmann::json record = parse_json(line, who);
  const bool has_prompt = record.is_object() && record.contains("prompt") && record["prompt"].is_string();
  const auto has = [&](const char* key) {
    return record.is_object() && record.contains(key) && !record[key].is_null();
  };
  const bool has_chat = has("messages") || has("conversations");
  MOEBIUS_CHECK(input, has_prompt || has_chat,
                "{}: expected an object with a string \"prompt\", or with a chat in \"messages\" or "
                "\"conversations\"; got {}; correct or drop the line",
                who, line.substr(0, 60));
  MOEBIUS_CHECK(input, !has_prompt || !has_chat,
                "{}: expected a prompt or a chat; got both, and either could be meant; drop one of them", who);
  to->texts.push_back(has_prompt ? record["prompt"] : "");
  to->ids.push_back(has_prompt ? tokenizer.prompt_ids(to->texts.back()) : tokenizer.chat_ids(read_chat(line, who)));
}

Prompts read_prompts(const Options& o, ModelTokenizer& tokenizer) {
  if (o.prompts.empty()) return {{o.prompt}, {tokenizer.prompt_ids(o.prompt)}};
  Prompts prompts;
  std::istringstream lines(read_file(o.prompts));
  std::string line;
  for (int64_t number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    add_line(tokenizer, line, fmt::format("{}:{}", o.prompts, number), o.prompts.ends_with(".jsonl"), &prompts);
  }
  MOEBIUS_CHECK(input, !prompts.ids.empty(), "generate: {}: expected a prompt on each line; got none", o.prompts);
  return prompts;
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
                "in addition to tp; got {}, of which the others would repeat the work; start {}, or split the model "
                "further",
                needed, layout.tp, layout.pp, layout.ep, layout.etp, num_ranks, needed);
  return layout;
}

EngineSpec engine_spec(const Options& o, const Prompts& prompts, const GenerateSpec& generate, int num_ranks) {
  const ModelSpec model = read_model_spec(o.model);
  const ParallelSpec layout = layout_of(o, model, num_ranks);
  int64_t longest = 0;
  for (const auto& ids : prompts.ids) longest = std::max(longest, std::ssize(ids));
  const int64_t wanted = longest + std::max<int64_t>(generate.max_tokens, 1);
  const int64_t context = std::min(model.max_position_embeddings, wanted);  // caches no longer than a text can get
  EngineSpec spec =
      generation_engine_spec(model, compute_dtype(o.dtype), context, num_threads(o.threads),
                             /*chunk=*/256, mesh_shape(layout, num_ranks), std::min(o.batch, std::ssize(prompts.ids)));
  spec.pipeline = {.num_virtual = layout.vpp, .layout = layout.layout};
  spec.num_micro_batches = layout.vpp > 1 ? layout.pp : 1;
  spec.dispatcher = layout.dispatcher;
  spec.device = device_kind(o.device);
  check_weights(o.model, model, o.adapter);
  return spec;
}

// Prints on the first rank, in the order of the prompts. The first text that is not complete is printed
// token by token, and the texts after it once it is complete. With --json each is one object.
class Printer {
 public:
  Printer(const Options& o, const Tokenizer& tokenizer, const Prompts& prompts, bool prints)
      : o_(o), tokenizer_(tokenizer), prompts_(prompts), prints_(prints) {
    for (size_t i = 0; i < prompts.ids.size(); ++i) texts_.push_back({TextStream(tokenizer, o.stops)});
  }

  // Returns false at a stop string. Nothing is printed before the first token, so that a bad request
  // prints nothing.
  bool token(size_t i, int32_t id) {
    texts_[i].waiting += texts_[i].stream.add(id);
    if (i == first_) show(i);
    return !texts_[i].stream.is_stopped();
  }
  void end(size_t i, const Generated& result) {
    texts_[i].waiting += texts_[i].stream.rest();
    texts_[i].result = result;
    for (; first_ < texts_.size() && texts_[first_].result; ++first_) finish(first_);
    if (first_ < texts_.size() && !texts_[first_].waiting.empty()) show(first_);
  }

 private:
  struct Text {
    TextStream stream;
    std::string waiting = {};  // is not printed yet
    bool is_begun = false;
    std::optional<Generated> result = {};
  };

  void finish(size_t i) {
    show(i);
    if (!prints_) return;
    if (!o_.json) {
      std::fputc('\n', stdout);
      std::fflush(stdout);  // before the line of the log that follows
      return;
    }
    print_json({{"prompt", prompts_.texts[i]},
                {"text", o_.stops.empty() ? tokenizer_.decode(texts_[i].result->tokens) : texts_[i].stream.text()},
                {"tokens", texts_[i].result->tokens},
                {"ended", texts_[i].result->ended}});
    std::fflush(stdout);  // a reader gets each text when it has ended, and a signal loses none of them
  }
  void show(size_t i) {
    if (!prints_ || o_.json) return;
    Text& text = texts_[i];
    const std::string piece = (text.is_begun ? "" : prompts_.texts[i]) + text.waiting;
    text.is_begun = true;
    text.waiting.clear();
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  }

  const Options& o_;
  const Tokenizer& tokenizer_;
  const Prompts& prompts_;
  bool prints_;
  size_t first_ = 0;  // text that is not complete
  std::vector<Text> texts_;
};

void generate_rank(const Options& o, Transport& world, Log& log) {
  Control control(world);
  check_same_program(control, "generate");
  std::optional<ModelTokenizer> tokenizer;
  Prompts prompts;
  GenerateSpec generate;
  EngineSpec spec;
  std::optional<Printer> printer;
  control.together([&] {
    tokenizer.emplace("generate", o);
    prompts = read_prompts(o, *tokenizer);
    generate = tokenizer->spec();
    spec = engine_spec(o, prompts, generate, world.size());
    printer.emplace(o, **tokenizer, prompts, control.is_root());
  });
  if (control.is_root()) {
    warn_if_any(log, tokenizer->notice());
    warn_if_any(log, tokenizer->other_tokenizer_notice());
    if (const std::string notice = tokenizer->sampling_notice(); !notice.empty()) log.line(notice);
  }
  if (world.size() > 1) spec.world = &world;
  if (world.size() > 1 && o.threads == 0) spec.threads = cpu_share(control);
  Engine engine(spec);
  std::vector<NotFinite> not_finite;
  Stream s = engine.stream();
  control.together([&] { not_finite = load_weights(s, engine.model(), o.model, o.adapter); });
  warn_of_not_finite(log, control, o.model, not_finite);
  Generator generator(engine);
  const std::vector<Generated> made = generator.run(
      generate, prompts.ids, [&](size_t i, int32_t id) { return printer->token(i, id); },
      [&](size_t i, const Generated& text) { printer->end(i, text); });
  for (size_t i = 0; generate.max_tokens == 0 && i < made.size(); ++i) printer->end(i, made[i]);
  if (control.is_root()) log.line(times_text(generator.times()));
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
  Command* command = cli.program.add_subcommand("generate", "continues a prompt, or each prompt of a file");
  const auto o = std::make_shared<Options>();
  add_generation_options(*command, *o);
  Argument* prompt = command->add_option("--prompt", o->prompt, "the text to continue; empty: a new document");
  Argument* prompts = command->add_option(
      "--prompts", o->prompts,
      "a file with a prompt on each line; in a .jsonl file, with an object that has \"prompt\" or \"messages\"");
  prompt->excludes(*prompts);
  command->add_option("--batch", o->batch, "number of texts that are generated at a time")
      ->between(1, kMaxSequences)
      ->capture_default_str();
  add_json_option(*command, o->json);
  add_example(*command, "moebius generate runs/mine --prompt 'In the beginning' --max-tokens 100");
  add_layout_options(*command, o->layout);
  command->callback([&cli, o, prompt, prompts] {
    cli.run = [&cli, o, prompt, prompts] {
      MOEBIUS_CHECK(usage, prompt->count() + prompts->count() == 1,
                    "generate: expected --prompt TEXT or --prompts FILE; got neither");
      return run_generate(*o, cli.log);
    };
  });
}

}  // namespace moebius
