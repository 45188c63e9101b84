#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/options.h"
#include "io/tokenizer.h"
#include "train/generate.h"
#include "train/weights.h"

namespace moebius {
namespace {

struct Options {
  std::string model, prompt, tokenizer, device = "cpu", dtype = "bf16";
  GenerateSpec spec;
  int threads = 0;
  bool json = false;
};

// The one asked for, else the run's, else the one in the model's folder.
std::unique_ptr<Tokenizer> model_tokenizer(const Options& o) {
  if (!o.tokenizer.empty()) return open_tokenizer(o.tokenizer);
  const auto trained = read_run_spec(o.model);
  return open_tokenizer(trained ? trained->data.tokenizer : o.model);
}

void show(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int run_generate(const Options& o, Log& log) {
  const DeviceKind device = device_kind(o.device);
  const ModelSpec model = read_model_spec(o.model);
  const std::unique_ptr<Tokenizer> tokenizer = model_tokenizer(o);
  warn_if_any(log, tokenizer->notice());
  GenerateSpec spec = o.spec;
  spec.end_id = tokenizer->eod_id();
  spec.num_ids = tokenizer->vocab_size();
  std::vector<int32_t> prompt;
  tokenizer->encode(o.prompt, &prompt);
  if (prompt.empty()) prompt.push_back(tokenizer->eod_id());  // the start of a document is the end of another

  const int64_t wanted = static_cast<int64_t>(prompt.size()) + std::max<int64_t>(spec.max_tokens, 1);
  const int64_t context = std::min(model.max_position_embeddings, wanted);  // caches no longer than the text can get
  EngineSpec engine_spec = generation_engine_spec(model, compute_dtype(o.dtype), context, num_threads(o.threads));
  engine_spec.device = device;
  check_weights(o.model, model);
  Engine engine(engine_spec);
  Stream s = engine.stream();
  warn_if_any(log, not_finite_warning(o.model, load_weights(s, engine.model(), o.model)));
  if (o.json) {
    const Generated result = generate(engine, spec, prompt);
    const nlohmann::ordered_json object{{"prompt", o.prompt},
                                        {"text", tokenizer->decode(result.tokens)},
                                        {"tokens", result.tokens},
                                        {"ended", result.ended}};
    print_json(object);
    return 0;
  }
  // Nothing is shown before the request is known to be good.
  bool shown = false;
  const auto show_prompt = [&] {
    if (!shown) show(o.prompt);
    shown = true;
  };
  generate(engine, spec, prompt, [&](int32_t id) {
    show_prompt();
    show(tokenizer->decode(std::span(&id, 1)));
  });
  show_prompt();
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace

void add_generate(Cli& cli) {
  CLI::App* command = cli.app.add_subcommand("generate", "continues a text");
  const auto o = std::make_shared<Options>();
  command->add_option("MODEL", o->model, "checkpoint, run folder or Hugging Face folder")->required();
  command->add_option("--prompt", o->prompt, "the text to continue; empty: a new document")->required();
  command->add_option("--max-tokens", o->spec.max_tokens, "tokens to add at most")->capture_default_str();
  command->add_option("--temperature", o->spec.sampling.temperature, "0: always the most likely token")
      ->capture_default_str();
  command->add_option("--top-p", o->spec.sampling.top_p, "draw among the most likely tokens of this total probability")
      ->capture_default_str();
  command->add_option("--seed", o->spec.sampling.seed, "same seed, same text")->capture_default_str();
  command->add_option("--tokenizer", o->tokenizer, "bytes or a folder; default: the model's");
  add_device_option(*command, o->device);
  add_dtype_option(*command, o->dtype);
  add_threads_option(*command, o->threads);
  add_json_option(*command, o->json);
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_generate(*o, cli.log); }; });
}

}  // namespace moebius
