// Results of searches, sweeps and fits as JSON. docs/reference/commands.md has their keys, and a test compares both.
#pragma once

#include <nlohmann/json.hpp>

#include "plan/fit.h"
#include "plan/search.h"
#include "plan/sweep.h"

namespace moebius {

// The keys of plan_json() for the best layout, and with `layouts` for each.
nlohmann::ordered_json search_json(const SearchResult& result, const PlanMachine& machine, const Assumptions& assume);
nlohmann::ordered_json sweep_json(const Sweep& sweep);
nlohmann::ordered_json fit_json(const FitResult& result);

}  // namespace moebius
