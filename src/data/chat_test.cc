#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/chat_ids.h"
#include "data/document.h"
#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

constexpr const char* kPlain =
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' ~ m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.name }}){% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

// A folder with a template.
class ChatFolder {
 public:
  explicit ChatFolder(const std::string& text, const char* config = R"({"eos_token": "</s>"})") {
    write_file_atomic(dir_.path("chat_template.jinja"), text);
    write_file_atomic(dir_.path("tokenizer_config.json"), config);
  }
  ChatTemplate open() const { return ChatTemplate::open(dir_.path(), {}); }
  const TestDir& dir() const { return dir_; }

 private:
  TestDir dir_;
};

Chat chat_of(const std::string& line) { return read_chat(line, "a.jsonl:7"); }

// Returns the text of the turns, one after the other.
std::string turns(const std::string& text, const std::string& line) {
  const ChatTemplate chat_template = ChatFolder(text).open();
  const Chat chat = chat_of(line);
  const jinja::Rendered whole = chat_template.render(chat, chat.messages.size(), false);
  std::string all;
  for (const jinja::Span& span : assistant_spans(chat_template, chat, whole))
    all += "[" + whole.text.substr(span.begin, span.end - span.begin) + "]";
  return all;
}

constexpr const char* kTwoTurns =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                     {"role": "user", "content": "b"}, {"role": "assistant", "content": "d"}]})";

TEST(Chat, AConversationsColumnIsIgnoredIfThereIsAText) {
  EXPECT_EQ(read_document(R"({"text": "hi", "conversations": "c-17", "messages": null})", "a.jsonl:7").text, "hi");
}

// UltraChat repeats the first question in "prompt", and tables of several kinds of data have nulls.
TEST(Chat, APromptWithoutACompletionIsIgnoredNextToAChat) {
  const auto is_chat = [](const std::string& keys) {
    const std::string line = "{" + keys + R"("messages": [{"role": "user", "content": "a"}]})";
    return read_document(line, "a.jsonl:7").kind == Document::Kind::chat;
  };
  EXPECT_TRUE(is_chat(R"("prompt": "a", "prompt_id": "7", )"));
  EXPECT_TRUE(is_chat(R"("prompt": null, "completion": null, "text": null, "input_ids": null, )"));
  EXPECT_EQ(read_document(R"({"prompt": "a", "completion": "b", "messages": null})", "a.jsonl:7").text, "b");
}

TEST(Chat, TurnsAreFoundWithoutGenerationBlocks) {
  EXPECT_EQ(turns(kPlain, kTwoTurns), "[b</s>][d</s>]");
  EXPECT_EQ(turns(kPlain, R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
      {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "ignored"}]})"),
            "[(f)</s>][b</s>]");
  EXPECT_EQ(turns(kPlain, R"({"messages": [{"role": "user", "content": "a"}]})"), "");
}

// Templates of models that think print a thought in the last turn only.
TEST(Chat, TurnsThatLaterMessagesChange) {
  const std::string text =
      "{% for m in messages %}<{{ m.role }}>"
      "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>{% endif %}{{ m.content }}</s>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}";
  EXPECT_EQ(turns(text, kTwoTurns), "[b</s>][<think>\n\n</think>d</s>]");
  const std::string asks_for_a_thought =
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant><think>\n{% endif %}";
  EXPECT_EQ(turns(asks_for_a_thought, kTwoTurns), "[b</s>][d</s>]");
}

