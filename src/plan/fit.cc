#include "plan/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "io/files.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr double kPrior = 0.05;  // a share that is 30 % from its measured value costs as much as a row that is 7 % off
// Rows move the shares of links less than other shares, since the links of GPUs inside a domain, and Megatron Core's,
// were measured by themselves.
constexpr double kPriorOfLinks = 1;
constexpr int kRounds = 12;
constexpr double kStep = 0.02;  // of a numerical derivative, in ln(share)
constexpr int64_t kMaxRanks = int64_t{1} << 24;
constexpr double kLongest = 0.3;  // step of a round, in ln(share)
// How the source of a figure begins that is another machine's, since this one was not measured. A fit keeps it.
constexpr std::string_view kSameAs = "that of";

// The fitted values: the shares, and one value of the machine. Megatron's rows determine the exposed host time of a
// layer's pass (layer_us). Moebius' rows, of one and of several ranks, determine the spread of ranks' speeds.
constexpr int kNumFitted = kNumShares + 1;

double& fitted(PlanMachine& m, PlanSystem system, int i) {
  if (i < kNumShares) return m.of(system)[static_cast<size_t>(i)];
  return system == PlanSystem::megatron ? m.layer_us : m.spread;
}

double prior_of(int i) {
  const bool is_link = i == static_cast<int>(Share::inside) || i == static_cast<int>(Share::across);
  return is_link ? kPriorOfLinks : kPrior;
}

std::string source_key(PlanSystem system, int i) {
  if (i < kNumShares) return fmt::format("share.{}.{}", name_of(system), name_of(static_cast<Share>(i)));
  return system == PlanSystem::megatron ? "host.layer_us" : "rank.spread";
}

double& share_named(PlanMachine& m, const std::string& key, const std::string& path) {
  if (key == "layer_us") return m.layer_us;
  if (key == "spread") return m.spread;
  for (int i = 0; i < kNumSystems; ++i)
    for (int k = 0; k < kNumShares; ++k)
      if (key == fmt::format("{}.{}", name_of(static_cast<PlanSystem>(i)), name_of(static_cast<Share>(k))))
        return m.shares[static_cast<size_t>(i)][static_cast<size_t>(k)];
  MOEBIUS_FAIL(input, "{}: before has no key {}; expected SYSTEM.SHARE, layer_us or spread", path, key);
}

// Returns the least and the largest value that a machine file may have.
std::pair<double, double> limits_of(const std::string& key) {
  for (const MachineFigure& figure : machine_figures())
    if (key == figure.key) return {figure.min, figure.max};
  return {kMinShare, kMaxShare};
}

// Sets a share to a number, or multiplies the family's by X for {"times": X}.
void set_before(double& share, const json& value, const std::pair<double, double>& limits, const std::string& at) {
  const bool is_factor = value.is_object() && value.contains("times");
  const json& number = is_factor ? value["times"] : value;
  MOEBIUS_CHECK(input, number.is_number() && number.get<double>() >= 0,
                "{} must be a number from 0 on, or {{\"times\": NUMBER}}", at);
  share = is_factor ? share * number.get<double>() : number.get<double>();
  MOEBIUS_CHECK(input, share >= limits.first && share <= limits.second, "{} must give a value from {} to {}; got {}",
                at, limits.first, limits.second, share);
}

std::string where(const std::string& path, size_t i) { return fmt::format("{}: row {}", path, i + 1); }

std::string text_of(const json& row, const char* key, const std::string& at) {
  MOEBIUS_CHECK(input, row.is_object() && row.contains(key) && row[key].is_string(), "{}: expected a text \"{}\"", at,
                key);
  auto text = row[key].get<std::string>();
  const auto is_control = [](unsigned char c) { return c < ' ' || c == 0x7f; };
  MOEBIUS_CHECK(input, !text.empty() && std::none_of(text.begin(), text.end(), is_control),
                "{}: expected a text of one line in \"{}\"; got {}", at, key, row[key].dump());
  return text;
}

