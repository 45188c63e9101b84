#include "report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "report/plot/heat_map.h"
#include "report/plot/line_plot.h"
#include "report/run_folder.h"
#include "report/testing.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

int count_of(const std::string& text, const std::string& word) {
  int count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

// Returns a failure names the words, not the whole page.
bool has(const std::string& page, const std::string& words) { return page.find(words) != std::string::npos; }

class Page : public ::testing::Test {
 protected:
  const RunFolder& run(const std::string& name) {
    folders_.push_back(std::make_unique<RunFolder>(dir_.path(name)));
    folders_.back()->poll();
    return *folders_.back();
  }
  std::string page(const std::vector<std::string>& names, double now_s = 2e9) {
    std::vector<ShownRun> runs;
    for (const std::string& name : names) {
      const RunFolder& folder = run(name);
      runs.push_back({.name = folder.name(),
                      .path = folder.path(),
                      .data = folder.data(),
                      .modified_s = folder.modified_s(),
                      .colour = static_cast<int>(runs.size())});
    }
    return page_of(runs, {.now_s = now_s});
  }
  TestDir dir_;
  std::vector<std::unique_ptr<RunFolder>> folders_;
};

TEST_F(Page, HasAPlotForEachMetric) {
  write_run(dir_.path("run"), 10);
  const std::string html = page({"run"});
  for (const char* id : {"plot-loss", "plot-bits", "plot-grad-norm", "plot-lr", "plot-tokens_per_s", "plot-balance-0",
                         "plot-load-0", "plot-load-steps-0", "plot-entropy-0", "plot-memory-0", "plot-ranks-0",
                         "plot-busy-0", "plot-axes-0", "plot-history-0"})
    EXPECT_EQ(count_of(html, fmt::format("id=\"{}\"", id)), 1) << id;
  EXPECT_TRUE(has(html, "before clipping at 1, which 5 of 10 steps met"));
  EXPECT_TRUE(has(html, "Checkpoints in the folder: steps 2."));
  EXPECT_TRUE(has(html, "straggler +"));
  EXPECT_TRUE(has(html, "Load of layer 1"));  // the least even one
}

TEST_F(Page, EveryPlotHasANameAndAText) {
  write_run(dir_.path("run"), 10);
  const std::string html = page({"run"});
  const int plots = count_of(html, "<svg ");
  EXPECT_GT(plots, 10);
  EXPECT_EQ(count_of(html, "role=\"img\""), plots);
  EXPECT_EQ(count_of(html, "<desc id="), plots);
  EXPECT_FALSE(has(html, "-desc\"></desc>"));
  EXPECT_TRUE(has(html, "train: 5 at step 1, 0.5 at step 10; least 0.5, greatest 5."));
}

// The only addresses are of SVG's own names, which nothing loads.
TEST_F(Page, NamesNoOtherFile) {
  write_run(dir_.path("run"), 10);
  std::string html = page({"run"});
  EXPECT_TRUE(has(html, "default-src &#39;none&#39;"));
  EXPECT_FALSE(has(html, "connect-src"));
  constexpr std::string_view kName = "http://www.w3.org/2000/svg";
  for (size_t at; (at = html.find(kName)) != std::string::npos;) html.erase(at, kName.size());
  for (const char* word : {"http:", "https:", "//cdn", " src=", "@import", "url("})
    EXPECT_FALSE(has(html, word)) << word;
  EXPECT_EQ(count_of(html, "href="), 1);  // of the icon, which is empty
}

TEST_F(Page, HostileTextsAreShownAndNotRun) {
  const std::string evil = "</script><img src=x onerror=alert(1)>\"'&";
  std::filesystem::create_directories(dir_.path("<b onload=x>"));
  write_run(dir_.path("<b onload=x>"), 2,
            "{\"kind\":\"train\",\"step\":3,\"loss\":1,\"</script><img src=x onerror=alert(1)>\\\"'&\":5,"
            "\"comm\":{\"<svg onload=alert(2)>\":{\"sent_bytes\":1,\"exposed_s\":1}}}\n");
  write_file_atomic(dir_.path("<b onload=x>/recipe.resolved.toml"),
                    "[run]\ndir = '<script>alert(3)</script>'\n\"<i>\" = 1\n");
  const std::string html = page({"<b onload=x>"});
  EXPECT_TRUE(has(html, "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&quot;&#39;&amp;"));
  EXPECT_TRUE(has(html, "&lt;svg onload=alert(2)&gt;"));
  EXPECT_TRUE(has(html, "&lt;script&gt;alert(3)&lt;/script&gt;"));
  EXPECT_TRUE(has(html, "&lt;b onload=x&gt;"));
  for (const char* word : {"<img", "<svg onload", "<script>alert", "<b onload", "<i>"})
    EXPECT_FALSE(has(html, word)) << word;
}

TEST_F(Page, ASlowLinkIsNamed) {
  write_run(
      dir_.path("run"), 2,
      "{\"kind\":\"train\",\"step\":3,\"loss\":1,\"links\":{\"round_trip_s\":{\"ranks\":[1,2],\"hosts\":[\"b\",\"<c>\"],"
      "\"value\":0.1,\"median_of_others\":0.0002,\"slow\":true},\"bytes_per_s\":{\"ranks\":[0,1],\"hosts\":[\"a\","
      "\"b\"],\"value\":1048576,\"slow\":false}}}\n");
  const std::string html = page({"run"});
  const size_t begin = html.find("id=\"plot-links-0\"");
  ASSERT_NE(begin, std::string::npos);
  const std::string table = html.substr(begin, html.find("</table>", begin) - begin);
  EXPECT_TRUE(has(table, "rank 1 (b) to rank 2 (&lt;c&gt;)")) << table;
  EXPECT_TRUE(has(table, "rank 0 (a) to rank 1 (b)"));
  EXPECT_TRUE(has(table, ">unknown<"));
  EXPECT_EQ(count_of(table, ">slow link<"), 1);
}

// Links that are damaged are left out.
TEST_F(Page, DamagedLinksAreLeftOut) {
  write_run(
      dir_.path("run"), 2,
      "{\"kind\":\"train\",\"step\":3,\"links\":{\"round_trip_s\":{\"ranks\":[1],\"hosts\":[\"b\",\"c\"],\"value\":1},"
      "\"bytes_per_s\":{\"ranks\":[1,2],\"hosts\":[3,4],\"value\":1}}}\n"
      "{\"kind\":\"train\",\"step\":4,\"links\":[]}\n");
  EXPECT_FALSE(has(page({"run"}), "Slowest connections"));
}

TEST_F(Page, RunsAreSideBySideAndTheirRecipesCompared) {
  write_run(dir_.path("one"), 10);
  write_run(dir_.path("two"), 6);
  write_file_atomic(dir_.path("two/recipe.resolved.toml"), "[run]\ndir = \"run\"\n[train]\nsteps = 30\n");
  const std::string html = page({"one", "two"});
  EXPECT_TRUE(has(html, "2 runs"));
  EXPECT_EQ(count_of(html, "id=\"plot-loss\""), 1);
  EXPECT_EQ(count_of(html, "id=\"plot-balance-1\""), 1);
  const size_t begin = html.find("id=\"recipe-differences\"");
  const std::string differences = html.substr(begin, html.find("</table>", begin) - begin);
  EXPECT_TRUE(has(differences, "train.steps"));
  EXPECT_TRUE(has(differences, "optimizer.clip"));
  EXPECT_FALSE(has(differences, "run.dir"));
}

TEST_F(Page, ShowsTheStateOfARun) {
  write_run(dir_.path("run"), 10);
  EXPECT_TRUE(has(page({"run"}), "step 10 of 20, stopped without a record of its end"));
  EXPECT_TRUE(has(page({"run"}, folders_[0]->modified_s() + 5), "step 10 of 20, running"));
  const std::string events = read_file(dir_.path("run/events.jsonl"));
  write_file_atomic(dir_.path("run/events.jsonl"),
                    events + "{\"kind\":\"end\",\"time\":1040,\"step\":10,\"signal\":15}\n");
  EXPECT_TRUE(has(page({"run"}), "step 10 of 20, signal 15 at step 10"));
  write_file_atomic(dir_.path("run/events.jsonl"),
                    events + "{\"kind\":\"failed\",\"time\":1040,\"step\":11,\"not_finite\":\"layer <3>\"}\n");
  const std::string failed = page({"run"});
  EXPECT_TRUE(has(failed, "step 10 of 20, failed at step 11"));
  EXPECT_TRUE(has(failed, "Step 11 was not finite: layer &lt;3&gt;."));
}

// Sums of such values would overflow, and a browser refuses "nan" as a place.
TEST_F(Page, ValuesThatCannotBePlottedAreCounted) {
  std::string lines;
  for (int step = 1; step <= 3000; ++step)
    lines += fmt::format("{{\"kind\":\"train\",\"step\":{},\"loss\":{},\"lr\":5e-324,\"grad_norm\":null}}\n", step,
                         step % 2 == 0 ? "1.7e308" : "-1e290");
  write_run(dir_.path("run"), 0, lines + "{\"kind\":\"eval\",\"step\":3000,\"loss\":null}\n");
  write_file_atomic(dir_.path("run/events.jsonl"),
                    "{\"kind\":\"start\",\"time\":1,\"step\":0,\"memory_predicted_bytes\":1e308,\"memory_bytes\":{"
                    "\"param\":1e308,\"grad\":1e308,\"saved\":5}}\n");
  const std::string html = page({"run"});
  for (const char* word : {"nan", "inf,", "inf ", "\"inf"})
    EXPECT_FALSE(has(html.substr(html.find("<main")), word)) << word;
  EXPECT_TRUE(has(html, "1500 of the 3000 values of loss were NaN, infinite or beyond 1e290, and are in no plot."));
  EXPECT_TRUE(has(html, "3000 of the 3000 values of grad_norm were NaN"));
  EXPECT_TRUE(has(html, "1 of the 1 values of eval loss were NaN"));
}

// A page that never ends would be worse than one with few marks.
TEST_F(Page, AxesOfExtremeRangesAreBounded) {
  std::string lines;
  for (int step = 1; step <= 5; ++step)
    lines += fmt::format("{{\"kind\":\"train\",\"step\":{},\"loss\":{}}}\n", step, step == 5 ? "1e290" : "1e-20");
  write_run(dir_.path("run"), 0, lines);
  EXPECT_TRUE(has(page({"run"}), "loss"));
}

// A double cannot tell the largest integers apart, so that an axis of one such step would have no length.
TEST_F(Page, ExtremeStepsHaveAPlace) {
  for (const char* steps : {"9223372036854775807", "1125899906842624", "1,1125899906842624,9223372036854775807"}) {
    std::string lines, number;
    for (std::istringstream list(steps); std::getline(list, number, ',');)
      lines += fmt::format("{{\"kind\":\"train\",\"step\":{},\"loss\":1}}\n", number);
    write_run(dir_.path("run"), 0, lines);
    write_file_atomic(dir_.path("run/events.jsonl"),
                      "{\"kind\":\"start\",\"time\":1,\"step\":0}\n{\"kind\":\"checkpoint\",\"time\":2,\"step\":"
                      "9223372036854775807}\n");
    const std::string html = page({"run"});
    for (const char* word : {"nan", "inf,", "inf ", "\"inf"})
      EXPECT_FALSE(has(html.substr(html.find("<main")), word)) << steps << " " << word;
  }
}

TEST_F(Page, MoreExpertsThanAPlotHoldsLeaveTheirLayersShown) {
  std::string load = "3", layers;
  for (int expert = 1; expert < 1024; ++expert) load += ",3";
  for (int layer = 0; layer < 65; ++layer)
    layers +=
        fmt::format("{}{{\"layer\":{},\"load_max_over_mean\":1.5,\"load\":[{}]}}", layer == 0 ? "" : ",", layer, load);
  write_run(dir_.path("run"), 0, "{\"kind\":\"train\",\"step\":1,\"loss\":1,\"moe\":[" + layers + "]}\n");
  const std::string html = page({"run"});
  EXPECT_TRUE(has(html, "plot-balance-0"));
  EXPECT_FALSE(has(html, "plot-load-0"));
  EXPECT_TRUE(has(html, "The load of single experts is in no plot, since layers times experts are more than 65536."));
}

TEST_F(Page, ARunWithoutAStepHasAPage) {
  write_run(dir_.path("run"), 0);
  const std::string html = page({"run"});
  EXPECT_TRUE(has(html, "no step is in its metrics yet"));
  EXPECT_TRUE(has(html, "All 3 keys"));
}

TEST(LinePlot, ASpikeOfALongSeriesIsDrawn) {
  Series series;
  for (int i = 1; i <= 200000; ++i) series.add(i, i == 123456 ? 40 : 1 + 1e-3 * (i % 10));
  const std::string svg = figure_of(LinePlot{.id = "p", .title = "t", .lines = {{.name = "n", .series = &series}}});
  EXPECT_LT(svg.size(), 120'000u);
  EXPECT_THAT(svg, HasSubstr("\"hi\":["));
  EXPECT_THAT(svg, HasSubstr(",40,"));
  EXPECT_THAT(svg, HasSubstr("class=\"band\""));
}

TEST(LinePlot, DegenerateSeriesHaveAnAxis) {
  for (const double value : {0.0, -3.0, 1e-290, 1e290, -1e290}) {
    Series series;
    series.add(5, value);
    const std::string svg = figure_of(LinePlot{.id = "p", .title = "t", .lines = {{.series = &series}}});
    EXPECT_THAT(svg, Not(HasSubstr("nan"))) << value;
    EXPECT_THAT(svg, Not(HasSubstr("inf"))) << value;
  }
}

TEST(HeatMap, CellsOfOneColourAreOneRectangle) {
  HeatMap map{
      .id = "h", .title = "t", .row = "layer", .column = "expert", .rows = {"0"}, .columns = {"a", "b", "c", "d"}};
  map.values = {0.05, 0.05, 0.95, std::nan("")};
  const std::string svg = figure_of(map);
  EXPECT_EQ(count_of(svg, "h173.00v"), 1);  // two of four columns
  EXPECT_EQ(count_of(svg, "h86.50v"), 1);
  EXPECT_THAT(svg, HasSubstr("\"v\":[0.05,0.05,0.95,null]"));
}

}  // namespace
}  // namespace moebius
