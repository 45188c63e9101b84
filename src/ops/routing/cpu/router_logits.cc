// The gate's matrix products. They are thin (E is small) and must be f32 whatever the dtype of x. So they have kernels
// of their own, which read bf16 directly.
#include <algorithm>
#include <array>

#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/elementwise_backends.h"
#include "ops/routing/cpu/routing.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTile = 4;               // rows and columns of sums in registers
constexpr int64_t kWidth = 4 * kNumLanes;  // columns of a tile of weighted sums
constexpr int64_t kTokensPerTask = 32;

// y[i][j] = <x_i, w_j>; a sum has one order, whatever tile it is in. Rows past the end repeat the last one.
template <class X, class W>
void dot_tile(const X* const (&x)[kTile], const W* const (&w)[kTile], int64_t D, float (&y)[kTile][kTile]) {
  Lanes sum[kTile][kTile] = {};
  const auto add = [&](const Lanes(&xs)[kTile], const Lanes(&ws)[kTile]) {
    for (int64_t i = 0; i < kTile; ++i) {
      for (int64_t j = 0; j < kTile; ++j) sum[i][j] += xs[i] * ws[j];
    }
  };
  const int64_t whole = D / kNumLanes * kNumLanes;
  for (int64_t d = 0; d < whole; d += kNumLanes) {
    add({load_lanes(x[0] + d), load_lanes(x[1] + d), load_lanes(x[2] + d), load_lanes(x[3] + d)},
        {load_lanes(w[0] + d), load_lanes(w[1] + d), load_lanes(w[2] + d), load_lanes(w[3] + d)});
  }
  if (const int64_t n = D - whole; n > 0) {
    const int64_t d = whole;
    add({load_lanes(x[0] + d, n), load_lanes(x[1] + d, n), load_lanes(x[2] + d, n), load_lanes(x[3] + d, n)},
        {load_lanes(w[0] + d, n), load_lanes(w[1] + d, n), load_lanes(w[2] + d, n), load_lanes(w[3] + d, n)});
  }
  for (int64_t i = 0; i < kTile; ++i) {
    for (int64_t j = 0; j < kTile; ++j) y[i][j] = sum_lanes(sum[i][j]);
  }
}

template <class T>
void point_at(const T* (&rows)[kTile], const T* base, int64_t first, int64_t end, int64_t ld) {
  for (int64_t i = 0; i < kTile; ++i) rows[i] = base + std::min(first + i, end - 1) * ld;
}

template <class X, class W>
void logits_of(const RouterLogitsFwd& a, int64_t begin, int64_t end) {
  const int64_t D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  float* logits = a.logits_TE.ptr<float>();
  const float* bias = a.bias_E.empty() ? nullptr : a.bias_E.ptr<float>();
  const X* x[kTile];
  const W* w[kTile];
  float y[kTile][kTile];
  for (int64_t e = 0; e < E; e += kTile) {
    point_at(w, a.w_ED.ptr<W>(), e, E, D);
    for (int64_t t = begin; t < end; t += kTile) {
      point_at(x, a.x_TD.ptr<X>(), t, end, D);
      dot_tile(x, w, D, y);
      for (int64_t i = 0; i < std::min(kTile, end - t); ++i) {
        float* const row = logits + (t + i) * E + e;
        for (int64_t j = 0; j < std::min(kTile, E - e); ++j) row[j] = bias ? y[i][j] + bias[e + j] : y[i][j];
      }
    }
  }
}

// sum[i][:] = sum over k in order of c(i, k) row_k[0, width): rows of a thin product, 4 x 4 registers of sums.
struct Coefficients {
  const float* data;
  int64_t row_stride, k_stride;
};

template <class R>
std::array<Lanes, kTile> four_lanes(const R* row) {
  return {load_lanes(row), load_lanes(row + kNumLanes), load_lanes(row + 2 * kNumLanes),
          load_lanes(row + 3 * kNumLanes)};
}

template <class R>
void weighted_rows(const Coefficients& c, const R* rows, int64_t ld, int64_t num_k, int64_t width,
                   float (&out)[kTile][kWidth]) {
  Lanes sum[kTile][kTile] = {};
  const auto add = [&](int64_t k, const std::array<Lanes, kTile>& row) {
    for (int64_t i = 0; i < kTile; ++i) {
      const float weight = c.data[i * c.row_stride + k * c.k_stride];
      for (int64_t j = 0; j < kTile; ++j) sum[i][j] += weight * row[j];
    }
  };
  if (width == kWidth) {
    for (int64_t k = 0; k < num_k; ++k) {
      const R* row = rows + k * ld;
      add(k, four_lanes(row));
    }
  } else {
    R row[kWidth] = {};
    for (int64_t k = 0; k < num_k; ++k) {
      std::copy_n(rows + k * ld, width, row);
      add(k, four_lanes(row));
    }
  }
  std::memcpy(out, sum, sizeof sum);
}

