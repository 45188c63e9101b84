// The parts that the kernels of updates share: the rules, the forms of the updated values, and the draws.
#pragma once

#include <type_traits>

#include "ops/cuda/philox.h"
#include "ops/cuda/tensors.h"
#include "ops/cuda/vector.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/rounding.h"

namespace moebius::cuda {

constexpr int kThreads = 256;
// Blocks of an update: each computes the scalars of the step once, for many elements.
constexpr int kMaxBlocks = 132 * 8;
constexpr int kPiece = kThreads * 4 * 4;  // elements; a multiple of kCodeBlock

// The form of the updated values: an f32 master, a remainder with a bf16 param, or the param alone.
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
  const void* grad;
  int64_t n;
  float weight_decay;
  int first;
  bool whole;         // in vectors of four
  bool grad_is_bf16;  // else f32
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
  bool reads_lr;  // false: only the step is read from memory
};

// Scalars are computed in double. Multiply-adds are fused explicitly: otherwise the compiler would decide for each
// form and width of a kernel, and shards would get other bits than the whole.
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
  const int64_t at = draws.begin + i, row = quotient(at, draws.run);
  auto in_run = static_cast<uint32_t>(at - row * draws.run);
  int64_t index = draws.first + row * draws.stride + in_run;
#pragma unroll
  for (int j = 0; j < kNum; ++j) {
    const uint2 bits = rng.bits(static_cast<uint64_t>(index));
    const bool ends = ++in_run == draws.run;
    index += ends ? draws.stride - draws.run + 1 : 1;
    in_run = ends ? 0 : in_run;
    to.m[j] = bits.x & 0xffffu;
    to.v[j] = bits.x >> 16;
    to.weight[j] = bits.y & 0xffffu;
  }
}
template <int kNum>
__device__ __forceinline__ void draw(Drawn<kNum>&, const NoDraws&, const NoDraws&, int64_t) {}

__device__ __forceinline__ DeviceRng rng_of(const Draws& draws, uint64_t step) { return draws.rng.at_step(step); }
__device__ __forceinline__ NoDraws rng_of(const NoDraws&, uint64_t) { return {}; }

template <int kNum, class U>
__device__ __forceinline__ void load_grad(float (&g)[kNum], const U& t, int64_t i) {
  if (t.grad_is_bf16)
    load(g, static_cast<const bf16*>(t.grad) + i);
  else
    load(g, static_cast<const float*>(t.grad) + i);
}

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

template <class P, Form form, class M>
inline constexpr bool kDrawsBits = form == Form::param || sizeof(M) < 4;

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

// Returns the scalars of this step, for the block's first thread to share.
template <class Rule>
__device__ __forceinline__ StepOf<Rule> step_of(const Rule& rule, const StepScalars& u) {
  const float lr = u.lr_and_step && u.reads_lr ? static_cast<float>(u.lr_and_step[0]) : u.lr;
  const double step = u.lr_and_step ? u.lr_and_step[1] : static_cast<double>(u.step);
  return {.lr = lr, .scale = *u.scale, .step = static_cast<uint64_t>(step), .scalars = rule.scalars(lr, step)};
}
template <class Rule>
__device__ __forceinline__ float keep_of(const StepOf<Rule>& c, float weight_decay) {
  return static_cast<float>(1.0 - static_cast<double>(c.lr) * weight_decay);
}

inline Form form_of(const UpdatedTensor& t) {
  return !t.master_n.empty() ? Form::master : t.remainder_n.empty() ? Form::param : Form::remainder;
}

inline void set_draws(NoDraws&, const RoundingDraws&) {}
inline void set_draws(Draws& to, const RoundingDraws& from) {
  const bool contiguous = from.stride == from.run;
  to = {.rng = DeviceRng(Rng(from.seed, RngSite::rounding, 0, from.key)),
        .begin = from.begin,
        .stride = contiguous ? 1 : from.stride,
        .first = from.first,
        .run = contiguous ? 1 : static_cast<uint32_t>(narrow<int>(from.run))};
}

// The work on a tensor, without what the formats of moments add.
template <class U>
U update_of(const UpdatedTensor& t) {
  const Tensor& value = t.master_n.empty() ? t.remainder_n : t.master_n;
  U u{};
  u.param = t.param_n.data;
  u.value = value.data;
  u.m = t.m_n.data;
  u.v = t.v_n.data;
  u.grad = t.grad_n.data;
  u.n = t.param_n.numel();
  u.weight_decay = t.weight_decay;
  u.whole = is_whole(u.n, 4, static_cast<char*>(u.param), static_cast<char*>(u.value), static_cast<char*>(u.m),
                     static_cast<char*>(u.v), static_cast<const char*>(u.grad));  // null is aligned
  u.grad_is_bf16 = t.grad_n.dtype == DType::bf16;
  set_draws(u.draws, t.draws);
  return u;
}

// Launches with the kernels of moments in 8-bit blocks (block_update.cu).
void update_blocks(Stream& s, std::span<const UpdatedTensor> tensors, const AdamWRule& rule, const StepScalars& step);
void update_blocks(Stream& s, std::span<const UpdatedTensor> tensors, const SgdRule& rule, const StepScalars& step);

}  // namespace moebius::cuda
