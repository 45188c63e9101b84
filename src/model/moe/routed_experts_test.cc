// The interface of an MoE layer to its experts: saved tensors of one kind are refused by another kind.
#include "model/moe/routed_experts.h"

#include <gtest/gtest.h>

#include <typeinfo>

#include "model/moe/moe_testing.h"

namespace moebius {
namespace {

struct SavedOfAnotherKind final : RoutedExperts::Saved {};

TEST(RoutedExperts, RefuseTheSavedTensorsOfAnotherKind) {
  Mesh mesh(MeshShape{});
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training};
  const auto experts = make_routed_experts(LayerContext{.params = params,
                                                        .plan = plan,
                                                        .model = testing::moe_model({}),
                                                        .balance = BalanceSpec{},
                                                        .mesh = mesh,
                                                        .rope_table_Pd = Tensor{},
                                                        .precision = PrecisionSpec{},
                                                        .dtype = DType::f32,
                                                        .shape = {.batch = 2, .seq = 8}},
                                           "mlp");
  const auto own = experts->declare_saved(plan, "mlp");
  ThreadPool pool{1};
  Stream null(DeviceKind::null, pool);
  StepStack counted(DeviceKind::null, nullptr, 0);
  MicroBatch batch;
  Step step{null, counted, batch};
  EXPECT_NO_THROW(experts->recompute(step, Tensor{}, *own));
  SavedOfAnotherKind other;
  EXPECT_THROW(experts->recompute(step, Tensor{}, other), std::bad_cast);
  EXPECT_THROW(experts->forward(step, Tensor{}, Tensor{}, Route{}, other), std::bad_cast);
  EXPECT_THROW(experts->backward_input(step, Tensor{}, Tensor{}, Tensor{}, other), std::bad_cast);
  EXPECT_THROW(experts->backward_weight(step, other), std::bad_cast);
}

}  // namespace
}  // namespace moebius
