#include "ops/experts/experts.h"

#include <gmock/gmock.h>

#include "device/block_limit.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/experts/experts_backends.h"
#include "ops/experts/experts_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::run_all_expert_ops;
using testing::Values;
using Case = testing::ExpertCase;
using Outputs = testing::ExpertOutputs;
using Problem = testing::ExpertProblem;

std::vector<int64_t> half_empty(int64_t num_experts) {
  std::vector<int64_t> counts(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) counts[e] = e % 2 * (e % 5);
  return counts;
}

// So many experts of several steps of rows that a GPU's kernels cut tiles in two.
std::vector<int64_t> many_of_many_rows() {
  std::vector<int64_t> counts(270);
  for (int64_t e = 0; e < std::ssize(counts); ++e) counts[e] = 20 + 37 * e % 140;
  return counts;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string d = std::string("_") + std::string(name_of(dtype));
    all.push_back({"empty" + d, 3, 5, 4, {0, 0}, 0, true, dtype});
    all.push_back({"only_spare" + d, 3, 5, 4, {0, 0, 0}, 2, true, dtype});
    all.push_back({"one" + d, 1, 1, 1, {1}, 0, true, dtype});
    all.push_back({"odd" + d, 9, 33, 17, {0, 5, 1, 0, 17, 14}, 3, true, dtype});
    all.push_back({"in_place" + d, 40, 7, 50, {3, 0, 30}, 7, false, dtype});
    all.push_back({"all_to_one" + d, 31, 64, 32, {0, 60, 0}, 0, true, dtype});
    all.push_back({"many_rows" + d, 50, 6, 5, {1030, 2}, 1, true, dtype});
    all.push_back({"wide" + d, 5, 100, 70, {3, 2}, 0, true, dtype});
    all.push_back({"many_tasks_across" + d, 2, 4200, 40, {2}, 0, true, dtype});
    all.push_back({"many_tasks_back" + d, 2, 65, 2800, {1}, 0, true, dtype});
    // Rows, columns and depth of more than one tile of the widest kernels, ragged in each.
    all.push_back({"tiles" + d, 150, 200, 136, {0, 130, 3, 257, 64}, 5, true, dtype});
    all.push_back({"tiles_in_place" + d, 150, 136, 328, {129, 0, 40}, 5, false, dtype});
    all.push_back({"tiles_deep" + d, 60, 1160, 24, {5, 150, 1, 130}, 0, true, dtype});
    all.push_back({"tiles_deep_back" + d, 20, 72, 1096, {140, 20}, 0, true, dtype});
    all.push_back({"all_empty" + d, 3, 64, 64, {0, 0}, 0, true, dtype});
    all.push_back({"all_empty_in_place" + d, 3, 64, 64, {0, 0}, 0, false, dtype});
    all.push_back({"all_spare" + d, 3, 64, 64, {0, 0}, 70, true, dtype});
    all.push_back({"one_expert_one_token" + d, 1, 64, 64, {1}, 0, true, dtype});
    all.push_back({"narrow" + d, 70, 8, 8, {65, 0, 5}, 0, true, dtype});
    all.push_back({"many_experts" + d, 30, 16, 8, half_empty(512), 0, true, dtype});
    all.push_back({"cut_tiles" + d, 90, 8, 8, many_of_many_rows(), 0, true, dtype});
    all.push_back({"many_tiles" + d, 90, 136, 264, {300, 0, 257, 1, 128}, 5, true, dtype});
    // Rows that do not begin at multiples of 16 bytes: of an even and of an odd width, as columns and as depth.
    all.push_back({"pairs_in_tiles" + d, 150, 202, 134, {0, 130, 3, 257, 64}, 5, true, dtype});
    all.push_back({"odd_in_tiles" + d, 150, 203, 135, {0, 130, 3, 257, 64}, 5, true, dtype});
    all.push_back({"odd_tiles_in_place" + d, 150, 137, 331, {129, 0, 40}, 5, false, dtype});
    all.push_back({"pairs_tiles_in_place" + d, 150, 130, 330, {129, 0, 40}, 5, false, dtype});
    all.push_back({"odd_hidden" + d, 70, 51, 136, {65, 0, 5}, 0, true, dtype});
    all.push_back({"odd_inner" + d, 70, 136, 51, {65, 0, 5}, 1, true, dtype});
    all.push_back({"even_hidden_odd_inner" + d, 70, 34, 257, {65, 0, 130}, 0, true, dtype});
    all.push_back({"odd_deep" + d, 60, 1163, 26, {5, 150, 1, 130}, 0, true, dtype});
    all.push_back({"odd_of_many_experts" + d, 30, 19, 10, half_empty(512), 0, true, dtype});
    all.push_back({"gpt_oss" + d, 9, 39, 17, {0, 5, 1, 0, 17, 14}, 3, true, dtype, true});
    all.push_back({"gpt_oss_in_place" + d, 40, 7, 50, {3, 0, 30}, 7, false, dtype, true});
    all.push_back({"gpt_oss_tiles" + d, 150, 200, 136, {0, 130, 3, 257, 64}, 5, true, dtype, true});
    all.push_back({"gpt_oss_odd_tiles" + d, 150, 203, 135, {0, 130, 3, 257, 64}, 5, true, dtype, true});
    all.push_back({"gpt_oss_pairs" + d, 150, 130, 34, {129, 0, 40}, 5, false, dtype, true});
    all.push_back({"gpt_oss_empty" + d, 3, 5, 4, {0, 0}, 2, true, dtype, true});
  }
  return all;
}

