// Chats from lines of messages to answers: data build, train, generate, chat.
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "tests/cli/finetune.h"

namespace moebius {
namespace {

constexpr const char* kTemplate = R"({%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
)";
constexpr const char* kLine =
    R"({"messages": [{"role": "user", "content": "day"}, {"role": "assistant", "content": "night"}]})"
    "\n";
constexpr const char* kOther =
    R"({"messages": [{"role": "user", "content": "light"}, {"role": "assistant", "content": "the end"}]})"
    "\n";
const std::vector<std::string> kGreedy{"--temperature", "0", "--max-tokens", "8"};

class Chats : public FineTune {
 protected:
  void SetUp() override {
    FineTune::SetUp();
    write_file_atomic(dir_.path(kModelFolder + "/tokenizer_config.json"), R"({"eos_token": "<|im_end|>"})");
    write_file_atomic(dir_.path(kModelFolder + "/chat_template.jinja"), kTemplate);
    write_file_atomic(dir_.path("chats.jsonl"), std::string(kLine) + kOther);
  }
  Ran start(std::vector<std::string> words, const std::vector<std::string>& more, const std::string& input = "") {
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir_, words, input);
  }
  Ran build(const std::vector<std::string>& more = {}) {
    return start({"data", "build", "--input", "chats.jsonl", "--tokenizer", kModelFolder, "--out",
                  "runs/tuned/data/pairs", "--force"},
                 more);
  }
};

TEST_F(Chats, AnAdapterGivesTheTrainedAnswers) {
  build();
  run_guide("train", {"--set", "train.freeze=[]", "--set", "moe.balance=\"none\"", "--set", "moe.aux_coeff=0", "--set",
                      "lora.rank=8", "--set", "lora.alpha=32", "--set", "lora.targets=[\"*\"]"});
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  const std::string answers = start({"chat", "runs/tuned"}, kGreedy, "day\nlight\n").out;
  EXPECT_EQ(answers.substr(0, 6), "night\n");
  EXPECT_EQ(start({"chat", kModelFolder, "--adapter", "Adapter"}, kGreedy, "day\nlight\n").out, answers);
  EXPECT_NE(start({"chat", kModelFolder}, kGreedy, "day\nlight\n").out, answers);
}

TEST_F(Chats, TunedModelGivesTheTrainedAnswers) {
  EXPECT_THAT(build().out, testing::HasSubstr("2 documents, "));
  run_guide("train");
  run_guide("export");
  const auto chat = [&](const std::string& input, const std::vector<std::string>& more = {}) {
    std::vector<std::string> words{"chat", "Tuned"};
    words.insert(words.end(), more.begin(), more.end());
    return start(words, kGreedy, input);
  };
  // The last line has no end, and an empty one is no message.
  const Ran ran = chat("day\n\n/reset\nlight");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, "night\nthe end\n");
  EXPECT_THAT(ran.err, testing::HasSubstr(" tokens/s; prompts of "));
  EXPECT_EQ(chat("day\r\n/exit\nlight\n").out, "night\n");
  EXPECT_EQ(chat("day\n", {"--stop", "ht"}).out, "nig\n");
  EXPECT_EQ(chat("").out, "");
  EXPECT_EQ(chat("").code, 0);
  const auto fed = [&](const std::vector<std::string>& more) {
    const std::string err = chat("/reset\nday\n", more).err;
    return std::stoi(err.substr(err.find("prompts of ") + 11));
  };
  EXPECT_GT(fed({"--system", "the light of day"}), fed({}));
  // A run answers like the folder that it was exported to.
  EXPECT_EQ(start({"chat", "runs/tuned"}, kGreedy, "day\n").out, "night\n");
  // Its sampling is that of the folder that it began with.
  write_file_atomic(dir_.path(kModelFolder + "/generation_config.json"), R"({"temperature": 1000})");
  const Ran drawn = start({"chat", "runs/tuned", "--max-tokens", "8"}, {}, "day\n");
  EXPECT_NE(drawn.out, "night\n");
  EXPECT_THAT(drawn.err, testing::HasSubstr("the model's generation_config.json sets temperature 1000; options"));
  EXPECT_EQ(start({"chat", "runs/tuned", "--max-tokens", "8"}, {"--temperature", "0"}, "day\n").out, "night\n");

  write_file_atomic(dir_.path("asked.jsonl"),
                    R"({"messages": [{"role": "user", "content": "light"}]})"
                    "\n{\"prompt\": \"<|im_start|>user\\nday<|im_end|>\\n<|im_start|>assistant\\n\"}\n");
  const Ran answers = start({"generate", "Tuned", "--prompts", "asked.jsonl", "--json"}, kGreedy);
  std::istringstream lines(answers.out);
  std::vector<std::string> texts;
  for (std::string line; std::getline(lines, line);) texts.push_back(nlohmann::json::parse(line).at("text"));
  EXPECT_EQ(texts, (std::vector<std::string>{"the end", "night"})) << answers.err;
}

