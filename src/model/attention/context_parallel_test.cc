#include <gtest/gtest.h>

#include "comm/transport/threads.h"
#include "model/attention/context_parallel_impl.h"

namespace moebius {
namespace {

// Returns AttentionBwd::owns_gpu of the backward pass of attention that is not split.
bool owns_gpu(const Mesh& mesh) {
  const auto made = make_context_parallel(CpComm::allgather, mesh, {.heads = 4, .kv_heads = 1});
  const auto& attention = dynamic_cast<const NoContextParallel&>(*made);
  ThreadPool pool{1};
  Stream null(DeviceKind::null, pool);
  StepStack stack(DeviceKind::null, nullptr, 0);
  const MicroBatch batch;
  const Step step{null, stack, batch};
  return attention_bwd_of(step, attention.spec(), {}, {}, {}).owns_gpu;
}

TEST(ContextParallel, ARankOwnsItsGpuIfThereIsNoOther) {
  EXPECT_TRUE(owns_gpu(Mesh(MeshShape{})));
  for (const MeshShape& shape :
       {MeshShape{.tp = 2, .edp = 2}, MeshShape{.dp = 2, .edp = 2}, MeshShape{.dp = 2, .ep = 2}, MeshShape{.pp = 2}}) {
    run_threads(2, {.timeout_s = 60}, [&](Transport& transport) { EXPECT_FALSE(owns_gpu(Mesh(shape, transport))); });
  }
}

}  // namespace
}  // namespace moebius
