// The backward pass of the sm90 kernels with its three ways to dq: in one kernel with dk and dv, from ds that is kept
// in scratch, a few sequences or kv heads at a time, and from recomputed scores. What the gradients are is for
// attention_test.cc.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/attention_slices.h"
#include "ops/attention/attention_testing.h"
#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

struct Sizes {
  int64_t batch, rows, heads, kv_heads, width;
  int64_t window = 0, document = 0;  // 0: none
  int64_t q_first = 0;  // above 0: a part of context parallelism, keys [0, rows) and queries [q_first, ...)
  int64_t v_width() const { return width == 192 ? 128 : width; }
};

struct How {
  bool owns_gpu = false, captured = false;
};

// A call on random inputs in memory of the GPU.
class Call {
 public:
  Call(Stream& s, const Sizes& z) : s_(s), z_(z) {
    const Shape q{z.batch * z.rows, z.heads, z.width}, k{z.batch * z.rows, z.kv_heads, z.width},
        o{z.batch * z.rows, z.heads, z.v_width()}, v{z.batch * z.rows, z.kv_heads, z.v_width()};
    AttentionFwd fwd{.o_THd = take(o, DType::bf16),
                     .lse_TH = take({z.batch * z.rows, z.heads}, DType::f32),
                     .q_THd = normal(q),
                     .k_UGd = normal(k),
                     .v_UGd = normal(v),
                     .batch = z.batch,
                     .window = z.window,
                     .scale = 0.1f,
                     .is_part = z.q_first > 0,
                     .q_first = z.q_first,
                     .kernels = AttentionKernels::own};
    if (z.document > 0) fwd.doc_start_T = documents();
    fwd.scratch = take({AttentionFwd::scratch_bytes(fwd, s)}, DType::u8);
    attention_fwd(s, fwd);
    bwd_ = {.do_THd = normal(o),
            .o_THd = fwd.o_THd,
            .lse_TH = fwd.lse_TH,
            .q_THd = fwd.q_THd,
            .k_TGd = fwd.k_UGd,
            .v_TGd = fwd.v_UGd,
            .doc_start_T = fwd.doc_start_T,
            .batch = z.batch,
            .window = z.window,
            .scale = fwd.scale,
            .is_part = fwd.is_part,
            .q_first = fwd.q_first,
            .kernels = AttentionKernels::own};
  }

  struct Gradients {
    std::vector<uint16_t> dq, dk, dv;
    bool operator==(const Gradients&) const = default;
  };
  // Every byte of the results and of the scratch is poisoned before. A path that does not take the call throws.
  Gradients backward(AttentionBwdPath path, const How& how = {}) {
    AttentionBwd a = bwd_;
    a.path = path;
    a.owns_gpu = how.owns_gpu;
    a.dq_THd = poisoned(a.q_THd.shape, DType::bf16);
    a.dk_TGd = poisoned(a.k_TGd.shape, DType::bf16);
    a.dv_TGd = poisoned(a.v_TGd.shape, DType::bf16);
    a.scratch = poisoned({AttentionBwd::scratch_bytes(a, s_)}, DType::u8);
    if (how.captured) {
      GraphCapture capture;
      const CudaGraph graph(s_.accelerator(), capture, [&] { attention_bwd(s_, a); });
      graph.replay(s_.accelerator());
      synchronize(s_);
    } else {
      attention_bwd(s_, a);
    }
    return {on_host(a.dq_THd), on_host(a.dk_TGd), on_host(a.dv_TGd)};
  }
  // Returns the error of a call with the scratch of portable kernels, and that which Hopper's need.
  std::string error_of_little_scratch(AttentionBwdPath path, int64_t* little, int64_t* needed) {
    AttentionBwd a = bwd_;
    a.path = path;
    a.dq_THd = take(a.q_THd.shape, DType::bf16);
    a.dk_TGd = take(a.k_TGd.shape, DType::bf16);
    a.dv_TGd = take(a.v_TGd.shape, DType::bf16);
    a.scratch = take({cuda::sm80_scratch_bytes(a)}, DType::u8);
    *little = a.scratch.num_bytes();
    *needed = cuda::sm90_scratch_bytes(a);
    return testing::error_of([&] { attention_bwd(s_, a); });
  }

