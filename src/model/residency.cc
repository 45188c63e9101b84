#include "model/residency.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {

void ResidencyOrder::ready(const ParamSpan& span) {
  uses_.resize(std::max(uses_.size(), span.end));
  for (size_t i = span.begin; i < span.end; ++i) ++uses_[i];
}

void ResidencyOrder::grad_ready(const ParamSpan& span) const {
  for (size_t i = span.begin; i < span.end; ++i) {
    const bool in_use = i < uses_.size() && uses_[i] > 0;
    MOEBIUS_ASSERT(in_use && "grad_ready comes between ready and release");
  }
}

void ResidencyOrder::release(const ParamSpan& span) {
  for (size_t i = span.begin; i < span.end; ++i) {
    const bool in_use = i < uses_.size() && uses_[i] > 0;
    MOEBIUS_ASSERT(in_use && "release comes after ready");
    --uses_[i];
  }
}

bool ResidencyOrder::is_idle() const {
  return std::all_of(uses_.begin(), uses_.end(), [](int uses) { return uses == 0; });
}

}  // namespace moebius
