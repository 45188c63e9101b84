#include "ops/quantize/quantize.h"

#include <cmath>

#include "ops/quantize/quantize_ref.h"
#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

struct Case {
  int64_t rows, cols;
  DType dtype, element;
  ScaleLayout layout;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [rows, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {1, 2}, {5, 130}, {130, 150}, {256, 20}, {136, 264}}) {
      for (const ScaleLayout layout :
           {ScaleLayout::per_tensor, ScaleLayout::row_blocks, ScaleLayout::square_blocks, ScaleLayout::mx_blocks}) {
        for (const DType element : {DType::f8_e4m3, DType::f8_e5m2})
          all.push_back({rows, cols, dtype, element, layout});
      }
      all.push_back({rows, cols, dtype, DType::f4_e2m1, ScaleLayout::nv_blocks});
    }
  }
  return all;
}

// Numbers of many magnitudes, with a row of zeros.
Array numbers(Shape shape, DType dtype, uint64_t key = 1) {
  Values x = Array::normal(shape, DType::f32, key).values();
  const int64_t cols = shape[shape.rank() - 1];
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<double>(i / cols % 9) - 4.0);
  for (int64_t j = 0; j < cols && !x.empty(); ++j) x[j] = 0;
  return Array::of(shape, dtype, x);
}

double largest(const Values& x) {
  double m = 0;
  for (const double v : x) m = std::max(m, std::fabs(v));
  return m;
}

// x, rows by cols, quantised by the definition.
Values expected(const Values& x, int64_t rows, int64_t cols, const Case& c, bool square) {
  if (c.layout != ScaleLayout::nv_blocks) {
    const ref::Format& format = c.element == DType::f8_e4m3 ? ref::kE4m3 : ref::kE5m2;
    const BlockSize block = block_size(c.layout);
    return ref::quantised_values(
        x, {rows, cols, block.rows ? block.rows : std::max<int64_t>(1, rows), block.cols ? block.cols : cols}, format,
        [&](double m) { return ref::power_of_two_scale(m, format.max()); }, [](double v, double s) { return v / s; });
  }
  // The operations of the format are in f32, each rounded: a scale of few bits, or a number of a bf16,
  // may be at a tie.
  const auto m = static_cast<float>(largest(x));
  const float encode = m == 0 ? 1.0f : 2688.0f / m, tensor_scale = 1.0f / encode;
  return ref::quantised_values(
      x, {rows, cols, square ? 16 : 1, 16}, ref::kE2m1,
      [&](double of_block) {
        return static_cast<float>(ref::kE4m3.nearest(static_cast<float>(of_block) / 6.0f * encode)) * tensor_scale;
      },
      [](double v, double s) { return v == 0 ? v : static_cast<float>(v) * (1.0f / static_cast<float>(s)); });
}

class QuantizeTest : public testing::DeviceTest<Case> {
 protected:
  // Exact, except that the product of an element and its two scales of nv_blocks is rounded to f32.
  void expect_values(const Values& got, const Values& want) {
    if (c().layout == ScaleLayout::nv_blocks)
      testing::expect_close("values", got, want, testing::epsilon(DType::f32), 0);
    else
      EXPECT_EQ(got, want);
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, QuantizeTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(QuantizeTest, EqualsTheReference) {
  const Case& c = this->c();
  Array x = numbers({c.rows, c.cols}, c.dtype);
  for (const bool square : {false, true}) {
    if (square && c.layout != ScaleLayout::nv_blocks) continue;
    QuantisedArray q({c.rows, c.cols}, c.element, c.layout);
    quantize(s_, {.q = q.operand(), .x_RC = x.tensor(), .square = square});
    expect_values(q.values(s_), expected(x.values(), c.rows, c.cols, c, square));
  }
}

TEST_P(QuantizeTest, TransposedAndPaddedEqualsTheReference) {
  const Case& c = this->c();
  const int64_t padded = padded_rows(c.rows);
  Array x = numbers({c.rows, c.cols}, c.dtype);
  QuantisedArray q({c.cols, padded}, c.element, c.layout, true);
  quantize(s_, {.q = q.operand(), .x_RC = x.tensor()});
  Values wide(static_cast<size_t>(c.cols * padded), 0.0);
  const Values of_x = x.values();
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) wide[j * padded + i] = of_x[i * c.cols + j];
  }
  expect_values(q.values(s_), expected(wide, c.cols, padded, c, false));
}