// Models that call tools think again after each result, and their templates print thoughts after the last
// question only.
TEST(Chat, TurnsWithCallsWhoseThoughtsLaterQuestionsRemove) {
  const std::string text =
      "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
      "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>\n"
      "{% if m.thinking and loop.index0 > ns.last %}[{{ m.thinking }}]{% endif %}{{ m.content }}"
      "{% for c in m.tool_calls or [] %}({{ c.name }}){% endfor %}</s>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant>\n{% endif %}";
  const auto line = [](const std::string& content) {
    return R"({"messages": [{"role": "user", "content": "a"},
        {"role": "assistant", "thinking": "t", )" +
           content + R"("tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"},
        {"role": "assistant", "thinking": "t", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "thinking": "t", "content": "d"}]})";
  };
  EXPECT_EQ(turns(text, line(R"("content": "x", )")), "[x(f)</s>][b</s>][[t]d</s>]");
  EXPECT_EQ(turns(text, line(R"("content": "", )")), "[(f)</s>][b</s>][[t]d</s>]");
  EXPECT_EQ(turns(text, line("")), "[(f)</s>][b</s>][[t]d</s>]");
  // Calls may end with a token of their own, as with gpt-oss.
  std::string other = text;
  other.replace(other.find("{% endfor %}</s>"), 16, "{% endfor %}{{ '</call>' if m.tool_calls else '</s>' }}");
  EXPECT_EQ(turns(other, line(R"("content": "x", )")), "[x(f)</call>\n][b</s>][[t]d</s>]");
  expect_error(ErrorKind::input, "that prints the messages before it in another way", [&] {
    turns(text,
          R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", "thinking": "t"},
        {"role": "tool", "content": {"z": 1}}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]})");
  });
}

// The header of an answer may begin with empty lines. It is not a part of the turn.
TEST(Chat, HeadersThatBeginWithEmptyLines) {
  const auto text = [](const std::string& header) {
    return "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% if loop.last %}!{% endif %}</s>"
           "{% else %}" +
           header + "{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}";
  };
  const std::string line = R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})";
  EXPECT_EQ(turns(text("\n### Response:\n"), line), "[b</s>]");
  EXPECT_EQ(turns(text("\n\n### Response:\n"), kTwoTurns), "[b</s>][d</s>]");
  expect_error(ErrorKind::input, "that prints the messages before it in another way",
               [&] { turns(text("\n\n"), line); });
}

// The template of Phi-3 prints the end-of-text token after the last message, unless a prompt follows.
TEST(Chat, AnEndOfTextTokenAfterTheLastMessageAlone) {
  const std::string text =
      "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}";
  EXPECT_EQ(turns(text, R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})"),
            "[b<|end|>\n</s>]");
  EXPECT_EQ(turns(text, kTwoTurns), "[b<|end|>\n][d<|end|>\n</s>]");
  EXPECT_EQ(
      turns(text, R"({"messages": [{"role": "assistant", "content": "</s>"}, {"role": "user", "content": "a"}]})"),
      "[</s>]");
}

// The template of GLM-4.5 prints a thought only until a user's message follows. Calls end without a token of their own.
TEST(Chat, CallsAfterAThoughtThatIsLeftOut) {
  const std::string text =
      "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
      "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
      "{% elif m.role == 'tool' %}<|observation|>\n<response>{{ m.content }}</response>{% else %}<|assistant|>\n<think>"
      "{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>{{ m.content }}"
      "{% for c in m.tool_calls or [] %}<call>{{ c }}</call>{% endfor %}{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>{% endif %}";
  const auto line = [](const std::string& more) {
    return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", "thinking": "t",
            "tool_calls": ["f", "g"]}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"})" +
           more + "]}";
  };
  const std::string calls = "x<call>f</call><call>g</call>]", after = "[\n<think></think>b]";
  EXPECT_EQ(turns(text, line("")), "[\n<think>t</think>" + calls + after);
  const std::string question = R"(, {"role": "user", "content": "c"})";
  EXPECT_EQ(turns(text, line(question)), "[\n<think></think>" + calls + after);
  EXPECT_EQ(turns(text, line(question + R"(, {"role": "assistant", "content": "d"})")),
            "[\n<think></think>" + calls + after + "[\n<think></think>d]");
}

