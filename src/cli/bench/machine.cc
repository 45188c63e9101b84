#include "cli/bench/machine.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/peak.h"
#include "bench/ranks.h"
#include "bench/shapes.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "comm/transport/threads.h"
#include "device/accelerator.h"
#include "plan/work_time.h"

namespace moebius {
namespace {

const std::string kMeasured = "moebius bench machine";
constexpr double kKernelsOfLayer = 40;  // that a pass of an MoE layer launches

// Returns operations a second over the lines whose names begin so.
double rate_of(const BenchReport& report, const std::string& prefix) {
  double flops = 0, seconds = 0;
  for (const BenchLine& line : report.lines) {
    if (!line.name.starts_with(prefix)) continue;
    flops += line.cost.flops;
    seconds += line.median_ms * 1e-3;
  }
  MOEBIUS_CHECK(internal, seconds > 0, "bench machine: no line is called {}", prefix);
  return flops / seconds;
}

void set_share(PlanMachine& m, Share share, double value, const std::string& from) {
  m.of(PlanSystem::moebius)[static_cast<size_t>(share)] = std::clamp(value, kLeastShare, kMostShare);
  m.sources[fmt::format("share.moebius.{}", name_of(share))] = from;
}

void set_figure(PlanMachine& m, const std::string& key, double PlanMachine::*figure, double value,
                const std::string& from) {
  m.*figure = value;
  m.sources[key] = from;
}

// A figure that is not measured has a value that does no harm, and says so. `moebius plan` repeats it.
void assume_figures(PlanMachine& m) {
  const std::string one_rank = "not measured: one rank has no links; repeat with --ranks N";
  const std::string no_bits = "not measured: bench machine times products in bf16 alone";
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

// No benchmark measures these figures of a GPU. They are those of an H100 where the data sheet of another is not known here.
void assume_gpu(PlanMachine& m) {
  const std::string sheet = "assumed: as an H100";
  set_figure(m, "rank.exponentials_t_s", &PlanMachine::exponentials_t_s, m.is_gpu ? 3.9 : 0,
             m.is_gpu ? sheet : "a CPU");
  set_figure(m, "rank.f32_tflops", &PlanMachine::f32_tflops, m.is_gpu ? 67 : 0, m.is_gpu ? sheet : "a CPU");
  set_figure(m, "rank.multiprocessors", &PlanMachine::multiprocessors,
             m.is_gpu ? Accelerator().info().num_multiprocessors : 0, m.is_gpu ? "the system" : "a CPU");
  set_figure(m, "rank.portable", &PlanMachine::portable, m.is_gpu ? 0.53 : 1, m.is_gpu ? sheet : "a CPU");
  set_figure(m, "host.link_gb_s", &PlanMachine::link_gb_s, m.is_gpu ? 45 : 10,
             m.is_gpu ? sheet : "a CPU: its memory is the host");
  set_figure(m, "host.read_gb_s", &PlanMachine::read_gb_s, 2, "assumed: one drive");
  set_figure(m, "host.write_gb_s", &PlanMachine::write_gb_s, 1, "assumed: one drive");
  set_figure(m, "host.ranks", &PlanMachine::host_ranks, m.is_gpu ? 8 : 1, "assumed: the ranks of a host");
}

// Sets the latency of a call and the rate of its bytes, from the smallest and the largest message.
void measure_links(PlanMachine& m, DeviceKind device, int64_t ranks) {
  std::vector<CollectiveLine> lines;
  run_threads(static_cast<int>(ranks), {.timeout_s = 60}, [&](Transport& world) {
    std::vector<CollectiveLine> mine = bench_collectives(device, world);
    if (world.rank() == 0) lines = std::move(mine);
  });
  std::erase_if(lines, [](const CollectiveLine& l) { return l.name != "all_gather"; });
  const CollectiveLine &small = lines.front(), &large = lines.back();
  const double share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  const double seconds = std::max((large.median_ms - small.median_ms) * 1e-3, 1e-9);
  m.inside_gb_s = static_cast<double>(large.bytes - small.bytes) * share / seconds / 1e9;
  m.inside_us = std::max(0.0, small.median_ms * 1e3 - static_cast<double>(small.bytes) * share / m.inside_gb_s / 1e3);
  m.domain_ranks = static_cast<double>(ranks);
  for (const char* key : {"links.inside_gb_s", "links.inside_us", "links.domain_ranks"})
    m.sources[key] = fmt::format("{} --ranks {}: all_gather", kMeasured, ranks);
}

// The time of an op that does next to nothing.
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

nlohmann::ordered_json to_json(const PlanMachine& m) {
  nlohmann::ordered_json json{{"machine", {{"name", m.name}, {"device", m.is_gpu ? "cuda" : "cpu"}}}};
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

PlanMachine measured_machine(const BenchSpec& asked, int64_t ranks) {
  BenchSpec spec = asked;
  spec.under_load = true;  // a step is: a card that has rested is up to a fifth faster
  PlanMachine m{.name = device_name(spec), .is_gpu = spec.device == DeviceKind::cuda};
  m.has_shares[static_cast<size_t>(PlanSystem::moebius)] = true;
  assume_figures(m);
  assume_gpu(m);
  set_figure(m, "rank.threads", &PlanMachine::threads, m.is_gpu ? 0 : spec.threads, m.is_gpu ? "a GPU" : "the system");
  const BenchReport products = bench_gemm(spec);
  const double gemm = rate_of(products, "gemm_bf16"), bytes_per_s = products.ceilings.bytes_per_s;
  const double sheet = m.is_gpu ? datasheet_tflops(m.name) * 1e12 : 0;
  m.bf16_tflops = (sheet > 0 ? sheet : gemm) / 1e12;
  m.sources["rank.bf16_tflops"] = sheet > 0 ? "the maker's data sheet" : kMeasured + ": products";
  m.memory_tb_s = bytes_per_s / 1e12;
  m.sources["rank.memory_tb_s"] = kMeasured + ": copies";
  m.memory_gb = static_cast<double>(m.is_gpu ? Accelerator().info().memory_bytes : this_machine().memory_bytes) / 1e9;
  m.sources["rank.memory_gb"] = "the system";
  set_figure(m, "host.memory_gb", &PlanMachine::host_memory_gb, static_cast<double>(this_machine().memory_bytes) / 1e9,
             "the system");
  m.kernel_us = kernel_us(spec);
  m.sources["rank.kernel_us"] = kMeasured + ": a product of one block";
  set_figure(m, "host.layer_us", &PlanMachine::layer_us, m.is_gpu ? kKernelsOfLayer * m.kernel_us : 0,
             m.is_gpu ? "assumed: 40 launches of a layer, each rank.kernel_us" : "a step has no launches");
  if (ranks > 1) measure_links(m, spec.device, ranks);
  const double peak = m.bf16_tflops * 1e12;
  const BenchReport experts = bench_experts(spec), attention = bench_attention(spec);
  double flops = 0, seconds = 0;
  for (const BenchLine& line : experts.lines) {
    flops += line.cost.flops;
    seconds += line.median_ms * 1e-3;
  }
  set_share(m, Share::products, gemm / peak, kMeasured + ": products");
  set_share(m, Share::experts, flops / seconds / peak, kMeasured + ": experts");
  set_share(m, Share::low_precision, 0.4, "not measured: bench machine times products in bf16 alone");
  const BenchShape shape = bench_shape(spec.shape);
  const HeadWidths heads{shape.head, shape.v_head};
  set_share(m, Share::attention_forward,
            rate_of(attention, "attention_fwd") / peak * beside_products(m, heads, /*backward=*/false),
            kMeasured + ": attention");
  set_share(m, Share::attention_backward,
            rate_of(attention, "attention_bwd") / peak * beside_products(m, heads, /*backward=*/true),
            kMeasured + ": attention");
  set_share(m, Share::memory, 1, "memory_tb_s is measured");
  set_share(m, Share::inside, 1, "inside_gb_s is measured, or not known");
  set_share(m, Share::across, 1, "across_gb_s is assumed");
  return m;
}

void run_bench_machine(const BenchOptions& o) {
  BenchSpec spec = o.spec;
  spec.threads = num_threads(spec.threads);
  spec.device = device_kind(o.device.empty() ? "cpu" : o.device);
  spec.runs = o.runs.value_or(0);
  spec.shape = o.shape.empty() ? (spec.device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu") : o.shape;
  const PlanMachine m = measured_machine(spec, o.ranks);
  o.json ? print_json(to_json(m)) : fmt::print("{}", to_toml(m));
}

}  // namespace moebius
