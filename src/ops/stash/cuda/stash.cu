// One block allocates or frees the pages, so that their order is that of the stream. Copies loop over the rows that
// have a page, with a grid for the whole GPU whatever the number of rows.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/stash/stash.h"
#include "ops/stash/stash_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

__device__ int64_t now_ns() {
  int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Copies n values from `from`, forwards, and waits for all threads.
__device__ void copy_pages(int32_t* to, const int32_t* from, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += kThreads) to[i] = from[i];
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    clear_kernel(int32_t* free, int64_t num_pages, int64_t* state, double* counts) {
  for (int64_t i = threadIdx.x; i < num_pages; i += kThreads) free[i] = static_cast<int32_t>(num_pages - 1 - i);
  if (threadIdx.x < 2) state[threadIdx.x] = threadIdx.x == 0 ? num_pages : 0;
  if (threadIdx.x < 3) counts[threadIdx.x] = 0;
}

struct Pool {
  int32_t *free, *page, *held;
  int64_t* state;
};

// Frees the pages of a pass. Returns the old values of held to all threads.
struct Held {
  int32_t kept, pages, asked;
};
__device__ Held release_pages(const Pool& p) {
  const Held held{p.held[0], p.held[1], p.held[2]};
  const int64_t num_free = p.state[0];
  __syncthreads();
  copy_pages(p.free + num_free, p.page, held.pages);
  if (threadIdx.x == 0) {
    p.state[0] = num_free + held.pages;
    p.state[1] -= held.asked;
    p.held[0] = p.held[1] = p.held[2] = 0;
  }
  __syncthreads();
  return held;
}

__global__ void __launch_bounds__(kThreads)
    take_kernel(Pool p, double* counts, const int32_t* offsets, int num_experts, int64_t max_pages, int64_t pool_rows) {
  release_pages(p);
  const int64_t rows = offsets[num_experts], num_free = p.state[0];
  const int64_t pages = min(min((rows + kStashPageRows - 1) / kStashPageRows, num_free), max_pages);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < pages; i += kThreads) p.page[i] = p.free[num_free - 1 - i];
  if (threadIdx.x != 0) return;
  const int64_t kept = min(rows, pages * kStashPageRows);
  p.held[0] = static_cast<int32_t>(kept);
  p.held[1] = static_cast<int32_t>(pages);
  p.held[2] = static_cast<int32_t>(rows);
  p.state[0] = num_free - pages;
  p.state[1] += rows;
  counts[0] += static_cast<double>(rows - kept);
  counts[1] = fmax(counts[1], static_cast<double>(p.state[1]) / static_cast<double>(pool_rows));
}

__global__ void __launch_bounds__(kThreads)
    give_kernel(Pool p, int32_t* spilled, int64_t* since, const int32_t* offsets, int num_experts) {
  const Held held = release_pages(p);
  for (int i = threadIdx.x; i <= num_experts; i += kThreads) spilled[i] = max(offsets[i], held.kept);
  if (threadIdx.x == 0) *since = held.kept < offsets[num_experts] ? now_ns() : -1;
}

__global__ void end_kernel(double* counts, const int64_t* since) {
  if (*since >= 0) counts[2] += static_cast<double>(now_ns() - *since);
}

// A block owns every gridDim.x-th row. Words are the widest that both sides allow.
template <class Word, bool kUnstash>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(Word* pool, Word* x, const int32_t* page, const int32_t* held, int width, int stride) {
  const int64_t kept = held[0];
  for (int64_t r = blockIdx.x; r < kept; r += gridDim.x) {
    Word* stashed = pool + (page[r / kStashPageRows] * kStashPageRows + r % kStashPageRows) * stride;
    Word* row = x + r * width;
    for (int i = threadIdx.x; i < width; i += kThreads) {
      if constexpr (kUnstash)
        row[i] = stashed[i];
      else
        stashed[i] = row[i];
    }
  }
}