std::vector<std::string> texts_of(const json& row, const char* key, const std::string& at) {
  std::vector<std::string> texts;
  if (!row.contains(key)) return texts;
  MOEBIUS_CHECK(input, row[key].is_array(), "{}: expected a list of texts in \"{}\"; got {}", at, key, row[key].dump());
  for (const json& text : row[key]) {
    MOEBIUS_CHECK(input, text.is_string(), "{}: expected texts in \"{}\"", at, key);
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

double number_of(const json& row, const char* key, const std::string& at) {
  MOEBIUS_CHECK(input, row[key].is_number() && row[key].get<double>() > 0,
                "{}: expected a number above 0 in \"{}\"; got {}", at, key, row[key].dump());
  return row[key].get<double>();
}

// Returns the measured rate in model TFLOP/s per rank, whatever the unit of the row.
double measured_of(const json& row, const FitRow& r, const std::string& at) {
  const double per_token = r.run.model.train_flops_per_token(r.run.train.seq_len) / 1e12;
  const size_t rates =
      row.count("model_tflops_per_gpu") + row.count("tokens_per_s_per_gpu") + row.count("tokens_per_s");
  MOEBIUS_CHECK(input, rates == 1,
                "{}: expected one of model_tflops_per_gpu, tokens_per_s_per_gpu, tokens_per_s; got {}", at, rates);
  if (row.contains("model_tflops_per_gpu")) return number_of(row, "model_tflops_per_gpu", at);
  if (row.contains("tokens_per_s_per_gpu")) return number_of(row, "tokens_per_s_per_gpu", at) * per_token;
  return number_of(row, "tokens_per_s", at) * per_token / static_cast<double>(r.ranks);
}

int64_t ranks_of(const json& row, const std::string& at) {
  if (!row.contains("ranks")) return 1;
  MOEBIUS_CHECK(input, row["ranks"].is_number_integer() && row["ranks"] >= 1 && row["ranks"] <= kMaxRanks,
                "{}: expected a whole number from 1 to {} in \"ranks\"; got {}", at, kMaxRanks, row["ranks"].dump());
  return row["ranks"].get<int64_t>();
}

void check_keys(const json& row, const std::string& at) {
  const std::vector<std::string> known{"name",
                                       "source",
                                       "recipe",
                                       "set",
                                       "machine",
                                       "ranks",
                                       "assume",
                                       "fit",
                                       "model_tflops_per_gpu",
                                       "tokens_per_s_per_gpu",
                                       "tokens_per_s"};
  for (const auto& [key, value] : row.items())
    MOEBIUS_CHECK(input, std::find(known.begin(), known.end(), key) != known.end(),
                  "{}: unknown key \"{}\"; the keys are {}", at, key, fmt::join(known, ", "));
  MOEBIUS_CHECK(input, !row.contains("fit") || row["fit"].is_boolean(), "{}: expected true or false in \"fit\"; got {}",
                at, row["fit"].dump());
}

// Checks {"FAMILY": ["MACHINE", ...]}, and "before" with an object for each of these names.
void check_families(const json& file, const std::string& path) {
  const auto is_text = [](const json& value) { return value.is_string(); };
  for (const auto& [key, unused] : file.items())
    MOEBIUS_CHECK(input, key == "about" || key == "families" || key == "before" || key == "rows",
                  "{}: unknown key \"{}\"; the keys are about, families, before, rows", path, key);
  std::map<std::string, std::string> families;  // by machine
  if (file.contains("families")) {
    MOEBIUS_CHECK(input, file["families"].is_object(), "{}: expected an object in \"families\"; got {}", path,
                  file["families"].dump());
    for (const auto& [name, machines] : file["families"].items()) {
      MOEBIUS_CHECK(input, machines.is_array() && std::all_of(machines.begin(), machines.end(), is_text),
                    "{}: expected a list of machines in families.{}; got {}", path, name, machines.dump());
      for (const json& machine : machines) {
        const auto [other, is_new] = families.try_emplace(machine.get<std::string>(), name);
        MOEBIUS_CHECK(input, is_new, "{}: expected each machine in one family, once; got {} in {} and {}", path,
                      other->first, other->second, name);
      }
    }
  }
  if (!file.contains("before")) return;
  MOEBIUS_CHECK(input, file["before"].is_object(), "{}: expected an object in \"before\"; got {}", path,
                file["before"].dump());
  for (const auto& [name, shares] : file["before"].items())
    MOEBIUS_CHECK(input, shares.is_object(), "{}: expected an object of shares in before.{}; got {}", path, name,
                  shares.dump());
}

// Checks the names in "before": families, and machines of families and of rows.
void check_before(const json& file, const std::vector<FitRow>& rows, const std::string& path) {
  if (!file.contains("before")) return;
  std::set<std::string> known;
  for (const FitRow& row : rows) known.insert(row.machine);
  const json families = file.value("families", json::object());
  for (const auto& [family, machines] : families.items()) {
    known.insert(family);
    for (const json& machine : machines) known.insert(machine.get<std::string>());
  }
  for (const auto& [name, unused] : file["before"].items())
    MOEBIUS_CHECK(
        input, known.contains(name),
        "{}: expected a family, or a machine of a family or a row, in before.{}; correct the name, or remove it", path,
        name);
}

void find_family(const json& file, FitRow& row) {
  row.family = row.machine;
  row.relatives = {row.machine};
  if (!file.contains("families")) return;
  for (const auto& [name, machines] : file["families"].items()) {
    if (std::find(machines.begin(), machines.end(), row.machine) == machines.end()) continue;
    row.family = name;
    row.relatives = machines.get<std::vector<std::string>>();
  }
}

// Solves a x = b for a symmetric positive matrix, in place.
std::vector<double> solve(std::vector<std::vector<double>> a, std::vector<double> b) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i) {
    for (size_t r = i + 1; r < n; ++r) {
      const double f = a[r][i] / a[i][i];
      for (size_t c = i; c < n; ++c) a[r][c] -= f * a[i][c];
      b[r] -= f * b[i];
    }
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t c = i + 1; c < n; ++c) b[i] -= a[i][c] * b[c];
    b[i] /= a[i][i];
  }
  return b;
}

