// expert_up, expert_down and d_expert_up: rows times the weights of their expert.
#include "ops/experts/cpu/experts.h"

#include "ops/cpu/few_rows.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"
#include "ops/experts/cpu/gated_activation.h"
#include "ops/experts/experts_backends.h"

namespace moebius {
namespace cpu {
namespace {

constexpr int64_t kHalf = kPanelCols / 2;  // a panel of expert_up: 16 gates, then the 16 ups that they gate

RowProduct product_of(const ExpertUp& a) { return {a.x_TD, a.a_RF.dim(1), kHalf}; }
RowProduct product_of(const ExpertDown& a) { return {a.a_RF, a.y_RD.dim(1), kPanelCols}; }
RowProduct product_of(const DExpertUp& a) { return {a.dh_R2F, a.dx_RD.dim(1), kPanelCols}; }

// Stores n columns from f on of a row of h and a, at most a register of them. bias: the gate's, F elements before
// up's bias; or null.
template <class T>
struct GatedRow {
  T *h, *a;
  const T* bias;
  int64_t F, n;
};
template <class T>
void write_gated(const GatedActivation& activation, const float* sum, const GatedRow<T>& row) {
  Lanes gate = load_lanes(sum), up = load_lanes(sum + kHalf);
  if (row.bias) {
    gate += load_lanes(row.bias, row.n);
    up += load_lanes(row.bias + row.F, row.n);
  }
  gate = round_lanes<T>(gate);
  up = round_lanes<T>(up);
  store_lanes(row.h, gate, row.n);
  store_lanes(row.h + row.F, up, row.n);
  store_lanes(row.a, Gated(activation, gate, up).value(), row.n);
}

// n <= kHalf columns.
template <class T>
void write_gated_half(const GatedActivation& activation, const float* sum, const GatedRow<T>& row) {
  for (int64_t at = 0; at < row.n; at += kNumLanes)
    write_gated<T>(
        activation, sum + at,
        {row.h + at, row.a + at, row.bias ? row.bias + at : nullptr, row.F, std::min(kNumLanes, row.n - at)});
}

template <class T>
void up_rows(const ExpertUp& a, const RowProduct& p, const RowRange& range, int64_t first_panel, int64_t num_panels,
             const PanelSpace& space) {
  const int64_t F = a.a_RF.dim(1);
  const T* b1 = a.b1_e2F.empty() ? nullptr : a.b1_e2F.ptr<T>() + range.expert * 2 * F;
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    pack_rows<T>(p, space, to, a.x_TD, index_of(a.rows), range.begin + first, num);
  };
  const auto pack_b = [&](uint32_t* to) {
    pack_lanes<T>(p, space, to, a.w1_e2FD, range.expert, num_panels, [&](int64_t j, int64_t i) {
      const int64_t f = (first_panel + j) * kHalf + i % kHalf;
      return f < F ? i / kHalf * F + f : -1;
    });
  };
  const auto write = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t f = (first_panel + j) * kHalf, n = std::min(kHalf, F - f);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t r = range.begin + first + i;
      write_gated_half<T>(a.activation, tile + i * kPanelCols,
                          {a.h_R2F.ptr<T>() + r * 2 * F + f, a.a_RF.ptr<T>() + r * F + f, b1 ? b1 + f : nullptr, F, n});
    }
  };
  multiply_panels(p.math.by_strip, space, p.counts(range.end - range.begin, num_panels), pack_a, pack_b, kNothingBefore,
                  write);
}

// Stores rows of n <= 32 sums, rounded. bias: 32 values.
constexpr float kNoBias[kPanelCols] = {};
template <class T>
void write_sums(const float* tile, int64_t num, T* out, int64_t ld, int64_t n, const float* bias = kNoBias) {
  for (int64_t i = 0; i < num; ++i, tile += kPanelCols, out += ld) {
    for (int64_t at = 0; at < n; at += kNumLanes)
      store_lanes(out + at, load_lanes(tile + at) + load_lanes(bias + at), std::min(kNumLanes, n - at));
  }
}

// Returns columns [d, d + 32) of an expert's bias, 0 where b2 does not have the column.
template <class T>
struct PanelBias {
  PanelBias(const ExpertDown& a, int64_t expert, int64_t d) {
    const int64_t C = a.b2_eC.empty() ? 0 : a.b2_eC.dim(1), first = a.b2_first - d;
    for (int64_t i = std::max<int64_t>(0, first); i < std::min(kPanelCols, first + C); ++i)
      columns[i] = to_f32(a.b2_eC.ptr<T>()[expert * C + i - first]);
  }
  float columns[kPanelCols] = {};
};