// Each ends the command, because standard input is no terminal.
TEST_F(Chats, InvalidMessagesAreRefused) {
  const auto chat = [&](const std::vector<std::string>& more, const std::string& input) {
    return start({"chat", kModelFolder, "--temperature", "0", "--max-tokens", "4"}, more, input);
  };
  expect_refused(chat({"--context", "0"}, "day\n"), 2, "--context: expected at least 1; got 0");
  expect_refused(chat({"--context", "8"}, "day\n"), 2,
                 "chat: expected a conversation of fewer than 8 tokens; got 15; /reset forgets it");
  expect_refused(chat({}, "day \xff\n"), 3, "chat: message:5: expected UTF-8; got byte 0xff");
  expect_refused(chat({"--stop", ""}, "day\n"), 2, "expected stop strings of at least one character");
  expect_refused(chat({"--chat-template-kwargs", "[1]"}, "day\n"), 2,
                 "chat --chat-template-kwargs: expected an object, such as {\"enable_thinking\": false}; got [1]");
  expect_refused(chat({"--chat-template-kwargs", "{a: 1}"}, "day\n"), 2, "--chat-template-kwargs: expected JSON");
  write_file_atomic(dir_.path(kModelFolder + "/chat_template.jinja"),
                    "{% if enable_thinking %}{{ raise_exception('thinks') }}{% endif %}{{ messages[0].content }}");
  EXPECT_EQ(chat({"--chat-template-kwargs", "{\"enable_thinking\": false}"}, "day\n/reset\nday\n").code, 0);
  expect_refused(chat({"--chat-template-kwargs", "{\"enable_thinking\": true}"}, "day\n"), 3, "thinks");
  write_file_atomic(dir_.path(kModelFolder + "/chat_template.jinja"), "{{ messages[1].role }}");
  expect_refused(chat({}, "day\n"), 3, kModelFolder + "/chat_template.jinja:1: ");
  write_file_atomic(dir_.path(kModelFolder + "/chat_template.jinja"), "{% for m in messages %}");
  expect_refused(chat({}, "day\n"), 3, kModelFolder + "/chat_template.jinja:1: ");
  std::filesystem::remove(dir_.path(kModelFolder + "/chat_template.jinja"));
  expect_refused(chat({}, "day\n"), 3, "expected a chat_template.jinja, or chat_template in tokenizer_config.json");
  expect_refused(chat({"--tokenizer", "bytes"}, "day\n"), 3,
                 "chat: expected a tokenizer with a chat template; got \"bytes\"");
}

// `moebius chat` with a terminal as its standard input, and a pipe of one page as its standard output.
class ChatInTerminal {
 public:
  ChatInTerminal(const std::string& dir, std::vector<std::string> words) {
    int out[2];
    if (::pipe(out) != 0) ADD_FAILURE() << "no pipe";
    ::fcntl(out[1], F_SETPIPE_SZ, 4096);
    words.insert(words.begin(), built_program("moebius"));
    std::vector<char*> args;
    for (std::string& word : words) args.push_back(word.data());
    args.push_back(nullptr);
    pid_ = ::forkpty(&terminal_, nullptr, nullptr, nullptr);
    if (pid_ == 0) {
      ::signal(SIGINT, SIG_DFL);  // nohup and shells may have ignored it
      ::dup2(out[1], STDOUT_FILENO);
      if (::chdir(dir.c_str()) == 0) ::execv(args[0], args.data());
      ::_exit(126);
    }
    from_ = out[0];
    to_ = out[1];
  }
  ~ChatInTerminal() {
    for (const int fd : {terminal_, from_, to_}) ::close(fd);
  }

