// The layout: the degrees of parallelism. dp is what remains of the world size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moebius {

// The methods of context parallelism (model/attention/context_parallel.h).
enum class CpComm { allgather, ring, alltoall, hierarchical };

// The order of sums over ranks with GPUs: that of the ranks, by our kernels, or NCCL's own.
enum class RankSums { ranks, nccl };

// The order of a pipeline's passes (parallel/pipeline/schedule.h).
enum class PipelineSchedule { one_f_one_b, zb_h1 };
const char* name_of(PipelineSchedule schedule);  // as parallel.schedule names it

// The dispatchers, which send tokens to experts of other ranks (model/moe/dispatcher.h).
// automatic: resolve_dispatcher() chooses.
enum class DispatcherKind { automatic, allgather, alltoall, direct, two_level };

// The work that overlaps with the exchange of an MoE layer's rows (model/side_work.h). No choice changes a bit.
//   none         nothing
//   layer        work of the same layer: products of its experts' backward pass, and its shared expert
//   batch_split  in addition the products of the rows of this rank's own tokens
enum class ExpertOverlap { none, layer, batch_split };

struct ParallelSpec {
  int64_t tp = 1, cp = 1, pp = 1, vpp = 1, ep = 1, etp = 1;
  std::string layout;  // stages as in "E t*2 | t*3 L"; empty: even
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  CpComm cp_comm = CpComm::allgather;
  std::optional<CpComm> cp_comm_window;  // method of layers with a sliding window; empty: cp_comm
  bool dynamic_cp = false;               // chooses cp for each micro-batch, among the powers of two up to cp
  int64_t cp_inner = 1;                  // with hierarchical: the number of ranks that exchange rows for heads
  DispatcherKind dispatcher = DispatcherKind::automatic;
  int64_t ranks_per_node = 8;  // consecutive ranks that form a node
  ExpertOverlap expert_overlap = ExpertOverlap::none;
  RankSums sums = RankSums::ranks;
  bool fsdp = false;             // each rank keeps a shard of the weights of a layer; changes no bit
  int64_t fsdp_shard = 0;        // the ranks over which these are sharded; 0: all that hold the same weights
  bool shard_gradients = false;  // and a shard of the sums of its gradients
  bool overlap = true;           // overlaps messages of gradients, weights and stages with compute; changes no bit

  // dp and edp are what remains of the world size in the dense and in the expert view of the same ranks (Parallel
  // Folding: pp is shared, ep may span tp, cp and dp).
  // Throws Error{usage} with the equation that fails unless world_size ranks can have this layout.
  void check(int64_t world_size) const;
  int64_t dp(int64_t world_size) const;   // world / (tp cp pp)
  int64_t edp(int64_t world_size) const;  // world / (etp ep pp)
  CpComm cp_comm_of_window() const { return cp_comm_window.value_or(cp_comm); }
  bool is_hierarchical() const {
    return cp_comm == CpComm::hierarchical || cp_comm_of_window() == CpComm::hierarchical;
  }
  bool operator==(const ParallelSpec&) const = default;
};

}  // namespace moebius
