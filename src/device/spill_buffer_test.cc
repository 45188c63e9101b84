#include "device/spill_buffer.h"

#include <gtest/gtest.h>

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

// Pages that nobody writes take no memory: more than any machine has.
TEST(SpillBuffer, TakesWhatIsUsed) {
  const int64_t before = current_rss_bytes();
  const SpillBuffer buffer(DeviceKind::cpu, int64_t{1} << 42, {{0, kAlign}});
  auto* bytes = static_cast<char*>(buffer.data());
  bytes[0] = 1;
  bytes[(int64_t{1} << 42) - 1] = 1;
  EXPECT_LT(current_rss_bytes() - before, 32 << 20);
}

TEST(SpillBufferOnGpu, KeepsItsPartsInTheGpuAndTheRestInTheHost) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  Accelerator gpu;
  ThreadPool pool(1);
  Stream s(gpu, pool);
  constexpr int64_t kNearBytes = 64 << 20, kBytes = 160 << 20;
  synchronize(s);
  const int64_t before = gpu.info().free_bytes;
  const SpillBuffer buffer(DeviceKind::cuda, kBytes, {{0, kNearBytes}});
  const int64_t taken = before - gpu.info().free_bytes;
  EXPECT_NEAR(static_cast<double>(taken), kNearBytes, 8 << 20);
  expect_memory(s, buffer);
  expect_memory(s, buffer);
  EXPECT_NEAR(static_cast<double>(before - gpu.info().free_bytes), static_cast<double>(taken), 8 << 20)
      << "pages of the host moved to the GPU";
}

}  // namespace
}  // namespace moebius
