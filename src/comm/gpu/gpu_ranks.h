// Which GPU each rank of a world has. The ranks of a machine take its GPUs in turn: the i-th of them the GPU
// i modulo their number, so that several may share one. A launcher that shows each rank a GPU of its own
// (CUDA_VISIBLE_DEVICES) is found out by the GPUs' identities.
#pragma once

#include <vector>

#include "comm/control.h"

namespace moebius {

class GpuRanks {
 public:
  // All ranks of the world together. Error{usage}, the same on every rank, where one finds no GPU.
  explicit GpuRanks(Transport& world);

  int index() const { return index_; }                                   // of this rank's GPU on its machine
  int num_sharing() const { return static_cast<int>(sharing_.size()); }  // ranks that have it, this one among them
  bool each_has_its_own() const { return each_has_its_own_; }
  // The sum over the ranks that share this GPU. All ranks of the world call it together.
  int64_t sum_of_sharing(int64_t mine);
  Control& control() { return control_; }

 private:
  Control control_;
  int index_ = 0;
  std::vector<int> sharing_;
  bool each_has_its_own_ = false;
};

}  // namespace moebius
