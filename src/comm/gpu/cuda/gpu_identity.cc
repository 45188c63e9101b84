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

}  // namespace moebius
