#include "plan/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "config/nearest.h"
#include "config/recipe/text.h"
#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

using nlohmann::json;

// Throws Error{usage} with the file unless it is a number with a source, from min to max.
double figure(const std::string& where, const std::string& key, const json& value, double min, double max) {
  const bool is_pair = value.is_object() && value.contains("is") && value["is"].is_number();
  MOEBIUS_CHECK(usage, is_pair, "machine {}: {} must be {{ is = NUMBER, from = \"SOURCE\" }}; got {}", where, key,
                value.dump());
  for (const auto& [name, unused] : value.items())
    MOEBIUS_CHECK(usage, name == "is" || name == "from", "machine {}: {} has only is and from; got {}", where, key,
                  name);
  const bool has_source = value.contains("from") && value["from"].is_string() && value["from"] != "";
  MOEBIUS_CHECK(usage, has_source, "machine {}: {} has no source; add from = \"SOURCE\"", where, key);
  const double number = value["is"].get<double>();
  MOEBIUS_CHECK(usage, number >= min && number <= max, "machine {}: {} must be from {} to {}; got {}", where, key, min,
                max, number);
  return number;
}

void read_shares(const RecipeEntry& e, PlanSystem system, PlanMachine& m) {
  std::vector<std::string> known;
  for (int k = 0; k < kNumShares; ++k) known.emplace_back(name_of(static_cast<Share>(k)));
  for (const auto& [key, value] : e.value.items())
    MOEBIUS_CHECK(usage, std::find(known.begin(), known.end(), key) != known.end(),
                  "machine {}: [{}] has no key {}; the nearest is {}", e.where, e.key, key, nearest(key, known));
  for (int k = 0; k < kNumShares; ++k) {
    const std::string& key = known[static_cast<size_t>(k)];
    MOEBIUS_CHECK(usage, e.value.contains(key),
                  "machine {}: expected {}.{} = {{ is = NUMBER, from = \"SOURCE\" }}; it is missing", e.where, e.key,
                  key);
    m.of(system)[static_cast<size_t>(k)] = figure(e.where, e.key + "." + key, e.value[key], kMinShare, kMaxShare);
    m.sources[e.key + "." + key] = e.value[key]["from"].get<std::string>();
  }
  m.has_shares[static_cast<size_t>(system)] = true;
}

std::string text_value(const RecipeEntry& e) {
  MOEBIUS_CHECK(usage, e.value.is_string() && e.value != "", "machine {}: {} must be a text; got {}", e.where, e.key,
                e.value.dump());
  auto text = e.value.get<std::string>();
  const auto is_control = [](unsigned char c) { return c < ' ' || c == 0x7f; };
  MOEBIUS_CHECK(usage, std::none_of(text.begin(), text.end(), is_control),
                "machine {}: {} must have no control characters; got {}", e.where, e.key, e.value.dump());
  return text;
}

// Parses TOML, or the same as JSON.
std::vector<RecipeEntry> entries_of(const std::string& text, const std::string& name) {
  if (!text.starts_with('{')) return read_recipe(text, name);
  const json whole = json::parse(text, nullptr, /*allow_exceptions=*/false);
  MOEBIUS_CHECK(usage, whole.is_object(), "machine {}: neither TOML nor JSON", name);
  std::vector<RecipeEntry> entries;
  for (const auto& [section, keys] : whole.items()) {
    MOEBIUS_CHECK(usage, keys.is_object(), "machine {}: {} must be a table", name, section);
    for (const auto& [key, value] : keys.items())
      entries.push_back({.key = section + "." + key, .value = value, .where = name});
  }
  return entries;
}

// Returns 90 for "9.0".
int capability_of(const RecipeEntry& e) {
  const std::string text = text_value(e);
  int major = 0, minor = 0, length = 0;
  const bool is_read = std::sscanf(text.c_str(), "%2d.%1d%n", &major, &minor, &length) == 2;
  MOEBIUS_CHECK(usage, is_read && length == std::ssize(text) && major >= 8 && minor >= 0,
                "machine {}: machine.capability must be the compute capability of a GPU from 8.0 on, such as \"9.0\"; "
                "got \"{}\"",
                e.where, text);
  return 10 * major + minor;
}

