// Every build plans the same scratch for a GPU, with and without CUDA.
#include "ops/experts/experts_scratch.h"

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

TEST(ExpertsScratch, IsKnownWithoutAGpu) {
  ThreadPool pool(1);
  const Stream s(DeviceKind::null, pool, nullptr, DeviceKind::cuda);
  const auto bf16 = [](const Shape& shape) { return testing::null_tensor(shape, DType::bf16); };
  EXPECT_EQ(ExpertUp::scratch_bytes({}, s), 0);
  EXPECT_EQ(ExpertDown::scratch_bytes({}, s), 0);
  EXPECT_EQ(DExpertUp::scratch_bytes({}, s), 0);
  DExpertDown down;
  down.sa_RF = bf16({1000, 65});
  down.dweight_R = testing::null_tensor({1000});
  EXPECT_EQ(DExpertDown::scratch_bytes(down, s), 2 * 1000 * 4);  // two tiles of 64 columns
  ExpertWgrad wgrad;
  wgrad.dw_eMN = testing::null_tensor({4, 256, 128});
  EXPECT_EQ(ExpertWgrad::scratch_bytes(wgrad, s), 0);
  wgrad.dw_eMN = bf16({4, 256, 128});
  EXPECT_EQ(ExpertWgrad::scratch_bytes(wgrad, s), int64_t{144} * 128 * 256 * 4);
}

}  // namespace
}  // namespace moebius
