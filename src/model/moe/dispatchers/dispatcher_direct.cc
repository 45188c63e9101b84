#include "model/moe/dispatchers/dispatcher_direct.h"

#include <algorithm>

#include "config/dispatcher_choice.h"
#include "device/accelerator.h"
#include "model/moe/expert_rows.h"
#include "ops/dispatch/dispatch.h"
#include "ops/elementwise/elementwise.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/local_pairs.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

DirectHandle& own(DispatchHandle& handle) { return static_cast<DirectHandle&>(handle); }
const DirectHandle& own(const DispatchHandle& handle) { return static_cast<const DirectHandle&>(handle); }

DirectWindow& window_of(const DispatcherSpec& spec) {
  MOEBIUS_CHECK(usage, spec.window != nullptr, "the direct dispatcher needs a window; make one for the layers");
  return *spec.window;
}

}  // namespace

DirectDispatcher::DirectDispatcher(const DispatcherSpec& spec)
    : spec_(spec),
      window_(window_of(spec)),
      W_(window_.ranks().size()),
      P_(spec.mesh->shape().ep),
      etp_(spec.mesh->shape().etp),
      e_(spec.num_experts / P_),
      rank_(window_.ranks().rank()),
      J_(std::min(spec.top_k, P_)),
      L_(std::min(spec.top_k, e_)) {
  MOEBIUS_ASSERT(!spec.sends_all || J_ == P_);
}

int64_t DirectDispatcher::max_rows(int64_t T) const {
  return max_expert_rows(spec_.mesh->shape(), spec_.num_experts, spec_.top_k, T, /*rows_factor=*/0);
}

std::unique_ptr<DispatchHandle> DirectDispatcher::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto handle = std::make_unique<DirectHandle>();
  DirectHandle& d = *handle;
  const int64_t T = spec_.max_tokens, N = W_ * T;
  const auto ints = [&](Tensor& t, const char* name, Shape shape) {
    plan.declare(t, prefix + name, shape, DType::i32, Life::saved);
  };
  ints(d.dest_TJ, ".dest", {T, J_});
  ints(d.row_TJ, ".row_there", {T, J_});
  ints(d.back_row_TB, ".back_row", {T, J_ * etp_});
  ints(d.arrive_W1, ".arrive", {W_ + 1});
  ints(d.back_W, ".back", {W_});
  ints(d.rows.offsets_e1, ".offsets", {e_ + 1});
  ints(d.rows.token_R, ".row_token", {max_rows(T)});
  ints(d.pair_row_NL, ".pair_row", {N, L_});
  plan.declare(d.weight_NL, prefix + ".weight", {N, L_}, DType::f32, Life::saved);
  return handle;
}

void DirectDispatcher::round(Step& step, const char* phase) const {
  window_.round(step.stream, {.phase = phase, .layer = spec_.layer});
}

void DirectDispatcher::begin(Step& step, DirectHandle& d) const {
  if (!d.has_begun) round(step, "begin");
  d.has_begun = true;
}

void DirectDispatcher::announce(Step& step, const Route& route, DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  d.route = route;
  window_.connect(step.stream);
  find_places(step, d);
  exchange_routes(step, d);
  d.has_begun = true;
}

void DirectDispatcher::find_places(Step& step, DirectHandle& d) const {
  if (!spec_.sends_all) return exchange_counts(step, d);
  const int64_t T = d.route.topk_TK.dim(0);
  contiguous_places(step.stream, {.dest_TJ = d.dest_TJ.rows(0, T),
                                  .row_TJ = d.row_TJ.rows(0, T),
                                  .back_row_TB = d.back_row_TB.rows(0, T),
                                  .arrive_W1 = d.arrive_W1,
                                  .back_W = d.back_W,
                                  .rank = rank_});
}

