// The second half of a reduction over fixed chunks of rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moebius::cuda {

// sum[j] += sum over p of partial[p * ld + j], in a fixed order. width > 0, num_partials > 0.
struct AddRows {
  float* sum;
  const float* partial;
  int64_t num_partials, width, ld;
};
void add_rows(cudaStream_t stream, const AddRows& a);

}  // namespace moebius::cuda
