// The updates of AdamW and SGD: one kernel reads, updates and stores all elements of many tensors.
#include "ops/optimizer/cuda/update.h"

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cuda {
namespace {

template <class M, int kNum>
__device__ __forceinline__ void store_moment(void* to, const float (&from)[kNum], const uint32_t (&draws)[kNum],
                                             int64_t i) {
  if constexpr (sizeof(M) == 2)
    store_stochastic(to, from, draws, i);
  else
    store(static_cast<M*>(to) + i, from);
}

// kNum elements a thread at a time.
template <int kNum, class K>
__device__ __forceinline__ void update_piece(const typename K::UpdateOf& t, const typename K::Rule& rule,
                                             const StepOf<typename K::Rule>& c, int64_t begin) {
  using M = typename K::M;
  const float keep = keep_of(c, t.weight_decay);
  const int64_t end = min(t.n, begin + kPiece);
  const auto rng = rng_of(t.draws, c.step);
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float g[kNum], m[kNum], v[kNum], w[kNum];
    load_grad(g, t, i);
    if (t.m) load(m, static_cast<const M*>(t.m) + i);
    if (t.v) load(v, static_cast<const M*>(t.v) + i);
    load_value<typename K::P, K::form>(w, t.param, t.value, i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) rule.update(c.scalars, keep, g[j] * c.scale, w[j], m[j], v[j], t.m != nullptr);
    Drawn<kNum> drawn;
    draw(drawn, t.draws, rng, i);
    if (t.m) store_moment<M>(t.m, m, drawn.m, i);
    if (t.v) store_moment<M>(t.v, v, drawn.v, i);
    store_value<typename K::P, K::form>(t.param, t.value, w, drawn, i);
  }
}

// Blocks take turns with the pieces of all tensors.
template <class K>
__global__ void __launch_bounds__(kThreads, 4)
    update_kernel(const __grid_constant__ Tensors<typename K::UpdateOf> tensors, typename K::Rule rule, StepScalars u,
                  int num_pieces) {
  __shared__ StepOf<typename K::Rule> shared;
  if (isnan(*u.scale)) return;
  if (threadIdx.x == 0) shared = step_of(rule, u);
  __syncthreads();
  const StepOf<typename K::Rule> c = shared;
  for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const auto& t = owner_of(tensors, piece);
    const int64_t begin = static_cast<int64_t>(piece - t.first) * kPiece;
    if (t.whole)
      update_piece<4, K>(t, rule, c, begin);
    else
      update_piece<1, K>(t, rule, c, begin);
  }
}

// Updates the tensors of this kind.
template <class K>
void update_kind(Stream& s, std::span<const UpdatedTensor> tensors, const typename K::Rule& rule,
                 const StepScalars& step) {
  using U = typename K::UpdateOf;
  const auto pieces = [](const UpdatedTensor& t) {
    const DType moments = t.m_n.empty() ? DType::f32 : t.m_n.dtype;
    const bool is_kind =
        t.param_n.dtype == dtype_of<typename K::P> && form_of(t) == K::form && moments == dtype_of<typename K::M>;
    return is_kind ? div_ceil(t.param_n.numel(), int64_t{kPiece}) : 0;
  };
  for_each_group<U>(tensors, update_of<U>, pieces, [&](const Tensors<U>& group, int num_pieces) {
    const int blocks = std::min(num_pieces, limited_blocks(s, kMaxBlocks));
    update_kernel<K><<<blocks, kThreads, 0, cuda_stream(s)>>>(group, rule, step, num_pieces);
  });
}

template <class Rule, class M>
void update_with(Stream& s, std::span<const UpdatedTensor> tensors, const Rule& rule, const StepScalars& step) {
  update_kind<Kind<Rule, float, Form::master, M>>(s, tensors, rule, step);
  update_kind<Kind<Rule, bf16, Form::master, M>>(s, tensors, rule, step);
  update_kind<Kind<Rule, bf16, Form::remainder, M>>(s, tensors, rule, step);
  update_kind<Kind<Rule, bf16, Form::param, M>>(s, tensors, rule, step);
}

bool reads_lr(const AdamW&) { return true; }
bool reads_lr(const Sgd& a) { return a.reads_lr; }

