// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cuda {

void quantize(Stream&, const Quantize&) { missing_cuda("quantize"); }
void transpose_quantized(Stream&, const TransposeQuantized&) { missing_cuda("transpose_quantized"); }
void dequantize(Stream&, const Dequantize&) { missing_cuda("dequantize"); }

}  // namespace moebius::cuda
