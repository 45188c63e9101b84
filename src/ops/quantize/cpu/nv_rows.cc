#include "ops/quantize/nv_rows.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/cpu/vector.h"
#include "ops/quantize/nv_rows_math.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 4;  // row blocks of a task

// A row block: calls fn(v, first column) for each block of 16 numbers in it, and writes them back with `store`. With
// hadamard v has 16 rows of one column, else 16 columns of a row.
template <class T>
class Blocks {
 public:
  Blocks(const NvView& a, int64_t i) : a_(a), block_(nv_row_block(a, i)) {
    for (int j = 0; j < block_.count; ++j) {
      rows_[j] = nv_row_at(a, block_.begin + j);
      x_[j] = static_cast<const T*>(a.x) + nv_row_of_x(a, rows_[j]) * a.C;
    }
  }
  bool is_empty() const { return block_.count == 0; }
  int64_t group() const { return block_.group; }
  int64_t first_row() const { return rows_[0]; }
  int64_t num_blocks() const { return a_.hadamard ? a_.C : div_ceil(a_.C, int64_t{kNvBlock}); }

  void load(float* v, int64_t b) const {
    std::fill_n(v, kNvBlock, 0.0f);
    if (a_.hadamard) {
      for (int j = 0; j < block_.count; ++j) v[j] = to_f32(x_[j][b]);
      return hadamard(v);
    }
    const int64_t n = std::min<int64_t>(kNvBlock, a_.C - b * kNvBlock);
    for (int64_t j = 0; j < n; ++j) v[j] = to_f32(x_[0][b * kNvBlock + j]);
  }
  void store(T* y, float* v, int64_t b) const {
    if (a_.hadamard) {
      undo_hadamard(v);
      for (int j = 0; j < block_.count; ++j) y[rows_[j] * a_.C + b] = from_f32<T>(v[j]);
      return;
    }
    const int64_t n = std::min<int64_t>(kNvBlock, a_.C - b * kNvBlock);
    for (int64_t j = 0; j < n; ++j) y[rows_[0] * a_.C + b * kNvBlock + j] = from_f32<T>(v[j]);
  }

 private:
  const NvView& a_;
  NvRowBlock block_;
  int64_t rows_[kNvBlock] = {};
  const T* x_[kNvBlock] = {};
};

uint32_t largest_of_ranks(const NvRound& a, int64_t batch) {
  uint32_t m = 0;
  for (int64_t w = 0; w < a.magnitude_WB.dim(0); ++w)
    m = std::max(
        m, static_cast<uint32_t>(a.magnitude_WB.ptr<int32_t>()[w * a.magnitude_WB.dim(1) + a.first_batch + batch]));
  return m;
}

class Rounder {
 public:
  explicit Rounder(const NvRound& a)
      : a_(a),
        view_(view_of(a.of, a.draws.draw_2)),
        columns_(a.draws.columns.count > 0 ? a.draws.columns.count : view_.C),
        counts_(!a.stats_5.empty()) {
    for (int64_t m = 0; m < view_.num_batches; ++m) tensor_bits_.push_back(largest_of_ranks(a, m));
    if (a.draws_elements)
      rng_.emplace(a.draws.seed, RngSite::rounding, static_cast<uint64_t>(view_.draw[0]), a.draws.key);
  }

  template <class T>
  NvStats run(int64_t i) const {
    const Blocks<T> blocks(view_, i);
    NvStats stats;
    if (blocks.is_empty()) return stats;
    const int64_t row = blocks.first_row();
    const uint32_t tensor_bits = tensor_bits_[static_cast<size_t>(nv_batch(view_, row))];
    const NvDrawRow draw{.token = nv_token(view_, row),
                         .expert = a_.draws.first_expert + blocks.group() / a_.draws.groups_per_expert,
                         .num_experts = a_.draws.num_experts,
                         .columns = columns_};
    for (int64_t b = 0; b < blocks.num_blocks(); ++b) {
      float v[kNvBlock];
      blocks.load(v, b);
      const NvBlockScale scale = nv_scale_of_block(nv_largest_bits(v), tensor_bits);
      for (int k = 0; k < kNvBlock; ++k) {
        const float x = v[k];
        v[k] = nv_value(element(draw, b, k, x * scale.inverse), scale);
        if (counts_) nv_count(stats, x, v[k], scale);
      }
      blocks.store(a_.y_RC.ptr<T>(), v, b);
    }
    return stats;
  }
  int64_t row_blocks() const { return view_.row_blocks(); }

