// rotated_attention: the blocks of cached attention also compute the queries and the key of the new token, while the
// cached keys are on their way.
#include "device/cuda/cuda.h"
#include "device/gpu_limits.h"
#include "ops/attention/cuda/cached_pieces.h"
#include "ops/one_token/one_token.h"
#include "ops/one_token/one_token_backends.h"
#include "ops/rope/cuda/pairs.h"

namespace moebius::cuda {
namespace sm90 {
namespace {

constexpr int kWidth = 128, kHeads = 2, kHeadLanes = 8;  // of a head, queries of a block, lanes that rotate a head
constexpr int kRotated = kHeads + 1;                     // heads of a block: its queries and their key
static_assert(kRotated * kHeadLanes <= 32);
using HeadPairs = Pairs<8, 1>;
using HeadArgs = cached::Args<bf16>;

struct Rotation {
  const bf16 *qkv, *q_norm, *k_norm;  // null norms: none
  Heads g;
};

// The new token's rows, from the projection's output. Formulas and their order are those of rope_fwd.
struct RotatingRows {
  static constexpr bool kAreShared = true;
  static constexpr int kWidth = sm90::kWidth;

  __device__ __forceinline__ RotatingRows(const Rotation& r, bf16* q, bf16* k) : r(r), q(q), k(k) {}
  __device__ __forceinline__ const bf16* v(const HeadArgs& a, int n, int g) const {
    return r.qkv + (int64_t{n} * r.g.per_row() + a.heads + a.kv_heads + g) * kWidth;
  }
  // Loads the weight of the norm before the inputs are there. A group of lanes of the first warp has a head.
  __device__ __forceinline__ void open(int g, int h0) {
    const int i = static_cast<int>(threadIdx.x) / kHeadLanes;
    lane = static_cast<int>(threadIdx.x) % kHeadLanes;
    is_key = i == kHeads;
    has_head = i < kRotated;
    head = is_key ? r.g.heads + g : h0 + min(i, kHeads - 1);
    to = is_key ? k : q + min(i, kHeads - 1) * kWidth;
    norm = is_key ? r.k_norm : r.q_norm;
    weight = HeadPairs::fetch_from(norm, r.g, lane, has_head && norm != nullptr);
  }
  __device__ __forceinline__ void compute(const HeadArgs&, int n, int) const {
    if (threadIdx.x < 32) {
      const auto raw = HeadPairs::fetch_from(r.qkv + (int64_t{n} * r.g.per_row() + head) * kWidth, r.g, lane, has_head);
      const HeadPairs cos_sin = angles_of<8, 1>(r.g, n, lane);
      HeadPairs x = HeadPairs::of(raw);
      if (r.q_norm || r.k_norm) {
        const float rstd = rsqrtf(group_sum(x.dot(x), kHeadLanes) / static_cast<float>(r.g.width) + r.g.eps);
        if (norm) x.each(HeadPairs::of(weight), [&](float& mine, float by) { mine = by * rounded<bf16>(mine * rstd); });
      }
      x.turn(cos_sin, 1.0f);
      if (has_head) x.store_to(to, r.g, lane);
    }
    __syncthreads();
  }

  const Rotation& r;
  bf16 *q, *k;  // in shared memory: [kHeads, kWidth], [kWidth]

 private:
  int lane, head;
  bool is_key, has_head;
  bf16* to;
  const bf16* norm;
  HeadPairs::InMemory<bf16> weight;
};

__global__ void __launch_bounds__(cached::kThreads) rotated_attention_kernel(HeadArgs a, Rotation r) {
  __shared__ __align__(16) bf16 q[kHeads * kWidth], k[kWidth];
  cached::merged_pieces<kWidth / cached::kVec, kHeads, true>(a, RotatingRows(r, q, k));
}

bool takes_attention(const RotatedAttention& a) {
  const CachedAttentionFwd& x = a.attention;
  const RopeFwd& rope = a.rope;
  const int64_t H = x.q_NHd.dim(1), G = x.k_UGd.dim(1);
  if (x.q_NHd.dtype != DType::bf16 || x.q_NHd.dim(0) != 1 || x.q_NHd.dim(2) != kWidth || H / G % kHeads != 0)
    return false;
  return num_cached_pieces(x) <= cached::kMaxCluster &&
         rows_are_aligned(kWidth, 2, x.k_UGd.data, x.v_UGd.data, rope.qkv_TC.data, rope.q_norm_A.data,
                          rope.k_norm_B.data, rope.cos_sin_Pd.data);
}

const bf16* norm_of(const Tensor& w) { return w.empty() ? nullptr : w.ptr<bf16>(); }

void run_attention(Stream& s, const RotatedAttention& op) {
  const CachedAttentionFwd& a = op.attention;
  const RopeFwd& rope = op.rope;
  const auto H = narrow<int>(a.q_NHd.dim(1)), G = narrow<int>(a.k_UGd.dim(1)),
             pieces = narrow<int>(num_cached_pieces(a));
  const HeadArgs x{.k = a.k_UGd.ptr<bf16>(),
                   .v = a.v_UGd.ptr<bf16>(),
                   .q = nullptr,
                   .k_new = nullptr,
                   .v_new = nullptr,
                   .o = a.o_NHd.ptr<bf16>(),
                   .lse = a.lse_NH.ptr<float>(),
                   .pos = a.pos_N.ptr<int32_t>(),
                   .sequence = a.sequence_N.ptr<int32_t>(),
                   .part_o = nullptr,
                   .part_max = nullptr,
                   .part_sum = nullptr,
                   .heads = H,
                   .kv_heads = G,
                   .width = kWidth,
                   .num_pieces = pieces,
                   .max_tokens = a.max_tokens,
                   .window = std::min(a.window, a.max_tokens),
                   .scale = a.scale};
  const Rotation r{.qkv = rope.qkv_TC.ptr<bf16>(),
                   .q_norm = norm_of(rope.q_norm_A),
                   .k_norm = norm_of(rope.k_norm_B),
                   .g = {.rows = 1,
                         .positions = rope.cos_sin_Pd.dim(0),
                         .heads = H,
                         .kv_heads = G,
                         .width = kWidth,
                         .num_lanes = kHeadLanes,
                         .eps = rope.eps,
                         .pos = rope.pos_T.ptr<int32_t>(),
                         .cos_sin = rope.cos_sin_Pd.ptr<float>()}};
  const LaunchShape how{.blocks = dim3(pieces, G * (H / G / kHeads), 1), .threads = cached::kThreads};
  launch_clusters(s, true, how, static_cast<unsigned>(pieces), rotated_attention_kernel, x, r);
  check_launch("rotated_attention");
}

}  // namespace
}  // namespace sm90

bool takes(const Stream& s, const RotatedAttention& a) { return uses_hopper_kernels(s) && sm90::takes_attention(a); }

void rotated_attention(Stream& s, const RotatedAttention& a) { sm90::run_attention(s, a); }

}  // namespace moebius::cuda
