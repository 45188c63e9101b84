#include "model/moe/dispatcher.h"

#include "model/moe/dispatchers/dispatcher_allgather.h"
#include "model/moe/dispatchers/dispatcher_alltoall.h"
#include "model/moe/dispatchers/dispatcher_direct.h"
#include "model/moe/dispatchers/dispatcher_local.h"
#include "model/moe/dispatchers/dispatcher_two_level.h"

namespace moebius {

Group& group_of_experts(const Mesh& mesh) { return mesh.group(mesh.shape().etp == 1 ? Axis::ep : Axis::etp_ep); }

std::unique_ptr<Dispatcher> make_dispatcher(DispatcherKind kind, const DispatcherSpec& spec) {
  const MeshShape& mesh = spec.mesh->shape();
  MOEBIUS_ASSERT(spec.num_experts % mesh.ep == 0);
  if (mesh.etp * mesh.ep == 1) return std::make_unique<LocalDispatcher>(spec);
  MOEBIUS_CHECK(usage, kind == DispatcherKind::alltoall || spec.rows_factor == 0,
                "moe.rank_rows_factor = {} bounds the rows of a rank, which only all-to-all can check; set "
                "parallel.dispatcher = \"alltoall\", or rank_rows_factor = 0",
                spec.rows_factor);
  switch (kind) {
    case DispatcherKind::allgather:
      return std::make_unique<AllGatherDispatcher>(spec);
    case DispatcherKind::alltoall:
      return std::make_unique<AllToAllDispatcher>(spec);
    case DispatcherKind::direct:
      return std::make_unique<DirectDispatcher>(spec);
    case DispatcherKind::two_level:
      return std::make_unique<TwoLevelDispatcher>(spec);
    case DispatcherKind::automatic:
      break;
  }
  MOEBIUS_FAIL(internal,
               "make_dispatcher: experts on {} ranks need a dispatcher that was chosen; got \"auto\", which "
               "resolve_dispatcher() resolves",
               mesh.etp * mesh.ep);
}

}  // namespace moebius