template <class Word, bool kUnstash>
void launch_copy(Stream& s, const Tensor& pool_SM, const Tensor& x_RC, const Tensor& page_Q, const Tensor& held_3,
                 int64_t first_byte) {
  const int64_t size = size_of(x_RC.dtype), word = sizeof(Word);
  const int64_t most = int64_t{gpu_limits(s).num_multiprocessors} * kBlocksPerMultiprocessor;
  const auto blocks = static_cast<unsigned>(std::min(x_RC.dim(0), most));
  copy_rows_kernel<Word, kUnstash><<<blocks, kThreads, 0, cuda_stream(s)>>>(
      reinterpret_cast<Word*>(static_cast<char*>(pool_SM.data) + first_byte), static_cast<Word*>(x_RC.data),
      page_Q.ptr<int32_t>(), held_3.ptr<int32_t>(), static_cast<int>(x_RC.dim(1) * size / word),
      static_cast<int>(pool_SM.dim(1) * size / word));
}

template <bool kUnstash>
void copy_rows(Stream& s, const Tensor& pool_SM, const Tensor& x_RC, const Tensor& page_Q, const Tensor& held_3,
               int64_t first) {
  const int64_t size = size_of(x_RC.dtype), first_byte = first * size;
  const int64_t steps = first_byte | x_RC.dim(1) * size | pool_SM.dim(1) * size;
  if (steps % 16 == 0)
    launch_copy<uint4, kUnstash>(s, pool_SM, x_RC, page_Q, held_3, first_byte);
  else if (steps % 4 == 0)
    launch_copy<uint32_t, kUnstash>(s, pool_SM, x_RC, page_Q, held_3, first_byte);
  else
    launch_copy<uint16_t, kUnstash>(s, pool_SM, x_RC, page_Q, held_3, first_byte);
}

template <class Op>
Pool pool_of(const Op& a) {
  return {a.free_P.template ptr<int32_t>(), a.page_Q.template ptr<int32_t>(), a.held_3.template ptr<int32_t>(),
          a.state_2.template ptr<int64_t>()};
}

}  // namespace

void clear_stash(Stream& s, const ClearStash& a) {
  clear_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(a.free_P.ptr<int32_t>(), a.free_P.numel(), a.state_2.ptr<int64_t>(),
                                                   a.counts_3.ptr<double>());
  check_launch("clear_stash");
}

void alloc_pages(Stream& s, const AllocPages& a) {
  take_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(pool_of(a), a.counts_3.ptr<double>(), a.offsets_e1.ptr<int32_t>(),
                                                  static_cast<int>(a.offsets_e1.numel() - 1), a.page_Q.numel(),
                                                  a.free_P.numel() * kStashPageRows);
  check_launch("alloc_pages");
}

void stash_rows(Stream& s, const StashRows& a) {
  copy_rows<false>(s, a.pool_SM, a.x_RC, a.page_Q, a.held_3, a.first);
  check_launch("stash_rows");
}

void unstash_rows(Stream& s, const UnstashRows& a) {
  copy_rows<true>(s, a.pool_SM, a.x_RC, a.page_Q, a.held_3, a.first);
  check_launch("unstash_rows");
}

void free_pages(Stream& s, const FreePages& a) {
  give_kernel<<<1, kThreads, 0, cuda_stream(s)>>>(pool_of(a), a.spilled_e1.ptr<int32_t>(), a.since_1.ptr<int64_t>(),
                                                  a.offsets_e1.ptr<int32_t>(),
                                                  static_cast<int>(a.offsets_e1.numel() - 1));
  check_launch("free_pages");
}

void end_spill(Stream& s, const EndSpill& a) {
  end_kernel<<<1, 1, 0, cuda_stream(s)>>>(a.counts_3.ptr<double>(), a.since_1.ptr<int64_t>());
  check_launch("end_spill");
}

}  // namespace moebius::cuda
