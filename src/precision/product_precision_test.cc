#include "precision/product_precision.h"

#include <array>
#include <cstring>
#include <numeric>

#include "comm/transport/threads.h"
#include "device/gpu_limits.h"
#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_ref.h"
#include "ops/quantize/quantize.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

constexpr PrecisionRecipe kRecipes[] = {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8,
                                        PrecisionRecipe::nvfp4};

class ProductPrecisionTest : public ::testing::TestWithParam<PrecisionRecipe> {
 protected:
  Values values_of(const Operand& q) {
    Array x = Array::poisoned(q.data.shape, DType::f32);
    if (q.is_plain()) {
      copy(s_, x.tensor(), q.data);
      return x.values();
    }
    dequantize(s_, {.x = x.tensor(), .q = q});
    return x.values();
  }
  QuantizeContext context() { return {s_, stack_, draw_.tensor()}; }

  std::vector<char> memory_ = std::vector<char>(16 << 20);
  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_};
  StepStack stack_{DeviceKind::cpu, memory_.data(), static_cast<int64_t>(memory_.size())};
  Array draw_ = Array::of({2}, DType::i64, {3, 0});
  ProductPrecision precision_{GetParam(), /*seed=*/1, /*key=*/2};
};
INSTANTIATE_TEST_SUITE_P(Recipes, ProductPrecisionTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& info) { return name_of(info.param); });

double cosine(const Values& x, const Values& y) {
  return testing::dot(x, y) / (testing::norm_of(x) * testing::norm_of(y));
}

// Products of normal numbers, against those in double. T, in and out: a GPU needs multiples of 16.
struct Products {
  int64_t T, in, out;
  DType dtype;  // of y and dx
};

// A product of normal numbers in FP8 keeps a cosine of 0.997 to the exact one, which is the gate of
// published kernels: an element errs by up to 2^-4 of itself, evenly spread over less than that, so
// that both operands together err by 0.04 of the product at most, and 1 - 0.04^2 / 2 is 0.999. The
// steps of E2M1 are up to a third of an element: 0.1 for an operand, and 0.15 for both. Rounding to bf16 and the sums
// of tensor cores err by 2^-8, far less.
void expect_near_exact(Stream& s, const QuantizeContext& c, const ProductPrecision& precision, const Products& of,
                       double least) {
  const auto [T, in, out, dtype] = of;
  Array x = Array::normal({T, in}, DType::bf16, 1), w = Array::normal({out, in}, DType::bf16, 2),
        dy = Array::normal({T, out}, DType::bf16, 3);
  Array y = Array::poisoned({T, out}, dtype), dx = Array::poisoned({T, in}, dtype),
        dw = Array::of({out, in}, DType::f32, Values(out * in, 0.0));
  gemm(s, {.c_MN = y.tensor(), .a = precision.x(c, x.tensor()), .b = precision.w(c, w.tensor()), .trans_b = true});
  gemm(s, {.c_MN = dx.tensor(), .a = precision.dy(c, dy.tensor()), .b = precision.w_for_dx(c, w.tensor())});
  gemm(s, {.c_MN = dw.tensor(),
           .a = precision.dy_for_dw(c, dy.tensor()),
           .b = precision.x_for_dw(c, x.tensor()),
           .trans_a = true,
           .accumulate = true});
  Values exact;
  ref::gemm({.c = exact, .a = x.values(), .b = w.values(), .m = T, .n = out, .k = in, .trans_b = true});
  EXPECT_GE(cosine(y.values(), exact), least) << "y";
  ref::gemm({.c = exact, .a = dy.values(), .b = w.values(), .m = T, .n = in, .k = out});
  EXPECT_GE(cosine(dx.values(), exact), least) << "dx";
  ref::gemm({.c = exact, .a = dy.values(), .b = x.values(), .m = out, .n = in, .k = T, .trans_a = true});
  EXPECT_GE(cosine(dw.values(), exact), least) << "dw";
}

TEST_P(ProductPrecisionTest, ProductsAreNearTheExactOnes) {
  expect_near_exact(s_, context(), precision_, {.T = 150, .in = 200, .out = 140, .dtype = DType::f32},
                    GetParam() == PrecisionRecipe::nvfp4 ? 0.98 : 0.997);
}

