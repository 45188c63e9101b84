// A block draws for a row, or a cluster of blocks where ids are many. A warp owns a range of ids, so that the sums of
// warps say in which range the drawn id is. Masses are integers, so the draw does not depend on the number of warps.
#include "ops/draw/draw.h"

#include <cstddef>

#include "device/gpu_limits.h"
#include "ops/cuda/cluster.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/draw/draw_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kClusterBlocks = 8;
constexpr int64_t kClusterIds = 8192;          // fewer are read by one block as fast
constexpr uint64_t kNotFinite = ~uint64_t{0};  // above order_of() of all finite numbers

struct Args {
  int32_t *id, *read, *pos;
  const float* logits;
  const DrawRule* rule;
  int64_t vocab;
  int rows;
};

// mass_of of cpu/draw.cc, with its bits.
__device__ __forceinline__ int64_t mass_of(double z) {
  z = fmax(z, -30.0);
  const double n = rint(__dmul_rn(z, 1.4426950408889634));
  const double r = __fma_rn(-n, 1.9082149292705877e-10, __fma_rn(-n, 6.93147180369123816490e-01, z));
  double p = 1.0 / 479001600.0;
  p = __fma_rn(p, r, 1.0 / 39916800.0);
  p = __fma_rn(p, r, 1.0 / 3628800.0);
  p = __fma_rn(p, r, 1.0 / 362880.0);
  p = __fma_rn(p, r, 1.0 / 40320.0);
  p = __fma_rn(p, r, 1.0 / 5040.0);
  p = __fma_rn(p, r, 1.0 / 720.0);
  p = __fma_rn(p, r, 1.0 / 120.0);
  p = __fma_rn(p, r, 1.0 / 24.0);
  p = __fma_rn(p, r, 1.0 / 6.0);
  p = __fma_rn(p, r, 0.5);
  p = __fma_rn(p, r, 1.0);
  p = __fma_rn(p, r, 1.0);
  return __double2ll_rz(__dmul_rn(p, __longlong_as_double((static_cast<int64_t>(n) + 40 + 1023) << 52)));
}

// Orders as floats do; of equal ones the lower id is above.
__device__ __forceinline__ uint64_t order_of(float x, int64_t id) {
  const int32_t bits = __float_as_int(__fadd_rn(x, 0.0f));  // -0 becomes 0
  const uint32_t ordered = static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ uint64_t warp_max_of(uint64_t x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

__device__ __forceinline__ int64_t inclusive_sum(int64_t x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, x, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) x += other;
  }
  return x;
}

// fn(id, logit) for the ids [begin, end) of a warp; several loads are on their way at once.
template <class F>
__device__ __forceinline__ void for_ids(const float* logits, int64_t begin, int64_t end, F&& fn) {
  constexpr int kAhead = 8;
  for (int64_t first = begin + threadIdx.x % 32; first < end; first += 32 * kAhead) {
    float x[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) x[u] = first + u * 32 < end ? logits[first + u * 32] : 0.0f;
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u * 32 < end) fn(first + u * 32, x[u]);
  }
}

// The id of the range that holds `wanted`, of which `passed` is before the range. One warp calls it.
__device__ int64_t find_id(const float* logits, int64_t begin, int64_t end, double largest, double temperature,
                           int64_t wanted, int64_t passed) {
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t id = first + threadIdx.x % 32;
    const int64_t mass = id < end ? mass_of(__ddiv_rn(__dsub_rn(logits[id], largest), temperature)) : 0;
    const int64_t sum = passed + inclusive_sum(mass);
    const unsigned above = __ballot_sync(0xffffffffu, sum > wanted);
    if (above) return first + __ffs(static_cast<int>(above)) - 1;
    passed = __shfl_sync(0xffffffffu, sum, 31);
  }
  return end - 1;
}

__device__ __forceinline__ void store_draw(const Args& a, int n, int32_t pos, bool finite, int64_t id) {
  const int32_t drawn = finite ? static_cast<int32_t>(id) : 0;
  a.id[n] = drawn;
  *const_cast<volatile int32_t*>(a.read + int64_t{pos % 2} * a.rows + n) = finite ? drawn : -1;
  a.pos[n] = pos + 1;
}

// The values that the blocks of a row have at the same place of their shared memory.
template <int kBlocks, class T>
__device__ __forceinline__ void gather(T (&all)[kBlocks], const T& own) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) all[b] = kBlocks == 1 ? own : load_of_block(&own, b);
}