// One family of machines and one system: the rows that decide its shares.
class FamilyFit {
 public:
  FamilyFit(PartLibrary& parts, std::map<std::string, PlanMachine> machines, std::vector<const FitRow*> rows)
      : parts_(parts), machines_(std::move(machines)), rows_(std::move(rows)), system_(rows_[0]->assume.system) {
    for (const FitRow* row : rows_) names_.insert(names_.end(), row->relatives.begin(), row->relatives.end());
    std::sort(names_.begin(), names_.end());
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
  }

  double predicted(const FitRow& row, const std::vector<double>& x) const {
    PlanMachine m = machines_.at(row.machine);
    for (int i = 0; i < kNumFitted; ++i) fitted(m, system_, i) *= std::exp(x[static_cast<size_t>(i)]);
    try {
      return predict(parts_, row.run, row.ranks, m, row.assume,
                     {.simulate = false, .memory = PredictOptions::Memory::none})
          .model_tflops_per_gpu;
    } catch (const Error& e) {
      throw Error(e.kind(), fmt::format("row \"{}\": {}", row.name, e.what()));
    }
  }

  // Returns the logarithms of the factors on the shares. left_out: a row that is ignored.
  std::vector<double> solved(const FitRow* left_out) const {
    std::vector<double> x(kNumFitted, 0.0);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<double>> a(kNumFitted, std::vector<double>(kNumFitted, 0.0));
      std::vector<double> b(kNumFitted, 0.0);
      for (int i = 0; i < kNumFitted; ++i) {
        a[i][i] = prior_of(i);
        b[i] = -prior_of(i) * x[i];
      }
      for (const FitRow* row : rows_)
        if (row != left_out && row->is_fitted) add_row(a, b, x, *row);
      const std::vector<double> step = solve(a, b);
      double most = 0;
      for (int i = 0; i < kNumFitted; ++i) {
        x[i] += std::clamp(step[i], -kLongest, kLongest);
        most = std::max(most, std::abs(step[i]));
      }
      if (most < 1e-3) break;
    }
    return x;
  }

  void apply(const std::vector<double>& x, std::map<std::string, PlanMachine>& machines) const {
    for (const std::string& name : names_) {
      PlanMachine& m = machines.at(name);
      for (int i = 0; i < kNumFitted; ++i) {
        if (x[static_cast<size_t>(i)] == 0 || fitted(m, system_, i) == 0) continue;  // no row depends on it
        fitted(m, system_, i) *= std::exp(x[static_cast<size_t>(i)]);
        std::string& source = m.sources[source_key(system_, i)];
        if (!source.starts_with(kSameAs)) source = "fitted to measured runs, docs/measurements/plan.md";
      }
    }
  }

 private:
  // Gauss-Newton: the row's residual and its derivatives by the logarithms of the shares.
  void add_row(std::vector<std::vector<double>>& a, std::vector<double>& b, const std::vector<double>& x,
               const FitRow& row) const {
    const double here = std::log(predicted(row, x)), residual = here - std::log(row.measured);
    std::vector<double> slope(kNumFitted);
    for (int i = 0; i < kNumFitted; ++i) {
      std::vector<double> moved = x;
      moved[i] += kStep;
      slope[i] = (std::log(predicted(row, moved)) - here) / kStep;
    }
    for (int i = 0; i < kNumFitted; ++i) {
      b[i] -= slope[i] * residual;
      for (int k = 0; k < kNumFitted; ++k) a[i][k] += slope[i] * slope[k];
    }
  }

  PartLibrary& parts_;
  std::map<std::string, PlanMachine> machines_;
  std::vector<const FitRow*> rows_;
  PlanSystem system_;
  std::vector<std::string> names_;
};

}  // namespace