// The 128 columns of x that share a scale with as many tokens may be of different sizes. A column whose numbers are
// 2^-8 of the largest is still in the normal range of E4M3, which spans 2^14: its gradients are as exact as the others.
// So are those of tokens of different sizes; the products of the largest ones hide the rest.
TEST(ProductPrecision, GradientsOfSmallColumnsAreNearTheExactOnes) {
  constexpr int64_t kT = 300, kIn = 160, kOut = 48;
  std::vector<char> memory(4 << 20);
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  StepStack stack(DeviceKind::cpu, memory.data(), static_cast<int64_t>(memory.size()));
  const QuantizeContext c{s, stack, {}};
  const ProductPrecision precision(PrecisionRecipe::fp8_block, 1, 2);
  Values x = Array::normal({kT, kIn}, DType::bf16, 1).values(), dy = Array::normal({kT, kOut}, DType::bf16, 3).values();
  for (int64_t t = 0; t < kT; ++t) {
    for (int64_t i = 0; i < kIn; ++i) x[t * kIn + i] = std::ldexp(x[t * kIn + i], -static_cast<int>(i % 9));
    for (int64_t o = 0; o < kOut; ++o) dy[t * kOut + o] = std::ldexp(dy[t * kOut + o], -static_cast<int>(t % 5));
  }
  Array x_TC = Array::of({kT, kIn}, DType::bf16, x), dy_TC = Array::of({kT, kOut}, DType::bf16, dy);
  Array dw = Array::of({kOut, kIn}, DType::f32, Values(kOut * kIn, 0.0));
  gemm(s, {.c_MN = dw.tensor(),
           .a = precision.dy_for_dw(c, dy_TC.tensor()),
           .b = precision.x_for_dw(c, x_TC.tensor()),
           .trans_a = true,
           .accumulate = true});
  Values exact;
  ref::gemm({.c = exact, .a = dy, .b = x, .m = kOut, .n = kIn, .k = kT, .trans_a = true});
  const Values got = dw.values();
  for (int64_t i = 0; i < kIn; ++i) {
    Values of_column, want;
    for (int64_t o = 0; o < kOut; ++o) of_column.push_back(got[o * kIn + i]), want.push_back(exact[o * kIn + i]);
    EXPECT_GE(cosine(of_column, want), 0.997) << "column " << i;
  }
  EXPECT_GE(cosine(got, exact), 0.999);
}

ProductPrecision on_kernels(PrecisionRecipe recipe) {
  return {recipe, 1, 2, {}, WeightGradientPrecision::recipe, {}, GpuProducts::f8_kernels};
}

TEST(ProductPrecisionOnGpu, ProductsOnKernelsAreNearTheExactOnes) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(1);
  Stream s = testing::stream_on(DeviceKind::cuda, pool);
  if (!query_gpu_limits().is_hopper()) GTEST_SKIP() << "FP8 products are Hopper's";
  const testing::SharedBytes memory(64 << 20);
  for (const Products& of : {Products{.T = 150, .in = 208, .out = 144, .dtype = DType::bf16},
                             Products{.T = 1024, .in = 2048, .out = 512, .dtype = DType::bf16}}) {
    for (const ProductPrecision& precision :
         {ProductPrecision(PrecisionRecipe::fp8_block, 1, 2), on_kernels(PrecisionRecipe::fp8_tensor)}) {
      StepStack stack(DeviceKind::cuda, memory.data(), memory.num_bytes());
      expect_near_exact(s, {s, stack, {}}, precision, of, 0.997);
    }
  }
}

// With the kernels of Hopper the products of fp8_tensor get the quantised operands: gradients in E5M2.
TEST(ProductPrecisionOnGpu, KernelsForScalesOfTensorsGetQuantisedOperands) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  StepStack stack(DeviceKind::null, nullptr, 0);
  const QuantizeContext c{s, stack, {}};
  const Tensor x = testing::null_tensor({150, 32}, DType::bf16), w = testing::null_tensor({48, 32}, DType::bf16);
  const ProductPrecision precision = on_kernels(PrecisionRecipe::fp8_tensor);
  const auto expect_quantised = [](const Operand& q, DType element, bool transposed, const Shape& data) {
    EXPECT_EQ(q.layout, ScaleLayout::per_tensor);
    EXPECT_EQ(q.data.dtype, element);
    EXPECT_EQ(q.data.shape, data);
    EXPECT_EQ(q.scales.shape, Shape({1}));
    EXPECT_EQ(q.transposed, transposed);
  };
  expect_quantised(precision.x(c, x), DType::f8_e4m3, false, {150, 32});
  expect_quantised(precision.dy(c, x), DType::f8_e5m2, false, {150, 32});
  expect_quantised(precision.w(c, w), DType::f8_e4m3, false, {48, 32});
  expect_quantised(precision.w_for_dx(c, w), DType::f8_e4m3, true, {32, 48});
  expect_quantised(precision.x_for_dw(c, x), DType::f8_e4m3, true, {32, 256});
  expect_quantised(precision.dy_for_dw(c, x), DType::f8_e5m2, true, {32, 256});
  EXPECT_FALSE(on_kernels(PrecisionRecipe::fp8_tensor).emulates(s));
  EXPECT_TRUE(on_kernels(PrecisionRecipe::mxfp8).emulates(s));
  EXPECT_TRUE(has_f8_products({48, 32}));
  EXPECT_FALSE(has_f8_products({3, 40, 32}));
  EXPECT_FALSE(has_f8_products({48, 40}));
}

