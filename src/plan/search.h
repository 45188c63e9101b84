// The search for a layout: every legal one that the options allow, pruned by memory and by time.
#pragma once

#include <string>
#include <vector>

#include "plan/predict.h"
#include "plan/search_space.h"

namespace moebius {

struct SearchOptions {
  double memory_gb = 0;              // of a rank, and at most memory.fit; 0: memory.fit, or 95 % of the machine's
  int64_t most_tp = 0;               // of tp and etp; 0: the ranks of a domain, at most 8
  std::vector<std::string> recipes;  // names of precision.recipe to choose from; empty: the run's own alone
  int64_t keep = 10;                 // of the best
  int threads = 1;                   // the result does not depend on them
  bool prunes = true;                // false: memory is chosen for every layout; the result is the same
};

struct FoundLayout {
  std::vector<std::string> set;  // "parallel.ep=8": the keys that make the recipe this layout
  Prediction prediction;
  std::string why_worse;  // than the best: the phases that take longer
};

struct SearchResult {
  std::vector<FoundLayout> layouts;  // best first
  int64_t num_legal = 0;             // layouts that these ranks can hold
  int64_t num_too_large = 0;         // of them, beyond the memory whatever is recomputed or on the host
  int64_t num_slower = 0;            // of them, that cannot be among the best whatever fits
  int64_t num_refused = 0;           // other layouts, which the run's checks refuse
  int64_t num_timed = 0;             // predictions made
  double memory_bytes = 0;           // that a rank may use
};

// Searched are the layouts of plan/search_space.h, every set of memory.recompute, memory.expert_rows, and what is on the
// host or in shares of other ranks. All but the first two are the run's where the recipe or --set names them. Everything else is the run's.
// Error{usage} when no layout is legal or none fits, with the least that one needs; for a recipe that is not known with
// the known ones.
SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options);

std::string search_text(const SearchResult& result);

}  // namespace moebius