  void type(const std::string& text) { EXPECT_EQ(::write(terminal_, text.data(), text.size()), std::ssize(text)); }
  // Reads standard output, or the terminal, until it has this. Returns what it read before.
  std::string await(const std::string& text) { return await(from_, text); }
  std::string await_in_terminal(const std::string& text) { return await(terminal_, text); }
  // Fills the pipe, so that the program waits at its next output until `await` reads again.
  void fill() {
    ::fcntl(to_, F_SETFL, O_NONBLOCK);
    while (::write(to_, ".", 1) == 1) {
    }
    ::fcntl(to_, F_SETFL, 0);
  }
  // Waits until a line of the program's status in /proc has Ctrl-C in its set of signals.
  void await_signal_in(const std::string& line) const {
    constexpr uint64_t kInterrupt = 1u << (SIGINT - 1);
    for (int i = 0; i < 60000 && !has_ended(); ++i) {  // a minute, and more on a busy machine
      std::ifstream file(fmt::format("/proc/{}/status", pid_));
      const std::string status(std::istreambuf_iterator<char>(file), {});
      const size_t at = status.find(line);
      if (at != status.npos && (std::stoull(status.substr(at + line.size()), nullptr, 16) & kInterrupt)) return;
      ::usleep(1000);
    }
    ADD_FAILURE() << "Ctrl-C never came into " << line;
  }
  // Returns what waitpid says.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return status;
  }

 private:
  std::string await(int fd, const std::string& text) const {
    std::string got;
    while (!got.ends_with(text)) {
      pollfd output{fd, POLLIN, 0};
      char c;
      if (::poll(&output, 1, 100) > 0 && ::read(fd, &c, 1) == 1) {
        got += c;
      } else if (has_ended()) {
        ADD_FAILURE() << "the program ended before it wrote " << text;
        return got;
      }
    }
    return got.substr(0, got.size() - text.size());
  }
  bool has_ended() const {
    siginfo_t info = {};
    return ::waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == pid_;
  }

  pid_t pid_ = 0;
  int terminal_ = -1, from_ = -1, to_ = -1;
};

TEST_F(Chats, CtrlCEndsAnAnswerAndAtThePromptTheProgram) {
  const std::vector<std::string> words{"chat", kModelFolder, "--temperature", "0", "--max-tokens", "40"};
  const std::string whole = start(words, {}, "day\n").out;
  ChatInTerminal chat(dir_.path(""), words);
  chat.await("> ");
  chat.fill();
  chat.type("day\n");
  chat.await_signal_in("SigCgt:");  // it answers, and waits for the pipe
  chat.type("\x03");
  chat.await_in_terminal("^C");                // the terminal sends the signal before it shows this
  const std::string cut = chat.await("\n> ");  // the conversation continues
  const std::string answer = cut.substr(std::min(cut.size(), cut.find_first_not_of('.')));
  EXPECT_THAT(whole, testing::StartsWith(answer));
  EXPECT_LT(answer.size() + 1, whole.size()) << answer;
  chat.type("/exit\n");
  EXPECT_EQ(chat.wait(), 0);

  ChatInTerminal other(dir_.path(""), {"chat", kModelFolder});
  other.await("> ");
  other.type("\x03");
  const int status = other.wait();
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST_F(Chats, PromptFileEqualsSinglePrompts) {
  std::string file;
  for (int i = 0; i < 9; ++i) file += std::string(static_cast<size_t>(i % 4 + 1), 'a') + " day\n";
  write_file_atomic(dir_.path("prompts.txt"), file + "\r\n \n");
  const auto generate = [&](const std::vector<std::string>& more) {
    return start({"generate", kModelFolder, "--max-tokens", "9"}, more);
  };
  const auto draw = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--top-k", "9", "--min-p", "0.01", "--repetition-penalty", "1.2"});
    return generate(more);
  };

  const Ran all = draw({"--prompts", "prompts.txt"});
  EXPECT_EQ(all.code, 0) << all.err;
  std::string alone;
  for (int i = 0; i < 9; ++i)
    alone += draw({"--prompt", std::string(static_cast<size_t>(i % 4 + 1), 'a') + " day"}).out;
  EXPECT_EQ(all.out, alone);
  EXPECT_EQ(draw({"--prompts", "prompts.txt", "--batch", "2"}).out, alone);
  EXPECT_EQ(draw({"--prompts", "prompts.txt", "--threads", "2"}).out, alone);

  const std::vector<std::pair<std::string, std::string>> refused{
      {"\n\n", "p.jsonl: expected a prompt on each line; got none"},
      {"{\"prompt\": 3}\n", "p.jsonl:1: expected an object with a string \"prompt\", or with a chat in \"messages\""},
      {"\n{\"prompt\": \n", "p.jsonl:2: expected JSON"},
      {"{\"messages\": []}\n", "p.jsonl:1: expected \"messages\" with a list of at least one message; got an empty"},
      {"{\"messages\": [{\"role\": \"tool\", \"content\": \"x\"}]}\n", "the template refuses this: no role tool"},
      {"{\"prompt\": \"a\", \"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n",
       "p.jsonl:1: expected a prompt or a chat; got both, and either could be meant; drop one of them"},
      {"{\"prompt\": \"\xff\"}\n", "p.jsonl:1:13: expected UTF-8; got byte 0xff"},
  };
  for (const auto& [text, message] : refused) {
    write_file_atomic(dir_.path("p.jsonl"), text);
    expect_refused(generate({"--prompts", "p.jsonl"}), 3, message);
  }
  write_file_atomic(dir_.path("bytes.txt"), "a day\n\nb \xff\n");
  expect_refused(generate({"--prompts", "bytes.txt"}), 3,
                 "bytes.txt:3:3: expected UTF-8; got byte 0xff; correct or drop the line");
  write_file_atomic(dir_.path("long.txt"), "a day\n\n" + std::string(60, 'a') + "\n");
  expect_refused(generate({"--prompts", "long.txt"}), 2,
                 "generate: prompt 2: prompt and continuation must fit the context of 64 tokens; got 60 + 9");
  expect_refused(generate({"--prompts", "none.txt"}), 3, "open none.txt: No such file or directory");
  expect_refused(generate({}), 2, "generate: expected --prompt TEXT or --prompts FILE; got neither");
  expect_refused(generate({"--prompt", "a", "--batch", "33"}), 2, "--batch");
  expect_refused(generate({"--prompt", "a", "--top-k", "-1"}), 2, "top-k must be 0 or more; got -1");
  expect_refused(generate({"--prompt", "a", "--min-p", "2"}), 2, "min-p must be in [0, 1]; got 2");
  expect_refused(generate({"--prompt", "a", "--repetition-penalty", "0"}), 2, "repetition-penalty must be above 0");
}

