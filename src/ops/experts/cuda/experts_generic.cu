// The expert ops for any shape in f32 or bf16, with f32 sums. A block of 256 threads owns a 64 x 64 tile of one expert:
// each thread has 4 x 4 sums. Operands are widened to f32 in shared memory, 16 of k at a time. A sum runs over k in
// order and does not depend on other rows.
#include <cuda_bf16.h>

#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"

namespace moebius::cuda {
namespace generic {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kPerThread = 4, kStride = kTile + 4;

__device__ float widened(float x) { return x; }
__device__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T rounded(float x);
template <>
__device__ float rounded<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The activation of experts.h and its derivatives.
struct Gated {
  __device__ Gated(const GatedActivation& f, float gate, float up)
      : g(gate > f.limit ? f.limit : gate),
        u((up > f.limit    ? f.limit
           : up < -f.limit ? -f.limit
                           : up) +
          f.shift),
        s(1.0f / (1.0f + expf(-f.alpha * g))),
        gate_counts(!(gate > f.limit)),
        up_counts(!(up > f.limit || up < -f.limit)) {}
  __device__ float value() const { return g * s * u; }
  __device__ float by_gate(float alpha) const { return gate_counts ? u * s * (1.0f + alpha * g * (1.0f - s)) : 0.0f; }
  __device__ float by_up() const { return up_counts ? g * s : 0.0f; }
  float g, u, s;
  bool gate_counts, up_counts;
};

struct Slices {
  float left[kDepth][kStride], right[kDepth][kStride];
};
using Sums = float[kPerThread][kPerThread];

__device__ int thread_row() { return threadIdx.x / 16 * kPerThread; }
__device__ int thread_col() { return threadIdx.x % 16 * kPerThread; }

__device__ void multiply(const Slices& s, Sums& sums) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    const float4 a = *reinterpret_cast<const float4*>(&s.left[k][thread_row()]);
    const float4 b = *reinterpret_cast<const float4*>(&s.right[k][thread_col()]);
    const float x[kPerThread] = {a.x, a.y, a.z, a.w}, y[kPerThread] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) sums[i][j] += x[i] * y[j];
    }
  }
}

// Loads slice[k][i] = at(i, k). Neighbouring threads have neighbouring k or i, whichever is contiguous in memory.
template <bool kAlongK, class At>
__device__ void load(float (&slice)[kDepth][kStride], At&& at) {
#pragma unroll
  for (int j = 0; j < kTile * kDepth / kThreads; ++j) {
    const int t = threadIdx.x + j * kThreads;
    const int k = kAlongK ? t % kDepth : t / kTile, i = kAlongK ? t / kDepth : t % kTile;
    slice[k][i] = at(i, k);
  }
}

// 64 rows of one run. Blocks count the row tiles of all runs; there are at most R / 64 + (number of runs) of them.
struct RowTile {
  int expert = -1;
  int64_t begin, end;
};
__device__ RowTile row_tile(const RowRuns& runs, int64_t index) {
  for (int g = 0; g < runs.num; ++g) {
    const int64_t begin = runs.begins[g], end = runs.ends[g], tiles = (end - begin + kTile - 1) / kTile;
    if (index < tiles) return {g / runs.of_expert, begin + index * kTile, min(begin + (index + 1) * kTile, end)};
    index -= tiles;
  }
  return {};
}

// out[r, n] = sum over k of x[token[r], k] w[e][n, k], where w's rows n are w_row apart and its columns k w_col.
template <class T>
struct RowProduct {
  const T *x, *w;
  RowRuns runs;
  const int32_t* token;
  int64_t k, n, w_row, w_col;
};

// Two columns are a pair: the gate of f and the up of f.
__device__ int64_t gated_row(int64_t col, int64_t F) { return col % 2 * F + col / 2; }

// Epilogue: epilogue(tile, first row, first column, sums). kGated: w has F gate rows and F up rows,
// taken in turn.
template <class T, bool kAlongK, bool kGated, class Epilogue>
__global__ void __launch_bounds__(kThreads) row_product_kernel(RowProduct<T> p, Epilogue epilogue) {
  const RowTile tile = row_tile(p.runs, blockIdx.x);
  if (tile.expert < 0) return;
  __shared__ Slices s;
  const T* w = p.w + tile.expert * p.n * p.k;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * kTile;
  Sums sums = {};
  for (int64_t k0 = 0; k0 < p.k; k0 += kDepth) {
    __syncthreads();
    load<true>(s.left, [&](int i, int k) {
      const int64_t r = tile.begin + i;
      if (r >= tile.end || k0 + k >= p.k) return 0.0f;
      return widened(p.x[(p.token ? p.token[r] : r) * p.k + k0 + k]);
    });
    load<kAlongK>(s.right, [&](int i, int k) {
      if (col + i >= p.n || k0 + k >= p.k) return 0.0f;
      const int64_t n = kGated ? gated_row(col + i, p.n / 2) : col + i;
      return widened(w[n * p.w_row + (k0 + k) * p.w_col]);
    });
    __syncthreads();
    multiply(s, sums);
  }
  epilogue(tile, tile.begin + thread_row(), col + thread_col(), sums);
}

