#include "weights/export.h"

#include <filesystem>
#include <memory>

#include "cli/command.h"
#include "cli/folder_result.h"
#include "cli/options.h"
#include "cli/until_signal.h"
#include "weights/adapter.h"
#include "weights/load.h"

namespace moebius {
namespace {

struct Options {
  ExportSpec spec;
  std::string dtype;
  bool adapter = false, fused_experts = false, json = false;
};

int run_adapter(Log& log, const Options& o) {
  const ExportSpec& spec = o.spec;
  MOEBIUS_CHECK(
      usage, o.dtype.empty() && spec.files.empty(),
      "export --adapter: expected no --dtype and no --files, since adapters are written in f32 and without the model; remove "
      "them");
  const AdapterExportResult r = export_adapter(
      {.out = spec.out, .model = spec.model, .fused_experts = o.fused_experts, .should_stop = spec.should_stop});
  if (o.json)
    print_json({{"tensors", r.num_tensors}, {"bytes", r.bytes}});
  else
    fmt::print("exported {} tensors of adapters, {}, to {}\n", r.num_tensors, bytes_text(r.bytes), spec.out);
  if (r.needs_fused_experts)
    log.warn(
        "{} is for transformers 4. With transformers 5, PEFT loses or refuses adapters of MLPs that are not routed "
        "experts, those of gate or up alone, and those of routed experts and routers of qwen2_moe. --fused-experts "
        "writes a form for transformers 5",
        spec.out);
  return 0;
}

// Returns the folder of the tokenizer that a run was trained with; "DIR" if there is none.
std::string tokenizer_folder(const std::string& model) {
  const auto trained = read_run_spec(model);
  std::error_code unreadable;
  const bool is_folder = trained && std::filesystem::is_directory(trained->data.tokenizer, unreadable);
  return is_folder ? trained->data.tokenizer : "DIR";
}

int run(Log& log, Options& o) {
  if (o.adapter) return run_adapter(log, o);
  check_shard_bytes(o.spec.shard_bytes);
  o.spec.block_fp8 = o.dtype == "fp8_block";
  MOEBIUS_CHECK(usage, o.dtype.empty() || o.dtype == "f32" || o.dtype == "bf16" || o.spec.block_fp8,
                "--dtype: expected f32, bf16 or fp8_block; got \"{}\"", o.dtype);
  if (!o.dtype.empty() && !o.spec.block_fp8) o.spec.dtype = compute_dtype(o.dtype);
  print_folder_result(log, "exported", export_hugging_face(o.spec), o.spec.out, o.json);
  if (!std::filesystem::exists(o.spec.out + "/tokenizer.json"))
    log.info("{} has no tokenizer; --files {} copies the tokenizer and other files of a folder", o.spec.out,
             tokenizer_folder(o.spec.model));
  return 0;
}

}  // namespace

void add_export(Cli& cli) {
  Command* command = cli.program.add_subcommand("export", "makes a Hugging Face folder from a checkpoint or a run");
  const auto o = std::make_shared<Options>();
  command->add_option("CHECKPOINT", o->spec.model, "a checkpoint, a run's folder, or a Hugging Face folder")
      ->required();
  command->add_option("HF_DIR", o->spec.out, "the folder to make")->required();
  command->add_option(
      "--dtype", o->dtype,
      "f32, bf16, or fp8_block: matrices in 8-bit floats with a scale for each block of 128 x 128, as DeepSeek "
      "releases them; default: imported weights as they are stored, trained weights in f32");
  command->add_option("--files", o->spec.files,
                      "folder whose tokenizer and other files are copied; without it: those that were imported");
  const Argument* adapter =
      command->add_flag("--adapter", o->adapter,
                        "write only the adapters of a run with [lora], in PEFT's format; without it they are merged");
  command
      ->add_flag("--fused-experts", o->fused_experts,
                 "with --adapter: all experts of a layer as one parameter, as transformers 5 has them (PEFT 0.19 or "
                 "later)")
      ->needs(*adapter);
  add_shard_bytes_option(*command, o->spec.shard_bytes);
  add_json_option(*command, o->json);
  add_example(*command, "moebius export runs/mine mine-hf --dtype bf16");
  command->callback([&cli, o] {
    cli.run = [&cli, o] {
      o->spec.should_stop = stop_on_signal(cli);
      return run_until_signal(cli, "a folder", [&] { return run(cli.log, *o); });
    };
  });
}

}  // namespace moebius