// The values of dequantize(), in the rows and columns of x.
TEST_P(QuantizeTest, TheTransposedCopyGivesBackItsMatrix) {
  const Case& c = this->c();
  Array x = numbers({c.rows, c.cols}, c.dtype), of_experts = numbers({2, c.rows, c.cols}, c.dtype);
  const int64_t padded = padded_rows(c.rows);
  QuantisedArray q({c.cols, padded}, c.element, c.layout, true);
  quantize(s_, {.q = q.operand(), .x_RC = x.tensor()});
  Array back = Array::poisoned({c.rows, c.cols}, DType::f32);
  dequantize_transposed(s_, {.x_RC = back.tensor(), .q = q.operand()});
  Values all = testing::transposed(q.values(s_), c.cols, padded);
  all.resize(static_cast<size_t>(c.rows * c.cols));
  EXPECT_EQ(back.values(), all);

  if (c.rows % 2 != 0) return;  // columns of f4_e2m1 are even
  QuantisedArray two({2, c.cols, c.rows}, c.element, c.layout, true);
  quantize(s_, {.q = two.operand(), .x_RC = of_experts.tensor()});
  Array both = Array::poisoned({2, c.rows, c.cols}, DType::f32);
  dequantize_transposed(s_, {.x_RC = both.tensor(), .q = two.operand()});
  const Values got = both.values(), values = two.values(s_);
  for (int64_t i = 0; i < std::ssize(got); ++i) {
    const int64_t e = i / (c.rows * c.cols), r = i / c.cols % c.rows, col = i % c.cols;
    ASSERT_EQ(got[i], values[(e * c.cols + col) * c.rows + r]) << i;
  }
}

// A block of 16 columns that is partly padding keeps its values: the transform spreads them over all 16.
TEST_P(QuantizeTest, TheHadamardTransformOfFewRowsIsUndone) {
  const Case& c = this->c();
  if (c.layout != ScaleLayout::nv_blocks) return;  // others have no such transform
  const int64_t R = 40, e = 4;
  Array x = Array::normal({R, c.cols}, c.dtype, 5), offsets = Array::of_ints({e + 1}, {0, 1, 7, 22, R});
  QuantisedArray q({c.cols, padded_rows(R, e)}, c.element, c.layout, true);
  quantize(s_, {.q = q.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor(), .hadamard = true});
  Array back = Array::poisoned({R, c.cols}, DType::f32);
  dequantize_transposed(s_,
                        {.x_RC = back.tensor(), .q = q.operand(), .offsets_e1 = offsets.tensor(), .hadamard = true});
  const Values got = back.values(), expected = x.values();
  const std::vector<int64_t> begins{0, 1, 7, 22, R};
  for (int64_t g = 0; g < e; ++g) {
    double dot = 0, of_got = 0, of_x = 0;
    for (int64_t i = begins[g] * c.cols; i < begins[g + 1] * c.cols; ++i) {
      dot += got[i] * expected[i], of_got += got[i] * got[i], of_x += expected[i] * expected[i];
    }
    EXPECT_GT(dot, 0.85 * std::sqrt(of_got * of_x)) << "group " << g;
    EXPECT_GT(of_got, 0.5 * of_x) << "group " << g;
    EXPECT_LT(of_got, 2 * of_x) << "group " << g;
  }
}

TEST_P(QuantizeTest, TheTransposedRowsOfExpertsGiveBackTheirOrder) {
  const Case& c = this->c();
  const int64_t R = 300, T = 70, e = 4, width = padded_rows(R, e);
  Array x = numbers({T, c.cols}, c.dtype);
  const std::vector<int32_t> begins{0, 5, 5, 135, 290};
  Array offsets = Array::of_ints({e + 1}, begins);
  std::vector<int32_t> token(R);
  for (int64_t r = 0; r < R; ++r) token[r] = static_cast<int32_t>(r * 37 % T);
  Array tokens = Array::of_ints({R}, token);
  QuantisedArray q({c.cols, width}, c.element, c.layout, true);
  quantize(s_, {.q = q.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor(), .token_R = tokens.tensor()});
  Array back = Array::poisoned({R, c.cols}, DType::f32);
  dequantize_transposed(s_, {.x_RC = back.tensor(), .q = q.operand(), .offsets_e1 = offsets.tensor()});
  const Values got = back.values(), values = q.values(s_);
  for (int64_t r = 0; r < R; ++r) {
    const int64_t group = std::upper_bound(begins.begin(), begins.end(), r) - begins.begin() - 1;
    for (int64_t col = 0; col < c.cols; ++col) {
      const double element = got[r * c.cols + col];
      if (r >= begins[e]) {
        EXPECT_TRUE(std::isnan(element)) << "row " << r << " is of no expert";
        continue;
      }
      ASSERT_EQ(element, values[col * width + group_begin(begins[group], group) + r - begins[group]]) << r;
    }
  }
}

