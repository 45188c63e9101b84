#include "checkpoint/parts.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "checkpoint/manifest.h"
#include "io/testing.h"

namespace moebius {
namespace {

// Rank 0 may publish the folder as soon as it has seen the part: nothing in it is
// touched after that.
TEST(CheckpointParts, NothingIsWrittenAfterThePartFile) {
  const TestDir dir;
  for (int i = 0; i < 50; ++i) {
    const std::string folder = dir.path("unfinished"), published = dir.path("step" + std::to_string(i));
    std::filesystem::create_directory(folder);
    std::thread rank0([&] {
      while (!std::filesystem::exists(folder + "/rank-00001-part.json")) {
      }
      std::filesystem::rename(folder, published);
    });
    EXPECT_NO_THROW(write_part(folder, {.step = i, .num_ranks = 2}, 1));
    rank0.join();
    EXPECT_TRUE(std::filesystem::exists(published + "/rank-00001-part.json"));
  }
}

}  // namespace
}  // namespace moebius