 private:
  Tensor take(Shape shape, DType dtype) {
    buffers_.push_back(std::make_unique<Buffer>(DeviceKind::cuda, shape.numel() * size_of(dtype)));
    return {.data = buffers_.back()->data(), .shape = shape, .dtype = dtype, .device = DeviceKind::cuda};
  }
  Tensor normal(Shape shape) {
    const Tensor t = take(shape, DType::bf16);
    fill_normal(s_, {.x = t, .rng = Rng(7, RngSite::bench, 0, static_cast<uint32_t>(buffers_.size()))});
    return t;
  }
  Tensor poisoned(Shape shape, DType dtype) {
    const Tensor t = take(shape, dtype);
    const std::vector<unsigned char> ones(t.num_bytes(), 0xff);
    copy_to_device(s_, t.data, ones.data(), t.num_bytes());
    return t;
  }
  Tensor documents() {
    std::vector<int32_t> starts;
    for (int64_t t = 0; t < z_.batch * z_.rows; ++t)
      starts.push_back(static_cast<int32_t>((z_.q_first + t % z_.rows) / z_.document * z_.document));
    const Tensor t = take({z_.batch * z_.rows}, DType::i32);
    copy_to_device(s_, t.data, starts.data(), t.num_bytes());
    return t;
  }
  std::vector<uint16_t> on_host(const Tensor& t) {
    std::vector<uint16_t> words(t.numel());
    copy_to_host(s_, words.data(), t.data, t.num_bytes());
    return words;
  }

  Stream& s_;
  Sizes z_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  AttentionBwd bwd_;
};

bool has_nan(const std::vector<uint16_t>& words) {
  return std::any_of(words.begin(), words.end(), [](uint16_t word) { return (word & 0x7fff) > 0x7f80; });
}

double value_of(uint16_t word) { return std::bit_cast<float>(uint32_t{word} << 16); }

// Returns the distance of a bf16 number from the next larger one.
double spacing(uint16_t word) {
  const auto magnitude = static_cast<uint16_t>(word & 0x7fff);
  return value_of(static_cast<uint16_t>(magnitude + 1)) - value_of(magnitude);
}

// The largest difference between the f32 sums of two results, at least, over the largest element. Each sum was
// rounded to bf16 by at most half a spacing, so results that differ by one spacing may have one sum.
double difference_of_sums(const std::vector<uint16_t>& x, const std::vector<uint16_t>& y) {
  double largest = 0, off = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    largest = std::max(largest, std::abs(value_of(y[i])));
    off = std::max(off, std::abs(value_of(x[i]) - value_of(y[i])) - std::max(spacing(x[i]), spacing(y[i])));
  }
  return off / largest;
}

// Two orders of one sum over `rows` terms. A tensor core adds 16 terms at a time to a sum and drops what is below
// 2^-23 of it. With sums on the way of at most twice the largest result, an order is off by (rows / 16) 2^-23 2.
double tolerance_of_sums(int64_t rows) { return 2 * static_cast<double>(rows) / 16 * 0x1p-23 * 2; }

// Expects gradients without NaN that are those of another order of the sums. dk and dv sum over heads too.
void expect_other_order(const Call::Gradients& got, const Call::Gradients& want, const Sizes& z) {
  const double tolerance = tolerance_of_sums(z.rows * z.heads / z.kv_heads);
  for (const auto x : {&Call::Gradients::dq, &Call::Gradients::dk, &Call::Gradients::dv}) {
    EXPECT_FALSE(has_nan(got.*x));
    EXPECT_LE(difference_of_sums(got.*x, want.*x), tolerance);
  }
}

