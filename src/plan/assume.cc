#include "plan/assume.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <sstream>

#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

template <class Kind>
using Names = std::vector<std::pair<std::string, Kind>>;

const Names<PlanSystem> kSystems{{"moebius", PlanSystem::moebius}, {"megatron", PlanSystem::megatron}};
const Names<PlanDispatcher> kDispatchers{
    {"recipe", PlanDispatcher::from_recipe}, {"allgather", PlanDispatcher::allgather},
    {"alltoall", PlanDispatcher::alltoall},  {"deepep", PlanDispatcher::deepep},
    {"hybridep", PlanDispatcher::hybridep},  {"direct", PlanDispatcher::direct}};
const Names<PlanGraphs> kGraphs{{"recipe", PlanGraphs::from_recipe},
                                {"none", PlanGraphs::none},
                                {"partial", PlanGraphs::partial},
                                {"full", PlanGraphs::full}};
const Names<PlanPrecision> kPrecisions{{"recipe", PlanPrecision::from_recipe},
                                       {"fp8_block", PlanPrecision::fp8_block},
                                       {"fp8_tensor", PlanPrecision::fp8_tensor},
                                       {"mxfp8", PlanPrecision::mxfp8},
                                       {"nvfp4", PlanPrecision::nvfp4}};
const Names<PlanPermutation> kPermutations{{"memory_efficient", PlanPermutation::memory_efficient},
                                           {"plain", PlanPermutation::plain},
                                           {"fused", PlanPermutation::fused}};
const Names<PlanRecompute> kRecomputes{
    {"recipe", PlanRecompute::from_recipe}, {"activation", PlanRecompute::activation}, {"moe", PlanRecompute::moe}};
const Names<bool> kOverlaps{{"none", false}, {"merged", true}};
const Names<bool> kTpOverlaps{{"none", false}, {"products", true}};
const Names<PlanLoss> kLosses{{"te", PlanLoss::te}, {"native", PlanLoss::native}};

template <class Kind>
Kind value_of(const Names<Kind>& names, const std::string& key, const std::string& text) {
  std::string known;
  for (const auto& [name, kind] : names) {
    if (name == text) return kind;
    known += (known.empty() ? "" : ", ") + name;
  }
  MOEBIUS_FAIL(usage, "--assume {}: expected one of {}; got \"{}\"", key, known, text);
}

template <class Kind>
std::string text_of(const Names<Kind>& names, Kind kind) {
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& n) { return n.second == kind; });
  return found->first;
}

double number(const std::string& key, const std::string& text, double least, double most) {
  std::istringstream in(text);
  double value = 0;
  in >> value;
  MOEBIUS_CHECK(usage, !in.fail() && in.eof() && value >= least && value <= most,
                "--assume {}: expected a number from {} to {}; got \"{}\"", key, least, most, text);
  return value;
}

// Returns the rows of each expert of a layer; none if they are not a list of numbers. at: the file and the line.
std::vector<double> rows_of_experts(const nlohmann::json& layer, const std::string& at) {
  constexpr double kMaxRows = 1e15;
  const bool has_list = layer.is_object() && layer.contains("load") && layer["load"].is_array();
  const auto rows = has_list ? layer["load"] : nlohmann::json::array();
  if (!std::all_of(rows.begin(), rows.end(), [](const auto& row) { return row.is_number(); })) return {};
  const auto experts = rows.get<std::vector<double>>();
  for (const double of_expert : experts)
    MOEBIUS_CHECK(input, of_expert >= 0 && of_expert <= kMaxRows,
                  "--assume load: {}: expected rows of an expert from 0 to {} in \"load\"; got {}; remove the line, or "
                  "give another file",
                  at, kMaxRows, of_expert);
  return experts;
}

