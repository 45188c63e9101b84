// Every build plans the same scratch for a GPU, with and without CUDA.
#include "ops/attention/attention_scratch.h"

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Call {
  const char* name;
  DType dtype;
  int64_t batch, rows, heads, kv_heads, width, v_width, window;
  bool documents;
  int64_t own_bwd_bytes;         // of our own kernels, which need none in the forward pass
  int64_t fwd_bytes, bwd_bytes;  // with cuDNN
};

// The comments name the terms where a size is a sum of different buffers.
constexpr Call kCalls[] = {
    {"f32", DType::f32, 2, 300, 4, 2, 64, 64, 0, false, 9600, 0, 9600},
    {"portable", DType::bf16, 2, 300, 4, 2, 80, 80, 0, true, 19200, 0, 19200},
    {"cudnn", DType::bf16, 2, 300, 4, 2, 96, 96, 0, false, 19200 + 983040 + 512, kMiB, 4609536},
    {"cudnn_forward", DType::bf16, 2, 300, 4, 2, 32, 32, 0, false, 19200, kMiB, 19200},
    {"few_rows", DType::bf16, 2, 32, 4, 2, 96, 96, 0, false, 2048 + 196608 + 256, 0, 2048 + 196608 + 256},
    // sums of rows, f32 dq, counters
    {"hopper", DType::bf16, 8, 4096, 32, 4, 128, 128, 0, false, 8388608 + 536870912 + 131328, kMiB, 545390848},
    {"heads_of_96", DType::bf16, 2, 300, 4, 2, 96, 96, 0, true, 19200 + 983040 + 512, 0, 1002752},
    {"hopper_or_cudnn", DType::bf16, 1, 512, 32, 4, 128, 128, 0, false, 131072 + 8388608 + 2304, kMiB, 26345472},
    {"latent", DType::bf16, 1, 4096, 16, 16, 192, 128, 0, false, 524288 + 50331648 + 8448, kMiB, 50864384},
    {"long", DType::bf16, 1, 131072, 32, 4, 128, 128, 0, false, 33554432 + 536870912 + 131328, kMiB, 570556672},
    // sums of rows, ds
    {"short_window", DType::bf16, 1, 4096, 16, 16, 128, 128, 256, false, 524288 + 40632320, kMiB, 41156608},
    {"heads_of_256", DType::bf16, 8, 4096, 32, 4, 256, 256, 0, false, 8388608 + 1090519040, kMiB, 1098907648},
    {"wide_documents", DType::bf16, 8, 4096, 32, 4, 256, 256, 0, true, 8388608, 0, 8388608},
    {"narrow_documents", DType::bf16, 2, 1024, 8, 2, 64, 64, 0, true, 131072, 0, 131072},
};

class AttentionScratch : public ::testing::TestWithParam<Call> {};

TEST_P(AttentionScratch, IsKnownWithoutAGpu) {
  const Call& c = GetParam();
  ThreadPool pool(1);
  const Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const int64_t T = c.batch * c.rows;
  const auto heads = [&](int64_t n, int64_t width) { return testing::null_tensor({T, n, width}, c.dtype); };
  const Tensor lse = testing::null_tensor({T, c.heads}), q = heads(c.heads, c.width), o = heads(c.heads, c.v_width),
               k = heads(c.kv_heads, c.width), v = heads(c.kv_heads, c.v_width),
               doc_start = c.documents ? testing::null_tensor({T}, DType::i32) : Tensor{};
  AttentionFwd fwd{.o_THd = o,
                   .lse_TH = lse,
                   .q_THd = q,
                   .k_UGd = k,
                   .v_UGd = v,
                   .doc_start_T = doc_start,
                   .batch = c.batch,
                   .window = c.window};
  AttentionBwd bwd{.dq_THd = q,
                   .dk_TGd = k,
                   .dv_TGd = v,
                   .do_THd = o,
                   .o_THd = o,
                   .lse_TH = lse,
                   .q_THd = q,
                   .k_TGd = k,
                   .v_TGd = v,
                   .doc_start_T = doc_start,
                   .batch = c.batch,
                   .window = c.window};
  if (has_cudnn()) {
    EXPECT_EQ(AttentionFwd::scratch_bytes(fwd, s), c.fwd_bytes);
    EXPECT_EQ(AttentionBwd::scratch_bytes(bwd, s), c.bwd_bytes);
  }
  fwd.kernels = bwd.kernels = AttentionKernels::own;
  EXPECT_EQ(AttentionFwd::scratch_bytes(fwd, s), 0);
  EXPECT_EQ(AttentionBwd::scratch_bytes(bwd, s), c.own_bwd_bytes);
}

