#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>

#include "core/arena.h"
#include "core/rng.h"
#include "core/thread_pool.h"

namespace moebius {
namespace {

TEST(Dtype, Bf16RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // tie, even below
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // tie, even above
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isinf(to_f32(to_bf16(3.4e38f))));
}

TEST(Tensor, PtrOfAnotherDtypeIsAnError) {
  float x[6];
  const Tensor t = tensor_of(x, {2, 3});
  EXPECT_EQ(t.ptr<float>(), x);
  try {
    t.ptr<bf16>();
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "Tensor::ptr: f32[2, 3] was accessed as bf16");
  }
  EXPECT_EQ(t.rows(1, 2).ptr<float>(), x + 3);
  EXPECT_EQ(t.rows(2, 2).numel(), 0);
  EXPECT_THROW(t.view({5}), Error);
  EXPECT_THROW(t.rows(1, 3), Error);
}

TEST(Narrow, RefusesValuesOutOfRange) {
  EXPECT_EQ(narrow<int32_t>(int64_t{7}), 7);
  EXPECT_THROW(narrow<int32_t>(int64_t{1} << 31), Error);
  EXPECT_THROW(narrow<uint32_t>(int64_t{-1}), Error);
  EXPECT_THROW(div_exact(7, 2, "heads / tp"), Error);
}

TEST(ThreadPool, RunsEachTaskOnceForAnyTeam) {
  for (int n : {1, 2, 3, 8}) {
    ThreadPool pool(n);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> hits(tasks);
      pool.run(tasks, [&](int64_t task, int worker) {
        EXPECT_LT(worker, n);
        ++hits[task];
      });
      for (auto& h : hits) EXPECT_EQ(h, 1);
    }
  }
}

// Loops follow each other at once, or after the workers fell asleep. The pool has more
// threads than cores.
TEST(ThreadPool, ManyShortLoopsLoseNothing) {
  ThreadPool pool(6);
  std::vector<int64_t> sums(64);
  for (int64_t round = 1; round <= 3000; ++round) {
    pool.run(64, [&](int64_t task, int) { sums[task] += round; });  // one thread runs each task: plain memory
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (const int64_t sum : sums) EXPECT_EQ(sum, 3000 * 3001 / 2);
}

TEST(ThreadPool, RethrowsTheFirstExceptionAndRemainsUsable) {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.run(100,
                          [](int64_t task, int) {
                            if (task == 37) MOEBIUS_FAIL(input, "task {}", task);
                          }),
                 Error);
    std::atomic<int64_t> sum{0};
    pool.run(100, [&](int64_t task, int) { sum += task; });
    EXPECT_EQ(sum, 4950);
  }
}

// Sanitizers reserve terabytes of addresses and cannot run under a limit on them.
bool reserves_terabytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  return pages > (int64_t{1} << 40) / 4096;
}

// This test runs in a process of its own, because the limit stays. An alarm ends that process:
// a pool that waits for its workers would never return.
TEST(ThreadPool, TooManyThreadsIsAnErrorAndNotAHang) {
  if (reserves_terabytes()) GTEST_SKIP() << "a sanitizer holds the address space";
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const rlimit space{static_cast<rlim_t>(100) << 20, RLIM_INFINITY};  // less than is in use: no stack can be mapped
    setrlimit(RLIMIT_AS, &space);
    try {
      ThreadPool pool(1024);
    } catch (const Error& e) {
      const bool says = std::strstr(e.what(), "run.threads: 1024 threads were requested, but only ") &&
                        std::strstr(e.what(), "set run.threads lower");
      _exit(e.kind() == ErrorKind::usage && says ? 0 : 3);
    }
    _exit(4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Known answers from the authors' test vectors (kat_vectors of Random123).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Rng, MomentsAndIndependenceOfKeys) {
  const Rng rng(3, RngSite::init);
  double sum = 0, squares = 0, uniform = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i) {
    const double x = rng.normal(i);
    sum += x;
    squares += x * x;
    const float u = rng.uniform(i);
    ASSERT_GT(u, 0);
    ASSERT_LT(u, 1);
    uniform += u;
  }
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2.0 / n));
  EXPECT_NEAR(uniform / n, 0.5, 4 * std::sqrt(1.0 / 12 / n));
  EXPECT_NE(rng.bits(0), Rng(4, RngSite::init).bits(0));
  EXPECT_NE(rng.bits(0), Rng(3, RngSite::jitter).bits(0));
  EXPECT_NE(rng.bits(0), Rng(3, RngSite::init, 1).bits(0));
  EXPECT_NE(rng.bits(0), Rng(3, RngSite::init, 0, 1).bits(0));
}

TEST(StepStack, FreesInScopesAndKeepsTheHighWaterMark) {
  alignas(StepStack::kAlign) char memory[1024];
  constexpr int64_t kTaken = StepStack::kAlign;  // bytes of each of the two tensors
  StepStack stack(DeviceKind::cpu, memory, sizeof memory);
  const Tensor a = stack.alloc({3}, DType::f32);
  {
    StackScope scope(stack);
    const Tensor b = stack.alloc({5, 5}, DType::bf16);
    EXPECT_EQ(static_cast<char*>(b.data) - static_cast<char*>(a.data), kTaken);
    EXPECT_THROW(stack.alloc({1000}, DType::f32), Error);
  }
  EXPECT_EQ(stack.used(), kTaken);
  EXPECT_EQ(stack.high_water(), 2 * kTaken);
  StepStack counting(DeviceKind::null, nullptr, 0);
  EXPECT_EQ(counting.alloc({1 << 20}, DType::f32).data, nullptr);
  EXPECT_EQ(counting.high_water(), 4 << 20);
}

}  // namespace
}  // namespace moebius
