// The first word of a command line.
#include "tests/cli/program.h"

namespace moebius {
namespace {

TEST(CliCommands, UnknownOnesAreNamed) {
  TestDir dir;
  expect_refused(run_moebius(dir, {"trian", "x.toml"}), 2, "unknown command trian; did you mean train?");
  expect_refused(run_moebius(dir, {"frobnicate"}), 2, "unknown command frobnicate; moebius --help lists all commands");
  expect_refused(run_moebius(dir, {"merge", "a", "b"}), 2,
                 "unknown command merge; here that is moebius export RUN, or moebius import MODEL CHECKPOINT --adapter "
                 "ADAPTER; moebius --help lists all commands");
  expect_refused(run_moebius(dir, {"evaluate"}), 2, "here that is moebius eval; ");
}

}  // namespace
}  // namespace moebius