class ExpertsTest : public testing::DeviceTest<Case> {};
class ExpertsOfFewBlocksTest : public testing::DeviceTest<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertsOfFewBlocksTest);  // without a GPU
class PortableExpertsTest : public testing::DeviceTest<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PortableExpertsTest);  // without a GPU
class ExpertsTermTest : public testing::DeviceTest<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertsTermTest);  // without a GPU
class ExpertsPartTest : public testing::DeviceTest<Case> {};
class ExpertsTeamTest : public ::testing::TestWithParam<Case> {};

// The rows that exist are close to the reference; the others were not written.
void expect_rows(const Case& c, const char* what, const Array& got, Values want, int64_t num_rows, double length) {
  Values values = got.values();
  const auto written = static_cast<size_t>(
      num_rows == 0 ? 0 : num_rows * static_cast<int64_t>(values.size()) / static_cast<int64_t>(num_rows + c.spare));
  for (size_t i = written; i < values.size(); ++i) ASSERT_TRUE(std::isnan(values[i])) << what << " at " << i;
  values.resize(written);
  want.resize(written);
  // Sums of `length` products err by eps32 sqrt(length) of their magnitude; a product of rounded
  // factors by 2 eps each.
  testing::expect_close(what, values, want, 2 * testing::epsilon(c.dtype) + 0x1p-22 * std::sqrt(length), 1e-6);
}

