// How tokens reach their experts and come back. A Route is all that the four calls share. Implementations differ in
// where experts live; what a layer computes does not.
#pragma once

#include "model/step.h"
#include "ops/experts/experts.h"
#include "ops/routing/routing.h"

namespace moebius {

// What the experts here work on: rows of `source`, read through rows.token.
struct Dispatched {
  Tensor source;  // [*, D]
  Rows rows;
  Tensor weight_R;  // f32, each row's weight in its token's sum
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  // Tokens to experts. Views may stand on the step stack: the caller's scope must include their use.
  virtual Dispatched dispatch(Step& step, Tensor x_TD, const Route& route) const = 0;
  // y[t] = sum over k of weight[t,k] * the row of pair (t,k).
  virtual void combine(Step& step, Tensor y_TD, Tensor y_RD, const Route& route) const = 0;
  // Gradients of the tokens' sums to the experts (the data path of dispatch).
  virtual Dispatched combine_bwd(Step& step, Tensor dy_TD, const Route& route) const = 0;
  // Row gradients back to tokens: dx[t] = sum over k of dx_row; and the weights' gradients back to pairs.
  virtual void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                            const Route& route) const = 0;
};

// Every expert lives here: nothing is moved, rows are read through the index.
class LocalDispatcher final : public Dispatcher {
 public:
  Dispatched dispatch(Step& step, Tensor x_TD, const Route& route) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, const Route& route) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, const Route& route) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    const Route& route) const override;
};

}  // namespace moebius
