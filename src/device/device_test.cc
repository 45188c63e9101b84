#include "device/device.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace moebius {
namespace {

// A scratch folder with the files below / that report the available memory.
class FakeRoot {
 public:
  FakeRoot() : path_(testing::TempDir() + "/fake_root_" + std::to_string(getpid())) {
    write("proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:    4000 kB\n");
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_ + "/" + name).parent_path());
    std::ofstream(path_ + "/" + name) << text;
  }

 private:
  std::string path_;
};

TEST(AvailableMemory, IsTheLeastOfTheMachineAndItsGroups) {
  const FakeRoot root;
  EXPECT_EQ(available_memory_bytes(root.path()), 4000 * 1024);
  // Version 2: this group has no limit, the group around it has one;
  // the inactive page cache counts as free.
  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/memory.max", "max\n");
  EXPECT_EQ(available_memory_bytes(root.path()), 4000 * 1024);
  root.write("sys/fs/cgroup/job/memory.max", "3000000\n");
  root.write("sys/fs/cgroup/job/memory.current", "1000000\n");
  root.write("sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 200000\n");
  EXPECT_EQ(available_memory_bytes(root.path()), 2200000);
  // Version 1, seen from inside a container: the path is the host's, the group is the root.
  root.write("proc/self/cgroup", "4:memory:/docker/x\n0::/\n");
  EXPECT_EQ(available_memory_bytes(root.path()), 4000 * 1024);
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n");
  EXPECT_EQ(available_memory_bytes(root.path()), 0);
}

TEST(AvailableMemory, OfThisMachine) {
  EXPECT_GT(available_memory_bytes(), 1 << 20);
  EXPECT_EQ(available_memory_bytes("/nowhere"), INT64_MAX);  // not known, so no reason to refuse
}

}  // namespace
}  // namespace moebius
