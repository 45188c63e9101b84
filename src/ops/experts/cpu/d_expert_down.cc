// The backward of expert_down, fused with that of the gated activation: g exists only in the tile in which
// it is computed.
#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"
#include "ops/experts/cpu/experts.h"
#include "ops/experts/cpu/gated_activation.h"
#include "ops/experts/experts_backends.h"

namespace moebius {
namespace cpu {
namespace {

RowProduct product_of(const DExpertDown& a) { return {a.dout_TD, a.sa_RF.dim(1), kPanelCols}; }

int64_t partial_bytes(const DExpertDown& a, const RowProduct& p) { return a.dweight_R.numel() * p.tasks_across * 4; }

// Processes n columns of one row.
template <class T>
struct RowPart {
  T *dh_gate, *dh_up, *sa;  // out
  const T *h_gate, *h_up;   // in
  const float* g;
  float weight;
  int64_t n;
  const GatedActivation& activation;
};

// Returns <g, a> of the part; n <= kNumLanes.
template <class T>
Lanes backward_part(const RowPart<T>& row) {
  const Lanes gate = load_lanes(row.h_gate, row.n), up = load_lanes(row.h_up, row.n);
  const Lanes g = round_lanes<T>(load_lanes(row.g));
  const Gated gated(row.activation, gate, up);
  const Lanes da = row.weight * g, a = round_lanes<T>(gated.value());  // as expert_up rounded it
  store_lanes(row.dh_gate, da * gated.by_gate(), row.n);
  store_lanes(row.dh_up, da * gated.by_up(), row.n);
  store_lanes(row.sa, row.weight * a, row.n);
  return g * a;
}

// Processes n <= 32 columns, part by part.
template <class T>
Lanes backward_row(const RowPart<T>& row) {
  Lanes product = {};
  for (int64_t at = 0; at < row.n; at += kNumLanes) {
    const Lanes of_part =
        backward_part<T>({row.dh_gate + at, row.dh_up + at, row.sa + at, row.h_gate + at, row.h_up + at, row.g + at,
                          row.weight, std::min(kNumLanes, row.n - at), row.activation});
    product = at == 0 ? of_part : product + of_part;
  }
  return product;
}

template <class T>
void d_down_rows(const DExpertDown& a, const RowProduct& p, const RowRange& range, int64_t first_panel,
                 int64_t num_panels, float* partial, const PanelSpace& space) {
  const int64_t F = a.sa_RF.dim(1);
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    pack_rows<T>(p, space, to, a.dout_TD, index_of(a.rows), range.begin + first, num);
  };
  const auto pack_b = [&](uint32_t* to) {
    pack_columns<T>(p, space, to, a.w2_eDF, range.expert, first_panel, num_panels, F);
  };
  const auto fetch = [&](int64_t first, int64_t num, int64_t j) {
    const int64_t f = (first_panel + j) * kPanelCols, n = std::min(kPanelCols, F - f), r = range.begin + first;
    for (const T* h : {a.h_R2F.ptr<T>(), a.dh_R2F.ptr<T>()}) {
      prefetch_rows(h + r * 2 * F + f, num, 2 * F, n);
      prefetch_rows(h + r * 2 * F + F + f, num, 2 * F, n);
    }
    prefetch_rows(a.sa_RF.ptr<T>() + r * F + f, num, F, n);
  };
  Lanes product_of_row[kPanelRows];  // <g, a> by lane, over the columns processed
  const auto write = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t f = (first_panel + j) * kPanelCols;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t r = range.begin + first + i;
      const T* h = a.h_R2F.ptr<T>() + r * 2 * F + f;
      T* dh = a.dh_R2F.ptr<T>() + r * 2 * F + f;
      const Lanes product = backward_row<T>({dh, dh + F, a.sa_RF.ptr<T>() + r * F + f, h, h + F, tile + i * kPanelCols,
                                             a.weight_R.ptr<float>()[r], std::min(kPanelCols, F - f), a.activation});
      product_of_row[i] = j == 0 ? product : product_of_row[i] + product;
      if (j + 1 == num_panels) partial[r] = sum_lanes(product_of_row[i]);
    }
  };
  multiply_panels(p.math.by_strip, space, p.counts(range.end - range.begin, num_panels), pack_a, pack_b, fetch, write);
}

// Returns <x[first...], b2> over C columns of a row of x.
template <class T>
float bias_product(const Operand& x, int64_t row, int64_t first, const T* b2, int64_t C) {
  float sum = 0;
  if (x.is_plain()) {
    const T* from = x.data.ptr<T>() + row * x.data.dim(1) + first;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < C; ++c) sum += to_f32(from[c]) * to_f32(b2[c]);
    return sum;
  }
  for (int64_t c = 0; c < C; ++c) {
    float pair[2];  // from an even column, as dequantize_row requires
    const int64_t col = first + c;
    dequantize_row(pair, x, 0, row, col - col % 2, col % 2 + 1);
    sum += pair[col % 2] * to_f32(b2[c]);
  }
  return sum;
}

// dweight[r] += <dout[token[r],:], b2[e]> over the columns that b2 has.
template <class T>
void add_bias_products(Stream& s, const DExpertDown& a) {
  const int64_t C = a.b2_eC.dim(1);
  const int32_t* token = index_of(a.rows);
  const RowRuns runs(a.rows, a.part, a.b2_eC.dim(0));
  for (int64_t run = 0; run < runs.num; ++run) {
    const RowRange rows = runs.at(run);
    const T* b2 = a.b2_eC.ptr<T>() + rows.expert * C;
    parallel_rows(s.pool(), rows.end - rows.begin, 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = rows.begin + begin; r < rows.begin + end; ++r)
        a.dweight_R.ptr<float>()[r] += bias_product(a.dout_TD, token ? token[r] : r, a.b2_first, b2, C);
    });
  }
}

}  // namespace

void d_expert_down(Stream& s, const DExpertDown& a) {
  const RowProduct p = product_of(a);
  const int64_t R = a.dweight_R.numel();
  const RowRuns runs(a.rows, a.part, a.w2_eDF.data.dim(0));
  auto* partial = static_cast<float*>(a.scratch.data);  // [tasks_across, R]: <g, a> over the columns of each
  char* spaces = static_cast<char*>(a.scratch.data) + partial_bytes(a, p);
  with_float_type(a.sa_RF.dtype, [&]<class T>(T) {
    for_each_row_task(s, p, runs, spaces,
                      [&](const RowRange& range, int64_t first, int64_t num, int64_t across, const PanelSpace& space) {
                        d_down_rows<T>(a, p, range, first, num, partial + across * R, space);
                      });
  });
  float* dweight = a.dweight_R.ptr<float>();
  for (int64_t run = 0; run < runs.num; ++run) {
    for (int64_t r = runs.begins[run]; r < runs.ends[run]; ++r) {
      float sum = 0;
      for (int64_t across = 0; across < p.tasks_across; ++across) sum += partial[across * R + r];
      dweight[r] = sum;
    }
  }
  if (a.b2_eC.empty()) return;
  with_float_type(a.sa_RF.dtype, [&]<class T>(T) { add_bias_products<T>(s, a); });
}

}  // namespace cpu

int64_t cpu::scratch_bytes(const DExpertDown& a, int num_threads) {
  const cpu::RowProduct p = cpu::product_of(a);
  return cpu::partial_bytes(a, p) + p.scratch_bytes(num_threads);
}

}  // namespace moebius