void expect_reference(const Case& c, const Problem& p, const Outputs& o) {
  const int64_t rows = p.R - c.spare;
  expect_rows(c, "h", o.h, ref::expert_h(p.shape, p.x.values(), p.w1.values(), p.R, p.b1.values()), rows, c.D);
  // a is defined by h as rounded.
  expect_rows(c, "a", o.a, ref::gated_rows(o.h.values(), p.R, c.F, p.ref_activation), rows, 1);
  expect_rows(c, "y", o.y, ref::expert_y(p.shape, p.a.values(), p.w2.values(), p.R, p.ref_b2()), rows, c.F);
  const ref::ExpertBackward b = ref::d_expert_down(p.shape, p.dout.values(), p.w2.values(), p.h.values(),
                                                   p.weight.values(), p.R, p.ref_activation, p.ref_b2());
  expect_rows(c, "dh", o.dh, b.dh, rows, c.D);
  expect_rows(c, "sa", o.sa, b.sa, rows, 1);
  expect_rows(c, "dweight", o.dweight, b.dweight, rows, c.D + c.F);
  expect_rows(c, "dx", o.dx, ref::d_expert_up(p.shape, p.h.values(), p.w1.values(), p.R), rows, 2 * c.F);
  Values dw1 = Array::normal({p.E(), 2 * c.F, c.D}, DType::f32, 8).values();
  Values dw2 = Array::normal({p.E(), c.D, c.F}, DType::f32, 9).values();
  Values dw1_stored(dw1.size()), dw2_stored(dw2.size());
  for (Values* dw : {&dw1, &dw1_stored})
    ref::expert_wgrad(p.shape, *dw, p.h.values(), p.x.values(), 2 * c.F, c.D, false, c.gather);
  for (Values* dw : {&dw2, &dw2_stored})
    ref::expert_wgrad(p.shape, *dw, p.dout.values(), p.a.values(), c.D, c.F, c.gather, false);
  const double error = 0x1p-22 * std::sqrt(static_cast<double>(rows + 1));
  testing::expect_close("dw1", o.dw1.values(), dw1, error, 1e-6);
  testing::expect_close("dw2", o.dw2.values(), dw2, error, 1e-6);
  testing::expect_close("dw1 stored", o.dw1_stored.values(), dw1_stored, error, 1e-6);
  testing::expect_close("dw2 stored", o.dw2_stored.values(), dw2_stored, error, 1e-6);
  Values db1 = Array::normal({p.E(), 2 * c.F}, DType::f32, 12).values();
  Values db2 = Array::normal({p.E(), c.D / 2}, DType::f32, 13).values();
  ref::expert_bias_grad(p.shape, db1, p.h.values(), 2 * c.F, 0, {}, false);
  ref::expert_bias_grad(p.shape, db2, p.dout.values(), c.D, c.D / 3, p.weight.values(), c.gather);
  testing::expect_close("db1", o.db1.values(), db1, error, 1e-6);
  testing::expect_close("db2", o.db2.values(), db2, error, 1e-6);
}

TEST_P(ExpertsTest, EqualsTheReference) {
  Problem p(c());
  expect_reference(c(), p, run_all_expert_ops(s_, p));
}

// The kernels of few rows take any number of them.
TEST_P(ExpertsTest, OfFewRowsEqualsTheReference) {
  Problem p(c());
  p.few_rows = true;
  expect_reference(c(), p, run_all_expert_ops(s_, p));
}

// With fewer rows than experts a GPU finds the experts that have rows.
TEST(Experts, OfFewRowsAmongManyExpertsEqualTheReference) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::vector<int64_t>& rows : {std::vector<int64_t>{3}, {0, 17, 69}, {0, 0, 33}, {5, 6, 7, 8, 9, 69}}) {
        Case few{.name = "few", .T = 3, .D = 40, .F = 24, .counts = std::vector<int64_t>(70), .dtype = dtype};
        for (const int64_t expert : rows) ++few.counts[static_cast<size_t>(expert)];
        for (const int64_t spare : {0, 4}) {
          few.spare = spare;
          Problem p(few);
          p.few_rows = true;
          expect_reference(few, p, run_all_expert_ops(s, p));
        }
      }
    }
  });
}

// Each block walks over many tiles: what it does for one under the next one's products, notes that
// go round, a tile that is cut. No bit depends on who computes what.
TEST_P(ExpertsOfFewBlocksTest, EqualTheReference) {
  Problem p(c());
  const Outputs all = run_all_expert_ops(s_, p);
  for (const int blocks : {2, 7, 116}) {
    SCOPED_TRACE(fmt::format("{} blocks", blocks));
    const BlockLimitScope few(s_, blocks);
    const Outputs o = run_all_expert_ops(s_, p);
    expect_reference(c(), p, o);
    const auto by_few = o.of_rows(), by_all = all.of_rows();
    for (size_t i = 0; i < by_few.size(); ++i)
      EXPECT_EQ(by_few[i].second->bytes(), by_all[i].second->bytes()) << by_few[i].first;
    EXPECT_EQ(all.dw1.bytes(), o.dw1.bytes());
    EXPECT_EQ(all.dw2.bytes(), o.dw2.bytes());
    EXPECT_EQ(all.dw1_stored.bytes(), o.dw1_stored.bytes());
    EXPECT_EQ(all.dw2_stored.bytes(), o.dw2_stored.bytes());
  }
}

