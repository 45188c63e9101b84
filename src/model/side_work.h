// Work of a layer that overlaps with the work launched after it (parallel.expert_overlap):
//   SideWork sending(step, overlaps, [&] { dispatcher.dispatch(...); });
//   ...                // work that does not read the rows or overwrite x
//   sending.join();
// On a GPU the body runs on the side stream (device/side_stream.h), and may be captured in a CUDA graph. It gets
// some multiprocessors, and persistent kernels on the main stream leave it that many. On other devices the
// body runs at once, in the same order. Without overlap the constructor only runs the body.
#pragma once

#include <functional>

#include "model/step.h"

namespace moebius {

class SideWork {
 public:
  static constexpr int kMultiprocessors = 16;  // number that the body uses, unless it needs fewer

  // Memory that the body allocates on the stack stays allocated until the scope around this object ends.
  // REQUIRES: no other overlapping SideWork is open, and nothing that the body allocates outlives that scope.
  SideWork(Step& step, bool overlaps, const std::function<void()>& body, int multiprocessors = kMultiprocessors);
  ~SideWork();
  SideWork(const SideWork&) = delete;

  // Lets later work use all multiprocessors. Call it when the body is expected to have ended by then.
  void use_whole_gpu();
  void join();  // makes work launched from now on wait for the body

 private:
  Stream& stream_;
  bool is_open_ = false;
};

}  // namespace moebius
