#include "report/sinks.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "io/files.h"

namespace moebius {
namespace {

namespace dom = simdjson::dom;

// --- CSV ------------------------------------------------------------------------------------------------------------

// Prefixes a name with an apostrophe if a spreadsheet would read it as a formula.
std::string csv_field(std::string text) {
  if (!text.empty() && std::string_view("=+-@\t\r").find(text[0]) != std::string_view::npos) text.insert(0, "'");
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_number(const dom::element& value) {
  if (value.is_int64()) return fmt::format("{}", int64_t(value));
  if (value.is_uint64()) return fmt::format("{}", uint64_t(value));
  return value.is_double() ? fmt::format("{}", double(value)) : "";
}

std::vector<std::string> columns_of(const RunData& run) {
  std::vector<std::string> columns;
  for (const NamedSeries* from : {&run.train, &run.eval})
    for (const auto& [name, series] : from->all())
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
  return columns;
}

std::string header_of(const std::vector<std::string>& columns) {
  std::string line = "kind,step";
  for (const std::string& name : columns) line += "," + csv_field(name);
  return line + "\r\n";
}

// Returns the row for a line; empty if the line is not a record.
std::string row_of(dom::parser& parser, std::string_view line, const std::vector<std::string>& columns) {
  dom::object record;
  std::string_view kind;
  int64_t step = 0;
  if (parser.parse(line.data(), line.size(), /*realloc_if_needed=*/false).get(record) != simdjson::SUCCESS ||
      record.at_key("kind").get(kind) != simdjson::SUCCESS || record.at_key("step").get(step) != simdjson::SUCCESS ||
      (kind != "train" && kind != "eval"))
    return "";
  std::string row = fmt::format("{},{}", kind, step);
  for (const std::string& name : columns) {
    dom::element value;
    row += ",";
    if (record.at_key(name).get(value) == simdjson::SUCCESS) row += csv_number(value);
  }
  return row + "\r\n";
}

// --- Prometheus -----------------------------------------------------------------------------------------------------

std::string label_value(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  }
  return out;
}

std::string metric_name(std::string_view name) {
  std::string out = "moebius_";
  for (const char c : name) {
    const bool is_word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    out += is_word ? c : '_';
  }
  return out;
}

std::string value_text(double value) {
  if (std::isnan(value)) return "NaN";
  return std::isinf(value) ? (value > 0 ? "+Inf" : "-Inf") : fmt::format("{}", value);
}

class PrometheusText {
 public:
  explicit PrometheusText(std::string_view run) : run_(label_value(run)) {}

  // Begins a metric; false if there is one of its name already.
  bool begin(std::string_view name, std::string_view help) {
    name_ = metric_name(name);
    if (!names_.insert(name_).second) return false;
    text_ += fmt::format("# HELP {} {}\n# TYPE {} gauge\n", name_, help, name_);
    return true;
  }
  // labels: as in `,layer="1"`
  void sample(double value, const std::string& labels = "") {
    text_ += fmt::format("{}{{run=\"{}\"{}}} {}\n", name_, run_, labels, value_text(value));
  }
  const std::string& str() const { return text_; }

 private:
  std::string run_, name_, text_;
  std::set<std::string> names_;
};

void add_layers(PrometheusText& out, const MoeData& moe, const Grid& grid, const char* name, const char* help) {
  if (grid.empty() || grid.last().size() != moe.layers.size() || !out.begin(name, help)) return;
  for (size_t i = 0; i < moe.layers.size(); ++i)
    out.sample(grid.last()[i], fmt::format(",layer=\"{}\"", moe.layers[i]));
}

}  // namespace

int64_t write_csv(const RunFolder& run, const std::string& path) {
  const std::vector<std::string> columns = columns_of(run.data());
  PendingFile file(path);
  std::string text = header_of(columns);
  const auto flush = [&] {
    file.file().append(text.data(), std::ssize(text));
    text.clear();
  };
  dom::parser parser(size_t{64} << 20);
  LineFile lines(run.metrics_path());
  int64_t rows = 0;
  lines.check();
  lines.read_new([&](std::string_view line) {
    const std::string row = row_of(parser, line, columns);
    rows += !row.empty();
    text += row;
    if (text.size() > (size_t{1} << 20)) flush();
  });
  flush();
  file.commit();
  return rows;
}

std::string prometheus_text(const std::string& run_name, const RunData& run) {
  PrometheusText out(run_name);
  if (out.begin("step", "The newest step.")) out.sample(static_cast<double>(run.last_step));
  if (out.begin("steps_per_run", "train.steps of the recipe."))
    out.sample(recipe_number(run, "train.steps").value_or(std::nan("")));
  for (const auto& [name, series] : run.train.all())
    if (!series.empty() && out.begin(name, "The value of the newest step, under its name in metrics.jsonl."))
      out.sample(series.last());
  for (const auto& [name, series] : run.eval.all())
    if (!series.empty() && out.begin("eval_" + name, "The value of the newest evaluation.")) out.sample(series.last());
  add_layers(out, run.moe, run.moe.balance, "layer_load_max_over_mean", "Tokens of the busiest expert over the mean.");
  add_layers(out, run.moe, run.moe.entropy, "layer_router_entropy", "Mean entropy of the scores of a token, in nats.");
  add_layers(out, run.moe, run.moe.dropped, "layer_dropped", "Pairs of token and expert that were dropped.");
  if (!run.ranks.phases.empty() && out.begin("rank_seconds", "Seconds of the newest step by rank and phase."))
    for (const auto& [phase, grid] : run.ranks.phases)
      for (size_t r = 0; r < grid.last().size(); ++r)
        out.sample(grid.last()[r], fmt::format(",phase=\"{}\",rank=\"{}\"", phase, r));
  if (!run.ranks.axes.empty() &&
      out.begin("comm_exposed_seconds", "The longest time that a rank waited in the newest step."))
    for (const auto& [axis, data] : run.ranks.axes)
      if (!data.exposed_s.empty()) out.sample(data.exposed_s.last(), fmt::format(",axis=\"{}\"", label_value(axis)));
  return out.str();
}

}  // namespace moebius
