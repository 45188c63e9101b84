// Predictions as text for people and as JSON for scripts. docs/reference/commands.md has the keys of JSON, and a test
// compares both.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plan/fit.h"
#include "plan/predict.h"
#include "plan/search.h"
#include "plan/sweep.h"

namespace moebius {

std::string plan_text(const Prediction& p, const RunSpec& run, const PlanMachine& machine, const Assumptions& assume);
nlohmann::ordered_json plan_json(const Prediction& p, const PlanMachine& machine, const Assumptions& assume);
// Returns the keys of plan_json() for the best layout, and with `layouts` for each.
nlohmann::ordered_json search_json(const SearchResult& result, const PlanMachine& machine, const Assumptions& assume);
nlohmann::ordered_json sweep_json(const Sweep& sweep);
nlohmann::ordered_json fit_json(const FitResult& result);
// Returns a string such as "1.234 s", "12.34 ms".
std::string seconds_text(double s);
// Returns a rate with one decimal, and with four digits where it is small: "351.2", "0.01234".
std::string rate_text(double rate);
// Returns days or hours with three digits, and as a whole number from 100 on: "31864", "23.4", "0.19".
std::string quantity_text(double x);
// Returns a string such as "tp 2, cp 1, dp 8, pp 4, etp 1, ep 16, edp 1".
std::string mesh_text(const MeshShape& mesh);

}  // namespace moebius
