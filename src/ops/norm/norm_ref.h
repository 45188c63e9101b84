// The definition of rms_norm, in double. Roundings of the model's dtype are not part of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

struct RmsNorm {
  std::vector<double> y, rstd, sum;
};

// residual may be empty.
inline RmsNorm rms_norm_fwd(const std::vector<double>& x, const std::vector<double>& residual,
                            const std::vector<double>& w, double eps) {
  const size_t width = w.size(), rows = x.size() / width;
  RmsNorm out{std::vector<double>(x.size()), std::vector<double>(rows), x};
  for (size_t i = 0; i < residual.size(); ++i) out.sum[i] += residual[i];
  for (size_t t = 0; t < rows; ++t) {
    double squares = 0;
    for (size_t j = 0; j < width; ++j) squares += out.sum[t * width + j] * out.sum[t * width + j];
    out.rstd[t] = 1 / std::sqrt(squares / width + eps);
    for (size_t j = 0; j < width; ++j) out.y[t * width + j] = w[j] * out.sum[t * width + j] * out.rstd[t];
  }
  return out;
}

// dx and dw accumulate.
inline void rms_norm_bwd(std::vector<double>& dx, std::vector<double>& dw, const std::vector<double>& dy,
                         const std::vector<double>& x, const std::vector<double>& w, double eps) {
  const size_t width = w.size(), rows = x.size() / width;
  const std::vector<double> rstd = rms_norm_fwd(x, {}, w, eps).rstd;
  for (size_t t = 0; t < rows; ++t) {
    double mean = 0;
    for (size_t j = 0, i = t * width; j < width; ++j, ++i) mean += dy[i] * w[j] * x[i] * rstd[t] / width;
    for (size_t j = 0, i = t * width; j < width; ++j, ++i) {
      dx[i] += rstd[t] * (dy[i] * w[j] - x[i] * rstd[t] * mean);
      dw[j] += dy[i] * x[i] * rstd[t];
    }
  }
}

}  // namespace moebius::ref
