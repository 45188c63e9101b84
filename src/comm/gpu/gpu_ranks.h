// The assignment of GPUs to the ranks of a world. The i-th rank of a machine gets the GPU with index i modulo the
// number of GPUs, so several ranks may share one. If a launcher makes a different GPU visible to each rank
// (CUDA_VISIBLE_DEVICES), the identities of the GPUs distinguish them.
#pragma once

#include <vector>

#include "comm/control.h"

namespace moebius {

class GpuRanks {
 public:
  // All ranks of the world construct it together. Throws Error{usage} on every rank when a rank has no GPU.
  explicit GpuRanks(Transport& world);

  int index() const { return index_; }                                   // index of this rank's GPU on its machine
  int num_sharing() const { return static_cast<int>(sharing_.size()); }  // ranks that use it, including this one
  int num_processes() const { return num_processes_; }                   // processes of the ranks that share it
  bool each_has_its_own() const { return each_has_its_own_; }
  // Return the sum over the ranks that share this GPU, and over the ranks of this machine. All ranks of the world call
  // them together.
  int64_t sum_of_sharing(int64_t mine);
  int64_t sum_of_machine(int64_t mine);
  Control& control() { return control_; }

 private:
  Control control_;
  int index_ = 0;
  int num_processes_ = 1;
  std::vector<int> sharing_, on_machine_;
  bool each_has_its_own_ = false;
};

}  // namespace moebius
