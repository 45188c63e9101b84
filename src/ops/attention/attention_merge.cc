#include "ops/attention/attention_merge.h"
#include "ops/attention/attention_backends.h"
#include "ops/run_on_device.h"

namespace moebius {

void attention_merge(Stream& s, const AttentionMerge& a) {
  const char* who = "attention_merge";
  MOEBIUS_CHECK(usage,
                (a.part_THd.dtype == DType::f32 || a.part_THd.dtype == DType::bf16) && a.part_THd.shape.rank() == 3,
                "{}: part must be f32 or bf16 [rows, heads, d]; got {}", who, to_string(a.part_THd));
  const Shape TH{a.part_THd.dim(0), a.part_THd.dim(1)};
  check_tensor(who, "part", a.part_THd, a.part_THd.dtype, a.part_THd.shape);
  check_tensor(who, "part_lse", a.part_lse_TH, DType::f32, TH);
  check_tensor(who, "o", a.o_THd, DType::f32, a.part_THd.shape);
  check_tensor(who, "lse", a.lse_TH, DType::f32, TH);
  OpScope scope(s, who, cost(a));
  if (a.o_THd.empty()) return;
  run_on_device(s, cpu::attention_merge, cuda::attention_merge, a);
}

Cost cost(const AttentionMerge& a) {
  return {3.0 * a.o_THd.numel(), static_cast<double>(2 * a.o_THd.num_bytes() + a.part_THd.num_bytes())};
}

}  // namespace moebius
