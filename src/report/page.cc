#include "report/page.h"

#include <fmt/format.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "report/page_script.h"
#include "report/page_style.h"
#include "report/plot/markup.h"
#include "report/sections.h"

namespace moebius {
namespace {

// Returns a hash as Content-Security-Policy names it.
std::string sha256_base64(std::string_view text) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<unsigned char, 33> hash{};  // 32 bytes, and a zero to fill up to 3
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash.data());
  std::string out;
  for (size_t i = 0; i < hash.size(); i += 3) {
    const unsigned bits = hash[i] << 16 | hash[i + 1] << 8 | hash[i + 2];
    for (const int shift : {18, 12, 6, 0}) out += kDigits[bits >> shift & 63];
  }
  out.back() = '=';
  return out;
}

struct Tile {
  std::string name, value, note;
};

void add_series_tile(std::vector<Tile>& tiles, const NamedSeries& from, const char* key, Tile tile, Unit unit) {
  const Series* series = from.find(key);
  if (!series) return;
  tile.value = number_text(series->last(), unit);
  tiles.push_back(std::move(tile));
}

std::vector<Tile> tiles_of(const RunData& run) {
  std::vector<Tile> tiles;
  add_series_tile(tiles, run.train, "loss", {"Loss", "", fmt::format("training, step {}", run.last_step)}, Unit::plain);
  if (const Series* loss = run.eval.find("loss"))
    add_series_tile(tiles, run.eval, "loss", {"Evaluation loss", "", fmt::format("after step {}", loss->last_step())},
                    Unit::plain);
  add_series_tile(tiles, run.eval, "bits_per_byte", {"Bits per byte", "", "of held-out text"}, Unit::plain);
  add_series_tile(tiles, run.train, "tokens_per_s", {"Tokens per second", "", "last step"}, Unit::count);
  if (const Series* flops = run.train.find("model_tflops_per_rank"); flops && flops->max() > 0)
    tiles.push_back({"Model TFLOP/s", number_text(flops->last()), "per rank, last step"});
  add_series_tile(tiles, run.train, "expert_load_max_over_mean", {"Busiest expert", "", "over the mean; 1 is even"},
                  Unit::plain);
  if (const Series* dropped = run.train.find("dropped_tokens"))
    tiles.push_back({"Dropped tokens", number_text(dropped->last(), Unit::count),
                     dropped->max() > 0 ? "last step" : "none in any step"});
  add_series_tile(tiles, run.train, "memory_peak_bytes", {"Peak memory", "", "of the first rank"}, Unit::bytes);
  if (run.steps > 0) tiles.push_back({"Time in steps", duration_text_of(run.trained_s), counted(run.steps, "step")});
  if (const RunEvent* start = newest_event(run, "start"))
    if (const auto found = start->numbers.find("parameters"); found != start->numbers.end())
      tiles.push_back({"Parameters", number_text(found->second, Unit::count), ""});
  return tiles;
}

std::string tiles_markup(const RunData& run) {
  const std::vector<Tile> tiles = tiles_of(run);
  if (tiles.empty()) return "";
  Markup out;
  out.open("dl", {{"class", "tiles"}});
  for (const Tile& tile : tiles) {
    out.open("div").element("dt", {}, tile.name).open("dd").text(tile.value);
    if (!tile.note.empty()) out.element("small", {}, tile.note);
    out.close("dd").close("div");
  }
  out.close("dl");
  return out.str();
}

std::string title_of(const Runs& runs) { return runs.size() == 1 ? runs[0].name : fmt::format("{} runs", runs.size()); }

void add_run_list(Markup& out, const Runs& runs, double now_s) {
  out.open("ul", {{"class", "runs"}});
  for (const ShownRun& run : runs) {
    const RunState state = state_of(run, now_s);
    out.open("li").open("span", {{"class", fmt::format("key c{}", run.colour)}}).close("span").open("span");
    out.element("strong", {}, run.name)
        .text("  ")
        .element("span", {{"class", state.is_bad ? "warn" : "note"}}, state.text);
    out.close("span").close("li");
  }
  out.close("ul");
}

