// The section about the processes of a run: when each started, what it saved, how it ended.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "report/plot/axis.h"
#include "report/plot/figure.h"
#include "report/plot/markup.h"
#include "report/sections.h"

namespace moebius {
namespace {

constexpr double kLeft = 46, kRight = 338, kTop = 10, kPitch = 26;
constexpr size_t kMaxProcesses = 16, kMaxSaves = 400, kMaxNotFinite = 8;

struct Process {
  double begin_s = 0, end_s = 0;
  int64_t first_step = 0, last_step = 0;
  std::vector<double> saves_s;
  std::vector<int64_t> saves;
  std::string end;  // empty: it wrote no last event
  bool is_bad = false;
};

std::string end_text(const RunEvent& event) {
  if (event.kind == "failed") return fmt::format("failed at step {}", event.step);
  const auto signal = event.numbers.find("signal");
  if (signal == event.numbers.end() || signal->second == 0) return fmt::format("done at step {}", event.step);
  return fmt::format("signal {:.0f} at step {}", signal->second, event.step);
}

std::vector<Process> processes_of(const RunData& run) {
  std::vector<Process> processes;
  for (const RunEvent& event : run.events) {
    if (event.kind == "start") {
      processes.push_back(
          {.begin_s = event.time, .end_s = event.time, .first_step = event.step, .last_step = event.step});
      continue;
    }
    if (processes.empty()) continue;
    Process& process = processes.back();
    process.end_s = std::max(process.end_s, event.time);
    process.last_step = std::max(process.last_step, event.step);
    if (event.kind == "checkpoint") {
      process.saves.push_back(event.step);
      process.saves_s.push_back(event.time);
    }
    if (event.kind == "end" || event.kind == "failed") {
      process.end = end_text(event);
      process.is_bad = event.kind == "failed";
    }
  }
  return processes;
}

// The newest process may have worked on after its last event.
std::vector<Process> shown_processes(const ShownRun& run) {
  std::vector<Process> processes = processes_of(run.data);
  if (processes.empty()) return processes;
  Process& newest = processes.back();
  if (newest.end.empty()) {
    newest.end_s = std::max(newest.end_s, run.modified_s);
    newest.last_step = std::max(newest.last_step, run.data.last_step);
  }
  for (Process& process : processes) {
    if (!process.end.empty()) continue;
    process.end = "no end recorded";
    process.is_bad = &process != &newest;
  }
  if (processes.size() > kMaxProcesses) processes.erase(processes.begin(), processes.end() - kMaxProcesses);
  return processes;
}

struct TimeUnit {
  double seconds;
  const char* name;
};

TimeUnit time_unit(double range_s) {
  for (const TimeUnit unit : {TimeUnit{86400, "days"}, TimeUnit{3600, "hours"}, TimeUnit{60, "minutes"}})
    if (range_s >= 2 * unit.seconds) return unit;
  return {1, "seconds"};
}

void draw_process(Markup& out, const Process& process, size_t number, double y, const PlotAxis& x) {
  const double begin = x.at(process.begin_s), end = std::max(x.at(process.end_s), begin + 2);
  out.element("text", {{"x", place_text(kLeft - 8)}, {"y", place_text(y + 11)}, {"text-anchor", "end"}},
              std::to_string(number));
  out.leaf("rect", {{"class", "seg c0"},
                    {"x", place_text(begin)},
                    {"y", place_text(y)},
                    {"width", place_text(end - begin)},
                    {"height", "14"},
                    {"rx", "2"},
                    {"data-tip",
                     fmt::format("start {}\nsteps {} to {}\n{}\n{}", number, process.first_step + 1, process.last_step,
                                 duration_text_of(process.end_s - process.begin_s), process.end)}});
  std::string saves;
  for (size_t i = 0; i < std::min(process.saves_s.size(), kMaxSaves); ++i)
    saves += fmt::format("M{} {}l3 5h-6z", place_text(x.at(process.saves_s[i])), place_text(y + 15));
  if (!saves.empty()) out.leaf("path", {{"class", "saved"}, {"d", saves}});
  out.element("text",
              {{"class", process.is_bad ? "hot" : "strong"},
               {"x", place_text(std::max(end + 8, kLeft))},
               {"y", place_text(y + 11)}},
              process.end);
}

void draw_time_axis(Markup& out, const PlotAxis& x, double y) {
  const TimeUnit unit = time_unit(x.high - x.low);
  const PlotAxis scaled{.low = 0, .high = (x.high - x.low) / unit.seconds, .begin = x.begin, .end = x.end};
  out.leaf("path", {{"class", "base"}, {"d", fmt::format("M{} {}H{}", kLeft, place_text(y), kRight)}});
  for (const double value : tick_values(scaled, 4))
    out.element("text", {{"x", place_text(scaled.at(value))}, {"y", place_text(y + 18)}, {"text-anchor", "middle"}},
                number_text(value));
  out.element("text", {{"x", place_text(kFigureWidth)}, {"y", place_text(y + 18)}, {"text-anchor", "end"}}, unit.name);
}

std::string history_figure(const Runs& runs, const ShownRun& run) {
  const std::vector<Process> processes = shown_processes(run);
  if (processes.empty() || processes.front().begin_s == 0) return "";
  PlotAxis x{
      .low = processes.front().begin_s, .high = processes.front().begin_s + 1, .begin = kLeft, .end = kRight - 70};
  std::string description;
  for (const Process& process : processes) {
    x.high = std::max(x.high, process.end_s);
    description += fmt::format("{}Started after step {}, {}, {}.", description.empty() ? "" : " ", process.first_step,
                               counted(std::ssize(process.saves), "checkpoint"), process.end);
  }
  const double below = kTop + kPitch * static_cast<double>(processes.size()) + 4;
  Markup out;
  open_figure(
      out,
      {id_of("history", run), "Starts and checkpoints" + of_run(runs, run),
       fmt::format("first start {}; triangles are checkpoints", time_text(processes.front().begin_s)), description},
      below + 26);
  for (size_t i = 0; i < processes.size(); ++i)
    draw_process(out, processes[i], i + 1, kTop + kPitch * static_cast<double>(i), x);
  draw_time_axis(out, x, below);
  close_figure(out, "");
  return out.str();
}

std::string list_text(const std::vector<int64_t>& steps) {
  std::string text;
  const size_t first = steps.size() > 12 ? steps.size() - 12 : 0;
  for (size_t i = first; i < steps.size(); ++i) text += fmt::format("{}{}", text.empty() ? "" : ", ", steps[i]);
  return first > 0 ? fmt::format("{} earlier, {}", first, text) : text;
}

// Says which values of a run are in no plot.
void add_not_finite(std::vector<std::string>& notes, const NamedSeries& from, const std::string& kind) {
  size_t said = 0;
  for (const auto& [name, series] : from.all())
    if (series.not_finite() > 0 && said++ < kMaxNotFinite)
      notes.push_back(fmt::format("{} of the {} values of {} were NaN, infinite or beyond 1e290, and are in no plot.",
                                  series.not_finite(), series.not_finite() + series.count(),
                                  kind + truncated(name, 40)));
}

std::string notes_card(const Runs& runs, const ShownRun& run) {
  const RunData& data = run.data;
  std::vector<std::string> notes;
  notes.push_back(data.checkpoints.empty() ? "No checkpoint is in the folder."
                                           : "Checkpoints in the folder: steps " + list_text(data.checkpoints) + ".");
  if (const RunEvent* failed = newest_event(data, "failed"))
    if (const auto found = failed->texts.find("not_finite"); found != failed->texts.end())
      notes.push_back(fmt::format("Step {} was not finite: {}.", failed->step, found->second));
  add_not_finite(notes, data.train, "");
  add_not_finite(notes, data.eval, "eval ");
  if (data.moe.has_too_many_cells)
    notes.push_back("The load of single experts is in no plot, since layers times experts are more than 65536.");
  const SkippedLines& left = data.skipped_lines;
  if (left.damaged > 0)
    notes.push_back(fmt::format("This page leaves out {} of metrics.jsonl.", counted(left.damaged, "damaged line")));
  if (left.out_of_order > 0)
    notes.push_back(fmt::format("This page leaves out {} of metrics.jsonl whose step is not above the one before.",
                                counted(left.out_of_order, "record")));
  if (left.half_line) notes.push_back("The last line of metrics.jsonl is half-written, and was left out.");
  if (data.skipped_event_lines.damaged > 0)
    notes.push_back(fmt::format("This page leaves out {} of events.jsonl.",
                                counted(data.skipped_event_lines.damaged, "damaged line")));
  Markup out;
  out.open("div", {{"class", "card"}}).element("h3", {}, "Files" + of_run(runs, run));
  for (const std::string& note : notes) out.element("p", {{"class", "note"}}, note);
  out.close("div");
  return out.str();
}

bool has_ended(const RunData& run) {
  return !run.events.empty() && run.events.back().kind != "start" && run.events.back().kind != "checkpoint";
}

}  // namespace

RunState state_of(const ShownRun& run, double now_s) {
  const RunData& data = run.data;
  const double steps = recipe_number(data, "train.steps").value_or(0);
  const std::string of_steps =
      steps > 0 ? fmt::format("step {} of {:.0f}", data.last_step, steps) : fmt::format("step {}", data.last_step);
  if (has_ended(data)) {
    const RunEvent& end = data.events.back();
    return {fmt::format("{}, {}", of_steps, end_text(end)), end.kind == "failed"};
  }
  if (data.steps == 0) return {"no step is in its metrics yet", false};
  if (data.last_step >= steps && steps > 0) return {fmt::format("{}, done", of_steps), false};
  const double step_s = data.trained_s / static_cast<double>(data.steps), quiet_s = now_s - run.modified_s;
  if (quiet_s < std::max(60.0, 10 * step_s)) return {fmt::format("{}, running", of_steps), false};
  return {fmt::format("{}, stopped without a record of its end; its metrics were last written at {}", of_steps,
                      time_text(run.modified_s)),
          true};
}

std::string history_section(const Runs& runs) {
  std::string figures;
  for (const ShownRun& run : runs) figures += history_figure(runs, run) + notes_card(runs, run);
  return section_of("History", figures);
}

}  // namespace moebius
