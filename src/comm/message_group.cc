#include "comm/message_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>

#include "comm/group_checks.h"
#include "comm/group_cost.h"
#include "comm/rank_order_sum.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;

double bytes_of(const Tensor& x) { return static_cast<double>(x.num_bytes()); }

// Returns the bytes of the rows of in that leave this rank.
double bytes_for_others(const AllToAllV& a, int rank) {
  int64_t rows = 0;
  for (size_t r = 0; r < a.send_rows.size(); ++r)
    if (static_cast<int>(r) != rank) rows += a.send_rows[r];
  const int64_t all = a.in.dim(0);
  return all == 0 ? 0 : bytes_of(a.in) / static_cast<double>(all) * static_cast<double>(rows);
}

// Adds the seconds of its lifetime to a counter.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timed(const Timed&) = delete;

 private:
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

// Messages in flight, and what to do when they have ended.
class MessageGroup::Exchange final : public Pending::Transfer {
 public:
  Exchange(MessageGroup& group, Messages messages, int64_t record, std::function<void()> then = {})
      : group_(group),
        recorder_(group.transport_.recorder()),
        messages_(std::move(messages)),
        record_(record),
        then_(std::move(then)) {}
  // A withdrawn exchange counts as ended, except during an exception: then a report shows it
  // as not ended.
  ~Exchange() override {
    if (!has_ended_ && std::uncaught_exceptions() == 0) recorder_.end(record_);
  }
  void wait() override {
    const Timed timed(group_.seconds_);
    group_.transport_.wait(messages_, record_);
    if (then_) then_();
    recorder_.end(record_);
    has_ended_ = true;
  }

 private:
  MessageGroup& group_;
  CollectiveFlightRecorder& recorder_;
  Messages messages_;
  int64_t record_;
  std::function<void()> then_;
  bool has_ended_ = false;
};

MessageGroup::MessageGroup(Transport& transport, MessageGroupSpec spec)
    : transport_(transport), spec_(std::move(spec)), levels_(static_cast<int>(spec_.ranks.size()), spec_.node) {
  everyone_.resize(static_cast<size_t>(size()));
  std::iota(everyone_.begin(), everyone_.end(), 0);
  const auto found = std::find(ranks().begin(), ranks().end(), transport.rank());
  MOEBIUS_CHECK(usage, found != ranks().end(), "group {}: rank {} makes it, so it must be one of its {}", name(),
                transport.rank(), counted(size(), "rank"));
  rank_ = static_cast<int>(found - ranks().begin());
  steps_ = levels_.steps(rank_);
}

// --- collectives ----------------------------------------------------------------------------------------------------