void DirectDispatcher::exchange_counts(Step& step, DirectHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = d.route.topk_TK.dim(0);
  const Tensor slot_TJ = step.alloc({T, J_}, DType::i32), count_P = step.alloc({P_}, DType::i32);
  destinations(step.stream, {.dest_TJ = d.dest_TJ.rows(0, T),
                             .slot_TJ = slot_TJ,
                             .count_P = count_P,
                             .scratch = step.alloc_bytes(Destinations::scratch_bytes(T, P_, step.stream)),
                             .topk_TK = d.route.topk_TK,
                             .kept_TK = d.route.pair_row_TK,
                             .experts_of_rank = e_});
  push_to_all(step.stream, {.sent_1 = window_.sent_1(),
                            .x_M = count_P,
                            .bases_W = window_.bases_W(),
                            .offset = window_.counts().offset,
                            .rank = rank_});
  round(step, "announce (counts)");
  dispatch_places(step.stream, {.row_TJ = d.row_TJ.rows(0, T),
                                .back_row_TB = d.back_row_TB.rows(0, T),
                                .arrive_W1 = d.arrive_W1,
                                .back_W = d.back_W,
                                .dest_TJ = d.dest_TJ.rows(0, T),
                                .slot_TJ = slot_TJ,
                                .counts_WP = window_.here(window_.counts()),
                                .rank = rank_});
}

void DirectDispatcher::exchange_routes(Step& step, DirectHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = d.route.topk_TK.dim(0), N = W_ * T;
  push_routes(step.stream, {.sent_1 = window_.sent_1(),
                            .topk_TK = d.route.topk_TK,
                            .kept_TK = d.route.pair_row_TK,
                            .weight_TK = d.route.weight_TK,
                            .dest_TJ = d.dest_TJ.rows(0, T),
                            .row_TJ = d.row_TJ.rows(0, T),
                            .bases_W = window_.bases_W(),
                            .offset = window_.routes().offset,
                            .rank = rank_,
                            .etp = etp_,
                            .experts_of_rank = e_});
  round(step, "announce (routes)");
  index_routes(step.stream, {.offsets_e1 = d.rows.offsets_e1,
                             .row_token_R = d.rows.token_R,
                             .pair_row_NL = d.pair_row_NL.rows(0, N),
                             .weight_NL = d.weight_NL.rows(0, N),
                             .scratch = step.alloc_bytes(IndexRows::scratch_bytes(N, e_, step.stream)),
                             .routes_N2L = window_.here(window_.routes()).rows(0, N),
                             .arrive_GV = d.arrive_W1.view({1, W_ + 1}),
                             .first_expert = e_ * spec_.mesh->place().ep});
}

void DirectDispatcher::push(Step& step, const DirectWindow::Array& to, Tensor x_TD, const DirectHandle& d,
                            const RowDistances& of) const {
  const int64_t T = x_TD.dim(0);
  push_rows(step.stream, {.sent_1 = window_.sent_1(),
                          .x_TD = x_TD,
                          .dest_TJ = d.dest_TJ.rows(0, T),
                          .row_TJ = d.row_TJ.rows(0, T),
                          .bases_W = window_.bases_W(),
                          .offset = to.offset,
                          .rank = rank_,
                          .etp = etp_,
                          .of = of,
                          .windows = spec_.sends_all ? window_.windows() : std::vector<std::byte*>{}});
}

// Copy engines need no multiprocessor. Rounds need one, and products leave multiprocessors free in pairs.
int DirectDispatcher::sending_multiprocessors(const Step& step) const {
  const bool by_engines =
      spec_.sends_all && step.stream.device() == DeviceKind::cuda && step.stream.accelerator().capture() != nullptr;
  return by_engines ? 2 : SideWork::kMultiprocessors;
}

// Returns the rows that arrived at `at`. They are as wide as those of x, which may be narrower than the window's.
Tensor DirectDispatcher::arrived(const DirectWindow::Array& at, const Tensor& x_TD) const {
  const int64_t N = W_ * x_TD.dim(0), D = x_TD.dim(1);
  const Tensor all = window_.here(at);
  return all.view({all.numel()}).rows(0, N * D).view({N, D});
}

Dispatched DirectDispatcher::dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const {
  return dispatch_part(step, x_TD, {}, handle);
}

