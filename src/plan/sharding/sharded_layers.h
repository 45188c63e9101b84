// The time and traffic of layers whose weights or gradients are sharded (parallel/sharding/layer_weights.h,
// layer_gradients.h): gathers of weights, and sums of gradients after each micro-batch. Weights on the host are
// copied to the device with a gather; the two overlap, so the longer one counts.
#pragma once

#include <map>
#include <vector>

#include "plan/sharding/param_buckets.h"
#include "plan/work_time.h"

namespace moebius {

// The bytes that this rank sends for one layer, by axis.
struct LayerTraffic {
  struct Sent {
    double wire_bytes = 0;
    int64_t calls = 0;
    int64_t ranks = 0;  // number of ranks that exchange; 0: all of the axis
  };
  std::map<Axis, Sent> weights;        // one gather
  std::map<Axis, Sent> first_weights;  // the first gather in a step, if it is over more ranks; else empty
  std::map<Axis, Sent> gradients;      // the sum of gradients after one micro-batch
  double host_bytes = 0;               // copied from the host for one gather: weights in memory.offload
};

// Returns the layers of a rank in the order of its stages. Empty where nothing is sharded.
std::vector<LayerTraffic> layer_traffic(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);

// The passes of one micro-batch through a layer, in seconds.
struct LayerSeconds {
  double forward = 0, backward = 0;
  bool has_backward = true;  // its backward pass is computed
};

// The exchanges of a step.
struct LayerExchange {
  AxisFigures bytes{}, seconds{};
  double messages = 0;
  double all_s = 0;      // seconds that they take
  double exposed_s = 0;  // seconds that passes wait for them
  double memory_s = 0;   // seconds of their memory traffic
};

struct ShardedTime {
  LayerExchange weights, gradients;
};

// Simulates the passes of a step with the buffers of the layers. One link carries one exchange at a time. Gathers
// begin one layer early where c.spec.overlap is set, but not before the first layer of a stage. A rank with one stage
// runs each micro-batch's forward pass and then its backward pass; one with several takes the stages in turn.
// If a micro-batch begins in the same state as the one before, all later ones take the same time and are not run.
// stages: the layers of each virtual stage. REQUIRES: as many passes as layers.
ShardedTime sharded_time(const TimeContext& c, const std::vector<LayerTraffic>& layers,
                         const std::vector<LayerSeconds>& passes, const std::vector<int64_t>& stages);

// Does the same for the layers of a rank, with the times of their parts. The result is zero if nothing is sharded.
ShardedTime sharded_time(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);

}  // namespace moebius