// A text is in the output as soon as it has ended, while the texts after it are generated.
TEST_F(Chats, EachObjectIsPrintedWhenItsTextHasEnded) {
  std::string file;
  for (int i = 0; i < 4000; ++i) file += "a day\n";
  write_file_atomic(dir_.path("prompts.txt"), file);
  const std::string command =
      "cd " + quoted(dir_.path()) + "; " + quoted(built_program("moebius")) + " generate " + kModelFolder +
      " --prompts prompts.txt --batch 1 --max-tokens 40 --json > texts 2> err & p=$!; for i in $(seq 3000); do [ -s "
      "texts ] && break; sleep 0.01; done; kill -STOP $p; wc -l < texts > lines; tail -c 1 texts | od -An -c > last; "
      "kill -KILL $p";
  std::system(("bash -c " + moebius::quoted(command)).c_str());
  const int64_t lines = std::stoll(read_file(dir_.path("lines")));
  EXPECT_GE(lines, 1);
  EXPECT_THAT(read_file(dir_.path("last")), testing::HasSubstr("\\n")) << "a text is printed in parts";
}

// The commands of the guide about adapters, in their order, and the recipe that they name, for a small model.
TEST_F(Chats, TheGuideAdaptsAModelToChats) {
  std::filesystem::create_directory_symlink(MOEBIUS_SOURCE_DIR "/recipes", dir_.path("recipes"));
  const std::vector<std::string> small{"run.device=cpu",
                                       "train.steps=4",
                                       "train.global_batch=4",
                                       "train.seq_len=48",
                                       "model.vocab_size=640",
                                       "model.hidden_size=32",
                                       "model.num_attention_heads=4",
                                       "model.num_hidden_layers=2",
                                       "model.num_experts=4",
                                       "model.head_dim=8",
                                       "model.num_key_value_heads=2",
                                       "model.num_experts_per_tok=2",
                                       "model.rope_theta=1e4",
                                       "optimizer.warmup_steps=0",
                                       "model.intermediate_size=48",
                                       "model.moe_intermediate_size=24",
                                       "model.max_position_embeddings=64"};
  std::istringstream section(guide_section("\n## Adapters\n"));
  int done = 0;
  for (std::string line; std::getline(section, line);) {
    if (!line.starts_with("build/moebius ")) continue;
    std::istringstream text(line.substr(std::strlen("build/moebius ")));
    std::vector<std::string> words{std::istream_iterator<std::string>(text), {}};
    std::erase(words, "--device");
    std::erase(words, "cuda");
    if (words[0] == "train")
      for (const std::string& set : small) words.insert(words.end(), {"--set", set});
    const Ran ran = start(words, words[0] == "chat" ? kGreedy : std::vector<std::string>{}, "day\n");
    EXPECT_EQ(ran.code, 0) << line << ": " << ran.err;
    ++done;
  }
  EXPECT_EQ(done, 8);
  for (const char* made : {"Adapter/adapter_config.json", "Tuned/config.json", "Merged/manifest.json"})
    EXPECT_TRUE(std::filesystem::exists(dir_.path(made))) << made;
}

