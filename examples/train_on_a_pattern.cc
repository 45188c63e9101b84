// A Mixture-of-Experts model trained from a program of your own, without files: after token t comes
// (3 t + 1) mod 17.
#include <cstdio>

#include "engine/engine.h"

using namespace moebius;

struct Pattern final : SequenceSource {
  using SequenceSource::SequenceSource;
  int32_t token(int64_t step, int64_t sequence, int64_t i) const override {
    int64_t token = (step + sequence) % 17;  // each sequence starts elsewhere in the pattern
    while (i-- > 0) token = (3 * token + 1) % 17;
    return static_cast<int32_t>(token);
  }
};

int main() {
  const RunSpec run = parse_run_spec(
      "", "example",
      {"model.model_type=qwen3_moe", "model.vocab_size=17", "model.hidden_size=32", "model.num_hidden_layers=2",
       "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16", "model.num_experts=4",
       "model.num_experts_per_tok=2", "model.moe_intermediate_size=32", "model.max_position_embeddings=12",
       "train.steps=60", "train.global_batch=4", "train.micro_batch=4", "train.seq_len=12", "optimizer.lr=1e-2"});
  run.check(/*world_size=*/1);
  Engine engine(training_engine_spec(run));
  Stream stream = engine.stream();
  engine.model().params().init(stream, run.seed);
  Pattern pattern(run);
  double loss = 0;
  for (int64_t step = 1; step <= run.train.steps; ++step) {
    engine.load_batch(pattern, step);
    engine.step(step, run.optimizer.lr_at(step, run.train.steps));
    loss = engine.loss();
    engine.end_of_step();
    if (step % 10 == 0) std::printf("step %2d  loss %.4f\n", static_cast<int>(step), loss);
  }
  return loss < 0.1 ? 0 : 1;  // it has learnt the pattern; ln 17 = 2.83 to begin with
}
