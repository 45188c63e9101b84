#include "device/cuda/cuda.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/sm80/pairs.h"

namespace moebius::cuda {
namespace {

constexpr int kSplitThreads = 256, kSplitWidth = 8;

// A thread splits kSplitWidth elements.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(bf16* terms, const float* x, int64_t rows, int64_t columns, int64_t width, int num_terms) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x) * kSplitWidth;
  if (i >= rows * width) return;
  const int64_t row = i / width, first = i % width;
  float rest[kSplitWidth];
#pragma unroll
  for (int j = 0; j < kSplitWidth; ++j) rest[j] = first + j < columns ? x[row * columns + first + j] : 0.0f;
  for (int n = 0; n < num_terms; ++n) {
    uint4 packed;
    uint32_t* word = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
    for (int j = 0; j < kSplitWidth; j += 2) {
      word[j / 2] = sm80::pack_pair(rest[j], rest[j + 1]);
      rest[j] -= sm80::low_of(word[j / 2]);
      rest[j + 1] -= sm80::high_of(word[j / 2]);
    }
    *reinterpret_cast<uint4*>(terms + n * rows * width + i) = packed;
  }
}

}  // namespace

void split_terms(Stream& s, bf16* terms, const float* x, int64_t rows, int64_t columns, int64_t width, int num_terms) {
  const auto blocks = static_cast<unsigned>(div_ceil(rows * width, kSplitThreads * kSplitWidth));
  split_kernel<<<blocks, kSplitThreads, 0, cuda_stream(s)>>>(terms, x, rows, columns, width, num_terms);
  check_launch("router_logits");
}

}  // namespace moebius::cuda
