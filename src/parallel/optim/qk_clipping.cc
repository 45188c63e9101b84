#include "parallel/optim/qk_clipping.h"

#include <algorithm>
#include <set>

#include "ops/qk_clip/qk_clip.h"

namespace moebius {
namespace {

// Separate draws: the update's draws rounded the same elements in this step.
constexpr uint64_t kOtherSeed = 0x716b5f636c6970;  // "qk_clip"

OptimizerContext with_own_draws(OptimizerContext context) {
  context.seed ^= kOtherSeed;
  return context;
}

std::set<std::string> names_of(const MaxLogits& logits) {
  std::set<std::string> names;
  for (const MaxLogits::Layer& layer : logits.layers())
    for (const MaxLogits::Matrix& matrix : layer.matrices) names.insert(matrix.part);
  return names;
}

}  // namespace

QkClipping::QkClipping(const OptimizerContext& context, const MaxLogits& logits)
    : threshold_(static_cast<float>(context.spec.qk_clip)),
      logits_(logits),
      dp_cp_(context.mesh->group(Axis::dp_cp)),
      params_(with_own_draws(context), {}, [names = names_of(logits)](const ParamSpec& spec) {
        return std::any_of(spec.parts.begin(), spec.parts.end(),
                           [&](const ParamPart& part) { return names.contains(part.name); });
      }) {}

void QkClipping::update(Stream& s, StepStack& stack, const OptimizerStepArgs& args) {
  const Tensor mine = logits_.all();
  if (mine.empty()) return;
  if (dp_cp_.size() > 1) {
    StackScope scope(stack);
    const Tensor all = stack.alloc({dp_cp_.size(), mine.numel()}, DType::f32);
    dp_cp_.all_gather(s, all, mine.view({1, mine.numel()}));
    max_over_ranks(s, {.max_N = mine, .x_RN = all});
  }
  const std::vector<TrainedParams::OfPart> parts = params_.parts();
  for (const MaxLogits::Layer& layer : logits_.layers())
    for (const MaxLogits::Matrix& matrix : layer.matrices) {
      const auto part =
          std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return p.part->name == matrix.part; });
      if (part == parts.end()) continue;  // other ranks own all of it
      const Shape local = part->part->local_shape();
      qk_clip(s, {.tensor = part->tensor,
                  .first = part->owned.begin,
                  .cols = local.rank() == 2 ? local[1] : 1,
                  .head_rows = matrix.head_rows,
                  .root_rows = matrix.root_rows,
                  .whole_rows = matrix.whole_rows,
                  .max_logit_H = layer.max_H(),
                  .kv_group = layer.kv_group,
                  .of_keys = matrix.of_keys,
                  .threshold = threshold_,
                  .scale_1 = args.scale_1,
                  .lr_and_step_2 = args.lr_and_step_2});
    }
}

}  // namespace moebius
