#include "model/moe/dispatchers/dispatcher_two_level.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/dispatcher_choice.h"
#include "device/accelerator.h"
#include "model/moe/dispatcher_cost.h"
#include "model/moe/expert_rows.h"
#include "ops/dispatch/dispatch.h"
#include "ops/elementwise/elementwise.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/local_pairs.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

// Routes number experts from 1, so that a row of zeros is a token without experts.
constexpr int64_t kFirstExpert = 1;

TwoLevelHandle& own(DispatchHandle& handle) { return static_cast<TwoLevelHandle&>(handle); }

DirectWindow& window_of(const DispatcherSpec& spec) {
  const MeshShape& shape = spec.mesh->shape();
  check_nodes(shape.ep, shape.etp, shape.ranks_per_node);
  MOEBIUS_CHECK(usage, spec.window != nullptr, "the two-level dispatcher needs a window; make one for the layers");
  return *spec.window;
}

}  // namespace

TwoLevelDispatcher::TwoLevelDispatcher(const DispatcherSpec& spec)
    : spec_(spec),
      ranks_(group_of_experts(*spec.mesh)),
      levels_(ranks_.size(), static_cast<int>(spec.mesh->shape().ranks_per_node)),
      window_(window_of(spec)),
      etp_(spec.mesh->shape().etp),
      e_(spec.num_experts / spec.mesh->shape().ep),
      n_(spec.mesh->shape().ranks_per_node),
      M_(spec.mesh->shape().nodes_of_experts()),
      P_(n_ / etp_),
      node_(ranks_.rank() / n_),
      place_(ranks_.rank() % n_),
      A_(std::min(spec.top_k, M_)),
      J_(std::min(spec.top_k, P_)),
      L_(std::min(spec.top_k, e_)),
      block_level_(n_ > 1 ? 1 : 0),
      block_size_(levels_.radix(block_level_)) {}

int64_t TwoLevelDispatcher::max_rows(int64_t T) const {
  return max_expert_rows(spec_.mesh->shape(), spec_.num_experts, spec_.top_k, T, /*rows_factor=*/0);
}

std::unique_ptr<DispatchHandle> TwoLevelDispatcher::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto handle = std::make_unique<TwoLevelHandle>();
  TwoLevelHandle& d = *handle;
  const int64_t T = spec_.max_tokens, N = M_ * T;
  const auto ints = [&](Tensor& t, const char* name, Shape shape) {
    plan.declare(t, prefix + name, shape, DType::i32, Life::saved);
  };
  ints(d.node_row_GTA, ".node_row", {M_ / block_size_, T, A_});
  ints(d.topk_NK, ".topk", {N, spec_.top_k});
  ints(d.dest_NJ, ".dest", {N, J_});
  ints(d.row_NJ, ".row_there", {N, J_});
  ints(d.back_row_NB, ".back_row", {N, J_ * etp_});
  ints(d.arrive_Mn1, ".arrive", {M_ * (n_ + 1)});
  ints(d.back_Mn, ".back", {M_ * n_});
  ints(d.rows.offsets_e1, ".offsets", {e_ + 1});
  ints(d.rows.token_R, ".row_token", {max_rows(T)});
  ints(d.pair_row_NL, ".pair_row", {n_ * N, L_});
  plan.declare(d.weight_NL, prefix + ".weight", {n_ * N, L_}, DType::f32, Life::saved);
  return handle;
}

void TwoLevelDispatcher::round(Step& step, const char* phase) const {
  window_.round(step.stream, {.phase = phase, .layer = spec_.layer});
}

void TwoLevelDispatcher::begin(Step& step, TwoLevelHandle& d) const {
  if (!d.has_begun) round(step, "begin");
  d.has_begun = true;
}

// --- announce -------------------------------------------------------------------------------------------------------

void TwoLevelDispatcher::announce(Step& step, const Route& route, DispatchHandle& handle) const {
  TwoLevelHandle& d = own(handle);
  StackScope scope(step.stack);
  d.route = route;
  window_.connect(step.stream);
  find_nodes(step, d);
  const Tensor routes_T2K = step.alloc({route.topk_TK.dim(0), 2 * spec_.top_k}, DType::i32);
  pack_routes(step.stream, {.routes_T2K = routes_T2K,
                            .topk_TK = route.topk_TK,
                            .kept_TK = route.pair_row_TK,
                            .weight_TK = route.weight_TK,
                            .shift = kFirstExpert});
  announce_in_node(step, send_across(step, "announce (routes)", routes_T2K, d, Unused::zero), d);
  d.has_begun = true;
}

