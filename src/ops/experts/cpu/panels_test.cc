#include "ops/experts/cpu/panels.h"

#include <cmath>

#include "ops/cpu/testing.h"

namespace moebius::cpu {
namespace {

using testing::Array;
using testing::Values;

// Calls fn for each kind of products that this CPU has, not only for the one that it would choose.
template <class F>
void for_each_math(F&& fn) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    PanelMath maths[3];
    const int n = panel_maths(dtype, maths);
    ASSERT_GE(n, 1);
    for (int i = 0; i < n; ++i) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", way " + std::to_string(i));
      fn(dtype, maths[i]);
    }
  }
}

std::vector<uint32_t> poisoned_panel(Words words, int64_t k, int64_t num_lanes) {
  return std::vector<uint32_t>(num_words(words, k) * num_lanes + 32, 0x7fc07fc0u);  // NaN in both dtypes
}

struct Product {
  int64_t rows, cols, k;
};

Array transposed(Array x, int64_t rows, int64_t cols, DType dtype) {
  Values v(rows * cols);
  const Values from = x.values();
  for (int64_t i = 0; i < rows * cols; ++i) v[i % cols * rows + i / cols] = from[i];
  return Array::of({cols, rows}, dtype, v);
}

// tile = left right^T with both sides along k; the left packed by strip, or by word from its transpose.
std::vector<float> multiply(const PanelMath& math, Array& left, Array& right, const Product& p, bool by_word) {
  std::vector<uint32_t> a(strip_panel_words(num_words(math.words, p.k)), 0x7fc07fc0u);
  std::vector<uint32_t> b = poisoned_panel(math.words, p.k, kPanelCols);
  const void *rows[kPanelRows] = {}, *lanes[kPanelCols] = {};
  for (int64_t i = 0; i < p.rows; ++i) rows[i] = left.tensor().rows(i, i + 1).data;
  for (int64_t j = 0; j < p.cols; ++j) lanes[j] = right.tensor().rows(j, j + 1).data;
  pack_along(math.words, b.data(), lanes, p.k);
  if (by_word) {
    Array across = transposed(left, p.rows, p.k, left.tensor().dtype);
    pack_across(math.words, {a.data(), kPanelRows, 1, 0}, {across.tensor().data, nullptr, p.rows}, p.k, p.rows);
  } else {
    pack_strips(math.words, a.data(), rows, p.rows, p.k);
  }
  std::vector<float> tile(kPanelRows * kPanelCols, NAN);
  (by_word ? math.by_word : math.by_strip)(tile.data(), a.data(), b.data(), num_words(math.words, p.k), p.rows);
  return tile;
}

const std::vector<Product> kProducts = {{1, 1, 1},   {14, 32, 64},  {13, 31, 33}, {3, 5, 16}, {7, 17, 2},
                                        {2, 32, 15}, {14, 32, 700}, {4, 32, 256}, {5, 9, 513}};

TEST(Panels, ProductEqualsTheReference) {
  for_each_math([](DType dtype, const PanelMath& math) {
    for (const Product& p : kProducts) {
      Array left = Array::normal({p.rows, p.k}, dtype, 1), right = Array::normal({p.cols, p.k}, dtype, 2);
      const std::vector<float> tile = multiply(math, left, right, p, false);
      Values got, want, l = left.values(), r = right.values();
      for (int64_t i = 0; i < p.rows; ++i) {
        for (int64_t j = 0; j < kPanelCols; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < p.k && j < p.cols; ++k) sum += l[i * p.k + k] * r[j * p.k + k];
          want.push_back(sum);  // columns that do not exist are zeros
          got.push_back(tile[i * kPanelCols + j]);
        }
      }
      // Products of bf16 are exact in f32; a sum of k errs by eps32 of its magnitude at each step.
      testing::expect_close("tile", got, want, 0x1p-22 * std::sqrt(static_cast<double>(p.k)), 0);
      const std::vector<float> by_word = multiply(math, left, right, p, true);
      EXPECT_EQ(std::memcmp(by_word.data(), tile.data(), p.rows * kPanelCols * sizeof(float)), 0);
    }
  });
}

// The same matrix stored along k and across k packs to the same words, gathered or not.
TEST(Panels, BothStorageOrdersPackToTheSameWords) {
  for_each_math([](DType dtype, const PanelMath& math) {
    for (const Product& p : kProducts) {
      const int64_t width = p.cols == kPanelCols ? p.cols + 5 : p.cols;
      Array across = Array::normal({p.k, width}, dtype, 3), along = transposed(across, p.k, width, dtype);
      const Values from = across.values();
      Values reversed(width * p.k);
      std::vector<int32_t> index(p.k);
      for (int64_t i = 0; i < p.k * width; ++i) reversed[(p.k - 1 - i / width) * width + i % width] = from[i];
      for (int64_t i = 0; i < p.k; ++i) index[i] = static_cast<int32_t>(p.k - 1 - i);
      Array gathered = Array::of({p.k, width}, dtype, reversed);
      const void* lane[kPanelCols] = {};
      for (int64_t l = 0; l < p.cols; ++l) lane[l] = along.tensor().rows(l, l + 1).data;
      std::vector<uint32_t> want = poisoned_panel(math.words, p.k, kPanelCols), got = want, got_gathered = want;
      pack_along(math.words, want.data(), lane, p.k);
      pack_across(math.words, {got.data(), kPanelCols, 1, 0}, {across.tensor().data, nullptr, width}, p.k, width);
      pack_across(math.words, {got_gathered.data(), kPanelCols, 1, 0}, {gathered.tensor().data, index.data(), width},
                  p.k, width);
      for (std::vector<uint32_t>* panel : {&want, &got, &got_gathered})
        panel->resize(num_words(math.words, p.k) * kPanelCols);
      EXPECT_EQ(got, want);
      EXPECT_EQ(got_gathered, want);
    }
  });
}

TEST(Panels, RowsOfATileDoNotDependOnEachOther) {
  for_each_math([](DType dtype, const PanelMath& math) {
    Array left = Array::normal({14, 37}, dtype, 1), right = Array::normal({32, 37}, dtype, 2);
    const std::vector<float> all = multiply(math, left, right, {14, 32, 37}, false);
    for (int64_t rows = 1; rows < 14; ++rows) {
      const std::vector<float> few = multiply(math, left, right, {rows, 32, 37}, false);
      EXPECT_EQ(std::memcmp(few.data(), all.data(), rows * kPanelCols * sizeof(float)), 0) << rows << " rows";
    }
  });
}

}  // namespace
}  // namespace moebius::cpu
