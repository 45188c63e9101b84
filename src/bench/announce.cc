#include "bench/announce.h"

#include <algorithm>
#include <functional>

#include "bench/timing.h"
#include "core/trace.h"
#include "device/accelerator.h"
#include "ops/dispatch/dispatch.h"
#include "ops/permute/index_rows.h"

namespace moebius {
namespace {

constexpr int kCallsOfAGraph = 20, kReplays = 5;  // of a timed run on a GPU: 100 calls

BenchShape shape_of(const AnnounceBenchSpec& spec) {
  BenchShape shape = bench_shape(spec.shape, spec.scale);
  if (spec.sequences > 0) shape.batch = spec.sequences;
  MOEBIUS_CHECK(usage, spec.ranks >= 1 && shape.E % spec.ranks == 0,
                "bench announce: --ranks must divide the {} experts of {}; got {}; choose others", shape.E, shape.name,
                spec.ranks);
  return shape;
}

// The tensors that a rank computes, and the arrays of its window.
struct AnnouncingRank {
  std::vector<int32_t> topk;
  Tensor topk_TK, weight_TK, dest_TJ, slot_TJ, count_P, row_TJ, back_row_TJ, arrive_W1, back_W;
  Tensor weight_NL, offsets_e1, row_token_R, pair_row_NL, scratch, index_scratch, dweight_R, dweight_TK, sent_1;
  Tensor counts_WP, routes_N2L, back_BL;  // in the window
};

class AnnounceRun {
 public:
  explicit AnnounceRun(const AnnounceBenchSpec& spec)
      : spec_(spec), shape_(shape_of(spec)), pool_(spec.threads), e_(shape_.E / spec.ranks) {
    if (spec.device == DeviceKind::cuda) gpu_ = std::make_unique<Accelerator>();
    stream_ = gpu_ ? std::make_unique<Stream>(*gpu_, pool_) : std::make_unique<Stream>(spec.device, pool_);
    tensors_ = std::make_unique<BenchTensors>(*stream_);
    for (int64_t q = 0; q < spec.ranks; ++q) ranks_.push_back(make_rank(q));
    // The arrays are separate buffers, so an array's base address is that of its window.
    bases_of_counts_ = bases([](const AnnouncingRank& r) { return r.counts_WP.data; });
    bases_of_routes_ = bases([](const AnnouncingRank& r) { return r.routes_N2L.data; });
    bases_of_back_ = bases([](const AnnouncingRank& r) { return r.back_BL.data; });
  }

  AnnounceBench measure() {
    for (const Op& op : ops_)
      for (int64_t q = 0; q < spec_.ranks; ++q) op.run(q);
    check_index();
    AnnounceBench bench{.shape = shape_, .ranks = spec_.ranks};
    bench.lines.push_back({"announce", median_us([&] {
                             for (const Op& op : ops_)
                               if (op.announces) op.run(0);
                           })});
    for (const Op& op : ops_) bench.lines.push_back({op.name, median_us([&] { op.run(0); })});
    return bench;
  }

 private:
  struct Op {
    const char* name;
    bool announces;
    std::function<void(int64_t rank)> run;
  };

  AnnouncingRank make_rank(int64_t q) {
    const int64_t T = shape_.T(), K = shape_.K, W = spec_.ranks, J = std::min(K, W), L = std::min(K, e_), N = W * T;
    BenchRouting routing = spec_.routing;
    routing.seed += static_cast<uint64_t>(q);
    AnnouncingRank r;
    r.topk = bench_route(shape_, routing).topk_TK;
    const auto ints = [&](Shape shape) { return tensors_->zeros(shape, DType::i32); };
    const auto floats = [&](Shape shape) { return tensors_->zeros(shape, DType::f32); };
    r.topk_TK = tensors_->ints({T, K}, r.topk);
    r.weight_TK = tensors_->normal({T, K}, DType::f32, 1.0f);
    r.dest_TJ = ints({T, J});
    r.slot_TJ = ints({T, J});
    r.count_P = ints({W});
    r.row_TJ = ints({T, J});
    r.back_row_TJ = ints({T, J});
    r.arrive_W1 = ints({W + 1});
    r.back_W = ints({W});
    r.weight_NL = floats({N, L});
    r.offsets_e1 = ints({e_ + 1});
    r.row_token_R = ints({N * L});
    r.pair_row_NL = ints({N, L});
    r.scratch = tensors_->bytes(Destinations::scratch_bytes(T, W, *stream_));
    r.index_scratch = tensors_->bytes(IndexRows::scratch_bytes(N, e_, *stream_));
    r.dweight_R = floats({N * L});
    r.dweight_TK = floats({T, K});
    r.sent_1 = tensors_->zeros({1}, DType::i64);
    r.counts_WP = ints({W, W});
    r.routes_N2L = ints({N, 2 * L});
    r.back_BL = floats({T * J, L});
    return r;
  }
  Tensor bases(const std::function<void*(const AnnouncingRank&)>& array) {
    std::vector<int64_t> addresses;
    for (const AnnouncingRank& r : ranks_) addresses.push_back(reinterpret_cast<int64_t>(array(r)));
    const Tensor to = tensors_->zeros({spec_.ranks}, DType::i64);
    copy_to_device(*stream_, to.data, addresses.data(), to.num_bytes());
    synchronize(*stream_);
    return to;
  }