// For each row of values [R, n], or the rows of x that rows read, that row and then the one of low.
Values joined_rows(const Problem& p, const Values& x, const Values& low, bool gather) {
  const int64_t L = std::ssize(low) / p.R, n = std::ssize(x) / (gather && p.c.gather ? p.c.T : p.R);
  Values all;
  for (int64_t r = 0; r < p.R; ++r) {
    const int64_t from = gather ? p.shape.source(r) : r;
    all.insert(all.end(), x.begin() + from * n, x.begin() + (from + 1) * n);
    all.insert(all.end(), low.begin() + r * L, low.begin() + (r + 1) * L);
  }
  return all;
}

// For each of num pieces of x, that piece and then the one of y.
Values joined(const Values& x, const Values& y, int64_t num) {
  const int64_t n = std::ssize(x) / num, m = std::ssize(y) / num;
  Values all;
  for (int64_t i = 0; i < num; ++i) {
    all.insert(all.end(), x.begin() + i * n, x.begin() + (i + 1) * n);
    all.insert(all.end(), y.begin() + i * m, y.begin() + (i + 1) * m);
  }
  return all;
}

// A term is what so many more columns of the operands are: the reference has them.
void expect_terms(const Case& c, const Problem& p, const Outputs& o, int64_t L) {
  const int64_t rows = p.R - c.spare, E = p.E();
  const Values low = p.low.values();
  ref::ExpertShape deeper = p.shape;
  deeper.token.clear();
  deeper.D = c.D + L;
  const Values x = joined_rows(p, p.x.values(), low, true), w1 = joined(p.w1.values(), p.low_up.values(), E * 2 * c.F);
  expect_rows(c, "h", o.h, ref::expert_h(deeper, x, w1, p.R, p.b1.values()), rows, c.D);
  expect_rows(c, "a", o.a, ref::gated_rows(o.h.values(), p.R, c.F, p.ref_activation), rows, 1);
  const ref::ExpertBackward b = ref::d_expert_down(deeper, joined_rows(p, p.dout.values(), low, true),
                                                   joined(p.w2.values(), p.low_down_bwd.values(), E), p.h.values(),
                                                   p.weight.values(), p.R, p.ref_activation, p.ref_b2());
  expect_rows(c, "dh", o.dh, b.dh, rows, c.D);
  expect_rows(c, "sa", o.sa, b.sa, rows, 1);
  expect_rows(c, "dweight", o.dweight, b.dweight, rows, c.D + c.F);
  deeper.D = c.D;
  deeper.F = c.F + L;
  expect_rows(c, "y", o.y,
              ref::expert_y(deeper, joined_rows(p, p.a.values(), low, false),
                            joined(p.w2.values(), p.low_down.values(), E * c.D), p.R, p.ref_b2()),
              rows, c.F);
  Values dx = ref::d_expert_up(p.shape, p.h.values(), p.w1.values(), p.R);
  const Values by_low = p.low_up_bwd.values();
  p.shape.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t l = 0; l < L; ++l) {
      for (int64_t d = 0; d < c.D; ++d) dx[r * c.D + d] += by_low[(e * L + l) * c.D + d] * low[r * L + l];
    }
  });
  expect_rows(c, "dx", o.dx, dx, rows, 2 * c.F);
}

TEST_P(ExpertsTermTest, EqualsTheReferenceOfWiderOperands) {
  for (const int64_t L : {8, 32, 64, 72}) {
    SCOPED_TRACE(fmt::format("rank {}", L));
    Problem p(c());
    p.add_terms(L);
    if (!uses_hopper_kernels(s_)) GTEST_SKIP() << "only kernels of Hopper GPUs add terms";
    const Outputs all = run_all_expert_ops(s_, p);
    expect_terms(c(), p, all, L);
    const BlockLimitScope few(s_, 2);  // each block walks over many tiles
    expect_terms(c(), p, run_all_expert_ops(s_, p), L);
  }
}

TEST(Experts, TermsAreRefusedByKernelsThatDoNotAddThem) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Problem p({"tiles", 9, 32, 16, {5, 4}, 0, true, DType::bf16});
  p.add_terms(8);
  try {
    run_all_expert_ops(s, p);
    FAIL() << "expert_up took a term";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(), ::testing::HasSubstr("expert_up: the kernel for bf16[9, 32] does not add a low-rank term"));
  }
}

