// Writes and rounds between ranks that share a GPU, in CUDA graphs. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "comm/peer_window.h"
#include "comm/transport/threads.h"
#include "device/accelerator.h"
#include "io/testing.h"
#include "ops/dispatch/dispatch.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// A rank with a stream of its own on the first GPU. After the control bytes its window has `rows` i64 of each rank.
struct GpuRank {
  explicit GpuRank(Transport& transport, int num_rows = 1)
      : rank(transport.rank()),
        size(transport.size()),
        rows(num_rows),
        world(transport.make_group("world", ranks_of(size))),
        control(PeerWindow::control_bytes(size)),
        memory(DeviceKind::cuda, control + size * rows * 8),
        window{.data = memory.data(),
               .shape = {control + size * rows * 8},
               .dtype = DType::u8,
               .device = DeviceKind::cuda},
        peers(s, *world, memory, window),
        numbers(DeviceKind::cuda, (1 + size) * rows * 8) {}
  static std::vector<int> ranks_of(int size) {
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    return all;
  }
  Tensor ints(void* data, int64_t count) const {
    return {.data = data, .shape = {count}, .dtype = DType::i64, .device = DeviceKind::cuda};
  }
  Tensor mine() const { return ints(numbers.data(), rows); }
  Tensor seen() const { return ints(static_cast<std::byte*>(numbers.data()) + rows * 8, size * rows); }
  Tensor arrived() const { return ints(static_cast<std::byte*>(window.data) + control, size * rows); }

  // Every rank sends its number to all, and keeps what it receives.
  void tell() {
    push_to_all(s,
                {.sent_1 = peers.sent_1(), .x_M = mine(), .bases_W = peers.bases_W(), .offset = control, .rank = rank});
    peers.round(s, {.phase = "tell", .layer = "none"});
    copy(s, seen(), arrived());
    peers.round(s, {.phase = "keep", .layer = "none"});
  }
  template <class Numbers>
  void set(const Numbers& of_rows) {
    copy_to_device(s, mine().data, &of_rows, sizeof of_rows);
    synchronize(s);
  }
  void expect_seen(int64_t turn) {
    std::vector<int64_t> got(size);
    copy_to_host(s, got.data(), seen().data, size * 8);
    for (int q = 0; q < size; ++q) ASSERT_EQ(got[q], 100 * turn + q) << "turn " << turn;
  }

  int rank, size, rows;
  Accelerator gpu{0};
  ThreadPool pool{1};
  Stream s{gpu, pool};
  std::unique_ptr<Group> world;
  int64_t control;
  PeerMemory memory;
  Tensor window;
  PeerWindow peers;
  Buffer numbers;
};

TEST(DispatchGraph, RoundsOfRanksThatShareAGpu) {
  if (!Accelerator::why_missing().empty()) GTEST_SKIP() << Accelerator::why_missing();
  run_threads(3, {.timeout_s = 20}, [](Transport& transport) {
    GpuRank r(transport);
    const int64_t before = r.world->sent_bytes();
    for (int64_t turn = 0; turn < 3; ++turn) {  // these rounds wait on the host, and load the kernels
      r.set(int64_t{100} * turn + r.rank);
      r.tell();
      r.expect_seen(turn);
    }
    GraphCapture capture;
    const CudaGraph graph(r.gpu, capture, [&] { r.tell(); });
    r.world->barrier();
    for (int64_t turn = 3; turn < 200; ++turn) {
      r.set(int64_t{100} * turn + r.rank);
      graph.replay(r.gpu);
      r.expect_seen(turn);
    }
    synchronize(r.s);
    EXPECT_EQ(r.world->sent_bytes() - before, 200 * (r.size - 1) * 8);
  });
}