Dispatched DirectDispatcher::dispatch_part(Step& step, Tensor x_TD, const RowDistances& of,
                                           DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  const int64_t T = x_TD.dim(0);
  begin(step, d);
  push(step, window_.tokens(), x_TD, d, of);
  round(step, "dispatch");
  return {.source = arrived(window_.tokens(), x_TD), .rows = {d.rows.offsets_e1, d.rows.token_R.rows(0, max_rows(T))}};
}

// The index is sent in the memory of the routes. The round before it ensures that all ranks have unpacked their routes.
void DirectDispatcher::dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const {
  StackScope scope(step.stack);
  const int64_t T = index_T.dim(0), N = all_N.dim(0);
  const Tensor routes_T2L = step.alloc({T, 2 * L_}, DType::i32);
  fill_zero(step.stream, routes_T2L);
  copy_columns(step.stream, {.to_TA = routes_T2L, .from_TB = index_T.view({T, 1}), .count = 1});
  round(step, "token index (begin)");
  push(step, window_.routes(), routes_T2L, own(handle));
  round(step, "token index");
  copy_columns(step.stream,
               {.to_TA = all_N.view({N, 1}), .from_TB = window_.here(window_.routes()).rows(0, N), .count = 1});
}

void DirectDispatcher::combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  return_sums(step, y_RD, d.weight_NL, y_TD.dim(0), d);
  round(step, "combine");
  sum_returned(step, y_TD, d);
}

void DirectDispatcher::return_part(Step& step, Tensor y_RD, int64_t T, const RowDistances& of,
                                   DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  return_sums(step, y_RD, d.weight_NL, T, d, of);
  if (of.end > kOwnRows.end) round(step, "combine");
}

void DirectDispatcher::sum_returned(Step& step, Tensor y_TD, DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  d.has_begun = false;
  sum_of_ranks(step, y_TD, d);
}

SplitDispatcher::Parts DirectDispatcher::parts(Step& step, int64_t T, const DispatchHandle& handle) const {
  const DirectHandle& d = own(handle);
  const int64_t R = max_rows(T), far_from = (W_ + 1) / 2;
  const Tensor token_R = d.rows.token_R.rows(0, R), own_token_R = step.alloc({R}, DType::i32);
  const Tensor own_2e = step.alloc({2, e_}, DType::i32), far_22e = step.alloc({2, 2 * e_}, DType::i32);
  const Tensor near_22e = far_from > 1 ? step.alloc({2, 2 * e_}, DType::i32) : Tensor{};
  part_rows(step.stream, {.own_2e = own_2e,
                          .near_22e = near_22e,
                          .far_22e = far_22e,
                          .own_token_R = own_token_R,
                          .offsets_e1 = d.rows.offsets_e1,
                          .row_token_R = token_R,
                          .arrive_W1 = d.arrive_W1,
                          .dest_TJ = d.dest_TJ.rows(0, T),
                          .row_TJ = d.row_TJ.rows(0, T),
                          .pair_row_NL = d.pair_row_NL.rows(0, W_ * T),
                          .rank = rank_,
                          .etp = etp_,
                          .far_from = far_from});
  const auto part = [&](const Tensor& runs_2G, const RowDistances& of) {
    const double share = static_cast<double>(of.count(W_)) / static_cast<double>(W_);
    return Part{.of = of, .rows = {.runs_2G = runs_2G, .share = share, .source_share = share}};
  };
  Parts parts{.own_rows = {d.rows.offsets_e1, own_token_R},
              .rows = {d.rows.offsets_e1, token_R},
              .own = part(own_2e, kOwnRows),
              .others = {}};
  parts.own.rows.source_share = 1;
  if (far_from > 1) parts.others.push_back(part(near_22e, {.first = 1, .end = far_from}));
  parts.others.push_back(part(far_22e, {.first = far_from}));
  return parts;
}