TEST(AttentionBwdOnGpu, KeptDsAndRecomputedScoresGiveTheSameBits) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes documents{2, 450, 6, 2, 64, 0, 70}, short_window{3, 200, 4, 2, 128, 150}, window{2, 1000, 8, 4, 64, 200},
      sequences{3, 8192, 16, 8, 64}, uneven{5, 4096, 32, 4, 64}, kv_heads{1, 8192, 32, 16, 64},
      latent{2, 1100, 3, 3, 192}, latent_documents{2, 450, 4, 2, 192, 0, 70}, latent_window{1, 1000, 2, 2, 192, 300},
      latent_heads{1, 4096, 100, 100, 192};
  for (const Sizes& z : {documents, short_window, window, sequences, uneven, kv_heads, latent, latent_documents,
                         latent_window, latent_heads}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
    Call call(s, z);
    const auto kept = call.backward(AttentionBwdPath::kept_ds), again = call.backward(AttentionBwdPath::recomputed);
    EXPECT_TRUE(kept.dq == again.dq);
    EXPECT_TRUE(kept.dk == again.dk);
    EXPECT_TRUE(kept.dv == again.dv);
    EXPECT_FALSE(has_nan(kept.dq));
  }
}

// Sums over slices of queries have another order than sums over all of them: they differ by rounding.
TEST(AttentionBwdOnGpu, CutQueriesGiveTheSameGradients) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes heads{1, 8192, 32, 4, 64}, two{2, 7000, 48, 2, 64}, long_one{1, 40000, 2, 1, 64},
      latent{1, 40100, 2, 2, 192};
  for (const Sizes& z : {heads, two, long_one, latent}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
    const DsSizes sizes{z.batch, z.rows, z.heads, z.kv_heads, z.width, z.v_width()};
    ASSERT_TRUE(ds_plan(sizes, int64_t{1280} << 20).cuts_queries);
    Call call(s, z);
    const auto cut = call.backward(AttentionBwdPath::kept_ds), same = call.backward(AttentionBwdPath::kept_ds),
               again = call.backward(AttentionBwdPath::recomputed);
    EXPECT_TRUE(cut == same);
    expect_other_order(cut, again, z);
  }
}

// Returns the rows of a sequence whose blocks are two sets but for one block, or four on a small GPU.
int64_t rows_of_full_sets(const Stream& s) {
  const int64_t multiprocessors = gpu_limits(s).num_multiprocessors;
  return (multiprocessors > 66 ? 2 : 4) * multiprocessors * 128 - 200;
}

