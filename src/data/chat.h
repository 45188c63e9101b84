// Chats, and the template that turns them into text: that of the tokenizer's folder, in Jinja.
//
// A chat is a line of jsonl, {"messages": [{"role": ..., "content": ...}, ...]}, or the same under "conversations",
// where messages may be in ShareGPT's form, {"from": "human", "value": ...}. It may also have "tools", "documents"
// (lists) and "chat_template_kwargs" (an object of further variables for the template). Other keys are ignored.
// A message with "weight": 0, as in OpenAI's format, has no loss. "system" next to "conversations" is a message too.
// Source: apply_chat_template of transformers, whose text this is.
#pragma once

#include <ctime>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/template.h"

namespace moebius {

// Variables of a template in addition to messages and tools, by name.
using TemplateVariables = std::vector<std::pair<std::string, jinja::Value>>;

struct Chat {
  std::vector<jinja::Value> messages;  // objects with a "role", without keys whose value is null
  jinja::Value tools = jinja::None{}, documents = jinja::None{};
  TemplateVariables more;
  std::string who;  // names the chat in messages, such as file:line
};

// Throws Error{input} "WHO: ..." for a line that is not a chat.
Chat read_chat(std::string_view line, const std::string& who);
// Reads an object of JSON, as "chat_template_kwargs" of a chat. Throws Error{input} "WHO: ..." for anything else.
TemplateVariables read_template_variables(std::string_view text, const std::string& who);
// Makes one message of a chat.
jinja::Value chat_message(const std::string& role, const std::string& content);
std::string role_of(const jinja::Value& message);

class ChatTemplate {
 public:
  // Reads DIR/chat_template.jinja, or else chat_template of DIR/tokenizer_config.json. Where there are
  // several, it is "tool_use" for chats with tools, and "default" for others.
  // `now` is the time of strftime_now.
  // Throws Error{input} that names the folder when it has none, and the line of a wrong one.
  static ChatTemplate open(const std::string& dir, const std::tm& now);

  // Renders the first num_messages messages. with_prompt: adds the text that asks the assistant for an answer
  // (add_generation_prompt of transformers).
  // Throws Error{input} "WHO: ..." when the template refuses the chat, such as a role.
  // Several threads may call it at once.
  jinja::Rendered render(const Chat& chat, size_t num_messages, bool with_prompt) const;
  bool has_generation(const Chat& chat) const { return of(chat).has_generation(); }
  const std::string& eos_token() const { return eos_token_; }  // empty: there is none

 private:
  const jinja::Template& of(const Chat& chat) const;
  void add(const std::string& name, const std::string& text, const std::string& who);
  void read_tokens(const std::string& path);

  std::tm now_{};
  std::map<std::string, jinja::Template> templates_;
  std::map<std::string, std::string> tokens_;  // variables such as bos_token
  std::string eos_token_;
};

}  // namespace moebius
