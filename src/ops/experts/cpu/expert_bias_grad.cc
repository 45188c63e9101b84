#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/experts/cpu/experts.h"
#include "ops/experts/experts_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kColumns = 64;  // of a task, which adds all rows of an expert in their order

template <class T>
void add_rows_of(const ExpertBiasGrad& a, int64_t e, int64_t first, int64_t num) {
  const int32_t* offsets = a.rows.offsets_e1.ptr<int32_t>();
  const int32_t* token = a.gather ? index_of(a.rows) : nullptr;
  float sum[kColumns] = {};
  for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
    const float weight = a.weight_R.empty() ? 1.0f : a.weight_R.ptr<float>()[r];
    const T* x = a.x_RM.ptr<T>() + (token ? token[r] : r) * a.x_RM.dim(1) + a.x_first + first;
#pragma omp simd
    for (int64_t n = 0; n < num; ++n) sum[n] += weight * to_f32(x[n]);
  }
  float* db = a.db_eN.ptr<float>() + e * a.db_eN.dim(1) + first;
  for (int64_t n = 0; n < num; ++n) db[n] += sum[n];
}

}  // namespace

void expert_bias_grad(Stream& s, const ExpertBiasGrad& a) {
  const int64_t N = a.db_eN.dim(1), blocks = div_ceil(N, kColumns);
  with_float_type(a.x_RM.dtype, [&]<class T>(T) {
    s.pool().run(a.db_eN.dim(0) * blocks, [&](int64_t task, int) {
      const int64_t first = task % blocks * kColumns;
      add_rows_of<T>(a, task / blocks, first, std::min(kColumns, N - first));
    });
  });
}

}  // namespace moebius::cpu
