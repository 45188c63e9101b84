// The comparison of a layout with the best one, for the list of a search.
#pragma once

#include <string>

#include "plan/predict.h"

namespace moebius {

// Names the phases that take longer than in the best layout, the largest first.
std::string phase_difference(const Prediction& p, const Prediction& best);

}  // namespace moebius
