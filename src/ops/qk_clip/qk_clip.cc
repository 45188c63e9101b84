#include "ops/qk_clip/qk_clip.h"

#include "ops/qk_clip/qk_clip_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const MaxOverRanks& a) {
  constexpr const char* who = "max_over_ranks";
  check_tensor(who, "max", a.max_N, DType::f32, {a.max_N.numel()});
  check_tensor(who, "x", a.x_RN, DType::f32, {a.x_RN.shape.rank() == 2 ? a.x_RN.dim(0) : 0, a.max_N.numel()});
}

void check(const QkClip& a) {
  constexpr const char* who = "qk_clip";
  const int64_t H = a.max_logit_H.numel(), n = a.tensor.param_n.numel();
  check_tensor(who, "max_logit", a.max_logit_H, DType::f32, {H});
  check_tensor(who, "scale", a.scale_1, DType::f32, {1});
  if (!a.lr_and_step_2.empty()) check_tensor(who, "lr_and_step", a.lr_and_step_2, DType::f64, {2});
  MOEBIUS_CHECK(usage, a.kv_group >= 1 && H % a.kv_group == 0, "{}: kv_group must divide the query heads; got {} of {}",
                who, a.kv_group, H);
  MOEBIUS_CHECK(usage, a.threshold > 0, "{}: the threshold must be above 0; got {}", who, a.threshold);
  MOEBIUS_CHECK(usage, a.root_rows >= 0 && a.whole_rows >= 0 && a.root_rows + a.whole_rows <= a.head_rows,
                "{}: a head has {} rows; got {} and {} to scale", who, a.head_rows, a.root_rows, a.whole_rows);
  const int64_t heads = a.of_keys ? H / a.kv_group : H, numel = heads * a.head_rows * a.cols;
  MOEBIUS_CHECK(usage, a.first >= 0 && a.first + n <= numel,
                "{}: expected elements of a matrix of {} heads of {} rows and {} columns; got [{}, {})", who, heads,
                a.head_rows, a.cols, a.first, a.first + n);
}

}  // namespace

void max_over_ranks(Stream& s, const MaxOverRanks& a) {
  check(a);
  OpScope scope(s, "max_over_ranks", cost(a));
  if (a.max_N.empty()) return;
  run_on_device(s, cpu::max_over_ranks, cuda::max_over_ranks, a);
}

Cost cost(const MaxOverRanks& a) {
  return {static_cast<double>(a.x_RN.numel()), static_cast<double>(a.x_RN.num_bytes() + a.max_N.num_bytes())};
}

void qk_clip(Stream& s, const QkClip& a) {
  check(a);
  OpScope scope(s, "qk_clip", cost(a));
  if (a.tensor.param_n.empty()) return;
  run_on_device(s, cpu::qk_clip, cuda::qk_clip, a);
}

// The cost where every head is clipped.
Cost cost(const QkClip& a) {
  const UpdatedTensor& t = a.tensor;
  const int64_t bytes = t.param_n.num_bytes() + 2 * t.master_n.num_bytes() + 2 * t.remainder_n.num_bytes();
  return {static_cast<double>(t.param_n.numel()), static_cast<double>(bytes)};
}

}  // namespace moebius
