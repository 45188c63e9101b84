#include "ops/quantize/cpu/stats.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "ops/quantize/cpu/dequantize.h"
#include "ops/quantize/cpu/tile.h"
#include "ops/quantize/scales.h"

namespace moebius::cpu {
namespace {

struct Stats {
  int64_t elements = 0, saturated = 0, zeroed = 0;
  float smallest = 0, largest = 0;  // scales; 0: none yet

  void add_scale(float scale) {
    smallest = smallest == 0 ? scale : std::min(smallest, scale);
    largest = std::max(largest, scale);
  }
};

// The factor of the element of the tile at (i, j).
float scale_of(const Operand& q, const Tile& tile, int64_t i, int64_t j) {
  if (q.layout == ScaleLayout::per_tensor) return q.scales.ptr<float>()[tile.matrix];
  const BlockSize block = block_size(q.layout);
  const int rank = q.scales.shape.rank();
  const int64_t rows = q.scales.dim(rank - 2), cols = q.scales.dim(rank - 1);
  const int64_t at = (tile.matrix * rows + (tile.row + i) / block.rows) * cols + (tile.col + j) / block.cols;
  if (q.layout == ScaleLayout::mx_blocks) return to_f32(q.scales.ptr<e8m0>()[at]);
  if (q.layout != ScaleLayout::nv_blocks) return q.scales.ptr<float>()[at];
  return to_f32(q.scales.ptr<f8_e4m3>()[at]) * q.tensor_scale.ptr<float>()[tile.matrix];
}

Stats stats_of(const Quantize& a, const Tile& tile) {
  float x[kTile * kTile], values[kTile];
  load_tile(x, a, tile);
  const float most = largest_element(a.q.data.dtype);
  Stats f;
  for (int64_t i = 0; i < tile.rows; ++i) {
    dequantize_row(values, a.q, tile.matrix, tile.row + i, tile.col, tile.cols);
    for (int64_t j = 0; j < tile.cols; ++j) {
      const float magnitude = std::fabs(x[i * kTile + j]);
      if (magnitude == 0) continue;
      const float scale = scale_of(a.q, tile, i, j);
      ++f.elements;
      f.zeroed += values[j] == 0 ? 1 : 0;
      f.saturated += magnitude > most * scale ? 1 : 0;  // false for values that are not finite: their scale is a NaN
      if (scale > 0) f.add_scale(scale);
    }
  }
  return f;
}

}  // namespace

void add_stats(Stream& s, const Quantize& a) {
  const Tiles tiles(a);
  std::mutex mutex;
  Stats all;
  s.pool().run(tiles.count(), [&](int64_t index, int) {
    const Stats f = stats_of(a, tiles.tile(index));
    const std::scoped_lock lock(mutex);
    all.elements += f.elements;
    all.saturated += f.saturated;
    all.zeroed += f.zeroed;
    for (const float scale : {f.smallest, f.largest})
      if (scale > 0) all.add_scale(scale);
  });
  auto* to = a.stats_5.ptr<double>();
  to[0] += static_cast<double>(all.elements);
  to[1] += static_cast<double>(all.saturated);
  to[2] += static_cast<double>(all.zeroed);
  if (all.smallest > 0) to[3] = to[3] == 0 ? all.smallest : std::min<double>(to[3], all.smallest);
  to[4] = std::max<double>(to[4], all.largest);
}

}  // namespace moebius::cpu
