#include "report/read_metrics.h"

#include <simdjson.h>

#include <cmath>
#include <limits>
#include <vector>

namespace moebius {
namespace {

namespace dom = simdjson::dom;
static_assert(MetricsReader::kPadding >= simdjson::SIMDJSON_PADDING);

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kMaxNumber = 1e290;            // of an event
constexpr int64_t kMaxStep = int64_t{1} << 50;  // on an axis a double still tells it from the next one
constexpr int64_t kMaxLayers = 1024, kMaxCells = 65536, kMaxRanks = 16384;
constexpr size_t kMaxEvents = 20000, kMaxAxes = 16, kMaxText = 2000, kMaxNumbers = 64;

// Returns whether a record has a step that an axis can show.
bool read_step(const dom::object& record, int64_t* step) {
  return record.at_key("step").get(*step) == simdjson::SUCCESS && *step <= kMaxStep && *step >= -kMaxStep;
}

// Returns a number, or NaN for null and all that is no number. JsonlWriter writes null for NaN and Inf.
double number_of(const dom::element& value) {
  double number = kNone;
  return value.get(number) == simdjson::SUCCESS ? number : kNone;
}

double number_at(const dom::object& record, std::string_view key) {
  dom::element value;
  return record.at_key(key).get(value) == simdjson::SUCCESS ? number_of(value) : kNone;
}

bool numbers_of(const dom::element& value, size_t most, std::vector<double>& numbers) {
  dom::array array;
  numbers.clear();
  if (value.get(array) != simdjson::SUCCESS) return false;
  for (const dom::element each : array) {
    if (numbers.size() == most) return false;
    numbers.push_back(number_of(each));
  }
  return true;
}

// Numbers too large to be added are left out.
void add_numbers(const dom::object& object, std::map<std::string, double>& numbers) {
  for (const dom::key_value_pair field : object) {
    double number = 0;
    if (numbers.size() < kMaxNumbers && field.value.get(number) == simdjson::SUCCESS && std::abs(number) <= kMaxNumber)
      numbers[std::string(field.key.substr(0, kMaxText))] = number;
  }
}

// Appends the load of a layer's experts over their mean, and returns how many there are; -1: they are too many.
int64_t add_load(const dom::object& layer, std::vector<double>& load) {
  dom::array array;
  if (layer.at_key("load").get(array) != simdjson::SUCCESS) return 0;
  const size_t begin = load.size();
  if (std::ssize(load) + static_cast<int64_t>(array.size()) > kMaxCells) return -1;
  double sum = 0;
  for (const dom::element each : array) {
    load.push_back(number_of(each));
    sum += load.back();
  }
  const auto experts = static_cast<double>(load.size() - begin);
  for (size_t i = begin; i < load.size(); ++i) load[i] = sum > 0 ? load[i] * experts / sum : kNone;
  return static_cast<int64_t>(experts);
}

std::optional<LinkData> link_at(const dom::object& figures, std::string_view name) {
  dom::object figure;
  dom::array ranks, hosts;
  if (figures.at_key(name).get(figure) != simdjson::SUCCESS || figure.at_key("ranks").get(ranks) != simdjson::SUCCESS ||
      figure.at_key("hosts").get(hosts) != simdjson::SUCCESS)
    return {};
  LinkData link;
  std::string_view host, peer_host;
  if (ranks.at(0).get(link.rank) != simdjson::SUCCESS || ranks.at(1).get(link.peer) != simdjson::SUCCESS ||
      hosts.at(0).get(host) != simdjson::SUCCESS || hosts.at(1).get(peer_host) != simdjson::SUCCESS)
    return {};
  link.host = host.substr(0, kMaxText);
  link.peer_host = peer_host.substr(0, kMaxText);
  link.value = number_at(figure, "value");
  if (!(link.value > 0)) return {};
  const double median = number_at(figure, "median_of_others");
  link.median_of_others = median > 0 ? median : 0;
  if (figure.at_key("slow").get(link.is_slow) != simdjson::SUCCESS) link.is_slow = false;
  return link;
}

}  // namespace

class MetricsReader::Parser {
 public:
  explicit Parser(RunData& run) : run_(run) {}
  bool read_metrics(std::string_view line);
  bool read_event(std::string_view line);

