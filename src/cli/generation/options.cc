#include "cli/generation/options.h"

#include <fmt/format.h>

#include <ctime>
#include <filesystem>

#include "cli/options.h"
#include "data/data_build.h"
#include "weights/import.h"
#include "weights/load.h"

namespace moebius {
namespace {

std::string own_tokenizer(const std::string& model) {
  const auto trained = read_run_spec(model);
  if (trained) return trained->data.tokenizer;
  const std::string imported = model + "/" + kImportedFiles;
  return std::filesystem::exists(imported + "/tokenizer.json") ? imported : model;
}

// Returns the folder that may have the model's generation_config.json. It is the folder of the weights that training
// began with, through all runs before this one. A checkpoint has the files that were imported with it in a folder of
// its own.
std::string config_folder(std::string model) {
  constexpr int kMaxRuns = 100;  // folders could name each other
  for (int i = 0; i < kMaxRuns && std::filesystem::exists(model); ++i) {
    const auto trained = read_run_spec(model);
    if (!trained) {
      const std::string imported = model + "/" + kImportedFiles;
      return std::filesystem::is_directory(imported) ? imported : model;
    }
    model = trained->init_from;
  }
  return "";
}

}  // namespace

void add_generation_options(Command& command, GenerationOptions& o) {
  SamplingChoices& sampling = o.sampling;
  const std::string otherwise = "; default: that of the model's generation_config.json, or ";
  command.add_option("MODEL", o.model, "a checkpoint, a run's folder, or a Hugging Face folder")->required();
  add_adapter_options(command, o.adapter, " that is added to the weights of MODEL");
  command.add_option("--max-tokens", o.max_tokens, "the maximum number of tokens to add to a text")
      ->capture_default_str();
  command.add_option("--temperature", sampling.temperature,
                     "temperature of sampling; 0: always the most likely token" + otherwise + "1");
  command.add_option("--top-k", sampling.top_k,
                     "sample among this many of the most likely tokens; 0: all" + otherwise + "0");
  command.add_option("--top-p", sampling.top_p,
                     "sample among the most likely tokens whose probabilities add up to this" + otherwise + "1");
  command.add_option("--min-p", sampling.min_p,
                     "sample among tokens at least this many times as likely as the most likely one" + otherwise + "0");
  command.add_option("--repetition-penalty", sampling.repetition_penalty,
                     "above 1 makes tokens that the text has already less likely" + otherwise + "1");
  command.add_option("--seed", o.seed, "seed of sampling; the same seed gives the same text")->capture_default_str();
  command.add_option("--stop", o.stops, "a text ends before this string; may be given several times")->repeatable();
  command.add_option("--tokenizer", o.tokenizer, "bytes, or a folder with a tokenizer.json; default: the model's");
  add_device_option(command, o.device);
  add_dtype_option(command, o.dtype);
  add_threads_option(command, o.threads);
}

ModelTokenizer::ModelTokenizer(const std::string& who, const GenerationOptions& o)
    : who_(who), o_(o), own_(own_tokenizer(o.model)) {
  MOEBIUS_CHECK(input, !o.tokenizer.empty() || own_ != o.model || !tokenizer_hash(own_).empty(),
                "{}: expected a tokenizer.json in the model's folder; {} has none; give --tokenizer DIR, or "
                "--tokenizer bytes for a model of bytes",
                who, own_);
  std::error_code unreadable;
  MOEBIUS_CHECK(input, !o.tokenizer.empty() || own_ == "bytes" || std::filesystem::exists(own_, unreadable),
                "{}: expected the tokenizer of {} in {}; got nothing there (a relative path is relative to the folder "
                "that the command runs in); give --tokenizer DIR",
                who, o.model, own_);
  tokenizer_ = open_tokenizer(o.tokenizer.empty() ? own_ : o.tokenizer);
  config_ = read_generation_config(config_folder(o.model), tokenizer_->vocab_size(), o.sampling);
}

std::string ModelTokenizer::sampling_notice() const {
  const std::string rules = added_rules(o_.sampling, config_.sampling);
  return rules.empty() ? "" : fmt::format("the model's generation_config.json sets {}; options replace it", rules);
}

std::string ModelTokenizer::other_tokenizer_notice() const {
  if (o_.tokenizer.empty()) return "";
  const std::string hash = tokenizer_hash(own_);
  if (hash.empty() || hash == tokenizer_hash(o_.tokenizer)) return "";
  return fmt::format("--tokenizer {} is not the tokenizer of the model, {}: the text may be garbage", o_.tokenizer,
                     own_);
}

GenerateSpec ModelTokenizer::spec() const {
  GenerateSpec spec{.max_tokens = o_.max_tokens,
                    .sampling = sampling_of(o_.sampling, config_.sampling),
                    .end_ids = config_.end_ids,
                    .num_ids = tokenizer_->vocab_size()};
  spec.sampling.seed = o_.seed;
  // If nothing else ends a text, eod_id() throws, and its error names what is missing.
  if (tokenizer_->has_eod() || spec.end_ids.empty()) spec.end_ids.push_back(tokenizer_->eod_id());
  return spec;
}

std::vector<int32_t> ModelTokenizer::prompt_ids(const std::string& text) const {
  std::vector<int32_t> ids;
  tokenizer_->encode(text, &ids);
  if (ids.empty()) ids.push_back(tokenizer_->eod_id());  // a document begins where another ends
  return ids;
}

void ModelTokenizer::open_template() {
  if (template_) return;
  const std::string name = tokenizer_->name();
  MOEBIUS_CHECK(input, name != "bytes",
                "{}: expected a tokenizer with a chat template; got \"bytes\"; use a model that chats", who_);
  const std::time_t seconds = std::time(nullptr);
  std::tm now{};
  localtime_r(&seconds, &now);
  template_.emplace(ChatTemplate::open(name, now));
  of_chats_ = open_tokenizer(name, {.parse_special = true, .add_special = false});
}

std::vector<int32_t> ModelTokenizer::chat_ids(const Chat& chat) {
  open_template();
  std::vector<int32_t> ids;
  of_chats_->encode(template_->render(chat, chat.messages.size(), /*with_prompt=*/true).text, &ids);
  return ids;
}

std::string times_text(const GenerateTimes& t) {
  const std::string prompts = fmt::format("prompts of {} in {:.2f} s", counted(t.prompt_tokens, "token"), t.prompt_s);
  if (t.tokens == 0) return prompts;
  return fmt::format("{} in {:.2f} s, {:.1f} tokens/s; {}", counted(t.tokens, "token"), t.tokens_s,
                     static_cast<double>(t.tokens) / t.tokens_s, prompts);
}

}  // namespace moebius
