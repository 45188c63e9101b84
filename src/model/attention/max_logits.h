// The largest attention logit of each head in a step, and the matrices that QK-clip scales by it
// (ops/qk_clip/qk_clip.h).
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "model/params.h"

namespace moebius {

class MaxLogits {
 public:
  // A part of a parameter whose rows are those of heads, as in QkClip.
  struct Matrix {
    std::string part;
    int64_t head_rows = 1, root_rows = 0, whole_rows = 0;
    bool of_keys = false;
  };
  struct Layer {
    int64_t heads = 0;             // query heads of this rank after tp
    int64_t kv_group = 1;          // query heads that share a key head
    std::vector<Matrix> matrices;  // matrices that make queries and keys
    // f32 [heads, and zeros up to a multiple of kPadded]. Passes raise the logits from 0, so they are 0 where all
    // logits are negative.
    Tensor padded_P = {};
    Tensor max_H() const { return padded_P.rows(0, heads); }
  };
  // A layer takes whole f64 numbers of MemoryPlan::kAlign, so that sums after it begin where they would without it.
  static constexpr int64_t kPadded = 2 * MemoryPlan::kAlign;

  explicit MaxLogits(MemoryPlan& plan) : plan_(plan) {}  // which outlives it
  MaxLogits(const MaxLogits&) = delete;

  // Declares the logits of a layer, in Life::metrics, and returns Layer::padded_P.
  const Tensor* declare(const std::string& prefix, Layer layer);
  const std::deque<Layer>& layers() const { return layers_; }
  // Makes the logits of all layers one tensor, all(): before the plan is bound, after all layers were declared.
  void join();
  Tensor all() const;
  int64_t num_padded() const;   // elements of all()
  void clear(Stream& s) const;  // call it at the end of a step

 private:
  MemoryPlan& plan_;
  std::deque<Layer> layers_;  // a deque: attention and the plan refer to them
};

}  // namespace moebius