// Blocks are of an expert: a matrix of its rows alone has the same bytes.
TEST_P(QuantizeTest, ExpertsAreQuantisedSeparately) {
  const Case& c = this->c();
  if (c.layout == ScaleLayout::per_tensor || c.layout == ScaleLayout::nv_blocks) return;  // one scale for all
  const int64_t R = 300, T = 70, e = 4;
  Array x = numbers({T, c.cols}, c.dtype), offsets = Array::of_ints({e + 1}, {0, 5, 5, 135, 290});
  std::vector<int32_t> token(R);
  for (int64_t r = 0; r < R; ++r) token[r] = static_cast<int32_t>(r * 37 % T);
  Array tokens = Array::of_ints({R}, token);
  QuantisedArray all({c.cols, padded_rows(R, e)}, c.element, c.layout, true);
  quantize(s_, {.q = all.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor(), .token_R = tokens.tensor()});
  const Values got = all.values(s_), of_x = x.values();
  Values want(got.size(), 0.0);
  for (int64_t expert = 0; expert < e; ++expert) {
    const int64_t begin = static_cast<int64_t>(offsets.values()[expert]), n = offsets.values()[expert + 1] - begin;
    Values rows(static_cast<size_t>(n * c.cols));
    for (int64_t i = 0; i < n * c.cols; ++i) rows[i] = of_x[token[begin + i / c.cols] * c.cols + i % c.cols];
    const Values q = expected(testing::transposed(rows, n, c.cols), c.cols, n, c, false);
    for (int64_t i = 0; i < c.cols; ++i) {
      for (int64_t j = 0; j < n; ++j) want[i * padded_rows(R, e) + group_begin(begin, expert) + j] = q[i * n + j];
    }
  }
  EXPECT_EQ(got, want);
}

// Ranks that hold whole blocks have the bytes of one rank that holds all.
TEST_P(QuantizeTest, PartsOfWholeBlocksHaveTheBytesOfTheWhole) {
  const Case& c = this->c();
  if (c.rows != 256 || c.layout == ScaleLayout::per_tensor || c.layout == ScaleLayout::nv_blocks) return;
  Array x = numbers({c.rows, c.cols}, c.dtype);
  QuantisedArray whole({c.rows, c.cols}, c.element, c.layout), part({128, c.cols}, c.element, c.layout);
  quantize(s_, {.q = whole.operand(), .x_RC = x.tensor()});
  quantize(s_, {.q = part.operand(), .x_RC = x.tensor().rows(128, 256)});
  const Values all = whole.values(s_);
  EXPECT_EQ(part.values(s_), Values(all.begin() + 128 * c.cols, all.end()));
}

// Two ranks that have rows or columns of a tensor have its bytes, if they know each other's largest magnitude. Here it
// is in the second of two matrices, whose magnitudes a message has together.
TEST_P(QuantizeTest, RanksThatShareMagnitudesHaveTheBytesOfTheWhole) {
  const Case& c = this->c();
  if (c.rows != 256 || (c.layout != ScaleLayout::per_tensor && c.layout != ScaleLayout::nv_blocks)) return;
  const int64_t C = 208;
  Values of_x = numbers({c.rows, C}, c.dtype).values();
  of_x[200 * C + 3] = -3000;
  Array x = Array::of({c.rows, C}, c.dtype, of_x), all = Array::of_ints({2, 3}, std::vector<int32_t>(6, -1));
  for (const bool transposed : {false, true}) {
    const auto shape = [&](int64_t rows) { return transposed ? Shape{C, rows} : Shape{rows, C}; };
    if (transposed && c.layout == ScaleLayout::nv_blocks) continue;  // its blocks are other elements
    QuantisedArray whole(shape(256), c.element, c.layout, transposed);
    quantize(s_, {.q = whole.operand(), .x_RC = x.tensor()});
    for (int64_t r = 0; r < 2; ++r) {
      QuantisedArray form(shape(128), c.element, c.layout, transposed);
      largest_magnitudes(s_, {.bits_e = all.tensor().rows(r, r + 1).view({3}).rows(1, 2),
                              .of = {.q = form.operand(), .x_RC = x.tensor().rows(128 * r, 128 * r + 128)}});
    }
    QuantisedArray part(shape(128), c.element, c.layout, transposed);
    quantize(s_,
             {.q = part.operand(), .x_RC = x.tensor().rows(0, 128), .magnitude_WB = all.tensor(), .first_matrix = 1});
    const Values of_whole = whole.values(s_), of_part = part.values(s_);
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t j = 0; j < C; ++j) {
        if (transposed)
          ASSERT_EQ(of_part[j * 128 + i], of_whole[j * 256 + i]) << i << ", " << j;
        else
          ASSERT_EQ(of_part[i * C + j], of_whole[i * C + j]) << i << ", " << j;
      }
    }
  }
}

