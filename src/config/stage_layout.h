// Which layers stand on which pipeline stage. A layout is written as a string of E (embedding), t (transformer layer),
// m (multi-token prediction layer) and L (final norm, head and loss), stages parted by |, in the order of the model:
// stage s is virtual stage s / P of rank s % P. *n repeats what stands before it, a letter or a group in parentheses;
// blanks mean nothing. DeepSeek-V3 on pp = 8, vpp = 4: "Et*3|(tt|)*29m|L".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

struct StageSpec {
  bool embedding = false;
  int64_t first_layer = 0, num_layers = 0;  // layers first_layer .. first_layer + num_layers - 1 of the model
  bool norm = false;  // the final norm, behind the last layer: on the stage of m, or of L where the model has no m
  int64_t num_mtp = 0;
  bool loss = false;
  bool operator==(const StageSpec&) const = default;
};

struct StageLayout {
  int64_t num_ranks = 1;          // P
  std::vector<StageSpec> stages;  // P * V

  // m before the stage of L: multi-token prediction hands its hidden states on to the head, beside the model's.
  bool mtp_is_apart() const { return !stages.back().norm; }
  int64_t num_virtual() const { return static_cast<int64_t>(stages.size()) / num_ranks; }
  const StageSpec& at(int64_t pp_rank, int64_t virtual_stage) const {
    return stages.at(static_cast<size_t>(virtual_stage * num_ranks + pp_rank));
  }
  bool operator==(const StageLayout&) const = default;
};

struct StageLayoutRequest {
  std::string text;  // parallel.layout; empty: as many layers on each stage, E on the first, m and L on the last
  int64_t num_ranks = 1, num_virtual = 1;
  int64_t num_layers = 0, num_mtp = 0;  // of the model
};

// Error{usage} naming the character or the stage that is wrong: a string that does not read; letters other than the
// model's, in its order; other than P * V stages; an empty stage; m on more than one. Without a string: layers that do
// not split evenly, with the equation.
StageLayout stage_layout(const StageLayoutRequest& request);

// What the model can be cut into beyond that: Error{usage} when m stands before the stage of L on rank 0.
void check_mtp_stage(const StageLayout& layout);

// The layout as a string without groups, "E t*2 | t*3 | t*2 m L": stage_layout reads it back.
std::string print(const StageLayout& layout);

}  // namespace moebius