// In the templates of Gemma 4 an answer to the result of a tool has no header. They end turns with another token than
// that of the tokenizer, and print a thought only until a user's message follows.
TEST(Chat, AnswersWithoutAHeaderAfterAThoughtThatIsLeftOut) {
  const std::string text =
      "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
      "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
      "{% if m.role == 'user' or messages[loop.index0 - 1].role == 'user' %}<turn>{{ m.role }}\n{% endif %}"
      "{% if m.reasoning_content and loop.index0 > ns.last %}<thought>{{ m.reasoning_content }}</thought>{% endif %}"
      "{% for c in m.tool_calls or [] %}<call>{{ c }}</call>{% endfor %}{{ m.content }}"
      "{% if not m.tool_calls %}</turn>{% endif %}{% endif %}{% endfor %}"
      "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}";
  const auto line = [](const std::string& more) {
    return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "thinking": "t",
            "tool_calls": ["f"]}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "b"})" +
           more + "]}";
  };
  EXPECT_EQ(turns(text, line("")), "[<thought>t</thought><call>f</call>][b</turn>]");
  const std::string question = R"(, {"role": "user", "content": "c"})";
  EXPECT_EQ(turns(text, line(question)), "[<call>f</call>][b</turn>]");
  EXPECT_EQ(turns(text, line(question + R"(, {"role": "assistant", "content": "d"})")),
            "[<call>f</call>][b</turn>][d</turn>]");
}

// The templates of Gemma 4 print the results of tools between the calls of a turn and its content. With the later
// ones an answer after the results continues the turn, and the turn ends once.
TEST(Chat, ResultsOfToolsInsideATurn) {
  const auto text = [](const std::string& end_before_an_answer) {
    return "{% for m in messages %}{% if m.role == 'user' %}<turn>user\n{{ m.content }}</turn>"
           "{% elif m.role == 'assistant' %}{% set next = messages[loop.index0 + 1] | default({}) %}"
           "{% if messages[loop.index0 - 1].role == 'user' %}<turn>assistant\n{% endif %}"
           "{% for c in m.tool_calls or [] %}<call>{{ c }}</call>{% endfor %}"
           "{% if next.role == 'tool' %}<response>{{ next.content }}</response>{% endif %}{{ m.content }}"
           "{% if m.tool_calls and next.role != 'tool' %}<response>{% elif next.role == 'tool' and loop.index0 + 2 < messages | length and "
           "messages[loop.index0 + 2].role == 'assistant' %}" +
           end_before_an_answer +
           "{% else %}</turn>{% endif %}{% endif %}{% endfor %}"
           "{% if add_generation_prompt and messages[-1].role != 'tool' %}<turn>assistant\n{% endif %}";
  };
  const auto line = [](const std::string& more) {
    return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", "tool_calls": ["f"]},
              {"role": "tool", "content": "r"})" +
           more + "]}";
  };
  const std::string answer = R"(, {"role": "assistant", "content": "b"})",
                    question = R"(, {"role": "user", "content": "c"})";
  const std::string calls = "[<call>f</call><response>]";
  for (const char* end : {"</turn>", ""}) {
    const std::string x = fmt::format("[x{}]", end);
    EXPECT_EQ(turns(text(end), line("")), calls + "[x</turn>]");
    EXPECT_EQ(turns(text(end), line(question)), calls + "[x</turn>]");
    EXPECT_EQ(turns(text(end), line(answer)), calls + x + "[b</turn>]");
    EXPECT_EQ(turns(text(end), line(answer + question + answer)), calls + x + "[b</turn>][b</turn>]");
  }
}

TEST(Chat, TurnsThatCannotBeFoundAreRefused) {
  const auto refuse = [](const std::string& text, const std::string& message) {
    expect_error(ErrorKind::input, message, [&] { turns(text, kTwoTurns); });
  };
  refuse("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
         "a.jsonl:7: expected to find the assistant's message 1 in the text of the chat; got a template without {% "
         "generation %} that prints the messages before it in another way");
  refuse("{% for m in messages %}{{ loop.revindex if m.role == 'assistant' else m.content }}{% endfor %}",
         "that does not print its content");
}

