#include "plan/search/phase_difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

namespace moebius {
namespace {

// Returns the phases to compare. Both passes are one phase, since the slowest rank may or may not have the loss.
std::map<std::string, double> compared_phases(const Prediction& p) {
  std::map<std::string, double> phases;
  for (const auto& [name, seconds] : p.phases)
    phases[name == "forward" || name == "backward" ? "compute" : name] += seconds;
  return phases;
}

}  // namespace

std::string phase_difference(const Prediction& p, const Prediction& best) {
  std::vector<std::pair<double, std::string>> longer;
  std::map<std::string, double> mine = compared_phases(p), of_best = compared_phases(best);
  for (const auto& [name, seconds] : mine) {
    const double more = (seconds - of_best[name]) / best.step_s;
    if (std::abs(more) >= 0.002) longer.emplace_back(more, name);
  }
  std::sort(longer.rbegin(), longer.rend());
  std::string text = fmt::format("{:+.1f} %", 100 * (p.step_s / best.step_s - 1));
  for (const auto& [more, name] : longer) text += fmt::format(", {} {:+.1f}", name, 100 * more);
  return text;
}

}  // namespace moebius
