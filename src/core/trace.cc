#include "core/trace.h"

#include <fmt/core.h>

#include <chrono>

namespace moebius {

void Trace::add(const char* name, double begin_us, double duration_us, Cost cost) {
  events_.push_back({name, begin_us, duration_us, cost});
}

void Trace::add_phase(const std::string& name, double begin_us, double duration_us) {
  phases_.push_back({name, begin_us, duration_us});
}

void Trace::clear() {
  events_.clear();
  phases_.clear();
}

std::map<std::string, OpTotal> Trace::totals() const {
  std::map<std::string, OpTotal> totals;
  for (const auto& e : events_) {
    OpTotal& t = totals[e.name];
    ++t.calls;
    t.time_us += e.duration_us;
    t.cost += e.cost;
  }
  return totals;
}

std::string Trace::chrome_json() const {
  std::string json;
  const auto add = [&](const std::string& name, double begin_us, double duration_us, const std::string& more) {
    json += fmt::format("{}{{\"name\":\"{}\",\"ph\":\"X\",\"ts\":{:.3f},\"dur\":{:.3f},\"pid\":0,\"tid\":0{}}}",
                        json.empty() ? "\n" : ",\n", name, begin_us, duration_us, more);
  };
  for (const TracePhase& p : phases_) add(p.name, p.begin_us, p.duration_us, "");
  for (const TraceEvent& e : events_) {
    add(e.name, e.begin_us, e.duration_us,
        fmt::format(",\"args\":{{\"flops\":{:.0f},\"bytes\":{:.0f}}}", e.cost.flops, e.cost.bytes));
  }
  return "{\"traceEvents\":[" + json + "\n]}\n";
}

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace moebius