// Returns the load in the last record of a run that has it.
PlanLoad measured_load(const std::string& path) {
  std::istringstream lines(read_file(path));
  PlanLoad load{.text = path};
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const char* key = "expert_load_max_over_mean";
    if (!record.is_object() || !record.contains(key) || !record[key].is_number()) continue;
    load.busiest_expert = record[key].get<double>();
    load.measured.clear();
    const auto layers = record.contains("moe") && record["moe"].is_array() ? record["moe"] : nlohmann::json::array();
    for (const auto& layer : layers)
      load.measured.push_back(rows_of_experts(layer, fmt::format("{}:{}", path, number)));
  }
  MOEBIUS_CHECK(
      input, load.busiest_expert >= 1,
      "--assume load: {} has no train record with an expert_load_max_over_mean of at least 1; expected a run's "
      "metrics.jsonl",
      path);
  return load;
}

// Returns the rows of the busiest of ep ranks over the mean. Each rank has a block of the experts.
double busiest_of(const std::vector<double>& experts, int64_t ep) {
  const auto of_rank = static_cast<std::ptrdiff_t>(std::ssize(experts) / ep);
  double most = 0;
  for (auto first = experts.begin(); experts.end() - first >= of_rank; first += of_rank)
    most = std::max(most, std::accumulate(first, first + of_rank, 0.0));
  const double all = std::accumulate(experts.begin(), experts.end(), 0.0);
  return all > 0 ? most / all * static_cast<double>(ep) : 1;
}

PlanLoad load_of(const std::string& text) {
  if (text == "balanced") return {};
  if (text.starts_with("zipf:")) return {.zipf = number("load", text.substr(5), 0, 10), .text = text};
  if (text.starts_with("rank:")) return {.stated = number("load", text.substr(5), 1, 1e6), .text = text};
  std::error_code unreadable;  // set for a name that the system refuses; it is no file then
  MOEBIUS_CHECK(usage, std::filesystem::exists(text, unreadable),
                "--assume load: expected balanced, zipf:EXPONENT, rank:FACTOR, or the path of a run's metrics.jsonl; "
                "got \"{}\", which is no file",
                text);
  return measured_load(text);
}

}  // namespace

double PlanLoad::busiest_rank(int64_t experts, int64_t ep) const {
  if (ep <= 1 || experts <= 0) return 1;
  if (stated > 0) return std::min(stated, static_cast<double>(ep));
  const int64_t e = experts / ep;
  const auto is_of_model = [&](const std::vector<double>& layer) { return std::ssize(layer) == experts; };
  if (!measured.empty() && experts % ep == 0 && std::all_of(measured.begin(), measured.end(), is_of_model)) {
    double sum = 0;
    for (const std::vector<double>& layer : measured) sum += busiest_of(layer, ep);
    return sum / static_cast<double>(measured.size());
  }
  // The loads of a rank's experts are taken as independent, so the deviation of their mean falls with the square root
  // of their number.
  if (busiest_expert > 0)
    return std::min(static_cast<double>(ep), 1 + (busiest_expert - 1) / std::sqrt(static_cast<double>(e)));
  if (zipf == 0) return 1;
  // The order of popularity is as in the benchmarks' routes (bench/shapes.h): rank[e] = (5 e + 3) mod E.
  std::vector<double> of_rank(static_cast<size_t>(ep), 0.0);
  double sum = 0;
  for (int64_t i = 0; i < experts; ++i) {
    const double p = std::pow(static_cast<double>((5 * i + 3) % experts + 1), -zipf);
    of_rank[static_cast<size_t>(std::min(i / e, ep - 1))] += p;
    sum += p;
  }
  return *std::max_element(of_rank.begin(), of_rank.end()) / sum * static_cast<double>(ep);
}

// The expected largest of n normal draws is about sqrt(2 ln n) deviations above the mean.
double Assumptions::slowest_of(int64_t ranks, const PlanMachine& machine) const {
  const double n = static_cast<double>(std::max<int64_t>(1, ranks));
  return (1 + (jitter < 0 ? machine.spread : jitter) * std::sqrt(2 * std::log(n))) * (1 + straggler);
}

