// The updates of AdamW and SGD: one kernel reads, updates and stores all numbers of many tensors.
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/cuda/philox.h"
#include "ops/cuda/vector.h"
#include "ops/optimizer/cuda/tensors.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/optimizer_backends.h"
#include "ops/optimizer/rounding.h"

namespace moebius::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of an update: each works out the scalars of the step once, for many elements.
constexpr int kMaxBlocks = 132 * 8;
constexpr int kPiece = kThreads * 4 * 4;  // elements

// The form of the updated values: an f32 master, a remainder beside a bf16 param, or the param alone.
enum class Form { master, remainder, param };

// RoundingDraws on the device; rng is of step 0.
struct Draws {
  DeviceRng rng;
  int64_t begin, stride, first;
  uint32_t run;
};
struct NoDraws {};

template <bool kDraws>
struct Update {
  void *param, *value;  // value: the master or the remainder
  void *m, *v;          // null where the optimizer has none
  const float* grad;
  int64_t n;
  float weight_decay;
  int first;
  bool whole;  // in vectors of four
  std::conditional_t<kDraws, Draws, NoDraws> draws;
};
static_assert(sizeof(Tensors<Update<false>>) <= 4000 && kMaxTensors<Update<false>> == 56);
static_assert(sizeof(Tensors<Update<true>>) <= 4000);

// Scalars of a step that may be in memory.
struct StepScalars {
  const float* scale;
  const double* lr_and_step;  // [2], or null: then lr and step below
  int64_t step;
  float lr;
};

// Scalars are worked out in double. Updates say what is fused: the compiler would choose for each form and
// width of a kernel, and shards would have other bits than the whole.
struct AdamWRule {
  float beta1, beta2, eps;

  struct Scalars {
    float one_minus_beta1, one_minus_beta2, rate, inverse_sqrt_v;
  };
  __device__ Scalars scalars(float lr, double step) const {
    const double b1 = beta1, b2 = beta2;
    return {.one_minus_beta1 = static_cast<float>(1.0 - b1),
            .one_minus_beta2 = static_cast<float>(1.0 - b2),
            .rate = static_cast<float>(lr / (1.0 - pow(b1, step))),
            .inverse_sqrt_v = static_cast<float>(1.0 / sqrt(1.0 - pow(b2, step)))};
  }
  __device__ __forceinline__ void update(const Scalars& c, float keep, float g, float& w, float& m, float& v,
                                         bool) const {
    m = __fmaf_rn(beta1, m, __fmul_rn(c.one_minus_beta1, g));
    v = __fmaf_rn(beta2, v, __fmul_rn(__fmul_rn(c.one_minus_beta2, g), g));
    w = __fmaf_rn(keep, w, -__fdiv_rn(__fmul_rn(c.rate, m), __fmaf_rn(sqrtf(v), c.inverse_sqrt_v, eps)));
  }
};

struct SgdRule {
  float momentum;

  struct Scalars {
    float lr;
  };
  __device__ Scalars scalars(float lr, double) const { return {.lr = lr}; }
  __device__ __forceinline__ void update(const Scalars& c, float keep, float g, float& w, float& m, float&,
                                         bool has_m) const {
    if (has_m) g = m = __fmaf_rn(momentum, m, g);
    w = __fmaf_rn(keep, w, -__fmul_rn(c.lr, g));
  }
};

template <int kNum>
__device__ __forceinline__ void load_bits(uint16_t (&to)[kNum], const void* from, int64_t i) {
  const auto raw = fetch<kNum>(static_cast<const uint16_t*>(from) + i);
  const uint16_t* x = reinterpret_cast<const uint16_t*>(&raw);
#pragma unroll
  for (int j = 0; j < kNum; ++j) to[j] = x[j];
}

template <int kNum>
__device__ __forceinline__ void store_bits(void* to, const uint16_t (&from)[kNum], int64_t i) {
  Raw<uint16_t, kNum> raw;
  uint16_t* x = reinterpret_cast<uint16_t*>(&raw);
#pragma unroll
  for (int j = 0; j < kNum; ++j) x[j] = from[j];
  *reinterpret_cast<Raw<uint16_t, kNum>*>(static_cast<uint16_t*>(to) + i) = raw;
}

template <int kNum>
__device__ __forceinline__ void store_stochastic(void* to, const float (&from)[kNum], const uint32_t (&draws)[kNum],
                                                 int64_t i) {
  uint16_t bits[kNum];
#pragma unroll
  for (int j = 0; j < kNum; ++j) bits[j] = to_bf16_stochastic(from[j], draws[j]).bits;
  store_bits(to, bits, i);
}

// The draws of kNum elements: 16 bits each for m, v and the weight.
template <int kNum>
struct Drawn {
  uint32_t m[kNum], v[kNum], weight[kNum];
};

template <int kNum>
__device__ __forceinline__ void draw(Drawn<kNum>& to, const Draws& draws, const DeviceRng& rng, int64_t i) {
#pragma unroll
  for (int j = 0; j < kNum; ++j) {
    const int64_t at = draws.begin + i + j, row = quotient(at, draws.run);
    const uint2 bits = rng.bits(static_cast<uint64_t>(draws.first + row * draws.stride + (at - row * draws.run)));
    to.m[j] = bits.x & 0xffffu;
    to.v[j] = bits.x >> 16;
    to.weight[j] = bits.y & 0xffffu;
  }
}
template <int kNum>
__device__ __forceinline__ void draw(Drawn<kNum>&, const NoDraws&, const NoDraws&, int64_t) {}

