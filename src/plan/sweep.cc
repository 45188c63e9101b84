#include "plan/sweep.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>

#include "config/recipe/text.h"
#include "io/html_text.h"
#include "plan/memory/chosen_memory.h"
#include "plan/print.h"

namespace moebius {
namespace {

constexpr size_t kMaxPoints = 10000;
constexpr const char* kSpaces = " \t\n\r";

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

int64_t ranks_of(const std::string& text) {
  int64_t ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ranks);
  MOEBIUS_CHECK(usage, error == std::errc{} && end == text.data() + text.size() && ranks >= 1,
                "--sweep ranks: expected whole numbers from 1 on; got \"{}\"", text);
  return ranks;
}

SweptPoint predicted(PartLibrary& parts, const SweepBase& base, const Sweep& sweep, std::vector<std::string> values,
                     const PlanMachine& machine, const Assumptions& assume) {
  SweptPoint point{.values = std::move(values)};
  std::vector<std::string> overrides = base.overrides;
  int64_t ranks = base.ranks;
  try {
    for (size_t k = 0; k < sweep.keys.size(); ++k) {
      if (sweep.keys[k].key == "ranks")
        ranks = ranks_of(point.values[k]);
      else
        overrides.push_back(sweep.keys[k].key + "=" + point.values[k]);
    }
    RunSpec run = load_run_spec(base.recipe, overrides);
    if (base.search) {
      FoundLayout best = std::move(search(parts, run, ranks, machine, assume, *base.search).layouts.at(0));
      point.set = std::move(best.set);
      point.prediction = std::move(best.prediction);
    } else {
      const ChosenMemory chosen = choose_memory(parts, run_on(run, machine, assume.system), ranks, machine, assume);
      chosen.apply(run);
      point.prediction = predict(parts, run, ranks, machine, assume);
    }
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::usage) throw;
    point.refused = first_line(e.what());
  }
  return point;
}

std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

// Returns whether the run fits into the memory of its device and of its host.
bool fits(const Prediction& p) { return p.fits() && p.host_fits(); }

// Returns the found layout in a few words; --json has its keys.
std::string layout_text(const Sweep& s, const SweptPoint& p) {
  if (!s.is_search) return "";
  std::string text = "  " + mesh_text(p.prediction->mesh);
  for (const std::string& key : p.set)
    if (key.starts_with("parallel.vpp=") || key.starts_with("train.micro_batch=") ||
        key.starts_with("memory.recompute="))
      text += ", " + key.substr(key.find('.') + 1);
  return text;
}

}  // namespace

SweptKey parse_sweep(const std::string& text) {
  const size_t equal = text.find('=');
  MOEBIUS_CHECK(usage, equal != std::string::npos && equal > 0 && equal + 1 < text.size(),
                "--sweep: expected KEY=VALUE,VALUE,...; got \"{}\"", text);
  SweptKey key{.key = text.substr(0, equal)};
  std::string value;
  int depth = 0;
  bool in_text = false;
  for (const char c : text.substr(equal + 1)) {
    if (c == '"') in_text = !in_text;
    if (!in_text && c == '[') ++depth;
    if (!in_text && c == ']') --depth;
    if (c == ',' && depth == 0 && !in_text) {
      key.values.push_back(std::exchange(value, ""));
    } else {
      value += c;
    }
  }
  key.values.push_back(value);
  MOEBIUS_CHECK(usage, depth == 0 && !in_text, "--sweep {}: expected each quote and bracket to be closed; got \"{}\"",
                key.key, text);
  for (std::string& v : key.values) {
    v.erase(0, v.find_first_not_of(kSpaces));
    v.erase(v.find_last_not_of(kSpaces) + 1);
    MOEBIUS_CHECK(usage, !v.empty(), "--sweep {}: expected values between the commas; got \"{}\"", key.key, text);
  }
  return key;
}

Sweep sweep(PartLibrary& parts, const SweepBase& base, const std::vector<SweptKey>& keys, const PlanMachine& machine,
            const Assumptions& assume) {
  Sweep result{.keys = keys, .is_search = base.search.has_value()};
  size_t count = 1;
  for (size_t k = 0; k < keys.size(); ++k) {
    count = std::min(count * keys[k].values.size(), kMaxPoints + 1);
    std::set<nlohmann::json> values;  // 8 and 8.0 are one
    for (const std::string& v : keys[k].values)
      MOEBIUS_CHECK(usage, values.insert(read_override(keys[k].key + "=" + v).value).second,
                    "--sweep {}: {} is given twice; leave one of them out", keys[k].key, v);
    for (size_t other = 0; other < k; ++other)
      MOEBIUS_CHECK(usage, keys[k].key != keys[other].key,
                    "--sweep: {} is given twice; give its values in one --sweep {}=...", keys[k].key, keys[k].key);
  }
  MOEBIUS_CHECK(usage, count <= kMaxPoints, "--sweep: expected at most {} points; got more; leave values out",
                kMaxPoints);
  for (size_t i = 0; i < count; ++i) {
    std::vector<std::string> values(keys.size());
    size_t rest = i;
    for (size_t k = keys.size(); k-- > 0; rest /= keys[k].values.size())
      values[k] = keys[k].values[rest % keys[k].values.size()];
    result.points.push_back(predicted(parts, base, result, std::move(values), machine, assume));
  }
  const bool some = std::any_of(result.points.begin(), result.points.end(),
                                [](const SweptPoint& p) { return p.prediction.has_value(); });
  MOEBIUS_CHECK(usage, some, "--sweep: none of {} points can be predicted; the first: {}", count,
                result.points.at(0).refused);
  return result;
}