std::vector<FitRow> read_fit_rows(const std::string& path, const std::string& folder) {
  const json file = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  MOEBIUS_CHECK(input, file.is_object() && file.contains("rows") && file["rows"].is_array() && !file["rows"].empty(),
                "{}: expected an object with \"rows\", a list of one measured run or more", path);
  check_families(file, path);
  std::vector<FitRow> rows;
  for (size_t i = 0; i < file["rows"].size(); ++i) {
    const json& row = file["rows"][i];
    const std::string at = where(path, i);
    FitRow r{.name = text_of(row, "name", at), .source = text_of(row, "source", at)};
    check_keys(row, at);
    r.recipe = text_of(row, "recipe", at);
    r.machine = text_of(row, "machine", at);
    find_family(file, r);
    r.ranks = ranks_of(row, at);
    const std::vector<std::string> overrides = texts_of(row, "set", at), assume = texts_of(row, "assume", at);
    try {
      r.run = load_run_spec(folder + "/" + r.recipe, overrides);
      r.assume = parse_assumptions(assume);
    } catch (const Error& e) {
      MOEBIUS_FAIL(input, "{}, \"{}\": {}", at, r.name, e.what());
    }
    r.measured = measured_of(row, r, at);
    r.is_fitted = row.value("fit", true);
    for (const FitRow& before : rows)
      MOEBIUS_CHECK(input, before.name != r.name,
                    "{}: \"{}\" is a row already; give each run once, since its copy would decide what is fitted "
                    "without it",
                    at, r.name);
    rows.push_back(std::move(r));
  }
  check_before(file, rows, path);
  return rows;
}

void set_shares_before(const std::string& path, std::map<std::string, PlanMachine>& machines) {
  const json file = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (!file.is_object() || !file.contains("before")) return;
  const auto is_family = [&](const std::string& name) {
    return file.contains("families") && file["families"].contains(name);
  };
  // Families first, since a machine's own values are on top of them.
  for (const bool families : {true, false}) {
    for (const auto& [name, values] : file["before"].items()) {
      if (is_family(name) != families) continue;
      const auto names = families ? file["families"][name].get<std::vector<std::string>>() : std::vector{name};
      for (const auto& [key, value] : values.items())
        for (const std::string& machine : names)
          if (machines.contains(machine))
            set_before(share_named(machines.at(machine), key, path), value, limits_of(key),
                       fmt::format("{}: before.{}.{}", path, name, key));
    }
  }
}

FitResult fit(PartLibrary& parts, const std::vector<FitRow>& rows, const std::map<std::string, PlanMachine>& machines,
              bool leave_one_out) {
  FitResult result{.machines = machines};
  std::map<std::pair<std::string, PlanSystem>, std::vector<const FitRow*>> families;
  for (const FitRow& row : rows) families[{row.family, row.assume.system}].push_back(&row);
  for (const auto& [key, members] : families) {
    const FamilyFit family(parts, result.machines, members);
    const std::vector<double> none(kNumFitted, 0.0), x = family.solved(nullptr);
    family.apply(x, result.machines);
    for (const FitRow* row : members) {
      FittedRow fitted{.row = row, .before = family.predicted(*row, none), .after = family.predicted(*row, x)};
      if (leave_one_out) fitted.left_out = family.predicted(*row, family.solved(row));
      result.rows.push_back(fitted);
    }
  }
  return result;
}

std::map<std::string, std::string> machine_files(const FitResult& result) {
  std::map<std::string, std::string> files;
  for (const auto& [name, machine] : result.machines) {
    const std::string file = std::filesystem::path(name).filename().replace_extension(".toml").string();
    const auto [at, is_new] = files.try_emplace(file, to_toml(machine));
    MOEBIUS_CHECK(input, is_new, "plan: the rows have two machines whose file would be {}; rename one of their files",
                  file);
    try {
      parse_machine(at->second, name);
    } catch (const Error& e) {
      MOEBIUS_FAIL(input, "plan: the fit has no machine file for {}: {}; check the measured rates of its rows", name,
                   e.what());
    }
  }
  return files;
}