__device__ __forceinline__ DeviceRng rng_of(const Draws& draws, uint64_t step) { return draws.rng.at_step(step); }
__device__ __forceinline__ NoDraws rng_of(const NoDraws&, uint64_t) { return {}; }

template <class P, Form form, int kNum>
__device__ __forceinline__ void load_value(float (&w)[kNum], const void* param, const void* value, int64_t i) {
  if constexpr (form == Form::master) {
    load(w, static_cast<const float*>(value) + i);
  } else if constexpr (form == Form::param) {
    load(w, static_cast<const P*>(param) + i);
  } else {
    uint16_t high[kNum], low[kNum];
    load_bits(high, param, i);
    load_bits(low, value, i);
#pragma unroll
    for (int j = 0; j < kNum; ++j) w[j] = joined(bf16{high[j]}, low[j]);
  }
}

template <class P, Form form, int kNum>
__device__ __forceinline__ void store_value(void* param, void* value, const float (&w)[kNum], const Drawn<kNum>& drawn,
                                            int64_t i) {
  if constexpr (form == Form::master) {
    store(static_cast<float*>(value) + i, w);
    store(static_cast<P*>(param) + i, w);
  } else if constexpr (form == Form::param) {
    store_stochastic(param, w, drawn.weight, i);
  } else {
    uint16_t high[kNum], low[kNum];
#pragma unroll
    for (int j = 0; j < kNum; ++j) {
      const WeightAndRemainder both = split(w[j]);
      high[j] = both.weight.bits;
      low[j] = both.remainder;
    }
    store_bits(param, high, i);
    store_bits(value, low, i);
  }
}

template <class M, int kNum>
__device__ __forceinline__ void store_moment(void* to, const float (&from)[kNum], const uint32_t (&draws)[kNum],
                                             int64_t i) {
  if constexpr (sizeof(M) == 2)
    store_stochastic(to, from, draws, i);
  else
    store(static_cast<M*>(to) + i, from);
}

template <class P, Form form, class M>
inline constexpr bool kDrawsBits = form == Form::param || sizeof(M) == 2;

// The types of a kernel: of the rule, of params, of moments, and the form.
template <class RuleOf, class POf, Form form_of, class MOf>
struct Kind {
  using Rule = RuleOf;
  using P = POf;
  using M = MOf;
  static constexpr Form form = form_of;
  using UpdateOf = Update<kDrawsBits<P, form, M>>;
};

template <class Rule>
struct StepOf {
  float lr, scale;
  uint64_t step;
  typename Rule::Scalars scalars;
};

// kNum elements a thread at a time.
template <int kNum, class K>
__device__ __forceinline__ void update_piece(const typename K::UpdateOf& t, const typename K::Rule& rule,
                                             const StepOf<typename K::Rule>& c, int64_t begin) {
  using M = typename K::M;
  const float keep = static_cast<float>(1.0 - static_cast<double>(c.lr) * t.weight_decay);
  const int64_t end = min(t.n, begin + kPiece);
  const auto rng = rng_of(t.draws, c.step);
  for (int64_t i = begin + threadIdx.x * kNum; i < end; i += kThreads * kNum) {
    float g[kNum], m[kNum], v[kNum], w[kNum];
    load(g, t.grad + i);
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
  const float scale = *u.scale;
  if (isnan(scale)) return;
  if (threadIdx.x == 0) {
    const float lr = u.lr_and_step ? static_cast<float>(u.lr_and_step[0]) : u.lr;
    const double step = u.lr_and_step ? u.lr_and_step[1] : static_cast<double>(u.step);
    shared = {.lr = lr, .scale = scale, .step = static_cast<uint64_t>(step), .scalars = rule.scalars(lr, step)};
  }
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

Form form_of(const UpdatedTensor& t) {
  return !t.master_n.empty() ? Form::master : t.remainder_n.empty() ? Form::param : Form::remainder;
}

void set_draws(NoDraws&, const RoundingDraws&) {}
void set_draws(Draws& to, const RoundingDraws& from) {
  const bool contiguous = from.stride == from.run;
  to = {.rng = DeviceRng(Rng(from.seed, RngSite::rounding, 0, from.key)),
        .begin = from.begin,
        .stride = contiguous ? 1 : from.stride,
        .first = from.first,
        .run = contiguous ? 1 : static_cast<uint32_t>(narrow<int>(from.run))};
}

template <class U>
U update_of(const UpdatedTensor& t) {
  const Tensor& value = t.master_n.empty() ? t.remainder_n : t.master_n;
  U u{.param = t.param_n.data,
      .value = value.data,
      .m = t.m_n.data,
      .v = t.v_n.data,
      .grad = t.grad_n.ptr<float>(),
      .n = t.param_n.numel(),
      .weight_decay = t.weight_decay};
  u.whole = is_whole(u.n, 4, static_cast<char*>(u.param), static_cast<char*>(u.value), static_cast<char*>(u.m),
                     static_cast<char*>(u.v), u.grad);  // null is aligned
  set_draws(u.draws, t.draws);
  return u;
}

// Updates those of the tensors that are of this kind.
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

template <class Rule, class Op>
void update_all(Stream& s, const Op& a, const Rule& rule) {
  const StepScalars step{.scale = a.scale_1.template ptr<float>(),
                         .lr_and_step = a.lr_and_step_2.empty() ? nullptr : a.lr_and_step_2.template ptr<double>(),
                         .step = a.step,
                         .lr = a.lr};
  update_with<Rule, float>(s, a.tensors, rule, step);
  update_with<Rule, bf16>(s, a.tensors, rule, step);
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