TEST_F(Chats, DataShowMarksTokensWithALoss) {
  build();
  const std::vector<std::string> words{"data", "show", "runs/tuned/data/pairs"};
  EXPECT_EQ(start(words, {"--count", "9", "--document", "1"}).out,
            "document 1: 21 tokens\n"
            "  no loss  \"<|im_start|>user\\nlight<|im_end|>\\n<|im_start|>assistant\\n\"\n"
            "  loss     \"the end<|im_end|>\"\n"
            "  no loss  \"\\n\"\n");
  const auto json = json_of(start(words, {"--json", "--max-tokens", "2"}));
  EXPECT_EQ(json.at("document"), 0);
  EXPECT_EQ(json.at("parts").size(), 1u);
  EXPECT_EQ(json.at("parts")[0].at("ids").size(), 2u);
  EXPECT_EQ(json.at("parts")[0].at("loss"), false);
  EXPECT_THAT(start(words, {"--max-tokens", "1"}).out, testing::EndsWith(" more tokens\n"));
  expect_refused(start(words, {"--document", "2"}), 2, "expected --document from 0 to 1, the documents of runs/tuned");
  expect_refused(start(words, {"--count", "0"}), 2, "--count: expected at least 1; got 0");
  expect_refused(start(words, {"--tokenizer", "bytes"}), 3, "expected the tokenizer that built the dataset");
  std::filesystem::remove(dir_.path("runs/tuned/data/pairs.json"));
  expect_refused(start(words, {}), 2, "data show: expected --tokenizer, since there is no runs/tuned/data/pairs.json");
}

TEST_F(Chats, ARunWhoseTokenizerHasMovedAsksForIt) {
  EXPECT_THAT(run({"export", "base", "Plain"}).err,
              testing::HasSubstr("Plain has no tokenizer; --files tokenizer copies the tokenizer and other files"));
  std::filesystem::rename(dir_.path("tokenizer"), dir_.path("moved"));
  expect_refused(start({"generate", "base", "--prompt", "a"}, kGreedy), 3,
                 "generate: expected the tokenizer of base in tokenizer; got nothing there (a relative path is "
                 "relative to the folder that the command runs in); give --tokenizer DIR");
  EXPECT_EQ(start({"generate", "base", "--prompt", "a", "--tokenizer", "moved"}, kGreedy).code, 0);
}

TEST_F(Chats, AnImportedModelHasItsTokenizer) {
  EXPECT_EQ(start({"import", kModelFolder, "imported"}, {}).code, 0);
  const Ran ran = start({"chat", "imported"}, kGreedy, "day\n");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, start({"chat", kModelFolder}, kGreedy, "day\n").out);
}

// Many models for chats have no end-of-document token, and their chats need none.
TEST_F(Chats, DataShowWorksWithoutAnEndOfDocumentToken) {
  for (const char* file : {"tokenizer_config.json", "config.json"}) {
    const std::string path = dir_.path(kModelFolder + "/" + file);
    auto object = nlohmann::json::parse(read_file(path));
    object.erase("eos_token");
    object.erase("eos_token_id");
    write_file_atomic(path, object.dump());
  }
  EXPECT_EQ(build().code, 0);
  const Ran ran = start({"data", "show", "runs/tuned/data/pairs", "--document", "1"}, {});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, testing::HasSubstr("loss     \"the end<|im_end|>\\n\"\n"));
}

TEST_F(Chats, DocumentsThatAreCutAreCounted) {
  const auto info = json_of(build({"--seq-len", "19", "--json"}));
  EXPECT_EQ(info.at("documents"), 2);
  EXPECT_EQ(info.at("cut"), 1) << info;
  EXPECT_EQ(info.at("longest"), 21);
  expect_refused(build({"--seq-len", "0"}), 2, "--seq-len: expected at least 1; got 0");
  EXPECT_THAT(build({"--seq-len", "19"}).out, testing::HasSubstr("; 1 document does not fit sequences of 19"));
  const std::string cut = "; 1 of 2 documents is longer than train.seq_len + 1 = 20 tokens and is cut";
  EXPECT_THAT(run_guide("train", {"--set", "train.seq_len=19", "--set", "train.steps=1"}).err, testing::HasSubstr(cut));
  EXPECT_THAT(run_guide("train", {"--set", "run.dir=other", "--set", "train.steps=1"}).err,
              testing::Not(testing::HasSubstr("are cut")));
}

}  // namespace
}  // namespace moebius
