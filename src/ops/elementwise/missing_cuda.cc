// Replaces the CUDA backend of these ops in a build without it.
#include "ops/elementwise/elementwise_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void fill_zero(Stream&, Tensor) { missing_cuda("fill_zero"); }
void fill_zeros(Stream&, std::span<const Tensor>) { missing_cuda("fill_zeros"); }
void copy(Stream&, Tensor, Tensor) { missing_cuda("copy"); }
void add(Stream&, Tensor, Tensor) { missing_cuda("add"); }
void add_row(Stream&, Tensor, Tensor) { missing_cuda("add_row"); }
void sum_rows(Stream&, const SumRows&) { missing_cuda("sum_rows"); }
void copy_columns(Stream&, const CopyColumns&) { missing_cuda("copy_columns"); }
void sum_into(Stream&, const SumInto&) { missing_cuda("sum_into"); }
void gated_add_fwd(Stream&, const GatedAddFwd&) { missing_cuda("gated_add_fwd"); }
void gated_add_bwd(Stream&, const GatedAddBwd&) { missing_cuda("gated_add_bwd"); }
void jitter(Stream&, const Jitter&) { missing_cuda("jitter"); }
void fill_normal(Stream&, const FillNormal&) { missing_cuda("fill_normal"); }
int64_t find_nonfinite(Stream&, Tensor) { missing_cuda("find_nonfinite"); }

}  // namespace moebius::cuda
