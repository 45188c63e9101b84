#include "cli/bench/machine_file.h"

#include <filesystem>

#include "core/error.h"

namespace moebius {
namespace {

// Returns the folder that has a machine's file: `machines` of the working directory if the file is there, else the
// first `machines` in the folders above the program.
std::string machines_folder(const std::string& name) {
  std::error_code ignored;
  const std::filesystem::path here = "machines", file = name + ".toml";
  if (std::filesystem::is_regular_file(here / file, ignored)) return here.string();
  constexpr int kFoldersAbove = 3;  // build/moebius, and build/asan/moebius
  auto folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  std::string any = here.string();  // for the error, which lists the machines of a folder
  for (int i = 0; i < kFoldersAbove; ++i, folder = folder.parent_path()) {
    if (std::filesystem::is_regular_file(folder / here / file, ignored)) return (folder / here).string();
    if (!std::filesystem::is_directory(any, ignored)) any = (folder / here).string();
  }
  return std::filesystem::is_directory(any, ignored) ? any : here.string();
}

}  // namespace

PlanMachine load_named_machine(const std::string& name_or_path) {
  return load_machine(name_or_path, machines_folder(name_or_path));
}

void set_machine_rates(RunSpec& run) {
  if (run.machine.empty()) return;
  PlanMachine machine = load_named_machine(run.machine);
  const bool on_gpu = run.device == DeviceKind::cuda;
  MOEBIUS_CHECK(usage, machine.is_gpu == on_gpu,
                "--machine {}: expected a machine file with device = \"{}\", as run.device; got \"{}\"; name "
                "another file, or leave --machine out",
                run.machine, on_gpu ? "cuda" : "cpu", machine.is_gpu ? "cuda" : "cpu");
  run.rates = machine.exchange_rates();
}

}  // namespace moebius
