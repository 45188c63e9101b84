#include "ops/attention/attention.h"

#include <array>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_ref.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/attention_testing.h"
#include "ops/attention/cuda/attention.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t batch, rows, kv_rows, heads, kv_heads, width, window;
  bool documents;
  int64_t v_width = 0;  // 0: width
  DType dtype = DType::f32;
  int64_t out_width() const { return v_width > 0 ? v_width : width; }
};

std::vector<Case> in_each_dtype(std::vector<Case> shapes) {
  for (size_t i = 0, n = shapes.size(); i < n; ++i) {
    shapes.push_back(shapes[i]);
    shapes.back().dtype = DType::bf16;
  }
  return shapes;
}

std::vector<Case> cases() {
  return in_each_dtype({
      {1, 0, 0, 2, 1, 4, 0, false},
      {1, 1, 1, 1, 1, 1, 0, false},
      {2, 7, 7, 4, 2, 5, 0, false},
      {2, 33, 33, 3, 1, 8, 5, false},
      {1, 1, 19, 2, 2, 6, 0, false},
      {2, 5, 9, 2, 1, 3, 4, true},
      {1, 301, 301, 2, 1, 7, 0, false},
      {1, 301, 301, 1, 1, 4, 40, false},
      {2, 150, 150, 2, 2, 4, 0, true},
      {1, 20, 300, 2, 1, 4, 0, true},
      {1, 301, 301, 1, 1, 4, 90, true},
      {1, 70, 70, 2, 1, 96, 0, false},
      {1, 40, 50, 2, 1, 200, 30, true},
      {1, 67, 67, 1, 1, 256, 0, true},
      // v is narrower or wider than q and k.
      {2, 33, 33, 3, 3, 10, 0, false, 7},
      {1, 150, 150, 4, 2, 24, 40, true, 16},
      {1, 1, 19, 2, 2, 6, 0, false, 9},
      {1, 20, 300, 2, 1, 4, 0, true, 80},
      {1, 70, 70, 2, 2, 64, 0, false, 128},
  });
}

// These are for kernels of GPUs. A CPU runs the same code for them as for those above, for much longer.
std::vector<Case> cases_of_gpus() {
  return in_each_dtype({
      // In bf16 on a GPU: kernels of its own architecture support these.
      {1, 300, 300, 4, 2, 128, 0, true},
      {2, 150, 150, 2, 1, 64, 40, true},
      {2, 70, 200, 4, 2, 64, 0, true},
      {1, 1, 130, 4, 2, 128, 0, false},
      {2, 67, 67, 3, 3, 192, 0, false, 128},
      {1, 300, 300, 4, 2, 192, 0, true, 128},
      {1, 257, 257, 2, 2, 192, 90, false, 128},
      {1, 70, 200, 2, 1, 192, 0, false, 128},
      // Portable kernels.
      {2, 130, 130, 4, 2, 32, 0, false},
      {2, 190, 190, 3, 1, 96, 0, true},
      {1, 300, 300, 4, 2, 96, 77, false},
      {1, 70, 290, 4, 1, 80, 60, true},
      {1, 200, 200, 2, 1, 33, 0, false, 71},
      {1, 180, 180, 2, 1, 256, 0, false},
      {2, 140, 140, 4, 2, 192, 50, true, 160},
      // And these cuDNN.
      {2, 128, 128, 4, 2, 64, 0, false},
      {1, 67, 67, 4, 1, 128, 0, false},
      {1, 256, 256, 2, 2, 128, 100, false},
      {1, 200, 200, 6, 2, 64, 37, false},
      // More than one block of keys, with groups of heads.
      {2, 300, 300, 6, 2, 64, 0, false},
      {2, 300, 300, 6, 2, 64, 0, true},
      {1, 390, 390, 2, 1, 64, 150, true},
      {2, 290, 290, 6, 2, 192, 0, false, 128},
      {1, 300, 300, 6, 2, 96, 0, true},
      {1, 270, 270, 2, 1, 256, 0, false},
      {1, 330, 330, 2, 2, 256, 150, true},
  });
}

