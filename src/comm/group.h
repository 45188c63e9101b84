// A set of ranks that communicate. Every reduction is a SUM; nobody scales. All ranks of a group call the same
// operations in the same order with the same shapes: no call depends on data.
#pragma once

#include <memory>

#include "core/device.h"
#include "core/tensor.h"

namespace moebius {

class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;  // of this process in the group
  virtual int size() const = 0;

  virtual void all_reduce_sum(Stream& s, Tensor x) = 0;                   // x = sum over ranks of x
  virtual void all_gather(Stream& s, Tensor out, Tensor in) = 0;          // out = in of rank 0, 1, ... along dim 0
  virtual void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) = 0;  // out = this rank's rows of the sum of in
  virtual void barrier() = 0;
};

// The group of one rank.
std::unique_ptr<Group> make_self_group();

}  // namespace moebius
