#include "model/side_work.h"

#include <algorithm>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "device/side_stream.h"

namespace moebius {
namespace {

void limit_blocks(Stream& s, int blocks) { s.accelerator().state<BlockLimit>().blocks = blocks; }

}  // namespace

SideWork::SideWork(Step& step, bool overlaps, const std::function<void()>& body, int multiprocessors)
    : stream_(step.stream) {
  if (!overlaps) {
    body();
  } else if (stream_.device() != DeviceKind::cuda) {
    step.stack.run_kept(body);
  } else {
    limit_blocks(stream_, multiprocessors);
    step.stack.run_kept([&] { run_on_side_stream(stream_.accelerator(), body); });
    limit_blocks(stream_, std::max(2, gpu_limits(stream_).num_multiprocessors - multiprocessors));
    is_open_ = true;
  }
}

SideWork::~SideWork() {
  if (is_open_) limit_blocks(stream_, BlockLimit{}.blocks);
}

void SideWork::use_whole_gpu() {
  if (is_open_) limit_blocks(stream_, BlockLimit{}.blocks);
}

void SideWork::join() {
  use_whole_gpu();
  if (is_open_) join_side_stream(stream_.accelerator());
  is_open_ = false;
}

}  // namespace moebius
