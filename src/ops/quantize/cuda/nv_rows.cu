// A thread has a block of 16 numbers: 16 rows of a column with the Hadamard transform, else 16 columns of a row.
#include "device/cuda/cuda.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/nv_rows_math.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128;  // at most; fewer where a row has fewer blocks

struct Draws {
  DeviceRng any_step;
  int64_t first_expert, num_experts, groups_per_expert, all_columns;
  WholeColumns columns;
};

// The place of a thread: a row block, and a column or 16 of them.
struct Place {
  NvRowBlock rows;
  int64_t column;
  bool is_inside;
};

template <bool kHadamard>
__device__ __forceinline__ Place place_of(const NvView& a) {
  const int64_t b = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  Place t{.rows = nv_row_block(a, blockIdx.x), .column = kHadamard ? b : b * kNvBlock};
  t.is_inside = t.rows.count > 0 && t.column < a.C;
  return t;
}

// kWhole: rows are whole blocks, at multiples of 16 bytes.
template <class T, bool kHadamard, bool kWhole>
__device__ __forceinline__ void load_block(float (&v)[kNvBlock], const NvView& a, const Place& t) {
  const auto* x = static_cast<const T*>(a.x);
  if constexpr (kHadamard) {
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j)
      v[j] = j < t.rows.count ? element(x[nv_row_of_x(a, nv_row_at(a, t.rows.begin + j)) * a.C + t.column]) : 0.0f;
    hadamard(v);
  } else if constexpr (kWhole) {
    load(v, x + nv_row_of_x(a, t.rows.begin) * a.C + t.column);
  } else {
    const T* from = x + nv_row_of_x(a, t.rows.begin) * a.C + t.column;
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) v[j] = t.column + j < a.C ? element(from[j]) : 0.0f;
  }
}

template <class T, bool kHadamard, bool kWhole>
__device__ __forceinline__ void store_block(T* y, const float (&v)[kNvBlock], const NvView& a, const Place& t) {
  if constexpr (kHadamard) {
#pragma unroll
    for (int k = 0; k < kNvBlock; ++k) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kNvBlock; ++j) sum = __fadd_rn(sum, is_negative_in_undoing(j, k) ? -v[j] : v[j]);
      if (k < t.rows.count) set(y[nv_row_at(a, t.rows.begin + k) * a.C + t.column], factor_of_undoing(k) * sum);
    }
  } else if constexpr (kWhole) {
    store(y + nv_row_at(a, t.rows.begin) * a.C + t.column, v);
  } else {
    T* to = y + nv_row_at(a, t.rows.begin) * a.C + t.column;
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j)
      if (t.column + j < a.C) set(to[j], v[j]);
  }
}

template <class T, bool kHadamard, bool kWhole>
__global__ void __launch_bounds__(kThreads) magnitudes_kernel(const __grid_constant__ NvView a, uint32_t* bits_M) {
  __shared__ uint32_t shared;
  if (threadIdx.x == 0) shared = 0;
  __syncthreads();
  const Place t = place_of<kHadamard>(a);
  if (t.is_inside) {
    float v[kNvBlock];
    load_block<T, kHadamard, kWhole>(v, a, t);
    atomicMax(&shared, nv_largest_bits(v));
  }
  __syncthreads();
  if (threadIdx.x == 0 && shared > 0) atomicMax(bits_M + nv_batch(a, nv_row_at(a, t.rows.begin)), shared);
}

// The sums of a thread block, by its first thread. Counts are integers, so no order changes them.
__device__ void add_stats(double* stats_5, const NvStats& of_thread) {
  __shared__ NvStats all[kThreads];
  all[threadIdx.x] = of_thread;
  for (int n = static_cast<int>(blockDim.x) / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) all[threadIdx.x].add(all[threadIdx.x + n]);
  }
  if (threadIdx.x != 0) return;
  const NvStats f = all[0];
  if (f.elements == 0) return;
  atomicAdd(stats_5, static_cast<double>(f.elements));
  atomicAdd(stats_5 + 1, static_cast<double>(f.saturated));
  atomicAdd(stats_5 + 2, static_cast<double>(f.zeroed));
  if (f.largest == 0) return;
  // The bits of positive numbers are ordered as the numbers are; a smallest scale of 0 is none yet.
  const auto bits_of = [](float x) { return static_cast<unsigned long long>(__double_as_longlong(double{x})); };
  atomicMax(reinterpret_cast<unsigned long long*>(stats_5 + 4), bits_of(f.largest));
  auto* smallest = reinterpret_cast<unsigned long long*>(stats_5 + 3);
  for (unsigned long long old = *smallest; old == 0 || old > bits_of(f.smallest);) {
    const unsigned long long seen = atomicCAS(smallest, old, bits_of(f.smallest));
    if (seen == old) break;
    old = seen;
  }
}

