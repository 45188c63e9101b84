// The rates of the links between ranks, by which parallel.dispatcher = "auto" compares dispatchers.
#pragma once

#include <string>

namespace moebius {

struct ExchangeRates {
  // Bytes a second of each rank and direction: between nodes, and inside a node.
  double across_bytes_s = 0, inside_bytes_s = 0;
  double across_call_s = 0, inside_call_s = 0;  // seconds of a call without bytes
  std::string source;                           // a clause, as in "the usual ones of CPUs"
  bool operator==(const ExchangeRates&) const = default;
};

// Returns the rates of servers with H100 and a network card of 400 Gb/s for each GPU, or of servers with CPUs. They are
// those of usual_machine() (plan/cost/usual_machine.h).
ExchangeRates usual_exchange_rates(bool on_gpu);

}  // namespace moebius
