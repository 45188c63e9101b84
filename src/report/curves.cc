// The sections with curves over steps.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "report/plot/line_plot.h"
#include "report/plot/markup.h"
#include "report/sections.h"

namespace moebius {
namespace {

struct Curve {
  const char* key;  // of a train record
  const char* title;
  const char* note;
  Unit unit = Unit::plain;
  bool from_zero = false;
};

constexpr size_t kMaxOther = 16;

// The names that other sections show, or that repeat another metric.
constexpr std::array kKnown{"loss",
                            "aux_loss",
                            "z_loss",
                            "mtp_loss",
                            "grad_norm",
                            "lr",
                            "tokens",
                            "step_time_s",
                            "tokens_per_s",
                            "model_tflops_per_rank",
                            "expert_load_max_over_mean",
                            "dropped_tokens",
                            "memory_peak_bytes",
                            "spilled_rows",
                            "spill_time_s",
                            "expert_rows_peak_over_budget",
                            "offload_bytes",
                            "qk_clipped_heads",
                            "max_attention_logit"};

// Checkpoints and restarts of a run that is alone on the page.
std::vector<StepMark> run_marks(const Runs& runs) {
  std::vector<StepMark> marks;
  if (runs.size() > 1) return marks;
  bool is_first = true;
  for (const RunEvent& event : runs[0].data.events) {
    if (event.kind == "checkpoint") marks.push_back({.step = event.step});
    if (event.kind != "start") continue;
    if (!is_first) marks.push_back({.step = event.step, .is_restart = true});
    is_first = false;
  }
  if (marks.empty())
    for (const int64_t step : runs[0].data.checkpoints) marks.push_back({.step = step});
  return marks;
}

// Returns whether a series is plotted; one that is always 0 is not.
bool has_values(const Series* series) { return series && (series->min() != 0 || series->max() != 0); }

std::string curve(const Runs& runs, const Curve& c) {
  LinePlot plot{.id = "plot-" + std::string(c.key), .title = c.title, .note = c.note, .unit = c.unit};
  plot.from_zero = c.from_zero;
  plot.marks = run_marks(runs);
  for (const ShownRun& run : runs)
    if (const Series* series = run.data.train.find(c.key); has_values(series))
      plot.lines.push_back({.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = series});
  return plot.lines.empty() ? "" : figure_of(plot);
}

std::string loss_curve(const Runs& runs) {
  LinePlot plot{.id = "plot-loss", .title = "Loss", .marks = run_marks(runs)};
  bool has_eval = false;
  for (const ShownRun& run : runs) {
    const bool alone = runs.size() == 1;
    if (const Series* train = run.data.train.find("loss"))
      plot.lines.push_back({.name = alone ? "train" : run.name, .colour = run.colour, .series = train});
    if (const Series* eval = run.data.eval.find("loss")) {
      has_eval = true;
      plot.lines.push_back(
          {.name = alone ? "eval" : "", .colour = alone ? 1 : run.colour, .series = eval, .dots = true});
    }
  }
  plot.note = has_eval ? "mean cross-entropy per token; dots are evaluations" : "mean cross-entropy per token";
  return plot.lines.empty() ? "" : figure_of(plot);
}

std::string bits_curve(const Runs& runs) {
  LinePlot plot{.id = "plot-bits", .title = "Bits per byte", .note = "of held-out text"};
  for (const ShownRun& run : runs)
    if (const Series* bits = run.data.eval.find("bits_per_byte"))
      plot.lines.push_back(
          {.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = bits, .dots = true});
  return plot.lines.empty() ? "" : figure_of(plot);
}

std::string gradient_curve(const Runs& runs) {
  LinePlot plot{.id = "plot-grad-norm", .title = "Gradient norm", .note = "before clipping", .marks = run_marks(runs)};
  for (const ShownRun& run : runs)
    if (const Series* norm = run.data.train.find("grad_norm"))
      plot.lines.push_back({.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = norm});
  if (plot.lines.empty()) return "";
  const RunData& first = runs[0].data;
  if (runs.size() == 1 && first.clip > 0) {
    plot.limit = first.clip;
    plot.limit_name = "clip";
    plot.note = fmt::format("before clipping at {}, which {} of {} met", number_text(first.clip), first.clipped,
                            counted(first.steps, "step"));
  }
  return figure_of(plot);
}

}  // namespace

std::string section_of(const std::string& title, const std::string& figures) {
  if (figures.empty()) return "";
  Markup out;
  out.open("section")
      .element("h2", {}, title)
      .open("div", {{"class", "grid"}})
      .add(figures)
      .close("div")
      .close("section");
  return out.str();
}

std::string of_run(const Runs& runs, const ShownRun& run) { return runs.size() > 1 ? ", " + run.name : ""; }

std::string id_of(const std::string& name, const ShownRun& run) { return fmt::format("plot-{}-{}", name, run.colour); }

std::string learning_section(const Runs& runs) {
  std::string figures = loss_curve(runs) + bits_curve(runs) + gradient_curve(runs);
  figures += curve(runs, {"lr", "Learning rate", ""});
  figures += curve(runs, {"aux_loss", "Balance losses", "with their coefficients, summed over layers"});
  figures += curve(runs, {"z_loss", "Router z-loss", "with its coefficient, summed over layers"});
  figures += curve(runs, {"mtp_loss", "Loss of multi-token prediction", "without its coefficient"});
  return section_of("Learning", figures);
}

std::string speed_section(const Runs& runs) {
  std::string figures = curve(runs, {"tokens_per_s", "Tokens per second", "of all ranks", Unit::count, true});
  figures += curve(runs, {"model_tflops_per_rank", "Model TFLOP/s", "per rank", Unit::plain, true});
  figures += curve(runs, {"step_time_s", "Step time", "", Unit::seconds, true});
  return section_of("Speed", figures);
}

std::string other_section(const Runs& runs) {
  std::vector<std::string> names;
  for (const ShownRun& run : runs)
    for (const auto& [name, series] : run.data.train.all())
      if (std::find(kKnown.begin(), kKnown.end(), name) == kKnown.end() && !series.empty() &&
          std::find(names.begin(), names.end(), name) == names.end())
        names.push_back(name);
  std::string figures;
  for (size_t i = 0; i < std::min(names.size(), kMaxOther); ++i) {
    LinePlot plot{.id = fmt::format("plot-other-{}", i), .title = truncated(names[i], 40), .marks = run_marks(runs)};
    for (const ShownRun& run : runs)
      if (const Series* series = run.data.train.find(names[i]))
        plot.lines.push_back({.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = series});
    figures += figure_of(plot);
  }
  return section_of("Other metrics", figures);
}

}  // namespace moebius