TEST_P(QuantizeTest, NonFiniteValuesAffectOnlyTheirBlock) {
  const Case& c = this->c();
  if (c.rows < 129) return;
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    Values v = numbers({c.rows, c.cols}, c.dtype).values();
    v[128 * c.cols] = bad;
    Array x = Array::of({c.rows, c.cols}, c.dtype, v);
    QuantisedArray q({c.rows, c.cols}, c.element, c.layout);
    quantize(s_, {.q = q.operand(), .x_RC = x.tensor()});
    const Values got = q.values(s_);
    EXPECT_TRUE(std::isnan(got[128 * c.cols]));
    if (c.layout == ScaleLayout::per_tensor) continue;
    for (int64_t i = 0; i < 128 * c.cols; ++i) ASSERT_FALSE(std::isnan(got[i])) << i;
  }
}

TEST(Quantize, ZerosHaveScaleOne) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::of({2, 128}, DType::f32, Values(256, -0.0));
    for (const ScaleLayout layout : {ScaleLayout::per_tensor, ScaleLayout::row_blocks, ScaleLayout::square_blocks}) {
      QuantisedArray q({2, 128}, DType::f8_e4m3, layout);
      quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
      EXPECT_EQ(q.scale(0), 1.0f);
      EXPECT_EQ(q.data()[0], 0x80);
    }
  });
}

TEST(Quantize, RowsPastTheLastOffsetAreUnchanged) {
  testing::on_each_device([](Stream& s) {
    Values v(300 * 8, std::nan(""));
    for (int64_t i = 0; i < 150 * 8; ++i) v[i] = static_cast<double>(i % 7);
    Array x = Array::of({300, 8}, DType::bf16, v), offsets = Array::of_ints({3}, {0, 20, 150});
    for (const ScaleLayout layout : {ScaleLayout::row_blocks, ScaleLayout::per_tensor}) {
      QuantisedArray q({300, 8}, DType::f8_e4m3, layout);
      quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor()});
      const Values got = q.values(s);
      for (int64_t i = 0; i < 150 * 8; ++i) ASSERT_NEAR(got[i], v[i], 0) << i;
      for (size_t i = 150 * 8; i < q.data().size(); ++i) ASSERT_EQ(q.data()[i], 0xff) << i;
    }
  });
}

