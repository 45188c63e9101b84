#include "model/moe/expert_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "comm/transport/transport.h"
#include "core/trace.h"

namespace moebius {
namespace {

// Rows that rank 0 of two ranks keeps, with memory for one page of them. Nothing is sent.
class OnePageOfRows {
 public:
  OnePageOfRows() {
    rows_.add_layer(0, 0, /*in_8_bits=*/false);
    rows_.declare(plan_);
    rows_.declare_saved(plan_, "layer", held_, /*in_8_bits=*/false);
    plan_.declare(offsets_e1_, "offsets", {3}, DType::i32, Life::saved);
    plan_.bind(DeviceKind::cpu, 4096);
    rows_.init_state(s_);
    const int32_t offsets[] = {0, 50, 100};
    std::copy_n(offsets, 3, offsets_e1_.ptr<int32_t>());
  }
  // A forward pass that keeps the rows, and the beginning of its backward pass.
  template <class Join, class Compute>
  void run(Join&& join, Compute&& compute) {
    Step step{s_, plan_.stack(), batch_};
    rows_.stash(step, held_, offsets_e1_);
    rows_.unstash(step, held_, offsets_e1_, join, compute);
  }
  double spill_us() const { return 1e-3 * rows_.counts_W3().ptr<double>()[2]; }

 private:
  static ModelSpec model() {
    ModelSpec m;
    m.num_layers = 1;
    m.moe_layers = {true};
    m.hidden_size = 4;
    m.moe_intermediate_size = 4;
    m.num_experts = 4;
    m.top_k = 2;
    return m;
  }
  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  std::unique_ptr<Transport> world_ = make_dry_run_transport(0, 2);
  Mesh mesh_{{.dp = 2, .ep = 2}, *world_};
  MemoryPlan plan_;
  ExpertRows rows_{
      model(), mesh_, {.budget = 1e-9, .max_tokens = 50, .dispatcher = DispatcherKind::direct, .dtype = DType::f32}};
  ExpertRows::Held held_;
  Tensor offsets_e1_;
  MicroBatch batch_;
};

// Rows of other ranks may arrive later than the backward pass needs them. That time does not count as spill time.
TEST(ExpertRows, TheTimeOfASpillLeavesOutTheWaitForRows) {
  OnePageOfRows rows;
  double joined_us = 0;
  std::vector<int32_t> computed;
  const auto join = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    joined_us = now_us();
  };
  rows.run(join, [&](Step&, const Tensor& offsets_e1) {
    EXPECT_GT(joined_us, 0) << "rows are computed before they have come";
    computed.assign(offsets_e1.ptr<int32_t>(), offsets_e1.ptr<int32_t>() + 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const double since_us = now_us() - joined_us;
  EXPECT_EQ(computed, (std::vector<int32_t>{64, 64, 100})) << "a page has 64 rows";
  EXPECT_GE(rows.spill_us(), 1000);
  EXPECT_LE(rows.spill_us(), since_us);
}

}  // namespace
}  // namespace moebius
