// The dispatcher that the MoE layers of a run use, and the reason. The run's log and `moebius
// config` print both.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "config/parallel_spec.h"
#include "config/run_spec.h"

namespace moebius {

// This says whether the ranks that share the experts of a layer (etp x ep) can write to each other's memory, and why.
struct PeerReach {
  bool all = false;
  std::string why;  // a clause, as in "rank 4 is on another machine than rank 0"; empty: nobody has asked
};

// The choice depends on these and on nothing else.
struct DispatcherQuestion {
  DispatcherKind asked = DispatcherKind::automatic;  // parallel.dispatcher
  int64_t ep = 1, etp = 1;
  int64_t top_k = 1;           // of the model's MoE layers
  int64_t num_experts = 0;     // of a layer; 0: not known, and the reason does not count rows
  bool has_moe_layers = true;  // false: nothing is dispatched
  bool captures = false;       // the steps may be captured in CUDA graphs
  PeerReach peers = {};        // of the ranks of etp x ep
  std::string origin;          // the end of the error's message: where the key was set
};

// Rows of a token that leave its rank on each way, where experts are chosen evenly. W = ETP EP ranks share E experts.
//   all-gather   W - 1
//   all-to-all   K ETP (W - 1) / W
//   direct       (W - 1) (1 - C(E - E/EP, K) / C(E, K)): the others that have any of its experts
struct RowsOfToken {
  double allgather = 0, alltoall = 0, direct = 0;
};
RowsOfToken even_rows_of_token(int64_t num_experts, int64_t top_k, int64_t ep, int64_t etp);

struct DispatcherChoice {
  // The MoE layers are built with this: allgather, alltoall or direct. If nothing is dispatched, it
  // is what was asked for.
  DispatcherKind kind = DispatcherKind::automatic;
  std::string name;    // "none", "local", "allgather", "alltoall" or "direct"
  std::string reason;  // a clause, as in "parallel.dispatcher asks for it"
};

// The first rule that applies decides:
//   no MoE layer             none
//   ep * etp = 1             local, whatever was asked for
//   asked for by name        that one
//   peers reach each other   direct, which sends the least
//   steps may be captured    allgather, since no count may be read back
//   ep <= top_k              allgather, since it sends no more than all-to-all
//   else                     alltoall
// Error{usage} if all-to-all is asked for by name and the steps may be captured.
DispatcherChoice resolve_dispatcher(const DispatcherQuestion& q);

// The choice for training this run. A run on a GPU with run.graph may capture its steps.
DispatcherChoice resolve_dispatcher(const RunSpec& run, const PeerReach& peers = {});

// "auto", "allgather", "alltoall", "direct": the values of parallel.dispatcher.
inline constexpr std::array kDispatcherKinds = {DispatcherKind::automatic, DispatcherKind::allgather,
                                                DispatcherKind::alltoall, DispatcherKind::direct};
const char* name_of(DispatcherKind kind);
// Error{usage} that begins with `who` if the name is none of these.
DispatcherKind dispatcher_kind(const std::string& name, const std::string& who);

}  // namespace moebius
