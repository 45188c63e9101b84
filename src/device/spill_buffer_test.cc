#include "device/spill_buffer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {
namespace {

constexpr int64_t kAlign = SpillBuffer::kAlignBytes;

// Every byte is written and read alike, near or not, and stays what it is.
void expect_memory(Stream& s, const SpillBuffer& buffer) {
  std::vector<unsigned char> want(static_cast<size_t>(buffer.num_bytes())), got(want.size());
  for (size_t i = 0; i < want.size(); ++i) want[i] = static_cast<unsigned char>(i * 7 + i / 251);
  copy_to_device(s, buffer.data(), want.data(), buffer.num_bytes());
  synchronize(s);
  copy_to_host(s, got.data(), buffer.data(), buffer.num_bytes());
  EXPECT_EQ(got, want);
}

const std::vector<SpillBuffer::Range> kNear = {{0, 5000}, {4 * kAlign, kAlign + 17}, {9 * kAlign, 0}};

TEST(SpillBuffer, IsOneRangeOfAddresses) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  SpillBuffer buffer(DeviceKind::cpu, 40 * kAlign + 3, kNear);
  expect_memory(s, buffer);
  const SpillBuffer moved = std::move(buffer);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(moved.num_bytes(), 40 * kAlign + 3);
  expect_memory(s, moved);
}

TEST(SpillBuffer, OfTheNullDeviceHasNoMemory) {
  const SpillBuffer buffer(DeviceKind::null, int64_t{1} << 60, {{0, int64_t{1} << 59}});
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.num_bytes(), int64_t{1} << 60);
}

// How many bytes of the buffer are in memory. The resident set of the process would also count what a sanitizer
// writes down about the buffer.
int64_t resident_bytes(const SpillBuffer& buffer) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> is_resident(static_cast<size_t>((buffer.num_bytes() + page - 1) / page));
  EXPECT_EQ(::mincore(buffer.data(), static_cast<size_t>(buffer.num_bytes()), is_resident.data()), 0);
  return page * std::count_if(is_resident.begin(), is_resident.end(), [](unsigned char flags) { return flags & 1; });
}

// Pages that are never written take no memory. A page may be a huge one.
TEST(SpillBuffer, OnlyWrittenPagesTakeMemory) {
  constexpr int64_t kBytes = int64_t{64} << 30;
  const SpillBuffer buffer(DeviceKind::cpu, kBytes, {{0, kAlign}});
  auto* bytes = static_cast<char*>(buffer.data());
  bytes[0] = 1;
  bytes[kBytes - 1] = 1;
  EXPECT_GT(resident_bytes(buffer), 0);
  EXPECT_LT(resident_bytes(buffer), 32 << 20);
}

TEST(SpillBufferOnGpu, KeepsItsPartsInTheGpuAndTheRestInTheHost) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  Accelerator gpu;
  ThreadPool pool(1);
  Stream s(gpu, pool);
  constexpr int64_t kNearBytes = 64 << 20, kBytes = 512 << 20;
  synchronize(s);
  const int64_t before = gpu.info().free_bytes;
  const SpillBuffer buffer(DeviceKind::cuda, kBytes, {{0, kNearBytes}});
  const int64_t taken = before - gpu.info().free_bytes;
  EXPECT_GE(taken, kNearBytes - (8 << 20));
  EXPECT_LT(taken, kBytes / 2);  // on some machines the driver takes 66 MiB more than the part
  expect_memory(s, buffer);
  expect_memory(s, buffer);
  EXPECT_NEAR(static_cast<double>(before - gpu.info().free_bytes), static_cast<double>(taken), 8 << 20)
      << "pages of the host moved to the GPU";
}

}  // namespace
}  // namespace moebius