// All rows that training quantises with one scale: weights of experts, and rows of experts, in each order.
TEST(Quantize, ScalesOfTensorsHaveTheBytesOfTheCpu) {
  const int64_t e = 4, R = 300, T = 70, C = 208, last = 290;
  const std::vector<int32_t> begins{0, 5, 5, 135, static_cast<int32_t>(last)};
  Values of_experts = numbers({3, 144, C}, DType::bf16).values(), of_rows = numbers({R, C}, DType::bf16).values(),
         of_tokens = numbers({T, C}, DType::bf16).values();
  for (size_t i = 0; i < of_experts.size(); ++i) of_experts[i] *= std::exp2(5.0 * static_cast<double>(i / (144 * C)));
  std::fill(of_rows.begin() + last * C, of_rows.end(), std::nan(""));
  std::fill(of_tokens.end() - C, of_tokens.end(), std::nan(""));
  std::vector<int32_t> token(R, T - 1);  // those past the end are a row of NaN
  for (int64_t r = 0; r < last; ++r) token[r] = static_cast<int32_t>(r * 37 % (T - 1));
  const auto all_of = [&](Stream& s, DType element) {
    constexpr ScaleLayout kLayout = ScaleLayout::per_tensor;
    Array w = Array::of({3, 144, C}, DType::bf16, of_experts), rows = Array::of({R, C}, DType::bf16, of_rows),
          tokens = Array::of({T, C}, DType::bf16, of_tokens), offsets = Array::of_ints({e + 1}, begins),
          index = Array::of_ints({R}, token);
    const int64_t width = padded_rows(R, e);
    std::vector<QuantisedArray> q{{{3, 144, C}, element, kLayout},
                                  {{3, C, 144}, element, kLayout, true},
                                  {{R, C}, element, kLayout},
                                  {{C, width}, element, kLayout, true},
                                  {{C, width}, element, kLayout, true}};
    quantize(s, {.q = q[0].operand(), .x_RC = w.tensor()});
    quantize(s, {.q = q[1].operand(), .x_RC = w.tensor()});
    quantize(s, {.q = q[2].operand(), .x_RC = rows.tensor(), .offsets_e1 = offsets.tensor()});
    quantize(s, {.q = q[3].operand(), .x_RC = rows.tensor(), .offsets_e1 = offsets.tensor()});
    quantize(s,
             {.q = q[4].operand(), .x_RC = tokens.tensor(), .offsets_e1 = offsets.tensor(), .token_R = index.tensor()});
    return q;
  };
  for (const DType element : {DType::f8_e4m3, DType::f8_e5m2}) {
    const double max = (element == DType::f8_e4m3 ? ref::kE4m3 : ref::kE5m2).max();
    const auto scale_of = [&](auto begin, auto end) { return ref::power_of_two_scale(largest({begin, end}), max); };
    ThreadPool pool(1);
    Stream cpu(DeviceKind::cpu, pool);
    const std::vector<QuantisedArray> of_cpu = all_of(cpu, element);
    for (int64_t i = 0; i < 3; ++i) {
      const auto begin = of_experts.begin() + i * 144 * C, end = begin + 144 * C;
      EXPECT_EQ(of_cpu[0].scale(i), scale_of(begin, end)) << i;
      EXPECT_EQ(of_cpu[1].scale(i), scale_of(begin, end)) << i;
    }
    EXPECT_EQ(of_cpu[2].scale(0), scale_of(of_rows.begin(), of_rows.begin() + last * C));
    EXPECT_EQ(of_cpu[3].scale(0), scale_of(of_rows.begin(), of_rows.begin() + last * C));
    EXPECT_EQ(of_cpu[4].scale(0), scale_of(of_tokens.begin(), of_tokens.end() - C));
    testing::on_each_device([&](Stream& s) {
      const std::vector<QuantisedArray> here = all_of(s, element);
      for (size_t i = 0; i < here.size(); ++i)
        EXPECT_TRUE(here[i] == of_cpu[i]) << i << " " << name_of(element) << " on " << name_of(s.device());
    });
  }
}

// Moving elements and scales is what quantising the transpose gives.
TEST(Quantize, TransposesOfSquareBlocksAreExact) {
  testing::on_each_device([](Stream& s) {
    for (const ScaleLayout layout : {ScaleLayout::square_blocks, ScaleLayout::per_tensor}) {
      Array x = numbers({3, 130, 200}, DType::bf16);
      QuantisedArray q({3, 130, 200}, DType::f8_e4m3, layout), moved({3, 200, 130}, DType::f8_e4m3, layout, true),
          made({3, 200, 130}, DType::f8_e4m3, layout, true);
      quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
      quantize(s, {.q = made.operand(), .x_RC = x.tensor()});
      transpose_quantized(s, {.out = moved.operand(), .in = q.operand()});
      EXPECT_TRUE(moved == made);
    }
  });
}

