#include "train/import.h"

#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/options.h"
#include "memory/plan.h"

namespace moebius {

void add_import(Cli& cli) {
  struct Options {
    ImportSpec spec;
    bool json = false;
  };
  CLI::App* command = cli.app.add_subcommand("import", "a checkpoint from a Hugging Face folder");
  const auto o = std::make_shared<Options>();
  command->add_option("HF_DIR", o->spec.model, "Hugging Face folder")->required();
  command->add_option("CHECKPOINT", o->spec.out, "folder to make")->required();
  command->add_option("--shard-bytes", o->spec.shard_bytes, "tensors of a file, at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_json_option(*command, o->json);
  command->callback([&cli, o] {
    cli.run = [o] {
      const ImportResult r = import_hugging_face(o->spec);
      if (o->json) {
        print_json({{"tensors", r.num_tensors}, {"shards", r.num_shards}, {"bytes", r.bytes}, {"files", r.num_files}});
      } else {
        fmt::print("imported {} tensors, {}, in {} shards, and {} other files to {}\n", r.num_tensors,
                   bytes_text(r.bytes), r.num_shards, r.num_files, o->spec.out);
      }
      return 0;
    };
  });
}

}  // namespace moebius