void MessageGroup::all_reduce_sum(Stream& s, Tensor x) {
  check_sum(*this, "all_reduce_sum", x);
  count("all_reduce_sum", s, all_reduce_cost(bytes_of(x), size(), x.dtype, spec_.node));
  if (size() == 1 || !moves("all_reduce_sum", s, {x})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("all_reduce_sum", x);
  const int64_t piece = kSumPiece * std::min(size(), CollectiveLevels::kMaxRadix);
  const Tensor x_N = x.view({x.numel()});
  for (int64_t at = 0; at < x_N.numel(); at += piece) {
    const Tensor piece_N = x_N.rows(at, std::min(at + piece, x_N.numel()));
    const LevelCalls calls = this->calls(s, record);
    sum_over_levels(calls, steps_, slice_of(piece_N, levels_.place(rank_), size()), piece_N,
                    memory_for(x.dtype, piece_N.numel()));
    gather_over_levels(calls, steps_, piece_N);
  }
  transport_.recorder().end(record);
}

void MessageGroup::reduce_scatter_sum(Stream& s, Tensor out, Tensor in) {
  check_sum(*this, "reduce_scatter_sum", in);
  check_times_size(*this, "reduce_scatter_sum", "in", in, "out", out);
  count("reduce_scatter_sum", s, reduce_scatter_cost(bytes_of(in), size(), in.dtype, spec_.node));
  if (!moves("reduce_scatter_sum", s, {out, in})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("reduce_scatter_sum", in);
  reduce_scatter(s, out, in, record);
  transport_.recorder().end(record);
}

void MessageGroup::reduce_scatter(Stream& s, Tensor out, Tensor in, int64_t record) {
  const int64_t own_size = out.numel();
  const int64_t piece = std::max(int64_t{1}, kSumPiece * std::min(size(), CollectiveLevels::kMaxRadix) / size());
  const Tensor in_N = in.view({in.numel()}), out_N = out.view({own_size});
  const LevelCalls calls = this->calls(s, record);
  for (int64_t at = 0; at < own_size; at += piece) {
    const int64_t end = std::min(at + piece, own_size);
    const auto part = [&](int r) { return in_N.rows(r * own_size + at, r * own_size + end); };
    const LevelMemory memory = memory_for(in.dtype, (end - at) * size());
    if (levels_.is_direct()) {
      Spans to;
      for (int r = 0; r < size(); ++r) to.push_back(span_of(part(r)));
      sum_at_level(calls, steps_[0], out_N.rows(at, end), in.dtype, to, memory.first);
      continue;
    }
    const Tensor x_N = packed(in.dtype, end - at);
    for (int r = 0; r < size(); ++r) {
      const Tensor slice = slice_of(x_N, levels_.place(r), size());
      std::memcpy(slice.data, part(r).data, slice.num_bytes());
    }
    sum_over_levels(calls, steps_, out_N.rows(at, end), x_N, memory);
  }
}

void MessageGroup::all_gather(Stream& s, Tensor out, Tensor in) {
  check_times_size(*this, "all_gather", "out", out, "in", in);
  count("all_gather", s, all_gather_cost(bytes_of(out), size(), spec_.node));
  if (!moves("all_gather", s, {out, in})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("all_gather", in);
  gather(out, in, record);
  transport_.recorder().end(record);
}

void MessageGroup::gather(Tensor out, Tensor in, int64_t record) {
  if (levels_.is_direct()) return exchange(Spans(size(), span_of(in)), blocks_of(out, size()), record);
  const int64_t own_bytes = in.num_bytes();
  const int64_t piece = std::max(int64_t{1}, kSumPiece * size_of(DType::f32) * CollectiveLevels::kMaxRadix / size());
  auto* const to = static_cast<std::byte*>(out.data);
  const auto* const from = static_cast<const std::byte*>(in.data);
  for (int64_t at = 0; at < own_bytes; at += piece) {
    const int64_t bytes = std::min(piece, own_bytes - at);
    const Tensor x_N = packed(DType::u8, bytes);
    std::memcpy(slice_of(x_N, levels_.place(rank_), size()).data, from + at, bytes);
    gather_over_levels({.exchange = exchange_and_wait(record)}, steps_, x_N);
    for (int r = 0; r < size(); ++r)
      std::memcpy(to + r * own_bytes + at, slice_of(x_N, levels_.place(r), size()).data, bytes);
  }
}

void MessageGroup::all_to_all_v(Stream& s, const AllToAllV& a) {
  check_rows(*this, a);
  count("all_to_all_v", s, all_to_all_cost(bytes_for_others(a, rank_), size()));
  if (!moves("all_to_all_v", s, {a.out, a.in})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("all_to_all_v", a.in);
  exchange(runs_of(a.in, a.send_rows), runs_of(a.out, a.recv_rows), record);
  transport_.recorder().end(record);
}

void MessageGroup::broadcast(Stream& s, Tensor x, int root) {
  check_member(*this, "broadcast: root", root);
  if (!moves("broadcast", s, {x})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("broadcast", x);
  broadcast_over_levels({.exchange = exchange_and_wait(record)}, levels_, rank_, root, x);
  transport_.recorder().end(record);
}

void MessageGroup::barrier() {
  const int64_t record = begin("barrier", Tensor{.dtype = DType::u8});
  const auto exchange = exchange_and_wait(record);
  for (const LevelStep& step : steps_) exchange(step, Spans(step.radix()), Spans(step.radix()));
  transport_.recorder().end(record);
}

// --- overlapped with other work -------------------------------------------------------------------------------------

Pending MessageGroup::start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) {
  check_sum(*this, "start_reduce_scatter_sum", in);
  check_times_size(*this, "start_reduce_scatter_sum", "in", in, "out", out);
  check_times_size(*this, "start_reduce_scatter_sum", "arrived", arrived, "out", out);
  count("start_reduce_scatter_sum", s, reduce_scatter_cost(bytes_of(in), size(), in.dtype, spec_.node));
  if (!moves("start_reduce_scatter_sum", s, {out, in, arrived})) return {};
  const Timed timed(seconds_);
  const int64_t record = begin("start_reduce_scatter_sum", in);
  if (!levels_.is_direct()) {
    const auto all = [this, s, out, in, record]() mutable { reduce_scatter(s, out, in, record); };
    return Pending(std::make_unique<Exchange>(*this, Messages(), record, all));
  }
  const Spans to = blocks_of(in, size());
  Spans from = blocks_of(arrived, size());
  from[rank_] = to[rank_];
  Messages messages = begin_exchange(everyone_, to, from);
  const auto sum = [s, out, from, dtype = in.dtype]() mutable {
    std::vector<const void*> parts;
    for (const Span& part : from) parts.push_back(part.data);
    sum_in_rank_order(s, out, parts, dtype);
  };
  return Pending(std::make_unique<Exchange>(*this, std::move(messages), record, sum));
}

Pending MessageGroup::start_all_gather(Stream& s, Tensor out, Tensor in) {
  check_times_size(*this, "start_all_gather", "out", out, "in", in);
  count("start_all_gather", s, all_gather_cost(bytes_of(out), size(), spec_.node));
  if (!moves("start_all_gather", s, {out, in})) return {};
  const Timed timed(seconds_);
  const int64_t record = begin("start_all_gather", in);
  if (!levels_.is_direct()) {
    const auto all = [this, out, in, record] { gather(out, in, record); };
    return Pending(std::make_unique<Exchange>(*this, Messages(), record, all));
  }
  Messages messages = begin_exchange(everyone_, Spans(size(), span_of(in)), blocks_of(out, size()));
  return Pending(std::make_unique<Exchange>(*this, std::move(messages), record));
}

// --- between two ranks ----------------------------------------------------------------------------------------------

Pending MessageGroup::send(Stream& s, Tensor x, int to) {
  check_send(*this, to);
  count("send", s, send_cost(bytes_of(x)));
  if (!moves("send", s, {x})) return {};
  const Timed timed(seconds_);
  sent_bytes_ += x.num_bytes();
  ++sent_messages_;
  return transfer("send", x, num_sent_++, transport_.send(ranks()[to], spec_.channel + 1, x.data, x.num_bytes()));
}

Pending MessageGroup::recv(Stream& s, Tensor x, int from) {
  check_recv(*this, from);
  if (!moves("recv", s, {x})) return {};
  const Timed timed(seconds_);
  return transfer("recv", x, num_received_++, transport_.recv(ranks()[from], spec_.channel + 1, x.data, x.num_bytes()));
}

Pending MessageGroup::transfer(const char* op, const Tensor& x, int64_t number, std::unique_ptr<Message> message) {
  const int64_t record =
      transport_.recorder().begin({.op = op, .group = name(), .number = number, .dtype = x.dtype, .numel = x.numel()});
  Messages messages;
  messages.push_back(std::move(message));
  return Pending(std::make_unique<Exchange>(*this, std::move(messages), record));
}

// --- exchanges ------------------------------------------------------------------------------------------------------

Messages MessageGroup::begin_exchange(std::span<const int> members, const Spans& to, const Spans& from) {
  Messages messages;
  const int n = static_cast<int>(members.size());
  const int own = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  // Each rank begins with its neighbours, so that not all of them begin with rank 0.
  for (int i = 1; i < n; ++i) {
    const int m = (own + n - i) % n;
    messages.push_back(transport_.recv(ranks()[members[m]], spec_.channel, from[m].data, from[m].num_bytes));
  }
  for (int i = 1; i < n; ++i) {
    const int m = (own + i) % n;
    messages.push_back(transport_.send(ranks()[members[m]], spec_.channel, to[m].data, to[m].num_bytes));
    sent_bytes_ += to[m].num_bytes;
    ++sent_messages_;
  }
  MOEBIUS_ASSERT(to[own].num_bytes == from[own].num_bytes);
  if (to[own].data != from[own].data && to[own].num_bytes > 0)
    std::memcpy(from[own].data, to[own].data, to[own].num_bytes);
  return messages;
}

void MessageGroup::exchange(const Spans& to, const Spans& from, int64_t record) {
  transport_.wait(begin_exchange(everyone_, to, from), record);
}

std::function<void(const LevelStep&, const Spans&, const Spans&)> MessageGroup::exchange_and_wait(int64_t record) {
  return [this, record](const LevelStep& step, const Spans& to, const Spans& from) {
    transport_.wait(begin_exchange(step.members, to, from), record);
  };
}

LevelCalls MessageGroup::calls(Stream& s, int64_t record) {
  const auto sum = [s](const Tensor& out, const RankParts& parts) mutable {
    std::vector<const void*> all;
    for (int r = 0; r < parts.count; ++r) all.push_back(parts.at(r));
    sum_in_rank_order(s, out, all, parts.dtype);
  };
  return {.exchange = exchange_and_wait(record), .sum = sum};
}

LevelMemory MessageGroup::memory_for(DType dtype, int64_t num_elements) {
  const OfLevels<int64_t> bytes = level_bytes(levels_, num_elements, dtype);
  const int64_t arrived = std::max(bytes.first, bytes.above);
  if (arrived_.num_bytes() < arrived) arrived_ = Buffer(DeviceKind::cpu, arrived);
  if (sums_.num_bytes() < bytes.sums) sums_ = Buffer(DeviceKind::cpu, bytes.sums);
  auto* const at = static_cast<std::byte*>(arrived_.data());
  return {.first = at, .above = at, .sums = static_cast<std::byte*>(sums_.data())};
}

Tensor MessageGroup::packed(DType dtype, int64_t num_elements) {
  const int64_t bytes = num_elements * size() * size_of(dtype);
  if (packed_.num_bytes() < bytes) packed_ = Buffer(DeviceKind::cpu, bytes);
  return {.data = packed_.data(), .shape = {num_elements * size()}, .dtype = dtype, .device = DeviceKind::cpu};
}

// --- counters -------------------------------------------------------------------------------------------------------

int64_t MessageGroup::sent_bytes() const {
  int64_t bytes = sent_bytes_;
  for (const auto& traffic : beside_) bytes += traffic->sent_bytes;
  return bytes;
}

double MessageGroup::seconds() const {
  double seconds = seconds_;
  for (const auto& traffic : beside_) seconds += static_cast<double>(traffic->waited_ns) * 1e-9;
  return seconds;
}

// --- checks ---------------------------------------------------------------------------------------------------------

int64_t MessageGroup::begin(const char* op, const Tensor& x) {
  return transport_.recorder().begin(
      {.op = op, .group = name(), .number = num_calls_++, .dtype = x.dtype, .numel = x.numel()});
}

void MessageGroup::count(const char* op, Stream& s, const GroupCost& cost) const {
  if (s.device() != DeviceKind::null || !s.trace() || size() == 1) return;
  s.trace()->add(fmt::format("{} {}", name(), op).c_str(), now_us(), 0, {.bytes = cost.wire_bytes});
}

bool MessageGroup::moves(const char* op, Stream& s, std::initializer_list<Tensor> tensors) const {
  if (s.device() == DeviceKind::null) return false;
  for (const Tensor& x : tensors) {
    MOEBIUS_CHECK(usage, s.device() == DeviceKind::cpu && x.device == DeviceKind::cpu,
                  "{} of group {}: messages carry memory of the CPU; got {} of {} on a stream of {}", op, name(),
                  to_string(x), name_of(x.device), name_of(s.device()));
  }
  return true;
}

}  // namespace moebius
