#include <fmt/core.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <oneapi/dnnl/dnnl.hpp>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "comm/gpu/nccl.h"
#include "comm/transport/mpi.h"
#include "device/accelerator.h"
#include "device/gpus_found.h"
#include "device/kernel_choice.h"
#include "io/files.h"
#include "memory/plan.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/gemm/cublas_lt.h"

namespace moebius {
namespace {

struct Finding {
  std::string name, value;
};

std::string onednn_version() {
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
}

std::string fmt_version() {
  return fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
}

std::string xxhash_version() {
  const unsigned v = XXH_versionNumber();
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text.empty() ? "none of those that matter" : text;
}

std::string nccl_version() {
  const std::string why = NcclLinks::why_missing();
  return why.empty() ? NcclLinks::version() : why;
}

std::string gpu_line() {
  const GpusFound found = gpus_found();
  if (driver_is_too_old(found)) return "unknown: the driver is too old to be asked";
  const size_t count = found.visible.size();
  if (count == 0) return found.driver == 0 ? "none" : "none visible";
  std::string text;
  for (const int first : distinct_gpus(found)) {
    const auto alike = std::count_if(found.visible.begin(), found.visible.end(),
                                     [&](const GpuFound& g) { return g.name == found.visible[first].name; });
    const AcceleratorInfo gpu = Accelerator::describe(first);
    text +=
        fmt::format("{}{}{}, compute capability {}.{}, {} multiprocessors, {} of {} free", text.empty() ? "" : "; ",
                    alike > 1 ? fmt::format("{} x ", alike) : "", gpu.name, gpu.capability_major, gpu.capability_minor,
                    gpu.num_multiprocessors, bytes_text(gpu.free_bytes), bytes_text(gpu.memory_bytes));
  }
  return text;
}

// The kernels of each kind of visible GPU by run.kernels.
std::string kernels_line() {
  if (const std::string why = Accelerator::why_missing(); !why.empty()) return "none";
  const GpusFound found = gpus_found();
  std::string text;
  for (const auto& [name, choice] : kKernelChoiceNames)
    for (const int gpu : distinct_gpus(found))
      if (why_not_usable(found, gpu).empty())
        text +=
            fmt::format("{}run.kernels = \"{}\": {}", text.empty() ? "" : "; ", name, kernels_text(found, gpu, choice));
  return text;
}

std::vector<Finding> findings(const Machine& m) {
  const int64_t disk = free_bytes(".");
  return {{"cpu", m.cpu},
          {"cpus", fmt::format("{}", m.cpus)},
          {"cpu_features", join(m.features)},
          {"memory", bytes_text(m.memory_bytes)},
          {"disk_free", disk < 0 ? "unknown" : bytes_text(disk)},
          {"built_for", "-march=" MOEBIUS_MARCH},
          {"compiler", "g++ " __VERSION__},
          {"oneDNN", onednn_version()},
          {"fmt", fmt_version()},
          {"zstd", ZSTD_versionString()},
          {"xxHash", xxhash_version()},
          {"CLI11", argument_parser_version()},
          {"CUDA", cuda_versions_text(gpus_found())},
          {"cuBLASLt", cublas_lt_text()},
          {"cuDNN", cudnn_text(cudnn_version())},
          {"NCCL", nccl_version()},
          {"MPI", mpi_version().empty() ? "not part of this build" : mpi_version()},
          {"GPU", gpu_line()},
          {"GPU kernels", kernels_line()}};
}

// Returns the features that this machine or this build lacks, each with what needs it.
std::vector<Finding> missing(const Machine& m) {
  std::vector<Finding> list;
  for (const CpuFeature& feature : cpu_features()) {
    bool has = false;
    for (const std::string& name : m.features) has = has || name == feature.name;
    if (!has) list.push_back({feature.name, feature.use});
  }
  if (const std::string why = Accelerator::why_missing(); !why.empty())
    list.push_back({"GPU", "run.device = \"cuda\": " + why});
  if (const std::string why = why_no_cublas_lt(); !why.empty())
    list.push_back({"cuBLASLt", "run.device = \"cuda\": " + why});
  if (mpi_version().empty()) list.push_back({"MPI", "ranks that are processes (mpirun, srun)"});
  return list;
}

int run_doctor(bool json) {
  const Machine machine = this_machine();
  if (json) {
    nlohmann::ordered_json found, lacks;
    for (const Finding& f : findings(machine)) found[f.name] = f.value;
    for (const Finding& f : missing(machine)) lacks[f.name] = f.value;
    print_json({{"found", found}, {"missing", lacks}});
    return 0;
  }
  for (const Finding& f : findings(machine)) fmt::print("{:<14} {}\n", f.name, f.value);
  fmt::print("missing\n");
  for (const Finding& f : missing(machine)) fmt::print("  {:<12} needed for {}\n", f.name, f.value);
  return 0;
}

}  // namespace

void add_doctor(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "doctor", "prints what this machine and this build have, what they lack, and which features need that");
  const auto json = std::make_shared<bool>(false);
  add_json_option(*command, *json);
  add_example(*command, "moebius doctor --json");
  command->callback([&cli, json] { cli.run = [json] { return run_doctor(*json); }; });
}

}  // namespace moebius
