// For tests of engines: the end of a step after passes that a test ran by itself, the use of the step stack, and the
// spec of an engine that no machine can hold.
#pragma once

#include "engine/engine.h"

namespace moebius {

struct EngineTestAccess {
  // Reduces and clips gradients and runs the optimizer, eagerly. All ranks call it together.
  static void optimizer_step(Engine& engine, int64_t step, double lr) {
    Stream s = engine.stream();
    engine.batches_->set_lr_and_step(step, lr);
    engine.batches_->upload(s, 0, 1);  // read_metrics waits for it
    engine.reduce(s);
    engine.update(s, engine.plan_.stack(), engine.batches_->on_device(0).lr_and_step_2());
    engine.read_metrics();
  }
  // Returns the high-water mark of the step stack, in bytes.
  static int64_t stack_high_water(Engine& engine) { return engine.plan_.stack().high_water(); }
};

// A spec that needs hundreds of terabytes: an engine is refused before it allocates any of them.
inline EngineSpec huge_spec(DeviceKind device) {
  return {.model = {.vocab_size = 1 << 20,
                    .hidden_size = 1 << 14,
                    .num_layers = 7,
                    .num_heads = 1 << 12,
                    .num_kv_heads = 8,
                    .head_dim = 256,
                    .max_position_embeddings = 33,
                    .moe_layers = std::vector<bool>(7, true),
                    .num_experts = 64,
                    .top_k = 2,
                    .moe_intermediate_size = 1 << 20},
          .use = ModelUse::training,
          .shape = {.batch = 3, .seq = 33, .max_segments = 3},
          .optimizer = OptimizerSpec{.lr = 0.5},
          .device = device};
}

}  // namespace moebius
