// A bias: one row, added to every row of a projection's output.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Bias {
 public:
  Bias(ParamTable& params, ParamSpec spec) : b_(params.declare(std::move(spec))) {}
  void forward(Step& step, Tensor y_TC) const;           // y[t,:] += b
  void backward_weight(Step& step, Tensor dy_TC) const;  // db += sum over t of dy[t,:]

 private:
  const Param& b_;  // [C]
};

}  // namespace moebius