TEST(Chat, GenerationInAMacroIsFoundByTurns) {
  const std::string text =
      "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
      "{% for m in messages %}<{{ m.role }}>{{ say(m) }}</s>\n{% endfor %}"
      "{% if add_generation_prompt %}<assistant>{% endif %}";
  EXPECT_EQ(turns(text, kTwoTurns), "[b</s>][d</s>]");
}

TEST(Chat, AWeightOfZeroExcludesATurn) {
  const auto line = [](const char* first, const char* second) {
    return fmt::format(R"({{"messages": [{{"role": "user", "content": "a", "weight": 0}},
        {{"role": "assistant", "content": "b", "weight": {}}}, {{"role": "user", "content": "c"}},
        {{"role": "assistant", "content": "d", "weight": {}}}]}})",
                       first, second);
  };
  const std::string marked =
      "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
      "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}";
  for (const std::string& text : {std::string(kPlain), marked}) {
    EXPECT_EQ(turns(text, line("0", "1")), "[d</s>]");
    EXPECT_EQ(turns(text, line("1", "0")), "[b</s>]");
    EXPECT_EQ(turns(text, line("null", "1")), "[b</s>][d</s>]");
    EXPECT_EQ(turns(text, line("0", "0")), "");
  }
  expect_error(ErrorKind::input, "a.jsonl:7: expected a \"weight\" of 0 or 1 in a message",
               [&] { turns(kPlain, line("0.5", "1")); });
  // Two blocks of the first answer and none of the second are as many as there are answers.
  expect_error(ErrorKind::input, "expected one {% generation %} for each of 2 messages of the assistant", [&] {
    turns(
        "{% for m in messages %}{% if loop.index == 2 %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% generation %}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        line("0", "1"));
  });
  expect_error(ErrorKind::input, "expected one {% generation %} for each of 2 messages of the assistant",
               [&] { turns("{% generation %}{{ messages | length }}{% endgeneration %}", line("0", "1")); });
}

TEST(Chat, ConversationsInTheFormOfShareGpt) {
  const std::string plain = "[b</s>][d</s>]";
  EXPECT_EQ(turns(kPlain, R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                                {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]})"),
            plain);
  EXPECT_EQ(turns(kPlain, R"({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                              {"from": "tool", "value": "c"}, {"from": "gpt", "value": "e", "weight": 0},
                              {"role": "assistant", "content": "d"}]})"),
            plain);
  EXPECT_EQ(turns(kPlain, R"({"messages": null, "conversations": [{"from": "human", "role": null, "value": "a"},
                              {"from": "gpt", "role": "assistant", "value": "b"}]})"),
            "[b</s>]");
  const Chat chat = chat_of(R"({"system": "s", "conversations": [{"from": "human", "value": "a"}]})");
  ASSERT_EQ(chat.messages.size(), 2u);
  EXPECT_EQ(role_of(chat.messages[0]), "system");
  EXPECT_EQ(chat.messages[0].dict().find(std::string("content"))->text(), "s");
  const auto refuse = [](const std::string& line, const std::string& message) {
    expect_error(ErrorKind::input, "a.jsonl:7: " + message, [&] { chat_of(line); });
  };
  refuse(R"({"conversations": []})", "expected \"messages\" with a list of at least one message; got an empty list");
  refuse(R"({"conversations": "x"})", "expected \"messages\" with a list of at least one message; got string");
  refuse(
      R"({"conversations": [{"from": "wizard", "value": "a"}]})",
      "expected \"from\" of human, user, gpt, assistant, system, tool or observation, and a string \"value\"; got {");
  refuse(R"({"conversations": [{"from": "gpt"}]})",
         "expected \"from\" of human, user, gpt, assistant, system, tool or observation");
  refuse(R"({"conversations": [{"from": 1, "value": "a"}]})",
         "expected \"from\" of human, user, gpt, assistant, system, tool or observation");
  refuse(R"({"system": "s", "conversations": [{"from": "system", "value": "a"}]})", "expected one text of the system");
  refuse(R"({"system": ["s"], "conversations": [{"from": "human", "value": "a"}]})",
         "expected a string in \"system\" next to \"conversations\"; got [\"s\"]");
  refuse(R"({"conversations": [1]})", "expected each of \"messages\" to be an object with a string \"role\"; got 1");
}