// The ops for destinations are used with nodes in place of ep ranks.
void TwoLevelDispatcher::find_nodes(Step& step, TwoLevelHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = d.route.topk_TK.dim(0);
  const Tensor dest_TA = step.alloc({T, A_}, DType::i32), slot_TA = step.alloc({T, A_}, DType::i32);
  const Tensor count_M = step.alloc({M_}, DType::i32);
  destinations(step.stream, {.dest_TJ = dest_TA,
                             .slot_TJ = slot_TA,
                             .count_P = count_M,
                             .scratch = step.alloc_bytes(Destinations::scratch_bytes(T, M_, step.stream)),
                             .topk_TK = d.route.topk_TK,
                             .kept_TK = d.route.pair_row_TK,
                             .experts_of_rank = e_ * P_});
  const bool fixed = has_fixed_messages(step.stream);
  sorted_places(step.stream, {.row_GTJ = node_rows(T, d),
                              .dest_TJ = dest_TA,
                              .slot_TJ = slot_TA,
                              .count_P = count_M,
                              .last = node_,
                              .section = fixed ? T : 0});
  if (!fixed) return exchange_counts(step, count_M, d);
  d.send_rows.assign(static_cast<size_t>(M_), T);
  d.recv_rows = d.send_rows;
}

bool TwoLevelDispatcher::has_fixed_messages(const Stream& s) const {
  if (spec_.fixed_messages) return true;
  if (s.device() == DeviceKind::null) return s.target() == DeviceKind::cuda;
  return s.device() == DeviceKind::cuda && s.accelerator().capture() != nullptr;
}

int64_t TwoLevelDispatcher::sorted_rows(const Stream& s, int64_t T) const {
  return T * (spec_.fixed_messages || s.target() == DeviceKind::cuda ? M_ : A_);
}

Tensor TwoLevelDispatcher::node_rows(int64_t T, const TwoLevelHandle& d) const {
  const int64_t blocks = M_ / block_size_;
  return d.node_row_GTA.view({d.node_row_GTA.numel()}).rows(0, blocks * T * A_).view({blocks, T, A_});
}

// The host waits for the counts only here, once for each layer and micro-batch. Each message is one count.
void TwoLevelDispatcher::exchange_counts(Step& step, const Tensor& count_M, TwoLevelHandle& d) const {
  Stream& s = step.stream;
  const Tensor received_M = step.alloc({M_}, DType::i32);
  const std::vector<int64_t> one(static_cast<size_t>(M_), 1);
  exchange(s, {.phase = "announce (counts)", .out = received_M, .in = count_M, .recv_rows = one, .send_rows = one});
  const DispatchShape shape{.T = static_cast<double>(d.route.topk_TK.dim(0)),
                            .K = static_cast<double>(spec_.top_k),
                            .E = static_cast<double>(spec_.num_experts),
                            .round_robin = spec_.round_robin};
  // The null device has no counts, so experts count as chosen evenly.
  // Rounding must not give more than the existing pairs of tokens and nodes.
  const int64_t even = std::llround(even_rows_of_part(shape, M_)), pairs = d.route.topk_TK.dim(0) * A_;
  d.send_rows.assign(static_cast<size_t>(M_), std::min(even, pairs / M_));
  d.recv_rows = d.send_rows;
  if (s.device() == DeviceKind::null) return;
  std::vector<int32_t> sent(d.send_rows.size()), received(sent);
  copy_to_host(s, sent.data(), count_M.data, count_M.num_bytes());
  copy_to_host(s, received.data(), received_M.data, received_M.num_bytes());
  received[static_cast<size_t>(node_)] = sent[static_cast<size_t>(node_)];
  d.send_rows.assign(sent.begin(), sent.end());
  d.recv_rows.assign(received.begin(), received.end());
}

