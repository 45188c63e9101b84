#include "config/check/zb_h1_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {

void check_zb_h1(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  if (p.schedule != PipelineSchedule::zb_h1) return;
  const auto refuse_unless = [&](bool holds, const std::string& why) {
    MOEBIUS_CHECK(usage, holds, "parallel.schedule = \"zb_h1\" {}, or parallel.schedule = \"1f1b\"{}", why,
                  origin(s, "parallel.schedule"));
  };
  refuse_unless(
      p.vpp == 1,
      fmt::format("needs one stage per rank (parallel.vpp = 1); got parallel.vpp = {}; set parallel.vpp = 1", p.vpp));
  if (p.pp == 1) return;
  // The two backward passes of a layer are separate, and other layers would overwrite its gradients between them.
  refuse_unless(
      s.optimizer.grad == GradFormat::f32,
      "needs sums of gradients in f32; got optimizer.grad = \"bf16\", with which all layers share one buffer of f32 "
      "gradients; set optimizer.grad = \"f32\"");
  refuse_unless(!p.fsdp,
                "needs whole weights on each rank; got parallel.fsdp = true, with which the second backward pass would "
                "gather them again; set parallel.fsdp = false");
  refuse_unless(!s.offload_weights,
                "needs whole weights on the device; got \"weights\" in memory.offload, with which the second backward "
                "pass would copy them again; remove the name");
  refuse_unless(
      !p.shard_gradients,
      "needs whole gradients on each rank; got parallel.shard_gradients = true, with which a rank has memory for the "
      "gradients of one layer; set parallel.shard_gradients = false");
}

}  // namespace moebius