// Adds a table that compares the runs, with one row per run.
void add_run_table(Markup& out, const Runs& runs) {
  std::vector<std::string> heads;
  for (const ShownRun& run : runs)
    for (const Tile& tile : tiles_of(run.data))
      if (std::find(heads.begin(), heads.end(), tile.name) == heads.end()) heads.push_back(tile.name);
  if (heads.empty()) return;
  out.open("section").open("div", {{"class", "card wide"}}).open("table").open("thead").open("tr");
  out.element("th", {{"scope", "col"}}, "run");
  for (const std::string& head : heads) out.element("th", {{"scope", "col"}, {"class", "num"}}, head);
  out.close("tr").close("thead").open("tbody");
  for (const ShownRun& run : runs) {
    const std::vector<Tile> tiles = tiles_of(run.data);
    out.open("tr").element("th", {{"scope", "row"}}, run.name);
    for (const std::string& head : heads) {
      const auto found = std::find_if(tiles.begin(), tiles.end(), [&](const Tile& tile) { return tile.name == head; });
      out.element("td", {{"class", "num"}}, found == tiles.end() ? "" : found->value);
    }
    out.close("tr");
  }
  out.close("tbody").close("table").close("div").close("section");
}

void add_header(Markup& out, const Runs& runs, const PageTime& time) {
  out.open("header").open("p", {{"class", "brand"}}).text("Moebius");
  if (time.period_ms > 0) out.text("  ").element("span", {{"class", "live"}, {"role", "status"}}, "live");
  out.close("p").element("h1", {}, title_of(runs));
  if (runs.size() == 1) {
    const RunState state = state_of(runs[0], time.now_s);
    out.element("p", {{"class", state.is_bad ? "lead warn" : "lead"}}, state.text);
  } else {
    add_run_list(out, runs, time.now_s);
  }
  out.close("header");
}

}  // namespace

std::string page_body_of(const Runs& runs, const PageTime& time) {
  MOEBIUS_ASSERT(!runs.empty() && runs.size() <= kMaxRuns);
  Markup out;
  add_header(out, runs, time);
  out.open("main");
  if (runs.size() == 1)
    out.add(tiles_markup(runs[0].data));
  else
    add_run_table(out, runs);
  for (const auto section : {learning_section, speed_section, experts_section, memory_section, ranks_section,
                             history_section, other_section, recipe_section})
    out.add(section(runs));
  out.close("main");
  out.open("footer").element("p", {}, fmt::format("Written by moebius at {}.", time_text(time.now_s))).close("footer");
  return out.str();
}

std::string content_policy(const PageTime& time) {
  return fmt::format(
      "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
      "script-src 'sha256-{}'{}",
      sha256_base64(kPageScript), time.period_ms > 0 ? "; connect-src 'self'" : "");
}

std::string page_of(const Runs& runs, const PageTime& time) {
  Markup out;
  out.add("<!DOCTYPE html>\n").open("html", {{"lang", "en"}}).open("head").add("<meta charset=\"utf-8\">");
  out.leaf("meta", {{"http-equiv", "Content-Security-Policy"}, {"content", content_policy(time)}});
  out.leaf("meta", {{"name", "viewport"}, {"content", "width=device-width,initial-scale=1"}});
  out.leaf("meta", {{"name", "referrer"}, {"content", "no-referrer"}});
  out.leaf("link", {{"rel", "icon"}, {"href", "data:,"}});
  out.element("title", {}, title_of(runs) + " - Moebius");
  out.open("style").add(kPageStyle).close("style").close("head");
  out.open("body", {{"data-period", std::to_string(time.period_ms)}, {"data-version", time.version}});
  out.open("div", {{"id", "page"}}).add(page_body_of(runs, time)).close("div");
  out.open("script").add(kPageScript).close("script").close("body").close("html").add("\n");
  return out.str();
}

}  // namespace moebius
