// Memory of a device that other ranks of the same machine read and write too.
// A rank makes PeerMemory and gives each of the others a PeerHandle; they open it and have a pointer into
// the same memory.
//   cpu   threads of a process share the pointer; other processes map the same pages (memfd)
//   cuda  threads of a process share the pointer, over NVLink or PCIe where the GPUs differ (peer access);
//         other processes open an IPC handle (cudaIpcOpenMemHandle)
// Memory of another rank of this process lives until the last of both has let it go. Mapped memory of another process
// stays valid on the CPU when that process ends; on a GPU it does not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/tensor.h"

namespace moebius {

// A process of this machine: its number, and the space that numbers it (a container may have its own).
struct ProcessId {
  int64_t number = 0, space = 0;
  bool operator==(const ProcessId&) const = default;
};
ProcessId this_process();

// A rank sends this to one other rank, as bytes. It is opened once at most.
struct PeerHandle {
  ProcessId process;
  int64_t num_bytes = 0;
  int64_t kept = 0;                 // within a process: the address of what keeps the memory until it is opened
  int32_t device = 0;               // a DeviceKind
  int32_t descriptor = -1;          // the memory's file, in its process
  std::array<std::byte, 64> ipc{};  // cudaIpcMemHandle_t
};

class PeerMemory {
 public:
  PeerMemory() = default;
  // Zeroed memory. On the null device there is none: data() is null.
  // Error{usage} when the device does not have that much.
  PeerMemory(DeviceKind device, int64_t num_bytes);
  // The memory of another rank. Error{usage} says why it cannot be reached.
  explicit PeerMemory(const PeerHandle& handle);

  void* data() const;
  int64_t num_bytes() const;
  // For one rank, of the process `to`, that will open it.
  // Where that is this process, the handle keeps the memory until then.
  PeerHandle handle_for(const ProcessId& to) const;

 private:
  struct Pages;
  std::shared_ptr<Pages> pages_;
};

// The CUDA part; without CUDA each of these throws.
namespace cuda {
std::array<std::byte, 64> ipc_handle(void* data);  // REQUIRES: data is what allocate() returned
void* open_ipc(const std::array<std::byte, 64>& handle);
void close_ipc(void* data) noexcept;
void enable_peer_access(const void* data);  // the thread's GPU may use this memory of a GPU of this process from now on
}  // namespace cuda

}  // namespace moebius
