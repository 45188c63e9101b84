#include "ops/attention/attention_choice.h"

#include "ops/attention/attention_scratch.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

AttentionShape causal(int64_t batch, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width) {
  return {.batch = batch,
          .rows = rows,
          .kv_rows = rows,
          .heads = heads,
          .kv_heads = kv_heads,
          .width = width,
          .v_width = width == 192 ? 128 : width};
}

TEST(AttentionChoice, CudnnIsChosenByTheMeasuredTable) {
  const AttentionShape qwen = causal(8, 4096, 32, 4, 128), long_qwen = causal(1, 131072, 32, 4, 128),
                       latent = causal(1, 32768, 128, 128, 192), small = causal(1, 512, 32, 4, 128),
                       narrow = causal(8, 4096, 64, 8, 64);
  EXPECT_FALSE(cudnn_is_faster_fwd(qwen));
  EXPECT_TRUE(cudnn_is_faster_fwd(small));
  EXPECT_FALSE(cudnn_is_faster_fwd(narrow));
  EXPECT_FALSE(cudnn_is_faster_fwd(long_qwen));
  EXPECT_FALSE(cudnn_is_faster_fwd(latent));
  EXPECT_FALSE(cudnn_is_faster_fwd(causal(1, 4096, 32, 4, 128)));
  EXPECT_FALSE(cudnn_is_faster_fwd(causal(1, 4096, 16, 16, 128)));
  EXPECT_TRUE(cudnn_is_faster_fwd(causal(1, 4096, 15, 15, 128))) << "too few tiles for a GPU";
  AttentionShape window = qwen;
  window.window = 1024;
  EXPECT_TRUE(cudnn_is_faster_fwd(window));
  EXPECT_FALSE(cudnn_is_faster_bwd(window));
  window.window = 1025;
  EXPECT_FALSE(cudnn_is_faster_fwd(window));
  EXPECT_FALSE(cudnn_is_faster_bwd(window));
  AttentionShape other_window = narrow;
  other_window.window = 128;
  EXPECT_TRUE(cudnn_is_faster_fwd(other_window));
  EXPECT_FALSE(cudnn_is_faster_bwd(other_window));
  other_window.window = 2048;
  EXPECT_FALSE(cudnn_is_faster_fwd(other_window));
  other_window = latent;
  other_window.window = 1024;
  EXPECT_FALSE(cudnn_is_faster_fwd(other_window));
  other_window.window = 1023;
  EXPECT_TRUE(cudnn_is_faster_fwd(other_window));
  EXPECT_FALSE(cudnn_is_faster_bwd(qwen));
  EXPECT_FALSE(cudnn_is_faster_bwd(long_qwen));
  EXPECT_FALSE(cudnn_is_faster_bwd(latent));
  EXPECT_TRUE(cudnn_is_faster_bwd(small));
  for (const int64_t width : {32, 80, 96, 160, 256}) {
    AttentionShape other = causal(8, 4096, 32, 4, width);
    EXPECT_TRUE(cudnn_is_faster_fwd(other)) << width;
    EXPECT_EQ(cudnn_is_faster_bwd(other), width == 80 || width == 160) << width;
    EXPECT_EQ(cudnn_is_faster_bwd(causal(1, 512, 32, 4, width)), width > 64) << width;
    other.window = 1024;
    EXPECT_FALSE(cudnn_is_faster_fwd(other) || cudnn_is_faster_bwd(other)) << width;
  }
}

// A measured call of short sequences, and whether cuDNN is the faster one.
struct ShortCall {
  AttentionShape shape;
  bool fwd, bwd;
};

