// The program's subcommands, one file each. Only this module parses arguments, reads the environment,
// prints results to standard output and turns errors into exit codes.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "cli/parse/arguments.h"
#include "core/log.h"

namespace moebius {

// The arguments that a command gets from main.
struct Cli {
  Command& program;
  Log& log;                        // standard error
  const std::atomic<int>& signal;  // the last SIGTERM, SIGINT or SIGUSR1, 0 if none came
  // A line, with its line break, that the first signal writes to standard error at once; null: none. A command sets it
  // where it may answer the signal only later.
  std::atomic<const char*>& signal_notice;
  // The command that was asked for. It returns the exit code.
  std::function<int()> run;
};

void add_train(Cli& cli);
void add_eval(Cli& cli);
void add_generate(Cli& cli);
void add_chat(Cli& cli);
void add_forward(Cli& cli);
void add_data(Cli& cli);
void add_tokenize(Cli& cli);
void add_checkpoint(Cli& cli);
void add_import(Cli& cli);
void add_export(Cli& cli);
void add_upcycle(Cli& cli);
void add_config(Cli& cli);
void add_bench(Cli& cli);
void add_plan(Cli& cli);
void add_report(Cli& cli);
void add_watch(Cli& cli);
void add_doctor(Cli& cli);

}  // namespace moebius