TEST(Chat, TheTemplateGetsTheVariablesOfTransformers) {
  const ChatFolder folder(
      "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ fast }}"
      "{{ messages[0].content is defined }}{{ messages[0] | tojson }}",
      R"({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>"})");
  const Chat chat = chat_of(R"({"messages": [{"role": "user", "content": null, "z": 1, "a": 2}], "tools": null,
                                "chat_template_kwargs": {"fast": 3}, "other": 4})");
  EXPECT_EQ(folder.open().render(chat, 1, false).text, R"(<s></s>TrueTrue3False{"role": "user", "z": 1, "a": 2})");
}

// transformers 5.24 gives a template the thoughts of a message under two names, of three that the message may use.
TEST(Chat, ThoughtsHaveTheNamesThatTemplatesRead) {
  const ChatFolder folder("{{ messages[0] | tojson }}", "{}");
  const auto text = [&](const std::string& keys) {
    return folder.open().render(chat_of(R"({"messages": [{"role": "assistant", )" + keys + "}]}"), 1, false).text;
  };
  const std::string both = R"({"thinking": "t", "role": "assistant", )";
  EXPECT_EQ(text(R"("reasoning_content": "t", "z": 1)"), both + R"("reasoning_content": "t", "z": 1})");
  EXPECT_EQ(text(R"("thinking": "t", "z": 1)"), both + R"("z": 1, "reasoning_content": "t"})");
  EXPECT_EQ(text(R"("reasoning": "t")"), both + R"("reasoning": "t", "reasoning_content": "t"})");
  EXPECT_EQ(text(R"("reasoning_content": null, "thinking": null, "z": 1)"), R"({"role": "assistant", "z": 1})");
  EXPECT_EQ(text(R"("thinking": "t", "reasoning_content": "r")"), both + R"("reasoning_content": "r"})");
}

TEST(Chat, TemplatesOfAFolder) {
  const TestDir dir;
  const Chat plain = chat_of(R"({"messages": [{"role": "user"}]})"),
             tools = chat_of(R"({"messages": [{"role": "user"}], "tools": [1]})");
  const auto text = [&](const Chat& chat) { return ChatTemplate::open(dir.path(), {}).render(chat, 1, false).text; };
  expect_error(ErrorKind::input,
               "expected a chat_template.jinja, or chat_template in tokenizer_config.json; got neither",
               [&] { text(plain); });
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"chat_template": "one"})");
  EXPECT_EQ(text(plain), "one");
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"chat_template": [
      {"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "rag", "template": "{{"}]})");
  EXPECT_EQ(text(plain) + text(tools), "DT");
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"chat_template": [{"name": "tool_use", "template": "T"}]})");
  expect_error(ErrorKind::input, "a.jsonl:7: expected tools", [&] { text(plain); });
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"chat_template": {"a": 1}})");
  expect_error(ErrorKind::input, "expected a template, or a list of them; got object; correct the file",
               [&] { text(plain); });
  write_file_atomic(dir.path("chat_template.jinja"), "a\n{% if %}");
  expect_error(ErrorKind::input, "chat_template.jinja:2: ", [&] { text(plain); });
  write_file_atomic(dir.path("chat_template.jinja"), "file");
  EXPECT_EQ(text(plain), "file");
}

