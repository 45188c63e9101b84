// A trace records the ops that ran: each op's name, floating-point operations, bytes and time.
// OpScope and PhaseScope fill it. Benchmarks, the null device's accounting and log.trace read it.
// log.trace is a Chrome trace; open it in Perfetto.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moebius {

// The minimum work of an op: floating-point operations, and the bytes of each input read once and each output
// written once.
struct Cost {
  double flops = 0;
  double bytes = 0;
  // The part of `bytes` that is of experts' weights and of their gradients. The number of rows does not change it;
  // flops and all other bytes of an expert op are proportional to the rows.
  double weight_bytes = 0;
  Cost& operator+=(const Cost& o) {
    flops += o.flops;
    bytes += o.bytes;
    weight_bytes += o.weight_bytes;
    return *this;
  }
};

struct TraceEvent {
  std::string name;
  double begin_us, duration_us;
  Cost cost;
};

// A pass, a layer or a step; ops run inside it.
struct TracePhase {
  std::string name;
  double begin_us, duration_us;
};

struct OpTotal {
  int64_t calls = 0;
  double time_us = 0;
  Cost cost;
};

class Trace {
 public:
  void add(const char* name, double begin_us, double duration_us, Cost cost);
  void add_phase(const std::string& name, double begin_us, double duration_us);
  void clear();
  const std::vector<TraceEvent>& events() const { return events_; }  // ops
  std::map<std::string, OpTotal> totals() const;                     // totals of all ops
  // Returns {"traceEvents": [...]}: complete events in microseconds, ops inside their phases.
  std::string chrome_json() const;

 private:
  std::vector<TraceEvent> events_;
  std::vector<TracePhase> phases_;
};

// Returns the microseconds of a monotonic clock.
double now_us();

}  // namespace moebius
