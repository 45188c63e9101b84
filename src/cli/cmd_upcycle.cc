#include <memory>

#include "cli/command.h"
#include "cli/count_text.h"
#include "cli/folder_result.h"
#include "cli/options.h"
#include "cli/until_signal.h"
#include "weights/upcycle.h"

namespace moebius {
namespace {

struct Options {
  UpcycleSpec spec;
  bool json = false;
};

int run(const Options& o, Log& log) {
  check_shard_bytes(o.spec.shard_bytes);
  if (o.spec.granularity > 0 && o.spec.top_k % o.spec.granularity != 0) {
    log.warn(
        "top-k {} is not a multiple of granularity {}: only some slices of a copy are chosen, so the model does not "
        "start equal to the dense one; slices of a copy have equal router rows, so this choice is a tie that "
        "transformers may break differently",
        o.spec.top_k, o.spec.granularity);
  }
  const UpcycleResult result = upcycle(o.spec);
  const ModelSpec& m = result.model;
  print_folder_result(log, "upcycled", result.folder, o.spec.out, o.json);
  log.info("{}: {} experts of width {} per layer, {} per token; {} parameters, {} of them used by a token", m.family,
           m.num_experts, m.moe_intermediate_size, m.top_k, count_text(m.num_parameters()),
           count_text(m.num_active_parameters()));
  return 0;
}

}  // namespace

void add_upcycle(Cli& cli) {
  Command* command =
      cli.program.add_subcommand("upcycle", "makes an MoE model from a dense one, both as Hugging Face folders");
  const auto o = std::make_shared<Options>();
  command->add_option("DENSE_HF_DIR", o->spec.model, "folder of a dense model: llama, mistral, qwen2 or qwen3")
      ->required();
  command->add_option("OUT_HF_DIR", o->spec.out, "the folder to make")->required();
  command->add_option("--experts", o->spec.num_experts, "number of experts of each layer")->required();
  command->add_option("--top-k", o->spec.top_k, "number of experts of each token")->required();
  command->add_option("--granularity", o->spec.granularity, "number of experts that each MLP is cut into")
      ->capture_default_str();
  command->add_option("--seed", o->spec.seed, "seed of the routers' random weights")->capture_default_str();
  add_shard_bytes_option(*command, o->spec.shard_bytes);
  add_json_option(*command, o->json);
  add_example(*command, "moebius upcycle Qwen3-0.6B qwen3-moe --experts 8 --top-k 2");
  command->callback([&cli, o] {
    cli.run = [&cli, o] {
      o->spec.should_stop = stop_on_signal(cli);
      return run_until_signal(cli, "a folder", [&] { return run(*o, cli.log); });
    };
  });
}

}  // namespace moebius