template <class T, bool kAlongK, bool kGated = false, class Epilogue>
void launch(Stream& s, const char* name, const RowProduct<T>& p, int64_t num_rows, Epilogue epilogue) {
  const dim3 grid(num_rows / kTile + p.runs.num, div_ceil(p.n, kTile));
  row_product_kernel<T, kAlongK, kGated><<<grid, kThreads, 0, cuda_stream(s)>>>(p, epilogue);
  check_launch(name);
}

// Columns [first, first + C) of a bias for each expert; null: none.
template <class T>
struct ColumnBias {
  const T* b = nullptr;
  int64_t first = 0, C = 0;
  __device__ float at(int expert, int64_t col) const {
    return b && col >= first && col < first + C ? widened(b[expert * C + col - first]) : 0.0f;
  }
};

template <class T>
struct StoreSums {
  T* out;
  int64_t n;
  ColumnBias<T> bias = {};
  __device__ void operator()(const RowTile& tile, int64_t row, int64_t col, const Sums& sums) const {
    for (int i = 0; i < kPerThread && row + i < tile.end; ++i) {
      for (int j = 0; j < kPerThread && col + j < n; ++j)
        out[(row + i) * n + col + j] = rounded<T>(sums[i][j] + bias.at(tile.expert, col + j));
    }
  }
};

template <class T>
struct StoreGated {
  T *h, *a;
  int64_t F;
  ColumnBias<T> bias;
  GatedActivation activation;
  __device__ void operator()(const RowTile& tile, int64_t row, int64_t col, const Sums& sums) const {
    for (int i = 0; i < kPerThread && row + i < tile.end; ++i) {
      for (int j = 0; j < kPerThread && col + j < 2 * F; j += 2) {
        const int64_t r = row + i, f = (col + j) / 2;
        const T gate = rounded<T>(sums[i][j] + bias.at(tile.expert, f));
        const T up = rounded<T>(sums[i][j + 1] + bias.at(tile.expert, F + f));
        h[r * 2 * F + f] = gate;
        h[r * 2 * F + F + f] = up;
        a[r * F + f] = rounded<T>(Gated(activation, widened(gate), widened(up)).value());
      }
    }
  }
};

template <class T>
struct StoreGradients {
  T *dh, *sa;
  float* partial;  // [tiles of columns, R]
  const T* h;
  const float* weight;
  int64_t R, F;
  GatedActivation activation;

  // Returns g * a.
  __device__ float backward(int64_t r, int64_t f, float sum) const {
    const float g = widened(rounded<T>(sum));
    const Gated gated(activation, widened(h[r * 2 * F + f]), widened(h[r * 2 * F + F + f]));
    const float da = weight[r] * g;
    const float a = widened(rounded<T>(gated.value()));  // as expert_up rounded it
    dh[r * 2 * F + f] = rounded<T>(da * gated.by_gate(activation.alpha));
    dh[r * 2 * F + F + f] = rounded<T>(da * gated.by_up());
    sa[r * F + f] = rounded<T>(weight[r] * a);
    return g * a;
  }
  __device__ void operator()(const RowTile& tile, int64_t row, int64_t col, const Sums& sums) const {
    for (int i = 0; i < kPerThread; ++i) {
      float sum = 0;
      for (int j = 0; j < kPerThread && row + i < tile.end && col + j < F; ++j) {
        sum += backward(row + i, col + j, sums[i][j]);
      }
      for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      if (thread_col() == 0 && row + i < tile.end) partial[blockIdx.y * R + row + i] = sum;
    }
  }
};

template <class T>
struct Wgrad {
  float* dw;
  const T *left, *right;
  const int32_t *offsets, *left_index, *right_index;
  int64_t M, N;
  bool accumulate;
};

