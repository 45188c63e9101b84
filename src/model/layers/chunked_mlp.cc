#include "model/layers/chunked_mlp.h"

#include <algorithm>

#include "model/layers/row_chunks.h"

namespace moebius {

ChunkedMlp::ChunkedMlp(const LayerContext& c, const std::string& prefix, int64_t hidden, int64_t chunk)
    : t_(c.stream_rows()), chunk_(chunk), mlp_(of_chunk(c, chunk), prefix, hidden) {
  MOEBIUS_ASSERT(t_ % chunk_ == 0);
}

void ChunkedMlp::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  saved.weights_follow = !plan.splits_backward();
  saved.chunks.resize(t_ / chunk_);
  for (size_t i = 0; i < saved.chunks.size(); ++i)
    mlp_.declare_saved(plan, fmt::format("{}.chunk{}", prefix, i), saved.chunks[i]);
}

void ChunkedMlp::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  const int64_t t = x_tD.dim(0);
  for (int64_t i = 0; i * chunk_ < t; ++i) {
    const int64_t begin = i * chunk_, end = std::min(t, begin + chunk_);
    ChunkStep of_chunk(step, begin);
    mlp_.forward(of_chunk.step, y_tD.rows(begin, end), x_tD.rows(begin, end), saved.chunks[i]);
  }
}

void ChunkedMlp::recompute(Step& /*step*/, Tensor x_tD, Saved& saved) const {
  for (int64_t i = 0; i * chunk_ < x_tD.dim(0); ++i)
    saved.chunks[i].x_tD = x_tD.rows(i * chunk_, std::min(x_tD.dim(0), (i + 1) * chunk_));
}

void ChunkedMlp::backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const {
  const int64_t t = dy_tD.dim(0);
  for (int64_t i = 0; i * chunk_ < t; ++i) {
    const int64_t begin = i * chunk_, end = std::min(t, begin + chunk_);
    Mlp::Saved& chunk = saved.chunks[i];
    ChunkStep of_chunk(step, begin);
    StackScope scope(step.stack);
    mlp_.recompute(of_chunk.step, chunk.x_tD, chunk);
    mlp_.backward_input(of_chunk.step, dx_tD.rows(begin, end), dy_tD.rows(begin, end), chunk);
    if (saved.weights_follow) mlp_.backward_weight(of_chunk.step, chunk);
  }
}

void ChunkedMlp::backward_weight(Step& step, const Saved& saved) const {
  if (saved.weights_follow) return;
  for (size_t i = 0; i < saved.chunks.size(); ++i) {
    ChunkStep of_chunk(step, static_cast<int64_t>(i) * chunk_);
    mlp_.backward_weight(of_chunk.step, saved.chunks[i]);
  }
}

std::vector<KeptTensor> ChunkedMlp::kept(const Saved& saved) {
  std::vector<KeptTensor> kept;
  for (const Mlp::Saved& chunk : saved.chunks) {
    const std::vector<KeptTensor> of_chunk = Mlp::kept(chunk);
    kept.insert(kept.end(), of_chunk.begin(), of_chunk.end());
  }
  return kept;
}

}  // namespace moebius