void TwoLevelDispatcher::announce_in_node(Step& step, const Sections& routes, TwoLevelHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = d.route.topk_TK.dim(0), N = M_ * T;
  const Tensor weight_NK = step.alloc({N, spec_.top_k}, DType::f32), slot_NJ = step.alloc({N, J_}, DType::i32);
  const Tensor counts_MnP = window_.here(window_.counts());
  for (int64_t m = 0; m < M_; ++m) {
    const int64_t num = d.recv_rows[m];
    StackScope of_node(step.stack);
    const Tensor count_P = step.alloc({P_}, DType::i32), topk = d.topk_NK.rows(m * T, m * T + num);
    select_routes(step.stream, {.topk_NK = topk,
                                .weight_NK = weight_NK.rows(m * T, m * T + num),
                                .routes_N2K = routes[m],
                                .first_expert = e_ * P_ * node_ + kFirstExpert,
                                .num_experts = e_ * P_});
    destinations(step.stream, {.dest_TJ = d.dest_NJ.rows(m * T, m * T + num),
                               .slot_TJ = slot_NJ.rows(m * T, m * T + num),
                               .count_P = count_P,
                               .scratch = step.alloc_bytes(Destinations::scratch_bytes(num, P_, step.stream)),
                               .topk_TK = topk,
                               .kept_TK = topk,
                               .experts_of_rank = e_});
    push_to_all(step.stream, {.sent_1 = window_.sent_1(),
                              .x_M = count_P,
                              .bases_W = window_.bases_W(),
                              .offset = window_.counts().offset + m * n_ * count_P.num_bytes(),
                              .rank = place_});
  }
  round(step, "announce (counts)");
  for (int64_t m = 0; m < M_; ++m) {
    const int64_t num = d.recv_rows[m];
    dispatch_places(step.stream, {.row_TJ = d.row_NJ.rows(m * T, m * T + num),
                                  .back_row_TB = d.back_row_NB.rows(m * T, m * T + num),
                                  .arrive_W1 = section(d.arrive_Mn1, m, n_ + 1),
                                  .back_W = section(d.back_Mn, m, n_),
                                  .dest_TJ = d.dest_NJ.rows(m * T, m * T + num),
                                  .slot_TJ = slot_NJ.rows(m * T, m * T + num),
                                  .counts_WP = section(counts_MnP, m, n_),
                                  .rank = place_});
  }
  for (int64_t m = 0; m < M_; ++m) {
    const int64_t num = d.recv_rows[m];
    const Tensor topk = d.topk_NK.rows(m * T, m * T + num);
    push_routes(step.stream, {.sent_1 = window_.sent_1(),
                              .topk_TK = topk,
                              .kept_TK = topk,
                              .weight_TK = weight_NK.rows(m * T, m * T + num),
                              .dest_TJ = d.dest_NJ.rows(m * T, m * T + num),
                              .row_TJ = d.row_NJ.rows(m * T, m * T + num),
                              .bases_W = window_.bases_W(),
                              .offset = window_.routes().offset + m * n_ * T * 2 * L_ * size_of(DType::i32),
                              .rank = place_,
                              .etp = etp_,
                              .experts_of_rank = e_});
  }
  round(step, "announce (routes)");
  index_routes(step.stream, {.offsets_e1 = d.rows.offsets_e1,
                             .row_token_R = d.rows.token_R,
                             .pair_row_NL = d.pair_row_NL.rows(0, n_ * N),
                             .weight_NL = d.weight_NL.rows(0, n_ * N),
                             .scratch = step.alloc_bytes(IndexRows::scratch_bytes(n_ * N, e_, step.stream)),
                             .routes_N2L = window_.here(window_.routes()).rows(0, n_ * N),
                             .arrive_GV = d.arrive_Mn1.view({M_, n_ + 1}),
                             .first_expert = e_ * (spec_.mesh->place().ep % P_)});
}

// --- to the experts -------------------------------------------------------------------------------------------------

TwoLevelDispatcher::Sections TwoLevelDispatcher::send_across(Step& step, const char* phase, const Tensor& x_TC,
                                                             const TwoLevelHandle& d, Unused unused) const {
  const int64_t T = x_TC.dim(0), C = x_TC.dim(1);
  const Tensor sorted_SC = step.alloc({sorted_rows(step.stream, T), C}, x_TC.dtype);
  const Tensor arrived_NC = step.alloc({(M_ - 1) * T, C}, x_TC.dtype);
  if (unused == Unused::zero) fill_zero(step.stream, sorted_SC);
  const Tensor row_GTA = node_rows(T, d);
  for (int64_t g = 0; g < row_GTA.dim(0); ++g)
    spread_rows(step.stream, {.array_SD = sorted_SC, .x_TD = x_TC, .row_TJ = row_GTA.rows(g, g + 1).view({T, A_})});
  exchange(step.stream, {.phase = phase,
                         .out = arrived_NC,
                         .in = sorted_SC,
                         .recv_rows = of_others(d.recv_rows),
                         .send_rows = of_others(d.send_rows)});
  return sections(sorted_SC, arrived_NC, d);
}

