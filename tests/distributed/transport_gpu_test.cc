// Groups that exchange memory of GPUs: by NCCL where each rank has a GPU of its own, else through
// host memory.
// The results are bitwise those of the same group with the same numbers in memory of the CPU.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/gpu/cuda/sum_of_ranks.h"
#include "comm/gpu/gpu_links.h"
#include "comm/rank_order_sum.h"
#include "io/testing.h"
#include "tests/distributed/ranks.h"
#include "tests/gpu_twin.h"

namespace moebius {
namespace {

class OnGpus : public Ranks {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};
INSTANTIATE_TEST_SUITE_P(Everywhere, OnGpus, ::testing::Values(1, 2, 3, 4), name_of_ranks);

// Returns ranks per node: with nodes of 2, sums over 4 ranks have two levels.
std::vector<int> nodes_of(int size) { return size == 4 ? std::vector<int>{8, 2} : std::vector<int>{8}; }

struct GpuRank {
  explicit GpuRank(Transport& transport, int node = 8)
      : ranks(transport),
        gpu(ranks.index()),
        links(transport, gpu, ranks),
        rank(transport.rank()),
        size(transport.size()) {
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    world = links.make_group("world", all, {.neighbours = true, .overlapped = true, .node = node});
    if (rank == 0) std::printf("ranks: %d, by %s\n", size, links.text().c_str());
  }
  Twin twin(const Shape& shape, DType dtype, uint64_t seed) { return Twin(s, shape, dtype, 1000 * seed + rank); }