// On a GPU the products of the other recipes are emulated. They multiply the values of the CPU's operands, those of
// nvfp4 rounded to bf16 and without the Hadamard transform.
TEST_P(ProductPrecisionTest, EmulatedProductsAreNearTheExactOnes) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  Stream s = testing::stream_on(DeviceKind::cuda, pool_);
  if (!is_emulated(GetParam(), s.target(), GpuProducts::emulated)) GTEST_SKIP() << "it has products of its own";
  const testing::SharedBytes memory(64 << 20);
  Array draw = Array::of({2}, DType::i64, {3, 0});
  StepStack stack(DeviceKind::cuda, memory.data(), memory.num_bytes());
  expect_near_exact(s, {s, stack, draw.tensor()}, precision_, {.T = 150, .in = 208, .out = 144, .dtype = DType::bf16},
                    GetParam() == PrecisionRecipe::nvfp4 ? 0.98 : 0.997);
}

TEST_P(ProductPrecisionTest, EmulatedOperandsHaveTheValuesOfTheCpu) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  Stream gpu = testing::stream_on(DeviceKind::cuda, pool_);
  if (!is_emulated(GetParam(), gpu.target(), GpuProducts::emulated)) GTEST_SKIP() << "it has products of its own";
  const testing::SharedBytes memory(64 << 20);
  StepStack stack(DeviceKind::cuda, memory.data(), memory.num_bytes());
  Array draw = Array::of({2}, DType::i64, {3, 0});
  const QuantizeContext there{gpu, stack, draw.tensor()}, here = context();
  Array x = Array::normal({96, 64}, DType::f32, 1), offsets = Array::of_ints({3}, {0, 33, 96});
  const RowGroups rows{offsets.tensor(), {}};
  const auto expect_same = [&](const char* name, const Operand& emulated, const Operand& q) {
    ASSERT_TRUE(emulated.is_plain()) << name;
    Array values = Array::poisoned(x.tensor().shape, DType::f32),
          copied = Array::poisoned(x.tensor().shape, DType::f32);
    if (q.is_plain())
      copy(s_, values.tensor(), q.data);
    else if (q.transposed)
      dequantize_transposed(
          s_, {.x_RC = values.tensor(), .q = q, .offsets_e1 = q.shape()[0] > 96 ? rows.offsets_e1 : Tensor{}});
    else
      dequantize(s_, {.x = values.tensor(), .q = q});
    copy_to_host(gpu, copied.tensor().data, emulated.data.data, copied.tensor().num_bytes());
    EXPECT_EQ(copied.values(), values.values()) << name;
  };
  expect_same("x", precision_.x(there, x.tensor(), rows), precision_.x(here, x.tensor(), rows));
  expect_same("w", precision_.w(there, x.tensor()), precision_.w(here, x.tensor()));
  expect_same("dy", precision_.dy(there, x.tensor(), rows), precision_.dy(here, x.tensor(), rows));
  expect_same("w of dx", precision_.w_for_dx(there, x.tensor()), precision_.w_for_dx(here, x.tensor()));
  expect_same("x of dw", precision_.x_for_dw(there, x.tensor(), rows), precision_.x_for_dw(here, x.tensor(), rows));
  expect_same("dy of dw", precision_.dy_for_dw(there, x.tensor(), rows), precision_.dy_for_dw(here, x.tensor(), rows));
}