  // The rows of rank 0's experts are sorted by expert, then by the rank of their token, then by token.
  void check_index() {
    std::vector<int32_t> want, got(static_cast<size_t>(ranks_[0].row_token_R.numel()));
    for (int64_t expert = 0; expert < e_; ++expert) {
      int32_t n = 0;
      for (const AnnouncingRank& r : ranks_) {
        for (int64_t t = 0; t < shape_.T(); ++t) {
          const auto begin = r.topk.begin() + t * shape_.K, end = begin + shape_.K;
          if (std::find(begin, end, expert) != end) want.push_back(n);
          n += std::any_of(begin, end, [&](int32_t other) { return other < e_; }) ? 1 : 0;
        }
      }
    }
    copy_to_host(*stream_, got.data(), ranks_[0].row_token_R.data, ranks_[0].row_token_R.num_bytes());
    MOEBIUS_CHECK(numerics, std::equal(want.begin(), want.end(), got.begin()),
                  "bench announce: the rows that arrive at rank 0 do not have the index that plain loops give them");
  }

  double median_us(const std::function<void()>& body) {
    body();
    GraphCapture capture;
    const auto calls = [&] {
      for (int i = 0; i < kCallsOfAGraph; ++i) body();
    };
    const CudaGraph graph = gpu_ ? CudaGraph(*gpu_, capture, calls) : CudaGraph();
    const int replays = gpu_ ? kReplays : 1, times = replays * (gpu_ ? kCallsOfAGraph : 1);
    std::vector<double> us;
    for (int64_t run = 0; run <= spec_.runs; ++run) {
      synchronize(*stream_);
      const double begin = now_us();
      for (int i = 0; i < replays; ++i) gpu_ ? graph.replay(*gpu_) : body();
      synchronize(*stream_);
      if (run > 0) us.push_back((now_us() - begin) / times);  // the first one is a warm-up
    }
    return median(us);
  }

  void run_destinations(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    destinations(*stream_, {.dest_TJ = r.dest_TJ,
                            .slot_TJ = r.slot_TJ,
                            .count_P = r.count_P,
                            .scratch = r.scratch,
                            .topk_TK = r.topk_TK,
                            .experts_of_rank = e_});
  }
  void run_push_to_all(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    push_to_all(*stream_, {.sent_1 = r.sent_1, .x_M = r.count_P, .bases_W = bases_of_counts_, .rank = q});
  }
  void run_dispatch_places(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    dispatch_places(*stream_, {.row_TJ = r.row_TJ,
                               .back_row_TB = r.back_row_TJ,
                               .arrive_W1 = r.arrive_W1,
                               .back_W = r.back_W,
                               .dest_TJ = r.dest_TJ,
                               .slot_TJ = r.slot_TJ,
                               .counts_WP = r.counts_WP,
                               .rank = q});
  }
  void run_push_routes(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    push_routes(*stream_, {.sent_1 = r.sent_1,
                           .topk_TK = r.topk_TK,
                           .weight_TK = r.weight_TK,
                           .dest_TJ = r.dest_TJ,
                           .row_TJ = r.row_TJ,
                           .bases_W = bases_of_routes_,
                           .rank = q,
                           .experts_of_rank = e_});
  }
  void run_index_routes(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    index_routes(*stream_, {.offsets_e1 = r.offsets_e1,
                            .row_token_R = r.row_token_R,
                            .pair_row_NL = r.pair_row_NL,
                            .weight_NL = r.weight_NL,
                            .scratch = r.index_scratch,
                            .routes_N2L = r.routes_N2L,
                            .arrive_GV = r.arrive_W1.view({1, spec_.ranks + 1}),
                            .first_expert = e_ * q});
  }
  void run_return_pairs(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    return_pairs(*stream_, {.sent_1 = r.sent_1,
                            .from_R = r.dweight_R,
                            .pair_row_NL = r.pair_row_NL,
                            .arrive_W1 = r.arrive_W1,
                            .back_W = r.back_W,
                            .bases_W = bases_of_back_,
                            .rank = q});
  }
  void run_sum_pairs(int64_t q) {
    const AnnouncingRank& r = ranks_[q];
    sum_pairs(*stream_, {.to_TK = r.dweight_TK,
                         .from_BL = r.back_BL,
                         .topk_TK = r.topk_TK,
                         .dest_TJ = r.dest_TJ,
                         .back_row_TB = r.back_row_TJ,
                         .experts_of_rank = e_});
  }

  AnnounceBenchSpec spec_;
  BenchShape shape_;
  ThreadPool pool_;
  int64_t e_;
  std::unique_ptr<Accelerator> gpu_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<BenchTensors> tensors_;
  std::vector<AnnouncingRank> ranks_;
  Tensor bases_of_counts_, bases_of_routes_, bases_of_back_;
  // In their order. All ranks run an op before any of them runs the next one, as if a round were between them.
  std::vector<Op> ops_{{"destinations", true, [this](int64_t q) { run_destinations(q); }},
                       {"push_to_all", true, [this](int64_t q) { run_push_to_all(q); }},
                       {"dispatch_places", true, [this](int64_t q) { run_dispatch_places(q); }},
                       {"push_routes", true, [this](int64_t q) { run_push_routes(q); }},
                       {"index_routes", true, [this](int64_t q) { run_index_routes(q); }},
                       {"return_pairs", false, [this](int64_t q) { run_return_pairs(q); }},
                       {"sum_pairs", false, [this](int64_t q) { run_sum_pairs(q); }}};
};

}  // namespace

AnnounceBench bench_announce(const AnnounceBenchSpec& spec) { return AnnounceRun(spec).measure(); }

}  // namespace moebius
