// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct BlockMagnitudes;
struct Dequantize;
struct DequantizeTransposed;
struct LargestMagnitudes;
struct MxRound;
struct NvMagnitudes;
struct NvOrder;
struct NvRound;
struct PackQuantizedRows;
struct Quantize;
struct QuantizeShard;
struct TransposeQuantized;
struct UnpackQuantizedRows;

namespace cpu {
void block_magnitudes(Stream& s, const BlockMagnitudes& a);
void quantize_shard(Stream& s, const QuantizeShard& a);
void quantize(Stream& s, const Quantize& a);
void largest_magnitudes(Stream& s, const LargestMagnitudes& a);
void transpose_quantized(Stream& s, const TransposeQuantized& a);
void dequantize(Stream& s, const Dequantize& a);
void dequantize_transposed(Stream& s, const DequantizeTransposed& a);
void pack_quantized_rows(Stream& s, const PackQuantizedRows& a);
void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a);
void mx_round(Stream& s, const MxRound& a);
void nv_magnitudes(Stream& s, const NvMagnitudes& a);
void nv_round(Stream& s, const NvRound& a);
void nv_order(Stream& s, const NvOrder& a);
}  // namespace cpu

namespace cuda {
void block_magnitudes(Stream& s, const BlockMagnitudes& a);
void quantize_shard(Stream& s, const QuantizeShard& a);
void quantize(Stream& s, const Quantize& a);
void largest_magnitudes(Stream& s, const LargestMagnitudes& a);
void transpose_quantized(Stream& s, const TransposeQuantized& a);
void dequantize(Stream& s, const Dequantize& a);
void dequantize_transposed(Stream& s, const DequantizeTransposed& a);
void pack_quantized_rows(Stream& s, const PackQuantizedRows& a);
void unpack_quantized_rows(Stream& s, const UnpackQuantizedRows& a);
void mx_round(Stream& s, const MxRound& a);
void nv_magnitudes(Stream& s, const NvMagnitudes& a);
void nv_round(Stream& s, const NvRound& a);
void nv_order(Stream& s, const NvOrder& a);
}  // namespace cuda

}  // namespace moebius
