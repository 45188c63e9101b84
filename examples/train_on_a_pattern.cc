// A Mixture-of-Experts model trained from a program of your own, without files: after token t comes (3 t + 1) mod 17.
#include <cstdio>

#include "engine/engine.h"

using namespace moebius;

// Every row starts elsewhere in the pattern.
void fill(MicroBatch& batch, int64_t step) {
  const int64_t rows = batch.shape.batch, seq = batch.shape.seq;
  for (int64_t i = 0; i < rows * seq; ++i) {
    const int64_t at = i % seq;
    int32_t token = static_cast<int32_t>((step + i / seq) % 17);
    if (at > 0) token = batch.target_T.ptr<int32_t>()[i - 1];
    batch.token_T.ptr<int32_t>()[i] = token;
    batch.target_T.ptr<int32_t>()[i] = (3 * token + 1) % 17;
    batch.weight_T.ptr<float>()[i] = 1;
    batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(at);
    batch.doc_start_T.ptr<int32_t>()[i] = 0;
    batch.segment_T.ptr<int32_t>()[i] = static_cast<int32_t>(i / seq);
  }
  batch.total_tokens = static_cast<double>(rows * seq);
  batch.loss_scale = 1 / batch.total_tokens;
  batch.train_step = static_cast<uint64_t>(step);
  batch.training = true;
}

int main() {
  const RunSpec run = parse_run_spec(R"(
    [model]
    model_type = "qwen3_moe"
    vocab_size = 17
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 2
    num_key_value_heads = 1
    head_dim = 16
    num_experts = 4
    num_experts_per_tok = 2
    moe_intermediate_size = 32
    max_position_embeddings = 12
    [train]
    steps = 60
    global_batch = 4
    micro_batch = 4
    seq_len = 12
    [optimizer]
    lr = 1e-2
  )",
                                     "example", {});
  run.check(/*world_size=*/1);
  Engine engine(training_engine_spec(run));
  Stream stream = engine.stream();
  engine.model().params().init(stream, run.seed);
  double loss = 0;
  for (int64_t step = 1; step <= run.train.steps; ++step) {
    fill(engine.batch(), step);
    engine.train_step(step, run.optimizer.lr_at(step, run.train.steps));
    loss = *engine.on_host(engine.model().loss_sum()).ptr<double>() * engine.batch().loss_scale;
    engine.end_of_step();
    if (step % 10 == 0) std::printf("step %2d  loss %.4f\n", static_cast<int>(step), loss);
  }
  return loss < 0.1 ? 0 : 1;  // it has learnt the pattern; ln 17 = 2.83 to begin with
}
