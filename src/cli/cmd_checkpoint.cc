#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/list.h"
#include "checkpoint/prune.h"
#include "cli/command.h"
#include "cli/options.h"
#include "memory/plan.h"
#include "weights/load.h"
#include "weights/source.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string path;
  int64_t keep = 2;
  bool json = false;
};

// Returns the folder that holds the step folders: the path itself, or PATH/checkpoints of a run.
std::string checkpoints_dir(const std::string& path) {
  MOEBIUS_CHECK(input, fs::is_directory(path), "checkpoint: expected a folder at {}; got {}; check the path", path,
                fs::exists(path) ? "a file" : "nothing there");
  return fs::is_directory(path + "/checkpoints") ? path + "/checkpoints" : path;
}

// Returns the checkpoints of a folder. Throws Error{input} when it has none: then the path is probably wrong.
std::vector<CheckpointInfo> checkpoints_of(const char* command, const std::string& path) {
  std::vector<CheckpointInfo> checkpoints = list_checkpoints(checkpoints_dir(path));
  MOEBIUS_CHECK(input, !checkpoints.empty(),
                "checkpoint {}: expected a checkpoint or a folder of them; got none in {}; check the path", command,
                path);
  return checkpoints;
}

// Lists the weights of one checkpoint or of a Hugging Face folder, under the names
// that train.freeze matches.
int list_tensors(const Options& o) {
  const WeightsFolder from = find_weights(o.path);
  const ModelSpec model = with_mtp_of(from, read_model_spec(from.path));
  check_weights(from.path, model);
  const auto weights = open_weights(from, ModelCatalog(model));
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const WeightsEntry& e : weights->entries()) {
    const std::vector<int64_t> dims = dims_of(e.shape);
    if (o.json)
      list.push_back({{"name", e.name}, {"dtype", name_of(e.dtype)}, {"shape", dims}});
    else
      fmt::print("{}  {}[{}]\n", e.name, name_of(e.dtype), fmt::join(dims, ", "));
  }
  if (o.json) print_json({{"folder", from.path}, {"tensors", list}});
  return 0;
}

int run_ls(const Options& o) {
  if (fs::exists(o.path + "/manifest.json") || fs::exists(o.path + "/config.json")) return list_tensors(o);
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const CheckpointInfo& each : checkpoints_of("ls", o.path)) {
    if (o.json) {
      list.push_back({{"folder", each.folder}, {"step", each.step}, {"bytes", each.bytes}, {"problem", each.problem}});
    } else {
      fmt::print("{:>8}  {:>11}  {}{}\n", each.step, bytes_text(each.bytes), each.folder,
                 each.problem.empty() ? "" : "  DAMAGED: " + each.problem);
    }
  }
  if (o.json) print_json({{"checkpoints", list}});
  return 0;
}

// Returns one checkpoint, or all of a folder.
std::vector<std::string> folders_of(const std::string& path) {
  if (fs::exists(path + "/manifest.json")) return {path};
  std::vector<std::string> folders;
  for (const CheckpointInfo& each : checkpoints_of("verify", path)) folders.push_back(each.folder);
  return folders;
}

int run_verify(const Options& o) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  bool ok = true;
  for (const std::string& folder : folders_of(o.path)) {
    const VerifyReport report = verify_checkpoint(folder);
    ok = ok && report.ok();
    if (o.json) {
      list.push_back({{"folder", folder},
                      {"step", report.step},
                      {"ok", report.ok()},
                      {"tensors", report.num_tensors},
                      {"files", report.num_files},
                      {"bytes", report.bytes},
                      {"problems", report.problems}});
      continue;
    }
    fmt::print("{}: {}, {} tensors in {}, {}\n", folder, report.ok() ? "ok" : "DAMAGED", report.num_tensors,
               counted(report.num_files, "file"), bytes_text(report.bytes));
    for (const std::string& problem : report.problems) fmt::print("  {}\n", problem);
  }
  if (o.json) print_json({{"ok", ok}, {"checkpoints", list}});
  return ok ? 0 : static_cast<int>(ErrorKind::input);
}

int run_prune(const Options& o) {
  const std::vector<std::string> removed = prune_checkpoints(checkpoints_dir(o.path), o.keep);
  if (o.json) {
    print_json({{"removed", removed}});
    return 0;
  }
  for (const std::string& folder : removed) fmt::print("removed {}\n", folder);
  if (removed.empty()) fmt::print("nothing to remove\n");
  return 0;
}

}  // namespace

void add_checkpoint(Cli& cli) {
  Command* checkpoint = cli.program.add_subcommand("checkpoint", "lists, verifies and prunes the checkpoints of a run");
  checkpoint->require_subcommand();
  add_example(*checkpoint, "moebius checkpoint ls runs/mine");
  const auto o = std::make_shared<Options>();
  const auto add = [&](const char* name, const char* what, const char* path, int (*run)(const Options&)) {
    Command* command = checkpoint->add_subcommand(name, what);
    command->add_option("PATH", o->path, path)->required();
    add_json_option(*command, o->json);
    add_example(*command, fmt::format("moebius checkpoint {} runs/mine", name));
    command->callback([&cli, o, run] { cli.run = [o, run] { return run(*o); }; });
    return command;
  };
  add("ls", "lists the steps and sizes of a run, or the names, dtypes and shapes of the weights of a checkpoint",
      "a run's folder, its checkpoints folder, one checkpoint, or a Hugging Face folder", run_ls);
  add("verify", "checks every byte against its hash; exit code 3 when one is damaged",
      "a run's folder, its checkpoints folder, or one checkpoint", run_verify);
  add("prune", "removes all but the newest checkpoints that verify", "a run's folder or its checkpoints folder",
      run_prune)
      ->add_option("--keep", o->keep, "number of checkpoints to keep, at least 1")
      ->capture_default_str();
}

}  // namespace moebius