ErrorSummary summary_of(const std::vector<FittedRow>& rows, PlanSystem system, double FittedRow::*predicted,
                        bool fitted) {
  std::vector<std::pair<double, std::string>> errors;
  for (const FittedRow& r : rows)
    if (r.row->assume.system == system && r.row->is_fitted == fitted)
      errors.emplace_back(std::abs(FittedRow::error(r.*predicted, r.row->measured)), r.row->name);
  std::sort(errors.begin(), errors.end());
  if (errors.empty()) return {};
  const size_t n = errors.size();
  const double median = n % 2 ? errors[n / 2].first : (errors[n / 2 - 1].first + errors[n / 2].first) / 2;
  return {.median = median, .worst = errors.back().first, .worst_row = errors.back().second};
}

OrderSummary order_of(const std::vector<FittedRow>& rows, PlanSystem system, double FittedRow::*predicted) {
  OrderSummary order;
  double farthest = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const FittedRow &a = rows[i], &b = rows[k];
      const bool compared = a.row->recipe == b.row->recipe && a.row->assume.system == system &&
                            b.row->assume.system == system && a.row->is_fitted && b.row->is_fitted;
      if (!compared || a.row->measured == b.row->measured) continue;
      ++order.pairs;
      if ((a.row->measured > b.row->measured) == (a.*predicted > b.*predicted)) {
        ++order.kept;
        continue;
      }
      const double apart = std::abs(std::log(a.row->measured / b.row->measured));
      if (apart <= farthest) continue;
      farthest = apart;
      order.broken = fmt::format("{} and {}, {:.1f} % apart", a.row->name, b.row->name, 100 * std::expm1(apart));
    }
  }
  return order;
}

namespace {

// Returns the text as a cell of a table, in which a bar would begin the next one.
std::string cell(const std::string& text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return escaped;
}

}  // namespace

std::string fit_text(const FitResult& result) {
  const bool left_out = !result.rows.empty() && result.rows[0].left_out > 0;
  std::string text = "| run | machine | measured | predicted | error |";
  text += left_out ? " left out | error |\n| --- | --- | --- | --- | --- | --- | --- |\n"
                   : "\n| --- | --- | --- | --- | --- |\n";
  for (const FittedRow& r : result.rows) {
    const double m = r.row->measured;
    text += fmt::format("| {} | {} | {:.4g} | {:.4g} | {:+.1f} % |", cell(r.row->name), r.row->machine, m, r.after,
                        100 * FittedRow::error(r.after, m));
    if (left_out) text += fmt::format(" {:.4g} | {:+.1f} % |", r.left_out, 100 * FittedRow::error(r.left_out, m));
    text += "\n";
  }
  for (const PlanSystem system : {PlanSystem::moebius, PlanSystem::megatron}) {
    const ErrorSummary fitted = summary_of(result.rows, system, &FittedRow::after);
    if (fitted.worst_row.empty()) continue;
    text += fmt::format("{}: median {:.1f} %, worst {:.1f} % ({})", name_of(system), 100 * fitted.median,
                        100 * fitted.worst, fitted.worst_row);
    if (left_out) {
      const ErrorSummary out = summary_of(result.rows, system, &FittedRow::left_out);
      text += fmt::format("; left out: median {:.1f} %, worst {:.1f} % ({})", 100 * out.median, 100 * out.worst,
                          out.worst_row);
    }
    const OrderSummary order = order_of(result.rows, system, left_out ? &FittedRow::left_out : &FittedRow::after);
    text += fmt::format("; order kept in {} of {} pairs of one model", order.kept, order.pairs);
    if (!order.broken.empty()) text += fmt::format(" (not in {})", order.broken);
    const ErrorSummary blind = summary_of(result.rows, system, &FittedRow::after, /*fitted=*/false);
    if (!blind.worst_row.empty())
      text += fmt::format("\n{}, rows that were not fitted: median {:.1f} %, worst {:.1f} % ({})", name_of(system),
                          100 * blind.median, 100 * blind.worst, blind.worst_row);
    text += "\n";
  }
  return text;
}

}  // namespace moebius