// GPUs whose limits give each config of the portable kernels: two multiprocessors or one, so that a block walks over
// many tiles, with the shared memory of 8.0, of 8.9 and of 10.0; and more multiprocessors than tiles.
const GpuLimits kOtherGpus[] = {documented_gpu_limits(8, 0, 2), documented_gpu_limits(10, 0, 1),
                                documented_gpu_limits(8, 9, 2), documented_gpu_limits(8, 9, 300)};

// The sums of an element have one order in all configs.
TEST_P(PortableExpertsTest, EqualTheReferenceWithTheSameBitsInEveryConfig) {
  Problem p(c());
  std::vector<Array> first;
  for (const GpuLimits& limits : kOtherGpus) {
    SCOPED_TRACE(
        fmt::format("{} multiprocessors, {} bytes", limits.num_multiprocessors, limits.shared_bytes_per_block));
    const GpuLimitsScope other(s_, limits);
    const Outputs o = run_all_expert_ops(s_, p);
    expect_reference(c(), p, o);
    const std::vector<Array> all = o.all();
    if (first.empty()) first = all;
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].bytes(), first[i].bytes()) << "output " << i;
  }
}

TEST(Experts, KernelsAreThoseOfTheChoiceAndTheGpu) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  Problem p({"tiles", 9, 32, 16, {5, 4}, 0, true, DType::bf16});
  Array y = Array::poisoned({p.R, p.c.D}, DType::bf16);
  ExpertDown down{.y_RD = y.tensor(), .a_RF = p.a.tensor(), .w2_eDF = p.w2.tensor(), .rows = p.rows()};
  EXPECT_THAT(cuda::kernel_text(s, down), ::testing::StartsWith("tiles 128 x 256 x 64"));
  {
    const GpuLimitsScope other(s, kOtherGpus[1]);
    EXPECT_THAT(cuda::kernel_text(s, down), ::testing::StartsWith("mma.sync, tiles"));
  }
  set_kernel_choice(gpu, KernelChoice::portable);
  EXPECT_THAT(cuda::kernel_text(s, down), ::testing::StartsWith("mma.sync, tiles"));
  Problem odd({"odd", 9, 33, 17, {5, 4}, 0, true, DType::bf16});
  Array odd_y = Array::poisoned({odd.R, odd.c.D}, DType::bf16);
  down = {.y_RD = odd_y.tensor(), .a_RF = odd.a.tensor(), .w2_eDF = odd.w2.tensor(), .rows = odd.rows()};
  EXPECT_THAT(cuda::kernel_text(s, down), ::testing::StartsWith("mma.sync, tiles"));
  set_kernel_choice(gpu, KernelChoice::automatic);
  EXPECT_THAT(cuda::kernel_text(s, down), ::testing::StartsWith("mma.sync, tiles"));
  Problem in_f32({"f32", 9, 32, 16, {5, 4}, 0, true, DType::f32});
  Array y_f32 = Array::poisoned({in_f32.R, in_f32.c.D}, DType::f32);
  down = {.y_RD = y_f32.tensor(), .a_RF = in_f32.a.tensor(), .w2_eDF = in_f32.w2.tensor(), .rows = in_f32.rows()};
  EXPECT_EQ(cuda::kernel_text(s, down), "fallback kernel");
}

