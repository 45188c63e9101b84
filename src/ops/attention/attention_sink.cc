#include "ops/attention/attention_sink.h"
#include "ops/attention/attention_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const char* who, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  MOEBIUS_CHECK(usage, (o.dtype == DType::f32 || o.dtype == DType::bf16) && o.shape.rank() == 3,
                "{}: o must be f32 or bf16 [rows, heads, d]; got {}", who, to_string(o));
  check_tensor(who, "o", o, o.dtype, o.shape);
  check_tensor(who, "lse", lse, DType::f32, {o.dim(0), o.dim(1)});
  check_tensor(who, "sink", sink, DType::f32, {o.dim(1)});
}

}  // namespace

void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a) {
  const char* who = "attention_sink_fwd";
  check(who, a.o_THd, a.lse_TH, a.sink_H);
  OpScope scope(s, who, cost(a));
  if (a.o_THd.empty()) return;
  run_on_device(s, cpu::attention_sink_fwd, cuda::attention_sink_fwd, a);
}

Cost cost(const AttentionSinkFwd& a) {
  return {static_cast<double>(a.o_THd.numel()), static_cast<double>(2 * (a.o_THd.num_bytes() + a.lse_TH.num_bytes()))};
}

void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a) {
  const char* who = "attention_sink_bwd";
  check(who, a.o_THd, a.lse_TH, a.sink_H);
  check_tensor(who, "do", a.do_THd, a.o_THd.dtype, a.o_THd.shape);
  check_tensor(who, "dsink", a.dsink_H, DType::f32, a.sink_H.shape);
  OpScope scope(s, who, cost(a));
  if (a.o_THd.empty()) return;
  run_on_device(s, cpu::attention_sink_bwd, cuda::attention_sink_bwd, a);
}

Cost cost(const AttentionSinkBwd& a) {
  return {2.0 * a.o_THd.numel(), static_cast<double>(2 * a.o_THd.num_bytes() + a.lse_TH.num_bytes())};
}

}  // namespace moebius
