// The longest chain of steps in the kernels of an op, each of which waits for the one before it.
#pragma once

#include <string>

#include "plan/work_time.h"

namespace moebius {

// Steps that one thread of a kernel does one after another, beyond the first load and the last store of each kernel,
// which are among kernel_us. The sums are over all kernels of a call.
struct CriticalPath {
  double loads = 0;    // of global memory: addresses, or data that the next step needs
  double on_chip = 0;  // accesses of shared memory, exchanges between lanes of a warp, and barriers
  double seconds() const;
  CriticalPath& operator+=(const CriticalPath& o);
};

// Seconds of a step. Assumed: some 500 and 30 cycles at 1.755 GHz, the boost clock of an H100.
inline constexpr double kLoadSeconds = 0.3e-6, kOnChipSeconds = 0.017e-6;

// Returns the critical path of one call of an op of Moebius on a GPU, by the op's name in traces. It follows from the
// loops of its kernels, for the rank's shapes. The width of a norm is that of its FLOPs, since latent vectors have
// norms of their own. It is empty for ops whose threads have independent loads alone, on a CPU, and for other
// systems. Tokens that are sorted for the embedding's gradient count as evenly distributed.
CriticalPath critical_path(const TimeContext& c, const OpWork& op);

// Returns the critical path of the gradient norm: one block adds the parts of each of `tensors` tensors, one
// after another.
CriticalPath norm_path(double tensors);

}  // namespace moebius
