#include "ops/stash/stash.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/stash/stash_backends.h"

namespace moebius::cpu {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Frees the pages of a pass.
void release_pages(int32_t* free, int64_t* state, const int32_t* page, int32_t* held) {
  std::copy_n(page, held[1], free + state[0]);
  state[0] += held[1];
  state[1] -= held[2];
  held[0] = held[1] = held[2] = 0;
}

constexpr int64_t kGrain = 16;  // rows of a task

// Calls fn(row of the pool, row r of x, bytes) for the rows that have a page.
template <class Fn>
void for_kept_rows(Stream& s, const Tensor& pool_SM, const Tensor& x_RC, const Tensor& page_Q, const Tensor& held_3,
                   int64_t first, Fn fn) {
  const int64_t size = size_of(x_RC.dtype), width = x_RC.dim(1) * size, stride = pool_SM.dim(1) * size;
  char* pool = static_cast<char*>(pool_SM.data) + first * size;
  char* x = static_cast<char*>(x_RC.data);
  const int32_t* page = page_Q.ptr<int32_t>();
  parallel_rows(s.pool(), held_3.ptr<int32_t>()[0], kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      fn(pool + (page[r / kStashPageRows] * kStashPageRows + r % kStashPageRows) * stride, x + r * width, width);
  });
}

}  // namespace

void clear_stash(Stream&, const ClearStash& a) {
  const int64_t P = a.free_P.numel();
  int32_t* free = a.free_P.ptr<int32_t>();
  for (int64_t i = 0; i < P; ++i) free[i] = static_cast<int32_t>(P - 1 - i);
  a.state_2.ptr<int64_t>()[0] = P;
  a.state_2.ptr<int64_t>()[1] = 0;
  std::fill_n(a.counts_3.ptr<double>(), 3, 0.0);
}

void alloc_pages(Stream&, const AllocPages& a) {
  int32_t *free = a.free_P.ptr<int32_t>(), *page = a.page_Q.ptr<int32_t>();
  int64_t* state = a.state_2.ptr<int64_t>();
  int32_t* held = a.held_3.ptr<int32_t>();
  double* counts = a.counts_3.ptr<double>();
  release_pages(free, state, page, held);
  const int64_t rows = a.offsets_e1.ptr<int32_t>()[a.offsets_e1.numel() - 1];
  const int64_t pages = std::min({div_ceil(rows, kStashPageRows), state[0], a.page_Q.numel()});
  const int64_t kept = std::min(rows, pages * kStashPageRows);
  for (int64_t i = 0; i < pages; ++i) page[i] = free[state[0] - 1 - i];
  held[0] = static_cast<int32_t>(kept);
  held[1] = static_cast<int32_t>(pages);
  held[2] = static_cast<int32_t>(rows);
  state[0] -= pages;
  state[1] += rows;
  counts[0] += static_cast<double>(rows - kept);
  const auto pool_rows = static_cast<double>(a.free_P.numel() * kStashPageRows);
  counts[1] = std::max(counts[1], static_cast<double>(state[1]) / pool_rows);
}

void stash_rows(Stream& s, const StashRows& a) {
  for_kept_rows(s, a.pool_SM, a.x_RC, a.page_Q, a.held_3, a.first,
                [](char* stashed, const char* x, int64_t bytes) { std::memcpy(stashed, x, bytes); });
}

void unstash_rows(Stream& s, const UnstashRows& a) {
  for_kept_rows(s, a.pool_SM, a.x_RC, a.page_Q, a.held_3, a.first,
                [](const char* stashed, char* x, int64_t bytes) { std::memcpy(x, stashed, bytes); });
}

void free_pages(Stream&, const FreePages& a) {
  int32_t* held = a.held_3.ptr<int32_t>();
  const int32_t* offsets = a.offsets_e1.ptr<int32_t>();
  int32_t* spilled = a.spilled_e1.ptr<int32_t>();
  const int32_t kept = held[0];
  for (int64_t i = 0; i < a.offsets_e1.numel(); ++i) spilled[i] = std::max(offsets[i], kept);
  *a.since_1.ptr<int64_t>() = kept < offsets[a.offsets_e1.numel() - 1] ? now_ns() : -1;
  release_pages(a.free_P.ptr<int32_t>(), a.state_2.ptr<int64_t>(), a.page_Q.ptr<int32_t>(), held);
}

void end_spill(Stream&, const EndSpill& a) {
  const int64_t since = *a.since_1.ptr<int64_t>();
  if (since >= 0) a.counts_3.ptr<double>()[2] += static_cast<double>(now_ns() - since);
}

}  // namespace moebius::cpu
