// Writes and rounds between ranks that share a GPU, in CUDA graphs. Skipped where there is no GPU.
#include <gtest/gtest.h>

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

// A rank with a stream of its own on the first GPU. Its window has an i64 of each rank after the control bytes.
struct GpuRank {
  explicit GpuRank(Transport& transport)
      : rank(transport.rank()),
        size(transport.size()),
        world(transport.make_group("world", ranks_of(size))),
        control(PeerWindow::control_bytes(size)),
        memory(DeviceKind::cuda, control + size * 8),
        window{.data = memory.data(), .shape = {control + size * 8}, .dtype = DType::u8, .device = DeviceKind::cuda},
        peers(s, *world, memory, window),
        numbers(DeviceKind::cuda, (1 + size) * 8) {}
  static std::vector<int> ranks_of(int size) {
    std::vector<int> all;
    for (int r = 0; r < size; ++r) all.push_back(r);
    return all;
  }
  Tensor ints(void* data, int64_t count) const {
    return {.data = data, .shape = {count}, .dtype = DType::i64, .device = DeviceKind::cuda};
  }
  Tensor mine() const { return ints(numbers.data(), 1); }
  Tensor seen() const { return ints(static_cast<std::byte*>(numbers.data()) + 8, size); }
  Tensor arrived() const { return ints(static_cast<std::byte*>(window.data) + control, size); }

  // Every rank sends its number to all, and keeps what it receives.
  void tell() {
    push_to_all(s,
                {.sent_1 = peers.sent_1(), .x_M = mine(), .bases_W = peers.bases_W(), .offset = control, .rank = rank});
    peers.round(s, {.phase = "tell", .layer = "none"});
    copy(s, seen(), arrived());
    peers.round(s, {.phase = "keep", .layer = "none"});
  }
  void set(int64_t number) {
    copy_to_device(s, mine().data, &number, sizeof number);
    synchronize(s);
  }
  void expect_seen(int64_t turn) {
    std::vector<int64_t> got(size);
    copy_to_host(s, got.data(), seen().data, size * 8);
    for (int q = 0; q < size; ++q) ASSERT_EQ(got[q], 100 * turn + q) << "turn " << turn;
  }

  int rank, size;
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
    for (int64_t turn = 0; turn < 3; ++turn) {  // these meet on the host, and load the kernels
      r.set(100 * turn + r.rank);
      r.tell();
      r.expect_seen(turn);
    }
    GraphCapture capture;
    const CudaGraph graph(r.gpu, capture, [&] { r.tell(); });
    r.world->barrier();
    for (int64_t turn = 3; turn < 200; ++turn) {
      r.set(100 * turn + r.rank);
      graph.replay(r.gpu);
      r.expect_seen(turn);
    }
    synchronize(r.s);
    EXPECT_EQ(r.world->sent_bytes() - before, 200 * (r.size - 1) * 8);
  });
}

// Every rank sends the rows of its tokens to all as one block, which copy engines copy.
TEST(DispatchGraph, BlocksOfRanksThatShareAGpu) {
  if (!Accelerator::why_missing().empty()) GTEST_SKIP() << Accelerator::why_missing();
  run_threads(3, {.timeout_s = 20}, [](Transport& transport) {
    GpuRank r(transport);
    const Tensor mine = r.mine().view({1, 1});
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
    const Tensor dest = ints({1, 3}), row = ints({1, 3}), back_row = ints({1, 3}), arrive = ints({4}), back = ints({3});
    block_places(
        r.s,
        {.dest_TJ = dest, .row_TJ = row, .back_row_TB = back_row, .arrive_W1 = arrive, .back_W = back, .rank = r.rank});
    const auto tell = [&] {
      push_rows(r.s, {.sent_1 = r.peers.sent_1(),
                      .x_TD = mine,
                      .dest_TJ = dest,
                      .row_TJ = row,
                      .bases_W = r.peers.bases_W(),
                      .offset = r.control,
                      .rank = r.rank,
                      .windows = r.peers.windows()});
      r.peers.round(r.s, {.phase = "tell", .layer = "none"});
      copy(r.s, r.seen(), r.arrived());
      r.peers.round(r.s, {.phase = "keep", .layer = "none"});
    };
    const int64_t before = r.world->sent_bytes();
    r.set(r.rank);
    tell();  // not captured: the kernel writes the same bytes
    r.expect_seen(0);
    GraphCapture capture;
    const CudaGraph graph(r.gpu, capture, tell);
    r.world->barrier();
    for (int64_t turn = 1; turn < 50; ++turn) {
      r.set(100 * turn + r.rank);
      graph.replay(r.gpu);
      r.expect_seen(turn);
    }
    synchronize(r.s);
    EXPECT_EQ(r.world->sent_bytes() - before, 50 * (r.size - 1) * 8);
  });
}

TEST(DispatchGraph, ARankThatStallsIsNamedByTheKernelThatWaits) {
  if (!Accelerator::why_missing().empty()) GTEST_SKIP() << Accelerator::why_missing();
  const auto body = [](Transport& transport) {
    GpuRank r(transport);
    r.set(r.rank);
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
