#include "bench/dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "bench/check.h"
#include "bench/dispatch_choice.h"
#include "bench/rank_device.h"
#include "bench/timing.h"
#include "comm/control.h"
#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "model/moe/direct_window.h"
#include "model/moe/dispatcher_cost.h"
#include "model/moe/dispatchers/dispatcher_allgather.h"
#include "ops/elementwise/elementwise.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

constexpr double kRowElement = 2;                 // bytes of an element, bf16
constexpr int kCallsOfAGraph = 20, kReplays = 5;  // 100 calls in each timed run

MeshShape mesh_of(const DispatchBenchSpec& spec, int64_t num_ranks) {
  MOEBIUS_CHECK(usage, spec.etp >= 1 && num_ranks % spec.etp == 0,
                "bench dispatch: --etp must divide the ranks: {} % {} must be 0; choose others", num_ranks, spec.etp);
  return {.dp = num_ranks, .etp = spec.etp, .ep = num_ranks / spec.etp, .ranks_per_node = spec.ranks_per_node};
}

BenchShape shape_of(const DispatchBenchSpec& spec, const MeshShape& mesh) {
  const BenchShape shape = bench_shape(spec.shape, spec.scale);
  MOEBIUS_CHECK(usage, shape.E % mesh.ep == 0,
                "bench dispatch: ep = ranks / etp = {} must divide the {} experts of {}; choose other ranks", mesh.ep,
                shape.E, shape.name);
  MOEBIUS_CHECK(
      usage, shape.E > shape.K || spec.routing.kind == BenchRouting::Kind::balanced,
      "bench dispatch: {} has as many experts as a token chooses, so zipf may choose one twice; use --routing balanced",
      shape.name);
  return shape;
}

float weight_of(int64_t k, int64_t K) { return static_cast<float>(k + 1) / static_cast<float>(K); }

// One rank of the bench: its tokens, their route, and the calls of its dispatcher.
class DispatchRank {
 public:
  DispatchRank(const DispatchBenchSpec& spec, Transport& world)
      : spec_(spec),
        device_(spec.device, world, spec.threads),
        mesh_(mesh_of(spec, world.size()), world, device_.links.get()),
        shape_(shape_of(spec, mesh_.shape())),
        kind_(dispatcher_of(spec, device_.stream, mesh_, shape_)),
        window_(make_window()),
        dispatcher_(make_dispatcher(kind_, {.num_experts = shape_.E,
                                            .top_k = shape_.K,
                                            .max_tokens = shape_.T(),
                                            .mesh = &mesh_,
                                            .window = window_.get(),
                                            .sends_all = sends_all_,
                                            .layer = "the bench"})),
        handle_(dispatcher_->declare_saved(plan_, "handle")) {
    if (on_gpu()) set_kernel_choice(*device_.gpu, spec.kernels);
    if (spec.sms > 0 && on_gpu()) device_.gpu->state<BlockLimit>().blocks = spec.sms;
    make_route();
    plan_.bind(spec.device, stack_bytes());
  }
  DispatchRank(const DispatchRank&) = delete;

  const BenchShape& shape() const { return shape_; }
  const Mesh& mesh() const { return mesh_; }
  Group& group() const { return group_of_experts(mesh_); }
  Stream& stream() { return device_.stream; }
  bool on_gpu() const { return device_.gpu != nullptr; }
  bool local() const { return mesh_.shape().world() == 1; }
  // REQUIRES: not local().
  DispatcherKind kind() const {
    if (window_) return kind_;
    const bool gathers = dynamic_cast<const AllGatherDispatcher*>(dispatcher_.get()) != nullptr;
    return gathers ? DispatcherKind::allgather : DispatcherKind::alltoall;
  }
  bool is_two_level() const { return !local() && kind() == DispatcherKind::two_level; }
  // Returns the bytes that this rank has sent to the ranks that share experts; of them those to other
  // nodes, with two-level.
  int64_t sent_across() const { return is_two_level() ? group().sent_bytes() : 0; }
  int64_t sent_bytes() const {
    return group().sent_bytes() + (is_two_level() ? mesh_.node_of_experts().sent_bytes() : 0);
  }
  int64_t rows_here() {
    const HostRows offsets(stream(), handle_->rows.offsets_e1, 0, 1);
    return std::llround(offsets.at(0, shape_.E / mesh_.shape().ep));
  }
  const Route& route() const { return route_; }
  const Tensor& x_TD() const { return x_TD_; }

