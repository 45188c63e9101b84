// The time of work on a machine: of ops by their class, and of collective calls by the positions of their ranks.
#pragma once

#include <array>

#include "plan/assume.h"
#include "plan/part.h"

namespace moebius {

// The positions of the ranks of a group: `size` ranks, each `stride` after the one before.
struct RankSpan {
  int64_t size = 1, stride = 1;
  int node = 1;                               // ranks_on_node of the group (comm/layout.h), for its levels
  DType sums = DType::f32;                    // dtype of reduce-scatters; bf16 is sent in f32 above level 0
  int64_t local(const PlanMachine& m) const;  // number of ranks of the span in one domain of fast links
};
// The ranks of an axis. A group of pp is two neighbours.
RankSpan span_of(const MeshShape& mesh, Axis axis);
// The same for sums of gradients, which have the dtype of the optimizer's gradients.
RankSpan span_of_gradients(const EngineSpec& spec, Axis axis);

// Multiprocessors of a GPU that send while others compute: the default of DeepEP (arXiv 2603.07685).
inline constexpr double kSendingMultiprocessors = 20;
// The relative loss of products' rate during communication, divided by the share of the multiprocessors that send.
// DeepEP's 20 of 132 cost about 20 % (arXiv 2603.07685), since the tiles do not divide evenly among the others.
inline constexpr double kTakenOfShare = 0.2 / (20.0 / 132);
// Returns the share of compute that is lost while a collective runs at the same time; 0 on a CPU.
double taken_by_groups(const PlanMachine& machine, double sending = kSendingMultiprocessors);

// Scalar operations of the backward pass of attention for each score besides its exponential: mask, scale, the
// difference to the row's sum, the product with the probability, and conversions.
inline constexpr double kScalarOperations = 24;
struct HeadWidths {
  int64_t qk = 0, v = 0;
};
// Returns the time of attention divided by that of its matrix products alone. Each score also needs an exponential, and
// in the backward pass scalar operations, which other units of the GPU compute at their own rates (arXiv 2407.08608).
double attention_over_products(const PlanMachine& machine, const HeadWidths& widths, bool backward);

// Returns the number of passes that the merged schedule runs together with a pass of another micro-batch, on the first
// pipeline rank: all but its forward passes before the first backward pass, which are one more than with 1F1B.
double merged_passes(const EngineSpec& spec);

// The run and the machine that times are computed for.
struct TimeContext {
  const PlanMachine& machine;
  const Assumptions& assume;
  const EngineSpec& spec;
};

// Returns the time of the messages of n GPUs of one domain, divided by their time at the rate of the links. NCCL's
// sends and receives copy a message through buffers, and the last of the n - 1 messages of a rank overlaps with no
// other one. So few ranks reach less of the rate than many. The slopes between the sizes of `moebius bench collectives`
// were 253 GB/s on two H200 and 311 on four.
inline double message_time_over_links(int64_t n) { return n > 1 ? 1 + 0.4 / static_cast<double>(n - 1) : 1; }

// Returns the bytes per second that kernels of memory-bound ops reach.
double memory_rate(const TimeContext& c);

// Returns the seconds of a collective call in which each rank sends wire_bytes. On GPUs Moebius adds in the order of
// the ranks, level by level (comm/collective_levels.h): each rank sends a message to every other rank of its level, and
// adds the parts that arrived in a pass of its own.
double group_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes);

// Returns the seconds of memory traffic of such a call on a GPU, which computing beside it loses: the bytes that it
// reads to send and those that arrive, and sums in rank order.
double memory_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes);
// Returns the seconds that compute loses to the hidden part of exchanges that take `all` seconds: multiprocessors, and
// memory_s seconds of memory traffic in all.
double lost_beside(const TimeContext& c, double hidden, double all, double memory_s);

// A figure of each axis; 0 where an axis has none.
using AxisFigures = std::array<double, kNumAxes>;

// Seconds of a pass, by kernel class and by axis. `groups` is the whole time of collectives; `hidden` is the part of it
// that overlaps with compute.
struct PassTime {
  std::array<double, kNumKernelClasses> kernels{};
  double host = 0;  // host time that is exposed without a CUDA graph
  AxisFigures groups{}, wire_bytes{};
  double messages = 0;  // number of messages that the rank sends
  double hidden = 0;    // part of the groups' time that overlaps with compute
  double writers = 0;   // part of the kernels' time: kernels that write rows to the memory of other ranks
  double launches = 0;  // part of the kernels' time: from the end of a kernel to the start of the next one's work
  double experts = 0;   // part of the kernels' time: experts' products and, with --assume precision, their quantising
  double compute() const;
  double exposed() const;
  double total() const { return compute() + host + exposed(); }
  PassTime& operator+=(const PassTime& o) { return add(o, 1); }
  PassTime& operator-=(const PassTime& o) { return add(o, -1); }
  PassTime& add(const PassTime& o, double times);
};

// Returns the time of a pass, or of other work. Communication is not overlapped in it.
PassTime pass_time(const TimeContext& c, const PassWork& work);

// The times of the passes of a part.
struct PartTime {
  PassTime forward, loss, backward, leave;
  PassTime backward_weight;  // the part of backward that is a pass of its own
  PassTime copies;           // quantising the weights, once a step; of Moebius alone
  PassTime stored_first;     // saved by the first backward pass of a step, which stores gradients; only in Moebius
};
// is_layer: the part is an MoE or dense layer of the model, and not an end of a stage.
PartTime part_time(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer);

// Returns the number of messages of a call to other ranks: those of comm/group_cost.h. A reduce-scatter
// of GPUs has more at level 0, one for each rank of a member's block.
double group_messages(const TimeContext& c, const RankSpan& span, GroupCall call);

// Returns the precision, of 8 bits or less, in which quantised products are computed: that of --assume precision, else
// that of precision.recipe if the machine supports it. from_recipe means that no product has such a precision.
PlanPrecision products_precision(const EngineSpec& spec, const Assumptions& assume, const PlanMachine& machine);

// Returns the number of times that a token of K experts is sent when it goes once to each of `units` (ranks or domains)
// that has some of them, excluding its own: the mean over tokens that choose freely within the
// groups of experts that the model allows.
double units_of_token(const ModelSpec& model, double units);

}  // namespace moebius
