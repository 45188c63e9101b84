// The search for a layout: every legal one that the options allow, pruned by memory and by time.
#pragma once

#include <string>
#include <vector>

#include "plan/predict.h"

namespace moebius {

struct SearchOptions {
  double memory_gb = 0;  // of a rank; 0: 95 % of the machine's
  int64_t most_tp = 0;   // 0: the ranks of a domain
  int64_t keep = 10;     // of the best
};

struct FoundLayout {
  std::vector<std::string> set;  // "parallel.ep=8": the keys that make the recipe this layout
  Prediction prediction;
  std::string why_worse;  // than the best: the phases that take longer
};

struct SearchResult {
  std::vector<FoundLayout> layouts;  // best first
  int64_t num_legal = 0;             // layouts that the run's checks accept
  int64_t num_too_large = 0;         // of them, beyond the memory with every recompute
  int64_t num_slower = 0;            // of them, that cannot be among the best whatever is recomputed
  int64_t num_timed = 0;             // predictions made
};

// Searched are tp, cp, pp, vpp with a layout of stages, ep, etp, the dispatcher, micro-batches and
// memory.recompute. Everything else is the run's. Error{usage} when no layout is legal or none fits,
// with the least that one needs.
SearchResult search(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume, const SearchOptions& options);

// The stages of a pipeline as a layout in which the longest stage is as short as it can be, with the
// heads counted by their arithmetic. Multi-token prediction is one stage before heads that fill a stage.
// REQUIRES: 2 <= num_stages <= layers.
std::string balanced_layout(const ModelSpec& model, int64_t num_stages);

std::string search_text(const SearchResult& result);

}  // namespace moebius
