// On a GPU rows of any width have the bits of the same rows with zeros after them, up to a multiple of 8 columns. On a
// CPU, which may sum in another order, they are close to these.
//
// Zeros after a row keep the place of each of its elements in a sum. Zeros between gate and up would not: d_expert_up
// sums over gate and up as one row of 2 F, 16 elements at a time, so up would be in other steps. So its rows of dh, and
// its w1, have zeros after up alone.
#include "device/gpu_limits.h"
#include "ops/experts/experts_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::ExpertCase;
using testing::ExpertOutputs;
using testing::ExpertProblem;
using testing::run_all_expert_ops;
using testing::Values;

int64_t whole(int64_t width) { return div_ceil(width, 8) * 8; }

// Rows of `from` values, each with zeros after it up to `to` values.
Values with_zeros(const Values& rows, int64_t from, int64_t to) {
  Values wide;
  for (int64_t i = 0; i < std::ssize(rows); i += from) {
    wide.insert(wide.end(), rows.begin() + i, rows.begin() + i + from);
    wide.resize(wide.size() + static_cast<size_t>(to - from));
  }
  return wide;
}
Values without_zeros(const Values& rows, int64_t from, int64_t to) {
  Values narrow;
  for (int64_t i = 0; i < std::ssize(rows); i += from)
    narrow.insert(narrow.end(), rows.begin() + i, rows.begin() + i + to);
  return narrow;
}

// The problem with zeros in the columns past D and F. Gate and up are apart, so each of them gets its own.
ExpertProblem widened(ExpertProblem& p) {
  const int64_t D = p.c.D, F = p.c.F, wide_D = whole(D), wide_F = whole(F), E = p.E();
  ExpertCase c = p.c;
  c.D = wide_D, c.F = wide_F;
  ExpertProblem wide(c);
  const auto array = [&](Array& like, const Values& values) { return Array::of(like.tensor().shape, c.dtype, values); };
  wide.x = array(wide.x, with_zeros(p.x.values(), D, wide_D));
  wide.dout = array(wide.dout, with_zeros(p.dout.values(), D, wide_D));
  wide.h = array(wide.h, with_zeros(p.h.values(), F, wide_F));
  wide.a = array(wide.a, with_zeros(p.a.values(), F, wide_F));
  wide.w1 = array(wide.w1, with_zeros(with_zeros(p.w1.values(), D, wide_D), F * wide_D, wide_F * wide_D));
  wide.w2 = array(wide.w2, with_zeros(with_zeros(p.w2.values(), F, wide_F), D * wide_F, wide_D * wide_F));
  wide.weight = p.weight;
  wide.few_rows = p.few_rows;
  if (!c.gpt_oss) return wide;
  wide.b1 = Array::of({E, 2 * wide_F}, c.dtype, with_zeros(p.b1.values(), F, wide_F));
  wide.b2 = p.b2;
  wide.b2_first = p.b2_first;
  return wide;
}

// d_expert_up of rows of dh [R, 2 F] with zeros after each, and of w1 with zeros after its rows and in new ones.
Array dx_of_padded_rows(Stream& s, ExpertProblem& p) {
  const int64_t D = p.c.D, K = 2 * p.c.F, wide_D = whole(D), wide_K = whole(K);
  const Values w1 = with_zeros(with_zeros(p.w1.values(), D, wide_D), K * wide_D, wide_K * wide_D);
  Array wide_dh = Array::of({p.R, wide_K}, p.c.dtype, with_zeros(p.h.values(), K, wide_K)),
        wide_w1 = Array::of({p.E(), wide_K, wide_D}, p.c.dtype, w1), dx = Array::poisoned({p.R, wide_D}, p.c.dtype);
  testing::run_expert_op<DExpertUp>(
      s, d_expert_up,
      {.dx_RD = dx.tensor(), .dh_R2F = wide_dh.tensor(), .w1_e2FD = wide_w1.tensor(), .rows = p.rows()});
  return dx;
}

void expect_padded(Stream& s, const ExpertCase& c, bool few_rows) {
  SCOPED_TRACE(c.name + (few_rows ? ", few rows" : ""));
  ExpertProblem p(c);
  p.few_rows = few_rows;
  ExpertProblem wide = widened(p);
  const ExpertOutputs got = run_all_expert_ops(s, p), want = run_all_expert_ops(s, wide);
  const int64_t D = c.D, F = c.F, wide_D = whole(D), wide_F = whole(F);
  const auto expect = [&](const char* what, const Array& narrow, const Values& of_wide) {
    EXPECT_TRUE(s.device() != DeviceKind::cuda || narrow.values() == of_wide) << what;
    testing::expect_close(what, narrow.values(), of_wide, 2 * testing::epsilon(DType::bf16), 1e-5);
  };
  expect("h", got.h, without_zeros(want.h.values(), wide_F, F));
  expect("a", got.a, without_zeros(want.a.values(), wide_F, F));
  expect("y", got.y, without_zeros(want.y.values(), wide_D, D));
  expect("dh", got.dh, without_zeros(want.dh.values(), wide_F, F));
  expect("sa", got.sa, without_zeros(want.sa.values(), wide_F, F));
  expect("dx", got.dx, without_zeros(dx_of_padded_rows(s, p).values(), wide_D, D));
  // In another order.
  testing::expect_close("dx", got.dx.values(), without_zeros(want.dx.values(), wide_D, D),
                        2 * testing::epsilon(DType::bf16), 1e-5);
  // The product with a bias is a sum in an order of its own.
  if (!c.gpt_oss) expect("dweight", got.dweight, want.dweight.values());
  const Values dw1 = without_zeros(want.dw1_stored.values(), wide_F * wide_D, F * wide_D),
               dw2 = without_zeros(want.dw2_stored.values(), wide_D * wide_F, D * wide_F);
  expect("dw1", got.dw1_stored, without_zeros(dw1, wide_D, D));
  expect("dw2", got.dw2_stored, without_zeros(dw2, wide_F, F));
}

void expect_padded_of_many_widths(Stream& s) {
  for (const auto& [D, F] : std::vector<std::array<int64_t, 2>>{
           {34, 51}, {51, 34}, {130, 264}, {264, 130}, {203, 135}, {257, 71}, {72, 1027}, {1, 1}}) {
    for (const bool gpt_oss : {false, true}) {
      const ExpertCase c{fmt::format("{} x {}{}", D, F, gpt_oss ? " with biases" : ""),
                         90,
                         D,
                         F,
                         {0, 130, 3, 0, 257, 64},
                         0,
                         D % 2 == 0,
                         DType::bf16,
                         gpt_oss};
      expect_padded(s, c, false);
      expect_padded(s, c, true);
      if (s.device() != DeviceKind::cuda) continue;
      for (const GpuLimits& limits : {documented_gpu_limits(8, 0, 2), documented_gpu_limits(8, 9, 2)}) {
        const GpuLimitsScope other(s, limits);
        expect_padded(s, c, false);
      }
    }
  }
}

TEST(ExpertsOfAnyWidth, HaveTheBitsOfPaddedRows) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  set_kernel_choice(gpu, KernelChoice::portable);
  expect_padded_of_many_widths(s);
}

TEST(ExpertsOfAnyWidth, AreCloseToPaddedRowsOnACpu) {
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  expect_padded_of_many_widths(s);
}

}  // namespace
}  // namespace moebius