// A piece of context parallelism with a window needs the sums of dq where one kernel takes it, and less than a slice of
// them however long it is.
TEST(AttentionScratch, ScratchOfPartsIsBounded) {
  ThreadPool pool(1);
  const Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const auto path_bytes = [&](int64_t rows, int64_t window) {
    const Tensor q = testing::null_tensor({rows, 32, 128}, DType::bf16),
                 k = testing::null_tensor({2 * rows, 4, 128}, DType::bf16), lse = testing::null_tensor({rows, 32});
    const AttentionBwd a{.lse_TH = lse,
                         .q_THd = q,
                         .k_TGd = k,
                         .v_TGd = k,
                         .window = window,
                         .is_part = true,
                         .q_first = rows,
                         .kernels = AttentionKernels::own};
    const int64_t bytes = AttentionBwd::scratch_bytes(a, s);
    EXPECT_EQ(planned_scratch_bytes(a, s, {.is_hopper = true}), bytes);
    return bytes - cuda::sm90_sums_bytes(a);
  };
  EXPECT_EQ(path_bytes(4096, 128), 67108864 + 16640);
  EXPECT_EQ(path_bytes(4096, 64), 0) << "scores are computed twice";
  for (const int64_t rows : {16384, 65536, 262144}) {
    EXPECT_GT(path_bytes(rows, 128), 0);
    EXPECT_LE(path_bytes(rows, 128), std::max(513 * kMiB, rows * 8 * 128 * 4 + kMiB));
  }
}

// Returns the scratch of a backward pass of 8 sequences of 4096 tokens on a GPU with these kernels.
int64_t bwd_bytes(const GpuKernels& on, int64_t width) {
  ThreadPool pool(1);
  const Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const int64_t T = int64_t{8} * 4096;
  const Tensor q = testing::null_tensor({T, 32, width}, DType::bf16),
               k = testing::null_tensor({T, 4, width}, DType::bf16);
  const AttentionBwd a{.lse_TH = testing::null_tensor({T, 32}), .q_THd = q, .k_TGd = k, .v_TGd = k, .batch = 8};
  return planned_scratch_bytes(a, s, on);
}

TEST(AttentionScratch, CountsOnlyKernelsThatMayRun) {
  constexpr int64_t kSums = int64_t{2} * 4 * 8 * 4096 * 32;  // all that portable kernels need
  for (const int64_t width : {64, 96, 128, 256})
    for (const bool is_hopper : {true, false})
      EXPECT_EQ(bwd_bytes({is_hopper, KernelChoice::portable}, width), kSums) << width;
  EXPECT_EQ(bwd_bytes({.is_hopper = false}, 256), kSums) << "cuDNN has none";
  EXPECT_GT(bwd_bytes({.is_hopper = true}, 128), 64 * kSums);
  if (!has_cudnn()) return;
  for (const int64_t width : {32, 64, 96, 128}) {
    EXPECT_GT(bwd_bytes({.is_hopper = false}, width), 64 * kSums) << width;
    EXPECT_LT(bwd_bytes({.is_hopper = false}, width), kSums + (int64_t{1153} << 20)) << width;
  }
  EXPECT_EQ(bwd_bytes({.is_hopper = false}, 80), bwd_bytes({.is_hopper = true}, 80));
}

TEST(CachedAttentionScratch, IsKnownWithoutAGpu) {
  ThreadPool pool(1);
  const Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const CachedAttentionFwd a{.q_NHd = testing::null_tensor({3, 8, 64}, DType::bf16), .max_tokens = 130};
  EXPECT_EQ(CachedAttentionFwd::scratch_bytes(a, s), 3 * 8 * 3 * (64 + 2) * 4);
}

INSTANTIATE_TEST_SUITE_P(Calls, AttentionScratch, ::testing::ValuesIn(kCalls),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moebius
