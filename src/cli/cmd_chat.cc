#include <fmt/core.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "cli/command.h"
#include "cli/generation/options.h"
#include "cli/options.h"
#include "data/document.h"
#include "infer/text_stream.h"
#include "weights/load.h"
#include "weights/not_finite.h"

namespace moebius {
namespace {

struct Options : GenerationOptions {
  std::string system, template_kwargs;
  int64_t context = 4096;
};

TemplateVariables template_variables(const Options& o) {
  if (o.template_kwargs.empty()) return {};
  try {
    return read_template_variables(o.template_kwargs, "chat --chat-template-kwargs");
  } catch (const Error& error) {
    throw Error(ErrorKind::usage, error.what());
  }
}

// Static storage, since a signal handler can use nothing else.
std::atomic<int> num_interrupts{0};
static_assert(std::atomic<int>::is_always_lock_free);

void on_interrupt(int signal) {
  if (++num_interrupts > 1) std::_Exit(128 + signal);
}

// While an object exists, the first Ctrl-C is only noted. The second ends the program at once.
class NotedInterrupt {
 public:
  NotedInterrupt() {
    num_interrupts = 0;
    struct sigaction action = {};
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, &before_);
  }
  ~NotedInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  NotedInterrupt(const NotedInterrupt&) = delete;
  bool has_interrupts() const { return num_interrupts > 0; }

 private:
  struct sigaction before_ = {};
};

// A conversation with a model, in a terminal or through pipes.
class Conversation {
 public:
  Conversation(const Options& o, TemplateVariables variables, int64_t longest_context, ModelTokenizer& tokenizer,
               Engine& engine, Log& log)
      : o_(o),
        longest_context_(longest_context),
        variables_(std::move(variables)),
        tokenizer_(tokenizer),
        spec_(tokenizer.spec()),
        generator_(engine),
        log_(log) {
    spec_.reuse_cache = true;
    reset();
  }

  // Answers lines until /exit or the end of the input.
  void run() {
    if (is_terminal_) log_.line(kHelp);
    std::string line;
    while (ask(&line)) {
      if (line == "/exit") return;
      if (line == "/reset") {
        reset();
      } else if (is_terminal_ && line == "/help") {
        log_.line(kHelp);
      } else if (line.find_first_not_of(" \t\r") != std::string::npos) {
        answer(line);
      }
    }
  }

 private:
  static constexpr const char* kHelp =
      "/help prints this, /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer";

  bool ask(std::string* line) const {
    if (is_terminal_) show("> ");
    if (std::getline(std::cin, *line)) return true;
    if (is_terminal_) show("\n");
    return false;
  }
  static void show(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }

  void reset() {
    chat_ = {.more = variables_, .who = "chat"};
    if (!o_.system.empty()) chat_.messages.push_back(chat_message("system", o_.system));
  }

  // In a terminal, a message that cannot be answered is not kept, and the conversation continues.
  void answer(const std::string& line) {
    chat_.messages.push_back(chat_message("user", line));
    try {
      check_utf8(line, "chat: message");
      const std::string text = generate();
      chat_.messages.push_back(chat_message("assistant", text));
    } catch (const Error& error) {
      if (!is_terminal_ || (error.kind() != ErrorKind::usage && error.kind() != ErrorKind::input)) throw;
      chat_.messages.pop_back();
      log_.line(fmt::format("error: {}", error.what()));
    }
  }

  std::string generate() {
    TextStream stream(*tokenizer_, o_.stops);
    const std::vector<std::vector<int32_t>> prompts{tokenizer_.chat_ids(chat_)};
    const int64_t left = o_.context - std::ssize(prompts[0]);
    const bool is_longest = o_.context == longest_context_;
    MOEBIUS_CHECK(usage, left > 0,
                  "chat: expected a conversation of fewer than {} tokens{}; got {}; /reset forgets it{}", o_.context,
                  is_longest ? ", the context of the model" : "", prompts[0].size(),
                  is_longest ? "" : ", and --context N lets it grow longer");
    GenerateSpec spec = spec_;
    spec.max_tokens = std::min(spec.max_tokens, left);
    std::optional<NotedInterrupt> interrupt;
    if (is_terminal_) interrupt.emplace();
    const auto is_interrupted = [&] { return interrupt && interrupt->has_interrupts(); };
    const Generated made = generator_.run(spec, prompts, [&](size_t, int32_t id) {
      show(stream.add(id));
      return !is_interrupted() && !stream.is_stopped();
    })[0];
    show(stream.rest() + "\n");
    if (is_interrupted()) log_.line("the answer was ended by Ctrl-C; the part above is kept");
    if (!made.ended) log_.line(fmt::format("cut after {} tokens", spec.max_tokens));
    log_.line(times_text(generator_.times()));
    return stream.text();
  }

  const Options& o_;
  const int64_t longest_context_;  // tokens, of the model
  const TemplateVariables variables_;
  ModelTokenizer& tokenizer_;
  GenerateSpec spec_;
  Generator generator_;
  Log& log_;
  Chat chat_;
  bool is_terminal_ = isatty(STDIN_FILENO) == 1;
};

int run_chat(Options& o, Log& log) {
  MOEBIUS_CHECK(usage, o.context >= 1, "--context: expected at least 1; got {}", o.context);
  TemplateVariables variables = template_variables(o);
  ModelTokenizer tokenizer("chat", o);
  warn_if_any(log, tokenizer.notice());
  warn_if_any(log, tokenizer.other_tokenizer_notice());
  if (const std::string notice = tokenizer.sampling_notice(); !notice.empty()) log.line(notice);
  const ModelSpec model = read_model_spec(o.model);
  o.context = std::min(o.context, model.max_position_embeddings);
  EngineSpec spec =
      generation_engine_spec(model, compute_dtype(o.dtype), o.context, num_threads(o.threads), /*chunk=*/256);
  spec.device = device_kind(o.device);
  check_weights(o.model, model, o.adapter);
  tokenizer.open_template();
  Engine engine(spec);
  Stream s = engine.stream();
  warn_if_any(log, not_finite_warning(o.model, load_weights(s, engine.model(), o.model, o.adapter)));
  Conversation(o, std::move(variables), model.max_position_embeddings, tokenizer, engine, log).run();
  return 0;
}

}  // namespace

void add_chat(Cli& cli) {
  Command* command = cli.program.add_subcommand("chat", "chats with a model: each line of standard input is a message");
  const auto o = std::make_shared<Options>();
  add_generation_options(*command, *o);
  command->add_option("--system", o->system, "a system message, which begins the conversation");
  command->add_option("--chat-template-kwargs", o->template_kwargs,
                      "variables of the chat template, an object of JSON: '{\"enable_thinking\": false}'");
  command->add_option("--context", o->context, "the maximum number of tokens in a conversation")->capture_default_str();
  add_example(*command, "moebius chat runs/chat --system 'You are brief.'");
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_chat(*o, cli.log); }; });
}

}  // namespace moebius