  // Makes the calls in their order, each through timed(name, call).
  template <class Timed>
  void step(Stream& s, StepStack& stack, Timed&& timed) {
    StackScope scope(stack);
    Step step{s, stack, batch_};
    const int64_t R = dispatcher_->max_rows(shape_.T());
    Dispatched rows, grads;
    timed("announce", [&] { dispatcher_->announce(step, route_, *handle_); });
    timed("dispatch", [&] { rows = dispatcher_->dispatch(step, x_TD_, *handle_); });
    const Tensor y_RD = step.alloc({R, shape_.D}, DType::bf16), dweight_R = step.alloc({R}, DType::f32);
    copy_rows(s, y_RD, rows);
    timed("combine", [&] { dispatcher_->combine(step, y_TD_, y_RD, *handle_); });
    timed("combine_bwd", [&] { grads = dispatcher_->combine_bwd(step, x_TD_, *handle_); });
    copy_rows(s, y_RD, grads);
    timed("dispatch_bwd", [&] { dispatcher_->dispatch_bwd(step, dx_TD_, dweight_TK_, y_RD, dweight_R, *handle_); });
  }
  template <class Timed>
  void step(Timed&& timed) {
    step(stream(), plan_.stack(), timed);
  }

  // Announces the route in a CUDA graph, so that later calls send what those of captured steps do.
  void announce_captured() {
    GraphCapture capture;
    const CudaGraph graph(*device_.gpu, capture, [&] {
      StackScope scope(plan_.stack());
      Step step{stream(), plan_.stack(), batch_};
      dispatcher_->announce(step, route_, *handle_);
    });
    group().barrier();  // a rank that waits could keep a shared GPU from the captures of others
    graph.replay(*device_.gpu);
    synchronize(stream());
  }
  // Each of these runs one call on the announced route.
  void dispatch_alone() {
    StackScope scope(plan_.stack());
    Step step{stream(), plan_.stack(), batch_};
    dispatcher_->dispatch(step, x_TD_, *handle_);
  }
  void combine_alone() {
    StackScope scope(plan_.stack());
    Step step{stream(), plan_.stack(), batch_};
    const Tensor y_RD = step.alloc({dispatcher_->max_rows(shape_.T()), shape_.D}, DType::bf16);
    dispatcher_->combine(step, y_TD_, y_RD, *handle_);
  }
  // Runs dispatch and combine on the announced route.
  void forward() {
    StackScope scope(plan_.stack());
    Step step{stream(), plan_.stack(), batch_};
    dispatcher_->dispatch(step, x_TD_, *handle_);
    const Tensor y_RD = step.alloc({dispatcher_->max_rows(shape_.T()), shape_.D}, DType::bf16);
    dispatcher_->combine(step, y_TD_, y_RD, *handle_);
  }
  // Returns the median time of a call, from when all ranks begin until all have done it. On a GPU many calls follow
  // each other in a CUDA graph, as in a step, so that beginning and end do not count.
  double median_ms(int64_t runs, const std::function<void()>& body) {
    body();
    GraphCapture capture;
    const auto calls = [&] {
      for (int i = 0; i < kCallsOfAGraph; ++i) body();
    };
    const CudaGraph graph = on_gpu() ? CudaGraph(*device_.gpu, capture, calls) : CudaGraph();
    const int replays = on_gpu() ? kReplays : 1, times = replays * (on_gpu() ? kCallsOfAGraph : 1);
    std::vector<double> ms;
    for (int64_t run = 0; run <= runs; ++run) {
      synchronize(stream());
      group().barrier();
      const double begin = now_us();
      for (int i = 0; i < replays; ++i) on_gpu() ? graph.replay(*device_.gpu) : body();
      synchronize(stream());
      group().barrier();
      ms.push_back((now_us() - begin) * 1e-3 / times);
    }
    std::sort(ms.begin() + 1, ms.end());  // the first one is a warm-up
    return ms[1 + static_cast<size_t>(runs) / 2];
  }

