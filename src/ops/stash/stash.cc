#include "ops/stash/stash.h"

#include "ops/run_on_device.h"
#include "ops/stash/stash_backends.h"

namespace moebius {
namespace {

void check_pool(const char* who, const Tensor& free_P, const Tensor& state_2) {
  check_tensor(who, "free", free_P, DType::i32, {free_P.numel()});
  check_tensor(who, "state", state_2, DType::i64, {2});
}
void check_counts(const char* who, const Tensor& counts_3) { check_tensor(who, "counts", counts_3, DType::f64, {3}); }
void check_held(const char* who, const Tensor& page_Q, const Tensor& held_3) {
  check_tensor(who, "page", page_Q, DType::i32, {page_Q.numel()});
  check_tensor(who, "held", held_3, DType::i32, {3});
}
void check_offsets(const char* who, const char* name, const Tensor& offsets_e1) {
  MOEBIUS_CHECK(usage, offsets_e1.numel() >= 2, "{}: {} must be of at least one expert; got {}", who, name,
                to_string(offsets_e1));
  check_tensor(who, name, offsets_e1, DType::i32, {offsets_e1.numel()});
}

// Checks the arguments of a copy in either direction.
void check_copy(const char* who, const Tensor& pool_SM, const Tensor& x_RC, int64_t first) {
  MOEBIUS_CHECK(usage, (x_RC.dtype == DType::f32 || x_RC.dtype == DType::bf16) && x_RC.shape.rank() == 2,
                "{}: x must be an f32 or bf16 matrix; got {}", who, to_string(x_RC));
  check_tensor(who, "x", x_RC, x_RC.dtype, x_RC.shape);
  MOEBIUS_CHECK(usage,
                pool_SM.shape.rank() == 2 && pool_SM.dim(0) % kStashPageRows == 0 && first >= 0 &&
                    first + x_RC.dim(1) <= pool_SM.dim(1),
                "{}: the pool must have pages of {} rows, and columns from {} on for x {}; got {}", who, kStashPageRows,
                first, to_string(x_RC), to_string(pool_SM));
  check_tensor(who, "pool", pool_SM, x_RC.dtype, pool_SM.shape);
}

void check(const ClearStash& a) {
  check_pool("clear_stash", a.free_P, a.state_2);
  check_counts("clear_stash", a.counts_3);
}
void check(const AllocPages& a) {
  constexpr const char* who = "alloc_pages";
  check_pool(who, a.free_P, a.state_2);
  check_counts(who, a.counts_3);
  check_held(who, a.page_Q, a.held_3);
  check_offsets(who, "offsets", a.offsets_e1);
}
void check(const StashRows& a) {
  check_copy("stash_rows", a.pool_SM, a.x_RC, a.first);
  check_held("stash_rows", a.page_Q, a.held_3);
}
void check(const UnstashRows& a) {
  check_copy("unstash_rows", a.pool_SM, a.x_RC, a.first);
  check_held("unstash_rows", a.page_Q, a.held_3);
}
void check(const FreePages& a) {
  constexpr const char* who = "free_pages";
  check_pool(who, a.free_P, a.state_2);
  check_held(who, a.page_Q, a.held_3);
  check_offsets(who, "offsets", a.offsets_e1);
  check_tensor(who, "spilled", a.spilled_e1, DType::i32, a.offsets_e1.shape);
  check_tensor(who, "since", a.since_1, DType::i64, {1});
}
void check(const EndSpill& a) {
  check_counts("end_spill", a.counts_3);
  check_tensor("end_spill", "since", a.since_1, DType::i64, {1});
}

template <class Op>
void run(Stream& s, const char* name, const Op& a, void (*on_cpu)(Stream&, const Op&),
         void (*on_cuda)(Stream&, const Op&)) {
  check(a);
  OpScope scope(s, name, cost(a));
  run_on_device(s, on_cpu, on_cuda, a);
}

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

}  // namespace

void clear_stash(Stream& s, const ClearStash& a) { run(s, "clear_stash", a, cpu::clear_stash, cuda::clear_stash); }
void alloc_pages(Stream& s, const AllocPages& a) { run(s, "alloc_pages", a, cpu::alloc_pages, cuda::alloc_pages); }
void stash_rows(Stream& s, const StashRows& a) {
  if (!a.x_RC.empty()) run(s, "stash_rows", a, cpu::stash_rows, cuda::stash_rows);
}
void unstash_rows(Stream& s, const UnstashRows& a) {
  if (!a.x_RC.empty()) run(s, "unstash_rows", a, cpu::unstash_rows, cuda::unstash_rows);
}
void free_pages(Stream& s, const FreePages& a) { run(s, "free_pages", a, cpu::free_pages, cuda::free_pages); }
void end_spill(Stream& s, const EndSpill& a) { run(s, "end_spill", a, cpu::end_spill, cuda::end_spill); }

Cost cost(const ClearStash& a) { return {0, bytes_of(a.free_P)}; }
Cost cost(const AllocPages& a) { return {0, 2 * bytes_of(a.page_Q)}; }
Cost cost(const StashRows& a) {
  return {0, 2.0 * static_cast<double>(a.expected_rows * a.x_RC.dim(1) * size_of(a.x_RC.dtype))};
}
Cost cost(const UnstashRows& a) { return cost(StashRows{.x_RC = a.x_RC, .expected_rows = a.expected_rows}); }
Cost cost(const FreePages& a) { return {0, 2 * bytes_of(a.page_Q)}; }
Cost cost(const EndSpill& a) { return {0, bytes_of(a.counts_3)}; }

}  // namespace moebius
