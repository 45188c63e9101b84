// The rows of tokens, and the places to which their copies are written, for all kernels of push_rows.
#pragma once

#include "ops/dispatch/cuda/windows.h"

namespace moebius::cuda {

// The arguments of PushRows (ops/dispatch/dispatch.h).
struct Push {
  const char* x;
  const int32_t *dest_TJ, *row_TJ;
  int64_t num_tokens, row_bytes;
  int num_dest, etp;
  RowDistances of;

  __host__ __device__ int copies() const { return num_dest * etp; }
  // Returns the rank that gets a copy of token t; -1: none.
  __device__ int rank_of(const Windows& to, int64_t t, int copy) const {
    const int32_t dest = dest_TJ[t * num_dest + copy / etp];
    const int q = dest < 0 ? -1 : dest * etp + copy % etp;
    return q >= 0 && of.has(rank_distance(to.rank, q, to.num_ranks)) ? q : -1;
  }
  // Returns the address of a copy of token t; null if there is no such copy. Adds the bytes that leave this rank
  // to `sent`.
  __device__ char* place(const Windows& to, int64_t t, int copy, int64_t& sent) const {
    const int q = rank_of(to, t, copy);
    if (q < 0) return nullptr;
    if (q != to.rank) sent += row_bytes;
    return row_at(to, t, copy, q);
  }
  // Like place(), but null for a copy in this rank's own window; place_here() has the addresses of those alone.
  __device__ char* place_at_others(const Windows& to, int64_t t, int copy, int64_t& sent) const {
    return rank_of(to, t, copy) == to.rank ? nullptr : place(to, t, copy, sent);
  }
  __device__ char* place_here(const Windows& to, int64_t t, int copy) const {
    return rank_of(to, t, copy) == to.rank ? row_at(to, t, copy, to.rank) : nullptr;
  }

 private:
  __device__ char* row_at(const Windows& to, int64_t t, int copy, int q) const {
    return to.array(q) + row_TJ[t * num_dest + copy / etp] * row_bytes;
  }
};

inline constexpr int kMaxCopiesByEngine = 32;       // copies of a row: a lane of a warp has the place of one
inline constexpr int64_t kMinBytesByEngine = 1024;  // bytes of a row: each copy costs the engine time, however short
// The bulk copy engine is used if a launch has this many multiprocessors. On two H200 with 16 it sent 322 GB/s on the
// wire (c36b40e8), and copies through registers 311 (d815e31e). The bounds themselves were not timed.
inline constexpr int kMinBlocksByEngine = 14, kMaxBlocksByEngine = 20;

// Runs push_rows on a Hopper GPU, where the bulk copy engine copies the rows for other ranks through shared memory.
// REQUIRES: at most kMaxCopiesByEngine copies; rows, x and the array in windows begin at multiples of 16 bytes.
void push_rows_by_engine(Stream& s, const Push& a, const Windows& to);

}  // namespace moebius::cuda