void read_entry(const RecipeEntry& e, PlanMachine& m) {
  std::vector<std::string> known{"machine.name", "machine.device", "share.moebius", "share.megatron",
                                 "machine.capability"};
  if (e.key == known[0]) {
    m.name = text_value(e);
  } else if (e.key == known[1]) {
    const std::string device = text_value(e);
    MOEBIUS_CHECK(usage, device == "cpu" || device == "cuda",
                  "machine {}: machine.device must be \"cpu\" or \"cuda\"; got \"{}\"", e.where, device);
    m.is_gpu = device == "cuda";
  } else if (e.key == known[4]) {
    m.capability = capability_of(e);
  } else if (e.key == known[2] || e.key == known[3]) {
    read_shares(e, e.key == known[2] ? PlanSystem::moebius : PlanSystem::megatron, m);
  } else {
    for (const MachineFigure& f : machine_figures()) {
      known.push_back(fmt::format("{}.{}", f.table, f.key));
      if (known.back() != e.key) continue;
      m.*f.value = figure(e.where, e.key, e.value, f.min, f.max);
      const bool is_count = f.value == &PlanMachine::threads || f.value == &PlanMachine::domain_ranks ||
                            f.value == &PlanMachine::host_ranks || f.value == &PlanMachine::multiprocessors;
      MOEBIUS_CHECK(usage, !is_count || std::floor(m.*f.value) == m.*f.value,
                    "machine {}: {} must be a whole number; got {}", e.where, e.key, m.*f.value);
      m.sources[e.key] = e.value["from"].get<std::string>();
      return;
    }
    MOEBIUS_FAIL(usage, "machine {}: unknown key {}; the nearest is {}", e.where, e.key, nearest(e.key, known));
  }
}

}  // namespace

const char* name_of(PlanSystem system) { return system == PlanSystem::moebius ? "moebius" : "megatron"; }

const char* name_of(Share share) {
  constexpr const char* names[kNumShares] = {"products",           "experts", "low_precision", "attention_forward",
                                             "attention_backward", "memory",  "inside",        "across"};
  return names[static_cast<int>(share)];
}

const std::vector<MachineFigure>& machine_figures() {
  static const std::vector<MachineFigure> figures = {
      {"rank", "bf16_tflops", &PlanMachine::bf16_tflops, 0.001, 1e5},
      {"rank", "fp8_tflops", &PlanMachine::fp8_tflops, 0, 1e6},
      {"rank", "nvfp4_tflops", &PlanMachine::nvfp4_tflops, 0, 1e6},
      {"rank", "memory_gb", &PlanMachine::memory_gb, 0.1, 1e5},
      {"rank", "memory_tb_s", &PlanMachine::memory_tb_s, 0.001, 1e3},
      {"rank", "exponentials_t_s", &PlanMachine::exponentials_t_s, 0, 1e4},
      {"rank", "f32_tflops", &PlanMachine::f32_tflops, 0, 1e5},
      {"rank", "multiprocessors", &PlanMachine::multiprocessors, 0, 1e5},
      {"rank", "portable", &PlanMachine::portable, 0.01, 1},
      {"rank", "threads", &PlanMachine::threads, 0, 4096},
      {"rank", "kernel_us", &PlanMachine::kernel_us, 0, 1e4},
      {"rank", "spread", &PlanMachine::spread, 0, 1},
      {"links", "domain_ranks", &PlanMachine::domain_ranks, 1, 1e6},
      {"links", "inside_gb_s", &PlanMachine::inside_gb_s, 0.01, 1e5},
      {"links", "across_gb_s", &PlanMachine::across_gb_s, 0.001, 1e5},
      {"links", "inside_us", &PlanMachine::inside_us, 0, 1e6},
      {"links", "across_us", &PlanMachine::across_us, 0, 1e6},
      {"host", "layer_us", &PlanMachine::layer_us, 0, 1e6},
      {"host", "link_gb_s", &PlanMachine::link_gb_s, 0.01, 1e5},
      {"host", "link_one_way_gb_s", &PlanMachine::link_one_way_gb_s, 0.01, 1e5, /*is_optional=*/true},
      {"host", "memory_gb", &PlanMachine::host_memory_gb, 0.1, 1e6},
      {"host", "read_gb_s", &PlanMachine::read_gb_s, 0.001, 1e5},
      {"host", "write_gb_s", &PlanMachine::write_gb_s, 0.001, 1e5},
      {"host", "ranks", &PlanMachine::host_ranks, 1, 4096},
  };
  return figures;
}

