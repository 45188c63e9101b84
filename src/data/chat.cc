#include "data/chat.h"

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "io/files.h"
#include "io/json_text.h"
#include "io/utf8.h"
#include "jinja/json.h"

namespace moebius {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 7> kTokens{"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};

// Keys keep their order, since templates print tools as JSON.
Json parse_ordered(std::string_view text, const std::string& who) {
  parse_json(text, who);  // its errors name the place
  return Json::parse(text);
}

std::string shown(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 60);
}

bool is_null_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() || at->is_null();
}

// Gives a message in ShareGPT's form the keys "role" and "content"; others are left alone.
void name_sharegpt_keys(Json& message, size_t i, const std::string& who) {
  static const std::map<std::string, const char*> kRoles{
      {"human", "user"},    {"user", "user"}, {"gpt", "assistant"},   {"assistant", "assistant"},
      {"system", "system"}, {"tool", "tool"}, {"observation", "tool"}};
  if (!message.is_object() || is_null_at(message, "from")) return;
  const bool has_role = !is_null_at(message, "role");
  if (has_role && (is_null_at(message, "value") || !is_null_at(message, "content"))) return;
  const auto role = message["from"].is_string() ? kRoles.find(message["from"]) : kRoles.end();
  MOEBIUS_CHECK(input, (has_role || role != kRoles.end()) && message.value("value", Json()).is_string(),
                "{}: expected \"from\" of human, user, gpt, assistant, system, tool or observation, and a string "
                "\"value\"; got {} at {}; correct or drop the line, or write \"role\" and \"content\"",
                who, shown(message), i);
  if (!has_role) message["role"] = role->second;
  message["content"] = std::move(message["value"]);
  message.erase("from");
  message.erase("value");
}

// Moves the list of messages under "messages". A line may call it "conversations", and have the text of the system
// next to it.
void name_messages(Json& record, const std::string& who) {
  if (!record.is_object() || is_null_at(record, "conversations")) return;
  MOEBIUS_CHECK(input, is_null_at(record, "messages"),
                "{}: expected a list in \"messages\" or in \"conversations\"; got both; drop one of them", who);
  Json list = std::move(record["conversations"]);
  for (size_t i = 0; list.is_array() && i < list.size(); ++i) name_sharegpt_keys(list[i], i, who);
  const Json system = record.value("system", Json());
  MOEBIUS_CHECK(input, system.is_string() || system.is_null(),
                "{}: expected a string in \"system\" next to \"conversations\"; got {}; correct or drop the line", who,
                shown(system));
  if (list.is_array() && system.is_string() && !system.get_ref<const std::string&>().empty()) {
    MOEBIUS_CHECK(
        input, list.empty() || !list[0].is_object() || list[0].value("role", Json()) != "system",
        "{}: expected one text of the system; got \"system\" next to \"conversations\", and such a message in "
        "it; drop one of them",
        who);
    list.insert(list.begin(), Json{{"role", "system"}, {"content", system}});
  }
  record["messages"] = std::move(list);
}

void check_weight(const Json& message, size_t i, const std::string& who) {
  const auto weight = message.find("weight");
  if (weight == message.end() || weight->is_null()) return;
  MOEBIUS_CHECK(input, weight->is_number_integer() && (*weight == 0 || *weight == 1),
                "{}: expected a \"weight\" of 0 or 1 in a message, which says whether it has a loss; got {} at {}; "
                "correct the line, or drop the key",
                who, shown(*weight), i);
}

// Returns the thoughts of a message under the first of their names, or null.
Json reasoning_of(const Json& message) {
  for (const char* name : {"reasoning_content", "thinking", "reasoning"})
    if (!is_null_at(message, name)) return message[name];
  return {};
}

