#include "ops/qk_clip/qk_clip.h"

#include "device/cuda/cuda.h"
#include "ops/optimizer/cuda/update.h"
#include "ops/qk_clip/qk_clip_backends.h"

namespace moebius::cuda {
namespace {

struct Clip {
  void *param, *value;  // value: the master or the remainder
  int64_t n, first, cols;
  int64_t head_rows, root_rows, whole_rows;
  const float* max_logit;
  int64_t kv_group;
  bool of_keys;
  float threshold;
  const float* scale;
  const double* lr_and_step;  // null: step 1
  Draws draws;
};

// The same roundings as on the CPU. Logits that are not numbers count as 0.
__device__ __forceinline__ float gamma_of(const Clip& c, int64_t head) {
  const float* logits = c.max_logit + (c.of_keys ? head : head / c.kv_group) * c.kv_group;
  float largest = 0;
  for (int64_t i = 0; i < c.kv_group; ++i) largest = logits[i] > largest ? logits[i] : largest;
  return largest > c.threshold ? __fdiv_rn(c.threshold, largest) : 1.0f;
}

__device__ __forceinline__ float factor_of(const Clip& c, int64_t row) {
  const int64_t in_head = row % c.head_rows;
  if (in_head >= c.root_rows + c.whole_rows) return 1;
  const float gamma = gamma_of(c, row / c.head_rows);
  return in_head < c.root_rows ? __fsqrt_rn(gamma) : gamma;
}

// A block has a row of the matrix, or what of it is in the tensor.
template <class P, Form form>
__global__ void __launch_bounds__(kThreads) qk_clip_kernel(const __grid_constant__ Clip c) {
  if (isnan(*c.scale)) return;
  const int64_t row = c.first / c.cols + blockIdx.x;
  const float factor = factor_of(c, row);
  if (factor == 1) return;
  const DeviceRng rng = rng_of(c.draws, c.lr_and_step ? static_cast<uint64_t>(c.lr_and_step[1]) : 1);
  const int64_t end = min((row + 1) * c.cols - c.first, c.n);
  for (int64_t i = max(row * c.cols - c.first, int64_t{0}) + threadIdx.x; i < end; i += kThreads) {
    float w[1];
    load_value<P, form>(w, c.param, c.value, i);
    w[0] = __fmul_rn(w[0], factor);
    if constexpr (form == Form::param && sizeof(P) == 4) {
      store(static_cast<P*>(c.param) + i, w);
    } else {
      Drawn<1> drawn{};
      if constexpr (form == Form::param) draw(drawn, c.draws, rng, i);
      store_value<P, form>(c.param, c.value, w, drawn, i);
    }
  }
}

Clip clip_of(const QkClip& a) {
  const UpdatedTensor& t = a.tensor;
  Clip c{.param = t.param_n.data,
         .value = (t.master_n.empty() ? t.remainder_n : t.master_n).data,
         .n = t.param_n.numel(),
         .first = a.first,
         .cols = a.cols,
         .head_rows = a.head_rows,
         .root_rows = a.root_rows,
         .whole_rows = a.whole_rows,
         .max_logit = a.max_logit_H.ptr<float>(),
         .kv_group = a.kv_group,
         .of_keys = a.of_keys,
         .threshold = a.threshold,
         .scale = a.scale_1.ptr<float>(),
         .lr_and_step = a.lr_and_step_2.empty() ? nullptr : a.lr_and_step_2.ptr<double>()};
  set_draws(c.draws, t.draws);
  return c;
}

template <class P, Form form>
void launch(Stream& s, const QkClip& a) {
  const Clip c = clip_of(a);
  const int64_t rows = div_ceil(c.first + c.n, c.cols) - c.first / c.cols;
  qk_clip_kernel<P, form><<<static_cast<unsigned>(rows), kThreads, 0, cuda_stream(s)>>>(c);
  check_launch("qk_clip");
}

__global__ void __launch_bounds__(kThreads) max_over_ranks_kernel(float* max, const float* x, int64_t R, int64_t N) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= N) return;
  float largest = x[i];
  for (int64_t r = 1; r < R; ++r) largest = x[r * N + i] > largest ? x[r * N + i] : largest;
  max[i] = largest;
}

}  // namespace

void max_over_ranks(Stream& s, const MaxOverRanks& a) {
  const int64_t N = a.max_N.numel();
  max_over_ranks_kernel<<<num_blocks(N, kThreads), kThreads, 0, cuda_stream(s)>>>(
      a.max_N.ptr<float>(), a.x_RN.ptr<float>(), a.x_RN.dim(0), N);
  check_launch("max_over_ranks");
}

void qk_clip(Stream& s, const QkClip& a) {
  const Form form = form_of(a.tensor);
  if (a.tensor.param_n.dtype == DType::f32)
    return form == Form::master ? launch<float, Form::master>(s, a) : launch<float, Form::param>(s, a);
  if (form == Form::master) return launch<bf16, Form::master>(s, a);
  form == Form::remainder ? launch<bf16, Form::remainder>(s, a) : launch<bf16, Form::param>(s, a);
}

}  // namespace moebius::cuda
