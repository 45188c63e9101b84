// Groups of NCCL of several levels, whose ranks share one GPU by a double of NCCL's functions.
// The results are bitwise those of messages, and so are the bytes that a rank sends.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <numeric>

#include "comm/gpu/nccl/group.h"
#include "comm/gpu/nccl/world.h"
#include "comm/group_cost.h"
#include "comm/transport/threads.h"
#include "tests/gpu_twin.h"
#include "tests/nccl/one_gpu_nccl.h"

namespace moebius {
namespace {

struct GroupShape {
  int size = 1, node = 8;
};

struct NcclRank {
  NcclRank(Transport& transport, int node)
      : rank(transport.rank()), size(transport.size()), world(transport, gpu, GpuSums::ranks, one_gpu_nccl()) {
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    group = make_nccl_group(world, transport.make_group("dp", all, node), {.overlapped = true, .node = node});
  }
  Twin twin(const Shape& shape, DType dtype, uint64_t seed) { return Twin(s, shape, dtype, 1000 * seed + rank); }
  // Runs the call on the GPU and on the CPU, which sends as many bytes.
  void run(const char* what, const std::function<void(Stream&, bool on_gpu)>& call) {
    const int64_t begin = group->sent_bytes();
    call(s, true);
    const int64_t sent = group->sent_bytes() - begin;
    call(host, false);
    EXPECT_EQ(sent, group->sent_bytes() - begin - sent) << what;
  }

