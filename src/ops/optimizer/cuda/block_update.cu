// The updates of AdamW and SGD where moments are in 8-bit blocks (core/block_code.h). A warp has a
// block of each moment at a time, eight elements a lane.
#include "core/block_code.h"
#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "ops/optimizer/cuda/update.h"
#include "ops/optimizer/optimizer_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kLane = kCodeBlock / 32;  // elements of a lane
static_assert(kPiece % kCodeBlock == 0);

__constant__ const CodeValues kValues = code_values();

template <bool kDraws>
struct BlockUpdate : Update<kDraws> {
  float *m_scale, *v_scale;
};
static_assert(sizeof(Tensors<BlockUpdate<true>>) <= 4000);

template <BlockCode code>
__device__ __forceinline__ void load_codes(float (&to)[kLane], const void* codes, const float* scales,
                                           const CodeValues& values, int64_t i) {
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(codes) + i);
  const float scale = scales[i / kCodeBlock];
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    const uint32_t word = j < 4 ? raw.x : raw.y;
    to[j] = decoded(code, values, static_cast<uint8_t>(word >> (8 * (j % 4))), scale);
  }
}

// The codes of a table: their number, the highest decade I, and log2(10^I / 0.9).
template <BlockCode code>
struct CodeTable {
  static constexpr bool has_sign = code == BlockCode::with_sign;
  static constexpr int kNum = has_sign ? 128 : 256, kTop = has_sign ? 6 : 7;
  static constexpr float kLog2OfTop = has_sign ? 20.0835717f : 23.4054998f;
  __device__ static const float* values(const CodeValues& all) { return has_sign ? all.with_sign : all.without_sign; }
};

// Returns code_below() of x or a neighbour of it, without a search. The codes of decade i have equal distances:
//   k = 2^i - 1 + floor(x 10^(I - i) 2^i / 0.9 - 2^i / 9)
// At a border of decades both give the same k. So rounding errors, of the decade too, change k by one at most.
template <BlockCode code>
__device__ __forceinline__ int code_near(float x) {
  using Table = CodeTable<code>;
  constexpr float kLog10Of2 = 0.301029996f, kLog2Of5 = 2.32192809f;
  const float decade =
      fminf(fmaxf(floorf(__log2f(x) * kLog10Of2) + (Table::kTop + 1), 0.0f), static_cast<float>(Table::kTop));
  const float codes = exp2f(decade), per_unit = exp2f(fmaf(-kLog2Of5, decade, Table::kLog2OfTop));
  const int k = __float2int_rd(fmaf(x, per_unit, codes - 1 - codes * (1 / 9.0f)));
  return min(max(k, 0), Table::kNum - 1);
}

// The bits of encoded() (core/block_code.h).
template <BlockCode code>
__device__ __forceinline__ uint32_t encoded_block(const CodeValues& all, float x, float scale, uint32_t draw) {
  using Table = CodeTable<code>;
  if (!(scale > 0)) return 0;
  const float* values = Table::values(all);
  const float magnitude = fabsf(x) / scale;
  int k = code_near<code>(magnitude);
  float low = values[k], high = values[min(k + 1, Table::kNum - 1)];
  if (low > magnitude) {
    high = low;
    low = values[--k];
  } else if (high <= magnitude && k < Table::kNum - 1) {
    low = high;
    high = values[min(++k + 1, Table::kNum - 1)];
  }
  if (k < Table::kNum - 1) {
    if (!Table::has_sign && k == 0) return magnitude > 0 ? 1 : 0;
    const float share = (magnitude - low) / (high - low);
    k += share * 65536.0f > static_cast<float>(draw) ? 1 : 0;
  }
  return static_cast<uint32_t>(k) | (Table::has_sign && x < 0 && k > 0 ? 0x80u : 0u);
}

template <BlockCode code>
__device__ __forceinline__ void store_codes(void* codes, float* scales, const float (&from)[kLane],
                                            const uint32_t (&draws)[kLane], const CodeValues& values, int64_t i) {
  float largest = 0;
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    largest = fmaxf(largest, fabsf(from[j]));
    finite = finite && isfinite(from[j]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  finite = __all_sync(~0u, finite);
  uint32_t words[2] = {};
#pragma unroll
  for (int j = 0; j < kLane; ++j) {
    const uint32_t bits = finite ? encoded_block<code>(values, from[j], largest, draws[j]) : 0x7fu;
    words[j / 4] |= bits << (8 * (j % 4));
  }
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + i) = {words[0], words[1]};
  if (threadIdx.x % 32 == 0) scales[i / kCodeBlock] = finite ? largest : __int_as_float(0x7fc00000);
}

