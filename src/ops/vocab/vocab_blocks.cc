#include "ops/vocab/vocab_blocks.h"
#include "ops/run_on_device.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius {
namespace {

void check_product(const char* who, const Tensor& logits, const Tensor& x, const Tensor& w, const Tensor& target) {
  MOEBIUS_CHECK(usage, (x.dtype == DType::f32 || x.dtype == DType::bf16) && x.shape.rank() == 2 && w.shape.rank() == 2,
                "{}: x and w must be f32 or bf16 matrices; got {} and {}", who, to_string(x), to_string(w));
  check_tensor(who, "w", w, x.dtype, {w.dim(0), x.dim(1)});
  check_tensor(who, "logits", logits, DType::f32, {x.dim(0), w.dim(0)});
  check_tensor(who, "target", target, DType::i32, {x.dim(0)});
}

void check(const LmLossBlock& a) {
  const char* who = "lm_loss_block";
  check_product(who, a.logits_CV, a.x_CD, a.w_VD, a.target_C);
  const int64_t C = a.x_CD.dim(0);
  check_tensor(who, "loss", a.loss_C, DType::f32, {C});
  check_tensor(who, "weight", a.weight_C, DType::f32, {C});
  check_tensor(who, "stats", a.stats_nC3, DType::f32, {a.stats_nC3.dim(0), C, 3});
  if (a.dx_CD.empty() && a.dw_VD.empty()) return;
  check_tensor(who, "dx", a.dx_CD, a.x_CD.dtype, a.x_CD.shape);
  if (!a.dw_VD.empty()) check_tensor(who, "dw", a.dw_VD, DType::f32, a.w_VD.shape);
  check_tensor(who, "dlogits", a.dlogits_CV, a.x_CD.dtype, a.logits_CV.shape);
}

}  // namespace

void lm_logits_block(Stream& s, const LmLogitsBlock& a) {
  const char* who = "lm_logits_block";
  check_product(who, a.logits_CV, a.x_CD, a.w_VD, a.target_C);
  check_tensor(who, "stats", a.stats_C3, DType::f32, {a.x_CD.dim(0), 3});
  OpScope scope(s, who, cost(a));
  if (a.x_CD.empty()) return;
  run_on_device(s, cpu::lm_logits_block, cuda::lm_logits_block, a);
}

Cost cost(const LmLogitsBlock& a) {
  return {2.0 * a.x_CD.numel() * a.w_VD.dim(0), static_cast<double>(a.x_CD.num_bytes() + a.w_VD.num_bytes())};
}

void lm_loss_block(Stream& s, const LmLossBlock& a) {
  check(a);
  OpScope scope(s, "lm_loss_block", cost(a));
  if (a.x_CD.empty()) return;
  run_on_device(s, cpu::lm_loss_block, cuda::lm_loss_block, a);
}

Cost cost(const LmLossBlock& a) {
  const double product = 2.0 * a.x_CD.numel() * a.w_VD.dim(0);
  const int64_t bytes =
      a.w_VD.num_bytes() + a.loss_C.num_bytes() * 3 + 2 * a.dx_CD.num_bytes() + 2 * a.dw_VD.num_bytes();
  return {a.dx_CD.empty() ? 0 : 2 * product, static_cast<double>(bytes)};
}

}  // namespace moebius
