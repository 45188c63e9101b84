// d_expert_down_quantised has on every device the bits of d_expert_down and of quantize() after it.
#include "ops/experts/d_expert_down_quantised.h"

#include "ops/experts/experts_quantised_testing.h"
#include "ops/quantize/quantized_rows.h"

namespace moebius {
namespace {

using testing::Array;
using testing::ExpertCase;
using testing::ExpertProblem;
using testing::QuantisedArray;

// Widths that every device supports.
std::vector<ExpertCase> cases() {
  const DType t = DType::bf16;
  return {
      {"no_rows", 3, 64, 128, {0, 0}, 0, true, t},
      {"few", 3, 16, 128, {2, 0, 6}, 0, true, t},
      {"spare", 70, 272, 128, {0, 5, 130, 0, 17}, 3, true, t},
      {"in_place", 400, 144, 256, {3, 0, 300}, 97, false, t},
      {"tiles", 300, 400, 384, {129, 0, 257, 64, 1}, 5, true, t},
      {"many_experts",
       60,
       48,
       128,
       {1, 0, 2, 9, 0, 0, 128, 3, 3, 4, 127, 0, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 9},
       0,
       true,
       t}};
}

QuantisedArray blocks(Shape shape, bool transposed, ScaleLayout layout = ScaleLayout::row_blocks) {
  return {shape, DType::f8_e4m3, layout, transposed};
}

// Rows of h, as a result that is a row for each row, and as transposed by expert.
struct Outputs {
  explicit Outputs(const ExpertProblem& p)
      : dh(Array::poisoned({p.R, 2 * p.c.F}, p.c.dtype)),
        sa(Array::poisoned({p.R, p.c.F}, p.c.dtype)),
        dweight(Array::poisoned({p.R}, DType::f32)),
        dh_rows(blocks({p.R, 2 * p.c.F}, false)),
        dh_columns(blocks({2 * p.c.F, padded_rows(p.R, p.E())}, true)),
        sa_columns(blocks({p.c.F, padded_rows(p.R, p.E())}, true, ScaleLayout::square_blocks)) {}
  Array dh, sa, dweight;
  QuantisedArray dh_rows, dh_columns, sa_columns;
};

class DExpertDownQuantisedTest : public testing::DeviceTest<ExpertCase> {
 protected:
  // d_expert_down, and its results quantised.
  Outputs run_apart() {
    Outputs o(p_);
    testing::run_expert_op<DExpertDown>(s_, d_expert_down,
                                        {.dh_R2F = o.dh.tensor(),
                                         .sa_RF = o.sa.tensor(),
                                         .dweight_R = o.dweight.tensor(),
                                         .dout_TD = dout_.q.operand(),
                                         .w2_eDF = w2_.q.operand(),
                                         .h_R2F = p_.h.tensor(),
                                         .weight_R = p_.weight.tensor(),
                                         .rows = p_.rows()});
    const Tensor offsets = p_.offsets.tensor();
    quantize(s_, {.q = o.dh_rows.operand(), .x_RC = o.dh.tensor(), .offsets_e1 = offsets});
    quantize(s_, {.q = o.dh_columns.operand(), .x_RC = o.dh.tensor(), .offsets_e1 = offsets});
    quantize(s_, {.q = o.sa_columns.operand(), .x_RC = o.sa.tensor(), .offsets_e1 = offsets});
    return o;
  }

  // h: the pre-activations; packed: read in 8 bits instead of h.
  Outputs run(bool columns, bool plain, const Tensor& h, const Tensor& packed = {}) {
    Outputs o(p_);
    Array g = Array::poisoned({p_.R, p_.c.F}, p_.c.dtype);
    DExpertDownQuantised op{.dh_rows = o.dh_rows.operand(),
                            .dweight_R = o.dweight.tensor(),
                            .dout_TD = dout_.q.operand(),
                            .w2_eDF = w2_.q.operand(),
                            .h_R2F = h,
                            .weight_R = p_.weight.tensor(),
                            .h_rows_RB = packed,
                            .rows = p_.rows(),
                            .g_RF = g.tensor()};
    if (columns) op.dh_columns = o.dh_columns.operand(), op.sa_columns = o.sa_columns.operand();
    if (plain) op.dh_R2F = o.dh.tensor(), op.sa_RF = o.sa.tensor();
    testing::run_expert_op<DExpertDownQuantised>(s_, d_expert_down_quantised, op);
    return o;
  }