template <class T>
__global__ void __launch_bounds__(kThreads) wgrad_kernel(Wgrad<T> p) {
  const int64_t e = blockIdx.z, begin = p.offsets[e], end = p.offsets[e + 1];
  if (begin == end && p.accumulate) return;
  __shared__ Slices s;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile, col = static_cast<int64_t>(blockIdx.x) * kTile;
  Sums sums = {};
  const auto load_side = [&](float(&slice)[kDepth][kStride], const T* x, const int32_t* index, int64_t first,
                             int64_t width, int64_t r0) {
    load<false>(slice, [&](int i, int k) {
      const int64_t r = r0 + k;
      return r < end && first + i < width ? widened(x[(index ? index[r] : r) * width + first + i]) : 0.0f;
    });
  };
  for (int64_t r0 = begin; r0 < end; r0 += kDepth) {
    __syncthreads();
    load_side(s.left, p.left, p.left_index, row, p.M, r0);
    load_side(s.right, p.right, p.right_index, col, p.N, r0);
    __syncthreads();
    multiply(s, sums);
  }
  float* dw = p.dw + e * p.M * p.N;
  for (int i = 0; i < kPerThread && row + thread_row() + i < p.M; ++i) {
    for (int j = 0; j < kPerThread && col + thread_col() + j < p.N; ++j) {
      float& to = dw[(row + thread_row() + i) * p.N + col + thread_col() + j];
      to = p.accumulate ? to + sums[i][j] : sums[i][j];
    }
  }
}

// Calls fn(T()) with the element type of tensors of this dtype.
template <class Fn>
void with_device_type(DType dtype, Fn&& fn) {
  if (dtype == DType::bf16) return fn(__nv_bfloat16{});
  MOEBIUS_ASSERT(dtype == DType::f32);
  fn(float{});
}

template <class T>
T* elements(const Tensor& t) {
  return static_cast<T*>(t.data);
}

template <class T>
ColumnBias<T> bias_of(const Tensor& b, int64_t first) {
  if (b.empty()) return {};
  return {elements<T>(b), first, b.dim(1)};
}

// Elements that a thread loads at once.
template <class T, int kNum>
struct alignas(sizeof(T) * kNum) Chunk {
  T at[kNum];
};

// Returns the run of row r, -1 if it is in none. A whole warp calls it.
__device__ int run_of_row(const RowRuns& runs, int64_t r) {
  for (int first = 0; first < runs.num; first += 32) {
    const int g = first + static_cast<int>(threadIdx.x % 32);
    const uint32_t found = __ballot_sync(0xffffffffu, g < runs.num && runs.begins[g] <= r && r < runs.ends[g]);
    if (found != 0) return first + __ffs(found) - 1;
  }
  return -1;
}

// dweight[r] += <dout[token[r],:], b2[e]> over the columns that b2 has. A warp owns a row.
template <int kNum, class T>
__global__ void __launch_bounds__(kThreads) add_bias_products_kernel(float* dweight, const T* dout, ColumnBias<T> bias,
                                                                     RowRuns runs, const int32_t* token, int64_t D) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int run = run_of_row(runs, r);
  if (run < 0) return;
  const int e = run / runs.of_expert;
  const T* row = dout + (token ? token[r] : r) * D + bias.first;
  float sum = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x % 32 * kNum; c < bias.C; c += 32 * kNum) {
    const auto x = *reinterpret_cast<const Chunk<T, kNum>*>(row + c);
    const auto y = *reinterpret_cast<const Chunk<T, kNum>*>(bias.b + e * bias.C + c);
#pragma unroll
    for (int i = 0; i < kNum; ++i) sum = fmaf(widened(x.at[i]), widened(y.at[i]), sum);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) dweight[r] += sum;
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) {
  const int64_t R = a.a_RF.dim(0), F = a.a_RF.dim(1), D = a.x_TD.data.dim(1);
  with_device_type(a.x_TD.data.dtype, [&]<class T>(T) {
    const RowProduct<T> p{elements<T>(a.x_TD.data),
                          elements<T>(a.w1_e2FD.data),
                          RowRuns(a.rows, a.part),
                          index_of(a.rows),
                          D,
                          2 * F,
                          D,
                          1};
    launch<T, true, true>(
        s, "expert_up", p, R,
        StoreGated<T>{elements<T>(a.h_R2F), elements<T>(a.a_RF), F, bias_of<T>(a.b1_e2F, 0), a.activation});
  });
}