// The shapes of emulated operands, and their memory, as a run is planned.
TEST_P(ProductPrecisionTest, EmulatedOperandsArePlainAndGathered) {
  Stream s(DeviceKind::null, pool_, nullptr, DeviceKind::cuda);
  if (!is_emulated(GetParam(), s.target(), GpuProducts::emulated)) GTEST_SKIP() << "it has products of its own";
  StepStack stack(DeviceKind::null, nullptr, 0);
  const QuantizeContext c{s, stack, testing::null_tensor({2}, DType::i64)};
  const Tensor x = testing::null_tensor({60, 32}, DType::bf16), w = testing::null_tensor({2, 48, 32}, DType::bf16);
  const RowGroups rows{testing::null_tensor({3}, DType::i32), testing::null_tensor({90}, DType::i32)};
  const auto expect_plain = [](const Operand& operand, const Shape& shape) {
    EXPECT_TRUE(operand.is_plain());
    EXPECT_FALSE(operand.transposed);
    EXPECT_EQ(operand.data.shape, shape);
    EXPECT_EQ(operand.data.dtype, DType::bf16);
  };
  expect_plain(precision_.x(c, x), x.shape);
  expect_plain(precision_.dy(c, x), x.shape);
  expect_plain(precision_.w(c, w), w.shape);
  expect_plain(precision_.w_for_dx(c, w), w.shape);
  expect_plain(precision_.x_for_dw(c, x, rows), {90, 32});
  expect_plain(precision_.dy_for_dw(c, x, {rows.offsets_e1, {}}), {60, 32});
  expect_plain(precision_.dy_for_dw(c, x), x.shape);
  EXPECT_FALSE(precision_.has_plain_dw());
}

// Forward and backward multiply with one and the same W, except with mx_blocks. Their scales run
// along the sum.
TEST_P(ProductPrecisionTest, BackwardReadsTheWeightsOfForward) {
  if (GetParam() == PrecisionRecipe::mxfp8) return;
  for (const Shape& shape : {Shape{140, 200}, Shape{3, 34, 130}}) {
    Array w = Array::normal(shape, DType::bf16, 2);
    const QuantizeContext c = context();
    const Operand there = precision_.w(c, w.tensor()), back = precision_.w_for_dx(c, w.tensor());
    EXPECT_EQ(back.shape(), there.shape());
    const Values forward = values_of(there), backward = values_of(back);
    const int rank = shape.rank();
    const int64_t n = shape[rank - 2], m = shape[rank - 1];
    for (int64_t i = 0; i < shape.numel(); ++i) {
      const int64_t e = i / (n * m), row = i / m % n, col = i % m;
      ASSERT_EQ(back.transposed ? backward[e * n * m + col * n + row] : backward[i], forward[i]) << i;
    }
  }
}

// The other products are quantised as before.
TEST_P(ProductPrecisionTest, WeightGradientsInComputeReadTheTensors) {
  const ProductPrecision mixed(GetParam(), 1, 2, {}, WeightGradientPrecision::compute);
  const QuantizeContext c = context();
  Array x = Array::normal({150, 200}, DType::bf16, 1);
  for (const Operand& operand : {mixed.x_for_dw(c, x.tensor()), mixed.dy_for_dw(c, x.tensor())}) {
    EXPECT_TRUE(operand.is_plain());
    EXPECT_FALSE(operand.transposed);
    EXPECT_EQ(operand.data.data, x.tensor().data);
  }
  EXPECT_EQ(values_of(mixed.x(c, x.tensor())), values_of(precision_.x(c, x.tensor())));
  EXPECT_EQ(values_of(mixed.dy(c, x.tensor())), values_of(precision_.dy(c, x.tensor())));
  EXPECT_EQ(values_of(mixed.w(c, x.tensor())), values_of(precision_.w(c, x.tensor())));
  EXPECT_EQ(values_of(mixed.w_for_dx(c, x.tensor())), values_of(precision_.w_for_dx(c, x.tensor())));
}

// Two ranks share every tensor: each has half of the rows of its matrices, or of their columns.
struct Halves {
  const char* name;
  PrecisionRecipe recipe;
  bool are_columns;
  int of_largest;  // the half of x and of w that has their largest element; that of dy is in the other one
};
void PrintTo(const Halves& c, std::ostream* out) { *out << c.name; }