  // Returns how many rows are sent to ranks, and how many of these to other ranks, if each row is sent to the ranks
  // of its expert. With the direct dispatcher a token is sent once to a rank. With two-level, `across` counts the
  // rows for other nodes. `inside` counts the rows that ranks with the place of this one then send to other ranks of
  // their nodes.
  struct RowsSent {
    int64_t all = 0, others = 0, across = 0, inside = 0;
  };
  RowsSent rows_sent() const {
    const int64_t e = shape_.E / mesh_.shape().ep, K = shape_.K, n = mesh_.shape().ranks_per_node;
    const int64_t etp = mesh_.shape().etp, me = group().rank();
    if (sends_all_) return {.all = shape_.T() * group().size(), .others = shape_.T() * (group().size() - 1)};
    RowsSent rows;
    std::set<int64_t> seen, nodes;  // ep ranks and nodes of a token
    for (int64_t p = 0; p < shape_.R(); ++p) {
      if (p % K == 0) seen.clear(), nodes.clear();
      const int64_t ep = topk_[static_cast<size_t>(p)] / e;
      if (!seen.insert(ep).second && window_) continue;
      rows.all += mesh_.shape().etp;
      rows.others += mesh_.shape().etp - (ep == mesh_.place().ep ? 1 : 0);
      if (!is_two_level()) continue;
      const int64_t node = ep * etp / n;
      if (nodes.insert(node).second && node != me / n) ++rows.across;
      for (int64_t q = ep * etp; q < (ep + 1) * etp; ++q) rows.inside += q % n == me % n ? 0 : 1;
    }
    return rows;
  }
  // Returns the expected number of these rows if experts are chosen evenly.
  double even_rows_for_others() const {
    if (window_) return even_direct_rows(dispatch_shape());
    const double W = group().size();
    return static_cast<double>(shape_.R() * mesh_.shape().etp) * (W - 1) / W;
  }
  DispatchShape dispatch_shape() const {
    return {.T = static_cast<double>(shape_.T()),
            .D = static_cast<double>(shape_.D),
            .K = static_cast<double>(shape_.K),
            .E = static_cast<double>(shape_.E),
            .W = group().size(),
            .ep = mesh_.shape().ep,
            .node = mesh_.shape().ranks_per_node,
            .element_bytes = kRowElement,
            .sends_all = sends_all_};
  }

  // The experts return their rows unchanged from each of their etp ranks. So y = etp x sum of the weights, in double.
  void check_y() {
    BenchLine line{.name = "dispatch"};
    BenchSample sample;
    double sum_of_weights = 0;
    for (int64_t k = 0; k < shape_.K; ++k) sum_of_weights += weight_of(k, shape_.K);
    const double factor = sum_of_weights * static_cast<double>(mesh_.shape().etp);
    for (const int64_t t : sampled(shape_.T())) {
      const HostRows x(stream(), x_TD_, t, 1), y(stream(), y_TD_, t, 1);
      for (int64_t d = 0; d < shape_.D; ++d) sample.add(y.at(t, d), factor * x.at(t, d));
    }
    check_sample(line, "y", sample, kBf16Tolerance);
  }

 private:
  std::unique_ptr<DirectWindow> make_window() {
    const DirectSizes sizes{
        .max_tokens = shape_.T(), .num_experts = shape_.E, .top_k = shape_.K, .width = shape_.D, .dtype = DType::bf16};
    return make_direct_window(plan_, mesh_, sizes, kind_, /*num_moe_layers=*/1);
  }
  void make_route() {
    const int64_t T = shape_.T(), E = shape_.E, K = shape_.K;
    BenchRouting routing = spec_.routing;
    routing.seed += static_cast<uint64_t>(mesh_.group(Axis::world).rank());
    std::vector<float> weights;
    for (int64_t p = 0; p < T * K; ++p) weights.push_back(weight_of(p % K, K));
    topk_ = bench_route(shape_, routing).topk_TK;
    route_ = {.topk_TK = tensors_.ints({T, K}, topk_),
              .weight_TK = tensors_.zeros({T, K}, DType::f32),
              .counts_E = tensors_.zeros({E}, DType::i32),
              .offsets_E1 = tensors_.zeros({E + 1}, DType::i32),
              .row_token_R = tensors_.zeros({T * K}, DType::i32),
              .row_pair_R = tensors_.zeros({T * K}, DType::i32),
              .pair_row_TK = tensors_.zeros({T, K}, DType::i32)};
    copy_to_device(stream(), route_.weight_TK.data, weights.data(), route_.weight_TK.num_bytes());
    synchronize(stream());
    index_rows(stream(), {.counts_e = route_.counts_E,
                          .offsets_e1 = route_.offsets_E1,
                          .row_token_R = route_.row_token_R,
                          .row_pair_R = route_.row_pair_R,
                          .pair_row_TK = route_.pair_row_TK,
                          .scratch = tensors_.bytes(IndexRows::scratch_bytes(T, E, stream())),
                          .topk_TK = route_.topk_TK});
  }
  int64_t stack_bytes() {
    Stream null(DeviceKind::null, device_.pool, nullptr, spec_.device);
    StepStack counted(DeviceKind::null, nullptr, 0);
    step(null, counted, [](const char*, auto&& call) { call(); });
    return counted.high_water();
  }
  void copy_rows(Stream& s, const Tensor& y_RD, const Dispatched& rows) const {
    gather_rows(
        s, {.to_RD = y_RD, .from_ND = rows.source, .row_R = rows.rows.token_R, .offsets_E1 = rows.rows.offsets_e1});
  }

