#include "core/fault.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>

#include "core/error.h"

namespace moebius {
namespace {

// Runs in a process of its own, where MOEBIUS_FAULT has not been read yet.
// Prints the errors that it catches.
[[noreturn]] void hit_and_exit(const char* fault, int hits) {
  ::setenv("MOEBIUS_FAULT", fault, 1);
  for (int i = 1; i <= hits; ++i) {
    try {
      fault_point("save.other");
      fault_point("save.write");
    } catch (const Error& e) {
      std::fprintf(stderr, "hit %d: kind %d: %s\n", i, static_cast<int>(e.kind()), e.what());
    }
  }
  std::exit(0);
}

class FaultPoint : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(FaultPoint, KillsAtTheHitAskedForAndNotBefore) {
  EXPECT_EXIT(hit_and_exit("save.write:3", 2), testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(hit_and_exit("save.write:3", 3), testing::KilledBySignal(SIGKILL), "^$");
}

TEST_F(FaultPoint, ThrowsOnce) {
  EXPECT_EXIT(hit_and_exit("save.write:2:throw", 3), testing::ExitedWithCode(0),
              "^hit 2: kind 4: save.write: Input/output error [^\n]*\n$");
}

TEST_F(FaultPoint, AFullDiskStaysFull) {
  EXPECT_EXIT(hit_and_exit("save.write:2:enospc", 3), testing::ExitedWithCode(0),
              "^hit 2: kind 4: save.write: No space left[^\n]*\nhit 3: kind 4: save.write: No space left[^\n]*\n$");
}

TEST_F(FaultPoint, RunsOutOfMemoryWhereItMayThrowAndWhereNot) {
  const auto hit = [](const char* fault) {
    try {
      hit_and_exit(fault, 2);
    } catch (const std::bad_alloc&) {
      std::exit(7);
    }
  };
  EXPECT_EXIT(hit("save.write:2:nomem"), testing::ExitedWithCode(7), "^$");
  EXPECT_EXIT(hit("save.write:2:nomem_noexcept"), testing::KilledBySignal(SIGABRT), "std::bad_alloc");
}

TEST_F(FaultPoint, AMalformedRequestIsAnError) {
  const auto exits = testing::ExitedWithCode(0);
  EXPECT_EXIT(hit_and_exit("save.write", 1), exits, "^hit 1: kind 2: MOEBIUS_FAULT: must be NAME:COUNT");
  EXPECT_EXIT(hit_and_exit("save.write:0", 1), exits, "^hit 1: kind 2: MOEBIUS_FAULT: COUNT must be a number from 1");
  EXPECT_EXIT(hit_and_exit("save.write:1:boom", 1), exits,
              "^hit 1: kind 2: MOEBIUS_FAULT: the mode must be stop, throw");
}

TEST_F(FaultPoint, LogsTheNamesReached) {
  const std::string path = testing::TempDir() + "/fault_test.log";
  std::filesystem::remove(path);
  ::setenv("MOEBIUS_FAULT_LOG", path.c_str(), 1);
  EXPECT_EXIT(hit_and_exit("save.never:1", 2), testing::ExitedWithCode(0), "^$");
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text, "save.other\nsave.write\nsave.other\nsave.write\n");
}

}  // namespace
}  // namespace moebius
