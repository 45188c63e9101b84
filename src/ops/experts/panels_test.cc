#include "ops/experts/panels_cpu.h"

#include <cmath>

#include "ops/cpu/testing.h"

namespace moebius::cpu {
namespace {

using testing::Array;
using testing::Values;

// Every way this CPU can multiply, not only the one it would take.
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
  return std::vector<uint32_t>(num_words(words, k) * num_lanes + 2, 0x7fc07fc0u);  // NaN in both dtypes
}

struct Product {
  int64_t rows, cols, k;
};

// tile = left right^T with both sides along k.
std::vector<float> multiply_along(const PanelMath& math, Array& left, Array& right, const Product& p) {
  std::vector<uint32_t> a = poisoned_panel(math.words, p.k, kPanelRows),
                        b = poisoned_panel(math.words, p.k, kPanelCols);
  const void *lanes_a[kPanelRows] = {}, *lanes_b[kPanelCols] = {};
  for (int64_t i = 0; i < p.rows; ++i) lanes_a[i] = left.tensor().rows(i, i + 1).data;
  for (int64_t j = 0; j < p.cols; ++j) lanes_b[j] = right.tensor().rows(j, j + 1).data;
  pack_along(math.words, a.data(), kPanelRows, lanes_a, p.k);
  pack_along(math.words, b.data(), kPanelCols, lanes_b, p.k);
  std::vector<float> tile(kPanelRows * kPanelCols, NAN);
  math.kernel(tile.data(), a.data(), b.data(), num_words(math.words, p.k), p.rows);
  return tile;
}

const std::vector<Product> kProducts = {{1, 1, 1}, {14, 32, 64}, {13, 31, 33}, {3, 5, 16}, {7, 17, 2}, {2, 32, 15}};

TEST(Panels, ProductEqualsTheReference) {
  for_each_math([](DType dtype, const PanelMath& math) {
    for (const Product& p : kProducts) {
      Array left = Array::normal({p.rows, p.k}, dtype, 1), right = Array::normal({p.cols, p.k}, dtype, 2);
      const std::vector<float> tile = multiply_along(math, left, right, p);
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
    }
  });
}

// The same matrix stored along k and across k packs to the same words, gathered or not.
TEST(Panels, AlongAndAcrossPackTheSameWords) {
  for_each_math([](DType dtype, const PanelMath& math) {
    for (const int64_t num_lanes : {kPanelRows, kPanelCols}) {
      for (const Product& p : kProducts) {
        const int64_t valid = std::min(num_lanes, p.cols), width = valid == num_lanes ? valid + 5 : valid;
        Array across = Array::normal({p.k, width}, dtype, 3);
        Values transposed(width * p.k), shuffled(width * p.k);
        std::vector<int32_t> index(p.k);
        for (int64_t i = 0; i < p.k; ++i) {
          index[i] = static_cast<int32_t>(p.k - 1 - i);
          for (int64_t l = 0; l < width; ++l) {
            transposed[l * p.k + i] = across.values()[i * width + l];
            shuffled[index[i] * width + l] = across.values()[i * width + l];
          }
        }
        Array along = Array::of({width, p.k}, dtype, transposed), gathered = Array::of({p.k, width}, dtype, shuffled);
        const void* lane[kPanelCols] = {};
        for (int64_t l = 0; l < valid; ++l) lane[l] = along.tensor().rows(l, l + 1).data;
        std::vector<uint32_t> want = poisoned_panel(math.words, p.k, num_lanes), got = want, got_gathered = want;
        pack_along(math.words, want.data(), num_lanes, lane, p.k);
        pack_across(math.words, got.data(), num_lanes, {across.tensor().data, nullptr, width}, p.k, width);
        pack_across(math.words, got_gathered.data(), num_lanes, {gathered.tensor().data, index.data(), width}, p.k,
                    width);
        want.resize(want.size() - 2), got.resize(want.size()), got_gathered.resize(want.size());
        EXPECT_EQ(got, want);
        EXPECT_EQ(got_gathered, want);
      }
    }
  });
}

TEST(Panels, RowsOfATileDoNotDependOnEachOther) {
  for_each_math([](DType dtype, const PanelMath& math) {
    Array left = Array::normal({14, 37}, dtype, 1), right = Array::normal({32, 37}, dtype, 2);
    const std::vector<float> all = multiply_along(math, left, right, {14, 32, 37});
    for (int64_t rows = 1; rows < 14; ++rows) {
      const std::vector<float> few = multiply_along(math, left, right, {rows, 32, 37});
      EXPECT_EQ(std::memcmp(few.data(), all.data(), rows * kPanelCols * sizeof(float)), 0) << rows << " rows";
    }
  });
}

}  // namespace
}  // namespace moebius::cpu
