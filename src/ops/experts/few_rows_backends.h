// The backend of ops/experts/few_rows.h. The arguments have been checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct ExpertDown;
struct ExpertUp;
struct RouteFwd;

namespace cuda {
void expert_down_after_up(Stream& s, const ExpertDown& a);
// Returns whether expert_up_of_route runs.
bool makes_choice(const Stream& s, const RouteFwd& route, const ExpertUp& a);
void expert_up_of_route(Stream& s, const RouteFwd& route, const ExpertUp& a);
void expert_down_of_route(Stream& s, const RouteFwd& route, const ExpertDown& a);
}  // namespace cuda

}  // namespace moebius
