// The search for a layout: every legal one that the options allow, pruned by memory and by time.
#pragma once

#include <string>
#include <vector>

#include "plan/predict.h"
#include "plan/search_space.h"

namespace moebius {

struct SearchOptions {
  double memory_gb = 0;              // memory limit of a rank, at most memory.fit; 0: memory.fit, else 95 % of a device
  int64_t max_tp = 0;                // largest tp and etp; 0: the ranks of a domain, at most 8
  std::vector<std::string> recipes;  // values of precision.recipe to try; empty: only the run's own
  int64_t keep = 10;                 // number of layouts to return, the best first
  int threads = 1;                   // the result does not depend on it
  bool prunes = true;                // false: memory is chosen for every layout; the result is the same
};

struct FoundLayout {
  std::vector<std::string> set;  // the layout as recipe keys: "parallel.ep=8"
  Prediction prediction;
  std::string why_worse;  // the phases that take longer than with the best layout
};

struct SearchResult {
  std::vector<FoundLayout> layouts;  // best first
  int64_t num_possible = 0;          // layouts that these ranks can hold
  int64_t num_too_large = 0;         // legal layouts that do not fit, whatever is recomputed or on the host
  int64_t num_slower = 0;            // legal layouts that cannot be among the best, whatever fits
  int64_t num_refused = 0;           // layouts that the checks of a run refuse; they are not in num_possible
  int64_t num_timed = 0;             // number of predictions that the search made
  double memory_bytes = 0;           // memory limit of a rank
  std::string named;                 // the keys of the layout that --set names, which the search kept; may be empty
};

// Searches the layouts of plan/search_space.h with every set of memory.recompute, the budgets of memory.expert_rows,
// and the choices of offload and sharding. Keys that the recipe or --set names keep their values, but not recompute.
// Throws Error{usage} if no layout is legal, if none fits (with the least memory that one needs), or for an unknown
// recipe (with the known ones).
SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options);

std::string search_text(const SearchResult& result);

}  // namespace moebius
