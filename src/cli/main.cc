#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "cli/command.h"
#include "cli/cpu_check.h"
#include "cli/launch.h"
#include "cli/parse/arguments.h"
#include "cli/parse/option_hint.h"
#include "comm/liveness/rank_supervisor.h"
#include "config/nearest.h"

namespace {

// Static storage, since a signal handler can use nothing else.
std::atomic<int> received_signal{0};
std::atomic<const char*> signal_notice{nullptr};
static_assert(std::atomic<const char*>::is_always_lock_free);
std::atomic<pid_t> supervisor{0};             // of this rank's process, if it has one
std::atomic<int> times_received[2] = {0, 0};  // from others, from the supervisor

// The second signal ends the program at once. A signal that a launcher sends to all processes of a
// job arrives twice, the second time from the supervisor, and counts as the first.
void on_signal(int signal, siginfo_t* info, void*) {
  const bool is_first = received_signal.exchange(signal) == 0;
  const bool handed_on = info->si_code <= 0 && info->si_pid != 0 && info->si_pid == supervisor;
  if (++times_received[handed_on] > 1) std::_Exit(128 + signal);
  const char* notice = signal_notice;
  if (!is_first || notice == nullptr) return;
  const int error = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, notice, std::strlen(notice));
  errno = error;
}

constexpr std::string_view kOutOfMemory =
    "error: out of memory; raise the limits of memory (ulimit -v, those of the container), or use a smaller "
    "micro_batch, seq_len or model (`moebius config` prints the memory table)";

// A destructor that allocates, such as that of JSON, cannot throw, and without memory ends the program here.
[[noreturn]] void on_terminate() {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    for (const std::string_view text : {kOutOfMemory, std::string_view("\n")})
      if (::write(STDERR_FILENO, text.data(), text.size()) < 0) break;
    std::_Exit(static_cast<int>(moebius::ErrorKind::usage));
  } catch (...) {  // the usual handler prints what was thrown
  }
  __gnu_cxx::__verbose_terminate_handler();
  std::abort();
}

// For commands that watch received_signal. The end of their output's reader must not
// end them either.
void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

// Output can still be lost: standard output is buffered, and may be a file on a full disk.
int flush_output(int code) {
  std::cout.flush();
  const bool written = std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout.good();
  if (written || code != 0) return code;
  std::fprintf(stderr, "error: standard output could not be written: %s; free space there or send it elsewhere\n",
               std::strerror(errno));
  return static_cast<int>(moebius::ErrorKind::io);
}

using namespace moebius;

// Names that other software has for what these commands do.
std::string other_command_hint(const std::string& word) {
  struct Other {
    std::string_view name, ours;
  };
  constexpr std::string_view kConvert = "moebius import or moebius export",
                             kMerge = "moebius export RUN, or moebius import MODEL CHECKPOINT --adapter ADAPTER";
  constexpr Other kOthers[] = {{"convert", kConvert},
                               {"merge", kMerge},
                               {"merge-lora", kMerge},
                               {"finetune", "moebius train"},
                               {"fine-tune", "moebius train"},
                               {"pretrain", "moebius train"},
                               {"sft", "moebius train"},
                               {"resume", "moebius train, with the same recipe"},
                               {"preprocess", "moebius data build"},
                               {"evaluate", "moebius eval"},
                               {"infer", "moebius generate"},
                               {"sample", "moebius generate"}};
  for (const Other& other : kOthers)
    if (word == other.name) return fmt::format("here that is {}; ", other.ours);
  return "";
}

// A first word that is no command: CLI11 would only report that a command is required.
void check_command_is_known(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  const std::string word = argv[1];
  if (std::find(names.begin(), names.end(), word) != names.end()) return;
  if (launcher_rank(process_environment()) != 0) throw Error(ErrorKind::usage, "");  // the first rank reports it
  std::string hint = other_command_hint(word);
  const std::string near = nearest_if_near(word, names);
  if (hint.empty() && !near.empty()) hint = fmt::format("did you mean {}? ", near);
  MOEBIUS_FAIL(usage, "unknown command {}; {}moebius --help lists all commands", word, hint);
}

// If the process of a rank is killed, launchers of MPI end all ranks with a code of their own,
// unless it has a supervisor.
void keep_rank_of_mpi() {
  try {
    const Launch launch = detect_launch(process_environment());
    if (launch.kind != Launch::Kind::mpi) return;
    supervisor = supervise_rank(
        fmt::format("rank {} of {}", launch.rank, launch.num_ranks),
        [](const std::string& text) { Log(stderr, false).line("error: " + text); }, std::_Exit);
  } catch (const Error&) {  // in the environment; a command that reads the ranks reports it
  }
}

// Commands whose files or answer several processes would write several times.
void check_launch(const CLI::App& app) {
  for (const char* command :
       {"chat", "forward", "data", "tokenize", "checkpoint", "import", "export", "upcycle", "report", "watch"})
    if (app.got_subcommand(command)) check_single_process(command, detect_launch(process_environment()));
}