template <class Rule, class Op>
void update_all(Stream& s, const Op& a, const Rule& rule) {
  const StepScalars step{.scale = a.scale_1.template ptr<float>(),
                         .lr_and_step = a.lr_and_step_2.empty() ? nullptr : a.lr_and_step_2.template ptr<double>(),
                         .step = a.step,
                         .lr = a.lr,
                         .reads_lr = reads_lr(a)};
  update_with<Rule, float>(s, a.tensors, rule, step);
  update_with<Rule, bf16>(s, a.tensors, rule, step);
  update_blocks(s, a.tensors, rule, step);
}

constexpr int kSumLoads = 4;  // of 16 bytes, on their way at once: the bus has a long latency
constexpr int kHostBlocks = 132 * 4;

// kNum elements a thread at a time, and kSumLoads of these before the first is used.
template <int kNum>
__global__ void __launch_bounds__(kThreads) sum_gradient_kernel(bf16* sum, const float* grad, int64_t n, bool adds) {
  constexpr int64_t kStep = int64_t{kThreads} * kNum;
  for (int64_t first = blockIdx.x * kStep * kSumLoads; first < n; first += gridDim.x * kStep * kSumLoads) {
    Raw<bf16, kNum> before[kSumLoads];
#pragma unroll
    for (int k = 0; k < kSumLoads; ++k) {
      const int64_t i = first + k * kStep + threadIdx.x * kNum;
      before[k] = fetch<kNum>(sum + i, adds && i < n);
    }
#pragma unroll
    for (int k = 0; k < kSumLoads; ++k) {
      const int64_t i = first + k * kStep + threadIdx.x * kNum;
      if (i >= n) break;
      float x[kNum], y[kNum];
      load(x, grad + i);
      unpack<bf16>(y, before[k]);
#pragma unroll
      for (int j = 0; j < kNum; ++j) y[j] = adds ? y[j] + x[j] : x[j];
      store(sum + i, y);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(float* master, const bf16* weight, const uint16_t* remainder, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) master[i] = joined(weight[i], remainder[i]);
}

// remainder may be null.
__global__ void __launch_bounds__(kThreads)
    split_kernel(bf16* weight, uint16_t* remainder, const float* master, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const WeightAndRemainder both = split(master[i]);
  weight[i] = both.weight;
  if (remainder) remainder[i] = both.remainder;
}

}  // namespace

void adamw(Stream& s, const AdamW& a) {
  update_all(s, a, AdamWRule{.beta1 = a.beta1, .beta2 = a.beta2, .eps = a.eps});
  check_launch("adamw");
}

void sgd(Stream& s, const Sgd& a) {
  update_all(s, a, SgdRule{.momentum = a.momentum});
  check_launch("sgd");
}

void sum_gradient(Stream& s, const SumGradient& a) {
  const int64_t n = a.grad_n.numel();
  bf16* sum = a.sum_n.ptr<bf16>();
  const float* grad = a.grad_n.ptr<float>();
  const auto launch = [&](auto kernel, int num) {
    const int64_t pieces = div_ceil(n, int64_t{kThreads} * num * kSumLoads);
    const int blocks =
        static_cast<int>(std::min<int64_t>(pieces, limited_blocks(s, a.on_host ? kHostBlocks : kMaxBlocks)));
    kernel<<<blocks, kThreads, 0, cuda_stream(s)>>>(sum, grad, n, a.adds);
  };
  if (is_whole(n, 8, sum, grad))
    launch(sum_gradient_kernel<8>, 8);
  else
    launch(sum_gradient_kernel<1>, 1);
  check_launch("sum_gradient");
}

void join_master(Stream& s, const JoinMaster& a) {
  const int64_t n = a.master_n.numel();
  join_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(a.master_n.ptr<float>(), a.weight_n.ptr<bf16>(),
                                                                        a.remainder_n.ptr<uint16_t>(), n);
  check_launch("join_master");
}

void split_master(Stream& s, const SplitMaster& a) {
  const int64_t n = a.master_n.numel();
  uint16_t* remainder = a.remainder_n.empty() ? nullptr : a.remainder_n.ptr<uint16_t>();
  split_kernel<<<num_blocks(n, kThreads), kThreads, 0, cuda_stream(s)>>>(a.weight_n.ptr<bf16>(), remainder,
                                                                         a.master_n.ptr<float>(), n);
  check_launch("split_master");
}

}  // namespace moebius::cuda
