// The files of a checkpoints folder. step-00000100 is a checkpoint. step-00000100.tmp-0123456789abcdef is a save or a
// removal that did not finish. old-1, old-2, ... have checkpoints that were set aside. The first line of the file
// `lock` names the process that writes here, and the second line its run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

std::string step_folder_name(int64_t step);           // has at least 8 digits
std::string unfinished_name(int64_t step);            // a different name each time
std::string free_old_folder(const std::string& dir);  // DIR/old-N with the lowest free N

struct StepFolder {
  int64_t step = 0;
  std::string path;
};

// Returns the step folders in ascending order of step; none if `dir` does not exist.
std::vector<StepFolder> step_folders(const std::string& dir);
std::vector<std::string> unfinished_folders(const std::string& dir);  // paths

void make_dirs(const std::string& dir);  // creates its parents too, durably
void rename_folder(const std::string& from, const std::string& to);
// Swaps the two folders in one atomic operation. Afterwards b is complete, and the old b is the
// unfinished folder.
void exchange_folders(const std::string& unfinished, const std::string& b);
void remove_folder(const std::string& path);  // removes its contents too

// Excludes other writers, in this process or another, from a checkpoints folder until the object is
// destroyed or the process ends.
class CheckpointLock {
 public:
  // Throws Error{usage} naming the holder if there is one. Takes no lock on a file system without locks.
  explicit CheckpointLock(const std::string& dir);
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

  // Writes a unique signature into the lock and returns it; the run's ranks look for it. Throws Error{io}.
  std::string sign() const;

 private:
  std::string path_;
  int fd_ = -1;
};

// Reads the lock in `dir` as this process sees it. Returns an empty string when it holds the
// signature, else a description of what it holds.
std::string why_not_signed(const std::string& dir, const std::string& signature);

}  // namespace moebius
