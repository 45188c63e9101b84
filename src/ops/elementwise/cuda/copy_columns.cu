#include "device/cuda/cuda.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/elementwise_backends.h"

namespace moebius::cuda {

// This is the copy engine's strided copy, which a CUDA graph can capture.
void copy_columns(Stream& s, const CopyColumns& a) {
  const auto size = static_cast<size_t>(size_of(a.to_TA.dtype));
  MOEBIUS_CUDA(cudaMemcpy2DAsync(static_cast<char*>(a.to_TA.data) + a.to_first * size, a.to_TA.dim(1) * size,
                                 static_cast<const char*>(a.from_TB.data) + a.from_first * size,
                                 a.from_TB.dim(1) * size, a.count * size, a.to_TA.dim(0), cudaMemcpyDeviceToDevice,
                                 cuda_stream(s)));
}

}  // namespace moebius::cuda