  DispatchBenchSpec spec_;
  RankDevice device_;
  Mesh mesh_;
  BenchShape shape_;
  DispatcherKind kind_;
  bool is_balanced_ = spec_.routing.kind == BenchRouting::Kind::balanced;
  bool sends_all_ = kind_ == DispatcherKind::direct &&
                    sends_all_tokens(shape_.E, shape_.K, mesh_.shape().ep, /*num_groups=*/1, is_balanced_);
  BenchTensors tensors_{device_.stream};
  MemoryPlan plan_;
  MicroBatch batch_;
  std::unique_ptr<DirectWindow> window_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<DispatchHandle> handle_;
  std::vector<int32_t> topk_;
  Route route_;
  Tensor x_TD_ = tensors_.normal({shape_.T(), shape_.D}, DType::bf16, 1.0f);
  Tensor y_TD_ = tensors_.zeros({shape_.T(), shape_.D}, DType::bf16);
  Tensor dx_TD_ = tensors_.zeros({shape_.T(), shape_.D}, DType::bf16);
  Tensor dweight_TK_ = tensors_.zeros({shape_.T(), shape_.K}, DType::f32);
};

double bytes_of(const DispatchCost& cost, const std::string& call) {
  if (call == "announce") return cost.announce.wire_bytes;
  if (call == "dispatch") return cost.dispatch.wire_bytes;
  if (call == "combine") return cost.combine.wire_bytes;
  return (call == "combine_bwd" ? cost.combine_bwd : cost.dispatch_bwd).wire_bytes;
}

// rows: the rows that leave the rank.
DispatchCost cost_of(const DispatchRank& rank, double rows) {
  const DispatchShape shape = rank.dispatch_shape();
  if (rank.local() || rank.kind() == DispatcherKind::alltoall) return alltoall_dispatch_cost(shape, rows);
  if (rank.kind() == DispatcherKind::allgather) return allgather_dispatch_cost(shape);
  return direct_dispatch_cost(shape, rows);
}

// Rows that leave a rank, in the mean over the ranks.
struct RowsLeft {
  double all = 0;                 // not read with two-level
  double across = 0, inside = 0;  // with two-level
};

RowsLeft rows_left(const DispatchRank& rank, Control& control) {
  const DispatchRank::RowsSent sent = rank.rows_sent();
  const auto mean = [&](int64_t rows) {
    return static_cast<double>(control.sum(rows)) / static_cast<double>(rank.group().size());
  };
  return {.all = mean(sent.others), .across = mean(sent.across), .inside = mean(sent.inside)};
}

// Returns the expected numbers if experts are chosen evenly.
RowsLeft even_rows_left(const DispatchRank& rank) {
  if (!rank.is_two_level()) return {.all = rank.even_rows_for_others()};
  const DispatchShape shape = rank.dispatch_shape();
  const int64_t nodes = shape.W / shape.node;
  return {.across = static_cast<double>(nodes - 1) * even_rows_of_part(shape, nodes),
          .inside = static_cast<double>(shape.W - nodes) * even_rows_of_part(shape, shape.ep)};
}

double bytes_across(const DispatchRank& rank, const RowsLeft& left, const std::string& call) {
  if (!rank.is_two_level()) return 0;
  return bytes_of(two_level_dispatch_cost(rank.dispatch_shape(), left.across, left.inside).across, call);
}