template <class T, bool kHadamard, bool kWhole, bool kDraws>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ NvView a, T* y, const int32_t* magnitudes, int num_ranks, int64_t stride,
                 const __grid_constant__ Draws draws, double* stats_5) {
  const Place t = place_of<kHadamard>(a);
  NvStats stats;
  if (t.is_inside) {
    const int64_t row = nv_row_at(a, t.rows.begin), batch = nv_batch(a, row);
    uint32_t tensor_bits = 0;
    for (int w = 0; w < num_ranks; ++w)
      tensor_bits = max(tensor_bits, static_cast<uint32_t>(magnitudes[w * stride + batch]));
    const NvDrawRow draw{.token = nv_token(a, row),
                         .expert = draws.first_expert + t.rows.group / draws.groups_per_expert,
                         .num_experts = draws.num_experts,
                         .columns = draws.all_columns};
    const DeviceRng rng = kDraws ? draws.any_step.at_step(static_cast<uint64_t>(a.draw[0])) : DeviceRng();
    float v[kNvBlock];
    load_block<T, kHadamard, kWhole>(v, a, t);
    const NvBlockScale scale = nv_scale_of_block(nv_largest_bits(v), tensor_bits);
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) {
      const float x = v[j], scaled = x * scale.inverse;
      uint8_t code;
      if constexpr (kDraws) {
        const int64_t column = whole_column(draws.columns, kHadamard ? t.column : t.column + j);
        code = draw_f4_e2m1(scaled, rng.uniform(draw.index(kHadamard ? j : 0, column)));
      } else {
        code = to_f4_e2m1(scaled);
      }
      v[j] = nv_value(code, scale);
      if (stats_5) nv_count(stats, x, v[j], scale);
    }
    store_block<T, kHadamard, kWhole>(y, v, a, t);
  }
  if (stats_5) add_stats(stats_5, stats);
}

struct Launch {
  dim3 grid;
  int threads;
};
Launch launch_of(const NvView& a) {
  const int64_t blocks = a.hadamard ? a.C : div_ceil(a.C, int64_t{kNvBlock});
  const int threads = blocks <= 32 ? 32 : blocks <= 64 ? 64 : kThreads;
  return {{static_cast<unsigned>(a.row_blocks()), static_cast<unsigned>(div_ceil(blocks, int64_t{threads})), 1},
          threads};
}

bool has_whole_blocks(const NvView& a, const Tensor& y) {
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return !a.hadamard && a.C % kNvBlock == 0 && is_aligned(a.x) && (y.empty() || is_aligned(y.data));
}

// Calls f<kHadamard, kWhole>().
template <class F>
void with_blocks(const NvView& a, const Tensor& y, F f) {
  if (a.hadamard) return f.template operator()<true, false>();
  if (has_whole_blocks(a, y)) return f.template operator()<false, true>();
  f.template operator()<false, false>();
}

struct Order {
  int32_t *order, *of_batches;
  const int32_t *offsets, *index, *source;
  int num_experts, num_batches;
  int64_t batch_tokens;
  __device__ int64_t batch_and_token(int32_t row) const {
    const int64_t token = index[source ? source[row] : row];
    return nv_batch_of_token(token, batch_tokens, num_batches) << 32 | static_cast<uint32_t>(token);
  }
};

// The place of a row is the number of rows of its expert that come before it. Blocks of x share an expert.
__global__ void __launch_bounds__(kThreads) order_kernel(const __grid_constant__ Order a) {
  __shared__ int64_t others[kThreads];
  const int32_t begin = a.offsets[blockIdx.y], end = a.offsets[blockIdx.y + 1];
  for (int32_t first = begin + static_cast<int32_t>(blockIdx.x) * kThreads; first < end;
       first += static_cast<int32_t>(gridDim.x) * kThreads) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x);
    const int64_t own = row < end ? a.batch_and_token(row) : 0;
    int32_t before = 0;
    for (int32_t of = begin; of < end; of += kThreads) {
      __syncthreads();
      const int32_t there = of + static_cast<int32_t>(threadIdx.x);
      if (there < end) others[threadIdx.x] = a.batch_and_token(there);
      __syncthreads();
      for (int j = 0; j < min(kThreads, end - of); ++j)
        before += others[j] < own || (others[j] == own && of + j < row) ? 1 : 0;
    }
    if (row < end) a.order[begin + before] = row;
  }
}