class AttentionTest : public testing::DeviceTest<Case> {
 protected:
  AttentionTest() {
    q_ = Array::normal({c_.batch * c_.rows, c_.heads, c_.width}, c_.dtype, 1);
    k_ = Array::normal({c_.batch * c_.kv_rows, c_.kv_heads, c_.width}, c_.dtype, 2);
    v_ = Array::normal({c_.batch * c_.kv_rows, c_.kv_heads, c_.out_width()}, c_.dtype, 3);
    if (c_.documents) doc_start_ = Array::of_ints({c_.batch * c_.rows}, doc_starts());
    ref_ = {q_.values(), k_.values(), v_.values(), doc_start_.values(), c_.batch, c_.rows,       c_.kv_rows,
            c_.heads,    c_.kv_heads, c_.width,    c_.window,           scale_,   c_.out_width()};
  }
  void expect_forward();
  void expect_backward();
  // Returns whether cuDNN can compute the forward pass.
  bool can_forward(Array& o, Array& lse) {
    return cudnn_can(AttentionFwd{.o_THd = o.tensor(),
                                  .lse_TH = lse.tensor(),
                                  .q_THd = q_.tensor(),
                                  .k_UGd = k_.tensor(),
                                  .v_UGd = v_.tensor(),
                                  .doc_start_T = doc_start_.tensor(),
                                  .batch = c_.batch,
                                  .window = c_.window});
  }
  // Documents of 13 tokens in the first sequence, 14 in the next.
  std::vector<int32_t> doc_starts() const {
    std::vector<int32_t> starts;
    for (int64_t i = 0; i < c_.batch * c_.rows; ++i) {
      const int64_t length = 13 + i / c_.rows;
      starts.push_back(static_cast<int32_t>((c_.kv_rows - c_.rows + i % c_.rows) / length * length));
    }
    return starts;
  }
  AttentionFwd fwd(Array& o, Array& lse) {
    AttentionFwd a{.o_THd = o.tensor(),
                   .lse_TH = lse.tensor(),
                   .q_THd = q_.tensor(),
                   .k_UGd = k_.tensor(),
                   .v_UGd = v_.tensor(),
                   .doc_start_T = doc_start_.tensor(),
                   .batch = c_.batch,
                   .window = c_.window,
                   .scale = static_cast<float>(scale_),
                   .kernels = kernels_};
    scratch_ = Array::poisoned({AttentionFwd::scratch_bytes(a, s_)}, DType::u8);
    a.scratch = scratch_.tensor();
    return a;
  }

  const Case c_ = c();
  const double scale_ = 0.5;
  // Scores are sums of d products of magnitude sqrt(d), and errors of scores are relative
  // errors of probabilities.
  const double error_ = testing::epsilon(DType::f32) * (16 + 4 * c_.width);
  AttentionKernels kernels_ = AttentionKernels::chosen;
  AttentionBwdPath path_ = AttentionBwdPath::chosen;
  Array q_, k_, v_, doc_start_, scratch_;
  ref::Attention ref_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest, ::testing::ValuesIn(testing::on_each_device(cases())));
INSTANTIATE_TEST_SUITE_P(ShapesOfGpus, AttentionTest, ::testing::ValuesIn(testing::on_each_device(cases_of_gpus())));

void AttentionTest::expect_forward() {
  Array o = Array::poisoned({c_.batch * c_.rows, c_.heads, c_.out_width()}, c_.dtype),
        lse = Array::poisoned({c_.batch * c_.rows, c_.heads}, DType::f32);
  attention_fwd(s_, fwd(o, lse));
  const ref::AttentionOut want = ref::attention_fwd(ref_);
  // Probabilities and o are rounded to the dtype.
  testing::expect_close("o", o.values(), want.o, 2 * testing::epsilon(c_.dtype) + error_, error_);
  testing::expect_close("lse", lse.values(), want.lse, error_, error_);
}

