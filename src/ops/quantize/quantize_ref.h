// The definition of quantize, in double: for each block its scale, and for each element the nearest
// number of the format.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

// A format of elements: the numbers of codes 0, 1, ..., max_code, which grow. Even codes win ties.
struct Format {
  int exponent_bits, mantissa_bits, max_code;
  double value(int code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1, exponent = code >> mantissa_bits;
    const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }
  double max() const { return value(max_code); }
  double nearest(double x) const {
    const double magnitude = std::fabs(x);
    int low = 0;
    while (low < max_code && value(low + 1) <= magnitude) ++low;
    if (low < max_code) {
      const double below = magnitude - value(low), above = value(low + 1) - magnitude;
      if (above < below || (above == below && low % 2 == 1)) ++low;
    }
    return std::copysign(value(low), x);
  }
};
inline constexpr Format kE4m3{4, 3, 0x7e}, kE5m2{5, 2, 0x7b}, kE2m1{2, 1, 7};

// The smallest power of two, of at least 2^-127, with m <= max * scale; 1 for m = 0.
inline double power_of_two_scale(double m, double max) {
  if (m == 0) return 1;
  double scale = 0x1p-127;
  while (m > max * scale) scale *= 2;
  return scale;
}

// x [rows, cols] in blocks of block_rows x block_cols.
struct Blocks {
  int64_t rows, cols, block_rows, block_cols;

  template <class F>
  void for_each(F fn) const {  // fn(first row, first column, end row, end column)
    for (int64_t i = 0; i < rows; i += block_rows) {
      for (int64_t j = 0; j < cols; j += block_cols)
        fn(i, j, std::min(rows, i + block_rows), std::min(cols, j + block_cols));
    }
  }
};

// The numbers that quantised elements stand for. scale(m) is the scale of a block whose largest
// magnitude is m, and divide(v, scale) the number that is rounded.
template <class Scale, class Divide>
std::vector<double> quantised_values(const std::vector<double>& x, const Blocks& blocks, const Format& format,
                                     Scale scale, Divide divide) {
  std::vector<double> y(x.size());
  blocks.for_each([&](int64_t i0, int64_t j0, int64_t i1, int64_t j1) {
    double m = 0;
    for (int64_t i = i0; i < i1; ++i) {
      for (int64_t j = j0; j < j1; ++j) m = std::max(m, std::fabs(x[i * blocks.cols + j]));
    }
    const double s = scale(m);
    for (int64_t i = i0; i < i1; ++i) {
      for (int64_t j = j0; j < j1; ++j) {
        const double v = x[i * blocks.cols + j];
        y[i * blocks.cols + j] = s * format.nearest(divide(v, s));
      }
    }
  });
  return y;
}

}  // namespace moebius::ref
