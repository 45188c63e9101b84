// Compares chats with transformers' apply_chat_template, on the cases of tests/golden/data/chats.json,
// written by tools/chat_golden.py.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/chat_ids.h"
#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data";

// Returns the template without the tags of {% generation %} blocks.
std::string without_generation(std::string text) {
  for (const std::string tag : {"{% generation %}", "{%- generation %}", "{% endgeneration %}"})
    for (size_t at = text.find(tag); at != text.npos; at = text.find(tag, at))
      text.replace(at, tag.size(), tag.starts_with("{%-") ? "{%- if false %}{% endif %}" : "");
  return text;
}

TEST(ChatGolden, IdsAndAssistantMasksEqualThoseOfTransformers) {
  const auto file = nlohmann::ordered_json::parse(read_file(kData + "/chats.json"));
  int64_t num_masks = 0, num_turns = 0;
  for (const auto& one : file.at("cases")) {
    const std::string name = one.at("tokenizer"), text = file.at("templates")[one.at("template").get<size_t>()];
    SCOPED_TRACE(name + " " + one.at("template").dump() + " " + one.at("line").dump());
    const TestDir dir;
    std::filesystem::copy_file(kData + "/tokenizers/" + name + "/tokenizer.json", dir.path("tokenizer.json"));
    write_file_atomic(dir.path("chat_template.jinja"), text);
    write_file_atomic(dir.path("tokenizer_config.json"), one.at("tokens").dump());
    const ChatTemplate chat_template = ChatTemplate::open(dir.path(), {});
    const auto tokenizer = open_tokenizer(dir.path(), {.parse_special = true, .add_special = false});
    const Chat chat = read_chat(one.at("line").dump(), "case");
    if (one.contains("error")) {
      expect_error(ErrorKind::input, one.at("text"), [&] { chat_ids(chat_template, *tokenizer, chat); });
      continue;
    }
    const ChatIds made = chat_ids(chat_template, *tokenizer, chat);
    EXPECT_EQ(made.ids, one.at("ids").get<std::vector<int32_t>>());
    if (!one.contains("mask")) continue;
    ++num_masks;
    const auto mask = one.at("mask").get<std::vector<int>>();
    EXPECT_EQ(std::vector<int>(made.is_target.begin(), made.is_target.end()), mask);
    if (!one.contains("turns")) continue;
    write_file_atomic(dir.path("chat_template.jinja"), without_generation(text));
    const ChatIds of_turns = chat_ids(ChatTemplate::open(dir.path(), {}), *tokenizer, chat);
    EXPECT_EQ(of_turns.ids, made.ids);
    EXPECT_EQ(std::vector<int>(of_turns.is_target.begin(), of_turns.is_target.end()), mask);
    ++num_turns;
  }
  EXPECT_GT(num_masks, 50);
  EXPECT_GT(num_turns, 30);
}

}  // namespace
}  // namespace moebius
