#include "device/peer_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <iterator>
#include <optional>

namespace moebius {
namespace {

TEST(PeerMemory, IsZeroedAndSharedWithinAProcess) {
  std::optional<PeerMemory> mine(PeerMemory(DeviceKind::cpu, 5000));
  auto* bytes = static_cast<unsigned char*>(mine->data());
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(bytes[i], 0);
  const PeerMemory theirs(mine->handle_for(this_process()));
  EXPECT_EQ(theirs.data(), mine->data());
  EXPECT_EQ(theirs.num_bytes(), 5000);
  bytes[4999] = 7;
  mine.reset();  // the other one keeps it
  EXPECT_EQ(static_cast<unsigned char*>(theirs.data())[4999], 7);
}

// A child writes to the memory of its parent, which it knows by the handle alone.
TEST(PeerMemory, IsSharedWithAnotherProcess) {
  const PeerMemory mine(DeviceKind::cpu, 5000);
  PeerHandle handle = mine.handle_for({});
  const pid_t child = ::fork();
  if (child == 0) {
    const PeerMemory theirs(handle);
    const bool elsewhere = theirs.data() != mine.data() && theirs.num_bytes() == 5000;
    std::memset(theirs.data(), elsewhere ? 3 : 0, 5000);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(static_cast<unsigned char*>(mine.data())[i], 3);
}

int num_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

// A rank opens the memory of many others, and would soon reach the limit of open files.
TEST(PeerMemory, OfAnotherProcessHoldsNoDescriptor) {
  const PeerMemory mine(DeviceKind::cpu, 5000);
  const PeerHandle handle = mine.handle_for({});
  const pid_t child = ::fork();
  if (child == 0) {
    const int before = num_descriptors();
    const PeerMemory theirs(handle);
    std::memset(theirs.data(), 3, 5000);
    ::_exit(num_descriptors() - before);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(static_cast<unsigned char*>(mine.data())[4999], 3);
}

TEST(PeerMemory, ReportsWhyItCannotBeMapped) {
  const PeerMemory mine(DeviceKind::cpu, 64);
  PeerHandle handle = mine.handle_for({});
  handle.descriptor = 999999;
  handle.process.number = ::getppid();
  const auto why = [&] {
    try {
      const PeerMemory mapped(handle);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return std::string(e.what());
    }
    return std::string("it was mapped");
  };
  EXPECT_THAT(why(), ::testing::StartsWith(
                         fmt::format("peer memory: memory of process {} cannot be mapped: ", handle.process.number)));
  handle.process.pid_namespace = 1;
  EXPECT_THAT(why(), ::testing::HasSubstr("numbers processes in another way (another container or machine)"));
}

TEST(PeerMemory, OfNoBytesOrANullDeviceHasNoAddress) {
  EXPECT_EQ(PeerMemory().data(), nullptr);
  EXPECT_EQ(PeerMemory(DeviceKind::null, 100).data(), nullptr);
  EXPECT_EQ(PeerMemory(DeviceKind::cpu, 0).data(), nullptr);
}

}  // namespace
}  // namespace moebius