// The rows for this node are the last of `sorted`. They are not sent.
TwoLevelDispatcher::Sections TwoLevelDispatcher::sections(const Tensor& sorted_SC, const Tensor& arrived_NC,
                                                          const TwoLevelHandle& d) const {
  Sections all(static_cast<size_t>(M_));
  int64_t sorted = 0, arrived = 0;
  for (int64_t m = 0; m < M_; ++m) {
    if (m == node_) continue;
    all[m] = arrived_NC.rows(arrived, arrived + d.recv_rows[m]);
    arrived += d.recv_rows[m];
    sorted += d.send_rows[m];
  }
  all[node_] = sorted_SC.rows(sorted, sorted + d.send_rows[node_]);
  return all;
}

std::vector<int64_t> TwoLevelDispatcher::of_others(std::vector<int64_t> rows) const {
  rows[node_] = 0;
  return rows;
}

void TwoLevelDispatcher::exchange(Stream& s, const RailExchange& a) const {
  try {
    exchange_messages(s, a);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::distributed) throw;
    throw Error(e.kind(), fmt::format("{} of {}, across nodes: {}", a.phase, spec_.layer, e.what()));
  }
}

// On a GPU one call exchanges all messages.
void TwoLevelDispatcher::exchange_messages(Stream& s, const RailExchange& a) const {
  if (s.device() == DeviceKind::cuda) {
    std::vector<int64_t> from(static_cast<size_t>(ranks_.size())), to(from);
    for (int64_t m = 0; m < M_; ++m) {
      from[rank_in_rail(m)] = a.recv_rows[m];
      to[rank_in_rail(m)] = a.send_rows[m];
    }
    return ranks_.all_to_all_v(s, {.out = a.out, .in = a.in, .recv_rows = from, .send_rows = to});
  }
  const auto rows_of = [](const Tensor& x, const std::vector<int64_t>& rows, int64_t node) {
    const int64_t begin = std::accumulate(rows.begin(), rows.begin() + node, int64_t{0});
    return x.rows(begin, begin + rows[node]);
  };
  std::vector<Pending> transfers;
  for (int64_t i = 1; i < M_; ++i) {
    const int64_t from = (node_ + M_ - i) % M_;
    transfers.push_back(ranks_.recv(s, rows_of(a.out, a.recv_rows, from), rank_in_rail(from)));
  }
  for (int64_t i = 1; i < M_; ++i) {
    const int64_t to = (node_ + i) % M_;
    transfers.push_back(ranks_.send(s, rows_of(a.in, a.send_rows, to), rank_in_rail(to)));
  }
  for (Pending& transfer : transfers) transfer.wait();
}

// Rows may be narrower than those of the window, and fewer. The sections are placed as in a window of this width and T.
void TwoLevelDispatcher::push(Step& step, const DirectWindow::Array& to, const Sections& x, int64_t T,
                              const TwoLevelHandle& d) const {
  for (int64_t m = 0; m < M_; ++m) {
    const int64_t num = d.recv_rows[m];
    push_rows(step.stream, {.sent_1 = window_.sent_1(),
                            .x_TD = x[m],
                            .dest_TJ = d.dest_NJ.rows(m * T, m * T + num),
                            .row_TJ = d.row_NJ.rows(m * T, m * T + num),
                            .bases_W = window_.bases_W(),
                            .offset = to.offset + m * n_ * T * x[m].dim(1) * size_of(x[m].dtype),
                            .rank = place_,
                            .etp = etp_});
  }
}

Dispatched TwoLevelDispatcher::bring(Step& step, const DirectWindow::Array& to, const char* phase, const Tensor& x_TD,
                                     TwoLevelHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = x_TD.dim(0), N = M_ * n_ * T, D = x_TD.dim(1);
  const Sections x = send_across(step, phase, x_TD, d, Unused::undefined);
  begin(step, d);
  push(step, to, x, T, d);
  round(step, phase);
  const Tensor all = window_.here(to);
  return {.source = all.view({all.numel()}).rows(0, N * D).view({N, D}),
          .rows = {d.rows.offsets_e1, d.rows.token_R.rows(0, max_rows(T))}};
}