template <class T>
std::vector<T> half_of(const T* all, const Shape& shape, bool of_columns, int half) {
  const int64_t rows = shape[shape.rank() - 2], cols = shape[shape.rank() - 1];
  std::vector<T> part;
  for (int64_t i = 0; i < shape.numel(); ++i)
    if ((of_columns ? i % cols * 2 / cols : i / cols % rows * 2 / rows) == half) part.push_back(all[i]);
  return part;
}

Shape half_shape(const Shape& shape, bool of_columns) {
  const int rank = shape.rank();
  const int64_t rows = shape[rank - 2] / (of_columns ? 1 : 2), cols = shape[rank - 1] / (of_columns ? 2 : 1);
  return rank == 3 ? Shape{shape[0], rows, cols} : Shape{rows, cols};
}

// Returns normal numbers of which one, in a corner of the last matrix, is `largest`.
Values with_largest(const Shape& shape, uint64_t key, double largest, int half) {
  Values x = Array::normal(shape, DType::bf16, key).values();
  const int64_t matrix = shape[shape.rank() - 2] * shape[shape.rank() - 1];
  x[half == 1 ? shape.numel() - 1 : shape.numel() - matrix] = largest;
  return x;
}

// x, dy, w and the w of experts
using FourTensors = std::array<Array, 4>;
using NamedOperands = std::vector<std::pair<std::string, Operand>>;

// Adds the operands of a weight, without copies and with them.
void add_weights(NamedOperands& all, const ProductPrecision& p, const QuantizeContext& c, const Tensor& w) {
  all.insert(all.end(), {{"w", p.w(c, w)}, {"w of dx", p.w_for_dx(c, w)}});
  Tensor all_We;
  if (const int64_t ranks = p.num_weight_ranks(); ranks > 1) {
    const int64_t e = w.shape.rank() == 3 ? w.dim(0) : 1;
    all_We = c.stack.alloc({ranks, e}, DType::i32);
    p.exchange_weights(c.stream, all_We, c.stack.alloc({e}, DType::i32), w);
  }
  for (Operand q : {p.w_form(w.shape), p.w_for_dx_form(w.shape)}) {
    q.data = c.stack.alloc(q.data.shape, q.data.dtype);
    q.scales = c.stack.alloc(q.scales.shape, q.scales.dtype);
    if (q.layout == ScaleLayout::nv_blocks) q.tensor_scale = c.stack.alloc(q.tensor_scale.shape, DType::f32);
    p.quantise_weights(c.stream, q, w, all_We);
    all.emplace_back(q.transposed ? "copy of w of dx" : "copy of w", p.for_products(c, q, w.dtype));
  }
}

NamedOperands operands_of(const ProductPrecision& p, const QuantizeContext& c, FourTensors& of,
                          const RowGroups& rows = {}) {
  const Tensor x = of[0].tensor(), dy = of[1].tensor();
  NamedOperands all{{"x", p.x(c, x, rows)},
                    {"dy", p.dy(c, dy, rows)},
                    {"x of dw", p.x_for_dw(c, x, rows)},
                    {"dy of dw", p.dy_for_dw(c, dy, rows)}};
  const auto [both_dy, both_x] = p.for_dw(c, dy, rows, x, rows);
  all.insert(all.end(), {{"dy of both for dw", both_dy}, {"x of both for dw", both_x}});
  add_weights(all, p, c, of[2].tensor());
  add_weights(all, p, c, of[3].tensor());
  return all;
}

struct CpuDevice {
  QuantizeContext context() { return {s, stack, draw.tensor()}; }

  Array draw = Array::of({2}, DType::i64, {3, 0});
  std::vector<char> memory = std::vector<char>(4 << 20);
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  StepStack stack{DeviceKind::cpu, memory.data(), static_cast<int64_t>(memory.size())};
};

class OperandsOfTwoRanks : public ::testing::TestWithParam<Halves> {};

