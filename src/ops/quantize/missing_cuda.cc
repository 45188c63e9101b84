// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/quantize/mx_rows.h"
#include "ops/quantize/nv_rows.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cuda {

void mx_round(Stream&, const MxRound&) { missing_cuda("mx_round"); }
void block_magnitudes(Stream&, const BlockMagnitudes&) { missing_cuda("block_magnitudes"); }
void quantize_shard(Stream&, const QuantizeShard&) { missing_cuda("quantize_shard"); }
void quantize(Stream&, const Quantize&) { missing_cuda("quantize"); }
void largest_magnitudes(Stream&, const LargestMagnitudes&) { missing_cuda("largest_magnitudes"); }
void transpose_quantized(Stream&, const TransposeQuantized&) { missing_cuda("transpose_quantized"); }
void dequantize(Stream&, const Dequantize&) { missing_cuda("dequantize"); }
void dequantize_transposed(Stream&, const DequantizeTransposed&) { missing_cuda("dequantize_transposed"); }
void pack_quantized_rows(Stream&, const PackQuantizedRows&) { missing_cuda("pack_quantized_rows"); }
void unpack_quantized_rows(Stream&, const UnpackQuantizedRows&) { missing_cuda("unpack_quantized_rows"); }
void nv_magnitudes(Stream&, const NvMagnitudes&) { missing_cuda("nv_magnitudes"); }
void nv_round(Stream&, const NvRound&) { missing_cuda("nv_round"); }
void nv_order(Stream&, const NvOrder&) { missing_cuda("nv_order"); }

}  // namespace moebius::cuda