PlanMachine PlanMachine::of_rank(int64_t threads_of_rank) const {
  PlanMachine rank = *this;
  if (is_gpu) return rank;
  const double share = std::min(1.0, static_cast<double>(threads_of_rank) / threads);
  for (double PlanMachine::*rate : {&PlanMachine::bf16_tflops, &PlanMachine::fp8_tflops, &PlanMachine::nvfp4_tflops,
                                    &PlanMachine::memory_gb, &PlanMachine::memory_tb_s})
    rank.*rate *= share;
  rank.domain_ranks = std::max(1.0, std::floor(threads / static_cast<double>(std::max<int64_t>(1, threads_of_rank))));
  return rank;
}

int64_t PlanMachine::ranks_of_windows() const {
  return static_cast<int64_t>(is_gpu ? std::min(domain_ranks, host_ranks) : domain_ranks);
}

bool PlanMachine::is_assumed(const std::string& key) const {
  const auto source = sources.find(key);
  return source != sources.end() &&
         (source->second.starts_with("assumed") || source->second.starts_with("not measured"));
}

ExchangeRates PlanMachine::exchange_rates() const {
  const auto share = [this](Share s) {
    return has_shares[static_cast<size_t>(PlanSystem::moebius)] ? of(PlanSystem::moebius)[static_cast<size_t>(s)] : 1;
  };
  std::string source = fmt::format("those of the machine file \"{}\"", name);
  if (is_assumed("links.across_gb_s")) source += ", whose links.across_gb_s is assumed";
  return {.across_bytes_s = 1e9 * across_gb_s * share(Share::across),
          .inside_bytes_s = 1e9 * inside_gb_s * share(Share::inside),
          .across_call_s = 1e-6 * across_us,
          .inside_call_s = 1e-6 * inside_us,
          .source = source};
}

std::vector<std::string> PlanMachine::assumed_figures() const {
  std::vector<std::string> figures;
  for (const MachineFigure& f : machine_figures()) {
    const std::string key = fmt::format("{}.{}", f.table, f.key);
    if (is_assumed(key)) figures.push_back(key + ": " + sources.at(key));
  }
  for (const auto& [key, source] : sources)
    if (source.starts_with("noisy")) figures.push_back(key + ": " + source);
  return figures;
}

PlanMachine parse_machine(const std::string& text, const std::string& name) {
  PlanMachine m;
  std::vector<std::string> given;
  for (const RecipeEntry& e : entries_of(text, name)) {
    read_entry(e, m);
    given.push_back(e.key);
  }
  std::vector<std::string> needed{"machine.name", "machine.device"};
  for (const MachineFigure& f : machine_figures())
    if (!f.is_optional) needed.push_back(fmt::format("{}.{}", f.table, f.key));
  std::erase_if(needed,
                [&](const std::string& key) { return std::find(given.begin(), given.end(), key) != given.end(); });
  MOEBIUS_CHECK(usage, needed.empty(), "machine {}: expected {}; {} missing", name, fmt::join(needed, ", "),
                needed.size() == 1 ? "it is" : "they are");
  MOEBIUS_CHECK(usage, m.is_gpu || m.threads >= 1,
                "machine {}: rank.threads must be at least 1 where machine.device is \"cpu\"; got {}", name, m.threads);
  MOEBIUS_CHECK(usage, m.is_gpu || m.capability == 0,
                "machine {}: machine.capability is that of a GPU, and machine.device is \"cpu\"; leave it out", name);
  MOEBIUS_CHECK(usage, !m.is_gpu || m.multiprocessors >= 1,
                "machine {}: rank.multiprocessors must be at least 1 where machine.device is \"cuda\"; got {}", name,
                m.multiprocessors);
  MOEBIUS_CHECK(usage, m.f32_tflops <= m.bf16_tflops,
                "machine {}: rank.f32_tflops, of scalar arithmetic, must be at most rank.bf16_tflops = {}; got {}",
                name, m.bf16_tflops, m.f32_tflops);
  for (const auto& [key, rate] : {std::pair("fp8_tflops", m.fp8_tflops), std::pair("nvfp4_tflops", m.nvfp4_tflops)})
    MOEBIUS_CHECK(usage, rate == 0 || rate >= m.bf16_tflops,
                  "machine {}: rank.{} must be 0 where there are no such products, or at least rank.bf16_tflops = {}; "
                  "got {}",
                  name, key, m.bf16_tflops, rate);
  MOEBIUS_CHECK(
      usage, m.link_one_way_gb_s == 0 || m.link_one_way_gb_s >= m.link_gb_s,
      "machine {}: host.link_one_way_gb_s, of copies in one direction alone, must be at least host.link_gb_s = "
      "{}; got {}",
      name, m.link_gb_s, m.link_one_way_gb_s);
  MOEBIUS_CHECK(usage, m.has_shares[0] || m.has_shares[1],
                "machine {}: expected the table [share.moebius]; it is missing", name);
  return m;
}