// A thread block has a micro-batch of an expert: it counts the rows of earlier ones.
__global__ void __launch_bounds__(kThreads) batches_kernel(const __grid_constant__ Order a) {
  __shared__ int before;
  const int e = static_cast<int>(blockIdx.x) / a.num_batches, m = static_cast<int>(blockIdx.x) % a.num_batches;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  int own = 0;
  for (int32_t row = a.offsets[e] + static_cast<int32_t>(threadIdx.x); row < a.offsets[e + 1]; row += kThreads)
    own += a.batch_and_token(row) >> 32 < m ? 1 : 0;
  atomicAdd(&before, own);
  __syncthreads();
  if (threadIdx.x != 0) return;
  a.of_batches[blockIdx.x] = a.offsets[e] + before;
  if (static_cast<int>(blockIdx.x) == a.num_experts * a.num_batches - 1)
    a.of_batches[blockIdx.x + 1] = a.offsets[e + 1];
}

}  // namespace

void nv_magnitudes(Stream& s, const NvMagnitudes& a) {
  const NvView view = view_of(a.of, a.draw_2);
  check_cuda(cudaMemsetAsync(a.bits_M.data, 0, static_cast<size_t>(a.bits_M.num_bytes()), cuda_stream(s)),
             "nv_magnitudes");
  if (view.R == 0 || view.C == 0) return;
  with_float_type(a.of.x_NC.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_blocks(view, {}, [&]<bool kHadamard, bool kWhole>() {
      const Launch launch = launch_of(view);
      magnitudes_kernel<T, kHadamard, kWhole>
          <<<launch.grid, launch.threads, 0, cuda_stream(s)>>>(view, static_cast<uint32_t*>(a.bits_M.data));
    });
  });
  check_launch("nv_magnitudes");
}

void nv_round(Stream& s, const NvRound& a) {
  const NvView view = view_of(a.of, a.draws.draw_2);
  const NvDraws& how = a.draws;
  const Draws draws{.any_step = DeviceRng(Rng(how.seed, RngSite::rounding, 0, how.key)),
                    .first_expert = how.first_expert,
                    .num_experts = how.num_experts,
                    .groups_per_expert = how.groups_per_expert,
                    .all_columns = how.columns.count > 0 ? how.columns.count : view.C,
                    .columns = how.columns};
  with_float_type(a.of.x_NC.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_blocks(view, a.y_RC, [&]<bool kHadamard, bool kWhole>() {
      const Launch launch = launch_of(view);
      const auto kernel =
          a.draws_elements ? round_kernel<T, kHadamard, kWhole, true> : round_kernel<T, kHadamard, kWhole, false>;
      kernel<<<launch.grid, launch.threads, 0, cuda_stream(s)>>>(
          view, a.y_RC.ptr<T>(), a.magnitude_WB.ptr<int32_t>() + a.first_batch, narrow<int>(a.magnitude_WB.dim(0)),
          a.magnitude_WB.dim(1), draws, a.stats_5.empty() ? nullptr : a.stats_5.ptr<double>());
    });
  });
  check_launch("nv_round");
}

void nv_order(Stream& s, const NvOrder& a) {
  const Order order{.order = a.order_R.ptr<int32_t>(),
                    .of_batches = a.offsets_of_batches.ptr<int32_t>(),
                    .offsets = a.offsets_e1.ptr<int32_t>(),
                    .index = a.index_N.ptr<int32_t>(),
                    .source = a.source_R.empty() ? nullptr : a.source_R.ptr<int32_t>(),
                    .num_experts = narrow<int>(a.offsets_e1.numel() - 1),
                    .num_batches = narrow<int>(a.num_batches),
                    .batch_tokens = a.batch_tokens};
  constexpr unsigned kBlocksOfExpert = 32;
  order_kernel<<<dim3(kBlocksOfExpert, static_cast<unsigned>(order.num_experts)), kThreads, 0, cuda_stream(s)>>>(order);
  batches_kernel<<<static_cast<unsigned>(order.num_experts * order.num_batches), kThreads, 0, cuda_stream(s)>>>(order);
  check_launch("nv_order");
}

}  // namespace moebius::cuda