void AttentionTest::expect_backward() {
  if (c_.rows != c_.kv_rows) return;  // refused: BadArgumentsAreNamed
  const Shape q_shape{c_.batch * c_.rows, c_.heads, c_.width}, k_shape{c_.batch * c_.rows, c_.kv_heads, c_.width},
      o_shape{c_.batch * c_.rows, c_.heads, c_.out_width()}, v_shape{c_.batch * c_.rows, c_.kv_heads, c_.out_width()};
  const ref::AttentionOut out = ref::attention_fwd(ref_);
  Array dout = Array::normal(o_shape, c_.dtype, 4), o = Array::of(o_shape, c_.dtype, out.o),
        lse = Array::of({c_.batch * c_.rows, c_.heads}, DType::f32, out.lse);
  Array dq = Array::poisoned(q_shape, c_.dtype), dk = Array::poisoned(k_shape, c_.dtype),
        dv = Array::poisoned(v_shape, c_.dtype);
  AttentionBwd a{.dq_THd = dq.tensor(),
                 .dk_TGd = dk.tensor(),
                 .dv_TGd = dv.tensor(),
                 .do_THd = dout.tensor(),
                 .o_THd = o.tensor(),
                 .lse_TH = lse.tensor(),
                 .q_THd = q_.tensor(),
                 .k_TGd = k_.tensor(),
                 .v_TGd = v_.tensor(),
                 .doc_start_T = doc_start_.tensor(),
                 .batch = c_.batch,
                 .window = c_.window,
                 .scale = static_cast<float>(scale_),
                 .kernels = kernels_,
                 .path = path_};
  if (kernels_ == AttentionKernels::cudnn && !may_use_cudnn(gpu_kernels(s_), a)) return;
  Array scratch = Array::poisoned({AttentionBwd::scratch_bytes(a, s_)}, DType::u8);
  a.scratch = scratch.tensor();
  attention_bwd(s_, a);
  const ref::AttentionGrads want = ref::attention_bwd(ref_, dout.values());
  // o (in <do, o>), p, ds and the results are rounded to the dtype; where terms cancel (one key:
  // ds = 0), the error is one of terms of magnitude sqrt(d).
  const double eps = testing::epsilon(c_.dtype), floor = error_ + eps * std::sqrt(c_.width);
  const auto expect_wanted = [&] {
    testing::expect_close("dq", dq.values(), want.dq, 4 * eps + error_, floor);
    testing::expect_close("dk", dk.values(), want.dk, 4 * eps + error_, floor);
    testing::expect_close("dv", dv.values(), want.dv, 2 * eps + error_, error_);
  };
  expect_wanted();
  if (s_.device() != DeviceKind::cuda || kernels_ != AttentionKernels::chosen) return;
  if (!uses_cudnn(gpu_kernels(s_), a)) return;
  // If cuDNN needs more scratch than is available, the other kernels run.
  a.scratch.shape = {2 * a.lse_TH.num_bytes()};  // of the kernels with the least
  ASSERT_FALSE(cuda::cudnn_attention_bwd(s_, a));
  for (Array* gradient : {&dq, &dk, &dv}) *gradient = Array::poisoned(gradient->tensor().shape, c_.dtype);
  a.dq_THd = dq.tensor();
  a.dk_TGd = dk.tensor();
  a.dv_TGd = dv.tensor();
  cuda::attention_bwd(s_, a);
  expect_wanted();
}

TEST_P(AttentionTest, ForwardEqualsTheReference) { expect_forward(); }
TEST_P(AttentionTest, BackwardEqualsTheReference) { expect_backward(); }

TEST_P(AttentionTest, OwnKernelsAndCudnnEqualTheReference) {
  if (s_.device() != DeviceKind::cuda || c_.dtype != DType::bf16) GTEST_SKIP() << "bf16 on a GPU";
  kernels_ = AttentionKernels::own;
  expect_forward();
  expect_backward();
  kernels_ = AttentionKernels::cudnn;
  Array o({c_.batch * c_.rows, c_.heads, c_.out_width()}, c_.dtype), lse({c_.batch * c_.rows, c_.heads}, DType::f32);
  if (!can_forward(o, lse)) GTEST_SKIP() << "cuDNN does not take it";
  expect_forward();
  expect_backward();
}

// Each block then processes many tiles of queries.
TEST_P(AttentionTest, FewBlocksOfHopperKernelsGiveTheSameBits) {
  if (!testing::has_hopper_kernel(s_, c_.dtype, c_.width, c_.out_width())) GTEST_SKIP() << "bf16 of some widths";
  kernels_ = AttentionKernels::own;
  Array o({c_.batch * c_.rows, c_.heads, c_.out_width()}, c_.dtype), lse({c_.batch * c_.rows, c_.heads}, DType::f32);
  attention_fwd(s_, fwd(o, lse));
  const Values want_o = o.values(), want_lse = lse.values();
  for (const int blocks : {1, 3}) {
    const BlockLimitScope few(s_, blocks);
    o = Array::poisoned(o.tensor().shape, c_.dtype);
    lse = Array::poisoned(lse.tensor().shape, DType::f32);
    attention_fwd(s_, fwd(o, lse));
    EXPECT_EQ(o.values(), want_o) << blocks << " blocks";
    EXPECT_EQ(lse.values(), want_lse) << blocks << " blocks";
  }
}

