#include "data/data_build.h"

#include <algorithm>
#include <filesystem>
#include <mutex>

#include "core/error.h"
#include "data/chat_ids.h"
#include "data/ordered_work.h"
#include "data/text_input.h"
#include "data/token_data.h"
#include "io/files.h"
#include "io/hash.h"
#include "io/json_text.h"
#include "io/utf8.h"

namespace moebius {
namespace {

// The ids of a block's documents, concatenated.
struct Encoded {
  struct Run {
    size_t end = 0;  // in ids
    bool are_targets = true, ends_document = false;
  };
  std::vector<int32_t> ids;
  std::vector<Run> runs;
  int64_t text_bytes = 0;
  int64_t num_unparsed = 0;   // documents that spell out special tokens
  std::string unparsed;       // one of those tokens
  int64_t num_unlearned = 0;  // chats without a target
  std::string unlearned;      // where one of them is
  int64_t num_lost = 0;       // bytes that no token has
  std::string lost;           // where some of them are
};

// Converts chats to ids. The first chat opens the template, so that other documents need none.
class Chats {
 public:
  Chats(const Tokenizer& tokenizer, const std::tm& now) : name_(tokenizer.name()), now_(now) {}

  ChatIds ids(const Document& document) {
    std::call_once(opened_, [&] { open(document.who); });
    return chat_ids(*template_, *tokenizer_, read_chat(document.text, document.who));
  }

 private:
  void open(const std::string& who) {
    MOEBIUS_CHECK(input, name_ != "bytes",
                  "{}: expected a tokenizer with a chat template, because the line is a chat; got \"bytes\"; give the "
                  "folder of a model that chats",
                  who);
    template_.emplace(ChatTemplate::open(name_, now_));
    tokenizer_ = open_tokenizer(name_, {.parse_special = true, .add_special = false});
  }

  std::string name_;
  std::tm now_;
  std::once_flag opened_;
  std::optional<ChatTemplate> template_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

void append_ids(const Document& document, const Tokenizer& tokenizer, Encoded* encoded) {
  std::vector<int32_t> targets;
  for (size_t i = 0; i < document.ids.size(); ++i) {
    const int32_t id = document.ids[i];
    MOEBIUS_CHECK(input, 0 <= id && id < tokenizer.vocab_size(),
                  "{}: expected ids in [0, {}), the tokenizer's vocabulary; got {} at {}; "
                  "use the tokenizer that made the ids",
                  document.who, tokenizer.vocab_size(), id, i);
    if (i > 0 && document.is_target[i] != document.is_target[i - 1])
      encoded->runs.push_back({encoded->ids.size(), document.is_target[i - 1]});
    encoded->ids.push_back(id);
    if (document.is_target[i]) targets.push_back(id);
  }
  encoded->runs.push_back({encoded->ids.size(), document.ids.empty() || document.is_target.back(), true});
  encoded->text_bytes += static_cast<int64_t>(tokenizer.decode(targets).size());
}

// Lines of jsonl were checked when they were read. A text file may have any bytes if the tokenizer is "bytes".
void check_text(const Document& document, const Tokenizer& tokenizer) {
  if (tokenizer.name() == "bytes") return;
  const int64_t bad = find_invalid_utf8(document.text);
  MOEBIUS_CHECK(
      input, bad < 0,
      "{}: expected UTF-8 text for tokenizer \"{}\"; got byte 0x{:02x} at offset {}; convert the file, as with "
      "iconv -f LATIN1 -t UTF-8",
      document.who, tokenizer.name(), static_cast<uint8_t>(document.text[static_cast<size_t>(bad)]), bad);
}

void append_text(const Document& document, const Tokenizer& tokenizer, bool append_eod, Encoded* encoded) {
  check_text(document, tokenizer);
  std::vector<int32_t>& ids = encoded->ids;
  const size_t begin = ids.size();
  const bool has_prompt = document.kind == Document::Kind::completion;
  if (has_prompt) tokenizer.encode(document.prompt, &ids, TextPart::beginning);
  encoded->runs.push_back({ids.size(), /*are_targets=*/false});
  tokenizer.encode(document.text, &ids, has_prompt ? TextPart::end : TextPart::whole);
  if (append_eod && ids.size() > begin) ids.push_back(tokenizer.eod_id());
  encoded->runs.push_back({ids.size(), /*are_targets=*/true, /*ends_document=*/true});
  encoded->text_bytes += static_cast<int64_t>(document.text.size());
}

void note_special(const Document& document, const Tokenizer& tokenizer, Encoded* encoded) {
  std::string_view token = tokenizer.unparsed_special(document.prompt);
  if (token.empty()) token = tokenizer.unparsed_special(document.text);
  if (token.empty()) return;
  if (encoded->num_unparsed++ == 0) encoded->unparsed = token;
}

void note_lost(const Document& document, const Tokenizer& tokenizer, Encoded* encoded) {
  const int64_t lost = tokenizer.num_lost_bytes(document.prompt) + tokenizer.num_lost_bytes(document.text);
  if (lost > 0 && encoded->num_lost == 0) encoded->lost = document.who;
  encoded->num_lost += lost;
}

void append_chat(Document document, const Tokenizer& tokenizer, Chats& chats, Encoded* encoded) {
  ChatIds chat = chats.ids(document);
  document.ids = std::move(chat.ids);
  document.is_target = std::move(chat.is_target);
  const bool is_learned =
      std::find(document.is_target.begin(), document.is_target.end(), true) != document.is_target.end();
  if (!is_learned && encoded->num_unlearned++ == 0) encoded->unlearned = document.who;
  append_ids(document, tokenizer, encoded);
}

Encoded encode_block(const TextBlock& block, const Tokenizer& tokenizer, Chats& chats, bool append_eod) {
  Encoded encoded;
  for (const Document& document : documents_of(block)) {
    if (document.kind == Document::Kind::chat) {
      append_chat(document, tokenizer, chats, &encoded);
    } else if (document.kind == Document::Kind::ids) {
      append_ids(document, tokenizer, &encoded);
    } else {
      append_text(document, tokenizer, append_eod, &encoded);
      note_special(document, tokenizer, &encoded);
      note_lost(document, tokenizer, &encoded);
    }
  }
  return encoded;
}

void write_block(const Encoded& encoded, int64_t seq_len, TokenDatasetWriter* writer, DatasetInfo* info) {
  const std::span<const int32_t> ids = encoded.ids;
  size_t begin = 0;
  int64_t document = 0;  // tokens so far
  for (const Encoded::Run& run : encoded.runs) {
    const auto count = static_cast<int64_t>(run.end - begin);
    writer->add_tokens(ids.subspan(begin, run.end - begin), run.are_targets);
    if (run.are_targets) info->target_tokens += count;
    document += count;
    begin = run.end;
    if (!run.ends_document) continue;
    writer->end_document();
    info->longest = std::max(info->longest, document);
    if (seq_len > 0 && document > seq_len + 1) ++info->num_cut;
    document = 0;
  }
  for (const int32_t id : ids) info->largest_id = std::max<int64_t>(info->largest_id, id);
  info->text_bytes += encoded.text_bytes;
}

// The blocks of all inputs, file after file.
class Blocks {
 public:
  explicit Blocks(const std::vector<std::string>& paths) : paths_(paths) {}
  std::optional<TextBlock> next() {
    TextBlock block;
    for (;;) {
      if (input_ && input_->next(&block)) return block;
      if (next_path_ == paths_.size()) return std::nullopt;
      input_.emplace(paths_[next_path_++]);
    }
  }

