#include "memory/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace moebius {
namespace {

TEST(MemoryPlan, TensorsDoNotOverlapAndHaveTheSameOffsetsInEveryLife) {
  MemoryPlan plan;
  const Shape shapes[] = {{3, 5}, {1}, {257}, {0}, {256}, {7, 2, 3}};
  std::vector<Tensor> params(std::size(shapes)), masters(std::size(shapes));
  for (size_t i = 0; i < std::size(shapes); ++i) {
    plan.declare(params[i], "p", shapes[i], DType::bf16, Life::param);
    plan.declare(masters[i], "m", shapes[i], DType::f32, Life::master);
  }
  EXPECT_EQ(params[0].data, nullptr);
  EXPECT_EQ(params[0].device, DeviceKind::null);
  plan.bind(DeviceKind::cpu, 4096);
  for (size_t i = 1; i < params.size(); ++i) {
    EXPECT_GE(params[i].ptr<bf16>(), params[i - 1].ptr<bf16>() + params[i - 1].numel());
    EXPECT_EQ(params[i].ptr<bf16>() - params[0].ptr<bf16>(), masters[i].ptr<float>() - masters[0].ptr<float>());
  }
  EXPECT_EQ(plan.bytes(Life::master), 4 * 256 * 6);  // 1+1+2+0+1+1 blocks of 256
  EXPECT_EQ(plan.total_bytes(), plan.bytes(Life::param) + plan.bytes(Life::master) + 4096);
  EXPECT_EQ(plan.stack().capacity(), 4096);
  EXPECT_NE(plan.table().find("largest m f32[257]"), std::string::npos) << plan.table();
}

// Rows that are not planned have addresses, and no bytes.
TEST(MemoryPlan, UnplannedRowsHaveAddressesAndTakeNoMemory) {
  MemoryPlan plan;
  Tensor few, all, none;
  plan.declare_rows(few, "few", {int64_t{1} << 30, 64}, DType::bf16, 1000);  // 128 GiB, of which 125 KiB are planned
  plan.declare_rows(all, "all", {1000, 3}, DType::f32, 1000);
  plan.declare_rows(none, "none", {7, 5}, DType::f32, 0);
  EXPECT_EQ(plan.bytes(Life::rows), (2 + 1 + 0) * SpillBuffer::kAlignBytes);
  EXPECT_EQ(plan.total_bytes(), plan.bytes(Life::rows));
  EXPECT_EQ(plan.spill_bytes(), (int64_t{128} << 30) + 2 * SpillBuffer::kAlignBytes - plan.bytes(Life::rows));
  EXPECT_NE(plan.table().find("beyond: 128.00 GiB of host memory"), std::string::npos) << plan.table();
  plan.bind(DeviceKind::cpu, 0);
  few.ptr<bf16>()[few.numel() - 1] = to_bf16(1);
  all.ptr<float>()[2999] = none.ptr<float>()[34] = 1;
  EXPECT_EQ(to_f32(few.ptr<bf16>()[few.numel() - 1]), 1);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(all.data) % 256, 0);
}

TEST(MemoryPlan, JoinedTensorsAreOnePiece) {
  MemoryPlan plan;
  Tensor a, b, c, d;
  plan.declare(a, "a", {3}, DType::f32, Life::grad);
  plan.declare(b, "b", {400}, DType::f32, Life::grad);
  plan.declare(c, "c", {5}, DType::f32, Life::grad);
  plan.declare(d, "d", {7}, DType::f32, Life::grad);
  plan.join({&c, &a}, 3 * MemoryPlan::kAlign);  // 2 blocks of 256, and one that stays free
  EXPECT_EQ(MemoryPlan::joined_numel({&c, &a}, 3 * MemoryPlan::kAlign), 3 * 256);
  plan.bind(DeviceKind::cpu, 0);
  EXPECT_EQ(a.ptr<float>() - c.ptr<float>(), 256);
  EXPECT_EQ(plan.bytes(Life::grad), 4 * (512 + 256 + 3 * 256));
  const float* end = c.ptr<float>() + 3 * 256;
  for (const Tensor* other : {&b, &d})
    EXPECT_TRUE(other->ptr<float>() >= end || other->ptr<float>() + other->numel() <= c.ptr<float>());
}

// A tensor after reuse() begins where its life does, and the most counts.
TEST(MemoryPlan, ALifeCanBeReused) {
  MemoryPlan plan;
  Tensor first, second, third, other;
  plan.reuse(Life::layer_grad);
  plan.declare(first, "first", {300}, DType::f32, Life::layer_grad);
  plan.declare(other, "other", {3}, DType::f32, Life::grad);
  plan.reuse(Life::layer_grad);
  plan.declare(second, "second", {100}, DType::f32, Life::layer_grad);
  plan.declare(third, "third", {10}, DType::f32, Life::layer_grad);
  plan.join({&other}, MemoryPlan::kAlign);  // places all again
  EXPECT_EQ(plan.bytes(Life::layer_grad), 4 * 512);
  EXPECT_EQ(plan.bytes(Life::grad), 4 * 256);
  plan.bind(DeviceKind::cpu, 0);
  EXPECT_EQ(second.data, first.data);
  EXPECT_EQ(third.ptr<float>() - second.ptr<float>(), 256);
}

TEST(MemoryPlan, HostMemoryDoesNotCountAsDeviceMemory) {
  MemoryPlan plan;
  Tensor here, there;
  plan.declare(here, "here", {3}, DType::f32, Life::optimizer);
  plan.declare(there, "there", {600}, DType::f32, Life::host);
  plan.bind(DeviceKind::cpu, 0);
  EXPECT_EQ(plan.bytes(Life::host), 4 * 768);
  EXPECT_EQ(plan.device_bytes(), 4 * 256);
  EXPECT_EQ(there.ptr<float>()[599], 0);
  EXPECT_NE(plan.table().find("without what is kept in host memory"), std::string::npos) << plan.table();
}

TEST(MemoryPlan, DeclaringAfterBindIsABug) {
  MemoryPlan plan;
  plan.bind(DeviceKind::null, 0);
  Tensor late;
  EXPECT_THROW(plan.declare(late, "late", {1}, DType::f32, Life::param), Error);
}

}  // namespace
}  // namespace moebius