void DirectDispatcher::return_sums(Step& step, Tensor y_RD, Tensor weight_NL, int64_t T, const DirectHandle& d,
                                   const RowDistances& of) const {
  const int64_t N = W_ * T;
  const double share = static_cast<double>(of.count(W_)) / static_cast<double>(W_);
  const auto part = [&](int64_t n) { return static_cast<int64_t>(share * static_cast<double>(n)); };
  moebius::return_sums(step.stream, {.sent_1 = window_.sent_1(),
                                     .y_RD = y_RD,
                                     .pair_row_NL = d.pair_row_NL.rows(0, N),
                                     .weight_NL = weight_NL.empty() ? Tensor{} : weight_NL.rows(0, N),
                                     .arrive_W1 = d.arrive_W1,
                                     .back_W = d.back_W,
                                     .bases_W = window_.bases_W(),
                                     .offset = window_.back().offset,
                                     .rank = rank_,
                                     .of = of,
                                     .expected_pairs = part(T * spec_.top_k * etp_),
                                     .expected_rows = part(even_sums(T))});
}

int64_t DirectDispatcher::even_sums(int64_t T) const {
  if (spec_.sends_all) return W_ * T;
  return static_cast<int64_t>(chance_of_part(spec_.num_experts, spec_.top_k, P_, spec_.round_robin) *
                              static_cast<double>(W_ * T));
}

void DirectDispatcher::sum_of_ranks(Step& step, Tensor out_TD, const DirectHandle& d) const {
  const Tensor back_row_TB = d.back_row_TB.rows(0, out_TD.dim(0));
  moebius::combine(step.stream, {.out_TD = out_TD,
                                 .y_RD = window_.here(window_.back()),
                                 .pair_row_TK = back_row_TB,
                                 .expected_pairs = even_sums(out_TD.dim(0))});
}

Dispatched DirectDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  Dispatched grads = combine_bwd_part(step, dy_TD, {}, handle);
  grads.weight_R = row_weights(step, dy_TD.dim(0), handle);
  return grads;
}

Dispatched DirectDispatcher::combine_bwd_part(Step& step, Tensor dy_TD, const RowDistances& of,
                                              DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  begin(step, d);
  push(step, window_.grads(), dy_TD, d, of);
  round(step, "combine_bwd");
  return {.source = arrived(window_.grads(), dy_TD),
          .rows = {d.rows.offsets_e1, d.rows.token_R.rows(0, max_rows(dy_TD.dim(0)))},
          .weight_R = {}};
}

Tensor DirectDispatcher::row_weights(Step& step, int64_t T, const DispatchHandle& handle) const {
  const DirectHandle& d = own(handle);
  const Tensor weight_R = step.alloc({max_rows(T)}, DType::f32);
  local_pairs_to_rows(
      step.stream,
      {.to_R = weight_R, .from_NL = d.weight_NL.rows(0, W_ * T), .pair_row_NL = d.pair_row_NL.rows(0, W_ * T)});
  return weight_R;
}

void DirectDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                    DispatchHandle& handle) const {
  DirectHandle& d = own(handle);
  const int64_t T = dx_TD.dim(0);
  return_sums(step, dx_RD, {}, T, d);
  return_pairs(step.stream, {.sent_1 = window_.sent_1(),
                             .from_R = dweight_R,
                             .pair_row_NL = d.pair_row_NL.rows(0, W_ * T),
                             .arrive_W1 = d.arrive_W1,
                             .back_W = d.back_W,
                             .bases_W = window_.bases_W(),
                             .offset = window_.back_weights().offset,
                             .rank = rank_});
  round(step, "dispatch_bwd");
  d.has_begun = false;
  sum_of_ranks(step, dx_TD, d);
  sum_pairs(step.stream, {.to_TK = dweight_TK,
                          .from_BL = window_.here(window_.back_weights()),
                          .topk_TK = d.route.topk_TK,
                          .kept_TK = d.route.pair_row_TK,
                          .dest_TJ = d.dest_TJ.rows(0, T),
                          .back_row_TB = d.back_row_TB.rows(0, T),
                          .experts_of_rank = e_});
}

}  // namespace moebius
