// The dispatcher that the MoE layers of a run use, and the reason. The run's log and `moebius
// config` print both.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "config/parallel_spec.h"
#include "config/run_spec.h"

namespace moebius {

// The result of testing whether the ranks that share the experts of a layer (etp x ep) can write to
// each other's memory.
struct PeerReach {
  bool all = false;
  std::string why;  // a clause, as in "rank 4 is on another machine than rank 0"; empty: not tested
  // Not all of these ranks reach each other's memory, but those of each node do. The nodes are whole
  // (MeshShape::nodes_of_experts).
  bool in_nodes = false;
};

// All inputs of the choice.
struct DispatcherChoiceInputs {
  DispatcherKind asked = DispatcherKind::automatic;  // parallel.dispatcher
  int64_t ep = 1, etp = 1;
  int64_t top_k = 1;           // top-k of the model's MoE layers
  int64_t num_experts = 0;     // experts of a layer; 0: not known, and the reason does not count rows
  bool has_moe_layers = true;  // false: nothing is dispatched
  bool captures = false;       // the steps may be captured in CUDA graphs
  bool on_gpu = false;         // the ranks have GPUs
  int64_t ranks_per_node = 8;  // parallel.ranks_per_node
  double element_bytes = 4;    // bytes of an element of a row
  PeerReach peers = {};        // which memory the ranks of etp x ep can access
  std::string origin;          // the end of the error's message: where the key was set
};

// Rows of a token that leave its rank in each direction, with balanced routing. W = ETP EP ranks share the E
// experts of a layer.
//   all-gather   W - 1
//   all-to-all   K ETP (W - 1) / W
//   direct       (W - 1) (1 - C(E - E/EP, K) / C(E, K)): the other ranks that have any of its experts
struct RowsOfToken {
  double allgather = 0, alltoall = 0, direct = 0;
};
RowsOfToken even_rows_of_token(int64_t num_experts, int64_t top_k, int64_t ep, int64_t etp);
// Returns the probability that one of a token's K experts is in a given part of the E, of E / parts:
// 1 - C(E - E/parts, K) / C(E, K), with balanced routing. round_robin: moe.force_balance, with which token t has the
// experts (t K + k) mod E. They are neighbours, so few parts have any of them.
double chance_of_part(int64_t num_experts, int64_t top_k, int64_t parts, bool round_robin = false);

// Returns whether direct sends every token to all ranks that share the experts, in training. It does if with balanced
// routing at least 98 % of the tokens have experts on each of these ranks. Then the rows of a rank are contiguous, and
// no places are computed from counts. num_groups: n_group; it is false where tokens choose among groups of experts.
bool sends_all_tokens(int64_t num_experts, int64_t top_k, int64_t ep, int64_t num_groups, bool round_robin = false);

// Bytes that cross nodes for each column of a token in a layer's step, with balanced routing: x twice and dy
// to the experts, y and dx back. b is element_bytes, and the ranks are on M nodes. Sums of nodes are f32.
//   all-gather   (M - 1) (3 b + 8)
//   all-to-all   5 b K ETP (M - 1) / M
//   two-level    (M - 1) (3 b + 8) (1 - C(E - E/M, K) / C(E, K))
// In f32, b = 4, the last are 20 bytes for each node with any of a token's experts.
struct BytesAcrossNodes {
  double allgather = 0, alltoall = 0, two_level = 0;
};
BytesAcrossNodes even_bytes_across_nodes(const DispatcherChoiceInputs& q);

// Returns whether two-level is possible: the ranks of etp x ep are on two or more whole nodes, and each ep rank
// is on one.
bool has_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node);
// Throws Error{usage} unless has_nodes(). origin: the end of the message.
void check_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node, const std::string& origin = "");

struct DispatcherChoice {
  // The MoE layers are built with this: allgather, alltoall, direct or two_level. If nothing is dispatched, it
  // is what was asked for.
  DispatcherKind kind = DispatcherKind::automatic;
  std::string name;    // "none", "local", "allgather", "alltoall", "direct" or "two_level"
  std::string reason;  // a clause, as in "parallel.dispatcher asks for it"
};

// Returns the choice. The first rule that applies decides:
//   no MoE layer             none
//   ep * etp = 1             local, whatever was asked for
//   asked for by name        that one
//   peers have access        direct, which sends the least
//   peers of a node have it  on CPUs two_level, where it sends fewer bytes across nodes than what follows
//   steps may be captured    allgather, since no count may be read back
//   ep <= top_k              allgather, since it sends no more than all-to-all
//   else                     alltoall
// Throws Error{usage} if all-to-all is asked for by name and the steps may be captured, or two-level without nodes.
DispatcherChoice resolve_dispatcher(const DispatcherChoiceInputs& q);

// Returns whose memory the ranks that share experts reach, if ranks_per_machine consecutive ranks start on each
// machine. source: how that number is known, for the reason.
PeerReach reach_on_machines(const ParallelSpec& parallel, int64_t ranks, int64_t ranks_per_machine,
                            const std::string& source);

// Returns the choice for training this run. A run on a GPU with run.graph may capture its steps.
DispatcherChoice resolve_dispatcher(const RunSpec& run, const PeerReach& peers = {});

// "auto", "allgather", "alltoall", "direct", "two_level": the values of parallel.dispatcher.
inline constexpr std::array kDispatcherKinds = {DispatcherKind::automatic, DispatcherKind::allgather,
                                                DispatcherKind::alltoall, DispatcherKind::direct,
                                                DispatcherKind::two_level};
const char* name_of(DispatcherKind kind);
// Throws Error{usage} that begins with `who` if the name is none of these.
DispatcherKind dispatcher_kind(const std::string& name, const std::string& who);

}  // namespace moebius
