#include "checkpoint/parts.h"

#include <chrono>
#include <filesystem>
#include <thread>

#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/fault.h"
#include "io/files.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kSeenWithin{60};  // network file systems show new names late
constexpr std::chrono::milliseconds kPause{2};

std::string part_path(const std::string& folder, int rank) {
  return fmt::format("{}/rank-{:05}-part.json", folder, rank);
}

void wait_for(const std::string& path, int rank, const PartsProgress& progress) {
  std::error_code unknown;
  Clock::time_point written{};
  while (!std::filesystem::exists(path, unknown)) {
    MOEBIUS_CHECK(io, !progress.aborted, "the save was aborted, since it failed on another rank");
    if (progress.all_written && written == Clock::time_point{}) written = Clock::now();
    MOEBIUS_CHECK(
        io, !progress.all_written || Clock::now() - written < kSeenWithin,
        "rank {} has written its share, and rank 0 does not see {}; put run.dir on a file system that all ranks share",
        rank, path);
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

void write_part(const std::string& folder, const CheckpointManifest& share, int rank) {
  const std::string path = part_path(folder, rank), unfinished = path + ".unfinished", text = to_text(share);
  File file = File::create(unfinished);
  file.write_at(text.data(), static_cast<int64_t>(text.size()), 0);
  file.sync();
  file.close();
  sync_dir(folder);
  // This is the rank's last action in the folder. Once the part exists, rank 0 may give the folder
  // its final name.
  rename_folder(unfinished, path);
  fault_point("checkpoint.after_part");
}

std::vector<CheckpointManifest> collect_parts(const std::string& folder, int num_ranks, const PartsProgress& progress) {
  std::vector<CheckpointManifest> parts;
  for (int rank = 1; rank < num_ranks; ++rank) {
    const std::string path = part_path(folder, rank);
    wait_for(path, rank, progress);
    parts.push_back(parse_manifest(read_file(path), path));
    std::error_code ignored;  // an extra file does no harm
    std::filesystem::remove(path, ignored);
  }
  return parts;
}

}  // namespace moebius
