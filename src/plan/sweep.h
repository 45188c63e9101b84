// Tables of predictions of one run, with some keys at several values.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/search.h"

namespace moebius {

// A key of a recipe and its values: "parallel.ep=8,16,32"; or the ranks of the run: "ranks=64,128".
struct SweptKey {
  std::string key;
  std::vector<std::string> values;
};
// Parses a key and its values. Commas inside brackets and quotes do not separate values. Throws Error{usage} for a
// string without a key or a value.
SweptKey parse_sweep(const std::string& text);

struct SweptPoint {
  std::vector<std::string> values;  // one for each key of the sweep
  std::optional<Prediction> prediction;
  std::vector<std::string> set;  // with --search: the best layout as recipe keys
  std::string refused;           // the error's first line, where no prediction could be made
};

struct Sweep {
  std::vector<SweptKey> keys;
  std::vector<SweptPoint> points;  // the last key changes first
  bool is_search = false;
};

struct SweepBase {
  std::string recipe;
  std::vector<std::string> overrides;
  int64_t ranks = 1;
  std::optional<SearchOptions> search;  // each point is the best layout that a search finds
};
// Points that are impossible are part of the table. Throws Error{usage} for more than 10000 points, for a key that is
// given twice, and, with the reason of the first point, if every point is impossible.
Sweep sweep(PartLibrary& parts, const SweepBase& base, const std::vector<SweptKey>& keys, const PlanMachine& machine,
            const Assumptions& assume);

std::string sweep_text(const Sweep& sweep);
std::string sweep_csv(const Sweep& sweep);
// Returns a plot of model TFLOP/s per rank over the first key, with a line for each combination of the others.
std::string sweep_svg(const Sweep& sweep);

}  // namespace moebius
