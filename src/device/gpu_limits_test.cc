#include "device/gpu_limits.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(GpuLimits, HaveTheSharedMemoryOfTheirComputeCapability) {
  struct Case {
    int major, minor;
    int64_t kib;  // of a multiprocessor
  };
  for (const auto& [major, minor, kib] :
       {Case{8, 0, 164}, Case{8, 6, 100}, Case{8, 7, 164}, Case{8, 9, 100}, Case{9, 0, 228}, Case{10, 0, 228},
        Case{10, 3, 228}, Case{11, 0, 228}, Case{12, 0, 100}, Case{12, 1, 100}, Case{13, 0, 100}}) {
    const GpuLimits limits = documented_gpu_limits(major, minor, 7);
    const GpuLimits expected{.capability_major = major,
                             .capability_minor = minor,
                             .num_multiprocessors = 7,
                             .shared_bytes_per_block = (kib - 1) << 10,
                             .shared_bytes_per_multiprocessor = kib << 10};
    EXPECT_EQ(limits, expected) << major << "." << minor;
    EXPECT_GE(limits.shared_bytes_per_block, kMinSharedBytes) << major << "." << minor;
    EXPECT_EQ(limits.is_hopper(), major == 9) << major << "." << minor;
  }
}

// Each block reserves 1 KiB more than it uses.
TEST(GpuLimits, CountBlocksWithTheMemoryThatEachReserves) {
  const GpuLimits ada = documented_gpu_limits(8, 9, 128);
  EXPECT_EQ(ada.blocks_together(ada.shared_bytes_per_block), 1);
  EXPECT_EQ(ada.blocks_together(49 << 10), 2);
  EXPECT_EQ(ada.blocks_together((49 << 10) + 1), 1);
  EXPECT_EQ(ada.blocks_together(100 << 10), 0);
}

}  // namespace
}  // namespace moebius
