#include "cli/options.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "core/accelerator.h"
#include "core/device.h"
#include "core/error.h"

namespace moebius {

void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "cpu or cuda")->capture_default_str();
}

void add_dtype_option(CLI::App& command, std::string& dtype) {
  command.add_option("--dtype", dtype, "of the computation: f32 or bf16")->capture_default_str();
}

void add_threads_option(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "CPU threads; 0: all that this process may use")->capture_default_str();
}

void add_json_option(CLI::App& command, bool& json) {
  command.add_flag("--json", json, "one JSON object on standard output");
}

DeviceKind device_kind(const std::string& device) {
  MOEBIUS_CHECK(usage, device == "cpu" || device == "cuda", "--device: expected cpu or cuda; got \"{}\"", device);
  if (device == "cpu") return DeviceKind::cpu;
  const std::string why = Accelerator::why_missing();
  MOEBIUS_CHECK(usage, why.empty(), "--device: {}; use --device cpu", why);
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

}  // namespace moebius
