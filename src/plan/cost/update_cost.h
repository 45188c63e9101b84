// The bytes that an update of the optimizer reads and writes, for each element that a rank owns, and its kernels.
#pragma once

#include "plan/memory/rank_memory.h"

namespace moebius {

// Returns the bytes in device memory. The update reads gradient, master and moments, and writes master, moments and a
// bf16 weight. The gradient norm reads the gradient again.
double update_bytes(const OptimizerSpec& optimizer);
// The time of a moment in 8 bits, for each element, times rank.f32_tflops. It is the efficiency of one kernel and not a
// count of its operations: one H200 took 285 ms for 15.6e9 elements with two moments (docs/measurements/memory.md), at
// rank.f32_tflops = 67. The kernel is limited by arithmetic, so other GPUs count by their rate of it.
constexpr double kCodeOperations = 612;
// Returns the operations of an update for each element, where these may take longer than its bytes: kCodeOperations for
// each moment in 8 bits.
double update_operations(const OptimizerSpec& optimizer);
// Returns the bytes that an update reads from host memory, of `owned` elements, where optimizer.offload_buffer is
// filled to its last byte. It writes the same number.
double host_update_bytes(const OptimizerSpec& optimizer, double owned);
// Returns the bytes of masters and moments alone that an update reads from host memory.
double host_states_bytes(const OptimizerSpec& optimizer, double owned);
// Returns the seconds that an update adds to a step by moving states over the host's link for moves_s seconds. Its
// kernels work on some states while others move. It may also run beside a forward pass, from which its kernels take
// multiprocessors for the part of their time that they run beside it.
double exposed_update_seconds(double moves_s, double kernels_s, double pass_s);

// The bytes that Muon moves for an element of a matrix in addition to update_bytes(). It clears u, adds momentum to it
// in two steps of SGD, and copies it (parallel/optim/muon.cc).
constexpr double kMomentumBytes = 44;
// The bytes that the owner of a quantised element moves, less those of a bf16 weight. It reads the master twice, for
// the magnitude of its block and to quantise it, and writes one byte (parallel/sharding/bucket_exchange.cc).
constexpr double kQuantiseBytes = 4 + 4 + 1 - 2;
// Each gradient that the first micro-batch does not store is cleared.
constexpr double kClearBytes = 4;

struct EndOfStep {
  int64_t kernels = 0;
  int64_t tensors = 0;  // whose parts the gradient norm adds
};
// Returns the kernels that end a step on a GPU: the gradient norm and the update, and clears of gradients that the
// first micro-batch does not store, of the sums of losses, and of the counters and metrics of each MoE layer. Not
// counted: what Muon, QK-clip, quantised weights, budgets of rows and states on the host add.
EndOfStep end_of_step(LayoutParts& parts, const StageLayout& layout, int64_t pp_rank);

}  // namespace moebius
