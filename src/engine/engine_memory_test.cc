#include "engine/engine_memory.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "device/device.h"

extern "C" __attribute__((weak)) void __asan_init();

namespace moebius {
namespace {

struct Free {
  void operator()(void* data) const { std::free(data); }
};
using Block = std::unique_ptr<void, Free>;

TEST(HeapGaps, FreePagesBetweenBlocksAreReturned) {
  if (__asan_init != nullptr) GTEST_SKIP() << "a sanitizer has a heap of its own";
  constexpr size_t kPage = 4096, kBytes = 16 * kPage, kBlocks = 256;  // 16 MiB
  std::vector<Block> blocks, between;
  for (size_t i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(std::aligned_alloc(kPage, kBytes));
    std::memset(blocks.back().get(), 1, kBytes);
    between.emplace_back(std::malloc(kPage + 1));  // remains, and fits in no gap before a block
  }
  blocks.clear();
  const int64_t before = current_rss_bytes();
  HeapGaps gaps;
  gaps.close();
  EXPECT_LT(current_rss_bytes(), before - (8 << 20));
}

// The engines of ranks that are threads close their gaps at the same time. Under the address sanitizer this crashes if
// they do not take turns.
TEST(HeapGaps, ThreadsCloseThemTogether) {
  constexpr int kThreads = 8;
  std::barrier ready(kThreads);
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      HeapGaps gaps;
      ready.arrive_and_wait();
      gaps.close();
    });
  }
}

}  // namespace
}  // namespace moebius