 private:
  bool is_in_order(std::string_view kind, int64_t step);
  void read_numbers(NamedSeries& into, int64_t step, const dom::object& record);
  void count_number(std::string_view key, double value);  // in the totals of the run
  void read_layers(int64_t step, const dom::element& moe);
  void read_ranks(int64_t step, const dom::element& ranks);
  void read_axes(int64_t step, const dom::element& comm);
  void read_links(const dom::element& links);

  RunData& run_;
  dom::parser parser_{size_t{64} << 20};    // bytes of a line, at most
  int64_t train_step_ = 0, eval_step_ = 0;  // the newest of each kind
  std::vector<double> load_, balance_, entropy_, dropped_, values_, busy_;
};

bool MetricsReader::Parser::is_in_order(std::string_view kind, int64_t step) {
  int64_t& newest = kind == "train" ? train_step_ : eval_step_;
  if (step <= newest) {
    ++run_.skipped_lines.out_of_order;
    return false;
  }
  newest = step;
  return true;
}

bool MetricsReader::Parser::read_metrics(std::string_view line) {
  dom::object record;
  std::string_view kind;
  int64_t step = 0;
  if (parser_.parse(line.data(), line.size(), /*realloc_if_needed=*/false).get(record) != simdjson::SUCCESS ||
      record.at_key("kind").get(kind) != simdjson::SUCCESS || !read_step(record, &step))
    return false;
  if (kind != "train" && kind != "eval") return true;  // a record kind of a later version
  if (!is_in_order(kind, step)) return true;
  if (kind == "eval") {
    read_numbers(run_.eval, step, record);
    return true;
  }
  if (run_.steps++ == 0) run_.first_step = step;
  run_.last_step = step;
  read_numbers(run_.train, step, record);
  return true;
}

void MetricsReader::Parser::count_number(std::string_view key, double value) {
  if (key == "step_time_s" && value > 0) run_.trained_s += value;
  if (key == "grad_norm" && run_.clip > 0 && value > run_.clip) ++run_.clipped;
}

void MetricsReader::Parser::read_numbers(NamedSeries& into, int64_t step, const dom::object& record) {
  size_t at = 0;
  for (const dom::key_value_pair field : record) {
    switch (field.value.type()) {
      case dom::element_type::INT64:
      case dom::element_type::UINT64:
      case dom::element_type::DOUBLE:
      case dom::element_type::NULL_VALUE:
        if (field.key == "step") break;
        if (Series* series = into.find_or_add(field.key, at)) series->add(step, number_of(field.value));
        count_number(field.key, number_of(field.value));
        break;
      case dom::element_type::ARRAY:
        if (field.key == "moe") read_layers(step, field.value);
        break;
      case dom::element_type::OBJECT:
        if (field.key == "ranks") read_ranks(step, field.value);
        if (field.key == "comm") read_axes(step, field.value);
        if (field.key == "links") read_links(field.value);
        break;
      default:
        break;
    }
  }
}

void MetricsReader::Parser::read_layers(int64_t step, const dom::element& moe) {
  dom::array layers;
  if (moe.get(layers) != simdjson::SUCCESS) return;
  MoeData& data = run_.moe;
  for (auto* column : {&load_, &balance_, &entropy_, &dropped_}) column->clear();
  std::vector<int64_t> numbers;
  int64_t experts = -1;
  bool has_load = true;
  for (const dom::element each : layers) {
    dom::object layer;
    int64_t number = 0;
    if (each.get(layer) != simdjson::SUCCESS || layer.at_key("layer").get(number) != simdjson::SUCCESS) continue;
    if (std::ssize(numbers) == kMaxLayers) break;
    const int64_t here = add_load(layer, load_);
    if (here < 0) has_load = false;
    if (experts < 0) experts = here;
    if (has_load && here != experts) return;  // a row would not be the same expert in each layer
    numbers.push_back(number);
    balance_.push_back(number_at(layer, "load_max_over_mean"));
    entropy_.push_back(number_at(layer, "entropy"));
    dropped_.push_back(number_at(layer, "dropped"));
  }
  if (numbers.empty()) return;
  data.layers = std::move(numbers);
  data.has_too_many_cells = !has_load;
  data.experts = has_load ? experts : 0;
  if (has_load) data.load.add(step, load_);
  data.balance.add(step, balance_);
  data.entropy.add(step, entropy_);
  data.dropped.add(step, dropped_);
}

void MetricsReader::Parser::read_ranks(int64_t step, const dom::element& ranks) {
  dom::object phases;
  if (ranks.get(phases) != simdjson::SUCCESS) return;
  busy_.clear();
  for (const std::string_view name : {"load_s", "passes_s", "optimizer_s", "waiting_s"}) {
    dom::element value;
    if (phases.at_key(name).get(value) != simdjson::SUCCESS || !numbers_of(value, kMaxRanks, values_)) continue;
    if (busy_.empty()) busy_.resize(values_.size());
    if (busy_.size() != values_.size()) return;
    for (size_t r = 0; r < values_.size(); ++r) busy_[r] += name == "waiting_s" ? -values_[r] : values_[r];
    run_.ranks.phases[std::string(name)].add(step, values_);
  }
  if (!busy_.empty()) run_.ranks.busy_s.add(step, busy_);
}

void MetricsReader::Parser::read_axes(int64_t step, const dom::element& comm) {
  dom::object axes;
  if (comm.get(axes) != simdjson::SUCCESS) return;
  for (const dom::key_value_pair field : axes) {
    dom::object axis;
    if (field.value.get(axis) != simdjson::SUCCESS) continue;
    const std::string name(field.key.substr(0, kMaxText));
    if (!run_.ranks.axes.contains(name) && run_.ranks.axes.size() == kMaxAxes) continue;
    AxisData& data = run_.ranks.axes[name];
    data.sent_bytes.add(step, number_at(axis, "sent_bytes"));
    data.exposed_s.add(step, number_at(axis, "exposed_s"));
    dom::element of_ranks;
    if (axis.at_key("rank_s").get(of_ranks) == simdjson::SUCCESS && numbers_of(of_ranks, kMaxRanks, values_))
      data.rank_s.add(step, values_);
  }
}

void MetricsReader::Parser::read_links(const dom::element& links) {
  dom::object figures;
  if (links.get(figures) != simdjson::SUCCESS) return;
  // A step may have measured only one of them.
  if (const auto link = link_at(figures, "round_trip_s")) run_.ranks.longest_round_trip = link;
  if (const auto link = link_at(figures, "bytes_per_s")) run_.ranks.lowest_rate = link;
}

bool MetricsReader::Parser::read_event(std::string_view line) {
  dom::object record;
  std::string_view kind;
  RunEvent event;
  if (parser_.parse(line.data(), line.size(), /*realloc_if_needed=*/false).get(record) != simdjson::SUCCESS ||
      record.at_key("kind").get(kind) != simdjson::SUCCESS || !read_step(record, &event.step))
    return false;
  if (run_.events.size() == kMaxEvents) {
    ++run_.skipped_event_lines.out_of_order;
    return true;
  }
  event.kind = kind.substr(0, kMaxText);
  const double time = number_at(record, "time");
  event.time = time > 0 && time < 1e12 ? time : 0;
  add_numbers(record, event.numbers);
  for (const dom::key_value_pair field : record) {
    std::string_view text;
    if (field.value.get(text) == simdjson::SUCCESS && event.texts.size() < kMaxNumbers)
      event.texts[std::string(field.key.substr(0, kMaxText))] = text.substr(0, kMaxText);
    dom::object object;
    if (field.value.get(object) != simdjson::SUCCESS) continue;
    if (field.key == "memory_bytes") add_numbers(object, event.memory_bytes);
    if (field.key == "mesh") add_numbers(object, event.mesh);
  }
  run_.events.push_back(std::move(event));
  return true;
}

MetricsReader::MetricsReader(RunData& run) : run_(run), parser_(std::make_unique<Parser>(run)) {}
MetricsReader::~MetricsReader() = default;

void MetricsReader::add_metrics_line(std::string_view line) {
  if (!parser_->read_metrics(line)) ++run_.skipped_lines.damaged;
}

void MetricsReader::add_event_line(std::string_view line) {
  if (!parser_->read_event(line)) ++run_.skipped_event_lines.damaged;
}

}  // namespace moebius