Dispatched TwoLevelDispatcher::dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const {
  return bring(step, window_.tokens(), "dispatch", x_TD, own(handle));
}

Dispatched TwoLevelDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  TwoLevelHandle& d = own(handle);
  const int64_t T = dy_TD.dim(0), R = max_rows(T);
  Dispatched grads = bring(step, window_.grads(), "combine_bwd", dy_TD, d);
  grads.weight_R = step.alloc({R}, DType::f32);
  local_pairs_to_rows(step.stream, {.to_R = grads.weight_R,
                                    .from_NL = d.weight_NL.rows(0, M_ * n_ * T),
                                    .pair_row_NL = d.pair_row_NL.rows(0, M_ * n_ * T)});
  return grads;
}

// The index is sent in the same way as a route. One more round ensures that all ranks of the node have
// unpacked their routes.
void TwoLevelDispatcher::dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const {
  TwoLevelHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t T = index_T.dim(0), N = all_N.dim(0);
  const Tensor routes_T2L = step.alloc({T, 2 * L_}, DType::i32);
  fill_zero(step.stream, routes_T2L);
  copy_columns(step.stream, {.to_TA = routes_T2L, .from_TB = index_T.view({T, 1}), .count = 1});
  const Sections routes = send_across(step, "token index", routes_T2L, d, Unused::undefined);
  round(step, "token index (begin)");
  push(step, window_.routes(), routes, T, d);
  round(step, "token index");
  copy_columns(step.stream,
               {.to_TA = all_N.view({N, 1}), .from_TB = window_.here(window_.routes()).rows(0, N), .count = 1});
}

// --- and back -------------------------------------------------------------------------------------------------------

void TwoLevelDispatcher::combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const {
  TwoLevelHandle& d = own(handle);
  return_sums(step, y_RD, d.weight_NL, y_TD.dim(0), d);
  round(step, "combine");
  d.has_begun = false;
  rows_over_nodes(step, "combine", y_TD, d);
}

void TwoLevelDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                      DispatchHandle& handle) const {
  TwoLevelHandle& d = own(handle);
  const int64_t T = dx_TD.dim(0);
  return_sums(step, dx_RD, {}, T, d);
  for (int64_t m = 0; m < M_; ++m) {
    return_pairs(step.stream, {.sent_1 = window_.sent_1(),
                               .from_R = dweight_R,
                               .pair_row_NL = section(d.pair_row_NL, m, n_ * T),
                               .arrive_W1 = section(d.arrive_Mn1, m, n_ + 1),
                               .back_W = section(d.back_Mn, m, n_),
                               .bases_W = window_.bases_W(),
                               .offset = window_.back_weights().offset + m * T * J_ * etp_ * L_ * size_of(DType::f32),
                               .rank = place_});
  }
  round(step, "dispatch_bwd");
  d.has_begun = false;
  rows_over_nodes(step, "dispatch_bwd", dx_TD, d);
  pairs_over_nodes(step, "dispatch_bwd", dweight_TK, d);
}

void TwoLevelDispatcher::return_sums(Step& step, Tensor y_RD, Tensor weight_NL, int64_t T,
                                     const TwoLevelHandle& d) const {
  for (int64_t m = 0; m < M_; ++m) {
    moebius::return_sums(step.stream,
                         {.sent_1 = window_.sent_1(),
                          .y_RD = y_RD,
                          .pair_row_NL = section(d.pair_row_NL, m, n_ * T),
                          .weight_NL = weight_NL.empty() ? Tensor{} : section(weight_NL, m, n_ * T),
                          .arrive_W1 = section(d.arrive_Mn1, m, n_ + 1),
                          .back_W = section(d.back_Mn, m, n_),
                          .bases_W = window_.bases_W(),
                          .offset = window_.back().offset + m * T * J_ * etp_ * y_RD.dim(1) * size_of(y_RD.dtype),
                          .rank = place_,
                          .expected_pairs = T * spec_.top_k * etp_ / M_,
                          .expected_rows = even_sums(T)});
  }
}

