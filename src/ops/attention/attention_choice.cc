#include "ops/attention/attention_choice.h"

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_scratch.h"

namespace moebius {
namespace {

// Returns the number of blocks of our kernel for dk and dv. Each has 128 keys of a kv head.
int64_t dkv_blocks(const AttentionShape& z) { return z.batch * z.kv_heads * ((z.kv_rows + 127) / 128); }

// Returns the number of tiles of 128 queries of a head.
int64_t query_tiles(const AttentionShape& z) { return z.batch * z.heads * ((z.rows + 127) / 128); }

template <class Op>
AttentionShape shape_of(const Op& a, const Tensor& k, const Tensor& v) {
  AttentionShape z{.batch = a.batch,
                   .rows = a.q_THd.dim(0) / a.batch,
                   .kv_rows = k.dim(0) / a.batch,
                   .heads = a.q_THd.dim(1),
                   .kv_heads = k.dim(1),
                   .width = a.q_THd.dim(2),
                   .v_width = v.dim(2)};
  z.window = a.window < z.kv_rows ? a.window : 0;  // a window that covers the sequence has no effect
  return z;
}

// Returns whether the call selects cuDNN's kernels, or selects none and they can compute it and are the faster ones.
template <class Op>
bool takes(const char* who, const Op& a, bool can, bool is_faster) {
  if (a.kernels == AttentionKernels::own) return false;
  if (a.kernels == AttentionKernels::chosen) return can && is_faster;
  MOEBIUS_CHECK(usage, can,
                "{}: cuDNN cannot compute q {} in {} sequences; leave the choice of kernels out, or ask for own", who,
                to_string(a.q_THd), a.batch);
  return true;
}

}  // namespace

AttentionShape attention_shape(const AttentionFwd& a) { return shape_of(a, a.k_UGd, a.v_UGd); }
AttentionShape attention_shape(const AttentionBwd& a) { return shape_of(a, a.k_TGd, a.v_TGd); }

// Measured on one H200, 2026-11-29, in TFLOP/s, ours and cuDNN 9.19:
//   32/4 heads of 128, 32 x 512 303 and 361; 16 x 2048 564 and 574; 1 x 4096 614 and 536; 8 x 4096 643 and 622;
//   window of 1024 511 and 511
//   16/16 heads of 128, 1 x 4096 470 and 457; 8 x 4096 629 and 606; 1 x 32768 731 and 674; 1 x 131072 668 and 605
//   64/8 heads of 64, 32 x 1024 294 and 350; 1 x 4096 440 and 407; 8 x 4096 475 and 446; window of 128 104 and 131
//   latent, 128 heads, 1 x 4096 689 and 599; 8 x 4096 684 and 615
// One H200, 2026-11-26, 8 x 4096, portable kernels and cuDNN:
//   heads of 32 162 and 223; 80 244 and 404; 96 294 and 477; 160 212 and 547; 256 273 and 608
bool cudnn_is_faster_fwd(const AttentionShape& z) {
  // Nothing with fewer tiles was measured.
  constexpr int64_t kLong = 4096, kFewTiles = 512;
  const bool is_portable = z.width == z.v_width && z.width != 64 && z.width != 128;
  if (is_portable) return z.window == 0;  // with windows they were not measured
  return z.window > 0 || z.kv_rows < kLong || query_tiles(z) < kFewTiles;
}

// The same, cuDNN's deterministic pass; ours on 2026-11-26 and 2026-11-27:
//   32/4 heads of 128, 8 x 4096 509 and 378; 16/16 heads 460 and 379
//   64/8 heads of 64, 8 x 4096 461 and 246; latent, 8 x 4096 409 and 332
// One H200, 2026-11-26, 8 x 4096, portable kernels and cuDNN's deterministic pass:
//   heads of 32 149 and 135; 80 186 and 249; 96 217 and 293; 160 137 and 198; 256 153 and 271
// One H200, 2026-11-29, 8 x 4096, our Hopper kernels and cuDNN's deterministic pass:
//   heads of 96 462 and 294; 256 531 and 275; shorter calls were not measured, and have the bound of 64 and 128
// Our kernels fill a GPU with two or more blocks per multiprocessor.
bool cudnn_is_faster_bwd(const AttentionShape& z) {
  if (z.width != z.v_width || z.window > 0) return false;
  const bool is_hopper = z.width == 64 || z.width == 96 || z.width == 128 || z.width == 256;
  return is_hopper ? dkv_blocks(z) < 256 : z.width > 64;
}

namespace {

// Returns whether Hopper's own kernels lack the call at a width that they have.
bool is_left_out(const AttentionBwd& a) {
  return only_path(a.q_THd.dim(2)) != AttentionBwdPath::chosen && attention_shape(a).window == 0 &&
         !cuda::sm90_takes(a);
}

}  // namespace

bool cudnn_is_chosen(const AttentionFwd& a) {
  return takes("attention_fwd", a, cudnn_can(a), cudnn_is_faster_fwd(attention_shape(a)));
}
bool cudnn_is_chosen(const AttentionBwd& a) {
  return takes("attention_bwd", a, cudnn_can(a), cudnn_is_faster_bwd(attention_shape(a)) || is_left_out(a));
}

bool has_hopper_kernel(const Tensor& q_THd, const Tensor& v_UGd) {
  const int64_t width = q_THd.dim(2), v_width = v_UGd.dim(2);
  return q_THd.dtype == DType::bf16 &&
         ((v_width == width && (width == 64 || width == 128)) || (width == 192 && v_width == 128));
}

bool cudnn_is_chosen_elsewhere(const AttentionFwd& a) {
  if (cudnn_is_chosen(a)) return true;
  return a.kernels == AttentionKernels::chosen && has_hopper_kernel(a.q_THd, a.v_UGd) && cudnn_can(a);
}

bool cudnn_is_chosen_elsewhere(const AttentionBwd& a) {
  return takes("attention_bwd", a, cudnn_can_elsewhere(a), /*is_faster=*/true);
}

}  // namespace moebius
