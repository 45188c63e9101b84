#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "train/evaluate.h"
#include "train/rank_report.h"
#include "weights/load.h"

namespace moebius {
namespace {

struct Options {
  std::string model, data, device = "cpu", dtype = "bf16";
  AddedAdapter adapter;
  LayoutOptions layout;
  int64_t seq_len = 0, batch = 8, max_batches = 0;
  int threads = 0;
  bool json = false;
};

// A model of a run is evaluated as the run did it, a Hugging Face model by whole contexts of at
// most 2048 tokens.
RunSpec eval_run(const Options& o, int64_t num_ranks) {
  MOEBIUS_CHECK(usage, o.seq_len >= 0, "--seq-len: expected 0 or more; got {}", o.seq_len);
  MOEBIUS_CHECK(usage, o.batch >= 1, "--batch: expected at least 1; got {}", o.batch);
  MOEBIUS_CHECK(usage, o.max_batches >= 0, "--max-batches: expected 0 or more; got {}", o.max_batches);
  RunSpec run;
  run.device = device_kind(o.device);
  const auto trained = read_run_spec(o.model);
  run.data.separate_documents = (trained && trained->data.separate_documents) || has_target_spans(o.data);
  run.data.pack_documents = trained && trained->data.pack_documents;
  run.model = read_model_spec(o.model);
  run.train.seq_len = o.seq_len > 0 ? o.seq_len
                      : trained     ? trained->train.seq_len
                                    : std::min<int64_t>(run.model.max_position_embeddings, 2048);
  MOEBIUS_CHECK(usage, run.train.seq_len <= run.model.max_position_embeddings,
                "--seq-len: expected at most the model's max_position_embeddings = {}; got {}; lower it",
                run.model.max_position_embeddings, run.train.seq_len);
  const int64_t max_batch = std::numeric_limits<int32_t>::max() / std::max<int64_t>(1, run.train.seq_len);
  MOEBIUS_CHECK(usage, o.batch <= max_batch, "--batch: expected at most {} sequences of {} tokens; got {}; lower it",
                max_batch, run.train.seq_len, o.batch);
  run.train.micro_batch = run.train.global_batch = o.batch;
  run.precision.compute = compute_dtype(o.dtype);
  // The loss is of the next token, whether or not the model has modules for further tokens.
  if (run.model.num_mtp_layers > 0) run.train.mtp_coeff = 0;
  run.train.steps = 1;  // a recipe must have these two
  run.optimizer.lr = 1;
  run.parallel = parallel_of("eval", o.layout.overrides, run);
  run.parallel.check(num_ranks);
  run.train.global_batch *= run.parallel.dp(num_ranks) * (run.parallel.vpp > 1 ? run.parallel.pp : 1);
  if (num_ranks > 1) run.check(num_ranks);
  run.data.tokenizer = trained ? trained->data.tokenizer : o.model;  // the tokenizer that the dataset needs
  return run;
}

EngineSpec eval_engine_spec(const RunSpec& run, Transport& world) {
  EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, world.size()));
  spec.use = ModelUse::inference;
  spec.optimizer.reset();
  spec.num_micro_batches = run.parallel.vpp > 1 ? run.parallel.pp : 1;
  spec.shape.max_segments = run.train.micro_batch * run.train.seq_len;
  spec.world = world.size() > 1 ? &world : nullptr;
  return spec;
}