// Returns the command line up to the command that was asked for, as in "moebius checkpoint ls".
std::string command_name(const CLI::App& app) {
  const std::vector<CLI::App*> asked = app.get_subcommands();
  return asked.empty() ? app.get_name() : app.get_name() + " " + command_name(*asked.front());
}

// Returns the hint for the first option that the command does not have; empty for other errors.
std::string unknown_option_hint(const CLI::App& app, const CLI::ParseError& e, int argc, char** argv) {
  if (dynamic_cast<const CLI::ExtrasError*>(&e) == nullptr) return "";
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  const CLI::Option* set = command->get_option_no_throw("--set");
  UnknownOption unknown;
  if (set != nullptr)
    unknown.sets =
        set->get_description().starts_with("parallel.") ? UnknownOption::Sets::layout : UnknownOption::Sets::recipe;
  for (const CLI::Option* option : command->get_options())
    if (option->get_name().starts_with("--")) unknown.options.push_back(option->get_name());
  const std::vector<std::string> extras = command->remaining();
  const auto is_unknown = [&](const std::string& word) {
    return word.starts_with("--") && std::find(extras.begin(), extras.end(), word) != extras.end();
  };
  const auto at = std::find_if(argv + 1, argv + argc, is_unknown);
  if (at == argv + argc) return "";
  unknown.option = *at;
  if (at + 1 < argv + argc) unknown.next = at[1];
  return option_hint(unknown);
}

// All ranks of a run have the same arguments, so the first of them answers. Help and the version
// are answers too.
int exit_code(const CLI::App& app, const CLI::ParseError& e, int argc, char** argv) {
  const bool is_first = launcher_rank(process_environment()) == 0;
  if (e.get_exit_code() == 0) {
    std::ostringstream nowhere;
    return is_first ? app.exit(e) : app.exit(e, nowhere, nowhere);
  }
  const std::string command = command_name(app);
  if (is_first)
    Log(stderr, false)
        .line(fmt::format("error: {}: {}{}; {} --help lists its arguments", command, e.what(),
                          unknown_option_hint(app, e, argc, argv), command));
  return static_cast<int>(ErrorKind::usage);
}

int run(int argc, char** argv) {
  CLI::App app{"Moebius trains Mixture-of-Experts language models", "moebius"};
  app.set_version_flag("--version", "moebius 0.1.0");
  app.require_subcommand(1);
  app.footer(
      "moebius COMMAND --help lists the options of a command, with an example.\n"
      "docs/reference/commands.md describes all commands, and docs/guide/train.md a first run.");
  bool quiet = false;
  app.add_flag("--quiet", quiet, "print no logs and no progress on standard error");
  const bool redraw = isatty(STDERR_FILENO) && std::getenv("NO_COLOR") == nullptr;
  std::optional<Log> log;
  log.emplace(stderr, redraw, false);
  Command program(&app);
  Cli cli{.program = program, .log = *log, .signal = received_signal, .signal_notice = signal_notice, .run = {}};
  for (const auto add :
       {add_train, add_eval, add_generate, add_chat, add_forward, add_data, add_tokenize, add_checkpoint, add_import,
        add_export, add_upcycle, add_config, add_plan, add_bench, add_report, add_watch, add_doctor})
    add(cli);
  try {
    check_command_is_known(app, argc, argv);
    app.parse(argc, argv);
    if (quiet) log.emplace(stderr, redraw, true);
    check_launch(app);
    for (const char* command : {"train", "eval", "watch", "import", "export", "upcycle"})
      if (app.got_subcommand(command)) install_signal_handlers();
    if (app.got_subcommand("data") && app.get_subcommand("data")->got_subcommand("build")) install_signal_handlers();
    return cli.run();
  } catch (const CLI::ParseError& e) {
    return exit_code(app, e, argc, argv);
  } catch (const Error& e) {
    if (*e.what() != 0) Log(stderr, false).line(std::string("error: ") + e.what());  // else another rank reports it
    return static_cast<int>(e.kind());
  } catch (const std::bad_alloc&) {
    Log(stderr, false).line(std::string(kOutOfMemory));
    return static_cast<int>(ErrorKind::usage);
  } catch (const std::filesystem::filesystem_error& e) {
    Log(stderr, false).line(fmt::format("error: {}; check the path, its disk and this user's access to it", e.what()));
    return static_cast<int>(ErrorKind::io);
  } catch (const std::system_error& e) {  // thrown by fmt::print
    Log(stderr, false).line(std::string("error: ") + e.what());
    return static_cast<int>(ErrorKind::io);
  } catch (const std::exception& e) {
    Log(stderr, false).line(std::string("error: internal: ") + e.what());
    return static_cast<int>(ErrorKind::internal);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string missing = moebius::missing_cpu_features(moebius::built_for_features()); !missing.empty()) {
    std::fprintf(stderr,
                 "error: this program was compiled for a CPU with %s, which this one lacks; "
                 "build it here, or with -DMOEBIUS_MARCH=x86-64-v3\n",
                 missing.c_str());
    return 2;
  }
  std::set_terminate(on_terminate);
  keep_rank_of_mpi();
  std::signal(SIGXFSZ, SIG_IGN);  // so that a file above the limit is an error of the write
  return flush_output(run(argc, argv));
}
