#include "comm/gpu/gpu_identity.h"
#include "device/cuda/cuda.h"

namespace moebius {

std::string gpu_identity(int index) {
  cudaDeviceProp p;
  MOEBIUS_CUDA(cudaGetDeviceProperties(&p, index));
  std::string text;
  for (const char byte : p.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

std::string gpu_identity_of(const void* memory) {
  cudaPointerAttributes found{};
  MOEBIUS_CUDA(cudaPointerGetAttributes(&found, memory));
  return gpu_identity(found.device);
}

}  // namespace moebius
