#include "ops/quantize/mx_rows.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/narrow_float.h"
#include "ops/cpu/vector.h"
#include "ops/quantize/mx_rows_math.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cpu {
namespace {

void round_block(float* v, int64_t n) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < n; ++j) largest = std::max(largest, std::bit_cast<uint32_t>(v[j]) & 0x7fffffffu);
  const MxScale scale = mx_scale(largest);
  for (int64_t j = 0; j < n; ++j) v[j] = mx_value(v[j], scale);
}

// Rounds n numbers that are `step` apart; number j is read at x[of(j)].
template <class T, class Of>
void round_numbers(T* y, const T* x, int64_t n, int64_t step, Of of) {
  std::array<float, kMxBlock> v;
  for (int64_t j = 0; j < n; ++j) v[j] = to_f32(x[of(j)]);
  round_block(v.data(), n);
  for (int64_t j = 0; j < n; ++j) y[j * step] = from_f32<T>(v[j]);
}

}  // namespace

void mx_round(Stream& s, const MxRound& a) {
  const int64_t C = a.x_NC.dim(1), R = a.y_RC.dim(0), e = a.offsets_e1.empty() ? 0 : a.offsets_e1.numel() - 1;
  const int32_t* offsets = e > 0 ? a.offsets_e1.ptr<int32_t>() : nullptr;
  const int32_t* token = a.token_R.empty() ? nullptr : a.token_R.ptr<int32_t>();
  const int64_t blocks = a.blocks_of_rows ? num_mx_row_blocks(R, e) : offsets ? offsets[e] : R;
  with_float_type(a.x_NC.dtype, [&]<class T>(T) {
    T* y = a.y_RC.ptr<T>();
    const T* x = a.x_NC.ptr<T>();
    s.pool().run(blocks, [&](int64_t index, int) {
      if (!a.blocks_of_rows) {
        for (int64_t col = index * C; col < (index + 1) * C; col += kMxBlock)
          round_numbers(y + col, x + col, std::min<int64_t>(kMxBlock, (index + 1) * C - col), 1,
                        [](int64_t j) { return j; });
        return;
      }
      const MxRows rows = mx_rows_of_block(offsets, static_cast<int>(e), R, index);
      for (int64_t col = 0; col < C; ++col)
        round_numbers(y + rows.begin * C + col, x + col, rows.count, C, [&](int64_t j) {
          const int64_t r = rows.begin + j;
          return (token ? token[r] : r) * C;
        });
    });
  });
}

}  // namespace moebius::cpu
