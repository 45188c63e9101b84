// The gated activation of experts.h over a register of columns at once.
#pragma once

#include "ops/cpu/lanes.h"
#include "ops/experts/experts.h"

namespace moebius::cpu {

// With g and u within their limits and s = sigmoid(alpha g):  a = g s (u + shift),
//   da/dgate = (u + shift) s (1 + alpha g (1 - s)),  da/dup = g s,  each 0 where the limit cut it off.
class Gated {
 public:
  Gated(const GatedActivation& f, Lanes gate, Lanes up)
      : f_(f),
        gate_(gate),
        up_(up),
        g_(gate > f.limit ? Lanes{} + f.limit : gate),
        u_((up > f.limit ? Lanes{} + f.limit : (up < -f.limit ? Lanes{} - f.limit : up)) + f.shift),
        s_(sigmoid_lanes(f.alpha * g_)) {}
  Lanes value() const { return g_ * s_ * u_; }
  Lanes by_gate() const { return gate_ > f_.limit ? Lanes{} : u_ * s_ * (1.0f + f_.alpha * g_ * (1.0f - s_)); }
  Lanes by_up() const { return (up_ > f_.limit) | (up_ < -f_.limit) ? Lanes{} : g_ * s_; }

 private:
  const GatedActivation& f_;
  Lanes gate_, up_, g_, u_, s_;
};

}  // namespace moebius::cpu
