// A MessageGroup is a Group over messages.
// Every collective is an exchange: each rank sends one message to each other rank and receives
// one from it. So a waiting rank knows which rank it waits for, and every transport adds in
// the same order.
//
//   all_reduce_sum      each rank gets its slice from all ranks, adds the slices in rank order, and
//                       sends the sum to all
//   reduce_scatter_sum  the first half of all_reduce_sum
//   all_gather          the second half of it
#pragma once

#include "comm/group_cost.h"
#include "comm/rank_parts.h"
#include "comm/transport/transport.h"

namespace moebius {

struct MessageGroupSpec {
  std::string name;
  std::vector<int> ranks;  // world ranks, ascending
  int channel = 0;         // the first of kChannelsOfGroup channels, the same on all ranks of the group
};
inline constexpr int kChannelsOfGroup = 2;  // one for collectives, one for sends and receives

class MessageGroup final : public Group {
 public:
  // Throws Error{usage} unless the transport's rank is one of spec.ranks.
  // The transport must outlive the group.
  MessageGroup(Transport& transport, MessageGroupSpec spec);

  const std::string& name() const override { return spec_.name; }
  const std::vector<int>& ranks() const override { return spec_.ranks; }
  int rank() const override { return rank_; }
  void all_reduce_sum(Stream& s, Tensor x) override;
  void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) override;
  void all_gather(Stream& s, Tensor out, Tensor in) override;
  void all_to_all_v(Stream& s, const AllToAllV& a) override;
  void broadcast(Stream& s, Tensor x, int root) override;
  Pending send(Stream& s, Tensor x, int to) override;
  Pending recv(Stream& s, Tensor x, int from) override;
  Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) override;
  Pending start_all_gather(Stream& s, Tensor out, Tensor in) override;
  void barrier() override;
  void check() override { transport_.check(); }
  double timeout_s() const override { return transport_.timeout_s(); }
  std::string rank_name(int rank) const override { return name_of_rank(transport_.options(), ranks()[rank]); }
  void count_also(std::shared_ptr<const PeerTraffic> traffic) override { beside_.push_back(std::move(traffic)); }
  int64_t sent_bytes() const override;
  double seconds() const override;

 private:
  class Exchange;
  // Begins to send to[r] to rank r and to fill from[r] from rank r, for every rank r.
  // This rank's own part is copied.
  Messages begin_exchange(const Spans& to, const Spans& from);
  void exchange(const Spans& to, const Spans& from, int64_t record);
  // Computes own = the sum over ranks of their parts for this rank. own_part is the part computed here.
  // to[r] is the part that goes to rank r. own may be own_part.
  void sum_exchange(Stream& s, Tensor own, Tensor own_part, Spans to, int64_t record);
  // On the null device a call is an op of the stream's trace: "ep all_gather", with the bytes that
  // leave this rank. A group of one rank is not counted.
  void count(const char* op, Stream& s, const GroupCost& cost) const;
  // Returns whether memory must be moved.
  // Throws Error{usage} for a device whose memory messages do not carry.
  bool moves(const char* op, Stream& s, std::initializer_list<Tensor> tensors) const;
  int64_t begin(const char* op, const Tensor& x);
  Pending transfer(const char* op, const Tensor& x, int64_t number, std::unique_ptr<Message> message);

  Transport& transport_;
  MessageGroupSpec spec_;
  int rank_ = 0;
  int64_t num_calls_ = 0, num_sent_ = 0, num_received_ = 0, sent_bytes_ = 0;
  double seconds_ = 0;
  std::vector<std::shared_ptr<const PeerTraffic>> beside_;
  Buffer arrived_;  // slices from the other ranks
};

}  // namespace moebius
