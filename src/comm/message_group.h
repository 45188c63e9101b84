// A MessageGroup implements Group by messages of a Transport. A collective consists of exchanges, in which each of some
// ranks sends one message to each of the others, and receives one from it. So a waiting rank knows which rank it waits
// for, and sums are added in the same order over every transport.
//
//   all_reduce_sum      each rank gets its slice from all ranks, adds these in the order of Group, and
//                       sends the sum to all
//   reduce_scatter_sum  the first half of all_reduce_sum: the slices are exchanged and added
//   all_gather          the second half: the results are exchanged
//
// A half is an exchange on each level of the group (comm/level_collectives.h). A group of at most 8 ranks on one node
// has one level, on which all ranks exchange. all_to_all_v is always one exchange. With several levels, the collectives
// of start_* run in wait(), and do not overlap.
#pragma once

#include "comm/group_cost.h"
#include "comm/level_collectives.h"
#include "comm/transport/transport.h"

namespace moebius {

struct MessageGroupSpec {
  std::string name;
  std::vector<int> ranks;                  // world ranks, ascending
  int channel = 0;                         // the first of kChannelsOfGroup channels, the same on all ranks of the group
  int node = CollectiveLevels::kMaxRadix;  // ranks of the group on a node, for CollectiveLevels
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
  int64_t sent_messages() const { return sent_messages_; }  // total messages to other ranks

 private:
  class Exchange;
  // Starts to send to[i] to rank members[i] and to receive from[i] from it, for each i. This rank's own part is copied.
  // REQUIRES: this rank is a member.
  Messages begin_exchange(std::span<const int> members, const Spans& to, const Spans& from);
  void exchange(const Spans& to, const Spans& from, int64_t record);  // between all ranks of the group
  // Returns a call that exchanges between the members of a level, and waits for it.
  std::function<void(const LevelStep&, const Spans& to, const Spans& from)> exchange_and_wait(int64_t record);
  LevelCalls calls(Stream& s, int64_t record);  // such exchanges, and sums on s
  // Returns memory for a sum of num_elements of each rank.
  LevelMemory memory_for(DType dtype, int64_t num_elements);
  void reduce_scatter(Stream& s, Tensor out, Tensor in, int64_t record);
  void gather(Tensor out, Tensor in, int64_t record);
  // Returns memory for a slice of num_elements of each rank, in the order of place().
  Tensor packed(DType dtype, int64_t num_elements);
  // On the null device, adds the call to the stream's trace as the op "ep all_gather", with the bytes that this rank
  // sends. A group of one rank adds nothing.
  void count(const char* op, Stream& s, const GroupCost& cost) const;
  // Returns whether memory is moved: false on the null device. Throws Error{usage} for memory of a GPU.
  bool moves(const char* op, Stream& s, std::initializer_list<Tensor> tensors) const;
  int64_t begin(const char* op, const Tensor& x);
  Pending transfer(const char* op, const Tensor& x, int64_t number, std::unique_ptr<Message> message);

  Transport& transport_;
  MessageGroupSpec spec_;
  CollectiveLevels levels_;
  std::vector<LevelStep> steps_;  // of this rank
  std::vector<int> everyone_;     // 0, 1, ..., size() - 1
  int rank_ = 0;
  int64_t num_calls_ = 0, num_sent_ = 0, num_received_ = 0, sent_bytes_ = 0, sent_messages_ = 0;
  double seconds_ = 0;
  // The one-sided traffic that the counters include.
  std::vector<std::shared_ptr<const PeerTraffic>> beside_;
  Buffer arrived_;  // slices from the other ranks
  Buffer packed_;   // slices in the order of place()
  Buffer sums_;     // f32 sums of bf16 slices between levels
};

}  // namespace moebius
