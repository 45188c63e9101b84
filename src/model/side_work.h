// Work of a layer that runs beside the work that follows it, with parallel.expert_overlap:
//   SideWork sending(step, overlaps, [&] { dispatcher.dispatch(...); });
//   ...                // what neither needs the rows nor overwrites what is sent
//   sending.join();
// On a GPU the body goes to a second stream, and may be part of a CUDA graph. It gets few multiprocessors, and the
// kernels of this GPU that would take all of them leave it so many. On other devices the body runs at once, in the
// same order. Without overlap this only runs the body.
#pragma once

#include <functional>

#include "model/step.h"

namespace moebius {

class SideWork {
 public:
  static constexpr int kMultiprocessors = 16;  // for the body

  // Memory that the body takes from the stack stays taken until the scope around this object ends.
  // REQUIRES: no other SideWork that overlaps is open, and the body allocates nothing that outlives that scope.
  SideWork(Step& step, bool overlaps, const std::function<void()>& body);
  ~SideWork();
  SideWork(const SideWork&) = delete;

  // Work that is launched from now on takes all multiprocessors: what the body has is expected to end before.
  void use_whole_gpu();
  void join();  // work that is launched from now on begins after the body's

 private:
  Stream& stream_;
  bool is_open_ = false;
};

}  // namespace moebius