double bytes_left(const DispatchRank& rank, const RowsLeft& left, const std::string& call) {
  if (!rank.is_two_level()) return bytes_of(cost_of(rank, left.all), call);
  const TwoLevelCost cost = two_level_dispatch_cost(rank.dispatch_shape(), left.across, left.inside);
  return bytes_of(cost.across, call) + bytes_of(cost.inside, call);
}

double logical_bytes(const DispatchRank& rank, const std::string& call) {
  if (call == "announce") return 0;
  return static_cast<double>(rank.shape().R() * rank.mesh().shape().etp * rank.shape().D) * kRowElement;
}

struct Measured {
  std::string name;
  std::vector<double> ms;
  int64_t sent_bytes = 0, across_bytes = 0;  // bytes of the last run
};

std::vector<Measured> measure(DispatchRank& rank, int64_t runs) {
  std::vector<Measured> calls;
  for (int64_t run = 0; run <= runs; ++run) {  // the first run is a warm-up and touches memory
    size_t i = 0;
    rank.step([&](const char* name, auto&& call) {
      if (run == 0) calls.push_back({.name = name});
      synchronize(rank.stream());
      rank.group().barrier();
      const int64_t sent = rank.sent_bytes(), across = rank.sent_across();
      const double ms = time_on_device(rank.stream(), call);
      if (run > 0) calls[i].ms.push_back(ms);
      calls[i].sent_bytes = rank.sent_bytes() - sent;
      calls[i++].across_bytes = rank.sent_across() - across;
    });
  }
  return calls;
}

DispatchLine line_of(const Measured& call, const DispatchRank& rank, Control& control, const RowsLeft& left) {
  const auto W = static_cast<double>(rank.group().size());
  DispatchLine line{.name = call.name,
                    .median_ms = static_cast<double>(control.max(std::llround(median(call.ms) * 1e6))) * 1e-6,
                    .sent_bytes = static_cast<double>(control.sum(call.sent_bytes)) / W,
                    .route_bytes = bytes_left(rank, left, call.name),
                    .expected_bytes = bytes_left(rank, even_rows_left(rank), call.name),
                    .logical_bytes = logical_bytes(rank, call.name),
                    .across_bytes = static_cast<double>(control.sum(call.across_bytes)) / W,
                    .across_route_bytes = bytes_across(rank, left, call.name)};
  const auto equal = [](double sent, double wanted) { return std::abs(sent - wanted) < 1e-9 * (1 + wanted); };
  MOEBIUS_CHECK(numerics, equal(line.across_bytes, line.across_route_bytes),
                "bench dispatch: {} of {} sent {} bytes per rank across nodes, but its route needs {}", line.name,
                name_of(rank.kind()), line.across_bytes, line.across_route_bytes);
  MOEBIUS_CHECK(numerics, equal(line.sent_bytes, line.route_bytes),
                "bench dispatch: {} of {} sent {} bytes per rank, but its route needs {}", line.name,
                rank.local() ? "local" : name_of(rank.kind()), line.sent_bytes, line.route_bytes);
  return line;
}

// The reference: copies the row of each pair, sorted by expert.
void copy_row_of_each_pair(Stream& s, const Tensor& to_RD, const DispatchRank& rank) {
  const int64_t row_bytes = rank.shape().D * size_of(DType::bf16);
  const int32_t* token = rank.route().row_token_R.ptr<int32_t>();
  auto* to = static_cast<std::byte*>(to_RD.data);
  const auto* from = static_cast<const std::byte*>(rank.x_TD().data);
  parallel_rows(s.pool(), rank.shape().R(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) std::memcpy(to + r * row_bytes, from + token[r] * row_bytes, row_bytes);
  });
}

// Returns the rows that dispatch and combine of a rank read and write, in the mean over the ranks.
//   local    combine reads the row of each pair and writes the tokens; dispatch reads in place
//   direct   dispatch reads the tokens and writes `sent` rows; combine reads the row of each pair, writes `sent` sums,
//            reads as many that return, and writes the tokens
double rows_moved(const DispatchRank& rank, double sent) {
  const auto tokens = static_cast<double>(rank.shape().T()), pairs = tokens * static_cast<double>(rank.shape().K);
  if (rank.local()) return pairs + tokens;
  return 2 * tokens + 3 * sent + pairs * static_cast<double>(rank.mesh().shape().etp);
}