  ExpertProblem p_{c()};
  testing::QuantisedOperands q_{
      s_, p_, {"blocks", DType::f8_e4m3, ScaleLayout::row_blocks, ScaleLayout::square_blocks}};
  testing::QuantisedWithValues dout_ = q_.rows_of(p_.dout), w2_ = q_.transposed_weights_of(p_.w2);
};
INSTANTIATE_TEST_SUITE_P(Shapes, DExpertDownQuantisedTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });

TEST_P(DExpertDownQuantisedTest, HasTheBitsOfSeparatePasses) {
  const Outputs want = run_apart();
  for (const auto& [columns, plain] : {std::pair{true, false}, {false, true}, {true, true}}) {
    SCOPED_TRACE(fmt::format("columns {} plain {}", columns, plain));
    const Outputs got = run(columns, plain, p_.h.tensor());
    EXPECT_TRUE(got.dh_rows == want.dh_rows);
    EXPECT_TRUE(!columns || got.dh_columns == want.dh_columns);
    EXPECT_TRUE(!columns || got.sa_columns == want.sa_columns);
    EXPECT_TRUE(!plain || got.dh.bytes() == want.dh.bytes());
    EXPECT_TRUE(!plain || got.sa.bytes() == want.sa.bytes());
    // A GPU adds the products of a row in another order.
    if (s_.device() == DeviceKind::cpu) {
      EXPECT_EQ(got.dweight.bytes(), want.dweight.bytes());
    } else {
      testing::Values a = got.dweight.values(), b = want.dweight.values();
      a.resize(a.size() - static_cast<size_t>(c().spare)), b.resize(a.size());
      testing::expect_close("dweight", a, b, 0x1p-19, 1e-6);
    }
  }
}

// The op reads rows in 8 bits in place of their values.
TEST_P(DExpertDownQuantisedTest, ReadsPackedRows) {
  const int64_t bytes = quantized_row_bytes(2 * p_.c.F);
  Array rows = Array::poisoned({p_.R, bytes / 4}, DType::i32), values = Array::poisoned({p_.R, 2 * p_.c.F}, p_.c.dtype);
  Tensor packed = rows.tensor();
  packed.shape = {p_.R, bytes};
  packed.dtype = DType::u8;
  pack_quantized_rows(s_, {.rows_TB = packed, .x_TD = p_.h.tensor(), .offsets_e1 = p_.offsets.tensor()});
  unpack_quantized_rows(s_, {.x_TD = values.tensor(), .rows_TB = packed, .offsets_e1 = p_.offsets.tensor()});
  for (const auto& [columns, plain] : {std::pair{true, false}, {false, true}}) {
    SCOPED_TRACE(fmt::format("columns {} plain {}", columns, plain));
    const Outputs want = run(columns, plain, values.tensor()), got = run(columns, plain, {}, packed);
    EXPECT_TRUE(got.dh_rows == want.dh_rows);
    EXPECT_TRUE(!columns || got.dh_columns == want.dh_columns);
    EXPECT_TRUE(!columns || got.sa_columns == want.sa_columns);
    EXPECT_TRUE(!plain || got.dh.bytes() == want.dh.bytes());
    EXPECT_TRUE(!plain || got.sa.bytes() == want.sa.bytes());
    EXPECT_EQ(got.dweight.bytes(), want.dweight.bytes());
    if (c().name != std::string("no_rows") && plain) {
      EXPECT_NE(got.dh.bytes(), run(columns, plain, p_.h.tensor()).dh.bytes());
    }
  }
}

// Without the gradients in bf16 and without transposes, on the GPU.
DExpertDownQuantised rows_only(testing::GpuTensors& on_gpu, const Operand& dout, const Operand& w2, const Tensor& h,
                               const Tensor& weight, const Rows& rows) {
  const int64_t R = h.dim(0), F = h.dim(1) / 2;
  return {.dh_rows = on_gpu.quantised({R, 2 * F}, ScaleLayout::row_blocks),
          .dweight_R = on_gpu.take({R}, DType::f32),
          .dout_TD = dout,
          .w2_eDF = w2,
          .h_R2F = h,
          .weight_R = weight,
          .rows = rows,
          .g_RF = on_gpu.take({R, F}, DType::bf16),
          .scratch = on_gpu.take({R * F / kGroupAlign}, DType::f32)};
}

// A grid has at most 65535 blocks in its second dimension. The rows, 128 in each, need more: the last ones have the bytes
// that they have alone.
TEST(DExpertDownQuantised, TakesMoreRowsThanTheSecondDimensionOfAGrid) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  Stream s(*testing::accelerator(), pool);
  testing::GpuTensors on_gpu(s);
  constexpr int64_t T = 64, D = 128, F = 128, tail_begin = int64_t{65535} * 128, R = tail_begin + 168;
  const Operand dout = on_gpu.quantised({T, D}, ScaleLayout::row_blocks),
                w2 = on_gpu.quantised({1, F, D}, ScaleLayout::square_blocks, true);
  quantize(s, {.q = dout, .x_RC = on_gpu.normal({T, D}, DType::bf16)});
  quantize(s, {.q = w2, .x_RC = on_gpu.normal({1, D, F}, DType::bf16)});
  std::vector<int32_t> tokens(R);
  for (int64_t r = 0; r < R; ++r) tokens[r] = static_cast<int32_t>(r * 7 % T);
  const Tensor h = on_gpu.normal({R, 2 * F}, DType::bf16), weight = on_gpu.normal({R}, DType::f32),
               token = on_gpu.of_ints(tokens);
  const DExpertDownQuantised all = rows_only(on_gpu, dout, w2, h, weight, {on_gpu.of_ints({0, int32_t{R}}), token});
  const DExpertDownQuantised alone =
      rows_only(on_gpu, dout, w2, h.rows(tail_begin, R), weight.rows(tail_begin, R),
                {on_gpu.of_ints({0, int32_t{R - tail_begin}}), token.rows(tail_begin, R)});
  d_expert_down_quantised(s, all);
  d_expert_down_quantised(s, alone);
  EXPECT_EQ(on_gpu.bytes(all.dh_rows.data.rows(tail_begin, R)), on_gpu.bytes(alone.dh_rows.data));
  EXPECT_EQ(on_gpu.bytes(all.dh_rows.scales.rows(tail_begin, R)), on_gpu.bytes(alone.dh_rows.scales));
  EXPECT_EQ(on_gpu.bytes(all.dweight_R.rows(tail_begin, R)), on_gpu.bytes(alone.dweight_R));
}