template <class T>
void down_rows(const ExpertDown& a, const RowProduct& p, const RowRange& range, int64_t first_panel, int64_t num_panels,
               const PanelSpace& space) {
  const int64_t D = a.y_RD.dim(1);
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    pack_rows<T>(p, space, to, a.a_RF, nullptr, range.begin + first, num);
  };
  const auto pack_b = [&](uint32_t* to) {
    pack_lanes<T>(p, space, to, a.w2_eDF, range.expert, num_panels, [&](int64_t j, int64_t i) {
      const int64_t d = (first_panel + j) * kPanelCols + i;
      return d < D ? d : -1;
    });
  };
  const auto write = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t d = (first_panel + j) * kPanelCols;
    write_sums(tile, num, a.y_RD.ptr<T>() + (range.begin + first) * D + d, D, std::min(kPanelCols, D - d),
               PanelBias<T>(a, range.expert, d).columns);
  };
  multiply_panels(p.math.by_strip, space, p.counts(range.end - range.begin, num_panels), pack_a, pack_b, kNothingBefore,
                  write);
}

template <class T>
void d_up_rows(const DExpertUp& a, const RowProduct& p, const RowRange& range, int64_t first_panel, int64_t num_panels,
               const PanelSpace& space) {
  const int64_t D = a.dx_RD.dim(1);
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    pack_rows<T>(p, space, to, a.dh_R2F, nullptr, range.begin + first, num);
  };
  const auto pack_b = [&](uint32_t* to) {
    pack_columns<T>(p, space, to, a.w1_e2FD, range.expert, first_panel, num_panels, D);
  };
  const auto write = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t d = (first_panel + j) * kPanelCols;
    write_sums(tile, num, a.dx_RD.ptr<T>() + (range.begin + first) * D + d, D, std::min(kPanelCols, D - d));
  };
  multiply_panels(p.math.by_strip, space, p.counts(range.end - range.begin, num_panels), pack_a, pack_b, kNothingBefore,
                  write);
}

// Packs the panels [first, first + num) of a task at once. If there is only one panel of rows, it packs them one by
// one, so that each is multiplied while it is still in the first-level cache.
template <class F>
void for_panels_at_once(const RowRange& range, int64_t first, int64_t num, F&& fn) {
  if (range.end - range.begin > kPanelRows) return fn(first, num);
  for (int64_t j = first; j < first + num; ++j) fn(j, 1);
}

// --- few rows: W is read in place -----------------------------------------------------------------------------------

constexpr int64_t kFewRowsTogether = kMaxFewRows;  // of an expert; more rows are processed in groups of this size

// Calls fn(x, first) for the rows of a range: packed rows, and the number of the first one.
template <class T, class F>
void for_few_rows(const RowProduct& p, const PanelSpace& space, const Operand& x, const int32_t* index,
                  const RowRange& range, F&& fn) {
  const FewRowsMath math = best_few_rows_math(x.data.dtype);
  MOEBIUS_ASSERT(packed_bytes(x.data.dtype, kFewRowsTogether, p.k, math) <= p.space.num_bytes);
  for (int64_t first = range.begin; first < range.end; first += kFewRowsTogether) {
    const int64_t num = std::min(kFewRowsTogether, range.end - first);
    const void* row[kFewRowsTogether];
    for (int64_t i = 0; i < num; ++i) row[i] = x.data.ptr<T>() + (index ? index[first + i] : first + i) * p.k;
    fn(pack_few_rows(x.data.dtype, space.b, row, num, p.k, math), first);
  }
}

