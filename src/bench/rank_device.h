// The device of one rank of a bench, and its links to the GPUs of the others.
#pragma once

#include <memory>

#include "comm/gpu/gpu_links.h"

namespace moebius {

struct RankDevice {
  // All ranks of the world make it together.
  RankDevice(DeviceKind kind, Transport& world, int threads, GpuSums sums = GpuSums::ranks)
      : ranks(kind == DeviceKind::cuda ? std::make_unique<GpuRanks>(world) : nullptr),
        gpu(ranks ? std::make_unique<Accelerator>(ranks->index()) : nullptr),
        links(ranks ? std::make_unique<GpuLinks>(world, *gpu, *ranks, sums) : nullptr),
        pool(threads),
        stream(gpu ? Stream(*gpu, pool) : Stream(kind, pool)) {}
  RankDevice(const RankDevice&) = delete;

  std::unique_ptr<GpuRanks> ranks;  // this and the next two only on GPUs
  std::unique_ptr<Accelerator> gpu;
  std::unique_ptr<GpuLinks> links;
  ThreadPool pool;
  Stream stream;
};

}  // namespace moebius