// Blocks of one kernel add dq in an order of their own, and wait for each other. Among the shapes are more blocks than
// a GPU runs at a time, several slices, several waves with a shorter last one, sequences that end inside a tile, sets
// of blocks that walk upwards, and blocks with keys that no query attends to. Bits do not depend on how many run.
TEST(AttentionBwdOnGpu, OneKernelGivesTheSameGradients) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes one{1, 65, 1, 1, 128}, documents{2, 450, 6, 2, 128, 0, 70}, window{2, 1000, 8, 4, 128, 600},
      kv_heads{1, 8192, 32, 16, 128}, heads{1, 8192, 32, 4, 128}, sequences{9, 4096, 32, 4, 128},
      long_documents{1, 20000, 8, 2, 128, 0, 3000}, long_one{1, 40000, 2, 1, 128},
      full_sets{2, rows_of_full_sets(s), 4, 1, 128}, one_head{5, 1000, 30, 30, 128};
  const Sizes one_64{1, 65, 1, 1, 64}, documents_64{2, 450, 6, 2, 64, 0, 70}, window_64{2, 1000, 8, 4, 64, 600},
      short_window_64{3, 333, 4, 2, 64, 150}, heads_64{1, 8192, 32, 4, 64}, sequences_64{9, 4096, 64, 8, 64},
      long_documents_64{1, 20000, 8, 2, 64, 0, 3000}, long_one_64{1, 40000, 2, 1, 64},
      full_sets_64{1, rows_of_full_sets(s), 8, 1, 64};
  const Sizes one_latent{1, 65, 1, 1, 192}, documents_latent{2, 450, 4, 2, 192, 0, 70},
      window_latent{1, 1000, 2, 2, 192, 300}, kv_heads_latent{2, 1100, 6, 3, 192}, heads_latent{1, 4096, 100, 100, 192},
      long_documents_latent{1, 20000, 4, 4, 192, 0, 3000}, long_one_latent{1, 40100, 2, 2, 192};
  // All keys are before all queries, and the last wave has fewer groups than the others.
  const Sizes part{1, 5120, 16, 8, 128, 0, 0, 5120}, part_of_one_head{169, 300, 1, 1, 128, 0, 0, 300},
      part_latent{1, 2560, 20, 20, 192, 0, 0, 2560};
  // In the last three, only the first queries attend to some key.
  const Sizes window_of_part{2, 2000, 8, 4, 128, 128, 0, 700}, window_of_part_64{2, 2000, 16, 2, 64, 200, 300, 700},
      window_of_part_latent{1, 1000, 3, 3, 192, 300, 0, 333}, next_part{1, 2048, 8, 2, 128, 128, 0, 2048},
      next_part_64{1, 2048, 8, 1, 64, 128, 700, 2048}, next_part_latent{1, 1024, 2, 2, 192, 200, 0, 1024};
  for (const Sizes& z : {one,
                         documents,
                         window,
                         kv_heads,
                         heads,
                         sequences,
                         long_documents,
                         long_one,
                         full_sets,
                         one_head,
                         one_64,
                         documents_64,
                         window_64,
                         short_window_64,
                         heads_64,
                         sequences_64,
                         long_documents_64,
                         long_one_64,
                         full_sets_64,
                         one_latent,
                         documents_latent,
                         window_latent,
                         kv_heads_latent,
                         heads_latent,
                         long_documents_latent,
                         long_one_latent,
                         part,
                         part_of_one_head,
                         part_latent,
                         window_of_part,
                         window_of_part_64,
                         window_of_part_latent,
                         next_part,
                         next_part_64,
                         next_part_latent}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
    Call call(s, z);
    const auto again = call.backward(AttentionBwdPath::recomputed);
    for (const bool owns_gpu : {false, true}) {
      const auto one_kernel = call.backward(AttentionBwdPath::one_kernel, {.owns_gpu = owns_gpu});
      const BlockLimitScope few(s, 7);
      const auto same = call.backward(AttentionBwdPath::one_kernel, {.owns_gpu = owns_gpu});
      EXPECT_TRUE(one_kernel == same);
      expect_other_order(one_kernel, again, z);
    }
  }
}

// A run takes one kernel for parts with short windows, and for heads of 64 with documents in long sequences.
TEST(AttentionBwdOnGpu, PartsWithWindowsAndLongSequencesOfDocumentsHaveFiveProducts) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes part{1, 2000, 8, 4, 128, 128, 0, 700}, part_64{1, 2048, 8, 1, 64, 66, 0, 2048},
      part_latent{1, 1000, 3, 3, 192, 194, 0, 333}, documents_64{1, 5000, 8, 2, 64, 0, 1024};
  for (const Sizes& z : {part, part_64, part_latent, documents_64}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
    Call call(s, z);
    const auto taken = call.backward(AttentionBwdPath::chosen), same = call.backward(AttentionBwdPath::one_kernel),
               captured = call.backward(AttentionBwdPath::chosen, {.captured = true}),
               again = call.backward(AttentionBwdPath::recomputed);
    EXPECT_TRUE(taken == same);
    EXPECT_TRUE(taken == captured);
    expect_other_order(taken, again, z);
  }
  // Shorter windows of parts take what is less work.
  Call shorter(s, {1, 2000, 8, 4, 128, 65, 0, 700});
  const auto taken = shorter.backward(AttentionBwdPath::chosen), same = shorter.backward(AttentionBwdPath::recomputed);
  EXPECT_TRUE(taken == same);
}

