// One range of addresses, of which some parts are in device memory and the rest is in host memory. Kernels read and
// write both in the same way. So a tensor can have its worst-case size, while only its expected rows use device memory.
//   cpu   Ordinary pages; a page that is never written uses no memory.
//   cuda  Managed memory (CUDA programming guide, unified memory), whose parts stay where they are placed. A host page
//         uses no memory before its first access; the GPU accesses it over PCIe, without migration.
//   null  No memory: data() is null.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace moebius {

class SpillBuffer {
 public:
  static constexpr int64_t kAlignBytes = 64 << 10;  // a device part begins at a multiple of this
  struct Range {
    int64_t begin = 0, num_bytes = 0;
  };

  SpillBuffer() = default;
  // near: the parts in device memory, which are zeroed; each begins at a multiple of kAlignBytes.
  // Throws Error{usage} when the device lacks that memory, or cannot access host memory in place.
  SpillBuffer(DeviceKind device, int64_t num_bytes, const std::vector<Range>& near);
  ~SpillBuffer();
  SpillBuffer(SpillBuffer&& other) noexcept { swap(other); }
  SpillBuffer& operator=(SpillBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  void swap(SpillBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(device_, other.device_);
  }
  void* data_ = nullptr;
  int64_t num_bytes_ = 0;
  DeviceKind device_ = DeviceKind::null;
};

// The CUDA part; without CUDA it throws. device/device.h has release().
namespace cuda {
void* allocate_spilling(int64_t num_bytes, const std::vector<SpillBuffer::Range>& near);
}  // namespace cuda

}  // namespace moebius
