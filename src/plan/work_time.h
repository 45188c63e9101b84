// The time that work takes on a machine: ops by their class, calls of groups by the places of their ranks.
#pragma once

#include <array>
#include <map>
#include <string>

#include "plan/assume.h"
#include "plan/part.h"

namespace moebius {

// The places of the ranks of a group: n of them, each `stride` ranks after the one before.
struct RankSpan {
  int64_t size = 1, stride = 1;
  int64_t local(const PlanMachine& m) const;  // of them in one domain of fast links
};
// Returns the ranks of an axis. A group of pp is two neighbours.
RankSpan span_of(const MeshShape& mesh, const std::string& axis);

// Multiprocessors of a GPU that send while compute runs beside: the default of DeepEP (arXiv 2603.07685).
inline constexpr double kSendingMultiprocessors = 20;
// The rate that products lose while others send, over the share of the multiprocessors that send: DeepEP's 20 of 132
// cost them about 20 % (arXiv 2603.07685), since their tiles do not divide evenly by what is left.
inline constexpr double kTakenOfShare = 0.2 / (20.0 / 132);
// The share of compute that is lost while a group's call runs beside it; 0 on a CPU.
double taken_by_groups(const PlanMachine& machine, double sending = kSendingMultiprocessors);

// Scalar operations of the backward pass of attention for each score beside its exponential: mask, scale, the
// difference to the row's sum, the product with the probability, and conversions.
inline constexpr double kScalarOperations = 24;
struct HeadWidths {
  int64_t qk = 0, v = 0;
};
// How much longer attention takes than its products alone: each score takes an exponential, and scalar operations
// backward, which other units of the GPU compute at rates of their own (arXiv 2407.08608).
double attention_over_products(const PlanMachine& machine, const HeadWidths& widths, bool backward);

// Passes of a micro-batch on a virtual stage that the merged schedule runs beside a pass of another, on the first rank
// of the pipeline: all but its forward passes before the first backward pass, of which it has one more than 1F1B.
double merged_passes(const EngineSpec& spec);

// The run and the machine that times are computed for.
struct TimeContext {
  const PlanMachine& machine;
  const Assumptions& assume;
  const EngineSpec& spec;
};

// Seconds of a call of a group that sends wire_bytes from each rank.
double group_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes);

// Seconds of a pass, by kernel class and by axis. Groups are not hidden in it.
struct PassTime {
  std::array<double, kNumKernelClasses> kernels{};
  double host = 0;  // that a launch shows
  std::map<std::string, double> groups;
  std::map<std::string, double> wire_bytes;
  double messages = 0;  // that the rank sends
  double hidden = 0;    // of the groups' time, under compute
  double compute() const;
  double exposed() const;
  double total() const { return compute() + host + exposed(); }
  PassTime& operator+=(const PassTime& o) { return add(o, 1); }
  PassTime& operator-=(const PassTime& o) { return add(o, -1); }
  PassTime& add(const PassTime& o, double times);
};

// Returns the time of a pass, or of other work. Groups are not hidden in it.
PassTime pass_time(const TimeContext& c, const PassWork& work);

// The part's passes. layer: whether it is an MoE or dense layer of the model; else the ends of a stage.
struct PartTime {
  PassTime forward, loss, backward, leave;
  PassTime copies;        // quantising the weights, once a step; of Moebius alone
  PassTime stored_first;  // that the first backward pass of a step saves, as it stores gradients; of Moebius alone
};
PartTime part_time(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer);

// The messages of a call, to other ranks (comm/group_cost.h).
double group_messages(const RankSpan& span, GroupCall call);

// The experts' products and others may be in 8 bits or less: --assume precision, or precision.recipe where the
// machine has such products. of_recipe: they are not.
PlanPrecision products_precision(const EngineSpec& spec, const Assumptions& assume, const PlanMachine& machine);

// Returns the number of times that a token of K experts is sent when it goes once to each of `units` (ranks or domains)
// that has some of them, its own left out: the mean over tokens that choose freely within the
// groups of experts that the model allows.
double units_of_token(const ModelSpec& model, double units);

}  // namespace moebius
