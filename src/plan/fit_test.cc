#include "plan/fit.h"

#include <cmath>

#include "plan/testing.h"

namespace moebius {
namespace {

// Links were measured by themselves, and runs of several kinds of work do not move them far from that.
TEST(Fits, LinksStayNearTheirMeasuredRates) {
  std::map<std::string, PlanMachine> measured;
  for (const char* name : {"h100", "h200", "gb200", "gb300"}) measured.emplace(name, machine(name));
  set_shares_before(kSource + "/docs/measurements/plan_rows.json", measured);
  for (auto& [name, before] : measured) {
    PlanMachine shipped = machine(name.c_str());
    for (const PlanSystem system : {PlanSystem::moebius, PlanSystem::megatron})
      for (const Share link : {Share::inside, Share::across}) {
        const auto i = static_cast<size_t>(link);
        EXPECT_NEAR(std::log(shipped.of(system)[i] / before.of(system)[i]), 0, 0.08) << name << " " << name_of(link);
      }
  }
}

}  // namespace
}  // namespace moebius