TEST(Chat, ARefusalNamesTheLine) {
  const ChatTemplate chat_template = ChatFolder(kPlain).open();
  const Chat chat = chat_of(R"({"messages": [{"role": "narrator", "content": "x"}]})");
  expect_error(ErrorKind::input, "a.jsonl:7: expected a chat that the template takes; got from ",
               [&] { chat_template.render(chat, 1, false); });
  expect_error(ErrorKind::input, "no role narrator", [&] { chat_template.render(chat, 1, false); });
}

TEST(Chat, LinesWithoutAValidChatAreRefused) {
  const auto refuse = [](const std::string& line, const std::string& message) {
    expect_error(ErrorKind::input, "a.jsonl:7: " + message, [&] { chat_of(line); });
  };
  refuse("[]", "expected \"messages\" with a list of at least one message; got none");
  refuse("{}", "expected \"messages\" with a list of at least one message; got none");
  refuse(R"({"messages": []})", "expected \"messages\" with a list of at least one message; got an empty list");
  refuse(R"({"messages": "x"})", "expected \"messages\" with a list of at least one message; got string");
  refuse(R"({"messages": [1]})", "expected each of \"messages\" to be an object with a string \"role\"; got 1 at 0");
  refuse(R"({"messages": [{"role": 1}]})", "expected each of \"messages\" to be an object with a string \"role\"");
  refuse(R"({"messages": [{"role": "a"}], "tools": "[]"})", "expected a list in \"tools\"; got string");
  refuse(R"({"messages": [{"role": "a"}], "chat_template_kwargs": 1})",
         "expected an object in \"chat_template_kwargs\"; got number");
  for (const char* own : {"messages", "tools", "documents", "add_generation_prompt"})
    refuse(fmt::format(R"({{"messages": [{{"role": "a"}}], "chat_template_kwargs": {{"{}": []}}}})", own),
           fmt::format("expected further variables of the template; got \"{}\", which the chat sets", own));
  refuse(R"({"messages": [{"role": "a"}], "conversations": [{"from": "human", "value": "b"}]})",
         "expected a list in \"messages\" or in \"conversations\"; got both; drop one of them");
  refuse(R"({"messages": [{"role": "a", "role": "b"}]})", "expected JSON");
}

// The last character has several ids, and the first one is a space.
TEST(Chat, TargetsIncludeAllTokensOfTheFirstAndLastCharacter) {
  const TestDir dir;
  std::filesystem::copy_file(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/llama3/tokenizer.json",
                             dir.path("tokenizer.json"));
  write_file_atomic(dir.path("chat_template.jinja"),
                    "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}");
  const auto tokenizer = open_tokenizer(dir.path(), {.parse_special = true, .add_special = false});
  const ChatIds made =
      chat_ids(ChatTemplate::open(dir.path(), {}), *tokenizer,
               chat_of("{\"messages\": [{\"role\": \"assistant\", \"content\": \" a \xF0\x9F\x91\xA9\"}]}"));
  std::vector<int32_t> learned;
  for (size_t i = 0; i < made.ids.size(); ++i)
    if (made.is_target[i]) learned.push_back(made.ids[i]);
  EXPECT_EQ(tokenizer->decode(learned), " a \xF0\x9F\x91\xA9");
  EXPECT_EQ(learned.size(), made.ids.size() - 2);
}

// Bytes, so that each byte of the text is an id.
TEST(Chat, TargetsAreTheIdsOfTheTurns) {
  const ChatTemplate chat_template = ChatFolder(kPlain).open();
  const ChatIds made = chat_ids(chat_template, *open_tokenizer("bytes"), chat_of(kTwoTurns));
  std::string text, learned;
  for (size_t i = 0; i < made.ids.size(); ++i) {
    text += static_cast<char>(made.ids[i]);
    if (made.is_target[i]) learned += static_cast<char>(made.ids[i]);
  }
  EXPECT_EQ(text, "<user>a</s>\n<assistant>b</s>\n<user>b</s>\n<assistant>d</s>\n");
  EXPECT_EQ(learned, "b</s>d</s>");
}

}  // namespace
}  // namespace moebius
