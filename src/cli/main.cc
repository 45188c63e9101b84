#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>

#include "cli/command.h"
#include "cli/cpu_check.h"

namespace {

// A signal handler can reach nothing but static storage.
std::atomic<int> received_signal{0};

void on_signal(int signal) {
  // The second one ends the program at once.
  if (received_signal.exchange(signal) != 0) std::_Exit(128 + signal);
}

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

int run(int argc, char** argv) {
  using namespace moebius;
  CLI::App app{"Moebius trains Mixture-of-Experts language models", "moebius"};
  app.set_version_flag("--version", "moebius 0.1.0");
  app.require_subcommand(1);
  bool quiet = false;
  app.add_flag("--quiet", quiet, "no logs or progress on standard error");
  const bool redraw = isatty(STDERR_FILENO) && std::getenv("NO_COLOR") == nullptr;
  std::optional<Log> log;
  log.emplace(stderr, redraw, false);
  Cli cli{.app = app, .log = *log, .signal = received_signal};
  for (const auto add : {add_train, add_eval, add_generate, add_forward, add_data, add_tokenize, add_checkpoint, add_config, add_bench, add_doctor}) add(cli);
  try {
    app.parse(argc, argv);
    if (quiet) log.emplace(stderr, redraw, true);
    return cli.run();
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : static_cast<int>(ErrorKind::usage);
  } catch (const Error& e) {
    Log(stderr, false).line(std::string("error: ") + e.what());
    return static_cast<int>(e.kind());
  } catch (const std::bad_alloc&) {
    Log(stderr, false).line("error: out of memory; use a smaller micro_batch, seq_len or model (`moebius config` prints the memory table)");
    return static_cast<int>(ErrorKind::usage);
  } catch (const std::exception& e) {
    Log(stderr, false).line(std::string("error: internal: ") + e.what());
    return static_cast<int>(ErrorKind::internal);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string missing = moebius::missing_cpu_features(); !missing.empty()) {
    std::fprintf(stderr, "error: this program was compiled for a CPU with %s, which this one lacks; build it here, or with -DMOEBIUS_MARCH=x86-64-v3\n",
                 missing.c_str());
    return 2;
  }
  install_signal_handlers();
  return run(argc, argv);
}
