// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

struct CopyColumns;
struct SumInto;
struct SumRows;
struct GatedAddFwd;
struct GatedAddBwd;
struct Jitter;
struct FillNormal;

namespace cpu {
void fill_zero(Stream& s, Tensor x);
void fill_zeros(Stream& s, std::span<const Tensor> x);
void copy(Stream& s, Tensor to, Tensor from);
void add(Stream& s, Tensor y, Tensor x);
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);
void sum_rows(Stream& s, const SumRows& a);
void copy_columns(Stream& s, const CopyColumns& a);
void sum_into(Stream& s, const SumInto& a);
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
void gated_add_bwd(Stream& s, const GatedAddBwd& a);
void jitter(Stream& s, const Jitter& a);
void fill_normal(Stream& s, const FillNormal& a);
int64_t find_nonfinite(Stream& s, Tensor x);
}  // namespace cpu

namespace cuda {
void fill_zero(Stream& s, Tensor x);
void fill_zeros(Stream& s, std::span<const Tensor> x);
void copy(Stream& s, Tensor to, Tensor from);
void add(Stream& s, Tensor y, Tensor x);
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);
void sum_rows(Stream& s, const SumRows& a);
void copy_columns(Stream& s, const CopyColumns& a);
void sum_into(Stream& s, const SumInto& a);
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
void gated_add_bwd(Stream& s, const GatedAddBwd& a);
void jitter(Stream& s, const Jitter& a);
void fill_normal(Stream& s, const FillNormal& a);
int64_t find_nonfinite(Stream& s, Tensor x);
}  // namespace cuda

}  // namespace moebius
