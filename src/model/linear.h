// y = x W^T. The plain linear layer; sharded ones (column, row) come with tensor parallelism behind the same three
// calls.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Linear {
 public:
  // W is [out, in].
  Linear(ParamTable& params, ParamSpec spec) : w_(params.declare(std::move(spec))) {}
  void forward(Step& step, Tensor y, Tensor x, bool accumulate = false) const;           // y (+)= x W^T
  void backward_input(Step& step, Tensor dx, Tensor dy, bool accumulate = false) const;  // dx (+)= dy W
  void backward_weight(Step& step, Tensor dy, Tensor x) const;                           // dW += dy^T x
  const Param& param() const { return w_; }

 private:
  const Param& w_;
};

}  // namespace moebius