TEST(DExpertDownQuantised, RefusesOtherFormats) {
  ThreadPool pool(1);
  Stream s(DeviceKind::null, pool);
  const auto null = [](Shape shape, DType dtype) { return testing::null_tensor(shape, dtype); };
  const auto rows = [&](Shape shape, ScaleLayout layout) {
    return Operand(null(shape, DType::f8_e4m3), null(scale_shape(layout, shape), scale_dtype(layout)), layout);
  };
  DExpertDownQuantised a{.dh_rows = rows({8, 256}, ScaleLayout::mx_blocks),
                         .dweight_R = null({8}, DType::f32),
                         .dout_TD = rows({8, 32}, ScaleLayout::row_blocks),
                         .w2_eDF = rows({2, 128, 32}, ScaleLayout::square_blocks),
                         .h_R2F = null({8, 256}, DType::bf16),
                         .weight_R = null({8}, DType::f32),
                         .rows = {.offsets_e1 = null({3}, DType::i32)},
                         .g_RF = null({8, 128}, DType::bf16)};
  a.w2_eDF.transposed = true;
  EXPECT_EQ(
      testing::error_of([&] { d_expert_down_quantised(s, a); }),
      "d_expert_down_quantised: dh_rows must be f8_e4m3 with row_blocks scales; got f8_e4m3[8, 256] with mx_blocks "
      "scales e8m0[8, 8]");
}

}  // namespace
}  // namespace moebius
