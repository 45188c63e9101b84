#include "plan/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "io/html_text.h"

namespace moebius {
namespace {

// Phases of the simulated passes: their time is the time of the actions.
constexpr const char* kOfPasses[] = {"forward", "backward", "communication", "host", "bubble"};
// Phases after the passes, in their order. Others follow these.
constexpr const char* kAfter[] = {"gradients", "matrices",  "attention logits", "weight scales",
                                  "optimizer", "host link", "weights",          "copies"};
// Each life has a colour.
constexpr const char* kColours[] = {"#4269d0", "#6c8ae4", "#efb118", "#ff725c", "#ff9a80",
                                    "#9c6b4e", "#9498a0", "#3ca951", "#97bbf5", "#6cc5b0",
                                    "#bbbbbb", "#e3a8d8", "#c78bbd", "#d0d0d0", "#a463f2"};
static_assert(std::size(kColours) == kNumLives);

// A pass in the timeline. Gradients of weights are one of their own only where a schedule delays them; otherwise the
// backward pass has them.
struct ShownPass {
  const char *name, *colour;
};
ShownPass shown_as(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return {"forward", "#4269d0"};
    case Pass::backward_input:
      return {"backward", "#ff725c"};
    case Pass::backward_weight:
      return {"weight gradients", "#3ca951"};
  }
  MOEBIUS_FAIL(internal, "plan: a pass that is not known");
}

std::string pass_name(const Action& a) {
  return fmt::format("{} {}, stage {}", shown_as(a.pass).name, a.micro_batch, a.stage);
}

bool is_shown(const RankSimulation::Run& run) { return run.action.verb == Verb::run && run.end > run.begin; }

// Returns the phases of a step that the passes do not have, with their seconds.
std::vector<std::pair<std::string, double>> phases_after(const Prediction& p) {
  std::vector<std::pair<std::string, double>> after;
  const auto has = [](const auto& names, const std::string& name) {
    return std::find(std::begin(names), std::end(names), name) != std::end(names);
  };
  for (const char* name : kAfter)
    if (const auto found = p.phases.find(name); found != p.phases.end()) after.push_back(*found);
  for (const auto& [name, seconds] : p.phases)
    if (!has(kOfPasses, name) && !has(kAfter, name)) after.emplace_back(name, seconds);
  std::erase_if(after, [](const auto& phase) { return phase.second <= 0; });
  return after;
}

std::string timeline_svg(const Prediction& p) {
  constexpr double kWidth = 1200, kRow = 22, kLeft = 60;
  const double scale = (kWidth - kLeft) / std::max(p.schedule.duration, 1e-12);
  const double height = kRow * static_cast<double>(p.schedule.ranks.size()) + 4;
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" font-size=\"11\">\n", kWidth, height);
  for (size_t r = 0; r < p.schedule.ranks.size(); ++r) {
    const double y = kRow * static_cast<double>(r);
    svg += fmt::format("<text x=\"0\" y=\"{}\">pp {}</text>\n", y + 15, r);
    for (const RankSimulation::Run& run : p.schedule.ranks[r].runs) {
      if (!is_shown(run)) continue;
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" stroke=\"#fff\" "
          "stroke-width=\"0.4\"><title>{}: {:.3f} ms</title></rect>\n",
          kLeft + run.begin * scale, y, (run.end - run.begin) * scale, kRow - 3, shown_as(run.action.pass).colour,
          pass_name(run.action), 1e3 * (run.end - run.begin));
    }
  }
  return svg + "</svg>\n";
}

std::string memory_svg(const Prediction& p) {
  constexpr double kWidth = 1200, kRow = 22, kLeft = 60;
  const double scale = (kWidth - kLeft - 100) / static_cast<double>(std::max<int64_t>(1, p.fullest_rank().total()));
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" font-size=\"11\">\n", kWidth,
                                kRow * static_cast<double>(p.memory.size()) + 4);
  for (size_t r = 0; r < p.memory.size(); ++r) {
    const RankMemory& m = p.memory[r];
    double x = kLeft;
    const double y = kRow * static_cast<double>(r);
    svg += fmt::format("<text x=\"0\" y=\"{}\">pp {}</text>\n", y + 15, m.pp_rank);
    for (int life = 0; life < kNumLives; ++life) {
      const double width = static_cast<double>(m.life[life]) * scale;
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}: {}</title></rect>\n", x, y,
          width, kRow - 3, kColours[life], name_of(static_cast<Life>(life)), bytes_text(m.life[life]));
      x += width;
    }
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", x + 6, y + 15, bytes_text(m.total()));
  }
  return svg + "</svg>\n";
}

std::string legend() {
  std::string text;
  for (int life = 0; life < kNumLives; ++life)
    text +=
        fmt::format("<span style=\"color:{}\">&#9632;</span> {} ", kColours[life], name_of(static_cast<Life>(life)));
  return "<p>" + text + "</p>\n";
}

// Processes of a trace.
constexpr int kPasses = 0, kCommunication = 1;

class TraceText {
 public:
  // Names a process, or one of its rows if `row` is given.
  void name_row(int process, std::string_view process_name, std::optional<size_t> row, std::string_view row_name) {
    append(fmt::format(R"({{"name":"{}","ph":"M","ts":0,"dur":0,"pid":{},"tid":{},"args":{{"name":"{}"}}}})",
                       row ? "thread_name" : "process_name", process, row.value_or(0), row ? row_name : process_name));
  }
  // args: JSON, or nothing.
  void add(int process, size_t row, std::string_view name, double begin_s, double duration_s,
           std::string_view args = {}) {
    append(fmt::format(R"({{"name":"{}","ph":"X","ts":{:.3f},"dur":{:.3f},"pid":{},"tid":{}{}{}}})", name,
                       1e6 * begin_s, 1e6 * duration_s, process, row, args.empty() ? "" : R"(,"args":)", args));
  }
  std::string whole() const { return "{\"traceEvents\":[" + events_ + "\n]}\n"; }

