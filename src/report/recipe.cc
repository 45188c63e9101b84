// The section about the recipe, and where the recipes of several runs differ.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "report/plot/markup.h"
#include "report/sections.h"

namespace moebius {
namespace {

struct Row {
  std::string key;
  std::vector<std::string> values;  // of each run; empty where it has none
  bool differs() const {
    return std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) != values.end();
  }
};

// Every key of any run, in the order of the first run that has it.
std::vector<Row> rows_of(const Runs& runs) {
  std::vector<Row> rows;
  std::map<std::string, size_t> at;
  for (size_t r = 0; r < runs.size(); ++r) {
    for (const auto& [key, value] : runs[r].data.recipe) {
      const auto [found, is_new] = at.try_emplace(key, rows.size());
      if (is_new) rows.push_back({.key = key, .values = std::vector<std::string>(runs.size())});
      rows[found->second].values[r] = value;
    }
  }
  return rows;
}

std::string table_of(const Runs& runs, const std::vector<Row>& rows) {
  Markup out;
  out.open("div", {{"class", "wide"}}).open("table").open("thead").open("tr").element("th", {{"scope", "col"}}, "key");
  for (const ShownRun& run : runs) out.element("th", {{"scope", "col"}}, runs.size() > 1 ? run.name : "value");
  out.close("tr").close("thead").open("tbody");
  for (const Row& row : rows) {
    out.open("tr").element("th", {{"scope", "row"}}, row.key);
    for (const std::string& value : row.values) out.open("td").element("code", {}, value).close("td");
    out.close("tr");
  }
  out.close("tbody").close("table").close("div");
  return out.str();
}

}  // namespace

std::string recipe_section(const Runs& runs) {
  const std::vector<Row> rows = rows_of(runs);
  std::vector<Row> different;
  std::copy_if(rows.begin(), rows.end(), std::back_inserter(different), [](const Row& row) { return row.differs(); });
  Markup out;
  out.open("section").element("h2", {}, "Recipe");
  for (const ShownRun& run : runs)
    if (!run.data.recipe_problem.empty())
      out.element("p", {{"class", "note warn"}}, fmt::format("{}: {}", run.name, run.data.recipe_problem));
  if (runs.size() > 1) {
    out.open("div", {{"class", "card"}, {"id", "recipe-differences"}});
    out.element("h3", {}, different.empty() ? "The recipes are the same" : "What differs");
    if (!different.empty()) out.add(table_of(runs, different));
    out.close("div").element("p", {}, "");
  }
  if (!rows.empty()) {
    out.open("div", {{"class", "card"}}).open("details", {{"id", "recipe-all"}});
    out.element("summary", {}, fmt::format("All {} keys", rows.size())).add(table_of(runs, rows));
    out.close("details").close("div");
  }
  out.close("section");
  return out.str();
}

}  // namespace moebius
