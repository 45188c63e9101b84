// The dispatcher that the MoE layers of a run use, and the reason. The run's log and `moebius
// config` print both.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
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

// The exchange of rows of an MoE layer in a training step of one micro-batch, with balanced routing: the bytes that a
// rank sends to ranks of other nodes and of its own, and the predicted time.
struct ExchangeEstimate {
  double across_bytes = 0, inside_bytes = 0, seconds = 0;
};

// The estimates for ranks of etp x ep on several whole nodes (model/moe/exchange_estimate.h).
struct ExchangeEstimates {
  ExchangeEstimate allgather, alltoall, two_level;
  std::string rates;  // a clause: the rates of the links, and their source
  // REQUIRES: one of these three.
  const ExchangeEstimate& of(DispatcherKind kind) const;
};

// All inputs of the choice.
struct DispatcherChoiceInputs {
  DispatcherKind asked = DispatcherKind::automatic;  // parallel.dispatcher
  int64_t ep = 1, etp = 1;
  int64_t top_k = 1;           // top-k of the model's MoE layers
  int64_t num_experts = 0;     // experts of a layer; 0: not known, and the reason does not count rows
  bool has_moe_layers = true;  // false: nothing is dispatched
  bool captures = false;       // the steps may be captured in CUDA graphs
  int64_t ranks_per_node = 8;  // parallel.ranks_per_node
  PeerReach peers = {};        // which memory the ranks of etp x ep can access
  // They are read if the ranks of each node, and not all ranks, access each other's memory.
  std::optional<ExchangeEstimates> estimates = {};
  std::string origin;  // the end of the error's message: where the key was set
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

// Returns whether two-level is possible: the ranks of etp x ep are on two or more whole nodes, and each ep rank
// is on one.
bool has_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node);
// Throws Error{usage} unless has_nodes(). origin: the end of the message.
void check_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node, const std::string& origin = "");

struct DispatcherChoice {
  // The MoE layers are built with this: allgather, alltoall, direct or two_level. If nothing is dispatched, it
  // is what was asked for.
  DispatcherKind kind = DispatcherKind::automatic;
  std::string name;                                 // "none", "local", "allgather", "alltoall", "direct" or "two_level"
  std::string reason;                               // a clause, as in "parallel.dispatcher asks for it"
  std::optional<ExchangeEstimates> estimates = {};  // those that were compared
};
inline constexpr double kMinGain = 1.1;

// Returns the choice. The first rule that applies decides:
//   no MoE layer             none
//   ep * etp = 1             local, whatever was asked for
//   asked for by name        that one
//   peers have access        direct, which sends the least
//   steps may be captured    all-gather, since no count may be read back
//   ep <= top_k              all-gather, since it sends no more than all-to-all
//   else                     all-to-all
// If peers of a node have access, and there are estimates, the last three give way to the dispatcher with the shortest
// predicted time, of two-level, all-gather, and all-to-all where steps are not captured. It must be kMinGain times as
// fast as the rules' choice, since predictions are not exact.
// Throws Error{usage} if all-to-all is asked for by name and the steps may be captured, or two-level without nodes.
DispatcherChoice resolve_dispatcher(const DispatcherChoiceInputs& q);

// Returns whose memory the ranks that share experts reach, if ranks_per_machine consecutive ranks start on each
// machine. source: how that number is known, for the reason.
PeerReach reach_on_machines(const ParallelSpec& parallel, int64_t ranks, int64_t ranks_per_machine,
                            const std::string& source);

// Returns the inputs for training this run, without estimates. A run on a GPU with run.graph may capture its steps.
DispatcherChoiceInputs dispatcher_inputs(const RunSpec& run, const PeerReach& peers = {});
// Returns the choice for these.
DispatcherChoice resolve_dispatcher(const RunSpec& run, const PeerReach& peers = {});

// Returns a line for the log if run.machine names a file whose rates had no part in the choice, else an empty text.
std::string unused_machine_text(const RunSpec& run, const DispatcherChoice& choice);

// "auto", "allgather", "alltoall", "direct", "two_level": the values of parallel.dispatcher.
inline constexpr std::array kDispatcherKinds = {DispatcherKind::automatic, DispatcherKind::allgather,
                                                DispatcherKind::alltoall, DispatcherKind::direct,
                                                DispatcherKind::two_level};
const char* name_of(DispatcherKind kind);
// Throws Error{usage} that begins with `who` if the name is none of these.
DispatcherKind dispatcher_kind(const std::string& name, const std::string& who);

}  // namespace moebius