// transformers too leaves out the keys whose value is null, and gives thoughts the names that templates read.
jinja::Value message_of(const Json& message, size_t i, const std::string& who) {
  MOEBIUS_CHECK(input, message.is_object() && message.contains("role") && message["role"].is_string(),
                "{}: expected each of \"messages\" to be an object with a string \"role\"; got {} at {}; correct or "
                "drop the line",
                who, shown(message), i);
  Json kept = Json::object();
  const Json reasoning = reasoning_of(message);
  if (!reasoning.is_null()) kept["thinking"] = reasoning;
  for (const auto& [key, value] : message.items())
    if (!value.is_null()) kept[key] = value;
  if (!reasoning.is_null()) kept["reasoning_content"] = reasoning;
  return jinja::value_of(kept);
}

jinja::Value list_at(const Json& record, const char* key, const std::string& who) {
  const auto it = record.find(key);
  if (it == record.end() || it->is_null()) return jinja::None{};
  MOEBIUS_CHECK(input, it->is_array(), "{}: expected a list in \"{}\"; got {}; correct or drop the line", who, key,
                it->type_name());
  return jinja::value_of(*it);
}

// Throws TemplateError for a name that the chat itself sets.
TemplateVariables variables_of(const Json& object) {
  TemplateVariables variables;
  for (const char* own : {"messages", "tools", "documents", "add_generation_prompt"})
    if (object.contains(own))
      throw jinja::TemplateError(
          fmt::format("expected further variables of the template; got \"{}\", which the chat sets", own));
  for (const auto& [key, value] : object.items()) variables.emplace_back(key, jinja::value_of(value));
  return variables;
}

}  // namespace

TemplateVariables read_template_variables(std::string_view text, const std::string& who) {
  const Json object = parse_ordered(text, who);
  MOEBIUS_CHECK(input, object.is_object(), "{}: expected an object, such as {{\"enable_thinking\": false}}; got {}",
                who, shown(object));
  try {
    return variables_of(object);
  } catch (const jinja::TemplateError& error) {
    MOEBIUS_FAIL(input, "{}: {}", who, error.what());
  }
}

Chat read_chat(std::string_view line, const std::string& who) {
  Json record = parse_ordered(line, who);
  name_messages(record, who);
  Chat chat{.who = who};
  const auto messages = record.is_object() ? record.find("messages") : record.end();
  MOEBIUS_CHECK(input, messages != record.end() && messages->is_array() && !messages->empty(),
                "{}: expected \"messages\" with a list of at least one message; got {}; correct or drop the line", who,
                messages == record.end() ? "none"
                : messages->is_array()   ? "an empty list"
                                         : messages->type_name());
  try {
    for (size_t i = 0; i < messages->size(); ++i) {
      chat.messages.push_back(message_of((*messages)[i], i, who));
      check_weight((*messages)[i], i, who);
    }
    chat.tools = list_at(record, "tools", who);
    chat.documents = list_at(record, "documents", who);
    const auto more = record.find("chat_template_kwargs");
    if (more == record.end() || more->is_null()) return chat;
    MOEBIUS_CHECK(input, more->is_object(),
                  "{}: expected an object in \"chat_template_kwargs\"; got {}; correct or drop the line", who,
                  more->type_name());
    chat.more = variables_of(*more);
  } catch (const jinja::TemplateError& error) {
    MOEBIUS_FAIL(input, "{}: {}; correct or drop the line", who, error.what());
  }
  return chat;
}

jinja::Value chat_message(const std::string& role, const std::string& content) {
  return jinja::value_of(Json{{"role", role}, {"content", content}});
}

std::string role_of(const jinja::Value& message) { return message.dict().find(std::string("role"))->text(); }

void ChatTemplate::add(const std::string& name, const std::string& text, const std::string& who) {
  templates_.emplace(name, jinja::Template::parse(text, who));  // of two, the first counts
}