TEST(Experts, OfFewRowsHaveTheBitsOfThePortableKernels) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  std::vector<Case> few{
      {"one_token", 1, 1024, 520, {0, 1, 0, 0, 1, 1}, 0, true, DType::bf16},
      {"ragged_k", 3, 264, 520, {2, 0, 3}, 1, true, DType::bf16},
      {"more_rows_than_a_chunk", 32, 40, 24, {32, 0, 9, 40}, 0, true, DType::bf16},
      {"biased", 9, 528, 72, {5, 4}, 0, true, DType::bf16, true},
      // Hopper's kernels of few rows do not take these: no row is in whole chunks, or only those of D or F are.
      {"odd", 9, 33, 17, {5, 4}, 0, true, DType::bf16},
      {"pairs_in_place", 9, 6, 50, {5, 4}, 0, false, DType::bf16, true},
      {"odd_columns", 9, 40, 25, {5, 4}, 0, true, DType::bf16},
      {"odd_depth", 9, 41, 24, {5, 4}, 0, true, DType::bf16, true}};
  few.push_back({"many_experts", 30, 16, 8, half_empty(256), 0, true, DType::bf16});
  few.push_back({"several_chunks_of_8", 20, 40, 24, std::vector<int64_t>(32), 0, true, DType::bf16});
  few.back().counts[0] = 20;
  few.back().counts[31] = 2;
  for (const Case& c : few) {
    SCOPED_TRACE(c.name);
    Problem p(c);
    p.few_rows = true;
    set_kernel_choice(gpu, KernelChoice::automatic);
    const Outputs got = run_all_expert_ops(s, p);
    set_kernel_choice(gpu, KernelChoice::portable);
    const Outputs want = run_all_expert_ops(s, p);
    EXPECT_EQ(got.h.bytes(), want.h.bytes());
    EXPECT_EQ(got.a.bytes(), want.a.bytes());
    EXPECT_EQ(got.y.bytes(), want.y.bytes());
  }
}

TEST(Experts, OddWidthsAreNotedWhereHopperKernelsExist) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;  // of its own: nothing was recorded on it
  Stream s(gpu, pool);
  const auto& slow = gpu.state<FallbackKernels>().why;
  Problem fast({"fast", 9, 32, 16, {5, 4}, 0, true, DType::bf16});
  run_all_expert_ops(s, fast);
  EXPECT_THAT(slow, ::testing::IsEmpty());
  Problem odd({"odd", 9, 33, 17, {5, 4}, 0, true, DType::bf16});
  set_kernel_choice(gpu, KernelChoice::portable);
  run_all_expert_ops(s, odd);
  EXPECT_THAT(slow, ::testing::IsEmpty());
  set_kernel_choice(gpu, KernelChoice::automatic);
  run_all_expert_ops(s, odd);
  EXPECT_EQ(slow.size(), 5);
  EXPECT_THAT(slow.at("expert_up"), ::testing::StartsWith("portable kernels, since"));
  EXPECT_THAT(slow.at("expert_up"), ::testing::HasSubstr("multiples of 8"));
  EXPECT_THAT(slow.at("expert_up"), ::testing::HasSubstr("[2, 34, 33]"));
}

TEST(Experts, PortableKernelsAreNotedWhereHoppersDoNotTakeTheOp) {
  if (testing::accelerator() == nullptr) GTEST_SKIP() << "there is no GPU";
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  const auto& noted = gpu.state<FallbackKernels>().why;
  Problem biased({"biased", 9, 32, 16, {5, 4}, 0, true, DType::bf16, true});
  run_all_expert_ops(s, biased);
  EXPECT_THAT(noted, ::testing::IsEmpty());
  Problem odd({"odd_bias", 9, 40, 16, {5, 4}, 0, true, DType::bf16, true});  // b2 has columns [13, 33)
  set_kernel_choice(gpu, KernelChoice::portable);
  run_all_expert_ops(s, odd);
  EXPECT_THAT(noted, ::testing::IsEmpty());
  set_kernel_choice(gpu, KernelChoice::automatic);
  run_all_expert_ops(s, odd);
  EXPECT_EQ(noted.size(), 1);
  EXPECT_THAT(noted.at("expert_down"), ::testing::HasSubstr("biases of an even number of columns"));
}

