#include "data/document.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"
#include "io/json_text.h"
#include "io/utf8.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr int64_t kNoTarget = -100;  // the label that PyTorch's cross_entropy ignores
constexpr std::array<const char*, 2> kChatKeys{"messages", "conversations"};  // data/chat.h
constexpr std::array<const char*, 4> kTargetKeys{"labels", "loss_mask", "assistant_masks", "completion_mask"};

// Moves the string under the key out of the record. Returns false when there is none.
bool take_string(json& record, const char* key, std::string* text) {
  const auto it = record.find(key);
  if (it == record.end() || !it->is_string()) return false;
  *text = std::move(it->get_ref<std::string&>());
  return true;
}

int64_t integer_at(const json& list, size_t i, const char* key, const std::string& who) {
  const json& value = list[i];
  if (value.is_boolean()) return value.get<bool>();
  MOEBIUS_CHECK(input, value.is_number_integer() && value >= INT32_MIN && value <= INT32_MAX,
                "{}: expected whole numbers in \"{}\"; got {} at {}; correct or drop the line", who, key, value.dump(),
                i);
  return value.get<int64_t>();
}

const char* target_key(const json& record, const std::string& who) {
  const char* found = nullptr;
  for (const char* key : kTargetKeys) {
    if (!record.contains(key)) continue;
    MOEBIUS_CHECK(input, found == nullptr, "{}: expected one of \"{}\" and \"{}\"; got both; drop one of them", who,
                  found, key);
    found = key;
  }
  return found;
}

bool is_target(int64_t value, int32_t id, size_t i, const char* key, const std::string& who) {
  if (key == kTargetKeys[0]) {
    MOEBIUS_CHECK(input, value == id || value == kNoTarget,
                  "{}: expected each of \"labels\" to be the id at the same place in \"input_ids\", or {}; "
                  "got {} for {} at {}; labels must not be shifted",
                  who, kNoTarget, value, id, i);
    return value == id;
  }
  MOEBIUS_CHECK(input, value == 0 || value == 1, "{}: expected 0 or 1 in \"{}\"; got {} at {}; correct the line", who,
                key, value, i);
  return value == 1;
}

// Refuses padding, on which there must be neither a loss nor attention.
void refuse_padding(const json& record, size_t num_ids, const std::string& who) {
  const auto mask = record.find("attention_mask");
  if (mask == record.end()) return;
  MOEBIUS_CHECK(input, mask->is_array() && mask->size() == num_ids,
                "{}: expected \"attention_mask\" with as many numbers as \"input_ids\", {}; got {}; correct or drop it",
                who, num_ids, mask->is_array() ? fmt::format("{}", mask->size()) : mask->type_name());
  for (size_t i = 0; i < num_ids; ++i) {
    const int64_t is_seen = integer_at(*mask, i, "attention_mask", who);
    MOEBIUS_CHECK(input, is_seen == 1,
                  "{}: expected ones in \"attention_mask\"; got {} at {}, which is padding; remove "
                  "the padded ids (padding=False)",
                  who, is_seen, i);
  }
}

// Refuses unknown masks, since they could exclude ids from the loss.
void refuse_unknown_masks(const json& record, const std::string& who) {
  for (const auto& [key, value] : record.items()) {
    const bool is_known = std::find(kTargetKeys.begin(), kTargetKeys.end(), key) != kTargetKeys.end() ||
                          key == "attention_mask" || key == "special_tokens_mask";
    MOEBIUS_CHECK(
        input, is_known || !(key.ends_with("mask") || key.ends_with("masks")),
        "{}: expected in addition to \"input_ids\" at most \"attention_mask\", \"special_tokens_mask\" and one of "
        "\"{}\"; got \"{}\"; rename or drop it",
        who, fmt::join(kTargetKeys, "\", \""), key);
  }
}

Document document_of_ids(const json& record, const std::string& who) {
  Document document{.kind = Document::Kind::ids};
  const json& ids = record["input_ids"];
  const char* key = target_key(record, who);
  MOEBIUS_CHECK(input, ids.is_array() && (!key || (record[key].is_array() && record[key].size() == ids.size())),
                "{}: expected \"input_ids\" with a list of ids{}; got {} and {}; correct or drop the line", who,
                key ? fmt::format(", and \"{}\" with as many", key) : "",
                ids.is_array() ? fmt::format("{} ids", ids.size()) : ids.type_name(),
                key ? fmt::format("{} of the other", record[key].size()) : "nothing else");
  refuse_padding(record, ids.size(), who);
  refuse_unknown_masks(record, who);
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = integer_at(ids, i, "input_ids", who);
    document.ids.push_back(static_cast<int32_t>(id));
    document.is_target.push_back(!key || is_target(integer_at(record[key], i, key, who), document.ids[i], i, key, who));
  }
  return document;
}

// The keys "text", "prompt" with "completion", and "input_ids" exclude each other.
void check_one_kind(bool has_text, bool has_prompt, bool has_ids, const std::string& who) {
  MOEBIUS_CHECK(input, has_text + has_prompt + has_ids <= 1,
                "{}: expected a \"text\", or a \"prompt\" and a \"completion\", or \"input_ids\"; got more than one; "
                "correct or drop the line",
                who);
}