void expert_down(Stream& s, const ExpertDown& a) {
  const int64_t R = a.a_RF.data.dim(0), F = a.a_RF.data.dim(1), D = a.y_RD.dim(1);
  with_device_type(a.a_RF.data.dtype, [&]<class T>(T) {
    const RowProduct<T> p{
        elements<T>(a.a_RF.data), elements<T>(a.w2_eDF.data), RowRuns(a.rows, a.part), nullptr, F, D, F, 1};
    launch<T, true>(s, "expert_down", p, R, StoreSums<T>{elements<T>(a.y_RD), D, bias_of<T>(a.b2_eC, a.b2_first)});
  });
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  const int64_t R = a.dh_R2F.data.dim(0), F2 = a.dh_R2F.data.dim(1), D = a.dx_RD.dim(1);
  with_device_type(a.dh_R2F.data.dtype, [&]<class T>(T) {
    const RowProduct<T> p{
        elements<T>(a.dh_R2F.data), elements<T>(a.w1_e2FD.data), RowRuns(a.rows, a.part), nullptr, F2, D, 1, D};
    launch<T, false>(s, "d_expert_up", p, R, StoreSums<T>{elements<T>(a.dx_RD), D});
  });
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.data.dim(1);
  static_assert(kTile == kDWeightCols);
  with_device_type(a.dout_TD.data.dtype, [&]<class T>(T) {
    const RowProduct<T> p{
        elements<T>(a.dout_TD.data), elements<T>(a.w2_eDF.data), RowRuns(a.rows, a.part), index_of(a.rows), D, F, 1, F};
    const StoreGradients<T> store{elements<T>(a.dh_R2F),
                                  elements<T>(a.sa_RF),
                                  static_cast<float*>(a.scratch.data),
                                  elements<T>(a.h_R2F),
                                  a.weight_R.ptr<float>(),
                                  R,
                                  F,
                                  a.activation};
    launch<T, false>(s, "d_expert_down", p, R, store);
  });
  add_dweight_partials(s, a, num_dweight_partials(a));
  add_bias_products(s, a);
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  const int64_t E = a.dw_eMN.dim(0), M = a.dw_eMN.dim(1), N = a.dw_eMN.dim(2);
  with_device_type(a.left_RM.data.dtype, [&]<class T>(T) {
    const int32_t* index = index_of(a.rows);
    const Wgrad<T> p{a.dw_eMN.ptr<float>(),
                     elements<T>(a.left_RM.data),
                     elements<T>(a.right_RN.data),
                     a.rows.offsets_e1.ptr<int32_t>(),
                     a.gather_left ? index : nullptr,
                     a.gather_right ? index : nullptr,
                     M,
                     N,
                     a.accumulate};
    const dim3 grid(div_ceil(N, kTile), div_ceil(M, kTile), E);
    wgrad_kernel<T><<<grid, kThreads, 0, cuda_stream(s)>>>(p);
    check_launch("expert_wgrad");
  });
}

}  // namespace generic

namespace {

__device__ bool has_row(const RowRuns& runs, int64_t r) {
  if (runs.ends == runs.begins + 1) return r >= runs.begins[0] && r < runs.ends[runs.num - 1];
  for (int g = 0; g < runs.num; ++g)
    if (runs.begins[g] <= r && r < runs.ends[g]) return true;
  return false;
}

__global__ void add_dweight_partials_kernel(float* dweight, const float* partial, RowRuns runs, int64_t R,
                                            int64_t num_partials) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (!has_row(runs, r)) return;
  float sum = 0;
  for (int64_t p = 0; p < num_partials; ++p) sum += partial[p * R + r];
  dweight[r] = sum;
}

}  // namespace

void add_dweight_partials(Stream& s, const DExpertDown& a, int64_t num_partials) {
  constexpr int64_t kThreads = 256;
  const int64_t R = a.dweight_R.numel();
  add_dweight_partials_kernel<<<div_ceil(R, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.dweight_R.ptr<float>(), static_cast<const float*>(a.scratch.data), RowRuns(a.rows, a.part), R, num_partials);
  check_launch("d_expert_down");
}

void add_bias_products(Stream& s, const DExpertDown& a) {
  if (a.b2_eC.empty()) return;
  generic::with_device_type(a.dout_TD.data.dtype, [&]<class T>(T) {
    constexpr int kThreads = generic::kThreads, kNum = 16 / sizeof(T);
    const int64_t R = a.sa_RF.dim(0), D = a.dout_TD.data.dim(1);
    const auto begins_aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; };
    const bool aligned = D % kNum == 0 && a.b2_first % kNum == 0 && a.b2_eC.dim(1) % kNum == 0 &&
                         begins_aligned(a.dout_TD.data) && begins_aligned(a.b2_eC);
    const auto kernel = aligned ? generic::add_bias_products_kernel<kNum, T> : generic::add_bias_products_kernel<1, T>;
    kernel<<<div_ceil(R, kThreads / 32), kThreads, 0, cuda_stream(s)>>>(
        a.dweight_R.ptr<float>(), generic::elements<T>(a.dout_TD.data), generic::bias_of<T>(a.b2_eC, a.b2_first),
        RowRuns(a.rows, a.part), index_of(a.rows), D);
    check_launch("d_expert_down");
  });
}

}  // namespace moebius::cuda
