#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/options.h"
#include "infer/parity.h"

namespace moebius {

void add_forward(Cli& cli) {
  struct Options {
    ParitySpec spec;
    std::string device = "cpu", dtype = "f32";
    int threads = 0;
    bool json = false;
  };
  Command* command = cli.program.add_subcommand(
      "forward", "writes logits, loss, routes and gradients of given tokens, for comparison with other software");
  const auto o = std::make_shared<Options>();
  command->add_option("MODEL", o->spec.model, "a checkpoint, a run's folder, or a Hugging Face folder")->required();
  command
      ->add_option(
          "--tokens", o->spec.tokens,
          "safetensors file with `tokens` I32 or I64 [B, S]; `doc_start` of the same shape separates documents")
      ->required();
  command->add_option("--out", o->spec.out, "the safetensors file to write")->required();
  add_adapter_options(*command, o->spec.adapter, "; --grads are then its gradients");
  command->add_flag("--grads", o->spec.gradients, "write the gradient of every tensor too");
  command->add_option("--mtp", o->spec.mtp_coeff,
                      "with --grads: run multi-token prediction, write its logits, and add its loss to the objective "
                      "with this coefficient");
  add_device_option(*command, o->device);
  add_dtype_option(*command, o->dtype);
  add_threads_option(*command, o->threads);
  add_json_option(*command, o->json);
  add_example(*command, "moebius forward MODEL --tokens tokens.safetensors --out out.safetensors --grads");
  command->callback([&cli, o] {
    cli.run = [&cli, o] {
      o->spec.device = device_kind(o->device);
      o->spec.compute = compute_dtype(o->dtype);
      o->spec.threads = num_threads(o->threads);
      const ParityResult result = write_parity(o->spec);
      warn_if_any(cli.log, not_finite_warning(o->spec.model, result.not_finite));
      warn_if_any(cli.log, result.fallback_kernels);
      if (result.not_finite.empty() && !std::isfinite(result.loss)) {
        cli.log.warn(
            "forward: expected a finite loss; got {}, although all weights are finite: activations overflow; "
            "inspect the logits, or use --dtype f32",
            result.loss);
      }
      if (o->json) {
        print_json({{"loss", result.loss}, {"batch", result.batch}, {"seq", result.seq}, {"out", o->spec.out}});
      } else {
        fmt::print("loss {:.6f} over {} x {} tokens; wrote {}\n", result.loss, result.batch, result.seq, o->spec.out);
      }
      return 0;
    };
  });
}

}  // namespace moebius