TEST_P(AttentionTest, EachPathOfHopperKernelsEqualsTheReference) {
  if (!testing::has_hopper_kernel(s_, c_.dtype, c_.width, c_.out_width())) GTEST_SKIP() << "bf16 of some widths";
  kernels_ = AttentionKernels::own;
  const Values sinks = Array::normal({c_.heads}, DType::f32, 5).values();
  for (const AttentionBwdPath path :
       {AttentionBwdPath::one_kernel, AttentionBwdPath::kept_ds, AttentionBwdPath::recomputed}) {
    path_ = path;
    for (const Values& sink : {Values(), sinks}) {
      ref_.sink = sink;
      expect_backward();
    }
  }
}

// A GPU without Hopper's kernels, whose shared memory holds the smaller tiles alone.
TEST_P(AttentionTest, OtherGpusEqualTheReference) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "the limits are a GPU's";
  const GpuLimitsScope other(s_, documented_gpu_limits(8, 9, 128));
  expect_forward();
  expect_backward();
}

// If cuDNN ran it, kernels_ = own would give other bits.
TEST_P(AttentionTest, PortableKernelsExcludeCudnnOnOtherGpus) {
  if (s_.device() != DeviceKind::cuda || c_.dtype != DType::bf16) GTEST_SKIP() << "bf16 on a GPU";
  const GpuLimitsScope other(s_, documented_gpu_limits(8, 9, 128));
  const Shape o_shape{c_.batch * c_.rows, c_.heads, c_.out_width()};
  const auto forward = [&](AttentionKernels kernels) {
    kernels_ = kernels;
    Array o = Array::poisoned(o_shape, c_.dtype), lse({c_.batch * c_.rows, c_.heads}, DType::f32);
    attention_fwd(s_, fwd(o, lse));
    return std::pair(o.values(), lse.values());
  };
  const auto own = forward(AttentionKernels::own);
  set_kernel_choice(s_.accelerator(), KernelChoice::portable);
  const auto portable = forward(AttentionKernels::chosen);
  Array o(o_shape, c_.dtype), lse({c_.batch * c_.rows, c_.heads}, DType::f32);
  EXPECT_EQ(AttentionFwd::scratch_bytes(fwd(o, lse), s_), 0) << "no workspace of cuDNN";
  set_kernel_choice(s_.accelerator(), KernelChoice::automatic);
  EXPECT_EQ(portable, own);
}

// With the shared memory of each kind of GPU.
TEST_P(AttentionTest, PortableKernelsEqualTheReference) {
  if (s_.device() != DeviceKind::cuda || c_.dtype != DType::bf16) GTEST_SKIP() << "bf16 on a GPU";
  for (const int64_t shared_bytes : testing::kSharedBytesOfGpus) {
    SCOPED_TRACE(shared_bytes);
    const testing::PortableScope portable(s_, shared_bytes);
    expect_forward();
    expect_backward();
  }
}

TEST(AttentionOnCuda, CudnnIsUsedOnlyInTheMeasuredVersion) {
  EXPECT_TRUE(is_measured_cudnn(91900));
  EXPECT_TRUE(is_measured_cudnn(91902));
  for (const int64_t version : {91200, 91801, 92000, 100190}) EXPECT_FALSE(is_measured_cudnn(version)) << version;
  EXPECT_EQ(cudnn_text(91902), "9.19.2");
  EXPECT_EQ(cudnn_text(92000), "9.20.0 (not used: attention uses only 9.19)");
  EXPECT_EQ(cudnn_text(0), "not part of this build");
}

TEST(Attention, ReferenceBackwardEqualsFiniteDifferences) {
  ref::Attention at{.doc_start = {0, 0, 2, 2, 0, 0, 0, 3},
                    .batch = 2,
                    .rows = 4,
                    .kv_rows = 4,
                    .heads = 2,
                    .kv_heads = 1,
                    .width = 3,
                    .window = 3,
                    .scale = 0.7,
                    .v_width = 2};
  at.q = Array::normal({8, 2, 3}, DType::f32, 1).values();
  at.k = Array::normal({8, 1, 3}, DType::f32, 2).values();
  at.v = Array::normal({8, 1, 2}, DType::f32, 3).values();
  const Values dout = Array::normal({8, 2, 2}, DType::f32, 4).values();
  const ref::AttentionGrads grads = ref::attention_bwd(at, dout);
  const auto check = [&](const char* what, Values ref::Attention::*x, const Values& gradient) {
    testing::expect_gradient(
        what,
        [&, x](const Values& v) {
          ref::Attention moved = at;
          moved.*x = v;
          return testing::dot(dout, ref::attention_fwd(moved).o);
        },
        at.*x, gradient);
  };
  check("dq", &ref::Attention::q, grads.dq);
  check("dk", &ref::Attention::k, grads.dk);
  check("dv", &ref::Attention::v, grads.dv);
}