TEST(AttentionChoice, ShortSequencesAreAsMeasured) {
  const ShortCall calls[] = {
      {causal(32, 512, 32, 4, 128), true, false},     {causal(8, 512, 32, 4, 128), true, false},
      {causal(4, 1024, 32, 4, 128), true, true},      {causal(1, 2048, 32, 4, 128), false, true},
      {causal(2, 2048, 32, 4, 128), false, true},     {causal(8, 2048, 32, 4, 128), true, false},
      {causal(1, 4096, 32, 4, 128), false, true},     {causal(32, 512, 16, 16, 128), true, true},
      {causal(4, 1024, 16, 16, 128), true, false},    {causal(8, 2048, 16, 16, 128), true, false},
      {causal(1, 4096, 16, 16, 128), false, false},   {causal(32, 512, 64, 8, 64), true, false},
      {causal(8, 512, 64, 8, 64), true, false},       {causal(1, 2048, 64, 8, 64), false, false},
      {causal(4, 2048, 64, 8, 64), true, false},      {causal(8, 512, 128, 128, 192), true, false},
      {causal(1, 1024, 128, 128, 192), false, false}, {causal(4, 2048, 128, 128, 192), false, false},
      {causal(8, 512, 32, 4, 96), true, false},       {causal(4, 1024, 32, 4, 96), true, false},
      {causal(1, 2048, 32, 4, 96), true, true},       {causal(2, 2048, 32, 4, 96), true, true},
      {causal(1, 4096, 32, 4, 96), true, true},       {causal(16, 1024, 32, 4, 96), true, false},
      {causal(8, 512, 32, 4, 256), true, false},      {causal(4, 1024, 32, 4, 256), true, false},
      {causal(1, 2048, 32, 4, 256), true, true},      {causal(2, 2048, 32, 4, 256), true, false},
      {causal(1, 4096, 32, 4, 256), true, false}};
  for (const ShortCall& c : calls) {
    const AttentionShape& z = c.shape;
    EXPECT_EQ(cudnn_is_faster_fwd(z), c.fwd) << z.batch << " x " << z.rows << ", " << z.heads << " of " << z.width;
    EXPECT_EQ(cudnn_is_faster_bwd(z), c.bwd) << z.batch << " x " << z.rows << ", " << z.heads << " of " << z.width;
  }
}

TEST(AttentionChoice, AWindowThatCoversTheSequenceIsIgnored) {
  const Tensor q = testing::null_tensor({600, 4, 64}, DType::bf16);
  AttentionFwd a{.q_THd = q, .k_UGd = q, .v_UGd = q, .batch = 2, .window = 299};
  EXPECT_EQ(attention_shape(a).window, 299);
  a.window = 300;
  EXPECT_EQ(attention_shape(a).window, 0);
}

TEST(AttentionChoice, CudnnIsNotChosenIfUnsupportedOrForbidden) {
  Tensor q = testing::null_tensor({600, 4, 33}, DType::bf16);
  AttentionFwd a{.q_THd = q, .k_UGd = q, .v_UGd = q, .batch = 2};
  EXPECT_FALSE(cudnn_is_chosen(a));
  a.kernels = AttentionKernels::cudnn;
  EXPECT_EQ(testing::error_of([&] { cudnn_is_chosen(a); }),
            "attention_fwd: cuDNN cannot compute q bf16[600, 4, 33] in 2 sequences; leave the choice of kernels out, "
            "or ask for own");
  a.q_THd = a.k_UGd = a.v_UGd = testing::null_tensor({600, 4, 64}, DType::bf16);
  a.kernels = AttentionKernels::own;
  EXPECT_FALSE(cudnn_is_chosen(a));
}

TEST(AttentionChoice, PortableKernelsExcludeCudnnOnEveryGpu) {
  const Tensor q = testing::null_tensor({600, 4, 96}, DType::bf16);
  const AttentionFwd fwd{.q_THd = q, .k_UGd = q, .v_UGd = q, .batch = 2};
  const AttentionBwd bwd{.q_THd = q, .k_TGd = q, .v_TGd = q, .batch = 2};
  for (const bool is_hopper : {true, false}) {
    EXPECT_EQ(uses_cudnn({is_hopper, KernelChoice::automatic}, fwd), has_cudnn());
    EXPECT_EQ(uses_cudnn({is_hopper, KernelChoice::automatic}, bwd), has_cudnn());
    EXPECT_FALSE(uses_cudnn({is_hopper, KernelChoice::portable}, fwd));
    EXPECT_FALSE(uses_cudnn({is_hopper, KernelChoice::portable}, bwd));
  }
}

constexpr GpuKernels kHopper{.is_hopper = true}, kOther{.is_hopper = false};

AttentionBwd bwd_of(int64_t rows, int64_t width, int64_t v_width, int64_t window = 0) {
  const auto heads = [&](int64_t d) { return testing::null_tensor({8 * rows, 32, d}, DType::bf16); };
  return {.q_THd = heads(width), .k_TGd = heads(width), .v_TGd = heads(v_width), .batch = 8, .window = window};
}

