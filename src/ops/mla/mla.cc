#include "ops/mla/mla.h"

#include "ops/mla/mla_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check_float(const char* who, const char* what, const Tensor& t, int rank) {
  MOEBIUS_CHECK(usage, (t.dtype == DType::f32 || t.dtype == DType::bf16) && t.shape.rank() == rank,
                "{}: {} must be f32 or bf16 with {} dims; got {}", who, what, rank, to_string(t));
}

// Checks k [T, H, n + r], v [T, H, v], kv [T, H, n + v] and k_rope [T, r].
void check_latent_kv(const char* who, const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& k_rope) {
  check_float(who, "k", k, 3);
  check_float(who, "k_rope", k_rope, 2);
  const int64_t T = k.dim(0), H = k.dim(1), d = k.dim(2), r = k_rope.dim(1);
  check_tensor(who, "v", v, k.dtype, {T, H, v.shape.rank() == 3 ? v.dim(2) : 1});
  MOEBIUS_CHECK(usage, r < d, "{}: k must be wider than k_rope; got {} and {}", who, to_string(k), to_string(k_rope));
  check_tensor(who, "k", k, k.dtype, {T, H, d});
  check_tensor(who, "kv", kv, k.dtype, {T, H, d - r + v.dim(2)});
  check_tensor(who, "k_rope", k_rope, k.dtype, {T, r});
}

Cost moved_bytes(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& k_rope) {
  return {0, static_cast<double>(k.num_bytes() + v.num_bytes() + kv.num_bytes() + k_rope.num_bytes())};
}

}  // namespace

void rotate_heads(Stream& s, const RotateHeads& a) {
  const char* who = "rotate_heads";
  check_float(who, "x", a.x_THw, 3);
  check_tensor(who, "x", a.x_THw, a.x_THw.dtype, a.x_THw.shape);
  check_tensor(who, "pos", a.pos_T, DType::i32, {a.x_THw.dim(0)});
  MOEBIUS_CHECK(usage,
                a.cos_sin_Pr.shape.rank() == 2 && a.cos_sin_Pr.dim(1) % 2 == 0 && a.cos_sin_Pr.dim(1) <= a.x_THw.dim(2),
                "{}: cos_sin must be [positions, r], r even and at most the width of a head; got {} for x {}", who,
                to_string(a.cos_sin_Pr), to_string(a.x_THw));
  check_tensor(who, "cos_sin", a.cos_sin_Pr, DType::f32, a.cos_sin_Pr.shape);
  OpScope scope(s, who, cost(a));
  if (a.x_THw.empty()) return;
  run_on_device(s, cpu::rotate_heads, cuda::rotate_heads, a);
}

Cost cost(const RotateHeads& a) {
  const double rotated = static_cast<double>(a.x_THw.dim(0) * a.x_THw.dim(1) * a.cos_sin_Pr.dim(1));
  return {3 * rotated, 2 * rotated * static_cast<double>(size_of(a.x_THw.dtype))};
}

void latent_kv_fwd(Stream& s, const LatentKvFwd& a) {
  check_latent_kv("latent_kv_fwd", a.k_THd, a.v_THv, a.kv_THw, a.k_rope_Tr);
  OpScope scope(s, "latent_kv_fwd", cost(a));
  if (a.k_THd.empty()) return;
  run_on_device(s, cpu::latent_kv_fwd, cuda::latent_kv_fwd, a);
}

Cost cost(const LatentKvFwd& a) { return moved_bytes(a.k_THd, a.v_THv, a.kv_THw, a.k_rope_Tr); }

void latent_kv_bwd(Stream& s, const LatentKvBwd& a) {
  check_latent_kv("latent_kv_bwd", a.dk_THd, a.dv_THv, a.dkv_THw, a.dk_rope_Tr);
  OpScope scope(s, "latent_kv_bwd", cost(a));
  if (a.dk_THd.empty()) return;
  run_on_device(s, cpu::latent_kv_bwd, cuda::latent_kv_bwd, a);
}

Cost cost(const LatentKvBwd& a) { return moved_bytes(a.dk_THd, a.dv_THv, a.dkv_THw, a.dk_rope_Tr); }

}  // namespace moebius
