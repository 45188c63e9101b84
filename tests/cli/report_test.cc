// `moebius report` and `moebius watch` as people run them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "report/testing.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

class CliReport : public ::testing::Test {
 protected:
  void SetUp() override { write_run(dir_.path("run"), 6, train_line(7, 1).substr(0, 40)); }
  TestDir dir_;
};

TEST_F(CliReport, WritesOnePageAndATable) {
  const Ran ran = run_moebius(dir_, {"report", "run", "--out", "page.html", "--csv", "table.csv"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, MatchesRegex("page.html  .* KiB\ntable.csv  7 rows\n"));
  EXPECT_THAT(read_file(dir_.path("page.html")), StartsWith("<!DOCTYPE html>"));
  EXPECT_THAT(read_file(dir_.path("page.html")), HasSubstr("The last line of metrics.jsonl is half-written"));
  EXPECT_THAT(read_file(dir_.path("table.csv")), StartsWith("kind,step,loss,"));
  const auto json = json_of(run_moebius(dir_, {"report", "run", "--out", "page.html", "--json"}));
  EXPECT_EQ(json.at("out"), "page.html");
  EXPECT_EQ(json.at("runs")[0].at("last_step"), 6);
}

TEST_F(CliReport, WritesThePageOfOneRunToItsFolder) {
  EXPECT_THAT(run_moebius(dir_, {"report", "run/"}).out, MatchesRegex("run/report.html  .* KiB\n"));
  EXPECT_THAT(read_file(dir_.path("run/report.html")), StartsWith("<!DOCTYPE html>"));
}

TEST_F(CliReport, WarnsOfSkippedLines) {
  write_run(dir_.path("bad"), 2, "rubbish\n");
  const Ran ran = run_moebius(dir_, {"report", "bad", "--out", "page.html"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("bad/metrics.jsonl: the report leaves out 1 damaged line\n"));
  EXPECT_THAT(ran.err, Not(HasSubstr("whose step")));
  write_run(dir_.path("old"), 2, train_line(1, 1) + "\n" + train_line(2, 1) + "\n");
  EXPECT_THAT(run_moebius(dir_, {"report", "old", "--out", "page.html"}).err,
              HasSubstr("old/metrics.jsonl: the report leaves out 2 records whose step is not above the one before\n"));
}

TEST_F(CliReport, RefusesInvalidRequests) {
  expect_refused(run_moebius(dir_, {"report", "run", "run"}), 2,
                 "report: expected --out FILE.html for a page of 2 runs, or --csv; got none");
  expect_refused(run_moebius(dir_, {"report", "no", "--out", "p.html"}), 3,
                 "no: expected the folder of a run; got nothing there; check the path");
  expect_refused(run_moebius(dir_, {"report", ".", "--out", "p.html"}), 3, "got one without metrics.jsonl");
  expect_refused(run_moebius(dir_, {"report", "run", "--out", "no/p.html"}), 4, "no/p.html");
  expect_refused(run_moebius(dir_, {"report", "run", "run", "--csv", "t.csv"}), 2, "expected one run; got 2");
  std::vector<std::string> many(9, "run");
  many.insert(many.begin(), "report");
  many.insert(many.end(), {"--out", "p.html"});
  expect_refused(run_moebius(dir_, many), 2, "expected at most 8 runs; got 9");
}

// A slip must not write a page over the metrics.
TEST_F(CliReport, NeverOverwritesMetrics) {
  const std::string was = read_file(dir_.path("run/metrics.jsonl"));
  expect_refused(run_moebius(dir_, {"report", "run", "--out", "run/metrics.jsonl"}), 2,
                 "expected a name that ends in .html");
  EXPECT_EQ(read_file(dir_.path("run/metrics.jsonl")), was);
}

// A run may come from someone else: a link in its folder must not lead the page to another file.
TEST_F(CliReport, ALinkInTheRunIsNotReplaced) {
  write_file_atomic(dir_.path("mine.txt"), "mine");
  std::filesystem::create_symlink("../mine.txt", dir_.path("run/report.html"));
  expect_refused(run_moebius(dir_, {"report", "run"}), 3, "run/report.html is a link to another file");
  EXPECT_EQ(read_file(dir_.path("mine.txt")), "mine");
}

// A program that runs at the same time as this one, with its output in files.
class Started {
 public:
  Started(const TestDir& dir, const std::vector<std::string>& words) : out_(dir.path("watch.out")) {
    const std::string program = built_program("moebius"), err = dir.path("watch.err"), folder = dir.path();
    std::vector<char*> arguments{const_cast<char*>(program.c_str())};
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    std::filesystem::remove(out_);
    process_ = ::fork();
    if (process_ != 0) return;
    ::dup2(::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
    if (::chdir(folder.c_str()) == 0) ::execv(program.c_str(), arguments.data());
    std::_Exit(127);
  }
  ~Started() {
    if (process_ > 0) end(SIGKILL);
  }
  // Returns the first line of its output, once that is there.
  std::string line() const {
    for (int i = 0; i < 600; ++i) {
      const std::string text = std::filesystem::exists(out_) ? read_file(out_) : "";
      if (text.ends_with("\n")) return text.substr(0, text.size() - 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return "";
  }
  int end(int signal) {
    int status = 0;
    ::kill(process_, signal);
    ::waitpid(process_, &status, 0);
    process_ = -1;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  std::string out_;
  pid_t process_ = -1;
};

TEST_F(CliReport, WatchPrintsItsAddressAndEndsWithASignal) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Started watch(dir_, {"watch", "run", "--port", "0"});
    EXPECT_THAT(watch.line(), MatchesRegex("http://127.0.0.1:[0-9]+/"));
    EXPECT_EQ(watch.end(signal), 128 + signal);
  }
}

TEST_F(CliReport, WatchNamesAPortInUse) {
  Started watch(dir_, {"watch", "run", "--port", "0"});
  const std::string address = watch.line(),
                    port = address.substr(address.rfind(':') + 1, address.size() - address.rfind(':') - 2);
  expect_refused(run_moebius(dir_, {"watch", "run", "--port", port}), 4,
                 "port " + port + " of 127.0.0.1 cannot be bound");
  EXPECT_EQ(watch.end(SIGINT), 130);
}

TEST_F(CliReport, WatchRefusesFoldersWithoutARun) {
  expect_refused(run_moebius(dir_, {"watch", "no"}), 3, "expected the folder of a run");
  expect_refused(run_moebius(dir_, {"watch", "run", "--port", "70000"}), 2, "");
}

// The page in a real browser, which browser.py drives. Each step is a line of JSON, and so is its answer.
class Browser : public CliReport {
 protected:
  void SetUp() override {
    CliReport::SetUp();
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (program_.empty() && std::system(fmt::format("command -v {} > /dev/null", name).c_str()) == 0) program_ = name;
    if (std::string(MOEBIUS_PYTHON).empty() || program_.empty())
      GTEST_SKIP() << "needs Python and Chromium; apt-get install chromium";
  }
  std::vector<nlohmann::json> drive(const std::vector<nlohmann::json>& steps) {
    std::string lines;
    for (const auto& step : steps) lines += step.dump() + "\n";
    write_file_atomic(dir_.path("steps"), lines);
    const std::string command = fmt::format(
        "{} {} {} < {} > {} 2> {}", quoted(MOEBIUS_PYTHON), quoted(MOEBIUS_SOURCE_DIR "/tests/cli/browser.py"),
        program_, quoted(dir_.path("steps")), quoted(dir_.path("answers")), quoted(dir_.path("browser.err")));
    EXPECT_EQ(std::system(command.c_str()), 0) << read_file(dir_.path("browser.err"));
    std::vector<nlohmann::json> answers;
    std::istringstream text(read_file(dir_.path("answers")));
    for (std::string line; std::getline(text, line);) answers.push_back(nlohmann::json::parse(line));
    EXPECT_EQ(answers.size(), steps.size()) << read_file(dir_.path("browser.err"));
    answers.resize(steps.size());
    return answers;
  }
  std::string file_url(const std::string& name) const { return "file://" + dir_.path(name); }
  std::string program_;
};

// Moves the mouse to the middle of an element.
nlohmann::json move_to(const std::string& selector, double part) { return {{"move_to", {selector, part}}}; }
// The tags of parts that are not wholly between the sides of the window, but for those that scroll by themselves.
const std::string kOutside =
    "[...document.querySelectorAll('h1, h2, h3, p, figure, .card, .tiles div, .legend li, svg text')].filter(e => {"
    "const b = e.getBoundingClientRect(); return !e.closest('.wide') && b.width > 0 && (b.left < 0 || b.right > "
    "innerWidth + 0.5)}).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))";
const std::string kTip = "(document.querySelector('.tip') || {}).innerText || ''";

TEST_F(Browser, PlotsAreDrawnAndHoverShowsValues) {
  ASSERT_EQ(run_moebius(dir_, {"report", "run", "--out", "page.html"}).code, 0);
  const auto answers = drive({
      {{"size", {1240, 900, false}}},
      {{"open", file_url("page.html")}},
      {{"eval", "[...document.querySelectorAll('svg')].filter(e => e.getBBox().width < 100).length"}},
      {{"eval", "[...document.querySelectorAll('figure .line')].filter(e => e.getTotalLength() < 20).length"}},
      move_to("#plot-loss svg", 0.99),
      {{"eval", kTip}},
      move_to("#plot-load-0 svg", 0.2),
      {{"eval", kTip}},
      move_to("#plot-memory-0 rect.seg", 0.5),
      {{"eval", kTip}},
      {{"eval", "document.querySelector('#plot-lr svg').focus()"}},
      {{"key", "ArrowLeft"}},
      {{"key", "ArrowLeft"}},
      {{"eval", kTip}},
      {{"eval", "document.documentElement.scrollWidth <= innerWidth"}},
      {{"size", {360, 740, true}}},
      {{"eval", "document.documentElement.scrollWidth <= innerWidth"}},
      {{"eval",
        "Math.min(...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)) >= 10"}},
      {{"size", {390, 844, true}}},
      {{"dark", true}},
      {{"eval", "document.documentElement.scrollWidth <= innerWidth"}},
      {{"eval", kOutside}},
      {{"messages", true}},
      {{"requests", true}},
  });
  EXPECT_EQ(answers[2], 0) << "plots that are not drawn";
  EXPECT_EQ(answers[3], 0) << "lines that are not drawn";
  EXPECT_EQ(answers[5], "step 6\ntrain 0.83333");
  EXPECT_THAT(answers[7].get<std::string>(), HasSubstr("times the mean"));
  EXPECT_EQ(answers[9], "predicted\nparam 977 KiB");
  EXPECT_EQ(answers[13], "step 5\n0.001");
  EXPECT_EQ(answers[14], true);
  EXPECT_EQ(answers[16], true) << "the page is wider than a phone";
  EXPECT_EQ(answers[17], true) << "text too small on a phone";
  EXPECT_EQ(answers[20], true) << "the page is wider than a phone of 390 px";
  EXPECT_EQ(answers[21], nlohmann::json::array()) << "parts that a phone of 390 px cuts off";
  EXPECT_EQ(answers[22], nlohmann::json::array()) << "messages of the console";
  for (const auto& url : answers[23])
    EXPECT_THAT(url.get<std::string>(), testing::AnyOf(StartsWith("file:"), StartsWith("data:")));
}

TEST_F(Browser, HostileTextsAreShownAndNotRun) {
  const std::string evil = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>";
  write_run(dir_.path("run"), 3,
            nlohmann::json({{"kind", "train"}, {"step", 4}, {"loss", 1.0}, {evil, 5}}).dump() + "\n");
  write_file_atomic(dir_.path("run/recipe.resolved.toml"), "[run]\ndir = \"" + evil + "\"\n");
  ASSERT_EQ(run_moebius(dir_, {"report", "run", "--out", "page.html"}).code, 0);
  const auto answers = drive({{{"open", file_url("page.html")}},
                              {{"eval", "document.title"}},
                              {{"eval", "document.querySelectorAll('img, body script:not([type])').length"}},
                              {{"eval", "document.querySelector('#plot-other-0 h3').textContent"}},
                              {{"messages", true}}});
  EXPECT_EQ(answers[1], "run - Moebius");
  EXPECT_EQ(answers[2], 1);  // the script of the page
  EXPECT_THAT(answers[3].get<std::string>(), StartsWith("</script><script>document.title='taken'"));
  EXPECT_EQ(answers[4], nlohmann::json::array());
}

TEST_F(Browser, AWatchedPageFollowsItsRun) {
  Started watch(dir_, {"watch", "run", "--port", "0"});
  const std::string address = watch.line(), metrics = dir_.path("run/metrics.jsonl");
  const auto answers = drive({{{"open", address}},
                              {{"eval", "document.querySelector('.lead').innerText"}},
                              {{"append", {metrics, train_line(7, 1).substr(40) + "\n" + train_line(8, 0.125) + "\n"}}},
                              {{"wait", 5}},
                              {{"eval", "document.querySelector('.lead').innerText"}},
                              {{"eval", "document.querySelector('.live').innerText"}},
                              {{"messages", true}}});
  EXPECT_THAT(answers[1].get<std::string>(), StartsWith("step 6 of 20"));
  EXPECT_THAT(answers[4].get<std::string>(), StartsWith("step 8 of 20"));
  EXPECT_EQ(answers[5], "live");
  EXPECT_EQ(answers[6], nlohmann::json::array());
  EXPECT_EQ(watch.end(SIGINT), 130);
}

}  // namespace
}  // namespace moebius
