// Predictions as text for people and as JSON for scripts.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plan/predict.h"

namespace moebius {

std::string plan_text(const Prediction& p, const RunSpec& run, const PlanMachine& machine, const Assumptions& assume);
nlohmann::ordered_json plan_json(const Prediction& p, const PlanMachine& machine, const Assumptions& assume);
// "tp 2, cp 1, dp 8, pp 4, etp 1, ep 16, edp 1".
std::string mesh_text(const MeshShape& mesh);

}  // namespace moebius
