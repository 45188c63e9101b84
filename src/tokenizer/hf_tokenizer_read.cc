// HfTokenizer::open: reads tokenizer.json, and the end-of-document token from the files next to it.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "io/files.h"
#include "io/json_text.h"
#include "tokenizer/hf_tokenizer.h"

namespace moebius {
namespace {

// Returns the token that eos_token names as a string or as an object with its content. Returns
// nothing when the file has none.
std::optional<std::string> eos_token(const std::string& path) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  const nlohmann::json json = read_json(path);
  const JsonField file(json, path);
  if (!file.has("eos_token")) return std::nullopt;
  const JsonField token = file.at("eos_token");
  return token.value().is_object() ? token.at("content").string() : token.string();
}

std::optional<int32_t> eos_token_id(const std::string& path, int64_t vocab_size) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  const nlohmann::json json = read_json(path);
  const JsonField file(json, path);
  if (!file.has("eos_token_id")) return std::nullopt;
  JsonField id = file.at("eos_token_id");
  if (id.value().is_array()) {
    const auto ids = id.items();
    if (ids.empty()) id.fail("an id");
    id = ids.front();
  }
  return static_cast<int32_t>(id.integer(0, vocab_size - 1));
}

// Says what to do about a name without a tokenizer.json below it.
std::string advice_on(const std::string& name) {
  const std::filesystem::path path(name);
  if (path.filename() == "tokenizer.json") return "give its folder, " + parent_dir(name);
  if (std::filesystem::exists(path / "tokenizer.model"))
    return "its tokenizer.model is a SentencePiece model, which is not supported; in transformers, "
           "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json";
  std::error_code unreadable;
  if (!std::filesystem::is_directory(path, unreadable)) return "correct the name";
  return "this folder has none; complete its download, or let transformers write one: "
         "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)";
}

}  // namespace

std::unique_ptr<HfTokenizer> HfTokenizer::open(const std::string& dir, const TokenizerOptions& options) {
  const std::string path = dir + "/tokenizer.json";
  MOEBIUS_CHECK(input, std::filesystem::exists(path),
                "tokenizer: expected \"bytes\" or a folder with a tokenizer.json; got \"{}\"; {}", dir, advice_on(dir));
  return parse(read_file(path), dir, options);
}

std::unique_ptr<HfTokenizer> HfTokenizer::parse(std::string_view text, const std::string& dir,
                                                const TokenizerOptions& options) {
  const std::string path = dir + "/tokenizer.json";
  const nlohmann::json json = parse_json(text, path);
  std::unique_ptr<HfTokenizer> tokenizer(new HfTokenizer(dir, options));
  tokenizer->read(JsonField(json, path));
  return tokenizer;
}

// A fine-tuning that truncated and padded its batches leaves these settings in the file.
void HfTokenizer::read_lengths(const JsonField& file) {
  std::vector<std::string> set;
  for (const char* key : {"truncation", "padding"}) {
    if (!file.has(key)) continue;
    if (!file.at(key).value().is_object()) file.at(key).fail("an object or null");
    set.emplace_back(key);
  }
  if (set.empty()) return;
  notice_ = fmt::format(
      "{}: {} {} not applied: ids are neither truncated nor padded, "
      "which is the default of transformers too",
      file.path(), fmt::join(set, " and "), set.size() == 1 ? "is" : "are");
}

void HfTokenizer::read(const JsonField& file) {
  if (file.has("version") && file.at("version").string() != "1.0") file.at("version").fail("1.0");
  read_lengths(file);
  if (file.has("normalizer")) normalizer_ = Normalizer::read(file.at("normalizer"));
  if (file.has("pre_tokenizer")) pre_tokenizer_ = PreTokenizer::read(file.at("pre_tokenizer"));
  if (file.has("post_processor")) post_processor_ = PostProcessor::read(file.at("post_processor"));
  if (file.has("decoder")) decoder_ = TokenDecoder::read(file.at("decoder"));
  bpe_ = Bpe::read(file.at("model"), pre_tokenizer_.is_byte_level());
  tokens_ = bpe_.tokens();
  is_special_.resize(tokens_.size());
  std::vector<AddedToken> added;
  if (file.has("added_tokens")) added = read_added(file.at("added_tokens"));
  check_ids();
  eod_id_ = find_eod();
  register_added(added);
}

std::vector<AddedToken> HfTokenizer::read_added(const JsonField& field) {
  std::vector<AddedToken> added = read_added_tokens(field);
  for (size_t i = 0; i < added.size(); ++i) {
    const AddedToken& token = added[i];
    const auto id = static_cast<size_t>(token.id);
    if (id >= tokens_.size()) {
      tokens_.resize(id + 1);
      is_special_.resize(id + 1);
    }
    const int32_t known = bpe_.find(token.content);
    MOEBIUS_CHECK(input, (known < 0 && tokens_[id].empty()) || known == token.id,
                  "{}[{}]: expected a unique id, or the token's id in the vocabulary; got {} for \"{}\"; "
                  "correct the file",
                  field.path(), i, id, token.content);
    tokens_[id] = token.content;
    is_special_[id] = token.special;
  }
  note_numbers(field, added);
  return added;
}

// Hugging Face's library numbers the tokens that the vocabulary lacks consecutively from its size,
// in the order of their ids.
// The ids in the file do not count there.
void HfTokenizer::note_numbers(const JsonField& field, std::vector<AddedToken> added) {
  const std::vector<std::string>& known = bpe_.tokens();
  auto next = static_cast<int32_t>(std::count_if(known.begin(), known.end(), [](const auto& t) { return !t.empty(); }));
  std::sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (const AddedToken& token : added) {
    if (bpe_.find(token.content) >= 0) continue;
    if (token.id == next++) continue;
    notice_ += fmt::format(
        "{}{}: \"{}\" has id {} here, as in the file, but {} in Hugging Face's library, "
        "which numbers added tokens consecutively after the vocabulary",
        notice_.empty() ? "" : "; ", field.path(), token.content, token.id, next - 1);
    return;
  }
}

// Registers special tokens first: if normalization makes two tokens equal, the special one counts.
// The raw text has tokens as they were written.
void HfTokenizer::register_added(const std::vector<AddedToken>& added) {
  MatchScratch scratch;
  for (const bool special : {true, false}) {
    for (const AddedToken& token : added) {
      if (token.special != special) continue;
      std::string& content = tokens_[static_cast<size_t>(token.id)];
      if (token.normalized) normalizer_.apply(&content, scratch);
      (token.normalized ? added_normalized_ : added_raw_).add(token, content);
    }
  }
}

void HfTokenizer::check_ids() const {
  for (const auto* ids : {&post_processor_.before, &post_processor_.after})
    for (const int32_t id : *ids)
      MOEBIUS_CHECK(
          input, id < vocab_size() && !tokens_[id].empty(),
          "{}/tokenizer.json: post_processor: expected ids of tokens; got {}, which is no token; correct the file",
          dir_, id);
}

std::optional<int32_t> HfTokenizer::find_eod() const {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const std::string path = dir_ + "/" + name;
    const auto token = eos_token(path);
    if (!token) continue;
    for (size_t id = 0; id < tokens_.size(); ++id)
      if (tokens_[id] == *token && !token->empty()) return static_cast<int32_t>(id);
    MOEBIUS_FAIL(input, "{}: expected an eos_token of tokenizer.json; got \"{}\"; correct the file", path, *token);
  }
  return eos_token_id(dir_ + "/config.json", vocab_size());
}

}  // namespace moebius
