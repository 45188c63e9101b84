#include "model/moe/chunked_experts.h"

#include <algorithm>

#include "model/layers/row_chunks.h"
#include "ops/permute/index_rows.h"

namespace moebius {
namespace {

constexpr int64_t kLongest = 32768, kMaxOfAllRanks = 262144;

ChunkedExperts::Saved& own(RoutedExperts::Saved& saved) { return dynamic_cast<ChunkedExperts::Saved&>(saved); }

}  // namespace

int64_t expert_chunk(int64_t T, int64_t num_ranks) {
  const int64_t longest = std::min(kLongest, std::max<int64_t>(1, kMaxOfAllRanks / num_ranks));
  for (int64_t n = div_ceil(T, longest); n > 0 && T / n >= div_ceil(longest, 4); ++n)
    if (T % n == 0) return T / n;
  return T;
}

int64_t expert_chunk(int64_t T, const LoraSpec& lora, int64_t num_ranks) {
  return lora.is_on() && lora.dropout > 0 ? T : expert_chunk(T, num_ranks);
}

ChunkedExperts::ChunkedExperts(const LayerContext& c, std::unique_ptr<RoutedExperts> experts, int64_t chunk)
    : T_(c.stream_rows()), K_(c.model.top_k), E_(c.model.num_experts), chunk_(chunk), experts_(std::move(experts)) {
  MOEBIUS_ASSERT(T_ % chunk_ == 0);
}

std::unique_ptr<RoutedExperts::Saved> ChunkedExperts::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto saved = std::make_unique<Saved>();
  saved->weights_follow = !plan.splits_backward();
  saved->chunks.resize(T_ / chunk_);
  for (size_t i = 0; i < saved->chunks.size(); ++i) {
    const std::string name = fmt::format("{}.chunk{}", prefix, i);
    Chunk& chunk = saved->chunks[i];
    const auto ints = [&](Tensor& t, const char* what, Shape shape) {
      plan.declare(t, name + what, shape, DType::i32, Life::saved);
    };
    ints(chunk.route.counts_E, ".counts", {E_});
    ints(chunk.route.offsets_E1, ".offsets", {E_ + 1});
    ints(chunk.route.row_token_R, ".row_token", {chunk_ * K_});
    ints(chunk.route.row_pair_R, ".row_pair", {chunk_ * K_});
    ints(chunk.route.pair_row_TK, ".pair_row", {chunk_, K_});
    chunk.experts = experts_->declare_saved(plan, name);
  }
  return saved;
}

Route ChunkedExperts::route_of(Step& step, const Chunk& chunk, const Route& whole, int64_t begin, int64_t end) const {
  const int64_t T = end - begin;
  Route route = chunk.route;
  route.topk_TK = whole.topk_TK.rows(begin, end);
  route.weight_TK = whole.weight_TK.rows(begin, end);
  route.row_token_R = route.row_token_R.rows(0, T * K_);
  route.row_pair_R = route.row_pair_R.rows(0, T * K_);
  route.pair_row_TK = route.pair_row_TK.rows(0, T);
  StackScope scope(step.stack);
  index_rows(step.stream, {.counts_e = route.counts_E,
                           .offsets_e1 = route.offsets_E1,
                           .row_token_R = route.row_token_R,
                           .row_pair_R = route.row_pair_R,
                           .pair_row_TK = route.pair_row_TK,
                           .scratch = step.alloc_bytes(IndexRows::scratch_bytes(T, E_, step.stream)),
                           .topk_TK = route.topk_TK,
                           .kept_TK = whole.pair_row_TK.rows(begin, end)});
  return route;
}

void ChunkedExperts::forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& base,
                             const ConcurrentWork& concurrent) const {
  Saved& saved = own(base);
  const int64_t T = x_TD.dim(0);
  if (T == 0 && concurrent) concurrent();
  for (int64_t i = 0; i * chunk_ < T; ++i) {
    const int64_t begin = i * chunk_, end = std::min(T, begin + chunk_);
    Chunk& chunk = saved.chunks[i];
    ChunkStep of_chunk(step, begin);
    StackScope scope(step.stack);
    experts_->forward(of_chunk.step, y_TD.rows(begin, end), x_TD.rows(begin, end),
                      route_of(step, chunk, route, begin, end), *chunk.experts, i == 0 ? concurrent : ConcurrentWork());
  }
}

void ChunkedExperts::recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& base) const {
  Saved& saved = own(base);
  for (int64_t i = 0; i * chunk_ < x_TD.dim(0); ++i) {
    const int64_t begin = i * chunk_, end = std::min(x_TD.dim(0), begin + chunk_);
    ChunkStep of_chunk(step, begin);
    experts_->recompute(of_chunk.step, x_TD.rows(begin, end), *saved.chunks[i].experts);
  }
}

void ChunkedExperts::backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                                    RoutedExperts::Saved& base) const {
  Saved& saved = own(base);
  const int64_t T = dy_TD.dim(0);
  for (int64_t i = 0; i * chunk_ < T; ++i) {
    const int64_t begin = i * chunk_, end = std::min(T, begin + chunk_);
    RoutedExperts::Saved& experts = *saved.chunks[i].experts;
    ChunkStep of_chunk(step, begin);
    StackScope scope(step.stack);
    const Tensor dx = dx_TD.rows(begin, end), dweight = dweight_TK.rows(begin, end), dy = dy_TD.rows(begin, end);
    if (saved.weights_follow)
      experts_->backward(of_chunk.step, dx, dweight, dy, experts, ConcurrentWork());
    else
      experts_->backward_input(of_chunk.step, dx, dweight, dy, experts);
  }
}

void ChunkedExperts::backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& base,
                              const ConcurrentWork& concurrent) const {
  if (concurrent) concurrent();
  backward_input(step, dx_TD, dweight_TK, dy_TD, base);
  backward_weight(step, base);
}

void ChunkedExperts::backward_weight(Step& step, const RoutedExperts::Saved& base) const {
  const auto& saved = dynamic_cast<const Saved&>(base);
  if (saved.weights_follow) return;
  for (size_t i = 0; i < saved.chunks.size(); ++i) {
    ChunkStep of_chunk(step, static_cast<int64_t>(i) * chunk_);
    experts_->backward_weight(of_chunk.step, *saved.chunks[i].experts);
  }
}

}  // namespace moebius
