#include "report/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "report/testing.h"

namespace moebius {
namespace {

void append(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::app) << text; }

class ReadRun : public ::testing::Test {
 protected:
  std::string metrics() const { return dir_.path("run/metrics.jsonl"); }
  RunFolder folder() const {
    RunFolder run(dir_.path("run"));
    run.poll();
    return run;
  }
  TestDir dir_;
};

TEST_F(ReadRun, ReadsEverythingThatWasWritten) {
  write_run(dir_.path("run"), 10);
  const RunFolder run = folder();
  const RunData& data = run.data();
  EXPECT_EQ(data.steps, 10);
  EXPECT_EQ(data.last_step, 10);
  EXPECT_EQ(data.train.find("loss")->last(), 0.5);
  EXPECT_EQ(data.eval.find("loss")->count(), 2);
  EXPECT_EQ(data.eval.find("bits_per_byte")->last(), 6.0 / 8 * 1.5);
  EXPECT_THAT(data.moe.layers, testing::ElementsAre(1, 2));
  EXPECT_EQ(data.moe.experts, 4);
  EXPECT_THAT(data.moe.load.last(), testing::ElementsAre(2, 1, 1, 0, 1, 1, 1, 1));
  EXPECT_THAT(data.moe.balance.last(), testing::ElementsAre(2, 1));
  EXPECT_NEAR(data.ranks.busy_s.last()[0], 0.04, 1e-9);
  EXPECT_NEAR(data.ranks.busy_s.last()[1], 0.021, 1e-9);
  EXPECT_EQ(data.ranks.axes.at("ep").sent_bytes.last(), 4096);
  EXPECT_THAT(data.ranks.axes.at("ep").rank_s.last(), testing::ElementsAre(0.001, 0.02));
  EXPECT_EQ(data.clipped, 5);
  EXPECT_NEAR(data.trained_s, 0.5, 1e-9);
  ASSERT_EQ(data.events.size(), 3u);
  EXPECT_EQ(data.events[0].memory_bytes.at("grad"), 2000000);
  EXPECT_EQ(data.events[2].step, 2);
  EXPECT_THAT(data.checkpoints, testing::ElementsAre(2));
  EXPECT_EQ(recipe_number(data, "train.steps"), 20);
  EXPECT_EQ(recipe_value(data, "run.dir"), "\"run\"");
  EXPECT_EQ(run.name(), "run");
}

TEST_F(ReadRun, DamagedLinesAreCountedAndLeftOut) {
  const std::string nul(300, '\0');
  write_run(
      dir_.path("run"), 3,
      nul +
          "\nnot json\n[1,2]\n{\"kind\":\"train\"}\n{\"kind\":\"train\",\"step\":\"x\"}\n{\"kind\":\"train\",\"step\":4,\"loss\":"
          "\n\xff\xfe\n\n" +
          train_line(4, 1.0) + "\n" + train_line(5, 1.0).substr(0, 100));
  const RunFolder run = folder();
  EXPECT_EQ(run.data().skipped_lines.damaged, 8);
  EXPECT_TRUE(run.data().skipped_lines.half_line);
  EXPECT_EQ(run.data().last_step, 4);
}

TEST_F(ReadRun, NullsAreGaps) {
  write_run(dir_.path("run"), 0, "{\"kind\":\"train\",\"step\":1,\"loss\":null,\"lr\":0.5}\n");
  const RunFolder run = folder();
  EXPECT_EQ(run.data().train.find("loss"), nullptr);
  EXPECT_EQ(run.data().train.find("lr")->last(), 0.5);
}

TEST_F(ReadRun, InvalidNumbersAreSkippedAndCounted) {
  std::string deep(5000, '[');
  write_run(
      dir_.path("run"), 1,
      "{\"kind\":\"train\",\"step\":2,\"loss\":1e999}\n"
      "{\"kind\":\"train\",\"step\":99999999999999999999}\n"
      "{\"kind\":\"train\",\"step\":-5,\"loss\":1}\n"
      "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n"
      "{\"kind\":\"train\",\"step\":3,\"moe\":[{\"layer\":1,\"load\":[]},{\"layer\":2,\"load\":[1,2]}],\"ranks\":[],\"comm\":5}\n"
      "{\"kind\":\"train\",\"step\":4,\"moe\":[{\"layer\":1,\"load\":[0,0,-7,\"x\"]}],\"ranks\":{\"load_s\":[1],\"passes_s\":[1,2]}}\n"
      "{\"kind\":\"train\",\"step\":5,\"a\":" +
          deep + "\n" + "{\"kind\":\"train\",\"step\":1125899906842624,\"loss\":2}\n" +
          "{\"kind\":\"train\",\"step\":9223372036854775807,\"loss\":3}\n");
  const RunFolder run = folder();
  EXPECT_EQ(run.data().skipped_lines.damaged, 4);
  EXPECT_EQ(run.data().skipped_lines.out_of_order, 2);
  EXPECT_EQ(run.data().last_step, int64_t{1} << 50);
  EXPECT_EQ(run.data().train.find("loss")->last(), 2);
}

TEST_F(ReadRun, ThousandsOfNamesAreBounded) {
  std::string line = "{\"kind\":\"train\",\"step\":1";
  for (int i = 0; i < 5000; ++i) line += fmt::format(",\"name{}\":1", i);
  write_run(dir_.path("run"), 0, line + "}\n");
  EXPECT_EQ(folder().data().train.all().size(), NamedSeries::kMax);
}

TEST_F(ReadRun, ItFollowsAFileThatGrows) {
  write_run(dir_.path("run"), 3);
  RunFolder run(dir_.path("run"));
  EXPECT_TRUE(run.poll());
  EXPECT_FALSE(run.poll());
  const std::string line = train_line(4, 0.25);
  append(metrics(), line.substr(0, 50));
  EXPECT_TRUE(run.poll());
  EXPECT_EQ(run.data().last_step, 3);
  EXPECT_TRUE(run.data().skipped_lines.half_line);
  append(metrics(), line.substr(50) + "\n" + train_line(5, 0.125) + "\n");
  EXPECT_TRUE(run.poll());
  EXPECT_EQ(run.data().last_step, 5);
  EXPECT_EQ(run.data().train.find("loss")->last(), 0.125);
  EXPECT_FALSE(run.data().skipped_lines.half_line);
}

TEST_F(ReadRun, AResumeThatCutsTheFileIsReadAgain) {
  write_run(dir_.path("run"), 9);
  RunFolder run(dir_.path("run"));
  run.poll();
  write_run(dir_.path("run"), 4);
  EXPECT_TRUE(run.poll());
  EXPECT_EQ(run.data().last_step, 4);
  EXPECT_EQ(run.data().steps, 4);
  EXPECT_EQ(run.data().events.size(), 3u);
  write_run(dir_.path("run"), 12);  // another file of the same name, and longer
  EXPECT_TRUE(run.poll());
  EXPECT_EQ(run.data().steps, 12);
  EXPECT_EQ(run.data().skipped_lines.out_of_order, 0);
}

// A resume cuts the file in place, and may write more than it cut before the file is read again.
TEST_F(ReadRun, AFileThatWasCutAndGrewAgainIsReadAgain) {
  write_run(dir_.path("run"), 9);
  RunFolder run(dir_.path("run"));
  run.poll();
  const std::string before = read_file(metrics());
  const size_t size = before.rfind('\n', before.find("\"step\":5")) + 1;
  std::filesystem::resize_file(metrics(), size);
  for (int64_t step = 5; std::filesystem::file_size(metrics()) <= before.size(); ++step)
    append(metrics(), train_line(step, 0.25) + "\n");
  EXPECT_TRUE(run.poll());
  EXPECT_EQ(run.data().skipped_lines.out_of_order, 0);
  EXPECT_EQ(run.data().steps, run.data().last_step);
  EXPECT_EQ(run.data().train.find("loss")->last(), 0.25);
  EXPECT_FALSE(run.poll());
}

TEST_F(ReadRun, ALineOverManyChunksIsOneLine) {
  const std::string filler(9'000'000, ' ');
  write_run(dir_.path("run"), 1,
            "{\"kind\":\"train\"," + filler + "\"step\":2,\"loss\":7}\n" + train_line(3, 8) + "\n");
  const RunFolder run = folder();
  EXPECT_EQ(run.data().skipped_lines.damaged, 0);
  EXPECT_EQ(run.data().steps, 3);
}

TEST_F(ReadRun, ABrokenRecipeIsReported) {
  write_run(dir_.path("run"), 1);
  write_file_atomic(dir_.path("run/recipe.resolved.toml"), "[train\nsteps");
  EXPECT_THAT(folder().data().recipe_problem, testing::HasSubstr("not TOML"));
  std::filesystem::remove(dir_.path("run/recipe.resolved.toml"));
  EXPECT_EQ(folder().data().recipe_problem, "there is no recipe.resolved.toml");
}

TEST_F(ReadRun, ARunBeforeItsFirstStepIsARun) {
  std::filesystem::create_directories(dir_.path("run"));
  write_file_atomic(dir_.path("run/recipe.resolved.toml"), kTestRecipe);
  EXPECT_EQ(folder().data().steps, 0);
}

TEST_F(ReadRun, APathWithoutARunIsRefused) {
  expect_error(ErrorKind::input, "expected the folder of a run; got nothing there",
               [&] { RunFolder(dir_.path("no")); });
  write_file_atomic(dir_.path("file"), "");
  expect_error(ErrorKind::input, "got something else", [&] { RunFolder(dir_.path("file")); });
  expect_error(ErrorKind::input, "without metrics.jsonl", [&] { RunFolder(dir_.path()); });
}

// To open a pipe would wait for its writer.
TEST_F(ReadRun, APipeIsRefused) {
  std::filesystem::create_directories(dir_.path("run"));
  ASSERT_EQ(::mkfifo(metrics().c_str(), 0600), 0);
  expect_error(ErrorKind::input, "expected a file of lines", [&] { folder(); });
}

}  // namespace
}  // namespace moebius
