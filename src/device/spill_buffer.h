// Memory of one range of addresses of which the parts that are asked for are in a device, and the rest in the host.
// A kernel reads and writes all of it alike, and needs not know where an element is. So the size of a tensor can
// be the worst case, while only the rows that are expected take memory of the device.
//   cpu   pages of this process: those that are never written take no memory
//   cuda  managed memory (CUDA programming guide, unified memory), whose parts are kept where they are placed. Pages of
//         the host take no memory before their first use, and are then read and written over PCIe, without moving
//   null  there is none: data() is null
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace moebius {

class SpillBuffer {
 public:
  static constexpr int64_t kAlignBytes = 64 << 10;  // where a part of the device may begin
  struct Range {
    int64_t begin = 0, num_bytes = 0;
  };

  SpillBuffer() = default;
  // near: the parts in the device's memory, zeroed; each begins at a multiple of kAlignBytes.
  // Error{usage} when the device does not have that much, or cannot use memory of the host in place.
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
