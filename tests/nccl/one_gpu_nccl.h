// A double of NCCL for ranks that are threads of one process and share a GPU, which NCCL itself refuses. It has what
// groups use without NCCL's own sums: communicators, grouped sends and receives, and all-gather.
// Unlike NCCL, a call returns when the other ranks have made theirs, so that it cannot be captured in a CUDA graph.
#pragma once

#include <cstdint>

namespace moebius {

struct NcclLibrary;

const NcclLibrary& one_gpu_nccl();
int64_t messages_of_thread();  // the messages that the calling thread has sent by it

}  // namespace moebius