// The outputs of both passes for two sequences of 300.
std::vector<Array> both_passes(Stream& s, int64_t width, int64_t v_width, bool documents) {
  Array q = Array::normal({600, 2, width}, DType::bf16, 1), k = Array::normal({600, 1, width}, DType::bf16, 2),
        v = Array::normal({600, 1, v_width}, DType::bf16, 3), dout = Array::normal({600, 2, v_width}, DType::bf16, 4);
  std::vector<int32_t> starts(600);
  for (int i = 0; i < 600; ++i) starts[i] = i % 300 / 70 * 70;
  Array doc_start = documents ? Array::of_ints({600}, starts) : Array();
  Array o = dout, dq = q, dk = k, dv = v, lse({600, 2}, DType::f32);
  AttentionFwd fwd{.o_THd = o.tensor(),
                   .lse_TH = lse.tensor(),
                   .q_THd = q.tensor(),
                   .k_UGd = k.tensor(),
                   .v_UGd = v.tensor(),
                   .doc_start_T = doc_start.tensor(),
                   .batch = 2};
  AttentionBwd bwd{.dq_THd = dq.tensor(),
                   .dk_TGd = dk.tensor(),
                   .dv_TGd = dv.tensor(),
                   .do_THd = dout.tensor(),
                   .o_THd = o.tensor(),
                   .lse_TH = lse.tensor(),
                   .q_THd = q.tensor(),
                   .k_TGd = k.tensor(),
                   .v_TGd = v.tensor(),
                   .doc_start_T = doc_start.tensor(),
                   .batch = 2};
  Array fwd_scratch({AttentionFwd::scratch_bytes(fwd, s)}, DType::u8),
      bwd_scratch({AttentionBwd::scratch_bytes(bwd, s)}, DType::u8);
  fwd.scratch = fwd_scratch.tensor();
  bwd.scratch = bwd_scratch.tensor();
  attention_fwd(s, fwd);
  attention_bwd(s, bwd);
  synchronize(s);
  return {o, lse, dq, dk, dv};
}

TEST(Attention, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) { return both_passes(s, 8, 5, false); });
}

TEST(Attention, SameBitsEachTime) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [width, v_width] :
         std::vector<std::array<int64_t, 2>>{{24, 24}, {64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
      for (const bool documents : {false, true}) {
        const std::vector<Array> first = both_passes(s, width, v_width, documents),
                                 second = both_passes(s, width, v_width, documents);
        for (size_t i = 0; i < first.size(); ++i) {
          EXPECT_EQ(first[i].bytes(), second[i].bytes()) << "output " << i << ", width " << width;
        }
      }
    }
  });
}

TEST(AttentionOnCuda, PortableKernelsGiveTheSameBitsInEveryConfig) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  for (const int64_t width : {96, 128, 192, 256}) {
    std::vector<Array> first;
    for (const int64_t shared_bytes : testing::kSharedBytesOfGpus) {
      const testing::PortableScope portable(s, shared_bytes);
      const std::vector<Array> all = both_passes(s, width, width, true);
      if (first.empty()) first = all;
      for (size_t i = 0; i < all.size(); ++i)
        EXPECT_EQ(all[i].bytes(), first[i].bytes()) << "output " << i << ", width " << width << ", " << shared_bytes;
    }
  }
}