// Adds to rows [t, t + num) of dx; num: kTile, or 1, which computes copies of the row.
template <class X, class W>
void add_dx_rows(const RouterLogitsBwd& a, int64_t t, int64_t num) {
  const int64_t D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  float sum[kTile][kWidth];
  for (int64_t d = 0; d < D; d += kWidth) {
    const int64_t width = std::min(kWidth, D - d);
    weighted_rows({a.dlogits_TE.ptr<float>() + t * E, num == kTile ? E : 0, 1}, a.w_ED.ptr<W>() + d, D, E, width, sum);
    for (int64_t r = 0; r < num; ++r) {
      X* dx = a.dx_TD.ptr<X>() + (t + r) * D + d;
      for (int64_t j = 0; j < width; ++j) dx[j] = from_f32<X>(to_f32(dx[j]) + sum[r][j]);
    }
  }
}

template <class X, class W>
void add_dx(const RouterLogitsBwd& a, int64_t begin, int64_t end) {
  int64_t t = begin;
  for (; t + kTile <= end; t += kTile) add_dx_rows<X, W>(a, t, kTile);
  for (; t < end; ++t) add_dx_rows<X, W>(a, t, 1);
}

// Computes the columns [d, d + width) of partial p.
template <class X>
void fill_partial(const RouterLogitsBwd& a, int64_t p, int64_t d, int64_t width) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), E = a.w_ED.dim(0);
  const int64_t first = p * kTokensPerPartial, num_tokens = std::min(kTokensPerPartial, T - first);
  float* partial = a.partial_PED.ptr<float>() + p * E * D;
  const X* x = a.x_TD.ptr<X>() + first * D + d;
  const float* dlogits = a.dlogits_TE.ptr<float>() + first * E;
  float sum[kTile][kWidth];
  for (int64_t e = 0; e < E; e += kTile) {
    const int64_t num = std::min(kTile, E - e), step = num == kTile ? kTile : 1;
    for (int64_t i = 0; i < num; i += step) {
      weighted_rows({dlogits + e + i, step == kTile ? 1 : 0, E}, x, D, num_tokens, width, sum);
      for (int64_t r = 0; r < step; ++r) std::copy_n(sum[r], width, partial + (e + i + r) * D + d);
    }
  }
}

void add_partials(const RouterLogitsBwd& a, int64_t begin, int64_t end) {
  const int64_t n = a.dw_ED.numel(), partials = a.partial_PED.dim(0);
  float* dw = a.dw_ED.ptr<float>();
  const float* partial = a.partial_PED.ptr<float>();
  for (int64_t i = begin; i < end; ++i) {
    float sum = 0;
    for (int64_t p = 0; p < partials; ++p) sum += partial[p * n + i];
    dw[i] += sum;
  }
}

// Calls fn(X{}, W{}) for the dtypes of x and w.
template <class F>
void with_types(const Tensor& x, const Tensor& w, F&& fn) {
  with_float_type(x.dtype, [&]<class X>(X xt) { with_float_type(w.dtype, [&]<class W>(W wt) { fn(xt, wt); }); });
}

}  // namespace

void router_logits_fwd(Stream& s, const RouterLogitsFwd& a) {
  with_types(a.x_TD, a.w_ED, [&]<class X, class W>(X, W) {
    parallel_rows(s.pool(), a.x_TD.dim(0), kTokensPerTask,
                  [&](int64_t begin, int64_t end) { logits_of<X, W>(a, begin, end); });
  });
}

void router_logits_bwd(Stream& s, const RouterLogitsBwd& a) {
  const int64_t T = a.x_TD.dim(0), D = a.x_TD.dim(1), stripes = div_ceil(D, kWidth);
  with_types(a.x_TD, a.w_ED, [&]<class X, class W>(X, W) {
    if (!a.dx_TD.empty()) {
      parallel_rows(s.pool(), T, kTokensPerTask, [&](int64_t begin, int64_t end) { add_dx<X, W>(a, begin, end); });
    }
    if (a.dw_ED.empty()) return;
    s.pool().run(a.partial_PED.dim(0) * stripes, [&](int64_t task, int) {
      const int64_t d = task % stripes * kWidth;
      fill_partial<X>(a, task / stripes, d, std::min(kWidth, D - d));
    });
  });
  parallel_rows(s.pool(), a.dw_ED.numel(), 4096, [&](int64_t begin, int64_t end) { add_partials(a, begin, end); });
  if (!a.dbias_E.empty()) cpu::sum_rows(s, {.sum_C = a.dbias_E, .x_TC = a.dlogits_TE, .scratch = a.scratch});
}

}  // namespace moebius::cpu
