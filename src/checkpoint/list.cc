#include "checkpoint/list.h"

#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "core/error.h"

namespace moebius {
namespace {

CheckpointInfo inspect(const StepFolder& f) {
  CheckpointInfo info{.folder = f.path, .step = f.step};
  try {
    const CheckpointReader reader(f.path);
    MOEBIUS_CHECK(input, reader.step() == f.step,
                  "checkpoint {}: expected step {}, as the folder says; got step {} in its manifest; name it {}",
                  f.path, f.step, reader.step(), step_folder_name(reader.step()));
    info.bytes = reader.num_bytes();
  } catch (const Error& e) {
    info.problem = e.what();
  }
  return info;
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const std::string& dir) {
  std::vector<CheckpointInfo> infos;
  for (const StepFolder& f : step_folders(dir)) infos.push_back(inspect(f));
  return infos;
}

std::optional<std::string> newest_checkpoint(const std::string& dir, std::vector<std::string>* rejected) {
  const std::vector<StepFolder> folders = step_folders(dir);
  for (auto it = folders.rbegin(); it != folders.rend(); ++it) {
    const CheckpointInfo info = inspect(*it);
    if (info.problem.empty()) return info.folder;
    if (rejected) rejected->push_back(info.problem);
  }
  return std::nullopt;
}

VerifyReport verify_checkpoint(const std::string& folder) {
  VerifyReport report;
  try {
    const CheckpointReader reader(folder);
    report = {.step = reader.step(),
              .num_tensors = static_cast<int64_t>(reader.tensors().size()),
              .num_files = reader.num_files(),
              .bytes = reader.num_bytes()};
    for (const auto& [name, tensor] : reader.tensors()) {
      try {
        reader.verify(name);
      } catch (const Error& e) {
        report.problems.push_back(e.what());
      }
    }
  } catch (const Error& e) {
    report.problems.push_back(e.what());
  }
  return report;
}

}  // namespace moebius
