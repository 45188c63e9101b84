// Dropout of an adapter's input (ops/low_rank/low_rank_dropout.h), in training alone. Each matrix with an adapter has
// draws of its own, as the modules of PEFT do. All passes of a step drop the same elements: the draws are functions of
// the step and the token.
#pragma once

#include <vector>

#include "model/layer_context.h"
#include "model/layers/token_index.h"
#include "model/lora/adapter_params.h"
#include "ops/low_rank/low_rank_dropout.h"

namespace moebius {

class AdapterDropout {
 public:
  AdapterDropout() = default;
  // w: as it was declared, with the blocks of adapter_params().
  AdapterDropout(const LayerContext& c, const ParamSpec& w, const std::vector<AdapterBlock>& blocks);

  bool is_on(const Step& step) const { return rate_ > 0 && step.batch.training; }
  // Returns 1 / (1 - rate) if dropout is on.
  float scale(const Step& step) const { return is_on(step) ? static_cast<float>(1.0 / (1.0 - rate_)) : 1.0f; }

  // Returns the token of each of num_rows rows, i32 on the step stack: of this rank's rows, or of all tp ranks' rows.
  Tensor token_index(Step& step, int64_t num_rows) const { return tokens_.of_rows(step, num_rows); }

  // y[r, :] (+)= keep * x[i, :] of a block. i is token[r] with gather, else r. rows.token names the
  // token of each row in index.
  struct Apply {
    Tensor y, x;
    int64_t block = 0;
    Tensor index;
    Rows rows = {};
    bool gather = false, accumulate = false;
  };
  void apply(Step& step, const Apply& a) const;

 private:
  double rate_ = 0;
  DropoutDraw draw_;  // the draw without the fields that a step and a block set
  std::vector<uint32_t> matrices_;
  RowTokenIndex tokens_;
};

}  // namespace moebius
