#include "bench/dispatch_choice.h"

#include "model/moe/direct_window.h"
#include "model/moe/exchange_estimate.h"

namespace moebius {

DispatcherKind dispatcher_of(const DispatchBenchSpec& spec, Stream& s, const Mesh& mesh, const BenchShape& shape) {
  const bool on_gpu = spec.device == DeviceKind::cuda;
  const bool is_open = spec.dispatcher == DispatcherKind::automatic && mesh.shape().world() > 1;
  const PeerReach peers = is_open ? peer_reach(s, mesh) : PeerReach{};
  std::optional<ExchangeEstimates> estimates;
  if (peers.in_nodes) {
    estimates = exchange_estimates({.rows = {.T = static_cast<double>(shape.T()),
                                             .D = static_cast<double>(shape.D),
                                             .K = static_cast<double>(shape.K),
                                             .E = static_cast<double>(shape.E),
                                             .W = mesh.shape().ep * mesh.shape().etp,
                                             .ep = mesh.shape().ep,
                                             .node = spec.ranks_per_node,
                                             .element_bytes = static_cast<double>(size_of(DType::bf16))},
                                    .sent_element_bytes = static_cast<double>(size_of(DType::bf16)),
                                    .on_gpu = on_gpu,
                                    .captures = on_gpu},
                                   usual_exchange_rates(on_gpu));
  }
  return resolve_dispatcher({.asked = spec.dispatcher,
                             .ep = mesh.shape().ep,
                             .etp = mesh.shape().etp,
                             .top_k = shape.K,
                             .num_experts = shape.E,
                             .captures = is_open && on_gpu,
                             .ranks_per_node = spec.ranks_per_node,
                             .peers = peers,
                             .estimates = estimates})
      .kind;
}

}  // namespace moebius
