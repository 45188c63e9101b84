#include "comm/message_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>

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

// Adds the seconds of its lifetime.
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
    : transport_(transport), spec_(std::move(spec)) {
  const auto found = std::find(ranks().begin(), ranks().end(), transport.rank());
  MOEBIUS_CHECK(usage, found != ranks().end(), "group {}: rank {} makes it, so it must be one of its {}", name(),
                transport.rank(), counted(size(), "rank"));
  rank_ = static_cast<int>(found - ranks().begin());
}

// --- collectives ----------------------------------------------------------------------------------------------------

void MessageGroup::all_reduce_sum(Stream& s, Tensor x) {
  check_sum(*this, "all_reduce_sum", x);
  count("all_reduce_sum", s, all_reduce_cost(bytes_of(x), size()));
  if (size() == 1 || !moves("all_reduce_sum", s, {x})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("all_reduce_sum", x), piece = kSumPiece * size();
  const Tensor x_N = x.view({x.numel()});
  for (int64_t at = 0; at < x_N.numel(); at += piece) {
    const Tensor piece_N = x_N.rows(at, std::min(at + piece, x_N.numel()));
    const Spans slices = slices_of(piece_N, size());
    const Tensor own = slice_of(piece_N, rank_, size());
    sum_exchange(s, own, own, slices, record);
    exchange(Spans(size(), span_of(own)), slices, record);
  }
  transport_.recorder().end(record);
}

void MessageGroup::reduce_scatter_sum(Stream& s, Tensor out, Tensor in) {
  check_sum(*this, "reduce_scatter_sum", in);
  check_times_size(*this, "reduce_scatter_sum", "in", in, "out", out);
  count("reduce_scatter_sum", s, reduce_scatter_cost(bytes_of(in), size()));
  if (!moves("reduce_scatter_sum", s, {out, in})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("reduce_scatter_sum", in), own_size = out.numel();
  const Tensor in_N = in.view({in.numel()}), out_N = out.view({own_size});
  for (int64_t at = 0; at < own_size; at += kSumPiece) {
    const int64_t end = std::min(at + kSumPiece, own_size);
    const auto part = [&](int r) { return in_N.rows(r * own_size + at, r * own_size + end); };
    Spans to;
    for (int r = 0; r < size(); ++r) to.push_back(span_of(part(r)));
    sum_exchange(s, out_N.rows(at, end), part(rank_), to, record);
  }
  transport_.recorder().end(record);
}

void MessageGroup::all_gather(Stream& s, Tensor out, Tensor in) {
  check_times_size(*this, "all_gather", "out", out, "in", in);
  count("all_gather", s, all_gather_cost(bytes_of(out), size()));
  if (!moves("all_gather", s, {out, in})) return;
  const Timed timed(seconds_);
  const int64_t record = begin("all_gather", in);
  exchange(Spans(size(), span_of(in)), blocks_of(out, size()), record);
  transport_.recorder().end(record);
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
  Spans to(size()), from(size());
  from[root] = span_of(x);
  if (rank_ == root) to.assign(size(), span_of(x));
  // The root gets empty messages, so that it returns when all ranks have x, and notices a missing
  // rank here.
  exchange(to, from, record);
  transport_.recorder().end(record);
}

void MessageGroup::barrier() {
  const int64_t record = begin("barrier", Tensor{.dtype = DType::u8});
  exchange(Spans(size()), Spans(size()), record);
  transport_.recorder().end(record);
}

// --- overlapped with other work -------------------------------------------------------------------------------------

Pending MessageGroup::start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) {
  check_sum(*this, "start_reduce_scatter_sum", in);
  check_times_size(*this, "start_reduce_scatter_sum", "in", in, "out", out);
  check_times_size(*this, "start_reduce_scatter_sum", "arrived", arrived, "out", out);
  count("reduce_scatter_sum", s, reduce_scatter_cost(bytes_of(in), size()));
  if (!moves("start_reduce_scatter_sum", s, {out, in, arrived})) return {};
  const Timed timed(seconds_);
  const int64_t record = begin("start_reduce_scatter_sum", in);
  const Spans to = blocks_of(in, size());
  Spans from = blocks_of(arrived, size());
  from[rank_] = to[rank_];
  Messages messages = begin_exchange(to, from);
  const auto sum = [s, out, from]() mutable {
    std::vector<const void*> parts;
    for (const Span& part : from) parts.push_back(part.data);
    sum_in_rank_order(s, out, parts);
  };
  return Pending(std::make_unique<Exchange>(*this, std::move(messages), record, sum));
}

Pending MessageGroup::start_all_gather(Stream& s, Tensor out, Tensor in) {
  check_times_size(*this, "start_all_gather", "out", out, "in", in);
  count("all_gather", s, all_gather_cost(bytes_of(out), size()));
  if (!moves("start_all_gather", s, {out, in})) return {};
  const Timed timed(seconds_);
  const int64_t record = begin("start_all_gather", in);
  Messages messages = begin_exchange(Spans(size(), span_of(in)), blocks_of(out, size()));
  return Pending(std::make_unique<Exchange>(*this, std::move(messages), record));
}

// --- between two ranks ----------------------------------------------------------------------------------------------

Pending MessageGroup::send(Stream& s, Tensor x, int to) {
  check_send(*this, to);
  count("send", s, send_cost(bytes_of(x)));
  if (!moves("send", s, {x})) return {};
  const Timed timed(seconds_);
  sent_bytes_ += x.num_bytes();
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

Messages MessageGroup::begin_exchange(const Spans& to, const Spans& from) {
  Messages messages;
  // Each rank begins with its neighbours, so that not all of them begin with rank 0.
  for (int i = 1; i < size(); ++i) {
    const int r = (rank_ + size() - i) % size();
    messages.push_back(transport_.recv(ranks()[r], spec_.channel, from[r].data, from[r].num_bytes));
  }
  for (int i = 1; i < size(); ++i) {
    const int r = (rank_ + i) % size();
    messages.push_back(transport_.send(ranks()[r], spec_.channel, to[r].data, to[r].num_bytes));
    sent_bytes_ += to[r].num_bytes;
  }
  const Span &own = to[rank_], &place = from[rank_];
  MOEBIUS_ASSERT(own.num_bytes == place.num_bytes);
  if (own.data != place.data && own.num_bytes > 0) std::memcpy(place.data, own.data, own.num_bytes);
  return messages;
}

void MessageGroup::exchange(const Spans& to, const Spans& from, int64_t record) {
  transport_.wait(begin_exchange(to, from), record);
}

void MessageGroup::sum_exchange(Stream& s, Tensor own, Tensor own_part, Spans to, int64_t record) {
  const int64_t bytes = own.num_bytes();
  if (arrived_.num_bytes() < bytes * size()) arrived_ = Buffer(DeviceKind::cpu, bytes * size());
  Spans from;
  for (int r = 0; r < size(); ++r)
    from.push_back({.data = static_cast<std::byte*>(arrived_.data()) + r * bytes, .num_bytes = bytes});
  from[rank_] = to[rank_] = span_of(own_part);
  exchange(to, from, record);
  std::vector<const void*> parts;
  for (const Span& part : from) parts.push_back(part.data);
  sum_in_rank_order(s, own, parts);
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