template <class RuleOf, class POf, Form form_of>
struct BlockKind {
  using Rule = RuleOf;
  using P = POf;
  static constexpr Form form = form_of;
  using UpdateOf = BlockUpdate<true>;
};

template <class K>
__device__ __forceinline__ void update_block(const typename K::UpdateOf& t, const typename K::Rule& rule,
                                             const StepOf<typename K::Rule>& c, const CodeValues& values, int64_t i) {
  float g[kLane], m[kLane], v[kLane], w[kLane];
  load_grad(g, t, i);
  load_codes<BlockCode::with_sign>(m, t.m, t.m_scale, values, i);
  if (t.v) load_codes<BlockCode::without_sign>(v, t.v, t.v_scale, values, i);
  load_value<typename K::P, K::form>(w, t.param, t.value, i);
  const float keep = keep_of(c, t.weight_decay);
#pragma unroll
  for (int j = 0; j < kLane; ++j) rule.update(c.scalars, keep, g[j] * c.scale, w[j], m[j], v[j], true);
  Drawn<kLane> drawn;
  draw(drawn, t.draws, rng_of(t.draws, c.step), i);
  store_codes<BlockCode::with_sign>(t.m, t.m_scale, m, drawn.m, values, i);
  if (t.v) store_codes<BlockCode::without_sign>(t.v, t.v_scale, v, drawn.v, values, i);
  store_value<typename K::P, K::form>(t.param, t.value, w, drawn, i);
}

template <class K>
__global__ void __launch_bounds__(kThreads)
    update_blocks_kernel(const __grid_constant__ Tensors<typename K::UpdateOf> tensors, typename K::Rule rule,
                         StepScalars u, int num_pieces) {
  __shared__ StepOf<typename K::Rule> step;
  __shared__ CodeValues values;
  if (isnan(*u.scale)) return;
  if (threadIdx.x == 0) step = step_of(rule, u);
  values.without_sign[threadIdx.x] = kValues.without_sign[threadIdx.x];
  if (threadIdx.x < 128) values.with_sign[threadIdx.x] = kValues.with_sign[threadIdx.x];
  __syncthreads();
  const StepOf<typename K::Rule> c = step;
  for (int piece = blockIdx.x; piece < num_pieces; piece += gridDim.x) {
    const auto& t = owner_of(tensors, piece);
    const int64_t begin = static_cast<int64_t>(piece - t.first) * kPiece, end = min(t.n, begin + kPiece);
    for (int64_t i = begin + threadIdx.x * kLane; i < end; i += kThreads * kLane)
      update_block<K>(t, rule, c, values, i);
  }
}

template <class K>
void update_kind(Stream& s, std::span<const UpdatedTensor> tensors, const typename K::Rule& rule,
                 const StepScalars& step) {
  using U = typename K::UpdateOf;
  const auto pieces = [](const UpdatedTensor& t) {
    const bool is_kind =
        t.m_n.dtype == DType::u8 && t.param_n.dtype == dtype_of<typename K::P> && form_of(t) == K::form;
    return is_kind ? div_ceil(t.param_n.numel(), int64_t{kPiece}) : 0;
  };
  const auto make = [](const UpdatedTensor& t) {
    U u = update_of<U>(t);
    u.m_scale = t.m_scale_b.ptr<float>();
    u.v_scale = t.v_scale_b.empty() ? nullptr : t.v_scale_b.ptr<float>();
    return u;
  };
  for_each_group<U>(tensors, make, pieces, [&](const Tensors<U>& group, int num_pieces) {
    const int blocks = std::min(num_pieces, limited_blocks(s, kMaxBlocks));
    update_blocks_kernel<K><<<blocks, kThreads, 0, cuda_stream(s)>>>(group, rule, step, num_pieces);
  });
}

template <class Rule>
void update_all(Stream& s, std::span<const UpdatedTensor> tensors, const Rule& rule, const StepScalars& step) {
  update_kind<BlockKind<Rule, float, Form::master>>(s, tensors, rule, step);
  update_kind<BlockKind<Rule, bf16, Form::master>>(s, tensors, rule, step);
  update_kind<BlockKind<Rule, bf16, Form::remainder>>(s, tensors, rule, step);
  update_kind<BlockKind<Rule, bf16, Form::param>>(s, tensors, rule, step);
}

}  // namespace

void update_blocks(Stream& s, std::span<const UpdatedTensor> tensors, const AdamWRule& rule, const StepScalars& step) {
  update_all(s, tensors, rule, step);
}
void update_blocks(Stream& s, std::span<const UpdatedTensor> tensors, const SgdRule& rule, const StepScalars& step) {
  update_all(s, tensors, rule, step);
}

}  // namespace moebius::cuda