// The panels are as in up_rows: 16 gates, then the 16 ups that they gate.
template <class T>
void up_few_rows(const ExpertUp& a, const RowProduct& p, const RowRange& range, int64_t first_panel, int64_t num_panels,
                 const PanelSpace& space) {
  const int64_t F = a.a_RF.dim(1);
  const T* w1 = a.w1_e2FD.data.ptr<T>() + range.expert * 2 * F * p.k;
  const T* b1 = a.b1_e2F.empty() ? nullptr : a.b1_e2F.ptr<T>() + range.expert * 2 * F;
  for_few_rows<T>(p, space, a.x_TD, index_of(a.rows), range, [&](const FewRows& x, int64_t first) {
    for (int64_t f = first_panel * kHalf; f < std::min(F, (first_panel + num_panels) * kHalf); f += kHalf) {
      const int64_t n = std::min(kHalf, F - f);
      float tile[kFewRowsTogether * kPanelCols] = {};
      for (const int64_t half : {0, 1})
        multiply_few_rows(tile + half * kHalf, kPanelCols, x, w1 + (half * F + f) * p.k, n, F - f - n);
      for (int64_t i = 0; i < x.num_rows; ++i)
        write_gated_half<T>(a.activation, tile + i * kPanelCols,
                            {a.h_R2F.ptr<T>() + (first + i) * 2 * F + f, a.a_RF.ptr<T>() + (first + i) * F + f,
                             b1 ? b1 + f : nullptr, F, n});
    }
  });
}

template <class T>
void down_few_rows(const ExpertDown& a, const RowProduct& p, const RowRange& range, int64_t first_panel,
                   int64_t num_panels, const PanelSpace& space) {
  const int64_t D = a.y_RD.dim(1);
  const T* w2 = a.w2_eDF.data.ptr<T>() + range.expert * D * p.k;
  for_few_rows<T>(p, space, a.a_RF, nullptr, range, [&](const FewRows& x, int64_t first) {
    for (int64_t d = first_panel * kPanelCols; d < std::min(D, (first_panel + num_panels) * kPanelCols);
         d += kPanelCols) {
      const int64_t n = std::min(kPanelCols, D - d);
      float tile[kFewRowsTogether * kPanelCols] = {};
      multiply_few_rows(tile, kPanelCols, x, w2 + d * p.k, n, D - d - n);
      write_sums(tile, x.num_rows, a.y_RD.ptr<T>() + first * D + d, D, n, PanelBias<T>(a, range.expert, d).columns);
    }
  });
}

// Returns whether the product is the one for few rows, which a flag requests; quantised operands have no such flag.
template <class Op>
bool has_few_rows(const Op& a, const Operand& x) {
  return a.few_rows && x.is_plain();
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) {
  const RowProduct p = product_of(a);
  with_float_type(a.a_RF.dtype, [&]<class T>(T) {
    for_each_row_task(s, p, RowRuns(a.rows, a.part, a.w1_e2FD.data.dim(0)), a.scratch.data,
                      [&](const RowRange& range, int64_t first, int64_t num, int64_t, const PanelSpace& space) {
                        if (has_few_rows(a, a.x_TD)) return up_few_rows<T>(a, p, range, first, num, space);
                        for_panels_at_once(range, first, num, [&](int64_t panel, int64_t count) {
                          up_rows<T>(a, p, range, panel, count, space);
                        });
                      });
  });
}

void expert_down(Stream& s, const ExpertDown& a) {
  const RowProduct p = product_of(a);
  with_float_type(a.y_RD.dtype, [&]<class T>(T) {
    for_each_row_task(s, p, RowRuns(a.rows, a.part, a.w2_eDF.data.dim(0)), a.scratch.data,
                      [&](const RowRange& range, int64_t first, int64_t num, int64_t, const PanelSpace& space) {
                        if (has_few_rows(a, a.a_RF)) return down_few_rows<T>(a, p, range, first, num, space);
                        for_panels_at_once(range, first, num, [&](int64_t panel, int64_t count) {
                          down_rows<T>(a, p, range, panel, count, space);
                        });
                      });
  });
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  const RowProduct p = product_of(a);
  with_float_type(a.dx_RD.dtype, [&]<class T>(T) {
    for_each_row_task(s, p, RowRuns(a.rows, a.part, a.w1_e2FD.data.dim(0)), a.scratch.data,
                      [&](const RowRange& range, int64_t first, int64_t num, int64_t, const PanelSpace& space) {
                        d_up_rows<T>(a, p, range, first, num, space);
                      });
  });
}

}  // namespace cpu

int64_t cpu::scratch_bytes(const ExpertUp& a, int num_threads) { return cpu::product_of(a).scratch_bytes(num_threads); }
int64_t cpu::scratch_bytes(const ExpertDown& a, int num_threads) {
  return cpu::product_of(a).scratch_bytes(num_threads);
}
int64_t cpu::scratch_bytes(const DExpertUp& a, int num_threads) {
  return cpu::product_of(a).scratch_bytes(num_threads);
}

}  // namespace moebius
