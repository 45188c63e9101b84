#include "model/lora/adapter_dropout.h"

namespace moebius {

AdapterDropout::AdapterDropout(const LayerContext& c, const ParamSpec& w, const std::vector<AdapterBlock>& blocks)
    : rate_(c.lora.dropout), tokens_(c) {
  const int64_t columns_here = w.shape[w.shape.rank() - 1];
  draw_ = {.seed = c.seed, .num_columns = columns_here, .rate = rate_};
  if (!w.parts.empty()) {
    const ParamPart& part = w.parts.front();
    draw_.num_columns = part.shape[1];
    if (part.shard.dim == 1) draw_.first_column = part.shard.begin;
  }
  if (w.shape.rank() == 3) {
    draw_.first_expert = c.mesh.place().ep * w.shape[0];
    draw_.num_experts = c.model.num_experts;
  }
  for (const AdapterBlock& block : blocks) matrices_.push_back(key_of(block.name.c_str()));
}

void AdapterDropout::apply(Step& step, const Apply& a) const {
  DropoutDraw draw = draw_;
  draw.draw_2 = step.batch.draw_2();
  draw.index_N = a.index;
  draw.matrix = matrices_[static_cast<size_t>(a.block)];
  low_rank_dropout(
      step.stream,
      {.y_RK = a.y, .x_TK = a.x, .draw = draw, .gather = a.gather, .accumulate = a.accumulate, .rows = a.rows});
}

}  // namespace moebius