 private:
  void append(const std::string& event) { events_ += (events_.empty() ? "\n" : ",\n") + event; }
  std::string events_;
};

std::string sent_args(const std::string& of, double bytes, double hidden_s) {
  return fmt::format(R"({{"of":"{}","bytes":{:.0f},"hidden_us":{:.3f}}})", of, bytes, 1e6 * hidden_s);
}

// The times of the pass as it ran.
PassTime time_of(const Prediction& p, const Action& a) {
  const StageWork& stage = p.stages.at(static_cast<size_t>(a.stage));
  if (a.pass == Pass::forward) return stage.forward;
  if (a.pass == Pass::backward_weight) return stage.backward_weight;
  PassTime time = stage.backward;
  return time -= stage.backward_weight;
}

// Adds the rows of a pipeline rank's axes. Those of the pipeline have the messages between stages, which leave at the
// end of a pass, one after another.
void add_communication(TraceText& text, const Prediction& p, size_t rank) {
  const auto row = [&](size_t axis) { return rank * kNumAxes + axis; };
  std::array<bool, kNumAxes> is_named{};
  const auto add = [&](size_t axis, double begin_s, double seconds, const std::string& args) {
    const std::string_view name = name_of(static_cast<Axis>(axis));
    if (!is_named[axis]) text.name_row(kCommunication, {}, row(axis), fmt::format("pp rank {}, {}", rank, name));
    is_named[axis] = true;
    text.add(kCommunication, row(axis), name, begin_s, seconds, args);
  };
  const auto last_stage = static_cast<int64_t>(p.stages.size()) - 1;
  std::array<double, kNumAxes> sent_until{};
  for (const RankSimulation::Run& run : p.schedule.ranks[rank].runs) {
    if (!is_shown(run)) continue;
    const PassTime time = time_of(p, run.action);
    const double all = std::accumulate(time.groups.begin(), time.groups.end(), 0.0);
    double at = std::max(run.begin, run.end - all);
    for (size_t i = 0; i < time.groups.size(); ++i) {
      if (time.groups[i] <= 0) continue;
      const double seconds = std::min(time.groups[i], run.end - at);
      add(i, at, seconds, sent_args(pass_name(run.action), time.wire_bytes[i], time.hidden * time.groups[i] / all));
      at += seconds;
    }
    const bool is_forward = run.action.pass == Pass::forward;
    const bool sends =
        is_forward ? run.action.stage < last_stage : run.action.pass == Pass::backward_input && run.action.stage > 0;
    if (!sends || p.transfer_s <= 0) continue;
    const auto axis = static_cast<size_t>(is_forward ? Axis::pp : Axis::pp_back);
    const double begin = std::max(run.end, sent_until[axis]);
    sent_until[axis] = begin + p.transfer_s;
    add(axis, begin, p.transfer_s, sent_args(pass_name(run.action), p.message_bytes, 0));
  }
  for (int i = 0; i < kNumAxes; ++i) {
    const auto found = p.axes_beside_passes.find(std::string(name_of(static_cast<Axis>(i))));
    if (found == p.axes_beside_passes.end()) continue;
    const AxisTime& t = found->second;
    const double begin = std::max(0.0, p.schedule.duration - t.hidden_s);
    add(static_cast<size_t>(i), begin, p.schedule.duration + t.exposed_s - begin,
        sent_args("gradients and weights", t.bytes, t.hidden_s));
  }
}

}  // namespace

std::string plan_trace(const Prediction& p) {
  TraceText text;
  text.name_row(kPasses, "passes", {}, {});
  if (!p.axes.empty()) text.name_row(kCommunication, "communication", {}, {});
  for (size_t r = 0; r < p.schedule.ranks.size(); ++r) {
    text.name_row(kPasses, {}, r, fmt::format("pp rank {}", r));
    for (const RankSimulation::Run& run : p.schedule.ranks[r].runs)
      if (is_shown(run)) text.add(kPasses, r, pass_name(run.action), run.begin, run.end - run.begin);
    double at = p.schedule.duration;
    for (const auto& [name, seconds] : phases_after(p)) {
      text.add(kPasses, r, name, at, seconds);
      at += seconds;
    }
    add_communication(text, p, r);
  }
  return text.whole();
}

std::string plan_html(const Prediction& p, const std::string& title, const std::string& text) {
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<style>body{{font-family:sans-serif;max-width:1240px;margin:2em auto;padding:0 8px}}h1{{overflow-wrap:anywhere}}\n"
      "pre,.wide{{overflow-x:auto}}svg{{width:100%;min-width:900px}}</style></head><body>\n"
      "<h1>{}</h1>\n<pre>{}</pre>\n",
      escape_html(title), escape_html(title), escape_html(text));
  html += fmt::format("<h2>Passes of {} of {} micro-batches</h2>\n<div class=\"wide\">{}</div>\n",
                      p.schedule.shape.num_micro_batches, p.num_micro_batches, timeline_svg(p));
  html += "<h2>Memory of a rank of each pipeline stage</h2>\n" + legend() + "<div class=\"wide\">" + memory_svg(p) +
          "</div>\n";
  return html + "</body></html>\n";
}

}  // namespace moebius