// The rows of each expert in three runs: those in the middle are one part, and the others another one. An expert may
// have no rows before, between or after.
TEST_P(ExpertsPartTest, HasTheBitsOfAllRows) {
  if (s_.device() == DeviceKind::cuda && c().dtype == DType::bf16) {
    const bool by_hopper = uses_hopper_kernels(s_) && c().D % 8 + c().F % 8 == 0;
    if (!by_hopper) GTEST_SKIP() << "the portable kernels compute no part";
  }
  Problem p(c());
  const Outputs all = run_all_expert_ops(s_, p);
  const int64_t E = p.E();
  std::vector<int32_t> own(2 * E), others(4 * E);
  for (int64_t e = 0; e < E; ++e) {
    const int64_t begin = p.shape.offsets[e], rows = p.c.counts[e];
    const int64_t first = begin + (e % 3 == 1 ? 0 : rows / 3), end = e % 4 == 2 ? first : begin + (rows * 2 + 2) / 3;
    own[e] = others[2 * E + 2 * e] = static_cast<int32_t>(first);
    own[E + e] = others[2 * e + 1] = static_cast<int32_t>(end);
    others[2 * e] = static_cast<int32_t>(begin);
    others[2 * E + 2 * e + 1] = static_cast<int32_t>(begin + rows);
  }
  Array of_own = Array::of_ints({2, E}, own), of_others = Array::of_ints({2, 2 * E}, others);
  p.parts = {{of_own.tensor(), 0.3}, {of_others.tensor(), 0.7}};
  const Outputs parts = run_all_expert_ops(s_, p);
  const auto want = all.of_rows(), got = parts.of_rows();
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i].second->bytes(), want[i].second->bytes()) << want[i].first;
}

TEST_P(ExpertsTeamTest, SameBits) {
  Problem p(GetParam());
  testing::expect_same_bits_for_any_team([&](Stream& s) { return run_all_expert_ops(s, p).all(); });
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });
// Returns those that run on tensor cores.
std::vector<testing::On<Case>> cases_in_bf16() {
  std::vector<testing::On<Case>> tiles = testing::on_each_device(cases());
  std::erase_if(tiles,
                [](const testing::On<Case>& on) { return on.device != DeviceKind::cuda || on.c.dtype != DType::bf16; });
  return tiles;
}
std::vector<testing::On<Case>> cases_of_few_blocks() {
  std::vector<testing::On<Case>> few = cases_in_bf16();
  std::erase_if(few, [](const testing::On<Case>& on) { return on.c.gpt_oss; });
  return few;
}
// The kernels that add terms take columns in multiples of 8, and a bias of the output with an even number of them.
std::vector<testing::On<Case>> cases_of_terms() {
  std::vector<testing::On<Case>> tiles = cases_in_bf16();
  std::erase_if(tiles, [](const testing::On<Case>& on) {
    return on.c.D % 8 + on.c.F % 8 != 0 || std::accumulate(on.c.counts.begin(), on.c.counts.end(), 0) == 0;
  });
  return tiles;
}
INSTANTIATE_TEST_SUITE_P(Shapes, PortableExpertsTest, ::testing::ValuesIn(cases_in_bf16()),
                         [](const auto& info) { return info.param.c.name + "_cuda"; });
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsOfFewBlocksTest, ::testing::ValuesIn(cases_of_few_blocks()),
                         [](const auto& info) { return info.param.c.name + "_cuda"; });
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsPartTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsTermTest, ::testing::ValuesIn(cases_of_terms()),
                         [](const auto& info) { return info.param.c.name + "_cuda"; });
INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsTeamTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// A single row has the same bits as among others, whichever rows share its expert and tile.
TEST(Experts, RowsDoNotDependOnOtherRows) {
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Problem many({"many", 40, 35, 19, {0, 33}, 0, true, dtype});
    const Outputs all = run_all_expert_ops(s, many);
    for (const int64_t row : {0, 13, 14, 32}) {
      Problem one({"one", 40, 35, 19, {0, 1}, 0, true, dtype});
      one.w1 = many.w1, one.w2 = many.w2;
      one.token = Array::of_ints({1}, {static_cast<int32_t>(many.shape.token[row])});
      const auto row_of = [&](Array& to, Array& from) {
        std::memcpy(to.tensor().data, from.tensor().rows(row, row + 1).data, to.bytes().size());
      };
      row_of(one.h, many.h), row_of(one.a, many.a), row_of(one.weight, many.weight);
      const Outputs alone = run_all_expert_ops(s, one);
      const auto of_one = alone.of_rows(), among = all.of_rows();
      for (size_t i = 0; i < of_one.size(); ++i) {
        const std::vector<unsigned char> got = of_one[i].second->bytes(), whole = among[i].second->bytes();
        EXPECT_EQ(std::memcmp(got.data(), whole.data() + row * got.size(), got.size()), 0)
            << of_one[i].first << " of row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace moebius
