#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/options.h"
#include "io/files.h"
#include "memory/plan.h"
#include "report/page.h"
#include "report/run_folder.h"
#include "report/sinks.h"

namespace moebius {
namespace {

struct Options {
  std::vector<std::string> runs;
  std::string out, csv;
  bool json = false;
};

// Checks the ending of a path, so that a typing error does not overwrite a file of a run.
void check_ending(const char* option, const std::string& path, const char* ending) {
  MOEBIUS_CHECK(usage, path.empty() || path.ends_with(ending),
                "report {} {}: expected a name that ends in {}; give one", option, path, ending);
}

// Without --out and --csv, one run has its page in its folder. A link there could name any file, and a run may come
// from someone else.
void choose_files(Options& o) {
  if (!o.out.empty() || !o.csv.empty()) return;
  MOEBIUS_CHECK(
      usage, o.runs.size() == 1,
      "report: expected --out FILE.html for a page of {} runs, or --csv; got none; give one, as --out both.html",
      o.runs.size());
  o.out = std::filesystem::path(o.runs[0]) / "report.html";
  std::error_code unknown;
  MOEBIUS_CHECK(input, !std::filesystem::is_symlink(std::filesystem::symlink_status(o.out, unknown)),
                "report: {} is a link to another file, which is not replaced; remove the link, or give --out FILE.html",
                o.out);
}

void check(const Options& o) {
  check_ending("--out", o.out, ".html");
  check_ending("--csv", o.csv, ".csv");
  MOEBIUS_CHECK(usage, o.runs.size() <= kMaxRuns, "report: expected at most {} runs; got {}; write several pages",
                kMaxRuns, o.runs.size());
  MOEBIUS_CHECK(usage, o.csv.empty() || o.runs.size() == 1,
                "report --csv: expected one run; got {}; write a file for each", o.runs.size());
}

// The names are the folders' names, or their paths if two folders have the same name.
std::vector<ShownRun> shown_runs(const std::vector<std::unique_ptr<RunFolder>>& folders) {
  std::vector<ShownRun> runs;
  for (const auto& folder : folders) {
    bool is_only_one = true;
    for (const auto& other : folders) is_only_one = is_only_one && (other == folder || other->name() != folder->name());
    runs.push_back({.name = is_only_one ? folder->name() : folder->path(),
                    .path = folder->path(),
                    .data = folder->data(),
                    .modified_s = folder->modified_s(),
                    .colour = static_cast<int>(runs.size())});
  }
  return runs;
}

void warn_of_skipped_lines(Log& log, const RunFolder& folder) {
  const SkippedLines& left = folder.data().skipped_lines;
  if (left.damaged > 0)
    log.warn("{}: the report leaves out {}", folder.metrics_path(), counted(left.damaged, "damaged line"));
  if (left.out_of_order > 0)
    log.warn("{}: the report leaves out {} whose step is not above the one before", folder.metrics_path(),
             counted(left.out_of_order, "record"));
}

int run_report(Log& log, Options& o) {
  choose_files(o);
  check(o);
  std::vector<std::unique_ptr<RunFolder>> folders;
  for (const std::string& path : o.runs) {
    folders.push_back(std::make_unique<RunFolder>(path));
    folders.back()->poll();
    warn_of_skipped_lines(log, *folders.back());
  }
  nlohmann::ordered_json result, runs = nlohmann::ordered_json::array();
  const std::vector<ShownRun> shown = shown_runs(folders);
  for (const ShownRun& run : shown)
    runs.push_back({{"name", run.name},
                    {"steps", run.data.steps},
                    {"last_step", run.data.last_step},
                    {"damaged_lines", run.data.skipped_lines.damaged}});
  result["runs"] = runs;
  if (!o.out.empty()) {
    const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    const std::string page = page_of(shown, {.now_s = now});
    write_file_atomic(o.out, page);
    result["out"] = o.out;
    result["bytes"] = page.size();
    if (!o.json) fmt::print("{}  {}\n", o.out, bytes_text(std::ssize(page)));
  }
  if (!o.csv.empty()) {
    const int64_t rows = write_csv(*folders[0], o.csv);
    result["csv"] = o.csv;
    result["rows"] = rows;
    if (!o.json) fmt::print("{}  {} rows\n", o.csv, rows);
  }
  if (o.json) print_json(result);
  return 0;
}

}  // namespace

void add_report(Cli& cli) {
  Command* command =
      cli.program.add_subcommand("report", "writes a report of one run, or of several side by side, as one HTML file");
  const auto o = std::make_shared<Options>();
  command->add_option("RUN", o->runs, "folders of runs, also of runs that still train or have crashed")->required();
  command->add_option("--out", o->out,
                      "the page to write, FILE.html; default for one run without --csv: RUN/report.html");
  command->add_option("--csv", o->csv, "the table of one run's metrics to write, FILE.csv");
  add_json_option(*command, o->json);
  add_example(*command, "moebius report runs/mine");
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_report(cli.log, *o); }; });
}

}  // namespace moebius