std::vector<std::string> known_machines(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored))
    if (entry.path().extension() == ".toml") names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  return names;
}

PlanMachine load_machine(const std::string& name_or_path, const std::string& folder) {
  const bool is_path = name_or_path.find_first_of("./") != std::string::npos;
  const std::string path = is_path ? name_or_path : fmt::format("{}/{}.toml", folder, name_or_path);
  if (std::filesystem::exists(path)) return parse_machine(read_file(path), path);
  const std::vector<std::string> known = known_machines(folder);
  MOEBIUS_CHECK(
      usage, !known.empty(),
      "--machine: expected a folder \"{}\" with machine files, to find machine \"{}\"; there is none here; run this in "
      "the root of the repository, or give the path of a machine file",
      folder, name_or_path);
  MOEBIUS_FAIL(
      usage,
      "--machine: no machine is called \"{}\"{}; the folder {} has {}; take one of them, or give the path of a machine "
      "file",
      name_or_path, is_path ? ", and there is no such file" : "", folder, fmt::join(known, ", "));
}

std::string to_toml(const PlanMachine& m) {
  const auto quoted = [](const std::string& value) { return json(value).dump(); };  // TOML's escapes are JSON's
  const std::string name = quoted(m.name);
  std::string text = fmt::format(
      "# {}, as the planner sees it. A share is what kernels and links reach of a rate.\n"
      "# `moebius plan --fit` writes shares, and `moebius bench machine` measures them.\n\n"
      "[machine]\nname = {}\ndevice = \"{}\"\n",
      name.substr(1, name.size() - 2), name, m.is_gpu ? "cuda" : "cpu");
  if (m.capability > 0) text += fmt::format("capability = \"{}.{}\"\n", m.capability / 10, m.capability % 10);
  const auto add = [&](const std::string& key, double value, const std::string& whole) {
    text += fmt::format("{} = {{ is = {:.4g}, from = {} }}\n", key, value, quoted(m.sources.at(whole)));
  };
  std::string table;
  for (const MachineFigure& f : machine_figures()) {
    if (table != f.table) text += fmt::format("\n[{}]\n", f.table);
    table = f.table;
    if (f.is_optional && m.*f.value == 0) continue;
    add(f.key, m.*f.value, fmt::format("{}.{}", f.table, f.key));
  }
  for (int i = 0; i < kNumSystems; ++i) {
    if (!m.has_shares[i]) continue;
    const std::string share = fmt::format("share.{}", name_of(static_cast<PlanSystem>(i)));
    text += fmt::format("\n[{}]\n", share);
    for (int k = 0; k < kNumShares; ++k) {
      const std::string key = name_of(static_cast<Share>(k));
      add(key, m.shares[i][k], share + "." + key);
    }
  }
  return text;
}

}  // namespace moebius