// A corpus of texts may have a column of such a name that is empty, or has names of conversations.
bool is_chat(const json& record, const char* key) {
  const auto at = record.find(key);
  return at != record.end() && (key == kChatKeys[0] ? !at->is_null() : at->is_array());
}

// Refuses a text next to a chat, which is ambiguous. Ids next to a chat are not: a chat template may have
// produced them.
void refuse_chat_beside_text(const json& record, const std::string& who) {
  for (const char* key : kChatKeys)
    MOEBIUS_CHECK(input, !is_chat(record, key),
                  "{}: expected one document; got a text and a chat in \"{}\", and either could be meant; "
                  "drop one of them",
                  who, key);
}

bool excludes_ids(const std::string& key, const json& value) {
  if (key == kTargetKeys[0]) return value.is_array() && std::find(value.begin(), value.end(), kNoTarget) != value.end();
  if (key == "attention_mask" || key == "special_tokens_mask") return false;
  // Other columns of such a name may hold spans or texts.
  const auto is_flag = [](const json& x) { return x.is_number() || x.is_boolean(); };
  return (key.ends_with("mask") || key.ends_with("masks")) && value.is_array() && !value.empty() &&
         std::all_of(value.begin(), value.end(), is_flag);
}

// Refuses masks of the loss without ids. They have a number for each id, and the line has text instead.
void refuse_masks_of_text(const json& record, const std::string& who) {
  for (const auto& [key, value] : record.items())
    MOEBIUS_CHECK(input, !excludes_ids(key, value),
                  "{}: expected \"input_ids\" with \"{}\", which has a number for each id; got a text, a prompt or a "
                  "chat; put the ids of the text into \"input_ids\"{}, or drop \"{}\"",
                  who, key, record.contains("prompt") ? "" : ", split the text into \"prompt\" and \"completion\"",
                  key);
}

// Returns what to do with a line in a form of other software.
std::string_view advice(std::string_view line) {
  const auto has = [&](std::string_view key) { return line.find(key) != line.npos; };
  if (has("\"chosen\"") && has("\"rejected\""))
    return "there is no training on preferences, so make a chat or a completion of the chosen answer";
  if (has("\"instruction\"") && has("\"output\""))
    return "make \"prompt\" of instruction and input, as the model should see them, and rename \"output\" to "
           "\"completion\"";
  if (has("\"prompt\"") && has("\"completion\"") && has("\"role\""))
    return "put the messages of both into one list, \"messages\"";
  return "correct or drop the line, or rename its keys";
}

[[noreturn]] void refuse(std::string_view line, const std::string& who) {
  MOEBIUS_FAIL(input,
               "{}: expected an object with a string \"text\", or with strings \"prompt\" and \"completion\", or with "
               "a chat in \"messages\" or \"conversations\"; got {}; {}",
               who, line.substr(0, 60), advice(line));
}

}  // namespace

void check_utf8(std::string_view line, const std::string& who) {
  const int64_t bad = find_invalid_utf8(line);
  MOEBIUS_CHECK(input, bad < 0, "{}:{}: expected UTF-8; got byte 0x{:02x}; correct or drop the line", who, bad + 1,
                static_cast<uint8_t>(line[bad]));
}

// A file of one list, over several lines or in one, is a common form of data sets.
void refuse_list(std::string_view line, const std::string& who) {
  const size_t first = line.find_first_not_of(" \t");
  MOEBIUS_CHECK(input, first == line.npos || line[first] != '[',
                "{}: expected an object on each line; got the beginning of a list; make a line of each element: "
                "jq -c '.[]' FILE > NAME.jsonl",
                who);
}

Document read_document(std::string_view line, const std::string& who) {
  check_utf8(line, who);
  refuse_list(line, who);
  json record = parse_json(line, who);
  if (!record.is_object()) refuse(line, who);
  Document document;
  const auto has = [&](const char* key) { return record.contains(key) && !record[key].is_null(); };
  const bool has_ids = has("input_ids"), has_text = has("text");
  const bool has_chat = is_chat(record, kChatKeys[0]) || is_chat(record, kChatKeys[1]);
  // Next to a chat a prompt alone is no document: UltraChat, for example, repeats the first question there.
  const bool has_prompt = has("completion") || (has("prompt") && !has_chat);
  check_one_kind(has_text, has_prompt, has_ids, who);
  if (!has_ids && (has_text || has_prompt || has_chat)) refuse_masks_of_text(record, who);
  if (has_chat && !has_text && !has_prompt && !has_ids)
    return {.kind = Document::Kind::chat, .text = std::string(line), .who = who};
  if (has_ids) document = document_of_ids(record, who);
  if (has_prompt) document.kind = Document::Kind::completion;
  const bool is_whole = has_ids || (has_prompt ? take_string(record, "prompt", &document.prompt) &&
                                                     take_string(record, "completion", &document.text)
                                               : take_string(record, "text", &document.text));
  if (!is_whole) refuse(line, who);
  if (!has_ids) refuse_chat_beside_text(record, who);
  document.who = who;
  return document;
}

}  // namespace moebius
