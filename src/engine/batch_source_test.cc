#include "engine/batch_source.h"

#include <gtest/gtest.h>

#include "engine/batch_buffers.h"

namespace moebius {
namespace {

// The token encodes its sequence and its place.
struct Numbered final : SequenceSource {
  using SequenceSource::SequenceSource;
  int32_t token(int64_t step, int64_t sequence, int64_t i) const override {
    return static_cast<int32_t>(1000 * step + 100 * sequence + i);
  }
};

std::vector<int32_t> ids(const Tensor& t) { return {t.ptr<int32_t>(), t.ptr<int32_t>() + t.numel()}; }
std::vector<float> weights(const Tensor& t) { return {t.ptr<float>(), t.ptr<float>() + t.numel()}; }

class SequenceSourceTest : public ::testing::Test {
 protected:
  SequenceSourceTest() {
    run_.train.seq_len = 4;
    run_.train.micro_batch = 1;
    run_.train.global_batch = 4;
    run_.train.mtp_coeff = 0.5;
  }
  // Micro-batch m of step 2 on a rank with this share.
  const MicroBatch& filled(const DataShare& share, int64_t m, int64_t num_mtp = 0) {
    plan_ = std::make_unique<MemoryPlan>();
    const BatchShape shape{.batch = 1, .seq = 4 / share.cp, .num_mtp = num_mtp};
    batches_ = std::make_unique<BatchBuffers>(*plan_, shape, 2, /*share_buffer=*/false);
    plan_->bind(DeviceKind::cpu, 0);
    batches_->bind(*plan_, DeviceKind::cpu);
    batches_->set_lr_and_step(/*step=*/2, /*lr=*/0.25);
    Numbered(run_, share).fill(batches_->host(m), m);
    return batches_->host(m);
  }

  RunSpec run_;
  std::unique_ptr<MemoryPlan> plan_;
  std::unique_ptr<BatchBuffers> batches_;
};

TEST_F(SequenceSourceTest, TargetsAreTheTokensThatFollow) {
  const MicroBatch& batch = filled({.dp_rank = 1, .dp = 2}, 1);  // the fourth sequence
  EXPECT_EQ(ids(batch.token_T), (std::vector<int32_t>{2300, 2301, 2302, 2303}));
  EXPECT_EQ(ids(batch.target_T), (std::vector<int32_t>{2301, 2302, 2303, 2304}));
  EXPECT_EQ(weights(batch.weight_T), std::vector<float>(4, 1));
  EXPECT_EQ(ids(batch.pos_T), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(batch.scalars.loss_scale[0], 1.0 / 16);
  EXPECT_EQ(batch.scalars.total_tokens, 16);
  EXPECT_EQ(batch.scalars.draw[1], 12) << "the first token in the global batch";
  EXPECT_TRUE(batch.training);
}

TEST_F(SequenceSourceTest, ADepthHasNoTargetAfterTheSequence) {
  const MicroBatch& batch = filled({.dp = 2}, 0, /*num_mtp=*/2);
  EXPECT_EQ(ids(batch.targets(2).target_T), (std::vector<int32_t>{2003, 2004, 0, 0}));
  EXPECT_EQ(weights(batch.targets(2).weight_T), (std::vector<float>{1, 1, 0, 0}));
  EXPECT_EQ(batch.scalars.loss_scale[2], 1.0 / 8);
  EXPECT_EQ(batch.scalars.objective_scale[2], 0.25f / 8);
}

// A context rank has the first and the last of 2 cp pieces.
TEST_F(SequenceSourceTest, AContextRankHasItsPieces) {
  EXPECT_EQ(ids(filled({.dp = 2, .cp_rank = 0, .cp = 2}, 0).token_T), (std::vector<int32_t>{2000, 2003}));
  EXPECT_EQ(ids(filled({.dp = 2, .cp_rank = 1, .cp = 2}, 0).target_T), (std::vector<int32_t>{2002, 2003}));
}

// Ops read the scalars in memory: the views are of what upload() brought there.
TEST_F(SequenceSourceTest, UploadCopiesTheScalarsToTheDevice) {
  filled({.dp = 2}, 1, /*num_mtp=*/1);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  const MicroBatch& batch = batches_->on_device(1);
  EXPECT_EQ(*batch.objective_scale_1(0).ptr<float>(), 0);
  batches_->upload(s, 0, 2);
  EXPECT_EQ(*batch.objective_scale_1(0).ptr<float>(), 1.0f / 16);
  EXPECT_EQ(*batch.objective_scale_1(1).ptr<float>(), 0.5f / 12);
  EXPECT_EQ(batch.draw_2().ptr<int64_t>()[0], 2);
  EXPECT_EQ(batch.draw_2().ptr<int64_t>()[1], 8);
  EXPECT_EQ(batch.lr_and_step_2().ptr<double>()[0], 0.25);
  EXPECT_EQ(batch.lr_and_step_2().ptr<double>()[1], 2);
}

}  // namespace
}  // namespace moebius
