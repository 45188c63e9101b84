#include "ops/rope/rope.h"

#include <algorithm>
#include <vector>

#include "ops/rope/rope_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

// The arguments that forward and backward share: [T, H, d], [T, G, d] twice, qkv [T, (H + 2 G) d],
// positions, table, norm weights.
struct Operands {
  const Tensor &q, &k, &v, &qkv, &pos, &table, &q_norm, &k_norm;
};

void check(const char* who, const Operands& a) {
  const DType dtype = a.qkv.dtype;
  MOEBIUS_CHECK(usage, dtype == DType::f32 || dtype == DType::bf16, "{}: qkv must be f32 or bf16; got {}", who,
                to_string(a.qkv));
  MOEBIUS_CHECK(usage, a.q.shape.rank() == 3 && a.k.shape.rank() == 3,
                "{}: q and k must be [T, heads, d]; got {} and {}", who, to_string(a.q), to_string(a.k));
  const int64_t rows = a.q.dim(0), heads = a.q.dim(1), kv_heads = a.k.dim(1), width = a.q.dim(2);
  MOEBIUS_CHECK(usage, width > 0 && width % 2 == 0, "{}: the head dim must be even; got {}", who, to_string(a.q));
  check_tensor(who, "q", a.q, dtype, {rows, heads, width});
  check_tensor(who, "k", a.k, dtype, {rows, kv_heads, width});
  check_tensor(who, "v", a.v, dtype, {rows, kv_heads, width});
  check_tensor(who, "qkv", a.qkv, dtype, {rows, (heads + 2 * kv_heads) * width});
  check_tensor(who, "pos", a.pos, DType::i32, {rows});
  check_tensor(who, "cos_sin", a.table, DType::f32, {a.table.dim(0), width});
  const bool of_all = a.q_norm.numel() > width;
  if (!a.q_norm.empty()) check_tensor(who, "q_norm", a.q_norm, dtype, {of_all ? heads * width : width});
  if (!a.k_norm.empty() || of_all) check_tensor(who, "k_norm", a.k_norm, dtype, {of_all ? kv_heads * width : width});
}

void table_by_host(Stream& s, RopeTable a) {
  std::vector<float> values(a.cos_sin_Pd.numel());
  const Tensor device = a.cos_sin_Pd;
  a.cos_sin_Pd = {.data = values.data(), .shape = device.shape, .dtype = device.dtype};
  Stream host(DeviceKind::cpu, s.pool());
  cpu::rope_table(host, a);
  copy_to_device(s, device.data, values.data(), device.num_bytes());
  synchronize(s);
}

}  // namespace

void rope_table(Stream& s, const RopeTable& a) {
  const Shape Pd = a.cos_sin_Pd.shape;
  MOEBIUS_CHECK(usage, Pd.rank() == 2 && Pd[1] % 2 == 0, "rope_table: cos_sin must be [positions, even d]; got {}",
                to_string(a.cos_sin_Pd));
  check_tensor("rope_table", "cos_sin", a.cos_sin_Pd, DType::f32, Pd);
  MOEBIUS_CHECK(usage,
                a.frequencies.empty() ? a.magnitude == 1 : static_cast<int64_t>(a.frequencies.size()) == Pd[1] / 2,
                "rope_table: {} frequencies with magnitude {} must be half of {} columns, or none with magnitude 1",
                a.frequencies.size(), a.magnitude, Pd[1]);
  OpScope scope(s, "rope_table",
                {static_cast<double>(a.cos_sin_Pd.numel()), static_cast<double>(a.cos_sin_Pd.num_bytes())});
  if (a.cos_sin_Pd.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::rope_table(s, a);
    case DeviceKind::cuda:
      return a.frequencies.empty() ? cuda::rope_table(s, a) : table_by_host(s, a);
    case DeviceKind::null:
      return;
  }
}

void rope_fwd(Stream& s, const RopeFwd& a) {
  check("rope_fwd", {a.q_THd, a.k_TGd, a.v_TGd, a.qkv_TC, a.pos_T, a.cos_sin_Pd, a.q_norm_A, a.k_norm_B});
  OpScope scope(s, "rope_fwd", cost(a));
  if (a.qkv_TC.empty()) return;
  run_on_device(s, cpu::rope_fwd, cuda::rope_fwd, a);
}

bool has_norms_of_all_heads(const RopeFwd& a) { return a.q_norm_A.numel() > a.q_THd.dim(2); }

Cost cost(const RopeFwd& a) {
  const bool norm = !a.q_norm_A.empty() || !a.k_norm_B.empty();
  const int64_t rotated = a.q_THd.numel() + a.k_TGd.numel();
  return {(norm ? 7.0 : 3.0) * rotated,
          static_cast<double>(2 * a.qkv_TC.num_bytes() + a.pos_T.num_bytes() + 4 * a.pos_T.numel() * a.q_THd.dim(2))};
}

bool has_norms_of_all_heads(const RopeBwd& a) { return a.q_norm_A.numel() > a.dq_THd.dim(2); }

// On the CPU chunks have a fixed size. On a GPU they have 16 rows, or more if each of 132 multiprocessors then still
// has eight chunks. With norms over all heads each of them has two chunks of q and two of k, which run at once there:
// the sums of a chunk are as wide as its rows, so more chunks would cost memory and time.
int64_t RopeBwd::num_partials(const RopeBwd& a, const Stream& s) {
  const int64_t rows = a.dq_THd.dim(0);
  if (s.target() != DeviceKind::cuda) return div_ceil(rows, 64);
  return has_norms_of_all_heads(a) ? std::min<int64_t>(rows, 264) : std::min<int64_t>(div_ceil(rows, 16), 1056);
}

void rope_bwd(Stream& s, const RopeBwd& a) {
  const char* who = "rope_bwd";
  check(who, {a.dq_THd, a.dk_TGd, a.dv_TGd, a.qkv_TC, a.pos_T, a.cos_sin_Pd, a.q_norm_A, a.k_norm_B});
  check_tensor(who, "dqkv", a.dqkv_TC, a.qkv_TC.dtype, a.qkv_TC.shape);
  const int64_t width = a.dq_THd.dim(2), A = a.q_norm_A.empty() ? width : a.q_norm_A.numel(),
                B = a.k_norm_B.empty() ? width : a.k_norm_B.numel();
  if (!a.q_norm_A.empty()) check_tensor(who, "dq_norm", a.dq_norm_A, DType::f32, {A});
  if (!a.k_norm_B.empty()) check_tensor(who, "dk_norm", a.dk_norm_B, DType::f32, {B});
  if (!a.q_norm_A.empty() || !a.k_norm_B.empty()) {
    check_tensor(who, "partial", a.partial_PW, DType::f32, {RopeBwd::num_partials(a, s), A + B});
  }
  OpScope scope(s, who, cost(a));
  if (a.qkv_TC.empty()) return;
  run_on_device(s, cpu::rope_bwd, cuda::rope_bwd, a);
}

// The projection's output is read again only for the backward of the norms.
Cost cost(const RopeBwd& a) {
  const bool norm = !a.q_norm_A.empty() || !a.k_norm_B.empty();
  const int64_t rotated = a.dq_THd.numel() + a.dk_TGd.numel();
  const int64_t bytes = a.dqkv_TC.num_bytes() * 2 + (norm ? rotated * size_of(a.qkv_TC.dtype) : 0) +
                        4 * a.pos_T.numel() * (1 + a.dq_THd.dim(2));
  return {(norm ? 13.0 : 3.0) * rotated, static_cast<double>(bytes)};
}

}  // namespace moebius
