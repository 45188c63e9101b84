// The rows of tokens and the places that copies of them go to, for all kernels of push_rows.
#pragma once

#include "ops/dispatch/cuda/windows.h"

namespace moebius::cuda {

// As PushRows says (ops/dispatch/dispatch.h).
struct Push {
  const char* x;
  const int32_t *dest_TJ, *row_TJ;
  int64_t num_tokens, row_bytes;
  int num_dest, etp;
  bool to_others;

  __host__ __device__ int copies() const { return num_dest * etp; }
  // Returns the address of a copy of token t; null for no copy. Adds the bytes that leave this rank to `sent`.
  __device__ char* place(const Windows& to, int64_t t, int copy, int64_t& sent) const {
    const int64_t i = t * num_dest + copy / etp;
    if (dest_TJ[i] < 0) return nullptr;
    const int q = dest_TJ[i] * etp + copy % etp;
    if (q == to.rank && to_others) return nullptr;
    if (q != to.rank) sent += row_bytes;
    return to.array(q) + row_TJ[i] * row_bytes;
  }
};

inline constexpr int kMaxCopiesByEngine = 32;       // of a row: a lane of a warp has the place of one
inline constexpr int64_t kMinBytesByEngine = 1024;  // of a row: the engine takes its time for each

// Does what PushRows says on a Hopper GPU, where the bulk copy engine copies rows through shared memory.
// REQUIRES: at most kMaxCopiesByEngine copies; rows, x and the array in windows begin at multiples of 16 bytes.
void push_rows_by_engine(Stream& s, const Push& a, const Windows& to);

}  // namespace moebius::cuda
