// The data that a run has written, in bounded memory: series and grids of its metrics, its events and its recipe. All
// text in it comes from files and may contain anything.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/series.h"

namespace moebius {

// The numbers of one kind of record, by name, in the order in which they first appeared.
class NamedSeries {
 public:
  static constexpr size_t kMax = 64;  // maximum number of names; later ones are dropped

  // Returns the series of a name. It is created if fewer than kMax exist; otherwise the result is null.
  // The search begins at index `at`, which is set to the index after the series.
  Series* find_or_add(std::string_view name, size_t& at);
  const Series* find(std::string_view name) const;  // returns null if there is no value of this name
  const std::vector<std::pair<std::string, Series>>& all() const { return all_; }

 private:
  std::vector<std::pair<std::string, Series>> all_;
};

// The tables by layer of train records. A row is a layer, except in `load`, where it is an expert of a layer.
struct MoeData {
  std::vector<int64_t> layers;  // numbers of the layers, of the newest record
  int64_t experts = 0;          // experts of a layer in the newest record
  Grid load;     // tokens sent to an expert over the mean of its layer; row = layer index * experts + expert
  Grid balance;  // load_max_over_mean
  Grid entropy;  // nats
  Grid dropped;  // token-expert pairs
  bool has_too_many_cells = false;  // layers times experts; `experts` is 0 and `load` is not filled then
};

struct AxisData {
  Series sent_bytes;  // the most that a rank sent in a step
  Series exposed_s;   // the longest that a rank waited in a step
  Grid rank_s;        // seconds that each rank waited in a step; row = rank
};

// The slowest connection between ranks by one measurement.
struct LinkData {
  int64_t rank = 0, peer = 0;
  std::string host, peer_host;
  double value = 0, median_of_others = 0;  // 0: unknown
  bool is_slow = false;
};

// The times of a step by rank, in seconds.
struct RanksData {
  std::map<std::string, Grid> phases;    // load_s, passes_s, optimizer_s, waiting_s
  Grid busy_s;                           // load, passes and optimizer without waiting
  std::map<std::string, AxisData> axes;  // by name of the axis
  // From the newest record that has them.
  std::optional<LinkData> longest_round_trip;  // seconds
  std::optional<LinkData> lowest_rate;         // bytes per second
};

// A line of events.jsonl.
struct RunEvent {
  std::string kind;  // start, checkpoint, failed, end, or a kind of a later version
  double time = 0;   // seconds since 1970; 0 if it has none
  int64_t step = 0;
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  std::map<std::string, double> memory_bytes;  // only of a start: planned bytes by life
  std::map<std::string, double> mesh;          // only of a start: degrees of parallelism by axis
};

// The numbers of lines of a file that were skipped.
struct SkippedLines {
  int64_t damaged = 0;       // lines that are not a JSON object with a kind and a step
  int64_t out_of_order = 0;  // records whose step is not above that of the record before
  bool half_line = false;    // the last line is not complete yet
};

struct RunData {
  NamedSeries train, eval;
  MoeData moe;
  RanksData ranks;
  std::vector<RunEvent> events;
  int64_t steps = 0, last_step = 0;  // train records, and the step of the newest
  int64_t first_step = 0;
  double trained_s = 0;  // sum of step_time_s
  double clip = 0;       // optimizer.clip of the recipe; 0: none
  int64_t clipped = 0;   // steps whose gradient norm was above it
  SkippedLines skipped_lines;
  SkippedLines skipped_event_lines;
  std::vector<std::pair<std::string, std::string>> recipe;  // key -> value as TOML, in the order of the file
  std::string recipe_problem;                               // the reason if there is none
  std::vector<int64_t> checkpoints;                         // steps of the checkpoints in the folder, sorted
};

// Returns the newest event of a kind; null if there is none.
const RunEvent* newest_event(const RunData& run, std::string_view kind);
// Returns the value of a recipe's key as TOML; empty if it is not there.
std::string recipe_value(const RunData& run, std::string_view key);
std::optional<double> recipe_number(const RunData& run, std::string_view key);

}  // namespace moebius
