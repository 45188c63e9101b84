#include "cli/options.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "device/accelerator.h"
#include "device/device.h"
#include "weights/source.h"

namespace moebius {

void add_device_option(Command& command, std::string& device) {
  command.add_option("--device", device, "the device that computes: cpu or cuda")->capture_default_str();
}

void add_dtype_option(Command& command, std::string& dtype) {
  command.add_option("--dtype", dtype, "the dtype of the computation: f32 or bf16")->capture_default_str();
}

void add_threads_option(Command& command, int& threads) {
  command.add_option("--threads", threads, "number of CPU threads; 0: one for each CPU that this process may use")
      ->capture_default_str();
}

void add_json_option(Command& command, bool& json) {
  command.add_flag("--json", json, "print the result as JSON on standard output");
}

void add_shard_bytes_option(Command& command, int64_t& bytes) {
  command.add_option("--shard-bytes", bytes, "the largest size of a file's tensors, in bytes")->capture_default_str();
}

void add_adapter_options(Command& command, AddedAdapter& adapter, const std::string& more) {
  const Argument* path =
      command
          .add_option("--adapter", adapter.path, "folder of an adapter (PEFT's format, or a run with [lora])" + more)
          ->not_empty();
  command
      .add_flag("--any-base", adapter.any_base,
                "with --adapter: accept it although it was trained on other weights than these")
      ->needs(*path);
}

void check_shard_bytes(int64_t bytes) {
  MOEBIUS_CHECK(usage, bytes >= 1, "--shard-bytes: expected at least 1; got {}", bytes);
}

void add_layout_options(Command& command, LayoutOptions& options) {
  command
      .add_option("--set", options.overrides,
                  "parallel.KEY=VALUE, the layout on several ranks, such as parallel.ep=2; may be repeated")
      ->repeatable();
  add_ranks_options(command, options.ranks, options.timeout_s);
}

void add_ranks_options(Command& command, int64_t& ranks, std::optional<double>& timeout_s) {
  command
      .add_option("--ranks", ranks,
                  "number of ranks, started as threads of this process for debugging; mpirun, srun and torchrun start "
                  "processes")
      ->capture_default_str();
  command.add_option(
      "--timeout", timeout_s,
      "seconds that a rank waits for another before the run ends with an error; the default is 600 until "
      "the first step is done, then 60 more than the longest step so far");
}

ParallelSpec parallel_of(const std::string& command, const std::vector<std::string>& overrides, RunSpec run) {
  for (const std::string& each : overrides)
    MOEBIUS_CHECK(usage, each.starts_with("parallel."),
                  "{} --set: expected a key of [parallel], as in parallel.tp=2; got {}", command, each);
  if (overrides.empty()) return {};
  run.train.steps = run.train.global_batch = run.train.micro_batch = run.train.seq_len = 1;  // a recipe must have these
  run.optimizer.lr = 1;
  return parse_run_spec(to_toml(run, /*with_provenance=*/false), command, overrides).parallel;
}

DeviceKind device_kind(const std::string& device) {
  MOEBIUS_CHECK(usage, device == "cpu" || device == "cuda", "--device: expected cpu or cuda; got \"{}\"", device);
  if (device == "cpu") return DeviceKind::cpu;
  const std::string why = Accelerator::why_missing();
  MOEBIUS_CHECK(usage, why.empty(), "--device: {}; or use --device cpu", why);
  return DeviceKind::cuda;
}

DType compute_dtype(const std::string& dtype) {
  MOEBIUS_CHECK(usage, dtype == "f32" || dtype == "bf16", "--dtype: expected f32 or bf16; got \"{}\"", dtype);
  return dtype == "f32" ? DType::f32 : DType::bf16;
}

int num_threads(int asked) {
  MOEBIUS_CHECK(usage, asked >= 0, "--threads: expected 0 or more; got {}", asked);
  return asked > 0 ? asked : num_available_cpus();
}

void warn_if_any(Log& log, const std::string& warning) {
  if (!warning.empty()) log.warn("{}", warning);
}

void print_json(const nlohmann::ordered_json& object) {
  fmt::print("{}\n", object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

void add_example(Command& command, const std::string& line) { command.footer("Example:\n  " + line); }

}  // namespace moebius