void compare_with_copy(DispatchBench& bench, DispatchRank& rank, Control& control, int64_t runs) {
  const auto of_all = [&](double ms) { return static_cast<double>(control.max(std::llround(ms * 1e6))) * 1e-6; };
  const auto W = static_cast<double>(control.size()), row_bytes = static_cast<double>(rank.shape().D) * kRowElement;
  const double moved = rows_moved(rank, static_cast<double>(control.sum(rank.rows_sent().all)) / W);
  const bool by_rows = rank.local() && !rank.on_gpu();
  const int64_t copied = by_rows ? rank.shape().R() : std::llround(moved / 2);
  BenchTensors tensors(rank.stream());
  const Tensor to = tensors.zeros({copied, rank.shape().D}, DType::bf16);
  const Tensor from = tensors.zeros({by_rows ? 0 : copied, rank.shape().D}, DType::bf16);
  const double forward_ms = of_all(rank.median_ms(runs, [&] { rank.forward(); }));
  const double copy_ms = of_all(rank.median_ms(
      runs, [&] { by_rows ? copy_row_of_each_pair(rank.stream(), to, rank) : copy(rank.stream(), to, from); }));
  bench.dispatch_gbytes_per_s = W * moved * row_bytes / forward_ms * 1e-6;
  bench.copy_gbytes_per_s = W * 2 * static_cast<double>(copied) * row_bytes / copy_ms * 1e-6;
}

// Captured messages of two-level have a row for each token of a rank, and for each other node.
RowsLeft captured_rows_left(const DispatchRank& rank, RowsLeft left) {
  const DispatchShape shape = rank.dispatch_shape();
  if (rank.is_two_level()) left.across = shape.T * static_cast<double>(shape.W / shape.node - 1);
  return left;
}

void rate_calls(DispatchBench& bench, DispatchRank& rank, Control& control, const RowsLeft& left, int64_t runs) {
  rank.announce_captured();
  const auto of = [&](const char* name, const std::function<void()>& body) {
    const double ms = static_cast<double>(control.max(std::llround(rank.median_ms(runs, body) * 1e6))) * 1e-6;
    bench.rates.push_back({.name = name,
                           .ms = ms,
                           .wire_bytes = bytes_left(rank, captured_rows_left(rank, left), name),
                           .useful_bytes = bytes_left(rank, left, name)});
  };
  of("dispatch", [&] { rank.dispatch_alone(); });
  of("combine", [&] { rank.combine_alone(); });
}

// Work that is captured cannot be staged through the host; direct sends no messages.
bool can_be_captured(const DispatchRank& rank) {
  if (!rank.on_gpu() || rank.local() || rank.kind() == DispatcherKind::alltoall) return false;
  return rank.kind() == DispatcherKind::direct || !rank.group().stages_gpu_memory();
}

}  // namespace

DispatchBench bench_dispatch(const DispatchBenchSpec& spec, Transport& world) {
  DispatchRank rank(spec, world);
  Control control(world);
  const BenchShape& shape = rank.shape();
  const MeshShape& mesh = rank.mesh().shape();
  const auto W = static_cast<double>(rank.group().size());
  DispatchBench bench{
      .axis = rank.group().name(), .ranks = world.size(), .ep = mesh.ep, .etp = mesh.etp, .shape = shape};
  bench.dispatcher = rank.local() ? "local" : name_of(rank.kind());
  const std::vector<Measured> calls = measure(rank, spec.runs);
  rank.check_y();
  if (rank.is_two_level()) bench.nodes = mesh.nodes_of_experts();
  const RowsLeft left = rows_left(rank, control);
  for (const Measured& call : calls) bench.lines.push_back(line_of(call, rank, control, left));
  if (can_be_captured(rank)) rate_calls(bench, rank, control, left, spec.runs);
  if (rank.local() || rank.kind() == DispatcherKind::direct) compare_with_copy(bench, rank, control, spec.runs);
  if (rank.local()) return bench;
  const int64_t here = rank.rows_here(), all = control.sum(here);
  bench.busiest_over_mean = static_cast<double>(control.max(here)) * W / static_cast<double>(all);
  return bench;
}

}  // namespace moebius
