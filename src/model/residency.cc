#include "model/residency.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {

void ResidencyOrder::ready(const ParamSpan& span) {
  uses_.resize(std::max(uses_.size(), span.end));
  for (size_t i = span.begin; i < span.end; ++i) ++uses_[i];
}

bool ResidencyOrder::are_in_use(const ParamSpan& span) const {
  for (size_t i = span.begin; i < span.end; ++i)
    if (i >= uses_.size() || uses_[i] == 0) return false;
  return true;
}

void ResidencyOrder::begin_gradient(const ParamSpan& span) const {
  MOEBIUS_ASSERT(are_in_use(span) && "begin_gradient comes between ready and release");
}

void ResidencyOrder::grad_ready(const ParamSpan& span) const {
  MOEBIUS_ASSERT(are_in_use(span) && "grad_ready comes between ready and release");
}

void ResidencyOrder::release(const ParamSpan& span) {
  MOEBIUS_ASSERT(are_in_use(span) && "release comes after ready");
  for (size_t i = span.begin; i < span.end; ++i) --uses_[i];
}

bool ResidencyOrder::is_idle() const {
  return std::all_of(uses_.begin(), uses_.end(), [](int uses) { return uses == 0; });
}

}  // namespace moebius
