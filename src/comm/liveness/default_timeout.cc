#include "comm/liveness/default_timeout.h"

#include <algorithm>
#include <cmath>

namespace moebius {

double DefaultTimeout::seconds(const Options& options) const {
  if (longest_step_s_ < 0) return options.before_steps_s;
  const double in_steps_s = std::ceil((options.beyond_step_s + longest_step_s_) * 10) / 10;
  return num_between_steps_ > 0 ? std::max(in_steps_s, options.before_steps_s) : in_steps_s;
}

void DefaultTimeout::step_done(double seconds) { longest_step_s_ = std::max(longest_step_s_, seconds); }

}  // namespace moebius
