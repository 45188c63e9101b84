// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct BlockMagnitudes;
struct Dequantize;
struct Quantize;
struct QuantizeShard;
struct TransposeQuantized;

namespace cpu {
void block_magnitudes(Stream& s, const BlockMagnitudes& a);
void quantize_shard(Stream& s, const QuantizeShard& a);
void quantize(Stream& s, const Quantize& a);
void transpose_quantized(Stream& s, const TransposeQuantized& a);
void dequantize(Stream& s, const Dequantize& a);
}  // namespace cpu

namespace cuda {
void quantize(Stream& s, const Quantize& a);
void transpose_quantized(Stream& s, const TransposeQuantized& a);
void dequantize(Stream& s, const Dequantize& a);
}  // namespace cuda

}  // namespace moebius
