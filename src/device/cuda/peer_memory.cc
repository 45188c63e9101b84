// GPU memory that other ranks can access; the contract is in device/peer_memory.h.
#include "device/peer_memory.h"

#include <cstring>

#include "device/cuda/cuda.h"

namespace moebius::cuda {

std::array<std::byte, 64> ipc_handle(void* data) {
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == 64);
  MOEBIUS_CUDA(cudaIpcGetMemHandle(&handle, data));
  std::array<std::byte, 64> bytes;
  std::memcpy(bytes.data(), &handle, sizeof handle);
  return bytes;
}

void* open_ipc(const std::array<std::byte, 64>& bytes) {
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, bytes.data(), sizeof handle);
  void* data = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (status == cudaSuccess) return data;
  cudaGetLastError();
  MOEBIUS_FAIL(usage, "peer memory: memory of another process's GPU cannot be mapped: cudaIpcOpenMemHandle: {} ({})",
               cudaGetErrorString(status), cudaGetErrorName(status));
}

void close_ipc(void* data) noexcept { cudaIpcCloseMemHandle(data); }

void enable_peer_access(const void* data) {
  cudaPointerAttributes found{};
  MOEBIUS_CUDA(cudaPointerGetAttributes(&found, data));
  int here = 0, can = 0;
  MOEBIUS_CUDA(cudaGetDevice(&here));
  if (found.device == here) return;
  MOEBIUS_CUDA(cudaDeviceCanAccessPeer(&can, here, found.device));
  MOEBIUS_CHECK(usage, can, "peer memory: GPU {} cannot use memory of GPU {} (no peer access between them)", here,
                found.device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(found.device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  check_cuda(status, "cudaDeviceEnablePeerAccess");
}

}  // namespace moebius::cuda
