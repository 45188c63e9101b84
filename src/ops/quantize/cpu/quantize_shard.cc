#include "ops/quantize/quantize_shard.h"

#include <algorithm>
#include <bit>

#include "ops/cpu/vector.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kBlock = 128;

// Weights as rows of blocks. A row of blocks is up to 128 rows of one matrix.
class BlockRows {
 public:
  explicit BlockRows(const Shape& whole)
      : rows_(whole[whole.rank() - 2]),
        cols_(whole[whole.rank() - 1]),
        down_(div_ceil(rows_, kBlock)),
        across_(div_ceil(cols_, kBlock)),
        matrices_(whole.rank() == 3 ? whole[0] : 1) {}
  int64_t count() const { return matrices_ * down_; }
  int64_t across() const { return across_; }

  // Calls fn(block, first element, end) for the pieces of rows that are in a row of blocks and in [begin, end).
  template <class F>
  void for_pieces(int64_t block_row, int64_t begin, int64_t end, F fn) const {
    const int64_t first_row = block_row / down_ * rows_ + block_row % down_ * kBlock;
    const int64_t end_row = block_row / down_ * rows_ + std::min(rows_, (block_row % down_ + 1) * kBlock);
    for (int64_t row = std::max(first_row, begin / cols_); row < end_row && row * cols_ < end; ++row) {
      for (int64_t j = 0; j < across_; ++j) {
        const int64_t from = std::max(begin, row * cols_ + j * kBlock),
                      to = std::min({end, row * cols_ + (j + 1) * kBlock, (row + 1) * cols_});
        if (from < to) fn(block_row * across_ + j, from, to);
      }
    }
  }

 private:
  int64_t rows_, cols_, down_, across_, matrices_;
};

template <class T>
float rounded(float x) {
  return to_f32(from_f32<T>(x));
}

}  // namespace

void block_magnitudes(Stream& s, const BlockMagnitudes& a) {
  const BlockRows blocks(a.whole);
  const float* x = a.x_n.ptr<float>();
  int32_t* bits = a.bits_B.ptr<int32_t>();
  with_float_type(a.rounded, [&]<class T>(T) {
    s.pool().run(blocks.count(), [&](int64_t block_row, int) {
      std::fill_n(bits + block_row * blocks.across(), blocks.across(), 0);
      blocks.for_pieces(block_row, a.first, a.first + a.x_n.numel(), [&](int64_t block, int64_t from, int64_t to) {
        uint32_t largest = static_cast<uint32_t>(bits[block]);
        for (int64_t i = from - a.first; i < to - a.first; ++i)
          largest = std::max(largest, std::bit_cast<uint32_t>(rounded<T>(x[i])) & 0x7fffffffu);
        bits[block] = static_cast<int32_t>(largest);
      });
    });
  });
}

void quantize_shard(Stream& s, const QuantizeShard& a) {
  const BlockRows blocks(a.whole);
  const int64_t B = a.bits_WB.dim(1);
  const float* x = a.x_n.ptr<float>();
  const int32_t* bits = a.bits_WB.ptr<int32_t>();
  auto* q = static_cast<uint8_t*>(a.q_n.data);
  float* scales = a.scales.ptr<float>();
  with_float_type(a.rounded, [&]<class T>(T) {
    s.pool().run(blocks.count(), [&](int64_t block_row, int) {
      for (int64_t b = block_row * blocks.across(); b < (block_row + 1) * blocks.across(); ++b) {
        int32_t largest = 0;
        for (int64_t r = 0; r < a.bits_WB.dim(0); ++r) largest = std::max(largest, bits[r * B + a.first_block + b]);
        scales[b] = power_of_two_scale(static_cast<uint32_t>(largest), top_exponent(DType::f8_e4m3));
      }
      blocks.for_pieces(block_row, a.first, a.first + a.x_n.numel(), [&](int64_t block, int64_t from, int64_t to) {
        const float inverse = 1.0f / scales[block];
        for (int64_t i = from - a.first; i < to - a.first; ++i) q[i] = to_f8_e4m3(rounded<T>(x[i]) * inverse).bits;
      });
    });
  });
}

}  // namespace moebius::cpu
