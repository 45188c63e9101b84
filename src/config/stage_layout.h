// The layers of each pipeline stage. A layout is a string of letters, in the order of the model: E
// (embedding), t (transformer layer), m (multi-token prediction layer) and L (final norm, head and loss).
// A bar | separates stages; StagePlacement says which rank holds which. *n repeats the letter or the group
// in parentheses before it; blanks are ignored. DeepSeek-V3 on pp = 8, vpp = 4: "Et*3|(tt|)*29m|L".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

struct StageSpec {
  bool embedding = false;
  int64_t first_layer = 0, num_layers = 0;  // layers first_layer .. first_layer + num_layers - 1 of the model
  bool norm = false;  // the final norm, after the last layer: on the stage of m, or of L if the model has no m
  int64_t num_mtp = 0;
  bool loss = false;
  bool operator==(const StageSpec&) const = default;
};

// The assignment of stages to the ranks of a pipeline.
struct StagePlacement {
  int64_t num_ranks = 1;    // P, the size of the pp axis
  int64_t num_virtual = 1;  // V, stages of one rank

  int64_t num_stages() const { return num_ranks * num_virtual; }
  int64_t rank_of(int64_t stage) const { return stage % num_ranks; }
  int64_t virtual_of(int64_t stage) const { return stage / num_ranks; }  // among the stages of its rank
  int64_t stage_of(int64_t pp_rank, int64_t virtual_stage) const { return virtual_stage * num_ranks + pp_rank; }
};

struct StageLayout {
  int64_t num_ranks = 1;          // P
  std::vector<StageSpec> stages;  // P * V

  // Returns whether m is on a stage before that of L. Multi-token prediction then sends its hidden
  // states to the head, in addition to the model's.
  bool mtp_is_apart() const { return !stages.back().norm; }
  int64_t num_virtual() const { return static_cast<int64_t>(stages.size()) / num_ranks; }
  StagePlacement placement() const { return {num_ranks, num_virtual()}; }
  const StageSpec& at(int64_t pp_rank, int64_t virtual_stage) const {
    return stages.at(static_cast<size_t>(placement().stage_of(pp_rank, virtual_stage)));
  }
  bool operator==(const StageLayout&) const = default;
};

struct StageLayoutRequest {
  // parallel.layout; empty: all stages have the same number of layers, E is on the first, and m and L are on the last.
  std::string text;
  int64_t num_ranks = 1, num_virtual = 1;
  int64_t num_layers = 0, num_mtp = 0;  // numbers of the whole model
};

// Throws Error{usage} that names the wrong character or stage if the string cannot be read, its letters
// are not the model's in order, there are not P * V stages, a stage is empty, or m is on more than
// one stage. Without a string Error{usage} with the equation if the layers do not split evenly.
StageLayout stage_layout(const StageLayoutRequest& request);

// Checks beyond that: Error{usage} if m is on rank 0 before the stage of L.
void check_mtp_stage(const StageLayout& layout);

// Returns the layout as a string without groups, "E t*2 | t*3 | t*2 m L": stage_layout reads it back.
std::string print(const StageLayout& layout);

}  // namespace moebius
