// The bytes that cross nodes and that stay inside them, and the predicted time, of each dispatcher that ranks on
// several nodes can have. `auto` chooses by them (config/dispatcher_choice.h). The bytes are those of
// model/moe/dispatcher_cost.h on CPUs, and of NCCL's calls on GPUs, counted separately for receivers on other nodes and
// on the sender's own.
#pragma once

#include "config/dispatcher_choice.h"
#include "config/exchange_rates.h"
#include "model/moe/dispatcher_cost.h"

namespace moebius {

struct ExchangeShape {
  // element_bytes is that of rows that return, in the dtype of the computation. REQUIRES: W is a multiple of `node`.
  DispatchShape rows;
  double sent_element_bytes = 2;  // bytes of an element of a row to the experts (model/moe/wire_rows.h)
  bool on_gpu = false;            // over NCCL
  bool captures = false;          // steps are captured: the messages of two-level have the size of all tokens
  bool rings = false;             // parallel.sums = "nccl": sums are NCCL's own, around a ring
};

// Returns the estimates of a layer's step: announce, dispatch twice, combine, combine_bwd and dispatch_bwd, with
// balanced routing. A call takes a latency, and the time of its bytes at both rates. Messages across nodes and inside
// them are sent at the same time, except where one follows from the other: in the levels of sums, in those of gathers
// on CPUs, and in two-level. Sums and copies of what arrived are not counted. All tokens of a rank are sent together.
ExchangeEstimates exchange_estimates(const ExchangeShape& x, const ExchangeRates& rates);

}  // namespace moebius
