#include "weights/import.h"

#include <memory>

#include "cli/command.h"
#include "cli/folder_result.h"
#include "cli/options.h"
#include "cli/until_signal.h"

namespace moebius {

void add_import(Cli& cli) {
  struct Options {
    ImportSpec spec;
    bool json = false;
  };
  Command* command = cli.program.add_subcommand("import", "makes a checkpoint from a Hugging Face folder");
  const auto o = std::make_shared<Options>();
  command->add_option("HF_DIR", o->spec.model, "the Hugging Face folder to read")->required();
  command->add_option("CHECKPOINT", o->spec.out, "the folder to make")->required();
  add_adapter_options(*command, o->spec.adapter, " that is added to the weights");
  add_shard_bytes_option(*command, o->spec.shard_bytes);
  add_json_option(*command, o->json);
  add_example(*command, "moebius import Qwen3-30B-A3B checkpoints/qwen3");
  command->callback([&cli, o] {
    cli.run = [&cli, o] {
      check_shard_bytes(o->spec.shard_bytes);
      o->spec.should_stop = stop_on_signal(cli);
      return run_until_signal(cli, "a checkpoint", [&] {
        print_folder_result(cli.log, "imported", import_hugging_face(o->spec), o->spec.out, o->json);
        return 0;
      });
    };
  });
}

}  // namespace moebius
