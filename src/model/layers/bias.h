// A bias: one row, added to every row of a projection's output; or some of its
// columns, where the output comes in parts.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Bias {
 public:
  Bias(ParamTable& params, ParamSpec spec) : b_(params.declare(std::move(spec))) {}
  // b[first : first + count], for the op whose result it is added to.
  Tensor columns(int64_t first, int64_t count) const;
  Tensor all() const { return b_.w; }
  // y[t,:] += b[first : first + C],  db[first : first + C] += sum over t of dy[t,:]
  void forward(Step& step, Tensor y_TC, int64_t first = 0) const;
  void backward_weight(Step& step, Tensor dy_TC, int64_t first = 0) const;

 private:
  const Param& b_;
};

}  // namespace moebius
