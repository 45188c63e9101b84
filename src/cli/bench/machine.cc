#include "cli/bench/machine.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/peak.h"
#include "bench/shapes.h"
#include "cli/bench/ranks.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "comm/transport/threads.h"
#include "device/accelerator.h"
#include "plan/work_time.h"

namespace moebius {
namespace {

const std::string kMeasured = "moebius bench machine", kNoisySource = "noisy";
constexpr double kKernelsOfLayer = 40;  // kernels that a pass of an MoE layer launches

// A measurement is noisy if its median run takes this much longer than its fastest run, relative to it.
constexpr double kNoisy = 0.1;

// A machine whose load of the last minute is below this share of its CPUs is quiet.
constexpr double kQuietLoad = 0.25;

// Operations a second, and how much longer the median run took than the fastest.
struct MeasuredRate {
  double flops_per_s = 0, noise = 0;
};

// Returns the total rate of the lines whose names begin with the prefix.
MeasuredRate rate_of(const BenchReport& report, const std::string& prefix) {
  double flops = 0, seconds = 0, least = 0;
  for (const BenchLine& line : report.lines) {
    if (!line.name.starts_with(prefix)) continue;
    flops += line.cost.flops;
    seconds += line.median_ms * 1e-3;
    least += line.min_ms * 1e-3;
  }
  MOEBIUS_CHECK(internal, seconds > 0 && least > 0, "bench machine: no line is called {}", prefix);
  return {.flops_per_s = flops / seconds, .noise = seconds / least - 1};
}

std::string source_of(const char* what, const MeasuredRate& rate) {
  return fmt::format("{}{}: {}; the median run took {:.0f} % longer than the fastest",
                     rate.noise < kNoisy ? "" : kNoisySource + ": ", kMeasured, what, 100 * rate.noise);
}

void set_share(PlanMachine& m, Share share, double value, const std::string& from) {
  m.of(PlanSystem::moebius)[static_cast<size_t>(share)] = std::clamp(value, kMinShare, kMaxShare);
  m.sources[fmt::format("share.moebius.{}", name_of(share))] = from;
}

void set_figure(PlanMachine& m, const std::string& key, double PlanMachine::*figure, double value,
                const std::string& from) {
  m.*figure = value;
  m.sources[key] = from;
}

// Sets values that are not measured to defaults, and notes this in their source. `moebius plan` prints the note.
void assume_figures(PlanMachine& m) {
  const std::string one_rank = "not measured: one rank has no links; repeat with --ranks N";
  const std::string no_bits = "not measured: bench machine times only products in bf16";
  set_figure(m, "rank.fp8_tflops", &PlanMachine::fp8_tflops, 0, no_bits);
  set_figure(m, "rank.nvfp4_tflops", &PlanMachine::nvfp4_tflops, 0, no_bits);
  set_figure(m, "rank.spread", &PlanMachine::spread, 0.01, "assumed: the speeds of ranks differ by 1 %");
  set_figure(m, "links.domain_ranks", &PlanMachine::domain_ranks, 1, one_rank);
  set_figure(m, "links.inside_gb_s", &PlanMachine::inside_gb_s, 10, one_rank);
  set_figure(m, "links.inside_us", &PlanMachine::inside_us, 20, one_rank);
  set_figure(m, "links.across_gb_s", &PlanMachine::across_gb_s, m.is_gpu ? 50 : 1.25,
             m.is_gpu ? "assumed: a card of 400 Gb/s for each GPU" : "assumed: 10 Gb/s");
  set_figure(m, "links.across_us", &PlanMachine::across_us, 100, "assumed: a call between hosts");
}

// Sets the values of a GPU that no benchmark measures. They are those of an H100 if the GPU's data sheet is
// not known here.
void assume_gpu(PlanMachine& m, double multiprocessors) {
  const std::string sheet = "assumed: as an H100";
  set_figure(m, "rank.exponentials_t_s", &PlanMachine::exponentials_t_s, m.is_gpu ? 3.9 : 0,
             m.is_gpu ? sheet : "a CPU");
  set_figure(m, "rank.f32_tflops", &PlanMachine::f32_tflops, m.is_gpu ? 67 : 0, m.is_gpu ? sheet : "a CPU");
  set_figure(m, "rank.multiprocessors", &PlanMachine::multiprocessors, multiprocessors,
             m.is_gpu ? "the system" : "a CPU");
  set_figure(m, "rank.portable", &PlanMachine::portable, m.is_gpu ? 0.48 : 1, m.is_gpu ? sheet : "a CPU");
  set_figure(m, "host.link_gb_s", &PlanMachine::link_gb_s, m.is_gpu ? 45 : 10,
             m.is_gpu ? sheet : "a CPU: its memory is the host");
  if (m.is_gpu) set_figure(m, "host.link_one_way_gb_s", &PlanMachine::link_one_way_gb_s, 55, sheet);
  set_figure(m, "host.read_gb_s", &PlanMachine::read_gb_s, 2, "assumed: one drive");
  set_figure(m, "host.write_gb_s", &PlanMachine::write_gb_s, 1, "assumed: one drive");
  set_figure(m, "host.ranks", &PlanMachine::host_ranks, m.is_gpu ? 8 : 1, "assumed: the ranks of a host");
}

// Sets the latency of a call and the rate of its bytes, from the smallest and the largest message.
void set_links(PlanMachine& m, const MachineMeasurements& measured) {
  if (measured.gathers.empty()) return;
  const CollectiveLine &small = measured.gathers.front(), &large = measured.gathers.back();
  const double ranks = static_cast<double>(measured.ranks), share = (ranks - 1) / ranks;
  const double over_links = m.is_gpu ? message_time_over_links(measured.ranks) : 1;
  const double seconds = std::max((large.median_ms - small.median_ms) * 1e-3, 1e-9) / over_links;
  m.inside_gb_s = static_cast<double>(large.bytes - small.bytes) * share / seconds / 1e9;
  const double small_us = static_cast<double>(small.bytes) * share * over_links / m.inside_gb_s / 1e3;
  m.inside_us = std::max(0.0, small.median_ms * 1e3 - small_us);
  m.domain_ranks = ranks;
  for (const char* key : {"links.inside_gb_s", "links.inside_us", "links.domain_ranks"})
    m.sources[key] = fmt::format("{} --ranks {}: all_gather", kMeasured, measured.ranks);
}

std::vector<CollectiveLine> measured_gathers(DeviceKind device, int64_t ranks) {
  std::vector<CollectiveLine> lines;
  run_threads(static_cast<int>(ranks), {.timeout_s = bench_timeout_s()}, [&](Transport& world) {
    std::vector<CollectiveLine> mine = bench_collectives(device, world);
    if (world.rank() == 0) lines = std::move(mine);
  });
  std::erase_if(lines, [](const CollectiveLine& l) { return l.name != "all_gather"; });
  return lines;
}

void check_figures(const PlanMachine& m) {
  for (const MachineFigure& f : machine_figures()) {
    if (f.is_optional && m.*f.value == 0) continue;
    MOEBIUS_CHECK(usage, m.*f.value >= f.min && m.*f.value <= f.max,
                  "bench machine: {}.{} was measured as {:.4g}; expected {} to {}; end other work on the machine, and "
                  "measure again",
                  f.table, f.key, m.*f.value, f.min, f.max);
  }
}

// Returns the time of an op that does next to nothing.
double kernel_us(const BenchSpec& spec) {
  BenchSpec tiny = spec;
  tiny.scale = 1.0 / 1024;
  double least = 1e9;
  for (const BenchLine& line : bench_gemm(tiny).lines) least = std::min(least, line.min_ms * 1e3);
  return least;
}

std::string device_name(const BenchSpec& spec) {
  return spec.device == DeviceKind::cuda ? Accelerator().info().name
                                         : fmt::format("{} threads of an {}", spec.threads, this_machine().cpu);
}

// Other work slows every run equally, so the spread of the runs need not show it.
void warn_of_other_work(Log& log) {
  double load = 0;
  const int cpus = this_machine().cpus;
  if (::getloadavg(&load, 1) != 1 || load <= kQuietLoad * cpus) return;
  log.warn(
      "bench machine: other work runs: the load of the last minute is {:.1f}, on {} CPUs; measure again on a quiet "
      "machine",
      load, cpus);
}

nlohmann::ordered_json to_json(const PlanMachine& m) {
  nlohmann::ordered_json json{{"machine", {{"name", m.name}, {"device", m.is_gpu ? "cuda" : "cpu"}}}};
  if (m.capability > 0) json["machine"]["capability"] = fmt::format("{}.{}", m.capability / 10, m.capability % 10);
  for (const MachineFigure& f : machine_figures())
    json[f.table][f.key] = {{"is", m.*f.value}, {"from", m.sources.at(fmt::format("{}.{}", f.table, f.key))}};
  for (int k = 0; k < kNumShares; ++k) {
    const std::string name = name_of(static_cast<Share>(k));
    json["share"]["moebius"][name] = {{"is", m.of(PlanSystem::moebius)[static_cast<size_t>(k)]},
                                      {"from", m.sources.at("share.moebius." + name)}};
  }
  return json;
}

}  // namespace

MachineMeasurements measure_machine(const BenchSpec& asked, int64_t ranks) {
  BenchSpec spec = asked;
  spec.under_load = true;  // as in training steps: an idle card begins up to a fifth faster
  const bool is_gpu = spec.device == DeviceKind::cuda;
  const BenchShape shape = bench_shape(spec.shape);
  const auto host_bytes = static_cast<double>(this_machine().memory_bytes);
  MachineMeasurements m{.device = device_name(spec),
                        .is_gpu = is_gpu,
                        .threads = spec.threads,
                        .memory_bytes = host_bytes,
                        .host_memory_bytes = host_bytes,
                        .products = bench_gemm(spec),
                        .experts = bench_experts(spec),
                        .attention = bench_attention(spec),
                        .heads = {shape.head, shape.v_head},
                        .kernel_us = kernel_us(spec),
                        .ranks = ranks};
  if (is_gpu) {
    m.datasheet_flops_per_s = datasheet_tflops(m.device) * 1e12;
    m.memory_bytes = static_cast<double>(Accelerator().info().memory_bytes);
    m.multiprocessors = Accelerator().info().num_multiprocessors;
    m.capability = 10 * Accelerator().info().capability_major + Accelerator().info().capability_minor;
  }
  if (ranks > 1) m.gathers = measured_gathers(spec.device, ranks);
  return m;
}

PlanMachine machine_of(const MachineMeasurements& measured) {
  PlanMachine m{.name = measured.device, .is_gpu = measured.is_gpu, .capability = measured.capability};
  m.has_shares[static_cast<size_t>(PlanSystem::moebius)] = true;
  assume_figures(m);
  assume_gpu(m, measured.multiprocessors);
  set_figure(m, "rank.threads", &PlanMachine::threads, m.is_gpu ? 0 : static_cast<double>(measured.threads),
             m.is_gpu ? "a GPU" : "the system");
  const MeasuredRate products = rate_of(measured.products, "gemm_bf16"), experts = rate_of(measured.experts, ""),
                     forward = rate_of(measured.attention, "attention_fwd"),
                     backward = rate_of(measured.attention, "attention_bwd");
  const double sheet = measured.datasheet_flops_per_s, peak = sheet > 0 ? sheet : products.flops_per_s;
  set_figure(m, "rank.bf16_tflops", &PlanMachine::bf16_tflops, peak / 1e12,
             sheet > 0 ? "the maker's data sheet" : source_of("products", products));
  set_figure(m, "rank.memory_tb_s", &PlanMachine::memory_tb_s, measured.products.ceilings.bytes_per_s / 1e12,
             kMeasured + ": copies");
  set_figure(m, "rank.memory_gb", &PlanMachine::memory_gb, measured.memory_bytes / 1e9, "the system");
  set_figure(m, "host.memory_gb", &PlanMachine::host_memory_gb, measured.host_memory_bytes / 1e9, "the system");
  set_figure(m, "rank.kernel_us", &PlanMachine::kernel_us, measured.kernel_us, kMeasured + ": a product of one block");
  set_figure(m, "host.layer_us", &PlanMachine::layer_us, m.is_gpu ? kKernelsOfLayer * m.kernel_us : 0,
             m.is_gpu ? "assumed: 40 launches of a layer, each rank.kernel_us" : "a step has no launches");
  set_links(m, measured);
  check_figures(m);
  set_share(m, Share::products, products.flops_per_s / peak, source_of("products", products));
  set_share(m, Share::experts, experts.flops_per_s / peak, source_of("experts", experts));
  set_share(m, Share::low_precision, 0.4, "not measured: bench machine times only products in bf16");
  set_share(m, Share::attention_forward,
            forward.flops_per_s / peak * attention_over_products(m, measured.heads, /*backward=*/false),
            source_of("attention", forward));
  set_share(m, Share::attention_backward,
            backward.flops_per_s / peak * attention_over_products(m, measured.heads, /*backward=*/true),
            source_of("attention", backward));
  set_share(m, Share::memory, 1, "memory_tb_s is measured");
  set_share(m, Share::inside, 1, "inside_gb_s is measured, or not known");
  set_share(m, Share::across, 1, "across_gb_s is assumed");
  return m;
}

void run_bench_machine(const BenchOptions& o, Log& log) {
  BenchSpec spec = o.spec;
  spec.threads = num_threads(spec.threads);
  spec.device = device_kind(o.device.empty() ? "cpu" : o.device);
  spec.runs = o.runs.value_or(0);
  spec.shape = o.shape.empty() ? (spec.device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu") : o.shape;
  if (spec.device != DeviceKind::cuda) warn_of_other_work(log);
  const PlanMachine m = machine_of(measure_machine(spec, o.ranks));
  for (const auto& [key, source] : m.sources)
    if (source.starts_with(kNoisySource))
      log.warn("bench machine: {} is {}; measure again on a quiet machine", key, source);
  o.json ? print_json(to_json(m)) : fmt::print("{}", to_toml(m));
}

}  // namespace moebius
