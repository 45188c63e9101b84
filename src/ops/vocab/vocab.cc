#include "ops/vocab/vocab.h"

#include <algorithm>

#include "ops/run_on_device.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius {
namespace {

// Checks a matrix of f32 or bf16 with columns, and returns its shape.
Shape check_matrix(const char* who, const char* name, const Tensor& t) {
  MOEBIUS_CHECK(usage, (t.dtype == DType::f32 || t.dtype == DType::bf16) && t.shape.rank() == 2,
                "{}: {} must be an f32 or bf16 matrix; got {}", who, name, to_string(t));
  check_tensor(who, name, t, t.dtype, t.shape);
  return t.shape;
}

void check(const LmLoss& a, const Stream& s) {
  const char* who = "lm_loss";
  const Shape TD = check_matrix(who, "x", a.x_TD), VD = check_matrix(who, "w", a.w_VD);
  const DType dtype = a.x_TD.dtype;
  const int64_t tokens = TD[0], vocab = VD[0], chunk = LmLoss::chunk(tokens, vocab, s);
  check_tensor(who, "w", a.w_VD, dtype, {vocab, TD[1]});
  check_tensor(who, "loss", a.loss_T, DType::f32, {tokens});
  check_tensor(who, "target", a.target_T, DType::i32, {tokens});
  check_tensor(who, "weight", a.weight_T, DType::f32, {tokens});
  check_tensor(who, "logits", a.logits_CV, DType::f32, {chunk, vocab});
  if (a.dx_TD.empty() && a.dw_VD.empty()) return;
  check_tensor(who, "dx", a.dx_TD, dtype, TD);
  if (!a.dw_VD.empty()) check_tensor(who, "dw", a.dw_VD, DType::f32, VD);
  check_tensor(who, "dlogits", a.dlogits_CV, dtype, {chunk, vocab});
}

}  // namespace

void embedding_fwd(Stream& s, const EmbeddingFwd& a) {
  const char* who = "embedding_fwd";
  const Shape VD = check_matrix(who, "w", a.w_VD);
  check_tensor(who, "x", a.x_TD, a.w_VD.dtype, {a.x_TD.dim(0), VD[1]});
  check_tensor(who, "token", a.token_T, DType::i32, {a.x_TD.dim(0)});
  OpScope scope(s, who, cost(a));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::embedding_fwd, cuda::embedding_fwd, a);
}

Cost cost(const EmbeddingFwd& a) { return {0, static_cast<double>(2 * a.x_TD.num_bytes() + a.token_T.num_bytes())}; }

void embedding_bwd(Stream& s, const EmbeddingBwd& a) {
  const char* who = "embedding_bwd";
  const Shape TD = check_matrix(who, "dx", a.dx_TD);
  check_tensor(who, "dw", a.dw_VD, DType::f32, {a.dw_VD.dim(0), TD[1]});
  check_tensor(who, "token", a.token_T, DType::i32, {TD[0]});
  if (const int64_t bytes = EmbeddingBwd::scratch_bytes(a, s); bytes > 0)
    check_tensor(who, "scratch", a.scratch, DType::u8, {bytes});
  OpScope scope(s, who, cost(a));
  if (a.dx_TD.empty()) return;
  run_on_device(s, cpu::embedding_bwd, cuda::embedding_bwd, a);
}

// On a GPU the scratch holds the tokens in the order of their rows, twice, with 8 bytes each.
int64_t EmbeddingBwd::scratch_bytes(const EmbeddingBwd& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? 16 * a.token_T.numel() : 0;
}

// Each row of dx is read, and a row of dw read and written for it.
Cost cost(const EmbeddingBwd& a) {
  return {static_cast<double>(a.dx_TD.numel()),
          static_cast<double>(a.dx_TD.num_bytes() + a.token_T.num_bytes() + 8 * a.dx_TD.numel())};
}

// A GPU's products need many rows to be fast, above all dw, which each chunk reads and writes as a whole: So a chunk
// has as many tokens as 4 GiB of logits and their derivatives hold.
int64_t LmLoss::chunk(int64_t num_tokens, int64_t vocab, DeviceKind device) {
  int64_t rows = 1024;
  while (device == DeviceKind::cuda && rows < 8192 && 2 * rows * vocab * 6 <= int64_t{1} << 32) rows *= 2;
  return std::min(num_tokens, rows);
}

int64_t LmLoss::chunk(int64_t num_tokens, int64_t vocab, const Stream& s) {
  return chunk(num_tokens, vocab, s.target());
}

void lm_loss(Stream& s, const LmLoss& a) {
  check(a, s);
  OpScope scope(s, "lm_loss", cost(a));
  if (a.x_TD.empty()) return;
  run_on_device(s, cpu::lm_loss, cuda::lm_loss, a);
}

Cost cost(const LmLoss& a) {
  const double product = 2.0 * a.x_TD.numel() * a.w_VD.dim(0);
  const bool grads = !a.dx_TD.empty();
  const int64_t bytes = a.x_TD.num_bytes() + a.w_VD.num_bytes() + a.loss_T.num_bytes() * 3 + a.dx_TD.num_bytes() +
                        2 * a.dw_VD.num_bytes();
  return {product * (1 + (grads ? 1 : 0) + (a.dw_VD.empty() ? 0 : 1)), static_cast<double>(bytes)};
}

}  // namespace moebius
