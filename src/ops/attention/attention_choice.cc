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

// Measured on H200, 2026-11-29, in TFLOP/s, ours and cuDNN 9.19. docs/measurements/performance/attention.md has
// more shapes.
//   32/4 heads of 128, 32 x 512 302 and 360; 8 x 1024 401 and 432; 1 x 2048 471 and 400; 4 x 2048 527 and 505; 8 x 2048
//   548 and 562; 1 x 4096 612 and 535; 8 x 4096 643 and 622; window of 512 387 and 415; of 1024 516 and 515; 1 x 32768,
//   window of 4096 680 and 626
//   16/16 heads of 128, 8 x 1024 357 and 383; 2 x 2048 390 and 393; 8 x 2048 513 and 524; 1 x 4096 471 and 452;
//   8 x 4096 629 and 606
//   64/8 heads of 64, 32 x 512 217 and 265; 32 x 1024 294 and 350; 1 x 2048 344 and 323; 4 x 2048 393 and 389;
//   16 x 2048 415 and 413; 8 x 4096 478 and 450; window of 128 104 and 131; of 1024 348 and 348; of 2048 423 and 391
//   latent, 128 heads, 8 x 512 325 and 328; 1 x 1024 393 and 371; 4 x 1024 475 and 450; 1 x 2048 566 and 517;
//   4 x 2048 605 and 559; 8 x 4096 684 and 615; 4 x 4096, window of 1024 551 and 484
// One H200, 2026-11-26, 8 x 4096, portable kernels and cuDNN:
//   heads of 32 162 and 223; 80 244 and 404; 96 294 and 477; 160 212 and 547; 256 273 and 608
bool cudnn_is_faster_fwd(const AttentionShape& z) {
  // Nothing with fewer tiles was measured. Sequences of 2048 tokens are faster with ours if they have few tiles.
  constexpr int64_t kLong = 4096, kFewTiles = 512, kTilesOfShort = 2048, kWindow = 1024;
  const bool is_portable = z.width == z.v_width && z.width != 64 && z.width != 128;
  if (is_portable) return z.window == 0;  // with windows they were not measured
  const int64_t tiles = query_tiles(z);
  if (tiles < kFewTiles) return true;
  const bool is_latent = z.width != z.v_width;
  if (z.window > 0) return z.kv_rows < kLong || z.window < kWindow || (z.window == kWindow && !is_latent);
  if (is_latent) return z.kv_rows < 1024;
  const bool is_short = z.kv_rows >= 2048 && tiles <= kTilesOfShort && z.heads > z.kv_heads;
  return z.kv_rows < kLong && !is_short;
}

// The same, our kernels and cuDNN's deterministic pass:
//   32/4 heads of 128, 8 x 512 215 and 193; 32 x 512 296 and 239; 4 x 1024 260 and 272; 1 x 2048 151 and 283;
//   2 x 2048 289 and 341; 8 x 2048 461 and 348; 1 x 4096 305 and 394
//   16/16 heads of 128, 8 x 512 177 and 173; 32 x 512 220 and 238; 4 x 1024 276 and 235; 8 x 2048 435 and 353; 1 x 4096
//   466 and 337
//   64/8 heads of 64, 8 x 512 252 and 150; 1 x 2048 264 and 226; 4 x 2048 457 and 257; 8 x 4096 538 and 264
//   latent, 128 heads, 8 x 512 245 and 241; 1 x 1024 315 and 272; 4 x 2048 436 and 327
//   32/4 heads of 96, 8 x 512 180 and 152; 4 x 1024 217 and 209; 1 x 2048 126 and 215; 2 x 2048 241 and 260;
//   16 x 1024 330 and 240; 1 x 4096 255 and 298; 8 x 4096 462 and 294
//   32/4 heads of 256, 8 x 512 214 and 173; 1 x 2048 192 and 243; 2 x 2048 313 and 267; 1 x 4096 347 and 275;
//   8 x 4096 531 and 275
//   windows: 32/4 heads of 128, 8 x 4096, 1024 408 and 173; 64/8 heads of 64, 8 x 4096, 128 139 and 16
// One H200, 2026-11-26, 8 x 4096, portable kernels and cuDNN's deterministic pass:
//   heads of 32 149 and 135; 80 186 and 249; 160 137 and 198
// Our kernels fill a GPU with two or more blocks per multiprocessor. With one, they are faster for widths of 64 and
// 256, and for other widths where sequences, and so the longest block, are short.
bool cudnn_is_faster_bwd(const AttentionShape& z) {
  constexpr int64_t kTwoWaves = 256, kOneWave = 128, kFourWaves = 512;
  if (z.width != z.v_width || z.window > 0) return false;
  const auto needs = [&](int64_t rows_of_one_wave) { return z.kv_rows <= rows_of_one_wave ? kOneWave : kTwoWaves; };
  const int64_t blocks = dkv_blocks(z);
  if (z.width == 64 || z.width == 256) return blocks < kOneWave;
  if (z.width == 96) return blocks < needs(1024);
  if (z.width != 128) return z.width > 64;
  // With one head a group, blocks of short sequences have few steps for each of their tiles.
  const bool has_few_steps = z.heads == z.kv_heads && z.kv_rows <= 512;
  return blocks < needs(512) || (has_few_steps && blocks > kFourWaves);
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