TEST(Attention, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array q({4, 3, 2}, DType::f32), k({4, 3, 2}, DType::f32), k2({4, 2, 2}, DType::f32), few({2, 3, 2}, DType::f32),
      lse({4, 3}, DType::f32), i({4, 3, 2}, DType::i32);
  const auto error = [&](AttentionFwd a) { return testing::error_of([&] { attention_fwd(s, a); }); };
  const AttentionFwd good{
      .o_THd = q.tensor(), .lse_TH = lse.tensor(), .q_THd = q.tensor(), .k_UGd = k.tensor(), .v_UGd = k.tensor()};
  AttentionFwd a = good;
  a.q_THd = i.tensor();
  EXPECT_EQ(error(a), "attention_fwd: q must be f32 or bf16; got i32[4, 3, 2]");
  a = good;
  a.q_THd = lse.tensor();
  EXPECT_EQ(error(a), "attention_fwd: q and k must be [rows, heads, d]; got f32[4, 3] and f32[4, 3, 2]");
  a = good;
  a.batch = 3;
  EXPECT_EQ(error(a), "attention_fwd: batch 3 must divide the rows of q f32[4, 3, 2] and k f32[4, 3, 2]");
  a = good;
  a.k_UGd = few.tensor();
  EXPECT_EQ(error(a),
            "attention_fwd: a query sees itself, so k must have at least the rows of q; got q f32[4, 3, 2] and k "
            "f32[2, 3, 2]");
  a = good;
  a.k_UGd = k2.tensor();
  EXPECT_EQ(error(a), "attention_fwd: the heads of k must divide those of q; got q f32[4, 3, 2] and k f32[4, 2, 2]");
  a = good;
  a.window = -1;
  EXPECT_EQ(error(a), "attention_fwd: window must not be negative; got -1; 0 means no window");
  EXPECT_EQ(error(good),
            fmt::format("attention_fwd: scratch must have {} bytes; got 0", AttentionFwd::scratch_bytes(good, s)));
  EXPECT_EQ(testing::error_of([&] {
              attention_bwd(
                  s,
                  {.lse_TH = lse.tensor().rows(0, 2), .q_THd = few.tensor(), .k_TGd = k.tensor(), .v_TGd = k.tensor()});
            }),
            "attention_bwd: q and k must have the same rows; got f32[2, 3, 2] and f32[4, 3, 2]");
}

TEST(AttentionOnCuda, AHopperPathIsRefusedForUnsupportedShapes) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(1);
  Stream s(*testing::accelerator(), pool);
  Array x = Array::normal({4, 1, 80}, DType::bf16, 1), lse({4, 1}, DType::f32);
  AttentionBwd a{.dq_THd = x.tensor(),
                 .dk_TGd = x.tensor(),
                 .dv_TGd = x.tensor(),
                 .do_THd = x.tensor(),
                 .o_THd = x.tensor(),
                 .lse_TH = lse.tensor(),
                 .q_THd = x.tensor(),
                 .k_TGd = x.tensor(),
                 .v_TGd = x.tensor(),
                 .kernels = AttentionKernels::own};
  Array scratch({AttentionBwd::scratch_bytes(a, s)}, DType::u8);
  a.scratch = scratch.tensor();
  a.path = AttentionBwdPath::one_kernel;
  EXPECT_EQ(testing::error_of([&] { attention_bwd(s, a); }),
            "attention_bwd: a path was asked for, and the Hopper kernels do not take q bf16[4, 1, 80] here; leave the "
            "path out");
}

TEST(Attention, NullDeviceCountsSeenPairs) {
  const auto flops = [](int64_t rows, int64_t kv_rows, int64_t window) {
    return testing::cost_on_null([=](Stream& s) {
             const Tensor q = testing::null_tensor({2 * rows, 3, 4}), k = testing::null_tensor({2 * kv_rows, 1, 4});
             AttentionFwd a{.o_THd = q,
                            .lse_TH = testing::null_tensor({2 * rows, 3}),
                            .q_THd = q,
                            .k_UGd = k,
                            .v_UGd = k,
                            .batch = 2,
                            .window = window};
             a.scratch = testing::null_tensor({AttentionFwd::scratch_bytes(a, s)}, DType::u8);
             attention_fwd(s, a);
           })
        .flops;
  };
  const double per_pair = 4 * 2 * 3 * 4;
  EXPECT_EQ(flops(5, 5, 0), per_pair * (1 + 2 + 3 + 4 + 5));
  EXPECT_EQ(flops(2, 5, 0), per_pair * (4 + 5));
  EXPECT_EQ(flops(5, 5, 2), per_pair * (1 + 2 + 2 + 2 + 2));
  EXPECT_EQ(flops(3, 5, 4), per_pair * (3 + 4 + 4));
}

}  // namespace
}  // namespace moebius
