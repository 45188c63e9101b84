#include "device/cuda/portable_probe.h"

namespace moebius {
namespace {

__global__ void portable_probe() {}

}  // namespace

cudaError_t load_portable_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, portable_probe);
}

}  // namespace moebius
