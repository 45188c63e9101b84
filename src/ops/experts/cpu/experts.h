// The parts that the CPU files of experts share: the division of rows into tasks, and the packing of
// tensors into panels.
#pragma once

#include <algorithm>

#include "ops/experts/cpu/panels.h"
#include "ops/experts/experts.h"
#include "ops/quantize/cpu/dequantize.h"

namespace moebius::cpu {

// The maximum number of an expert's rows in a task. It is large enough that packing the weights pays off.
constexpr int64_t kRowsPerTask = 1024;

// Rows [begin, end) of one expert.
struct RowRange {
  int64_t expert, begin, end;
};

// The runs of rows that an op computes: those of its part, or one of each expert with all of its rows.
struct RowRuns {
  RowRuns(const Rows& rows, const RowPart& part, int64_t num_experts)
      : begins(rows.offsets_e1.ptr<int32_t>()), ends(begins + 1), num(num_experts) {
    if (part.runs_2G.empty()) return;
    num = part.runs_2G.dim(1);
    begins = part.runs_2G.ptr<int32_t>();
    ends = begins + num;
    of_expert = num / num_experts;
  }
  RowRange at(int64_t run) const { return {run / of_expert, begins[run], ends[run]}; }
  int64_t parts(int64_t run) const { return div_ceil(ends[run] - begins[run], kRowsPerTask); }
  // The number of ranges of all runs, each cut into equal parts, and the range of this index.
  int64_t num_ranges() const {
    int64_t n = 0;
    for (int64_t run = 0; run < num; ++run) n += parts(run);
    return n;
  }
  RowRange range(int64_t index) const {
    for (int64_t run = 0;; ++run) {
      const RowRange all = at(run);
      const int64_t rows = all.end - all.begin, n = parts(run);
      if (index < n) return {all.expert, all.begin + rows * index / n, all.begin + rows * (index + 1) / n};
      index -= n;
    }
  }

  const int32_t *begins, *ends;
  int64_t num, of_expert = 1;
};

// Returns the dtype that an operand is multiplied in.
inline DType math_dtype(const Operand& x) { return x.is_plain() ? x.data.dtype : DType::f32; }

// The division of a product of rows [num_rows, k] with num_cols columns into panels, and the panels of a task.
struct RowProduct {
  RowProduct(const Operand& x, int64_t num_cols, int64_t cols_per_panel)
      : math(best_panel_math(math_dtype(x))),
        k(x.data.dim(1)),
        num_panels(div_ceil(num_cols, cols_per_panel)),
        panels_per_task(panels_at_once(math.words, k, std::max<int64_t>(1, num_panels))),
        tasks_across(div_ceil(num_panels, panels_per_task)),
        space(math.words, k, 1, panels_per_task, !x.is_plain()) {}
  PanelCounts counts(int64_t num_rows, int64_t panels) const { return {num_words(math.words, k), num_rows, panels}; }
  int64_t scratch_bytes(int num_threads) const { return num_threads * space.num_bytes; }

  PanelMath math;
  int64_t k, num_panels, panels_per_task, tasks_across;
  PanelSpace space;  // scratch of one worker
};

// Calls fn(range, first_panel, num_panels, index of the task across, space) for all tasks.
template <class F>
void for_each_row_task(Stream& s, const RowProduct& p, const RowRuns& runs, void* scratch, F&& fn) {
  s.pool().run(runs.num_ranges() * p.tasks_across, [&](int64_t task, int worker) {
    const int64_t across = task % p.tasks_across, first = across * p.panels_per_task;
    fn(runs.range(task / p.tasks_across), first, std::min(p.panels_per_task, p.num_panels - first), across,
       PanelSpace(scratch, worker, p.space));
  });
}

// Returns row `row` of a matrix of k columns: in place, or dequantised in `slot`.
template <class T>
const void* row_of(const Operand& x, int64_t matrix, int64_t row, int64_t k, float* slot) {
  if (x.is_plain()) return x.data.ptr<T>() + (matrix * x.data.dim(x.data.shape.rank() - 2) + row) * k;
  dequantize_row(slot, x, matrix, row, 0, k);
  return slot;
}

// Packs rows [first, first + num) of x, gathered by index when there is one.
template <class T>
void pack_rows(const RowProduct& p, const PanelSpace& space, uint32_t* packed, const Operand& x, const int32_t* index,
               int64_t first, int64_t num) {
  const void* row[kPanelRows];
  for (int64_t i = 0; i < num; ++i)
    row[i] = row_of<T>(x, 0, index ? index[first + i] : first + i, p.k, space.values + i * p.k);
  pack_strips(p.math.words, packed, row, num, p.k);
}

// Packs num_panels panels whose lanes are rows of an expert's matrix w. lane_row(panel, lane) gives the
// row, or -1 for a lane of zeros.
template <class T, class LaneRow>
void pack_lanes(const RowProduct& p, const PanelSpace& space, uint32_t* packed, const Operand& w, int64_t expert,
                int64_t num_panels, LaneRow lane_row) {
  for (int64_t j = 0; j < num_panels; ++j, packed += space.b_stride) {
    const void* lane[kPanelCols] = {};
    for (int64_t i = 0; i < kPanelCols; ++i) {
      const int64_t row = lane_row(j, i);
      if (row >= 0) lane[i] = row_of<T>(w, expert, row, p.k, space.values + i * p.k);
    }
    pack_along(p.math.words, packed, lane, p.k);
  }
}

// Packs panels of the columns of an expert's matrix [k, num_cols], which are the rows of its transpose
// where that is quantised.
template <class T>
void pack_columns(const RowProduct& p, const PanelSpace& space, uint32_t* packed, const Operand& w, int64_t expert,
                  int64_t first_panel, int64_t num_panels, int64_t num_cols) {
  const int64_t first = first_panel * kPanelCols;
  if (!w.is_plain()) {
    return pack_lanes<T>(p, space, packed, w, expert, num_panels, [&](int64_t j, int64_t i) {
      const int64_t col = first + j * kPanelCols + i;
      return col < num_cols ? col : -1;
    });
  }
  const T* matrix = w.data.ptr<T>() + expert * p.k * num_cols;
  pack_across(p.math.words, {packed, kPanelCols, num_panels, space.b_stride}, {matrix + first, nullptr, num_cols}, p.k,
              num_cols - first);
}

inline const int32_t* index_of(const Rows& rows) {
  return rows.token_R.empty() ? nullptr : rows.token_R.ptr<int32_t>();
}

constexpr auto kNothingBefore = [](int64_t, int64_t, int64_t) {};

// Prefetches the lines of n elements in each of num rows, ld apart, that are about to be read and written. It saves 10
// % if an epilogue reads them; if it only writes them, the store buffer is as good.
template <class T>
void prefetch_rows(const T* x, int64_t num, int64_t ld, int64_t n) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < num; ++i, x += ld) {
    for (int64_t c = 0; c < n; c += kLine) __builtin_prefetch(x + c, 1);
  }
}

}  // namespace moebius::cpu
