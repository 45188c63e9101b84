#include "config/check/sharding_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

void check_weights(const RunSpec& s) {
  if (s.parallel.fsdp) return;
  refuse_idle(s, "parallel.fsdp_shard",
              "parallel.fsdp is false, so weights are whole on each rank; set parallel.fsdp = true, or remove it");
}

void check_gradients(const RunSpec& s) {
  const char* key = "parallel.shard_gradients";
  if (!s.parallel.shard_gradients) return;
  MOEBIUS_CHECK(usage, s.optimizer.kind != OptimizerKind::muon,
                "{} = true leaves no memory of whole gradients, in which Muon brings a matrix together; set "
                "optimizer.name = \"adamw\", or remove it{}",
                key, origin(s, key));
}

}  // namespace

void check_sharding(const RunSpec& s) {
  check_weights(s);
  check_gradients(s);
}

}  // namespace moebius
