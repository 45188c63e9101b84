#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "cli/command.h"
#include "cli/options.h"
#include "report/watch_server.h"

namespace moebius {
namespace {

struct Options {
  std::string run;
  WatchOptions server{.port = 7007};
};

// Serves until a signal arrives.
int run_watch(Cli& cli, const Options& o) {
  const WatchServer server(o.run, o.server);
  fmt::print("{}\n", server.address());
  std::fflush(stdout);
  cli.log.info("following {}; Ctrl-C ends", o.run);
  while (cli.signal == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return 128 + cli.signal;
}

}  // namespace

void add_watch(Cli& cli) {
  Command* command =
      cli.program.add_subcommand("watch", "serves the page of a run on 127.0.0.1 and updates it while the run trains");
  const auto o = std::make_shared<Options>();
  command->add_option("RUN", o->run, "the folder of a run")->required();
  command->add_option("--port", o->server.port, "the port on 127.0.0.1; 0: a free one")
      ->capture_default_str()
      ->between(0, 65535);
  command->add_flag("--metrics", o->server.metrics, "also serve the newest metrics at /metrics, for Prometheus");
  add_example(*command, "moebius watch runs/mine");
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_watch(cli, *o); }; });
}

}  // namespace moebius