// The largest element is far above those of the other half, whose own scale would be smaller. A half that had it would
// have other bytes in all of its elements. Draws are those of the whole too. The largest elements of x and dy differ
// too, since one message has both.
TEST_P(OperandsOfTwoRanks, HaveTheBytesOfTheWhole) {
  const Halves& c = GetParam();
  const Shape shapes[] = {{256, 64}, {256, 96}, {96, 64}, {3, 96, 64}};
  const Values values[] = {
      with_largest(shapes[0], 1, 3000, c.of_largest), with_largest(shapes[1], 2, 40, 1 - c.of_largest),
      with_largest(shapes[2], 3, 3000, c.of_largest), with_largest(shapes[3], 4, 3000, c.of_largest)};
  CpuDevice one;
  FourTensors whole;
  for (int i = 0; i < 4; ++i) whole[i] = Array::of(shapes[i], DType::bf16, values[i]);
  const NamedOperands want = operands_of({c.recipe, 1, 2}, one.context(), whole);
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    const std::unique_ptr<Group> ranks = world.make_group("ranks", {0, 1});
    WholePlaces places;
    if (c.are_columns) places.dy_columns = {.runs = {{{.here = 0, .whole = world.rank() * 48}}}, .count = 96};
    const ProductPrecision precision(c.recipe, 1, 2, {}, WeightGradientPrecision::recipe, {}, GpuProducts::emulated,
                                     {.rows = ranks.get(), .weights = ranks.get()}, places);
    CpuDevice device;
    Values tokens(256);
    std::iota(tokens.begin(), tokens.end(), c.are_columns ? 0 : 128 * world.rank());
    Array index = Array::of({256}, DType::i32, tokens);
    FourTensors half;
    for (int i = 0; i < 4; ++i)
      half[i] = Array::of(half_shape(shapes[i], c.are_columns), DType::bf16,
                          half_of(values[i].data(), shapes[i], c.are_columns, world.rank()));
    const NamedOperands got = operands_of(precision, device.context(), half, {.index_N = index.tensor()});
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      SCOPED_TRACE(fmt::format("{} on rank {}", got[i].first, world.rank()));
      const Operand &q = got[i].second, &all = want[i].second;
      const bool of_columns = c.are_columns != q.transposed;
      ASSERT_EQ(q.data.shape, half_shape(all.data.shape, of_columns));
      if (c.recipe == PrecisionRecipe::nvfp4) {  // its products are emulated
        ASSERT_EQ(q.data.dtype, DType::bf16);
        const auto* numbers = static_cast<const uint16_t*>(q.data.data);
        EXPECT_TRUE(std::vector(numbers, numbers + q.data.numel()) ==
                    half_of(static_cast<const uint16_t*>(all.data.data), all.data.shape, of_columns, world.rank()));
        continue;
      }
      ASSERT_EQ(q.scales.shape, all.scales.shape);
      const auto* bytes = static_cast<const unsigned char*>(q.data.data);
      const auto* all_bytes = static_cast<const unsigned char*>(all.data.data);
      EXPECT_TRUE(std::vector(bytes, bytes + q.data.num_bytes()) ==
                  half_of(all_bytes, all.data.shape, of_columns, world.rank()))
          << "elements";
      EXPECT_EQ(std::memcmp(q.scales.data, all.scales.data, all.scales.num_bytes()), 0) << "scales";
    }
  });
}

constexpr auto kTensor = PrecisionRecipe::fp8_tensor, kNv = PrecisionRecipe::nvfp4;
INSTANTIATE_TEST_SUITE_P(Splits, OperandsOfTwoRanks,
                         ::testing::Values(Halves{"rows_largest_on_0", kTensor, false, 0},
                                           Halves{"rows_largest_on_1", kTensor, false, 1},
                                           Halves{"columns_largest_on_0", kTensor, true, 0},
                                           Halves{"columns_largest_on_1", kTensor, true, 1},
                                           Halves{"nvfp4_rows_largest_on_0", kNv, false, 0},
                                           Halves{"nvfp4_rows_largest_on_1", kNv, false, 1},
                                           Halves{"nvfp4_columns_largest_on_0", kNv, true, 0},
                                           Halves{"nvfp4_columns_largest_on_1", kNv, true, 1}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ProductPrecision, WithoutARecipeOperandsAreTheTensors) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool);
  StepStack stack(DeviceKind::null, nullptr, 0);
  const QuantizeContext c{s, stack, {}};
  const Tensor x = testing::null_tensor({4, 6});
  const ProductPrecision plain;
  for (const Operand& operand : {plain.x(c, x), plain.w(c, x), plain.dy(c, x), plain.w_for_dx(c, x),
                                 plain.x_for_dw(c, x), plain.dy_for_dw(c, x)}) {
    EXPECT_TRUE(operand.is_plain());
    EXPECT_FALSE(operand.transposed);
    EXPECT_EQ(operand.data.shape, x.shape);
  }
  EXPECT_EQ(stack.high_water(), 0);
}

}  // namespace
}  // namespace moebius
