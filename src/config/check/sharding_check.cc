#include "config/check/sharding_check.h"

#include <string>

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {
namespace {

void refuse_unless(const RunSpec& s, const char* key, bool holds, const std::string& why) {
  MOEBIUS_CHECK(usage, holds, "{} = true {}{}", key, why, origin(s, key));
}

void check_weights(const RunSpec& s) {
  const char* key = "parallel.fsdp";
  if (!s.parallel.fsdp)
    return refuse_idle(
        s, "parallel.fsdp_shard",
        "parallel.fsdp is false, so weights are whole on each rank; set parallel.fsdp = true, or remove it");
  refuse_unless(s, key, s.lora.base == LoraBase::compute,
                "shards weights in precision.compute, and lora.base holds them in blocks of few bits; set lora.base = "
                "\"compute\", or remove it");
}

void check_gradients(const RunSpec& s) {
  const char* key = "parallel.shard_gradients";
  if (!s.parallel.shard_gradients) return;
  refuse_unless(s, key, s.optimizer.kind != OptimizerKind::muon,
                "leaves no memory of whole gradients, in which Muon brings a matrix together; set optimizer.name = "
                "\"adamw\", or remove it");
}

}  // namespace

void check_sharding(const RunSpec& s) {
  check_weights(s);
  check_gradients(s);
}

}  // namespace moebius
