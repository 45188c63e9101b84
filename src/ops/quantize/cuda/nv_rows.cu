// A thread has a block of 16 numbers: 16 rows of a column with the Hadamard transform, else 16 columns of a row.
#include "device/cuda/cuda.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/quantize/nv_rows_math.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 128;

struct Draws {
  DeviceRng any_step;
  bool draws;
  int64_t first_expert, num_experts, groups_per_expert, all_columns;
  WholeColumns columns;
};

// The place of a thread: a row block, and a column or 16 of them.
struct Place {
  NvRowBlock rows;
  int64_t column;
  bool is_inside;
};

__device__ __forceinline__ Place place_of(const NvView& a) {
  const int64_t b = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  Place t{.rows = nv_row_block(a, blockIdx.x), .column = a.hadamard ? b : b * kNvBlock};
  t.is_inside = t.rows.count > 0 && t.column < a.C;
  return t;
}

template <class T>
__device__ __forceinline__ void load_block(float (&v)[kNvBlock], const NvView& a, const Place& t) {
  const auto* x = static_cast<const T*>(a.x);
#pragma unroll
  for (int j = 0; j < kNvBlock; ++j) {
    v[j] = 0;
    if (a.hadamard) {
      if (j < t.rows.count) v[j] = element(x[nv_row_of_x(a, nv_row_at(a, t.rows.begin + j)) * a.C + t.column]);
    } else if (t.column + j < a.C) {
      v[j] = element(x[nv_row_of_x(a, t.rows.begin) * a.C + t.column + j]);
    }
  }
  if (a.hadamard) hadamard(v);
}

template <class T>
__global__ void __launch_bounds__(kThreads) magnitudes_kernel(const __grid_constant__ NvView a, uint32_t* bits_M) {
  __shared__ uint32_t shared;
  if (threadIdx.x == 0) shared = 0;
  __syncthreads();
  const Place t = place_of(a);
  if (t.is_inside) {
    float v[kNvBlock];
    load_block<T>(v, a, t);
    atomicMax(&shared, nv_largest_bits(v));
  }
  __syncthreads();
  if (threadIdx.x == 0 && shared > 0) atomicMax(bits_M + nv_batch(a, nv_row_at(a, t.rows.begin)), shared);
}

// The sums of a thread block, by its first thread. Counts are integers, so no order changes them.
__device__ void add_stats(double* stats_5, const NvStats& of_thread) {
  __shared__ NvStats all[kThreads];
  all[threadIdx.x] = of_thread;
  for (int n = kThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) all[threadIdx.x].add(all[threadIdx.x + n]);
  }
  const NvStats f = all[0];
  if (threadIdx.x != 0 || f.elements == 0) return;
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

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ NvView a, T* y, const int32_t* magnitudes, int num_ranks, int64_t stride,
                 const __grid_constant__ Draws draws, double* stats_5) {
  const Place t = place_of(a);
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
    const DeviceRng rng = draws.draws ? draws.any_step.at_step(static_cast<uint64_t>(a.draw[0])) : DeviceRng();
    float v[kNvBlock];
    load_block<T>(v, a, t);
    nv_round_block(v, tensor_bits, stats_5 ? &stats : nullptr, [&](int j, float x) {
      if (!draws.draws) return to_f4_e2m1(x);
      const int64_t column = whole_column(draws.columns, a.hadamard ? t.column : t.column + j);
      return draw_f4_e2m1(x, rng.uniform(draw.index(a.hadamard ? j : 0, column)));
    });
    if (a.hadamard) undo_hadamard(v, [](float p, float q) { return __fadd_rn(p, q); });
#pragma unroll
    for (int j = 0; j < kNvBlock; ++j) {
      if (a.hadamard) {
        if (j < t.rows.count) set(y[nv_row_at(a, t.rows.begin + j) * a.C + t.column], v[j]);
      } else if (t.column + j < a.C) {
        set(y[row * a.C + t.column + j], v[j]);
      }
    }
  }
  if (stats_5) add_stats(stats_5, stats);
}

dim3 grid_of(const NvView& a) {
  const int64_t blocks = a.hadamard ? a.C : div_ceil(a.C, int64_t{kNvBlock});
  return {static_cast<unsigned>(a.row_blocks()), static_cast<unsigned>(div_ceil(blocks, int64_t{kThreads})), 1};
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
    magnitudes_kernel<decltype(zero)>
        <<<grid_of(view), kThreads, 0, cuda_stream(s)>>>(view, static_cast<uint32_t*>(a.bits_M.data));
  });
  check_launch("nv_magnitudes");
}

void nv_round(Stream& s, const NvRound& a) {
  const NvView view = view_of(a.of, a.draws.draw_2);
  const NvDraws& how = a.draws;
  const Draws draws{.any_step = DeviceRng(Rng(how.seed, RngSite::rounding, 0, how.key)),
                    .draws = a.draws_elements,
                    .first_expert = how.first_expert,
                    .num_experts = how.num_experts,
                    .groups_per_expert = how.groups_per_expert,
                    .all_columns = how.columns.count > 0 ? how.columns.count : view.C,
                    .columns = how.columns};
  with_float_type(a.of.x_NC.dtype, [&](auto zero) {
    using T = decltype(zero);
    round_kernel<T><<<grid_of(view), kThreads, 0, cuda_stream(s)>>>(
        view, a.y_RC.ptr<T>(), a.magnitude_WB.ptr<int32_t>() + a.first_batch, narrow<int>(a.magnitude_WB.dim(0)),
        a.magnitude_WB.dim(1), draws, a.stats_5.empty() ? nullptr : a.stats_5.ptr<double>());
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