  int rank, size;
  Accelerator gpu{0};
  ThreadPool pool{1};
  Stream s{gpu, pool}, host{DeviceKind::cpu, pool};
  NcclWorld world;
  std::unique_ptr<Group> group;
};

class NcclGroupsOnGpu : public ::testing::TestWithParam<GroupShape> {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static void run(const std::function<void(NcclRank&)>& body) {
    run_threads(GetParam().size, {.timeout_s = 120}, [&](Transport& transport) {
      NcclRank rank(transport, GetParam().node);
      body(rank);
      synchronize(rank.s);
      rank.group->barrier();
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, NcclGroupsOnGpu,
                         ::testing::Values(GroupShape{1}, GroupShape{2}, GroupShape{8}, GroupShape{12}, GroupShape{16},
                                           GroupShape{24}, GroupShape{4, 2}, GroupShape{6, 3}, GroupShape{8, 2}),
                         [](const auto& info) {
                           return fmt::format("{}_nodes_of_{}", info.param.size, info.param.node);
                         });

constexpr auto kSummed = {DType::f32, DType::f64, DType::i64, DType::bf16};

TEST_P(NcclGroupsOnGpu, AllReduceHasTheBitsAndBytesOfMessages) {
  run([](NcclRank& r) {
    for (const DType dtype : kSummed) {
      for (const int64_t n : {0, 1, 7, 96, 4099, 48000}) {
        Twin x = r.twin({n}, dtype, 1);
        r.run("all_reduce_sum", [&](Stream& s, bool on_gpu) { r.group->all_reduce_sum(s, on_gpu ? x.gpu : x.host); });
        x.expect_same("all_reduce_sum");
      }
    }
  });
}

TEST_P(NcclGroupsOnGpu, ReduceScatterHasTheBitsAndBytesOfMessages) {
  run([](NcclRank& r) {
    for (const DType dtype : kSummed) {
      for (const int64_t rows : {0, 1, 2, 5, 64, 1001}) {
        Twin in = r.twin({rows * r.size, 3}, dtype, 2), out = r.twin({rows, 3}, dtype, 3);
        Twin begun = r.twin({rows, 3}, dtype, 4), arrived = r.twin({rows * r.size, 3}, dtype, 5);
        r.run("reduce_scatter_sum", [&](Stream& s, bool on_gpu) {
          r.group->reduce_scatter_sum(s, on_gpu ? out.gpu : out.host, on_gpu ? in.gpu : in.host);
        });
        out.expect_same("reduce_scatter_sum");
        r.run("start_reduce_scatter_sum", [&](Stream& s, bool on_gpu) {
          const Tensor memory = on_gpu ? arrived.gpu : arrived.host;
          r.group->start_reduce_scatter_sum(s, on_gpu ? begun.gpu : begun.host, on_gpu ? in.gpu : in.host, memory)
              .wait();
        });
        begun.expect_same("start_reduce_scatter_sum");
        r.run("reduce_scatter_sum in place", [&](Stream& s, bool on_gpu) {
          const Tensor& whole = on_gpu ? in.gpu : in.host;
          r.group->reduce_scatter_sum(s, whole.rows(rows * r.rank, rows * (r.rank + 1)), whole);
        });
        in.expect_same("reduce_scatter_sum in place");
      }
    }
  });
}

// One element of bf16 for each rank: the memory has no space for sums of f32 beside what arrives.
TEST_P(NcclGroupsOnGpu, OverlappedSumsOfOneElement) {
  run([](NcclRank& r) {
    Twin in = r.twin({r.size}, DType::bf16, 2), out = r.twin({1}, DType::bf16, 3),
         arrived = r.twin({r.size}, DType::bf16, 4);
    r.run("start_reduce_scatter_sum", [&](Stream& s, bool on_gpu) {
      const Tensor memory = on_gpu ? arrived.gpu : arrived.host;
      r.group->start_reduce_scatter_sum(s, on_gpu ? out.gpu : out.host, on_gpu ? in.gpu : in.host, memory).wait();
    });
    out.expect_same("start_reduce_scatter_sum");
    in.expect_same("the parts");
  });
}

TEST_P(NcclGroupsOnGpu, GathersAndBroadcastsEqualMessages) {
  run([](NcclRank& r) {
    for (const int64_t n : {0, 1, 5, 4099}) {
      Twin in = r.twin({n}, DType::f32, 1), out = r.twin({n * r.size}, DType::f32, 2);
      r.run("all_gather", [&](Stream& s, bool on_gpu) {
        r.group->all_gather(s, on_gpu ? out.gpu : out.host, on_gpu ? in.gpu : in.host);
      });
      out.expect_same("all_gather");
      for (int root = 0; root < r.size; ++root) {
        r.run("broadcast", [&](Stream& s, bool on_gpu) { r.group->broadcast(s, on_gpu ? in.gpu : in.host, root); });
        in.expect_same("broadcast");
        in.fill(static_cast<uint64_t>(root + 100 * r.rank));
        copy_to_device(r.s, in.gpu.data, in.host.data, in.host.num_bytes());
        synchronize(r.s);
      }
    }
  });
}

// Two overlapped sums, a gather and a sum on the stream of the rank are in flight at once.
TEST_P(NcclGroupsOnGpu, OverlappedCollectivesEqualMessages) {
  run([](NcclRank& r) {
    const int64_t n = 30000;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Twin first = r.twin({n * r.size}, dtype, 1), second = r.twin({n * r.size}, dtype, 2), own = r.twin({n}, dtype, 3);
      Twin arrived = r.twin({n * r.size}, dtype, 4), more = r.twin({n * r.size}, dtype, 5);
      Twin gathered = r.twin({n * r.size}, dtype, 6), x = r.twin({n + 1}, dtype, 7);
      const auto call = [&](Stream& s, bool on_gpu) {
        const auto of = [&](const Twin& twin) { return on_gpu ? twin.gpu : twin.host; };
        const auto mine = [&](const Twin& twin) { return of(twin).rows(n * r.rank, n * (r.rank + 1)); };
        Pending a = r.group->start_reduce_scatter_sum(s, mine(first), of(first), of(arrived));
        Pending b = r.group->start_reduce_scatter_sum(s, mine(second), of(second), of(more));
        r.group->all_reduce_sum(s, of(x));
        Pending c = r.group->start_all_gather(s, of(gathered), of(own));
        a.wait();
        b.wait();
        c.wait();
      };
      for (int i = 0; i < 3; ++i) r.run("overlapped", call);
      for (Twin* twin : {&first, &second, &gathered, &x}) twin->expect_same("overlapped");
    }
  });
}

// A sum that is larger than the memory in which parts arrive is computed in pieces.
TEST_P(NcclGroupsOnGpu, LargeSumsAreComputedInPieces) {
  if (GetParam().size != 12) GTEST_SKIP() << "one size is enough";
  run([](NcclRank& r) {
    const int64_t n = NcclWorld::kArrivedBytes / 8 + 12345;
    std::vector<int64_t> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[i] = i * (r.rank + 1);
    const Buffer memory(DeviceKind::cuda, n * 8);
    const Tensor on_gpu{.data = memory.data(), .shape = {n}, .dtype = DType::i64, .device = DeviceKind::cuda};
    copy_to_device(r.s, on_gpu.data, x.data(), n * 8);
    synchronize(r.s);
    r.group->all_reduce_sum(r.s, on_gpu);
    copy_to_host(r.s, x.data(), on_gpu.data, n * 8);
    synchronize(r.s);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(x[i], i * 78);
  });
}

// A rank sends the messages of the levels, and at level 0 of a reduce-scatter one for each rank of a member's block.
TEST_P(NcclGroupsOnGpu, SendTheMessagesOfTheLevels) {
  run([](NcclRank& r) {
    const CollectiveLevels levels(r.size, GetParam().node);
    Twin in = r.twin({r.size * 48}, DType::f32, 1), out = r.twin({48}, DType::f32, 2);
    const auto sent_by = [&](const std::function<void()>& call) {
      const int64_t before = messages_of_thread();
      call();
      return messages_of_thread() - before;
    };
    EXPECT_EQ(sent_by([&] { r.group->all_reduce_sum(r.s, in.gpu); }), 2 * levels.messages());
    const int64_t more = (levels.radix(0) - 1) * (levels.width(0) - 1);
    EXPECT_EQ(sent_by([&] { r.group->reduce_scatter_sum(r.s, out.gpu, in.gpu); }), levels.messages() + more);
    // A rank sends at a level if it has the digits of rank 0 there and below.
    int64_t of_broadcast = 0;
    for (int l = 0; l < levels.count() && levels.digit(r.rank, l) == 0; ++l) of_broadcast += levels.radix(l) - 1;
    EXPECT_EQ(sent_by([&] { r.group->broadcast(r.s, in.gpu, 0); }), of_broadcast);
  });
}

}  // namespace
}  // namespace moebius
