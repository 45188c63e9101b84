// Commands that the system disturbs: a full disk, a limit on file sizes, a signal.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include "tests/cli/program.h"

namespace moebius {
namespace {

// Runs a line of shell, with the program as $M and the recipe as $R.
Ran run_shell(const TestDir& dir, const std::string& line) {
  const std::string command =
      fmt::format("cd {} && M={} R={} && ({}) 2> stderr", quoted(dir.path()), quoted(built_program("moebius")),
                  quoted(MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml"), line);
  const int status = std::system(command.c_str());
  return {.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
          .err = read_file(dir.path("stderr"))};
}

// Short texts fail when they are flushed at the end, long ones while they are printed.
TEST(CliOutput, FailedWriteToStandardOutputIsAnError) {
  TestDir dir;
  for (const char* line : {"$M --version > /dev/full", "$M --help > /dev/full", "$M config $R > /dev/full",
                           "$M config --json $R > /dev/full"}) {
    const Ran ran = run_shell(dir, line);
    EXPECT_EQ(ran.code, 4) << line << "\n" << ran.err;
    EXPECT_THAT(ran.err, testing::HasSubstr("No space left on device")) << line;
  }
  EXPECT_EQ(run_shell(dir, "$M config $R > all").code, 0);
}

TEST(CliOutput, AFileAboveTheLimitIsAnError) {
  TestDir dir;
  write_file_atomic(dir.path("text"), std::string(100000, 'x'));
  const Ran ran = run_shell(dir, "ulimit -f 8; $M data build --input text --tokenizer bytes --out set");
  EXPECT_EQ(ran.code, 4) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("error: "));
}

// The reader of a pipe that does not wait is slow: this is no lack of threads.
TEST(CliOutput, AFullPipeIsAnErrorOfTheOutput) {
  TestDir dir;
  int ends[2] = {};
  ASSERT_EQ(pipe2(ends, O_NONBLOCK), 0);
  ASSERT_LT(ends[1], 10);  // the shell knows descriptors of one digit
  const std::string page(4096, 'x');
  while (write(ends[1], page.data(), page.size()) > 0) continue;
  const Ran ran = run_shell(dir, fmt::format("$M config --json $R >&{}", ends[1]));
  close(ends[0]);
  close(ends[1]);
  EXPECT_EQ(ran.code, 4) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("Resource temporarily unavailable"));
  EXPECT_THAT(ran.err, testing::Not(testing::HasSubstr("threads")));
}

// Both streams may be one file, as in the log of a job.
TEST(CliOutput, TheLineOfTheLogFollowsTheWholeText) {
  TestDir dir;
  const std::string train =
      "printf 'some words, more than a sequence of thirty-two tokens' > text && "
      "$M data build --input text --tokenizer bytes --out set && "
      "$M train $R --set run.dir=run --set train.steps=1 --set optimizer.warmup_steps=0 --set 'data.train=[\"set\"]'";
  ASSERT_EQ(run_shell(dir, train + " > train.log").code, 0) << read_file(dir.path("stderr"));
  EXPECT_EQ(run_shell(dir, "$M generate run --prompt a --max-tokens 3 --temperature 0 > both 2>&1").code, 0);
  EXPECT_THAT(read_file(dir.path("both")), testing::ContainsRegex("\n[0-9]+ tokens? in "));
}

// One signal ends a command that has nothing to save.
TEST(CliOutput, ASignalEndsACommand) {
  TestDir dir;
  EXPECT_EQ(run_shell(dir,
                      "mkfifo in; sleep 9 > in & timeout -s TERM --preserve-status 1 $M tokenize --tokenizer "
                      "bytes < in; code=$?; kill $!; exit $code")
                .code,
            128 + SIGTERM);
}

}  // namespace
}  // namespace moebius
