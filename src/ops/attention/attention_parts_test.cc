// Attention in parts of a sequence: the merged results of the parts equal the result of the whole.
#include <cmath>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/attention/attention_merge.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/attention_testing.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

// Rows of queries, or of keys; together they are the sequence.
struct Span {
  int64_t begin, end;
  int64_t rows() const { return end - begin; }
  Tensor of(const Tensor& x) const { return x.empty() ? x : x.rows(begin, end); }
};

struct Case {
  int64_t rows, heads, kv_heads, width, v_width;
  std::vector<Span> queries, keys;
  bool documents = false;
  int64_t window = 0;
  DType dtype = DType::f32;
};

std::vector<Case> cases() {
  const std::vector<Case> shapes = {
      {37, 4, 2, 3, 3, {{0, 5}, {5, 24}, {24, 37}}, {{20, 37}, {0, 7}, {7, 20}}},
      {37, 2, 2, 5, 4, {{0, 5}, {5, 24}, {24, 37}}, {{20, 37}, {0, 7}, {7, 20}}},
      // In bf16 on a GPU: kernels of its own architecture support these.
      {300, 2, 1, 64, 64, {{0, 130}, {130, 300}}, {{0, 130}, {130, 135}, {135, 300}}},
      {300, 2, 2, 128, 128, {{0, 1}, {1, 300}}, {{150, 300}, {0, 150}}},
      {210, 1, 1, 192, 128, {{0, 70}, {70, 210}}, {{70, 210}, {0, 70}}},
      // With a window one kernel takes this one, and recomputed scores the one before.
      {840, 2, 1, 192, 128, {{0, 150}, {150, 840}}, {{500, 840}, {0, 500}}},
      // And these cuDNN, where there are no documents and no window.
      {256, 4, 2, 128, 128, {{0, 64}, {64, 192}, {192, 256}}, {{0, 256}}},
      {256, 2, 2, 64, 64, {{0, 128}, {128, 256}}, {{128, 256}, {0, 128}}},
      {256, 2, 2, 192, 128, {{0, 128}, {128, 256}}, {{128, 256}, {0, 128}}},
      // Portable kernels.
      {300, 4, 2, 96, 96, {{0, 130}, {130, 300}}, {{130, 300}, {0, 125}, {125, 130}}},
      {210, 2, 1, 256, 256, {{0, 1}, {1, 210}}, {{100, 210}, {0, 100}}},
  };
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : shapes) {
      c.dtype = dtype;
      for (const bool documents : {false, true}) {
        for (const int64_t window : {int64_t{0}, c.rows / 4}) {
          c.documents = documents, c.window = window;
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

// Documents that begin at 0, and at 3 and 8 tenths of the sequence.
Array document_starts(const Case& c) {
  if (!c.documents) return {};
  std::vector<int32_t> starts;
  for (int64_t i = 0; i < c.rows; ++i)
    starts.push_back(static_cast<int32_t>(i < c.rows * 3 / 10 ? 0 : c.rows * (i < c.rows * 8 / 10 ? 3 : 8) / 10));
  return Array::of_ints({c.rows}, starts);
}

// With the chosen kernels where the requested ones cannot run.
template <class Op>
void run(Stream& s, Op a, AttentionKernels kernels, void (*op)(Stream&, const Op&)) {
  const bool refuses = kernels == AttentionKernels::cudnn && !may_use_cudnn(gpu_kernels(s), a);
  a.kernels = refuses ? AttentionKernels::chosen : kernels;
  Array scratch({Op::scratch_bytes(a, s)}, DType::u8);
  a.scratch = scratch.tensor();
  op(s, a);
  synchronize(s);
}

void add_to(Values& sum, int64_t first_element, const Array& part) {
  const Values x = part.values();
  for (size_t i = 0; i < x.size(); ++i) sum[first_element + i] += x[i];
}

class AttentionPartsTest : public testing::DeviceTest<Case> {
 protected:
  void expect_merged_outputs();
  void expect_added_gradients();
  // The gradients of queries q and keys kv into dq, dk, dv, whose rows are theirs alone.
  void run_bwd(const Span& q, const Span& kv, Array& dq, Array& dk, Array& dv, bool is_part) {
    run(s_,
        AttentionBwd{.dq_THd = dq.tensor(),
                     .dk_TGd = dk.tensor(),
                     .dv_TGd = dv.tensor(),
                     .do_THd = q.of(dout_.tensor()),
                     .o_THd = q.of(o_.tensor()),
                     .lse_TH = q.of(lse_.tensor()),
                     .q_THd = q.of(q_.tensor()),
                     .k_TGd = kv.of(k_.tensor()),
                     .v_TGd = kv.of(v_.tensor()),
                     .doc_start_T = q.of(starts_.tensor()),
                     .window = c_.window,
                     .scale = 0.2f,
                     .is_part = is_part,
                     .q_first = q.begin,
                     .kv_first = kv.begin,
                     .path = path_},
        kernels_, attention_bwd);
  }
  void run_fwd(const Span& q, const Span& kv, Tensor o, Tensor lse, bool is_part) {
    run(s_,
        AttentionFwd{.o_THd = o,
                     .lse_TH = lse,
                     .q_THd = q.of(q_.tensor()),
                     .k_UGd = kv.of(k_.tensor()),
                     .v_UGd = kv.of(v_.tensor()),
                     .doc_start_T = q.of(starts_.tensor()),
                     .window = c_.window,
                     .scale = 0.2f,
                     .is_part = is_part,
                     .q_first = q.begin,
                     .kv_first = kv.begin},
        kernels_, attention_fwd);
  }
  Array poisoned(int64_t rows, int64_t heads, int64_t width) const {
    return Array::poisoned({rows, heads, width}, c_.dtype);
  }

  const Case c_ = c();
  const int64_t S = c_.rows, H = c_.heads, G = c_.kv_heads, d = c_.width, dv = c_.v_width;
  // The bound is as in AttentionTest; a part's result has one more rounding.
  const double eps_ = testing::epsilon(c_.dtype),
               error_ = testing::epsilon(DType::f32) * static_cast<double>(16 + 4 * d);
  Array q_ = Array::normal({S, H, d}, c_.dtype, 1), k_ = Array::normal({S, G, d}, c_.dtype, 2),
        v_ = Array::normal({S, G, dv}, c_.dtype, 3), dout_ = Array::normal({S, H, dv}, c_.dtype, 4),
        starts_ = document_starts(c_);
  AttentionKernels kernels_ = AttentionKernels::chosen;
  AttentionBwdPath path_ = AttentionBwdPath::chosen;
  // The result over all keys.
  Array o_ = poisoned(S, H, dv), lse_ = Array::poisoned({S, H}, DType::f32);
};
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionPartsTest, ::testing::ValuesIn(testing::on_each_device(cases())));

void AttentionPartsTest::expect_merged_outputs() {
  run_fwd({0, S}, {0, S}, o_.tensor(), lse_.tensor(), false);
  Array o = Array::of({S, H, dv}, DType::f32, Values(S * H * dv)),
        lse = Array::of({S, H}, DType::f32, Values(S * H, -std::numeric_limits<double>::infinity()));
  for (const Span& q : c_.queries) {
    for (const Span& kv : c_.keys) {
      Array part = poisoned(q.rows(), H, dv), part_lse = Array::poisoned({q.rows(), H}, DType::f32);
      run_fwd(q, kv, part.tensor(), part_lse.tensor(), true);
      attention_merge(s_, {.o_THd = q.of(o.tensor()),
                           .lse_TH = q.of(lse.tensor()),
                           .part_THd = part.tensor(),
                           .part_lse_TH = part_lse.tensor()});
      synchronize(s_);
    }
  }
  testing::expect_close("o", o.values(), o_.values(), 3 * eps_ + error_, error_);
  testing::expect_close("lse", lse.values(), lse_.values(), error_, error_);
}

void AttentionPartsTest::expect_added_gradients() {
  const Span all{0, S};
  run_fwd(all, all, o_.tensor(), lse_.tensor(), false);
  Array dq = poisoned(S, H, d), dk = poisoned(S, G, d), dv_all = poisoned(S, G, dv);
  run_bwd(all, all, dq, dk, dv_all, false);
  Values dq_sum(S * H * d), dk_sum(S * G * d), dv_sum(S * G * dv);
  for (const Span& q : c_.queries) {
    for (const Span& kv : c_.keys) {
      Array dq_part = poisoned(q.rows(), H, d), dk_part = poisoned(kv.rows(), G, d),
            dv_part = poisoned(kv.rows(), G, dv);
      run_bwd(q, kv, dq_part, dk_part, dv_part, true);
      add_to(dq_sum, q.begin * H * d, dq_part);
      add_to(dk_sum, kv.begin * G * d, dk_part);
      add_to(dv_sum, kv.begin * G * dv, dv_part);
    }
  }
  const double floor = error_ + eps_ * std::sqrt(static_cast<double>(d));
  testing::expect_close("dq", dq_sum, dq.values(), 4 * eps_ + error_, floor);
  testing::expect_close("dk", dk_sum, dk.values(), 4 * eps_ + error_, floor);
  testing::expect_close("dv", dv_sum, dv_all.values(), 4 * eps_ + error_, error_);
}

TEST_P(AttentionPartsTest, OutputsMergeToTheWhole) { expect_merged_outputs(); }
TEST_P(AttentionPartsTest, GradientsAddUpToThoseOfTheWhole) { expect_added_gradients(); }

TEST_P(AttentionPartsTest, OwnKernelsAndCudnnEqualWholeAttention) {
  if (s_.device() != DeviceKind::cuda || c_.dtype != DType::bf16) GTEST_SKIP() << "bf16 on a GPU";
  for (const AttentionKernels kernels : {AttentionKernels::own, AttentionKernels::cudnn}) {
    kernels_ = kernels;
    expect_merged_outputs();
    expect_added_gradients();
  }
}

TEST_P(AttentionPartsTest, SummedGradientsOfEachPathEqualWholeAttention) {
  if (!testing::has_hopper_kernel(s_, c_.dtype, d, dv)) GTEST_SKIP() << "bf16 of some widths";
  kernels_ = AttentionKernels::own;
  for (const AttentionBwdPath path : {AttentionBwdPath::one_kernel, AttentionBwdPath::recomputed}) {
    path_ = path;
    expect_added_gradients();
  }
}

TEST_P(AttentionPartsTest, PortableKernelsEqualWholeAttention) {
  if (s_.device() != DeviceKind::cuda || c_.dtype != DType::bf16) GTEST_SKIP() << "bf16 on a GPU";
  const testing::PortableScope portable(s_);
  expect_merged_outputs();
  expect_added_gradients();
}

// Kernels of a GPU read tiles past the last key. The queries come after these keys too, and with so low logits a
// probability that is not cleared there is infinite.
void expect_finite_gradients(Stream& s, int64_t width, AttentionBwdPath path) {
  constexpr int64_t kRows = 150;
  const int64_t v_width = std::min<int64_t>(width, 128);
  const Shape shape{kRows, 1, width}, v_shape{kRows, 1, v_width};
  Array k = Array::of(shape, DType::bf16, Values(kRows * width, 1.0)),
        q = Array::of(shape, DType::bf16, Values(kRows * width, -16.0)), v = Array::normal(v_shape, DType::bf16, 1),
        dout = Array::normal(v_shape, DType::bf16, 2);
  Array o = Array::poisoned(v_shape, DType::bf16), lse = Array::poisoned({kRows, 1}, DType::f32);
  Array dq = Array::poisoned(shape, DType::bf16), dk = dq, dv = o;
  run(s,
      AttentionFwd{.o_THd = o.tensor(),
                   .lse_TH = lse.tensor(),
                   .q_THd = q.tensor(),
                   .k_UGd = k.tensor(),
                   .v_UGd = v.tensor(),
                   .scale = 0.1f,
                   .is_part = true,
                   .q_first = kRows},
      AttentionKernels::chosen, attention_fwd);
  run(s,
      AttentionBwd{.dq_THd = dq.tensor(),
                   .dk_TGd = dk.tensor(),
                   .dv_TGd = dv.tensor(),
                   .do_THd = dout.tensor(),
                   .o_THd = o.tensor(),
                   .lse_TH = lse.tensor(),
                   .q_THd = q.tensor(),
                   .k_TGd = k.tensor(),
                   .v_TGd = v.tensor(),
                   .scale = 0.1f,
                   .is_part = true,
                   .q_first = kRows,
                   .path = path},
      AttentionKernels::own, attention_bwd);
  EXPECT_LT(lse.values().at(0), -90);  // exp of its negative overflows f32
  for (const Array* each : {&dq, &dk, &dv})
    for (const double x : each->values()) ASSERT_TRUE(std::isfinite(x));
}
TEST(AttentionParts, LowLogitsGiveFiniteGradients) {
  testing::on_each_device([](Stream& s) {
    for (const int64_t width : {64, 96, 128, 192}) {
      expect_finite_gradients(s, width, AttentionBwdPath::chosen);
      if (testing::has_hopper_kernel(s, DType::bf16, width, std::min<int64_t>(width, 128)))
        expect_finite_gradients(s, width, AttentionBwdPath::one_kernel);
    }
  });
}

TEST(AttentionParts, MayHaveNoQueriesOrNoKeys) {
  testing::on_each_device([](Stream& s) {
    Array q({0, 1, 64}, DType::bf16), lse({0, 1}, DType::f32), k = Array::normal({2, 1, 64}, DType::bf16, 1);
    Array dk = Array::poisoned({2, 1, 64}, DType::bf16), dv = dk;
    AttentionBwd bwd{.dq_THd = q.tensor(),
                     .dk_TGd = dk.tensor(),
                     .dv_TGd = dv.tensor(),
                     .do_THd = q.tensor(),
                     .o_THd = q.tensor(),
                     .lse_TH = lse.tensor(),
                     .q_THd = q.tensor(),
                     .k_TGd = k.tensor(),
                     .v_TGd = k.tensor(),
                     .is_part = true};
    Array bwd_scratch({AttentionBwd::scratch_bytes(bwd, s)}, DType::u8);
    bwd.scratch = bwd_scratch.tensor();
    attention_bwd(s, bwd);
    EXPECT_EQ(dk.values(), Values(128));
    EXPECT_EQ(dv.values(), Values(128));

    Array queries = Array::normal({3, 1, 64}, DType::bf16, 2), none({0, 1, 64}, DType::bf16);
    Array o = Array::poisoned({3, 1, 64}, DType::bf16), sums = Array::poisoned({3, 1}, DType::f32);
    AttentionFwd fwd{.o_THd = o.tensor(),
                     .lse_TH = sums.tensor(),
                     .q_THd = queries.tensor(),
                     .k_UGd = none.tensor(),
                     .v_UGd = none.tensor(),
                     .is_part = true};
    Array fwd_scratch({AttentionFwd::scratch_bytes(fwd, s)}, DType::u8);
    fwd.scratch = fwd_scratch.tensor();
    attention_fwd(s, fwd);
    EXPECT_EQ(o.values(), Values(3 * 64));
    EXPECT_EQ(sums.values(), Values(3, -std::numeric_limits<double>::infinity()));
  });
}

TEST(AttentionParts, AreRefusedAtNegativePositions) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array q({4, 1, 2}, DType::f32), lse({4, 1}, DType::f32);
  EXPECT_EQ(testing::error_of([&] {
              attention_fwd(s, {.o_THd = q.tensor(),
                                .lse_TH = lse.tensor(),
                                .q_THd = q.tensor(),
                                .k_UGd = q.tensor(),
                                .v_UGd = q.tensor(),
                                .is_part = true,
                                .kv_first = -1});
            }),
            "attention_fwd: positions must not be negative; got 0 of q and -1 of k");
}

}  // namespace
}  // namespace moebius
