#include "config/check/qk_clip_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {

void check_qk_clip(const RunSpec& s) {
  if (s.optimizer.qk_clip == 0) return;
  const auto refuse_unless = [&](bool holds, const char* why) {
    MOEBIUS_CHECK(usage, holds, "optimizer.qk_clip = {} {}{}", s.optimizer.qk_clip, why,
                  origin(s, "optimizer.qk_clip"));
  };
  refuse_unless(s.model.qk_norm == QkNorm::none,
                "scales the projections of queries and keys, and the norms of this model's queries and keys undo that; "
                "remove it");
  refuse_unless(s.model.clip_qkv == 0,
                "scales the projections of queries and keys, which this model clamps (model.clip_qkv); remove it");
  refuse_unless(!s.lora.is_on(), "scales weights that lora.rank above 0 freezes; remove it");
}

}  // namespace moebius
