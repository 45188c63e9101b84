// The checks of a run that trains: its folder, its data, and a place for its trace.
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "config/check/run_check_keys.h"
#include "config/recipe/value_rule.h"
#include "config/run_spec.h"
#include "core/error.h"

namespace moebius {
namespace {

// A trace that cannot be written is an error at the start. The run makes its own folder, which need
// not exist yet.
void check_trace(const RunSpec& s) {
  namespace fs = std::filesystem;
  if (s.log.trace.empty()) return;
  const fs::path file = fs::absolute(s.log.trace).lexically_normal(), folder = file.parent_path();
  std::error_code ignored;
  const bool is_made =
      folder == fs::absolute(s.dir + "/.").lexically_normal().parent_path() && !fs::exists(folder, ignored);
  MOEBIUS_CHECK(usage, is_made || (fs::is_directory(folder, ignored) && access(folder.c_str(), W_OK) == 0),
                "log.trace = {}: {} must be a folder that may be written to; make it or choose another{}",
                shown(s.log.trace), folder.string(), origin(s, "log.trace"));
  MOEBIUS_CHECK(usage, !fs::is_directory(file, ignored), "log.trace = {} must be a file; got a folder; add its name{}",
                shown(s.log.trace), origin(s, "log.trace"));
}

void check_tokenizer_is_there(const RunSpec& s) {
  std::error_code unreadable;  // a name that no folder can have
  MOEBIUS_CHECK(
      usage, s.data.tokenizer == "bytes" || std::filesystem::exists(s.data.tokenizer + "/tokenizer.json", unreadable),
      "data.tokenizer must be \"bytes\" or a folder with a tokenizer.json; got {}{}{}", shown(s.data.tokenizer),
      s.data.tokenizer.ends_with("tokenizer.json") ? "; give its folder" : "", origin(s, "data.tokenizer"));
}

}  // namespace

void RunSpec::check_trainable() const {
  const char* run_dir = dir.empty() ? "run.dir must be given: the folder of the run's checkpoints and metrics" : "";
  const char* datasets =
      data.train.empty() ? "data.train must be given: the prefixes of the token datasets to train on" : "";
  MOEBIUS_CHECK(usage, *run_dir == 0 && *datasets == 0, "{}{}{}", run_dir, *run_dir && *datasets ? "; " : "", datasets);
  MOEBIUS_CHECK(usage, train.eval_every == 0 || !data.valid.empty(),
                "train.eval_every = {} needs data.valid; give the prefixes of the datasets to evaluate on",
                train.eval_every);
  MOEBIUS_CHECK(usage, train.eval_batches == 0 || !data.valid.empty(),
                "train.eval_batches = {} needs data.valid; give the prefixes of the datasets to evaluate on",
                train.eval_batches);
  MOEBIUS_CHECK(usage, !lora.is_on() || !init_from.empty(),
                "model.init_from must be given with lora.rank = {}: the folder of the weights that the adapters belong "
                "to, which checkpoints leave out",
                lora.rank);
  check_tokenizer_is_there(*this);
  check_trace(*this);
}

}  // namespace moebius
