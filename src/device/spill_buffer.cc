#include "device/spill_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "device/accelerator.h"
#include "device/out_of_memory.h"

namespace moebius {

SpillBuffer::SpillBuffer(DeviceKind device, int64_t num_bytes, const std::vector<Range>& near)
    : num_bytes_(num_bytes), device_(device) {
  if (device == DeviceKind::null || num_bytes == 0) return;
  if (device == DeviceKind::cuda) {
    data_ = cuda::allocate_spilling(num_bytes, near);
    return;
  }
  void* p = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemory(fmt::format(
        "out of memory: {:.3f} GiB of addresses were requested for rows of experts: {}; raise the limit of addresses "
        "of this process (ulimit -v), or compute with smaller shapes",
        num_bytes / 1073741824.0, std::strerror(errno)));
  }
  data_ = p;
}

SpillBuffer::~SpillBuffer() {
  if (!data_) return;
  if (device_ == DeviceKind::cuda)
    cuda::release(data_);
  else
    ::munmap(data_, num_bytes_);
}

}  // namespace moebius