template <int kBlocks>
__device__ __forceinline__ void row_sync() {
  if constexpr (kBlocks == 1)
    __syncthreads();
  else
    cluster_sync();
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads) draw_kernel(Args a) {
  __shared__ uint64_t best[kWarps], block_best;
  __shared__ int64_t masses[kWarps], block_mass;
  let_next_start();
  wait_for_inputs();
  const DrawRule rule = *a.rule;
  const int n = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t pos = a.pos[n];
  const float* logits = a.logits + n * a.vocab;
  constexpr int kRanges = kBlocks * kWarps;
  const int64_t length = (rule.num_ids + kRanges - 1) / kRanges,
                begin = min((rank * kWarps + warp) * length, rule.num_ids), end = min(begin + length, rule.num_ids);
  uint64_t own = 0;
  bool odd = false;
  for_ids(logits, begin, end, [&](int64_t id, float x) {
    odd |= !(fabsf(x) <= 3.402823466e+38f);
    const uint64_t order = order_of(x, id);
    own = order > own ? order : own;
  });
  own = warp_max_of(own);
  if (lane == 0) best[warp] = own;
  const bool is_finite = !__syncthreads_or(odd);
  const uint64_t best_of_block = warp_max_of(best[lane]);
  if (threadIdx.x == 0) block_best = is_finite ? best_of_block : kNotFinite;
  row_sync<kBlocks>();
  uint64_t bests[kBlocks], top = 0;
  gather<kBlocks>(bests, block_best);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) top = bests[b] > top ? bests[b] : top;
  const int64_t top_id = 0xffffffffu - static_cast<uint32_t>(top);
  if (top == kNotFinite || rule.temperature == 0) {
    row_sync<kBlocks>();  // the others have read this block's best
    if (rank == 0 && threadIdx.x == 0) store_draw(a, n, pos, top != kNotFinite, top_id);
    return;
  }
  const double largest = logits[top_id];
  int64_t mass = 0;
  for_ids(logits, begin, end,
          [&](int64_t, float x) { mass += mass_of(__ddiv_rn(__dsub_rn(x, largest), rule.temperature)); });
  mass = warp_sum(mass);
  if (lane == 0) masses[warp] = mass;
  __syncthreads();
  const int64_t in_block = inclusive_sum(masses[lane]);
  if (threadIdx.x == 31) block_mass = in_block;
  row_sync<kBlocks>();
  int64_t of_blocks[kBlocks], before = 0, total = 0;
  gather<kBlocks>(of_blocks, block_mass);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b < rank) before += of_blocks[b];
    total += of_blocks[b];
  }
  row_sync<kBlocks>();  // the others have read this block's mass
  const int64_t up_to = before + in_block;
  DeviceRng rng;  // of the words of the rule
  static_assert(sizeof rng == sizeof rule.key + sizeof rule.counter_high);
  memcpy(&rng, reinterpret_cast<const char*>(&rule) + offsetof(DrawRule, key), sizeof rng);
  const float uniform = rng.uniform(static_cast<uint64_t>(pos + 1));
  const int64_t share = __double2ll_rz(__dmul_rn(uniform, __ll2double_rn(total)));
  const int64_t wanted = share < total ? share : total - 1;
  const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, up_to > wanted))) - 1;
  if (wanted < before || warp != owner) return;
  const int64_t passed = __shfl_sync(0xffffffffu, up_to - masses[lane], owner);
  const int64_t id = find_id(logits, begin, end, largest, rule.temperature, wanted, passed);
  if (lane == 0) store_draw(a, n, pos, true, id);
}

}  // namespace

void draw_tokens(Stream& s, const DrawTokens& a) {
  const Args args{.id = a.id_N.ptr<int32_t>(),
                  .read = a.read_2N.ptr<int32_t>(),
                  .pos = a.pos_N.ptr<int32_t>(),
                  .logits = a.logits_NV.ptr<float>(),
                  .rule = static_cast<const DrawRule*>(a.rule.data),
                  .vocab = a.logits_NV.dim(1),
                  .rows = narrow<int>(a.logits_NV.dim(0))};
  const bool early = args.rows <= kEarlyRows;
  const auto rows = static_cast<unsigned>(args.rows);
  if (args.vocab >= kClusterIds && gpu_limits(s).is_hopper())
    return launch_clusters(s, early, {.blocks = rows * kClusterBlocks, .threads = kThreads}, kClusterBlocks,
                           draw_kernel<kClusterBlocks>, args);
  launch_kernel(s, early, {.blocks = rows, .threads = kThreads}, draw_kernel<1>, args);
}

}  // namespace moebius::cuda
