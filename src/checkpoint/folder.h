// Names in a checkpoints folder: step-00000100 is a checkpoint, step-00000100.tmp-0123456789abcdef is a save or a
// removal that did not finish, old-1 and on hold checkpoints that were set aside, `lock` says in its first line who
// writes here, in its second which run that is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

std::string step_folder_name(int64_t step);           // at least 8 digits
std::string unfinished_name(int64_t step);            // another one each time
std::string free_old_folder(const std::string& dir);  // DIR/old-N, the first that is not there

struct StepFolder {
  int64_t step = 0;
  std::string path;
};

// By rising step; none when there is no such folder.
std::vector<StepFolder> step_folders(const std::string& dir);
std::vector<std::string> unfinished_folders(const std::string& dir);  // paths

void make_dirs(const std::string& dir);  // with its parents, durable
void rename_folder(const std::string& from, const std::string& to);
// Under the name b stands what was unfinished, in one stroke; what b was stands under an unfinished name.
void exchange_folders(const std::string& unfinished, const std::string& b);
void remove_folder(const std::string& path);  // with all that is in it

// Keeps other writers out of a checkpoints folder, in this process or another,
// as long as the object or its process lives.
class CheckpointLock {
 public:
  // Error{usage} naming the holder when there is one. File systems that cannot lock are let pass.
  explicit CheckpointLock(const std::string& dir);
  ~CheckpointLock();
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

  // Writes into the lock what stands in no other one and returns it, for the run's ranks to find. Error{io}.
  std::string sign() const;

 private:
  std::string path_;
  int fd_ = -1;
};

// What the lock in `dir` says when its holder has signed it so, as this process
// sees it: empty when it is there, else what is.
std::string why_not_signed(const std::string& dir, const std::string& signature);

}  // namespace moebius
