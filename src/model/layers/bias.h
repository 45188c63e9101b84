// A bias [C], added to every row of a projection's output. The output may have some of its columns only.
#pragma once

#include "model/params.h"
#include "model/step.h"

namespace moebius {

class Bias {
 public:
  Bias(ParamTable& params, ParamSpec spec) : b_(params.declare(std::move(spec))) {}
  // Returns b[first : first + count], for ops that add the bias themselves.
  Tensor columns(int64_t first, int64_t count) const;
  Tensor all() const { return b_.w; }
  // Returns the gradient (f32), for ops that add to it themselves; empty if the bias is frozen.
  Tensor gradient() const { return b_.has_grad ? b_.dw : Tensor{}; }
  // y[t,:] += b[first : first + C],  db[first : first + C] += sum over t of dy[t,:]
  void forward(Step& step, Tensor y_TC, int64_t first = 0) const;
  void backward_weight(Step& step, Tensor dy_TC, int64_t first = 0) const;

 private:
  const Param& b_;
};

}  // namespace moebius