 private:
  const std::vector<std::string>& paths_;
  size_t next_path_ = 0;
  std::optional<TextInput> input_;
};

void write_dataset_info(const std::string& prefix, const DatasetInfo& info) {
  const nlohmann::ordered_json json{
      {"tokenizer", info.tokenizer},         {"tokenizer_hash", info.tokenizer_hash}, {"vocab_size", info.vocab_size},
      {"append_eod", info.append_eod},       {"documents", info.documents},           {"tokens", info.tokens},
      {"target_tokens", info.target_tokens}, {"text_bytes", info.text_bytes},         {"largest_id", info.largest_id}};
  write_file_atomic(prefix + ".json", json.dump(2) + "\n");
}

// Counts the documents that a person should look at, over all blocks in their order.
struct Notices {
  int64_t num_unparsed = 0, num_unlearned = 0, num_lost = 0;
  std::string unparsed, unlearned, lost;

  void add(const Encoded& encoded) {
    if (num_unparsed == 0) unparsed = encoded.unparsed;
    if (num_unlearned == 0) unlearned = encoded.unlearned;
    if (num_lost == 0) lost = encoded.lost;
    num_lost += encoded.num_lost;
    num_unparsed += encoded.num_unparsed;
    num_unlearned += encoded.num_unlearned;
  }
  std::string text() const {
    std::string text;
    if (num_unparsed > 0) {
      text = fmt::format(
          "{} {} special tokens such as \"{}\", encoded as letters here but as tokens by generate and tokenize; "
          "--parse-special encodes them as tokens",
          num_unparsed, num_unparsed == 1 ? "document spells out" : "documents spell out", unparsed);
    }
    if (num_unlearned > 0) {
      text += fmt::format(
          "{}{} without a token that an assistant wrote, so that nothing is learned of them; the first is {}",
          text.empty() ? "" : "; ", num_unlearned == 1 ? "1 chat is" : fmt::format("{} chats are", num_unlearned),
          unlearned);
    }
    if (num_lost > 0) {
      text += fmt::format(
          "{}{} of text {} left out, since the tokenizer has no token for them; the first are in {}; use a "
          "tokenizer that was trained with all 256 bytes in its alphabet",
          text.empty() ? "" : "; ", counted(num_lost, "byte"), num_lost == 1 ? "is" : "are", lost);
    }
    return text;
  }
};

void check_is_free(const std::string& prefix) {
  for (const char* ending : {".bin", ".idx", ".json", ".targets"}) {
    std::error_code unreadable;
    MOEBIUS_CHECK(usage, !std::filesystem::exists(prefix + ending, unreadable),
                  "data build {0}: expected no dataset of this name; "
                  "got {0}{1}; choose another --out, or replace it with --force",
                  prefix, ending);
  }
}

}  // namespace

DatasetInfo build_dataset(const DataBuild& build, const Tokenizer& tokenizer) {
  if (!build.replace) check_is_free(build.out_prefix);
  DatasetInfo info{.tokenizer = tokenizer.name(),
                   .tokenizer_hash = tokenizer_hash(tokenizer.name()),
                   .vocab_size = tokenizer.vocab_size(),
                   .append_eod = build.append_eod};
  for (const std::string& path : build.inputs) TextInput{path};  // all must open before anything is written
  std::filesystem::create_directories(parent_dir(build.out_prefix));
  TokenDatasetWriter writer(build.out_prefix, token_type_for_vocab(info.vocab_size));
  Blocks blocks(build.inputs);
  Notices notices;
  Chats chats(tokenizer, build.now);
  ThreadPool pool(build.threads);
  const auto stop_if_asked = [&] { throw_if_stopped(build.should_stop); };
  const auto next = [&] {
    stop_if_asked();
    return blocks.next();
  };
  OrderedWork(
      next, [&](TextBlock&& block) { return encode_block(block, tokenizer, chats, build.append_eod); },
      [&](Encoded&& encoded) {
        write_block(encoded, build.seq_len, &writer, &info);
        notices.add(encoded);
        stop_if_asked();
      })
      .run(pool);
  info.documents = writer.num_documents();
  info.tokens = writer.num_tokens();
  MOEBIUS_CHECK(input, info.tokens > 0, "data build {}: expected some text; got none in {}; use other files",
                build.out_prefix, counted(std::ssize(build.inputs), "file"));
  MOEBIUS_CHECK(input, info.target_tokens > 0,
                "data build {}: expected a completion or an answer of an assistant that is not empty; got none; "
                "there is nothing to learn",
                build.out_prefix);
  // A dataset exists if its .idx does. It is removed first and written last, so that sidecar and
  // tokens always belong together.
  std::filesystem::remove(build.out_prefix + ".idx");
  write_dataset_info(build.out_prefix, info);
  writer.close();
  info.notice = notices.text();
  return info;
}

std::optional<DatasetInfo> read_dataset_info(const std::string& prefix) {
  const std::string path = prefix + ".json";
  if (!std::filesystem::exists(path)) return std::nullopt;
  const nlohmann::json json = read_json(path);
  try {
    return DatasetInfo{.tokenizer = json.at("tokenizer"),
                       .tokenizer_hash = json.value("tokenizer_hash", ""),
                       .vocab_size = json.at("vocab_size"),
                       .append_eod = json.at("append_eod"),
                       .documents = json.at("documents"),
                       .tokens = json.at("tokens"),
                       .target_tokens = json.value("target_tokens", json.at("tokens").get<int64_t>()),
                       .text_bytes = json.at("text_bytes"),
                       .largest_id = json.value("largest_id", int64_t{-1})};
  } catch (const nlohmann::json::exception& error) {
    MOEBIUS_FAIL(input, "{}: expected the fields of a dataset's sidecar; got {}; build the dataset again", path,
                 error.what());
  }
}

std::string tokenizer_hash(const std::string& name) {
  if (name == "bytes") return name;
  const std::string path = name + "/tokenizer.json";
  std::error_code unreadable;
  if (name.empty() || !std::filesystem::exists(path, unreadable)) return "";
  const std::string text = read_json(path).dump();
  return to_hex(hash_bytes(text.data(), static_cast<int64_t>(text.size())));
}

void check_tokenizer(const std::string& prefix, const std::string& name, const std::string& who) {
  const auto info = read_dataset_info(prefix);
  if (!info || info->tokenizer_hash.empty()) return;
  const std::string hash = tokenizer_hash(name);
  MOEBIUS_CHECK(
      input, hash.empty() || hash == info->tokenizer_hash,
      "{}: {}: expected the tokenizer that built the dataset, \"{}\" ({} ids, hash {}); got \"{}\" (hash {}); "
      "use that one, or build the dataset again with this one",
      who, prefix, info->tokenizer, info->vocab_size, info->tokenizer_hash, name, hash);
}

void check_vocabulary(const std::string& prefix, int64_t vocab_size, const std::string& who) {
  const auto info = read_dataset_info(prefix);
  MOEBIUS_CHECK(
      input, !info || info->largest_id < vocab_size,
      "{}: {}: expected token ids in [0, {}), the model's vocabulary; got {} as the largest id in {}.json; build "
      "the dataset with the model's tokenizer, or set a larger model.vocab_size",
      who, prefix, vocab_size, info->largest_id, prefix);
}

}  // namespace moebius