// Every rank sends two rows to all ranks, or to those at some distances. In a graph copy engines copy them, else
// a kernel.
TEST(DispatchGraph, ContiguousRowsOfRanksThatShareAGpu) {
  if (!Accelerator::why_missing().empty()) GTEST_SKIP() << Accelerator::why_missing();
  for (const RowDistances of : {RowDistances{}, {.first = 1}, {.first = 1, .end = 2}, {.first = 2}}) {
    run_threads(3, {.timeout_s = 20}, [&](Transport& transport) {
      GpuRank r(transport, /*num_rows=*/2);
      Buffer places(DeviceKind::cuda, 64 * sizeof(int32_t));
      int64_t first = 0;
      const auto ints = [&](Shape shape) {
        const Tensor t{.data = static_cast<std::byte*>(places.data()) + first * 4,
                       .shape = shape,
                       .dtype = DType::i32,
                       .device = DeviceKind::cuda};
        first += t.numel();
        return t;
      };
      const Tensor dest = ints({2, 3}), row = ints({2, 3}), back_row = ints({2, 3}), arrive = ints({4}),
                   back = ints({3});
      contiguous_places(r.s, {.dest_TJ = dest,
                              .row_TJ = row,
                              .back_row_TB = back_row,
                              .arrive_W1 = arrive,
                              .back_W = back,
                              .rank = r.rank});
      const auto tell = [&] {
        push_rows(r.s, {.sent_1 = r.peers.sent_1(),
                        .x_TD = r.mine().view({2, 1}),
                        .dest_TJ = dest,
                        .row_TJ = row,
                        .bases_W = r.peers.bases_W(),
                        .offset = r.control,
                        .rank = r.rank,
                        .of = of,
                        .windows = r.peers.windows()});
        r.peers.round(r.s, {.phase = "tell", .layer = "none"});
        copy(r.s, r.seen(), r.arrived());
        r.peers.round(r.s, {.phase = "keep", .layer = "none"});
      };
      const auto numbers = [&](int64_t turn, int rank) {
        return std::array<int64_t, 2>{100 * turn + rank, 1000 + 100 * turn + rank};
      };
      const auto check = [&](int64_t turn) {
        std::array<std::array<int64_t, 2>, 3> got;
        copy_to_host(r.s, got.data(), r.seen().data, sizeof got);
        for (int q = 0; q < 3; ++q) {
          if (!of.has((r.rank - q + 3) % 3)) continue;
          ASSERT_EQ(got[q], numbers(turn, q)) << "turn " << turn;
        }
      };
      const int64_t before = r.world->sent_bytes();
      r.set(numbers(0, r.rank));
      tell();
      check(0);
      GraphCapture capture;
      const CudaGraph graph(r.gpu, capture, tell);
      // Copies to windows, the count of their bytes, two rounds, and the copy of what arrived.
      EXPECT_EQ(graph.num_nodes(), of.count(3) + 1 + 2 + 1);
      r.world->barrier();
      for (int64_t turn = 1; turn < 50; ++turn) {
        r.set(numbers(turn, r.rank));
        graph.replay(r.gpu);
        check(turn);
      }
      synchronize(r.s);
      EXPECT_EQ(r.world->sent_bytes() - before, 50 * (of.count(3) - (of.has(0) ? 1 : 0)) * 2 * 8);
    });
  }
}

TEST(DispatchGraph, ARankThatStallsIsNamedByTheKernelThatWaits) {
  if (!Accelerator::why_missing().empty()) GTEST_SKIP() << Accelerator::why_missing();
  const auto body = [](Transport& transport) {
    GpuRank r(transport);
    r.set(int64_t{r.rank});
    r.tell();
    GraphCapture capture;
    const CudaGraph graph(r.gpu, capture, [&] { r.tell(); });
    r.world->barrier();
    if (r.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
    graph.replay(r.gpu);
    synchronize(r.s);
  };
  expect_error(ErrorKind::distributed,
               "for rank 1, which has not come: round 1 of group world is expected of it, and 0",
               [&] { run_threads(2, {.timeout_s = 2}, body); });
}

}  // namespace
}  // namespace moebius