// A token is a string, or an object with its content.
void ChatTemplate::read_tokens(const std::string& path) {
  if (!std::filesystem::exists(path)) return;
  const nlohmann::json file = read_json(path);
  for (const char* name : kTokens) {
    const auto it = file.is_object() ? file.find(name) : file.end();
    if (it == file.end() || it->is_null()) continue;
    const nlohmann::json& token = it->is_object() && it->contains("content") ? (*it)["content"] : *it;
    MOEBIUS_CHECK(input, token.is_string(), "{}: expected a token in \"{}\"; got {}; correct the file", path, name,
                  it->type_name());
    tokens_.insert_or_assign(name, token.get<std::string>());
  }
}

ChatTemplate ChatTemplate::open(const std::string& dir, const std::tm& now) {
  ChatTemplate made;
  made.now_ = now;
  const std::string config = dir + "/tokenizer_config.json", jinja = dir + "/chat_template.jinja";
  made.read_tokens(dir + "/special_tokens_map.json");
  made.read_tokens(config);
  made.eos_token_ = made.tokens_["eos_token"];
  if (std::filesystem::exists(jinja)) {
    made.add("default", read_file(jinja), jinja);
    const std::string with_tools = dir + "/additional_chat_templates/tool_use.jinja";
    if (std::filesystem::exists(with_tools)) made.add("tool_use", read_file(with_tools), with_tools);
    return made;
  }
  const nlohmann::json file = std::filesystem::exists(config) ? read_json(config) : nlohmann::json::object();
  const auto found = file.find("chat_template");
  MOEBIUS_CHECK(input, found != file.end() && !found->is_null(),
                "chat: {}: expected a chat_template.jinja, or chat_template in tokenizer_config.json; got neither; add "
                "the one that the model was trained with",
                dir);
  const auto who = [&](const std::string& name) { return config + ": chat_template" + name; };
  const bool is_list = found->is_array();
  MOEBIUS_CHECK(input, found->is_string() || is_list,
                "{}: expected a template, or a list of them; got {}; correct the file", who(""), found->type_name());
  if (!is_list) made.add("default", *found, who(""));
  for (size_t i = 0; is_list && i < found->size(); ++i) {
    const nlohmann::json& one = (*found)[i];
    MOEBIUS_CHECK(input,
                  one.is_object() && one.value("name", nlohmann::json()).is_string() &&
                      one.value("template", nlohmann::json()).is_string(),
                  "{}: expected objects with \"name\" and \"template\"; got another at {}; correct the file", who(""),
                  i);
    const std::string name = one["name"];
    if (name == "default" || name == "tool_use") made.add(name, one["template"], who(" " + name));
  }
  MOEBIUS_CHECK(input, !made.templates_.empty(), "{}: expected a template of the name \"default\"; got none; add one",
                who(""));
  return made;
}

const jinja::Template& ChatTemplate::of(const Chat& chat) const {
  const auto with_tools = templates_.find("tool_use"), otherwise = templates_.find("default");
  if (!chat.tools.is_none() && with_tools != templates_.end()) return with_tools->second;
  MOEBIUS_CHECK(input, otherwise != templates_.end(),
                "{}: expected tools, because the only chat template of the tokenizer is \"tool_use\"; got none; "
                "add a default template",
                chat.who);
  return otherwise->second;
}

jinja::Rendered ChatTemplate::render(const Chat& chat, size_t num_messages, bool with_prompt) const {
  jinja::Dict variables;
  const auto end = chat.messages.begin() + static_cast<std::ptrdiff_t>(num_messages);
  for (const auto& [name, token] : tokens_)
    if (!token.empty()) variables.set(jinja::Value(name), jinja::Value(token));
  variables.set("tools", chat.tools);
  variables.set("documents", chat.documents);
  for (const auto& [name, value] : chat.more) variables.set(jinja::Value(name), value);
  variables.set("messages", jinja::Value::list({chat.messages.begin(), end}));
  variables.set("add_generation_prompt", with_prompt);
  try {
    return of(chat).render(variables, now_);
  } catch (const Error& error) {
    MOEBIUS_FAIL(input, "{}: expected a chat that the template takes; got from {}; correct or drop the chat", chat.who,
                 error.what());
  }
}

}  // namespace moebius
