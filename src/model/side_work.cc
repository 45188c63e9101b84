#include "model/beside.h"

#include <algorithm>

#include "device/block_limit.h"
#include "device/gpu_beside.h"
#include "device/gpu_limits.h"

namespace moebius {
namespace {

void limit_blocks(Stream& s, int blocks) { s.accelerator().state<BlockLimit>().blocks = blocks; }

}  // namespace

Beside::Beside(Step& step, bool overlaps, const std::function<void()>& body) : stream_(step.stream) {
  if (!overlaps) {
    body();
  } else if (stream_.device() != DeviceKind::cuda) {
    step.stack.run_kept(body);
  } else {
    limit_blocks(stream_, kMultiprocessors);
    step.stack.run_kept([&] { run_beside(stream_.accelerator(), body); });
    limit_blocks(stream_, std::max(2, gpu_limits(stream_).num_multiprocessors - kMultiprocessors));
    is_open_ = true;
  }
}

Beside::~Beside() {
  if (is_open_) limit_blocks(stream_, BlockLimit{}.blocks);
}

void Beside::take_all() {
  if (is_open_) limit_blocks(stream_, BlockLimit{}.blocks);
}

void Beside::join() {
  take_all();
  if (is_open_) join_beside(stream_.accelerator());
  is_open_ = false;
}

}  // namespace moebius