// Hopper's own kernels compute long sequences with heads of 64 and of 128.
TEST(AttentionChoice, CudnnComputesMoreWhereHopperKernelsAreMissing) {
  const Tensor q = testing::null_tensor({int64_t{8} * 4096, 32, 128}, DType::bf16);
  const AttentionFwd fwd{.q_THd = q, .k_UGd = q, .v_UGd = q, .batch = 8};
  EXPECT_FALSE(uses_cudnn(kHopper, fwd));
  EXPECT_EQ(uses_cudnn(kOther, fwd), has_cudnn());
  for (const int64_t width : {32, 64, 128}) {
    for (const int64_t window : {0, 256}) {
      EXPECT_FALSE(uses_cudnn(kHopper, bwd_of(4096, width, width, window))) << width;
      EXPECT_EQ(uses_cudnn(kOther, bwd_of(4096, width, width, window)), has_cudnn()) << width;
    }
  }
}

// cuDNN has none there, except that of latent heads on 10.x, which is not used.
TEST(AttentionChoice, WideHeadsHaveNoBackwardPassOfCudnnElsewhere) {
  for (const auto& [width, v_width] : {std::pair(136, 136), {160, 160}, {256, 256}, {192, 128}}) {
    EXPECT_EQ(uses_cudnn(kHopper, bwd_of(4096, width, v_width)), has_cudnn() && (width == 136 || width == 160))
        << width;
    EXPECT_FALSE(uses_cudnn(kOther, bwd_of(4096, width, v_width))) << width;
  }
}

// So `bench attention` has no line for cuDNN there.
TEST(AttentionChoice, WideHeadsMayAskForCudnnOnHopperAlone) {
  for (const auto& [width, v_width] : {std::pair(128, 128), {136, 136}, {256, 256}, {192, 128}}) {
    AttentionBwd bwd = bwd_of(4096, width, v_width);
    const AttentionFwd fwd{.q_THd = bwd.q_THd, .k_UGd = bwd.k_TGd, .v_UGd = bwd.v_TGd, .batch = 8};
    for (const GpuKernels& on : {kHopper, kOther}) {
      EXPECT_EQ(may_use_cudnn(on, fwd), has_cudnn()) << width;
      EXPECT_EQ(may_use_cudnn(on, bwd), has_cudnn() && (on.is_hopper || width == 128)) << width;
    }
    EXPECT_FALSE(may_use_cudnn({.choice = KernelChoice::portable}, fwd));
    EXPECT_FALSE(may_use_cudnn({.choice = KernelChoice::portable}, bwd));
    bwd.kernels = AttentionKernels::cudnn;
    if (!has_cudnn()) continue;
    EXPECT_TRUE(uses_cudnn(kHopper, bwd)) << width;
    if (width == 128) {
      EXPECT_TRUE(uses_cudnn(kOther, bwd));
    } else {
      EXPECT_EQ(testing::error_of([&] { uses_cudnn(kOther, bwd); }).substr(0, 35),
                "attention_bwd: cuDNN cannot compute")
          << width;
    }
  }
}

// Hopper's own kernels for heads of 256 compute no parts of sequences.
TEST(AttentionChoice, CudnnComputesPartsWithWideHeads) {
  for (const int64_t width : {96, 256}) {
    AttentionBwd a = bwd_of(4096, width, width);
    EXPECT_FALSE(uses_cudnn(kHopper, a)) << width;
    a.is_part = true;
    EXPECT_EQ(uses_cudnn(kHopper, a), has_cudnn() && width == 256) << width;
    EXPECT_EQ(cuda::sm90_takes(a), width == 96);
  }
}

TEST(AttentionChoice, LongSequencesExceedTheWorkspaceOfCudnnElsewhere) {
  EXPECT_EQ(uses_cudnn(kOther, bwd_of(16384, 128, 128)), has_cudnn());
  EXPECT_FALSE(uses_cudnn(kOther, bwd_of(32768, 128, 128)));
  EXPECT_FALSE(uses_cudnn(kOther, bwd_of(32, 128, 128)));
  AttentionBwd own = bwd_of(4096, 128, 128);
  own.kernels = AttentionKernels::own;
  EXPECT_FALSE(uses_cudnn(kOther, own));
}

}  // namespace
}  // namespace moebius