 private:
  // The element for x, number k of block b.
  uint8_t element(const NvDrawRow& draw, int64_t b, int k, float x) const {
    if (!rng_) return to_f4_e2m1(x);
    const bool down = view_.hadamard;
    const int64_t column = whole_column(a_.draws.columns, down ? b : b * kNvBlock + k);
    return draw_f4_e2m1(x, rng_->uniform(draw.index(down ? k : 0, column)));
  }

  const NvRound& a_;
  NvView view_;
  int64_t columns_;
  bool counts_;
  std::vector<uint32_t> tensor_bits_;
  std::optional<Rng> rng_;
};

struct NvCounts {
  int64_t elements = 0, saturated = 0, zeroed = 0;
  NvStats scales;
  void add(const NvStats& b) {
    elements += b.elements;
    saturated += b.saturated;
    zeroed += b.zeroed;
    scales.add(b);
  }
  void add_to(double* to) const {
    to[0] += static_cast<double>(elements);
    to[1] += static_cast<double>(saturated);
    to[2] += static_cast<double>(zeroed);
    if (scales.largest == 0) return;
    to[3] = to[3] == 0 ? scales.smallest : std::min<double>(to[3], scales.smallest);
    to[4] = std::max<double>(to[4], scales.largest);
  }
};

}  // namespace

void nv_magnitudes(Stream& s, const NvMagnitudes& a) {
  const NvView view = view_of(a.of, a.draw_2);
  std::vector<std::atomic<uint32_t>> largest(static_cast<size_t>(view.num_batches));
  with_float_type(a.of.x_NC.dtype, [&]<class T>(T) {
    parallel_rows(s.pool(), view.row_blocks(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Blocks<T> blocks(view, i);
        if (blocks.is_empty()) continue;
        uint32_t here = 0;
        for (int64_t b = 0; b < blocks.num_blocks(); ++b) {
          float v[kNvBlock];
          blocks.load(v, b);
          here = std::max(here, nv_largest_bits(v));
        }
        std::atomic<uint32_t>& all = largest[static_cast<size_t>(nv_batch(view, blocks.first_row()))];
        for (uint32_t old = all.load(); old < here && !all.compare_exchange_weak(old, here);) {
        }
      }
    });
  });
  std::copy(largest.begin(), largest.end(), a.bits_M.ptr<int32_t>());
}

void nv_round(Stream& s, const NvRound& a) {
  const Rounder rounder(a);
  std::mutex mutex;
  NvCounts all;
  with_float_type(a.of.x_NC.dtype, [&]<class T>(T) {
    parallel_rows(s.pool(), rounder.row_blocks(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const NvStats stats = rounder.run<T>(i);
        if (a.stats_5.empty()) continue;
        const std::scoped_lock lock(mutex);
        all.add(stats);
      }
    });
  });
  if (!a.stats_5.empty()) all.add_to(a.stats_5.ptr<double>());
}

void nv_order(Stream& s, const NvOrder& a) {
  const auto* offsets = a.offsets_e1.ptr<int32_t>();
  auto *order = a.order_R.ptr<int32_t>(), *of_batches = a.offsets_of_batches.ptr<int32_t>();
  const int64_t num_experts = a.offsets_e1.numel() - 1, M = a.num_batches;
  const auto token = [&](int32_t row) {
    const int64_t from = a.source_R.empty() ? row : a.source_R.ptr<int32_t>()[row];
    return a.index_N.ptr<int32_t>()[from];
  };
  const auto batch = [&](int32_t row) { return nv_batch_of_token(token(row), a.batch_tokens, M); };
  parallel_rows(s.pool(), num_experts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      for (int32_t r = offsets[e]; r < offsets[e + 1]; ++r) order[r] = r;
      std::stable_sort(order + offsets[e], order + offsets[e + 1], [&](int32_t p, int32_t q) {
        return std::pair(batch(p), token(p)) < std::pair(batch(q), token(q));
      });
      for (int64_t m = 0; m < M; ++m)
        of_batches[e * M + m] = static_cast<int32_t>(
            std::partition_point(order + offsets[e], order + offsets[e + 1], [&](int32_t r) { return batch(r) < m; }) -
            order);
    }
  });
  of_batches[num_experts * M] = offsets[num_experts];
}

}  // namespace moebius::cpu