std::string sweep_text(const Sweep& s) {
  std::string text;
  std::vector<size_t> widths;
  for (size_t k = 0; k < s.keys.size(); ++k) {
    size_t width = s.keys[k].key.size();
    for (const SweptPoint& p : s.points) width = std::max(width, p.values[k].size());
    widths.push_back(width);
    text += fmt::format("{:<{}}  ", s.keys[k].key, width);
  }
  text += fmt::format("{:>10}  {:>10}  {:>8}  {:>6}  {:>11}  {}  {:>10}  {:>10}{}\n", "step, s", "tokens/s", "TFLOP/s",
                      "bubble", "memory", "fits", "days", "GPU-hours", s.is_search ? "  best layout" : "");
  for (const SweptPoint& p : s.points) {
    for (size_t k = 0; k < s.keys.size(); ++k) text += fmt::format("{:<{}}  ", p.values[k], widths[k]);
    if (!p.prediction) {
      text += p.refused + "\n";
      continue;
    }
    const Prediction& q = *p.prediction;
    const std::string step = q.step_s >= 1 ? fmt::format("{:.3f}", q.step_s) : fmt::format("{:.4g}", q.step_s);
    text += fmt::format("{:>10}  {:>10.1f}  {:>8}  {:>5.1f}%  {:>11}  {:<4}  {:>10}  {:>10}{}\n", step,
                        q.tokens_per_s_per_gpu, rate_text(q.model_tflops_per_gpu), 100 * q.bubble,
                        bytes_text(q.fullest_rank().total()), fits(q) ? "yes" : "no", quantity_text(q.run_s / 86400),
                        quantity_text(q.run_s / 3600 * static_cast<double>(q.ranks)), layout_text(s, p));
  }
  return text;
}

std::string sweep_csv(const Sweep& s) {
  std::string text;
  for (const SweptKey& key : s.keys) text += quoted(key.key) + ",";
  text +=
      "step_time_s,tokens_per_s_per_gpu,model_tflops_per_gpu,mfu,bubble,memory_peak_bytes,fits,days,gpu_hours,layout,"
      "refused\n";
  for (const SweptPoint& p : s.points) {
    for (const std::string& value : p.values) text += quoted(value) + ",";
    if (p.prediction) {
      const Prediction& q = *p.prediction;
      text +=
          fmt::format("{},{},{},{},{},{},{},{},{},{},\n", q.step_s, q.tokens_per_s_per_gpu, q.model_tflops_per_gpu,
                      q.mfu, q.bubble, q.fullest_rank().total(), fits(q), q.run_s / 86400,
                      q.run_s / 3600 * static_cast<double>(q.ranks), quoted(fmt::format("{}", fmt::join(p.set, " "))));
    } else {
      text += ",,,,,,,,,," + quoted(p.refused) + "\n";
    }
  }
  return text;
}

std::string sweep_svg(const Sweep& s) {
  constexpr double kWidth = 720, kHeight = 420, kLeft = 60, kTop = 20, kRight = 240, kBottom = 50;
  constexpr const char* kColours[] = {"#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e"};
  const SweptKey& x_key = s.keys.at(0);
  double most = 0;
  std::map<std::string, std::vector<std::pair<double, double>>> lines;
  const double step = (kWidth - kLeft - kRight) / static_cast<double>(std::max<size_t>(1, x_key.values.size() - 1));
  for (const SweptPoint& p : s.points) {
    if (!p.prediction) continue;
    std::string name;
    for (size_t k = 1; k < s.keys.size(); ++k) name += (k > 1 ? ", " : "") + s.keys[k].key + " = " + p.values[k];
    const auto at = std::find(x_key.values.begin(), x_key.values.end(), p.values[0]) - x_key.values.begin();
    lines[name].emplace_back(kLeft + step * static_cast<double>(at), p.prediction->model_tflops_per_gpu);
    most = std::max(most, p.prediction->model_tflops_per_gpu);
  }
  const auto y_of = [&](double v) {
    return kHeight - kBottom - v / std::max(most, 1e-12) * (kHeight - kTop - kBottom);
  };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n",
      kWidth, kHeight);
  for (int i = 0; i <= 4; ++i) {
    const double v = most * i / 4;
    svg += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>\n", kLeft,
                       kWidth - kRight, y_of(v), y_of(v));
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.4g}</text>\n", kLeft - 6, y_of(v) + 4, v);
  }
  for (size_t i = 0; i < x_key.values.size(); ++i)
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                       kLeft + step * static_cast<double>(i), kHeight - kBottom + 18, escape_html(x_key.values[i]));
  svg += fmt::format("<text x=\"{}\" y=\"{}\">{}; model TFLOP/s per rank</text>\n", kLeft, kHeight - 10,
                     escape_html(x_key.key));
  size_t n = 0;
  for (const auto& [name, points] : lines) {
    const char* colour = kColours[n % std::size(kColours)];
    std::string path;
    for (const auto& [x, v] : points) {
      path += fmt::format("{:.1f},{:.1f} ", x, y_of(v));
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x, y_of(v), colour);
    }
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, colour);
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">{}</text>\n", kWidth - kRight + 12,
                       kTop + 16 * static_cast<double>(++n), colour, escape_html(name));
  }
  return svg + "</svg>\n";
}

}  // namespace moebius
