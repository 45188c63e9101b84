// Device memory that other ranks of the same machine can read and write.
// A rank allocates a PeerMemory and sends each other rank a PeerHandle. The other rank opens it, and gets a pointer to
// the same memory.
//   cpu   Threads of a process share the pointer; other processes map the same pages (memfd).
//   cuda  Threads of a process share the pointer, with peer access over NVLink or PCIe if the GPUs differ; other
//         processes open an IPC handle (cudaIpcOpenMemHandle).
// Between ranks of one process the memory is freed when both have released it. When the process that allocated the
// memory ends, mappings of other processes stay valid on the CPU, but not on a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/tensor.h"

namespace moebius {

// A process of this machine: its pid, and the pid namespace (a container may have its own).
struct ProcessId {
  int64_t number = 0, pid_namespace = 0;
  bool operator==(const ProcessId&) const = default;
};
ProcessId this_process();

// A rank sends this to one other rank, as bytes. It may be opened only once.
struct PeerHandle {
  ProcessId process;
  int64_t num_bytes = 0;
  int64_t kept = 0;                 // within a process: the address of an owner that is released when it is opened
  int32_t device = 0;               // a DeviceKind
  int32_t descriptor = -1;          // file descriptor of the memory, in the process that allocated it
  std::array<std::byte, 64> ipc{};  // cudaIpcMemHandle_t
};

class PeerMemory {
 public:
  PeerMemory() = default;
  // Allocates zeroed memory; on the null device data() is null. Throws Error{usage} when the device lacks it.
  PeerMemory(DeviceKind device, int64_t num_bytes);
  // Opens the memory of another rank. Throws Error{usage} with the reason when it cannot be accessed.
  explicit PeerMemory(const PeerHandle& handle);

  void* data() const;
  int64_t num_bytes() const;
  // Returns a handle for one rank of the process `to`. If that is this process, the handle keeps the memory alive until
  // it is opened. REQUIRES: `to` is this process, or this object allocated the memory.
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
