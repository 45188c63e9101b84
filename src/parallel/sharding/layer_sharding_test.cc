// Sharded weights and gradients of layers, on two ranks that are threads.
#include <array>

#include "comm/transport/threads.h"
#include "io/testing.h"
#include "parallel/sharding/sharding.h"

namespace moebius {
namespace {

constexpr int kRanks = 2, kNumel = 300;

// Layers of two parameters each, of one group: a matrix whose gradient is stored, and a row to whose gradient products
// add. Before and after them are parameters that belong to no layer.
struct ShardedRank {
  ShardedRank(Transport& world, const ShardingSpec& spec, int num_layers = 3,
              const std::vector<std::string>& freeze = {}, int64_t fsdp_shard = 0)
      : mesh({.dp = world.size(), .edp = world.size(), .fsdp_shard = fsdp_shard}, world),
        params(plan, ModelUse::training, freeze) {
    params.declare({.name = "first", .shape = {7}});
    for (int layer = 0; layer < num_layers; ++layer)
      params.layer([&] {
        params.declare(stored_first({.name = fmt::format("matrix{}", layer), .shape = {kNumel}}));
        params.declare({.name = fmt::format("row{}", layer), .shape = {5}});
      });
    params.declare({.name = "last", .shape = {7}});
    sharding = make_sharding(params, mesh, plan, spec);
    plan.bind(DeviceKind::cpu, 1 << 16);
    for (const Param& p : params.all()) set_owned(p, 0);
  }
  static float value(const Param& p, int64_t i, int step) {
    return static_cast<float>(p.spec.name.back() + static_cast<int>(p.spec.name.size()) * 1000 + step * 7) +
           static_cast<float>(i) / 512;
  }
  static void set_owned(const Param& p, int step) {
    const Tensor own = p.owned_weights();
    for (int64_t i = 0; i < own.numel(); ++i) own.ptr<float>()[i] = value(p, p.owned.begin + i, step);
  }
  static int64_t different(const Param& p, int step) {
    int64_t sum = 0;
    for (int64_t i = 0; i < p.w.numel(); ++i) sum += p.w.ptr<float>()[i] != value(p, i, step);
    return sum;
  }
  ParamSpan span(int layer) const { return {static_cast<size_t>(1 + 2 * layer), static_cast<size_t>(3 + 2 * layer)}; }
  int64_t sent() const { return mesh.sent_bytes(Axis::dp_cp); }

  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Mesh mesh;
  MemoryPlan plan;
  ParamTable params;
  std::unique_ptr<Sharding> sharding;
};

void on_ranks(const std::function<void(Transport&)>& body) { run_threads(kRanks, {.timeout_s = 30}, body); }

// Shares are in the memory of the device, or in that of the host.
template <class Body>
void for_each_way(Body&& body) {
  for (const bool overlap : {true, false})
    for (const bool on_host : {false, true}) {
      SCOPED_TRACE(fmt::format("overlap {}, on host {}", overlap, on_host));
      body(ShardingSpec{.overlap = overlap, .shards_weights = true, .weights_on_host = on_host});
    }
}

// Frozen weights of layers are sharded and gathered like trained ones. Weights outside of layers remain whole.
TEST(LayerWeights, MayBeFrozen) {
  for_each_way([](const ShardingSpec& spec) {
    on_ranks([&](Transport& world) {
      ShardedRank rank(world, spec, 3, {"first", "matrix*"});
      const auto is_matrix = [](const Param& p) { return p.spec.name.starts_with("matrix"); };
      int64_t kept = 0;
      for (const Param& p : rank.params.all()) {
        EXPECT_EQ(p.shards_weights(), p.layer >= 0) << p.spec.name;
        EXPECT_EQ(p.frozen, !p.has_grad);
        EXPECT_EQ(p.owned_weights().numel(), p.owned.count);
        if (is_matrix(p)) kept += p.owned.count;
      }
      EXPECT_EQ(kept, 3 * (world.rank() == 0 ? 256 : kNumel - 256));  // shares end at a multiple of 256
      EXPECT_EQ(rank.plan.bytes(Life::grad), 4 * (2 * 256 + 3 * 2 * 256)) << "of last and of the rows, with padding";
      for (const int layer : {0, 1, 2, 2, 1, 0}) {
        const ParamSpan span = rank.span(layer);
        rank.params.ready(rank.s, span);
        for (size_t i = span.begin; i < span.end; ++i) EXPECT_EQ(ShardedRank::different(rank.params.all()[i], 0), 0);
        rank.params.release(rank.s, span);
      }
    });
  });
}

TEST(LayerWeights, StayFromReadyUntilTheNextLayerInTheirBuffer) {
  for_each_way([](const ShardingSpec& spec) {
    on_ranks([&](Transport& world) {
      ShardedRank rank(world, spec);
      ParamTable& params = rank.params;
      for (int step = 0; step < 2; ++step) {
        for (const Param& p : params.all()) ShardedRank::set_owned(p, step);
        rank.sharding->weights_changed(rank.s);
        for (const int layer : {0, 1, 2, 2, 1, 0}) {  // forward and backward
          params.ready(rank.s, rank.span(layer));
          const ParamSpan span = rank.span(layer);
          for (size_t i = span.begin; i < span.end; ++i) EXPECT_EQ(ShardedRank::different(params.all()[i], step), 0);
          params.release(rank.s, span);
        }
        rank.sharding->wait_for_weights(rank.s);
        for (const Param& p : params.all()) {
          if (p.layer < 0) {
            EXPECT_EQ(ShardedRank::different(p, step), 0) << p.spec.name;
          }
          EXPECT_EQ(p.shards_weights(), p.layer >= 0);
        }
        // The last buffer of the backward pass is layer 0's, and with two buffers the other still belongs to layer 1.
        EXPECT_NE(params.all()[1].w.data, nullptr);
        EXPECT_EQ(params.all()[3].w.data != nullptr, spec.overlap);
        EXPECT_EQ(params.all()[5].w.data, nullptr);
      }
    });
  });
}

TEST(LayerWeights, AreGatheredUnlessInTheirBuffer) {
  on_ranks([](Transport& world) {
    ShardedRank rank(world, {.overlap = true, .shards_weights = true}, /*num_layers=*/4);
    rank.sharding->wait_for_weights(rank.s);
    const auto bytes_of = [&](const std::vector<int>& layers) {
      const int64_t before = rank.sent();
      for (const int layer : layers) {
        rank.params.ready(rank.s, rank.span(layer));
        rank.params.release(rank.s, rank.span(layer));
      }
      return rank.sent() - before;
    };
    const int64_t layer = 512 * 4;  // half of 300 and 5 elements, each padded to 256, and both to 1024
    EXPECT_EQ(bytes_of({0, 1, 2, 3}), 4 * layer);
    EXPECT_EQ(bytes_of({3, 2, 1, 0}), 2 * layer);
    EXPECT_EQ(bytes_of({0, 1, 2, 3}), 2 * layer);
    rank.sharding->weights_changed(rank.s);
    rank.sharding->wait_for_weights(rank.s);  // the buckets of both ends
    EXPECT_EQ(bytes_of({0, 1}), 2 * layer);
  });
}

// The ranks of a shard have the whole layer between them, and the others hold copies of their shards.
TEST(LayerWeights, ComeFromShardsAfterTheFirstGather) {
  for_each_way([](const ShardingSpec& spec) {
    run_threads(4, {.timeout_s = 30}, [&](Transport& world) {
      ShardedRank rank(world, spec, 3, {"row*"}, /*fsdp_shard=*/2);
      const auto bytes_of = [&](const std::vector<int>& layers, int step) {
        const int64_t before = rank.sent();
        for (const int layer : layers) {
          const ParamSpan span = rank.span(layer);
          rank.params.ready(rank.s, span);
          for (size_t i = span.begin; i < span.end; ++i) {
            const Param& p = rank.params.all()[i];
            EXPECT_EQ(ShardedRank::different(p, p.frozen ? 0 : step), 0) << p.spec.name;
          }
          rank.params.release(rank.s, span);
        }
        return rank.sent() - before;
      };
      for (int step = 0; step < 2; ++step) {
        for (const Param& p : rank.params.all())
          if (!p.frozen) ShardedRank::set_owned(p, step);
        rank.sharding->weights_changed(rank.s);
        rank.sharding->wait_for_weights(rank.s);
        const int64_t layer = 2 * 1024 * 4;  // a matrix and a frozen row, each in a bucket that is padded to 1024
        EXPECT_EQ(bytes_of({0, 1, 2}, step), 3 * layer * 3 / 4);
        EXPECT_EQ(bytes_of({2, 1, 0}, step), (spec.overlap ? 1 : 2) * layer / 2);
        EXPECT_EQ(bytes_of({0, 1, 2}, step), (spec.overlap ? 1 : 2) * layer / 2);
      }
    });
  });
}

// A CUDA graph gathers the weights that it reads, whatever the buffers held when it was captured.
TEST(LayerWeights, AreGatheredAgainInEachCapturedPass) {
  for (const auto& [shard, on_host] :
       {std::pair{0, false}, std::pair{2, false}, std::pair{0, true}, std::pair{2, true}}) {
    run_threads(4, {.timeout_s = 30}, [&, shard = shard, on_host = on_host](Transport& world) {
      const ShardingSpec spec{.overlap = true, .shards_weights = true, .weights_on_host = on_host};
      ShardedRank rank(world, spec, 3, {}, shard);
      rank.sharding->wait_for_weights(rank.s);
      GraphCapture first, later, update;
      const auto bytes_of = [&](GraphCapture& capture, bool is_first) {
        const int64_t before = rank.sent();
        rank.s.set_capture(&capture);
        rank.sharding->run_passes(rank.s, {.first = is_first, .closed = true}, [&] {
          for (const int layer : {0, 1, 2, 2, 1, 0}) {
            rank.params.ready(rank.s, rank.span(layer));
            EXPECT_EQ(ShardedRank::different(rank.params.all()[rank.span(layer).begin], 0), 0);
            rank.params.release(rank.s, rank.span(layer));
          }
        });
        rank.s.set_capture(nullptr);
        for (const Param& p : rank.params.all()) EXPECT_EQ(p.w.data == nullptr, p.layer >= 0) << p.spec.name;
        return rank.sent() - before;
      };
      const int64_t ends = 1024 * 4 * 3 / 4, all = 1024 * 4 * 3 / 4, some = shard == 0 ? all : 1024 * 4 / 2;
      EXPECT_EQ(bytes_of(first, true), ends + 3 * all + some);
      EXPECT_EQ(bytes_of(later, false), 4 * some);
      rank.s.set_capture(&update);
      rank.sharding->weights_changed(rank.s);
      rank.s.set_capture(nullptr);
      // An eager pass leaves layers in the buffers, as an evaluation does.
      for (const int layer : {0, 1, 2}) {
        rank.params.ready(rank.s, rank.span(layer));
        rank.params.release(rank.s, rank.span(layer));
      }
      // Replays of a step leave shards that are old, as the step did, and none of these layers.
      first.replayed();
      later.replayed();
      update.replayed();
      const int64_t before = rank.sent();
      rank.params.ready(rank.s, rank.span(0));
      rank.params.release(rank.s, rank.span(0));
      EXPECT_EQ(rank.sent() - before, ends + all);
      rank.params.ready(rank.s, rank.span(1));
      rank.params.release(rank.s, rank.span(1));
      EXPECT_EQ(rank.sent() - before, ends + 2 * all);
    });
  }
}

// A rank starts to gather a layer before the other rank has reached it.
TEST(LayerWeights, StartOneLayerEarly) {
  on_ranks([](Transport& world) {
    ShardedRank rank(world, {.overlap = true, .shards_weights = true});
    rank.params.ready(rank.s, rank.span(0));
    const int64_t before = rank.sent();
    rank.params.gather(rank.s, rank.span(1));
    EXPECT_GT(rank.sent(), before);
    EXPECT_EQ(ShardedRank::different(rank.params.all()[1], 0), 0) << "layer 0 is in use, in the other buffer";
    rank.params.release(rank.s, rank.span(0));
    const int64_t gathered = rank.sent();
    rank.params.ready(rank.s, rank.span(1));
    EXPECT_EQ(rank.sent(), gathered);
    EXPECT_EQ(ShardedRank::different(rank.params.all()[3], 0), 0);
    rank.params.release(rank.s, rank.span(1));
  });
}

// Copies from the host run when they are waited for, so a missing wait gives other weights. A pass that is announced
// layer by layer starts those of a gather two layers early.
TEST(LayerWeights, ComeFromTheHostInEachPass) {
  for (const int num_ranks : {1, 2}) {
    for (const bool overlap : {true, false}) {
      run_threads(num_ranks, {.timeout_s = 30}, [&](Transport& world) {
        const ShardingSpec spec{.overlap = overlap, .shards_weights = true, .weights_on_host = true};
        ShardedRank rank(world, spec, /*num_layers=*/5, {"row3"});
        const int64_t share = 5 * 1024 * 4 / num_ranks, layer = 1024 * 4;
        EXPECT_EQ(rank.plan.bytes(Life::host), num_ranks == 1 ? 5 * 768 * 4 : share);
        if (num_ranks > 1 && !overlap) {
          EXPECT_EQ(rank.plan.bytes(Life::comm), layer + layer / num_ranks);
        }
        const auto pass = [&](const std::vector<int>& layers, int step) {
          for (size_t k = 0; k < layers.size(); ++k) {
            if (k + 1 < layers.size()) rank.params.gather(rank.s, rank.span(layers[k + 1]));
            const ParamSpan span = rank.span(layers[k]);
            rank.params.ready(rank.s, span);
            for (size_t i = span.begin; i < span.end; ++i) {
              const Param& p = rank.params.all()[i];
              EXPECT_EQ(ShardedRank::different(p, p.frozen ? 0 : step), 0) << p.spec.name << " in step " << step;
            }
            rank.params.release(rank.s, span);
          }
        };
        for (int step = 0; step < 3; ++step) {
          for (const Param& p : rank.params.all())
            if (!p.frozen) ShardedRank::set_owned(p, step);
          rank.sharding->weights_changed(rank.s);
          for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
            rank.sharding->run_passes(rank.s, {.first = micro_batch == 0}, [&] {
              pass({0, 1, 2, 3, 4}, step);
              pass({4, 3, 2, 1, 0}, step);
            });
          pass({0, 1, 2}, step);  // an evaluation that ends early
        }
      });
    }
  }
}

TEST(LayerWeights, RefuseABufferThatIsInUse) {
  expect_error(ErrorKind::internal, "weights of a layer leave their buffer after its release", [] {
    on_ranks([](Transport& world) {
      ShardedRank rank(world, {.overlap = true, .shards_weights = true});
      rank.params.ready(rank.s, rank.span(0));
      rank.params.ready(rank.s, rank.span(2));
    });
  });
}

// f32 values whose sum depends on the order.
float gradient(int rank, int micro_batch, int64_t i) {
  constexpr std::array<float, 4> kValues = {1e8f, 1.0f, -1e8f, 3.0f};
  return kValues[static_cast<size_t>(2 * rank + micro_batch) % 4] + static_cast<float>(i);
}

TEST(LayerGradients, AreSumsOverMicroBatchesOfSumsOverRanks) {
  for (const bool overlap : {true, false}) {
    on_ranks([&](Transport& world) {
      ShardedRank rank(world, {.overlap = overlap, .shards_gradients = true});
      ParamTable& params = rank.params;
      for (int step = 0; step < 2; ++step) {
        for (int m = 0; m < 2; ++m) {
          rank.sharding->run_passes(rank.s, {.first = m == 0, .last_micro_batches = m}, [&] {
            for (int layer = 2; layer >= 0; --layer) {
              const ParamSpan span = rank.span(layer);
              params.ready(rank.s, span);
              params.begin_gradient(rank.s, span, /*first_of_step=*/m == 0);
              for (size_t i = span.begin; i < span.end; ++i) {
                const Param& p = params.all()[i];
                MicroBatch batch;
                batch.first_of_step = m == 0;
                EXPECT_FALSE(p.adds_to_grad(batch));
                for (int64_t k = 0; k < p.w.numel(); ++k) {
                  float& dw = p.dw.ptr<float>()[k];
                  dw = (p.spec.grad_stored_first ? 0 : dw) + gradient(world.rank(), m, k);
                }
              }
              params.grad_ready(rank.s, span);
              params.release(rank.s, span);
            }
          });
        }
        rank.sharding->reduce(rank.s);
        for (const Param& p : params.all()) {
          if (p.layer < 0) continue;
          EXPECT_TRUE(p.shards_gradient());
          const Tensor own = p.owned_gradient();
          int64_t different = 0;
          for (int64_t k = 0; k < own.numel(); ++k) {
            const int64_t i = p.owned.begin + k;
            const float of_first = gradient(0, 0, i) + gradient(1, 0, i),
                        of_second = gradient(0, 1, i) + gradient(1, 1, i);
            different += own.ptr<float>()[k] != of_first + of_second;
          }
          EXPECT_EQ(different, 0) << p.spec.name;
        }
      }
    });
  }
}

// No rank holds whole gradients of layers, and a rank's share is planned.
TEST(LayerGradients, TakeTheMemoryOfOneShareAndOfTwoLayers) {
  on_ranks([](Transport& world) {
    const ShardedRank whole(world, {.overlap = true}), sharded(world, {.overlap = true, .shards_gradients = true});
    const int64_t layer = 1024 * 4, ends = 512 * 4;  // see above; both ends are in one bucket
    EXPECT_EQ(sharded.plan.bytes(Life::grad), ends + 3 * layer / kRanks);
    EXPECT_EQ(sharded.plan.bytes(Life::layer_grad), 2 * layer);
    EXPECT_EQ(sharded.plan.bytes(Life::param), ends + 3 * layer);
    EXPECT_GT(whole.plan.bytes(Life::grad), sharded.plan.bytes(Life::grad));
  });
}

}  // namespace
}  // namespace moebius