// Every team of threads and every device, nv_blocks with draws and the Hadamard transform too.
TEST(Quantize, SameBitsForAnyTeamAndDevice) {
  std::vector<QuantisedArray> first;
  const auto compare = [&](Stream& s, const std::string& what) {
    Array x = numbers({300, 200}, DType::bf16), draw = Array::of({2}, DType::i64, {5, 7}),
          offsets = Array::of_ints({4}, {0, 100, 100, 290});
    std::vector<QuantisedArray> all{{{300, 200}, DType::f8_e4m3, ScaleLayout::row_blocks},
                                    {{200, 384}, DType::f8_e5m2, ScaleLayout::per_tensor, true},
                                    {{300, 200}, DType::f4_e2m1, ScaleLayout::nv_blocks}};
    for (const QuantisedArray& q : all) quantize(s, {.q = q.operand(), .x_RC = x.tensor()});
    all.emplace_back(Shape{200, padded_rows(300, 3)}, DType::f4_e2m1, ScaleLayout::nv_blocks, true);
    quantize(s, {.q = all.back().operand(),
                 .x_RC = x.tensor(),
                 .offsets_e1 = offsets.tensor(),
                 .hadamard = true,
                 .stochastic = {.draw_2 = draw.tensor(), .seed = 3, .key = 5, .first_group = 2, .num_groups = 9}});
    if (first.empty()) first = all;
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(all[i] == first[i]) << i << " " << what;
  };
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    Stream s(DeviceKind::cpu, pool);
    compare(s, fmt::format("with {} threads", threads));
  }
  testing::on_each_device([&](Stream& s) { compare(s, std::string(name_of(s.device()))); });
}

TEST(Quantize, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 6}, DType::f32), ids({4, 6}, DType::i32), offsets = Array::of_ints({3}, {0, 2, 4});
  QuantisedArray q({4, 6}, DType::f8_e4m3, ScaleLayout::row_blocks),
      other({4, 8}, DType::f8_e4m3, ScaleLayout::row_blocks),
      t({6, 128}, DType::f8_e4m3, ScaleLayout::row_blocks, true);
  const auto error = [&](const Quantize& a) { return testing::error_of([&] { quantize(s, a); }); };
  EXPECT_EQ(error({.q = q.operand(), .x_RC = ids.tensor()}),
            "quantize: x must be an f32 or bf16 matrix, or one for each expert; got i32[4, 6]");
  EXPECT_EQ(error({.q = other.operand(), .x_RC = x.tensor()}),
            "quantize: q must be a copy of x f32[4, 6]; got f8_e4m3[4, 8] with row_blocks scales f32[4, 1]");
  EXPECT_EQ(error({.q = t.operand(), .x_RC = x.tensor(), .offsets_e1 = offsets.tensor()}),
            "quantize: q of 4 rows of 2 experts must be a copy of [256, 6]; got transposed f8_e4m3[6, 128] with "
            "row_blocks scales f32[6, 1]");
  EXPECT_EQ(error({.q = q.operand(), .x_RC = x.tensor(), .hadamard = true}),
            "quantize: square blocks of 16, the Hadamard transform and stochastic rounding are of nv_blocks; got "
            "f8_e4m3[4, 6] with row_blocks scales f32[4, 1]");
  EXPECT_EQ(testing::error_of([&] { transpose_quantized(s, {.out = t.operand(), .in = q.operand()}); }),
            "transpose_quantized: expected an operand and its transpose, of one format; got transposed f8_e4m3[6, 128] "
            "with row_blocks scales f32[6, 1] and f8_e4m3[4, 6] with row_blocks scales f32[4, 1]");
  QuantisedArray rows_t({6, 4}, DType::f8_e4m3, ScaleLayout::row_blocks, true);
  EXPECT_EQ(testing::error_of([&] { transpose_quantized(s, {.out = rows_t.operand(), .in = q.operand()}); }),
            "transpose_quantized: only square_blocks and per_tensor scales have an exact transpose; got f8_e4m3[4, 6] "
            "with row_blocks scales f32[4, 1]; quantize both from the same values instead");
}

TEST(Quantize, NullDeviceCounts) {
  const auto null = [](Shape shape, DType dtype) { return testing::null_tensor(shape, dtype); };
  const Operand q(null({4, 256}, DType::f8_e4m3), null({4, 2}, DType::f32), ScaleLayout::row_blocks);
  const Cost cost = testing::cost_on_null([&](Stream& s) {
    quantize(s, {.q = q, .x_RC = null({4, 256}, DType::bf16)});
    dequantize(s, {.x = null({4, 256}, DType::bf16), .q = q});
  });
  EXPECT_EQ(cost.flops, 3 * 4 * 256);
  EXPECT_EQ(cost.bytes, 2 * (4 * 256 * 3 + 32));
}

}  // namespace
}  // namespace moebius