// Every rank has the same result. Each has read its share of the weights and of the data.
EvalResult eval_rank(const Options& o, Transport& world, Cli& cli) {
  Control control(world);
  check_same_program(control, "eval");
  RunSpec run;
  control.together([&] {
    run = eval_run(o, world.size());
    check_weights(o.model, run.model, o.adapter);
  });
  run.threads = o.threads == 0 && world.size() > 1 ? cpu_share(control) : num_threads(o.threads);
  Engine engine(eval_engine_spec(run, world));
  std::optional<Loader> loader;
  std::vector<NotFinite> not_finite;
  control.together([&] {
    loader.emplace(std::vector<DatasetSpec>{{.prefix = o.data}}, run, /*shuffle=*/false, engine.data_share(), "--data");
    loader->check_evaluation(o.max_batches, "--max-batches");
    Stream s = engine.stream();
    not_finite = load_weights(s, engine.model(), o.model, o.adapter);
  });
  warn_of_not_finite(cli.log, control, o.model, not_finite);
  const EvalResult result = evaluate(engine, *loader, o.max_batches, [&] { return control.max(cli.signal) != 0; });
  warn_of_fallback_kernels(cli.log, control, engine);
  MOEBIUS_CHECK(numerics, std::isfinite(result.loss),
                "eval: expected a finite loss on {}; got {}; inspect the weights of {}, or try --dtype f32", o.data,
                result.loss, o.model);
  return result;
}

void print(const Options& o, const EvalResult& r) {
  if (o.json) {
    nlohmann::ordered_json object{{"loss", r.loss},
                                  {"perplexity", std::exp(r.loss)},
                                  {"tokens", static_cast<int64_t>(r.tokens)},
                                  {"tokens_left_out", r.num_left_out}};
    if (r.bits_per_byte) object["bits_per_byte"] = *r.bits_per_byte;
    return print_json(object);
  }
  fmt::print("loss {:.6f}  perplexity {:.4f}  bits per byte {}  over {:.0f} tokens{}\n", r.loss, std::exp(r.loss),
             r.bits_per_byte ? fmt::format("{:.4f}", *r.bits_per_byte)
                             : fmt::format("unknown ({}.json does not say how many bytes the text has)", o.data),
             r.tokens, r.num_left_out == 0 ? "" : fmt::format(", {} left out", counted(r.num_left_out, "token")));
}

int run_eval(const Options& o, Cli& cli) {
  Launch launch = detect_launch(process_environment());
  if (o.layout.ranks != 1) launch = launch_threads(o.layout.ranks, launch);
  const WorldOptions options = world_options(
      o.layout.timeout_s, [&] { return mesh_shape(eval_run(o, launch.num_ranks).parallel, launch.num_ranks); });
  std::atomic<int> code{0};
  run_ranks(launch, options, [&](Transport& world) {
    const EvalResult result = eval_rank(o, world, cli);
    if (world.rank() == 0 && result.complete) return print(o, result);
    if (result.complete) return;
    Control control(world);
    const auto signal = static_cast<int>(control.max(cli.signal));
    if (world.rank() == 0)
      cli.log.info("signal {}: ending after {:.0f} tokens, without a result", signal, result.tokens);
    code = 128 + signal;
  });
  return code;
}

}  // namespace

void add_eval(Cli& cli) {
  Command* command =
      cli.program.add_subcommand("eval", "prints a model's loss, perplexity and bits per byte on a token dataset");
  const auto o = std::make_shared<Options>();
  command->add_option("MODEL", o->model, "a checkpoint, a run's folder, or a Hugging Face folder")->required();
  add_adapter_options(*command, o->adapter, " that is added to the weights of MODEL");
  command->add_option("--data", o->data, "the dataset: the PREFIX of PREFIX.bin and PREFIX.idx")->required();
  command
      ->add_option("--seq-len", o->seq_len,
                   "tokens per sequence; 0: as in the run, else the model's context up to 2048")
      ->capture_default_str();
  command->add_option("--batch", o->batch, "number of sequences computed at a time")->capture_default_str();
  command->add_option("--max-batches", o->max_batches, "number of batches to read; 0: the whole dataset")
      ->capture_default_str();
  add_device_option(*command, o->device);
  add_dtype_option(*command, o->dtype);
  add_threads_option(*command, o->threads);
  add_json_option(*command, o->json);
  add_layout_options(*command, o->layout);
  add_example(*command, "moebius eval runs/mine --data data/heldout");
  command->callback([&cli, o] { cli.run = [&cli, o] { return run_eval(*o, cli); }; });
}

}  // namespace moebius
