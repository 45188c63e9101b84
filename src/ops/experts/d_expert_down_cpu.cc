// The backward of expert_down through the gated activation, fused: g never leaves the tile it is computed in.
#include <cstring>

#include "ops/backends_moe.h"
#include "ops/cpu/vector.h"
#include "ops/experts/experts_cpu.h"

namespace moebius {
namespace cpu {
namespace {

RowProduct product_of(const DExpertDown& a) { return {a.dout_TD.dtype, a.dout_TD.dim(1), a.sa_RF.dim(1), kPanelCols}; }

int64_t partial_bytes(const DExpertDown& a, const RowProduct& p) { return a.dweight_R.numel() * p.tasks_across * 4; }

// n <= 32 columns of one row.
template <class T>
struct RowPart {
  T *dh_gate, *dh_up, *sa;  // out
  const T *h_gate, *h_up;   // in
  const float* g;
  float weight;
  int64_t n;
};

// Gives <g, a> of the part. With s = sigmoid(gate): a = gate s up,  da/dgate = up s (1 + gate (1 - s)),  da/dup = gate
// s.
template <class T>
float backward_part(const RowPart<T>& row) {
  T gate[kPanelCols] = {}, up[kPanelCols] = {}, dgate[kPanelCols], dup[kPanelCols], sa[kPanelCols];
  copy_first<kPanelCols>(gate, row.h_gate, row.n);
  copy_first<kPanelCols>(up, row.h_up, row.n);
  float product[kPanelCols];
  for (int64_t i = 0; i < kPanelCols; ++i) {
    const float x = to_f32(gate[i]), u = to_f32(up[i]), s = sigmoid_f32(x);
    const float a = to_f32(from_f32<T>(x * s * u));  // as expert_up rounded it
    const float da = row.weight * row.g[i];
    product[i] = row.g[i] * a;
    dgate[i] = from_f32<T>(da * u * s * (1.0f + x * (1.0f - s)));
    dup[i] = from_f32<T>(da * x * s);
    sa[i] = from_f32<T>(row.weight * a);
  }
  copy_first<kPanelCols>(row.dh_gate, dgate, row.n);
  copy_first<kPanelCols>(row.dh_up, dup, row.n);
  copy_first<kPanelCols>(row.sa, sa, row.n);
  for (int64_t width = kPanelCols / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) product[i] += product[i + width];
  }
  return product[0];
}

template <class T>
void d_down_rows(const DExpertDown& a, const RowProduct& p, const RowRange& range, int64_t first_panel,
                 int64_t num_panels, float* partial, const PanelSpace& space) {
  const int64_t D = p.k, F = a.sa_RF.dim(1);
  const T* w2 = a.w2_eDF.ptr<T>() + range.expert * D * F;
  const auto pack_a = [&](int64_t first, int64_t num, uint32_t* to) {
    pack_rows(p.math.words, to, a.dout_TD.ptr<T>(), index_of(a.rows), range.begin + first, num, D);
  };
  const auto pack_b = [&](int64_t j, uint32_t* to) {
    const int64_t f = (first_panel + j) * kPanelCols;
    pack_across(p.math.words, to, kPanelCols, {w2 + f, nullptr, F}, D, F - f);
  };
  const auto fetch = [&](int64_t first, int64_t num, int64_t j) {
    const int64_t f = (first_panel + j) * kPanelCols, n = std::min(kPanelCols, F - f), r = range.begin + first;
    for (const T* h : {a.h_R2F.ptr<T>(), a.dh_R2F.ptr<T>()}) {
      prefetch_rows(h + r * 2 * F + f, num, 2 * F, n);
      prefetch_rows(h + r * 2 * F + F + f, num, 2 * F, n);
    }
    prefetch_rows(a.sa_RF.ptr<T>() + r * F + f, num, F, n);
  };
  const auto write = [&](int64_t first, int64_t num, int64_t j, const float* tile) {
    const int64_t f = (first_panel + j) * kPanelCols;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t r = range.begin + first + i;
      const T* h = a.h_R2F.ptr<T>() + r * 2 * F + f;
      T* dh = a.dh_R2F.ptr<T>() + r * 2 * F + f;
      const float sum = backward_part<T>({dh, dh + F, a.sa_RF.ptr<T>() + r * F + f, h, h + F, tile + i * kPanelCols,
                                          a.weight_R.ptr<float>()[r], std::min(kPanelCols, F - f)});
      partial[r] = j == 0 ? sum : partial[r] + sum;
    }
  };
  multiply_panels(p.math.by_strip, space, p.num_words(), range.end - range.begin, num_panels, pack_a, pack_b, fetch,
                  write);
}

}  // namespace

void d_expert_down(Stream& s, const DExpertDown& a) {
  const RowProduct p = product_of(a);
  const int64_t R = a.dweight_R.numel(), num_experts = a.w2_eDF.dim(0);
  auto* partial = static_cast<float*>(a.scratch.data);  // [tasks_across, R]: <g, a> over the columns of each
  char* spaces = static_cast<char*>(a.scratch.data) + partial_bytes(a, p);
  with_float_type(a.dout_TD.dtype, [&]<class T>(T) {
    for_each_row_task(s, p, a.rows, num_experts, spaces,
                      [&](const RowRange& range, int64_t first, int64_t num, int64_t across, const PanelSpace& space) {
                        d_down_rows<T>(a, p, range, first, num, partial + across * R, space);
                      });
  });
  float* dweight = a.dweight_R.ptr<float>();
  const int32_t* offsets = a.rows.offsets_e1.ptr<int32_t>();
  for (int64_t r = offsets[0]; r < offsets[num_experts]; ++r) {
    float sum = 0;
    for (int64_t across = 0; across < p.tasks_across; ++across) sum += partial[across * R + r];
    dweight[r] = sum;
  }
}

}  // namespace cpu

int64_t DExpertDown::scratch_bytes(const DExpertDown& a, int num_threads) {
  const cpu::RowProduct p = cpu::product_of(a);
  return cpu::partial_bytes(a, p) + p.scratch_bytes(num_threads);
}

}  // namespace moebius