Assumptions parse_assumptions(const std::vector<std::string>& texts) {
  Assumptions a;
  std::set<std::string> seen;
  for (const std::string& text : texts) {
    const size_t equal = text.find('=');
    MOEBIUS_CHECK(usage, equal != std::string::npos, "--assume: expected KEY=VALUE; got \"{}\"", text);
    const std::string key = text.substr(0, equal), value = text.substr(equal + 1);
    MOEBIUS_CHECK(usage, seen.insert(key).second, "--assume: expected each key once; got {} twice", key);
    if (key == "system") {
      a.system = value_of(kSystems, key, value);
    } else if (key == "dispatcher") {
      a.dispatcher = value_of(kDispatchers, key, value);
    } else if (key == "graphs") {
      a.graphs = value_of(kGraphs, key, value);
    } else if (key == "expert_overlap") {
      a.merged_overlap = value_of(kOverlaps, key, value);
    } else if (key == "precision") {
      a.precision = value_of(kPrecisions, key, value);
    } else if (key == "permutation") {
      a.permutation = value_of(kPermutations, key, value);
    } else if (key == "recompute") {
      a.recompute = value_of(kRecomputes, key, value);
    } else if (key == "tp_overlap") {
      a.tp_overlap = value_of(kTpOverlaps, key, value);
    } else if (key == "cross_entropy") {
      a.cross_entropy = value_of(kLosses, key, value);
    } else if (key == "load") {
      a.load = load_of(value);
    } else if (key == "jitter") {
      a.jitter = number(key, value, 0, 1);
    } else if (key == "straggler") {
      a.straggler = number(key, value, 0, 10);
    } else if (key == "tokens") {
      a.tokens = number(key, value, 0, 1e18);
    } else {
      MOEBIUS_CHECK(usage, key != "generation" && key != "inference",
                    "--assume {}: generation is not predicted, only training; time a model with moebius generate", key);
      MOEBIUS_FAIL(usage,
                   "--assume: unknown key \"{}\"; the keys are system, dispatcher, graphs, expert_overlap, precision, "
                   "permutation, recompute, tp_overlap, cross_entropy, load, jitter, straggler, tokens",
                   key);
    }
  }
  const bool is_own = a.system == PlanSystem::moebius;
  MOEBIUS_CHECK(usage, !is_own || a.permutation == PlanPermutation::memory_efficient,
                "--assume permutation: only Megatron Core has a choice; add --assume system=megatron, or leave it out");
  MOEBIUS_CHECK(usage, !is_own || a.recompute == PlanRecompute::from_recipe,
                "--assume recompute: its values are Megatron Core's; add --assume system=megatron, or set "
                "memory.recompute");
  MOEBIUS_CHECK(usage, !is_own || !a.tp_overlap,
                "--assume tp_overlap: its values are Megatron Core's, and parallel.overlap is Moebius's; add --assume "
                "system=megatron, or leave it out");
  MOEBIUS_CHECK(
      usage, !is_own || a.cross_entropy == PlanLoss::te,
      "--assume cross_entropy: its values are losses of Megatron Core; add --assume system=megatron, or leave "
      "it out");
  return a;
}

std::string to_string(const Assumptions& a) {
  std::string text = fmt::format(
      "system {}, dispatcher {}, graphs {}, expert_overlap {}, precision {}, load {}, jitter {}, straggler {}",
      name_of(a.system), text_of(kDispatchers, a.dispatcher), text_of(kGraphs, a.graphs),
      text_of(kOverlaps, a.merged_overlap), text_of(kPrecisions, a.precision), a.load.text,
      a.jitter < 0 ? std::string("of the machine") : fmt::format("{}", a.jitter), a.straggler);
  if (a.system == PlanSystem::megatron)
    text += fmt::format(", permutation {}, recompute {}, tp_overlap {}, cross_entropy {}",
                        text_of(kPermutations, a.permutation), text_of(kRecomputes, a.recompute),
                        text_of(kTpOverlaps, a.tp_overlap), text_of(kLosses, a.cross_entropy));
  return text;
}

}  // namespace moebius