int64_t TwoLevelDispatcher::even_sums(int64_t T) const {
  const double chance = chance_of_part(spec_.num_experts, spec_.top_k, ranks_.size() / etp_, spec_.round_robin);
  return static_cast<int64_t>(chance * static_cast<double>(n_ * T));
}

void TwoLevelDispatcher::rows_over_nodes(Step& step, const char* phase, Tensor out_TD, const TwoLevelHandle& d) const {
  const int64_t T = out_TD.dim(0), D = out_TD.dim(1), B = T * J_ * etp_;
  const Tensor all = window_.here(window_.back()),
               back_BD = all.view({all.numel()}).rows(0, M_ * B * D).view({M_ * B, D});
  const auto sum_of_node = [&](int64_t m, const Tensor& sum) {
    moebius::combine(step.stream, {.out_TD = sum,
                                   .y_RD = section(back_BD, m, B),
                                   .pair_row_TK = d.back_row_NB.rows(m * T, m * T + sum.dim(0)),
                                   .expected_pairs = even_sums(sum.dim(0))});
  };
  sum_over_nodes(step, phase, out_TD, sum_of_node, d);
}

void TwoLevelDispatcher::pairs_over_nodes(Step& step, const char* phase, Tensor out_TK, const TwoLevelHandle& d) const {
  const int64_t T = out_TK.dim(0), B = T * J_ * etp_;
  const auto sum_of_node = [&](int64_t m, const Tensor& sum) {
    const int64_t begin = m * T, end = begin + sum.dim(0);
    const Tensor topk = d.topk_NK.rows(begin, end);
    sum_pairs(step.stream, {.to_TK = sum,
                            .from_BL = section(window_.here(window_.back_weights()), m, B),
                            .topk_TK = topk,
                            .kept_TK = topk,
                            .dest_TJ = d.dest_NJ.rows(begin, end),
                            .back_row_TB = d.back_row_NB.rows(begin, end),
                            .experts_of_rank = e_});
  };
  sum_over_nodes(step, phase, out_TK, sum_of_node, d);
}

void TwoLevelDispatcher::sum_over_nodes(Step& step, const char* phase, Tensor out_TC,
                                        const std::function<void(int64_t, const Tensor&)>& sum_of_node,
                                        const TwoLevelHandle& d) const {
  StackScope scope(step.stack);
  const int64_t T = out_TC.dim(0), C = out_TC.dim(1);
  const Tensor nodes_SC = step.alloc({sorted_rows(step.stream, T), C}, DType::f32);
  const Tensor sums_NC = step.alloc({(M_ - 1) * T, C}, DType::f32);
  const Sections sums = sections(nodes_SC, sums_NC, d);
  for (int64_t m = 0; m < M_; ++m) sum_of_node(m, sums[m]);
  exchange(step.stream, {.phase = phase,
                         .out = nodes_SC,
                         .in = sums_NC,
                         .recv_rows = of_others(d.send_rows),
                         .send_rows = of_others(d.recv_rows)});
  if (levels_.count() - 1 == block_level_) return sum_over_block(step, out_TC, nodes_SC, block_level_, 0, d);
  const Tensor sum_TC = out_TC.dtype == DType::f32 ? out_TC : step.alloc({T, C}, DType::f32);
  sum_over_block(step, sum_TC, nodes_SC, levels_.count() - 1, 0, d);
  if (out_TC.dtype != DType::f32) copy(step.stream, out_TC, sum_TC);
}

void TwoLevelDispatcher::sum_over_block(Step& step, const Tensor& out_TC, const Tensor& sorted_SC, int level,
                                        int64_t block, const TwoLevelHandle& d) const {
  if (level == block_level_) {
    const int64_t T = out_TC.dim(0);
    const Tensor row_TA = node_rows(T, d).rows(block, block + 1).view({T, A_});
    return moebius::combine(step.stream, {.out_TD = out_TC, .y_RD = sorted_SC, .pair_row_TK = row_TA});
  }
  for (int64_t i = 0; i < levels_.radix(level); ++i) {
    StackScope scope(step.stack);
    const Tensor sum_TC = i == 0 ? out_TC : step.alloc(out_TC.shape, out_TC.dtype);
    sum_over_block(step, sum_TC, sorted_SC, level - 1, block * levels_.radix(level) + i, d);
    if (i > 0) add(step.stream, out_TC, sum_TC);
  }
}

}  // namespace moebius