  GpuRanks ranks;
  Accelerator gpu;
  GpuLinks links;
  int rank, size;
  ThreadPool pool{1};
  Stream s{gpu, pool}, host{DeviceKind::cpu, pool};
  std::unique_ptr<Group> world;
};

constexpr auto kSummed = {DType::f32, DType::f64, DType::i64, DType::bf16};

TEST_P(OnGpus, SumsAreThoseOfTheCpu) {
  run([](Transport& transport) {
    for (const int node : nodes_of(transport.size())) {
      GpuRank r(transport, node);
      for (const DType dtype : kSummed) {
        for (const int64_t n : {0, 1, 7, 4099, 1 << 20}) {
          Twin x = r.twin({n}, dtype, 1);
          r.world->all_reduce_sum(r.s, x.gpu);
          r.world->all_reduce_sum(r.host, x.host);
          x.expect_same("all_reduce_sum");
          const int64_t rows = n % 5000;
          Twin in = r.twin({rows * r.size, 3}, dtype, 2), out = r.twin({rows, 3}, dtype, 3);
          r.world->reduce_scatter_sum(r.s, out.gpu, in.gpu);
          r.world->reduce_scatter_sum(r.host, out.host, in.host);
          out.expect_same("reduce_scatter_sum");
          const auto own = [&](const Tensor& t) { return t.rows(rows * r.rank, rows * (r.rank + 1)); };
          r.world->reduce_scatter_sum(r.s, own(in.gpu), in.gpu);
          r.world->reduce_scatter_sum(r.host, own(in.host), in.host);
          in.expect_same("reduce_scatter_sum in place");
        }
      }
    }
  });
}

// The sum of the parts of many ranks, all of them on one GPU, is that of the CPU. Sums between levels turn bf16 into f32,
// and back.
TEST(OnGpu, SumsOfPartsAreThoseOfTheCpu) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  Accelerator gpu(0);
  ThreadPool pool{1};
  Stream s{gpu, pool}, host{DeviceKind::cpu, pool};
  constexpr std::pair<DType, DType> kDtypes[] = {{DType::f32, DType::f32},  {DType::f64, DType::f64},
                                                 {DType::i64, DType::i64},  {DType::bf16, DType::bf16},
                                                 {DType::bf16, DType::f32}, {DType::f32, DType::bf16}};
  for (const int size : {1, 2, 8, 11, 509}) {
    for (const auto& [from, to] : kDtypes) {
      for (const int64_t n : {1, 7, 256, 5000}) {
        Twin parts(s, {size, n}, from, static_cast<uint64_t>(size + n)), out(s, {n}, to, 1);
        const int64_t stride = n * size_of(from);
        const RankParts on_gpu{.own = static_cast<std::byte*>(parts.gpu.data) + (size - 1) * stride,
                               .arrived = parts.gpu.data,
                               .stride_bytes = stride,
                               .own_rank = size - 1,
                               .count = size,
                               .dtype = from};
        cuda::sum_of_ranks(gpu.native_stream(), out.gpu, on_gpu);
        std::vector<const void*> on_host;
        for (int r = 0; r < size; ++r) on_host.push_back(static_cast<std::byte*>(parts.host.data) + r * stride);
        sum_in_rank_order(host, out.host, on_host, from);
        out.expect_same("sum_of_ranks");
      }
    }
  }
}

// NCCL's own sums differ by rounding. Where ranks share a GPU they are refused.
TEST_P(OnGpus, NcclSumsAreNearThoseOfTheCpu) {
  run([](Transport& transport) {
    GpuRanks ranks(transport);
    Accelerator gpu(ranks.index());
    if (!ranks.each_has_its_own() || !NcclLinks::why_missing().empty()) {
      EXPECT_THROW(GpuLinks(transport, gpu, ranks, GpuSums::nccl), Error);
      return;
    }
    GpuLinks links(transport, gpu, ranks, GpuSums::nccl);
    ThreadPool pool{1};
    Stream s{gpu, pool}, host{DeviceKind::cpu, pool};
    std::vector<int> all(static_cast<size_t>(transport.size()));
    for (int r = 0; r < transport.size(); ++r) all[r] = r;
    const auto group = links.make_group("nccl sums", all, {.overlapped = true});
    const auto seed = static_cast<uint64_t>(77 + transport.rank());
    Twin x(s, {4099}, DType::i64, seed), in(s, {50 * transport.size(), 3}, DType::i64, seed + 100);
    Twin out(s, {50, 3}, DType::i64, 1), begun(s, {50, 3}, DType::i64, 1), arrived(s, in.host.shape, DType::i64, 2);
    group->all_reduce_sum(s, x.gpu);
    group->all_reduce_sum(host, x.host);
    x.expect_same("all_reduce_sum");
    group->reduce_scatter_sum(s, out.gpu, in.gpu);
    group->start_reduce_scatter_sum(s, begun.gpu, in.gpu, arrived.gpu).wait();
    group->reduce_scatter_sum(host, out.host, in.host);
    group->reduce_scatter_sum(host, begun.host, in.host);
    out.expect_same("reduce_scatter_sum");
    begun.expect_same("start_reduce_scatter_sum");
    Twin gathered(s, in.host.shape, DType::i64, 3);
    group->all_gather(s, gathered.gpu, out.gpu);
    group->all_gather(host, gathered.host, out.host);
    gathered.expect_same("all_gather");
  });
}

TEST_P(OnGpus, DataMovementEqualsThatOfTheCpu) {
  run([](Transport& transport) {
    for (const int node : nodes_of(transport.size())) {
      GpuRank r(transport, node);
      for (const int64_t n : {0, 1, 5, 70001}) {
        Twin in = r.twin({n}, DType::f32, 1), out = r.twin({n * r.size}, DType::f32, 2);
        r.world->all_gather(r.s, out.gpu, in.gpu);
        r.world->all_gather(r.host, out.host, in.host);
        out.expect_same("all_gather");
        for (int root = 0; root < r.size; ++root) {
          r.world->broadcast(r.s, in.gpu, root);
          r.world->broadcast(r.host, in.host, root);
          in.expect_same("broadcast");
        }
      }
      std::vector<int64_t> send_rows, recv_rows;
      for (int q = 0; q < r.size; ++q) {
        send_rows.push_back((r.rank + 2 * q + 1) % 4 * 100);
        recv_rows.push_back((q + 2 * r.rank + 1) % 4 * 100);
      }
      Twin in = r.twin({1200, 3}, DType::bf16, 3), out = r.twin({1300, 3}, DType::bf16, 4);
      r.world->all_to_all_v(r.s, {.out = out.gpu, .in = in.gpu, .recv_rows = recv_rows, .send_rows = send_rows});
      r.world->all_to_all_v(r.host, {.out = out.host, .in = in.host, .recv_rows = recv_rows, .send_rows = send_rows});
      out.expect_same("all_to_all_v");
    }
  });
}

// Runs buckets one after another, and rings of large messages both ways, while the stream
// has other work.
void run_overlapped(GpuRank& r, Group& world, Stream& s, std::vector<Tensor> t) {
  Pending first = world.start_reduce_scatter_sum(s, t[0], t[1], t[2]);
  Pending gathered = world.start_all_gather(s, t[3], t[4]);
  if (r.size > 1) {
    const int next = (r.rank + 1) % r.size, previous = (r.rank + r.size - 1) % r.size;
    Pending sent = world.send(s, t[5], next), back = world.send(s, t[6], previous);
    Pending arrived = world.recv(s, t[7], previous), other = world.recv(s, t[8], next);
    world.all_reduce_sum(s, t[9]);
    arrived.wait();
    other.wait();
    sent.wait();
    back.wait();
  }
  gathered.wait();
  first.wait();
}

struct Overlapped {
  explicit Overlapped(GpuRank& r) : rank(r) {
    const int64_t n = 1 << 20;
    for (const int64_t size : {n, n * r.size, n * r.size, n * r.size, n, n, n, n, n, n})
      twins.push_back(std::make_unique<Twin>(r.s, Shape{size}, DType::f32, 100 * twins.size() + r.rank));
  }
  void run(Stream& s, bool on_gpu) {
    std::vector<Tensor> tensors;
    for (const auto& twin : twins) tensors.push_back(on_gpu ? twin->gpu : twin->host);
    run_overlapped(rank, *rank.world, s, tensors);
  }
  void expect_same() {
    for (const int i : {0, 3, 7, 8, 9}) twins[i]->expect_same("overlapped");
  }
  GpuRank& rank;
  std::vector<std::unique_ptr<Twin>> twins;
};

TEST_P(OnGpus, OverlappedCollectivesGiveTheSame) {
  run([](Transport& transport) {
    for (const int node : nodes_of(transport.size())) {
      GpuRank r(transport, node);
      Overlapped b(r);
      for (int i = 0; i < 3; ++i) {
        b.run(r.s, true);
        b.run(r.host, false);
      }
      b.expect_same();
    }
  });
}

// Captured once and then replayed, the group gives the same numbers and counts every replay.
TEST_P(OnGpus, ReplayedGraphsGiveTheSameNumbers) {
  run([](Transport& transport) {
    for (const int node : nodes_of(transport.size())) {
      GpuRank r(transport, node);
      if (!r.links.can_capture()) return;
      Overlapped b(r);
      const int64_t before = r.world->sent_bytes();
      b.run(r.s, true);
      const int64_t sent = r.world->sent_bytes() - before;
      {
        GraphCapture failed;
        expect_error(ErrorKind::usage, "no graph",
                     [&] { CudaGraph(r.gpu, failed, [] { MOEBIUS_FAIL(usage, "no graph"); }); });
      }
      EXPECT_EQ(r.gpu.capture(), nullptr);
      GraphCapture capture;
      const CudaGraph graph(r.gpu, capture, [&] { b.run(r.s, true); });
      EXPECT_EQ(r.world->sent_bytes() - before, sent);
      for (int i = 0; i < 2; ++i) {
        graph.replay(r.gpu);
        capture.replayed();
      }
      EXPECT_EQ(r.world->sent_bytes() - before, 3 * sent);
      synchronize(r.s);
      EXPECT_GT(r.world->seconds(), 0);
      for (int i = 0; i < 3; ++i) b.run(r.host, false);
      b.expect_same();
    }
  });
}

TEST_P(OnGpus, SendTheBytesOfTheFormulas) {
  run([](Transport& transport) {
    GpuRank r(transport);
    const int64_t n = r.size, rows = 6000, b = rows * n * 4;
    Twin large = r.twin({rows * n}, DType::f32, 1), small = r.twin({rows}, DType::f32, 2);
    int64_t before = 0;
    const auto sent = [&] {
      const int64_t bytes = r.world->sent_bytes() - before;
      before = r.world->sent_bytes();
      return bytes;
    };
    r.world->all_reduce_sum(r.s, large.gpu);
    EXPECT_EQ(sent(), 2 * b * (n - 1) / n);
    r.world->reduce_scatter_sum(r.s, small.gpu, large.gpu);
    EXPECT_EQ(sent(), b * (n - 1) / n);
    r.world->all_gather(r.s, large.gpu, small.gpu);
    EXPECT_EQ(sent(), b * (n - 1) / n);
    r.world->broadcast(r.s, large.gpu, 0);
    EXPECT_EQ(sent(), r.rank == 0 ? b * (n - 1) : 0);
    synchronize(r.s);
  });
}

// Another rank throws while this one's GPU waits for it. The wait ends with the run.
TEST_P(OnGpus, ARankThatThrowsEndsTheWaitForTheGpu) {
  if (GetParam() == 1 || process_world() != nullptr) return;
  const auto body = [](Transport& transport) {
    GpuRank r(transport);
    Twin x = r.twin({1 << 20}, DType::f32, 1);
    r.world->barrier();
    if (r.rank == 1) MOEBIUS_FAIL(numerics, "the loss is not a number");
    try {
      r.world->all_reduce_sum(r.s, x.gpu);
      synchronize(r.s);
      ADD_FAILURE() << "a rank did not join";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::distributed);
      EXPECT_NE(std::string(e.what()).find("the loss is not a number"), std::string::npos) << e.what();
      r.links.abandon();
      throw;
    }
  };
  EXPECT_THROW(run_threads(GetParam(), test_world(), body), Error);
}

// A rank that never joins is waited for no longer than the timeout.
TEST_P(OnGpus, ARankThatStallsEndsTheWaitForTheGpu) {
  if (GetParam() == 1 || process_world() != nullptr) return;
  std::atomic<int> num_failed = 0;  // rank 1 stays away until all others have failed
  const auto body = [&](Transport& transport) {
    GpuRank r(transport);
    Twin x = r.twin({1 << 20}, DType::f32, 1);
    r.world->barrier();
    while (r.rank == 1 && num_failed < GetParam() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (r.rank == 1) return r.world->barrier();
    try {
      r.world->all_reduce_sum(r.s, x.gpu);
      synchronize(r.s);
      ADD_FAILURE() << "a rank did not join";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::distributed);
      EXPECT_NE(std::string(e.what()).find("has waited for 2 s"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("all_reduce_sum"), std::string::npos) << e.what();
      ++num_failed;
      r.links.abandon();
      throw;
    }
  };
  EXPECT_THROW(run_threads(GetParam(), {.timeout_s = 2}, body), Error);
}

}  // namespace
}  // namespace moebius
