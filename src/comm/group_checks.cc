#include "comm/group_checks.h"

#include <algorithm>
#include <numeric>

#include "comm/rank_order_sum.h"

namespace moebius {
namespace {

bool same_rows(const Tensor& a, const Tensor& b) {
  bool same = a.dtype == b.dtype && a.shape.rank() >= 1 && a.shape.rank() == b.shape.rank();
  for (int i = 1; same && i < a.shape.rank(); ++i) same = a.dim(i) == b.dim(i);
  return same;
}

int64_t total(std::span<const int64_t> counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

}  // namespace

void check_sum(const Group& group, const char* op, const Tensor& x) {
  MOEBIUS_CHECK(usage, can_sum(x.dtype), "{} of group {}: sums take f32, f64, i64 or bf16; got {}", op, group.name(),
                to_string(x));
}

void check_times_size(const Group& group, const char* op, const char* large_name, const Tensor& large,
                      const char* small_name, const Tensor& small) {
  MOEBIUS_CHECK(usage, same_rows(large, small) && large.dim(0) == group.size() * small.dim(0),
                "{} of group {}: {} must have {} times the rows of {} and its dtype; got {} {}, {} {}", op,
                group.name(), large_name, group.size(), small_name, large_name, to_string(large), small_name,
                to_string(small));
}

void check_rows(const Group& group, const AllToAllV& a) {
  const auto check_counts = [&](const char* what, std::span<const int64_t> counts, const Tensor& x) {
    const bool negative = std::any_of(counts.begin(), counts.end(), [](int64_t n) { return n < 0; });
    MOEBIUS_CHECK(
        usage, std::ssize(counts) == group.size() && !negative && total(counts) <= x.dim(0),
        "all_to_all_v of group {}: {} must have {}, with a sum of at most the rows of {}; got {} with the sum {}",
        group.name(), what, counted(group.size(), "count"), to_string(x), counted(std::ssize(counts), "count"),
        total(counts));
  };
  MOEBIUS_CHECK(usage, same_rows(a.out, a.in),
                "all_to_all_v of group {}: out must have the rows of in; got out {}, in {}", group.name(),
                to_string(a.out), to_string(a.in));
  check_counts("send_rows", a.send_rows, a.in);
  check_counts("recv_rows", a.recv_rows, a.out);
  MOEBIUS_CHECK(usage, a.send_rows[group.rank()] == a.recv_rows[group.rank()],
                "all_to_all_v of group {}: rank {} sends itself {} rows but expects {}", group.name(), group.rank(),
                a.send_rows[group.rank()], a.recv_rows[group.rank()]);
}

void check_member(const Group& group, const char* op, int rank) {
  MOEBIUS_CHECK(usage, rank >= 0 && rank < group.size(), "{}: a rank of group {} must be from 0 to {}; got {}", op,
                group.name(), group.size() - 1, rank);
}

void check_send(const Group& group, int to) {
  check_member(group, "send: to", to);
  MOEBIUS_CHECK(usage, to != group.rank(), "send of group {}: rank {} sends to itself", group.name(), group.rank());
}

void check_recv(const Group& group, int from) {
  check_member(group, "recv: from", from);
  MOEBIUS_CHECK(usage, from != group.rank(), "recv of group {}: rank {} receives from itself", group.name(),
                group.rank());
}

void check_on_device(const Group& group, const char* op, const Stream& s, std::initializer_list<Tensor> tensors) {
  for (const Tensor& x : tensors) {
    MOEBIUS_CHECK(usage, x.device == s.device(),
                  "{} of group {}: tensors must be of the stream's device; got {} of {} on a stream of {}", op,
                  group.name(), to_string(x), name_of(x.device), name_of(s.device()));
  }
}

}  // namespace moebius
