// The parts that `generate` and `chat` share: options, the tokenizer of a model, and its chat template.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/generation/config.h"
#include "cli/parse/arguments.h"
#include "data/chat.h"
#include "infer/generate.h"
#include "tokenizer/tokenizer.h"
#include "weights/source.h"

namespace moebius {

struct GenerationOptions {
  std::string model, tokenizer, device = "cpu", dtype = "bf16";
  AddedAdapter adapter;
  int64_t max_tokens = 256;
  SamplingChoices sampling;
  uint64_t seed = 0;
  std::vector<std::string> stops;
  int threads = 0;
};
void add_generation_options(Command& command, GenerationOptions& o);

// The tokenizer of a model, and what depends on it.
class ModelTokenizer {
 public:
  // Throws Error{input} "WHO: ..." when the model's folder has no tokenizer and --tokenizer is missing.
  ModelTokenizer(const std::string& who, const GenerationOptions& o);
  const Tokenizer& operator*() const { return *tokenizer_; }
  const Tokenizer* operator->() const { return tokenizer_.get(); }
  // Returns warnings, or an empty text: about the tokenizer, and if ids have another meaning for the model.
  std::string notice() const { return tokenizer_->notice(); }
  std::string other_tokenizer_notice() const;
  // Returns a line about rules of sampling that come from the model's folder, or an empty text.
  std::string sampling_notice() const;
  // Returns the spec of the options, with the ids of this tokenizer. A text ends at its end-of-document id, and at the
  // end ids of the model's generation_config.json. Rules that the options lack are those of that file.
  GenerateSpec spec() const;
  // Returns the ids of a text, or of a new document where the text is empty.
  std::vector<int32_t> prompt_ids(const std::string& text) const;
  // Reads the chat template, once; chat_ids does so too. Throws the errors of ChatTemplate.
  void open_template();
  // Returns the ids of a chat up to where an answer begins.
  std::vector<int32_t> chat_ids(const Chat& chat);

 private:
  std::string who_;
  const GenerationOptions& o_;
  std::string own_;  // the tokenizer of the model: a folder or "bytes"
  std::unique_ptr<Tokenizer> tokenizer_, of_chats_;
  GenerationConfig config_;
  std::optional<ChatTemplate> template_;
};

// Returns a string such as "64 tokens in 1.5 s, 42.7 tokens/s; prompts of 20 tokens in 0.3 s"
std::string times_text(const GenerateTimes& times);

}  // namespace moebius
