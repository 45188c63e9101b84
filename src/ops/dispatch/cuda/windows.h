// The kernels of this folder and of sm90 share this: an array in the windows of all ranks.
#pragma once

#include "core/tensor.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"

namespace moebius::cuda {

struct Windows {
  const int64_t* bases;
  int64_t offset;
  int num_ranks, rank;
  unsigned long long* sent;  // bytes for other ranks: a sum of integers, which no order changes

  __device__ char* array(int64_t q) const { return reinterpret_cast<char*>(bases[q]) + offset; }
};

inline Windows windows_of(const Tensor& sent_1, const Tensor& bases_W, int64_t offset, int64_t rank) {
  return {.bases = bases_W.ptr<int64_t>(),
          .offset = offset,
          .num_ranks = narrow<int>(bases_W.numel()),
          .rank = narrow<int>(rank),
          .sent = reinterpret_cast<unsigned long long*>(sent_1.ptr<int64_t>())};
}

// All lanes of a warp call it.
__device__ __forceinline__ void add_sent(const Windows& to, int64_t bytes_of_lane) {
  const auto bytes = static_cast<unsigned long long>(warp_sum(static_cast<long long>(bytes_of_lane)));
  if (threadIdx.x % 32 == 0 && bytes > 0) atomicAdd(to.sent, bytes);
}

// The rows of tokens and the places that copies of them go to, as PushRows says (ops/dispatch/dispatch.h).
struct Push {
  const char* x;
  const int32_t *dest_TJ, *row_TJ;
  int64_t num_tokens, row_bytes;
  int num_dest, etp;

  __device__ int copies() const { return num_dest * etp; }
  // The place of a copy of token t; null where it goes nowhere. Adds what leaves this rank to sent.
  __device__ char* place(const Windows& to, int64_t t, int copy, int64_t& sent) const {
    const int64_t i = t * num_dest + copy / etp;
    if (dest_TJ[i] < 0) return nullptr;
    const int q = dest_TJ[i] * etp + copy % etp;
    if (q != to.rank) sent += row_bytes;
    return to.array(q) + row_TJ[i] * row_bytes;
  }
};

namespace sm90 {

// Returns whether push_rows of this folder takes it: rows of a multiple of 16 bytes at such places, long enough for
// the bulk copy engine, and at most 32 copies of a token.
bool takes(const Push& a, int64_t offset);
void push_rows(Stream& s, const Push& a, const Windows& to);

}  // namespace sm90

}  // namespace moebius::cuda