// Heads of 96 and of 256 have one path each. Portable kernels round the same probabilities and ds to bf16, from
// scores in another order of sums: so a few of them differ by a rounding, and gradients by little of the largest.
void expect_portable_gradients(Stream& s, const Sizes& z) {
  SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
  Call call(s, z);
  const auto path = z.width == 96 ? AttentionBwdPath::one_kernel : AttentionBwdPath::kept_ds;
  const auto got = call.backward(path), same = call.backward(path, {.captured = true});
  EXPECT_TRUE(got == same);
  {
    const BlockLimitScope few(s, 7);
    EXPECT_TRUE(call.backward(AttentionBwdPath::chosen) == got);
  }
  const testing::PortableScope portable(s);
  const auto want = call.backward(AttentionBwdPath::chosen);
  for (const auto x : {&Call::Gradients::dq, &Call::Gradients::dk, &Call::Gradients::dv}) {
    EXPECT_FALSE(has_nan(got.*x));
    EXPECT_LE(difference_of_sums(got.*x, want.*x), 0x1p-8);
  }
}

TEST(AttentionBwdOnGpu, HeadsOf96AndOf256AreCloseToPortableKernels) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes one{1, 65, 1, 1, 96}, causal{2, 300, 6, 2, 96}, documents{2, 450, 6, 2, 96, 0, 70},
      window{2, 1000, 8, 4, 96, 200}, part{2, 700, 4, 2, 96, 0, 0, 300}, next_part{1, 500, 8, 2, 96, 128, 0, 500};
  const Sizes wide{1, 65, 1, 1, 256}, causal_wide{2, 300, 6, 2, 256}, documents_wide{2, 450, 6, 2, 256, 0, 70},
      window_wide{2, 1000, 8, 4, 256, 200};
  for (const Sizes& z :
       {one, causal, documents, window, part, next_part, wide, causal_wide, documents_wide, window_wide})
    expect_portable_gradients(s, z);
}

// More blocks than multiprocessors, and with heads of 256 slices of sequences and of queries.
TEST(AttentionBwdOnGpu, LongSequencesWithHeadsOf96AndOf256AreCloseToPortableKernels) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const Sizes sequences{5, 2048, 32, 4, 96}, slices{3, 4096, 32, 4, 256}, cut{1, 8192, 32, 4, 256};
  for (const Sizes& z : {sequences, slices, cut}) expect_portable_gradients(s, z);
}

TEST(AttentionBwdOnGpu, HeadsOf96AndOf256SayWhatScratchTheyLack) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  if (!uses_hopper_kernels(s)) GTEST_SKIP() << "of Hopper kernels";
  for (const int64_t width : {96, 256}) {
    Call call(s, {1, 300, 4, 2, width});
    for (const AttentionBwdPath path : {only_path(width), AttentionBwdPath::chosen}) {
      int64_t little = 0, needed = 0;
      const std::string error = call.error_of_little_scratch(path, &little, &needed);
      EXPECT_LT(little, needed);
      EXPECT_EQ(error, fmt::format("attention_bwd: scratch must have {} bytes; got {}", needed, little));
    }
  }
}

// A call that owns the GPU sums dk and dv of these shapes in another order, but dq in the order of the keys as always.
TEST(AttentionBwdOnGpu, CallsThatOwnTheGpuRepeatTheirBits) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  const int64_t rows = rows_of_full_sets(s);
  for (const Sizes& z : {Sizes{2, rows, 4, 1, 128}, Sizes{1, rows, 8, 1, 64}}) {
    SCOPED_TRACE(fmt::format("{} x {}, {} heads of {} on {}", z.batch, z.rows, z.heads, z.width, z.kv_heads));
    DsSizes sizes{z.batch, z.rows, z.heads, z.kv_heads, z.width, z.v_width()};
    sizes.owns_gpu = true;
    ASSERT_GT(alternating_set(sizes, gpu_limits(s).num_multiprocessors), 0);
    Call call(s, z);
    const auto owning = call.backward(AttentionBwdPath::one_kernel, {.owns_gpu = true}),
               same = call.backward(AttentionBwdPath::one_kernel, {.owns_gpu = true}),
               captured = call.backward(AttentionBwdPath::one_kernel, {.owns_gpu = true, .captured = true}),
               shared = call.backward(AttentionBwdPath::one_kernel);
    EXPECT_TRUE(owning == same);
    EXPECT_TRUE(owning == captured);
    EXPECT_TRUE(owning.dq == shared.dq);
    EXPECT_FALSE(owning.dk == shared.dk) << "no set walked upwards";
  }
}

}  // namespace
}  // namespace moebius
