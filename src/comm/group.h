// A Group is a set of ranks that communicate. Every reduction is a sum; no operation scales.
//
//   Order      All ranks of a group call the same operations in the same order, with the same shapes and
//              dtypes. No call depends on data, except for the sizes of all_to_all_v; ranks without rows
//              call it too.
//   Sums       Sums take f32, f64, i64 and bf16. They add in the order of the ranks,
//              ((x0 + x1) + x2) + ..., bf16 in f32 and rounded once at the end. In a group of more than
//              8 ranks they are sums of such sums, over the levels of comm/collective_levels.h:
//              ((x0 + ... + x7) + (x8 + ... + x15)) + ... For the same group size the bits are the
//              same on every rank, in every run and over every transport.
//   Memory     Tensors are contiguous and in memory of the stream's device. When a call returns its
//              tensors may be used again; on a GPU, by work launched on the stream from then on.
//              Sums need memory for what arrives: at most kSumPiece elements from each of 8 ranks, kept
//              by the group.
//   Devices    Every transport moves CPU memory; comm/gpu/gpu_links.h moves GPU memory.
//              On the null device nothing is moved, and no call waits.
//   Errors     Error{usage} for wrong shapes and dtypes. Error{distributed} when another rank failed, ended,
//              or did not join in time: the message names that rank, its coordinates, the collective,
//              and the last collectives of both ranks.
//   Threads    A group belongs to one rank and is used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// A send or a receive in flight.
// After wait() the tensor may be used again; wait() on an empty Pending does nothing. A Pending
// that is destroyed before wait(), by an exception, is withdrawn.
class Pending {
 public:
  class Transfer {
   public:
    virtual ~Transfer() = default;
    virtual void wait() = 0;  // Error{distributed} as above
  };
  Pending() = default;
  explicit Pending(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  void wait() {
    if (transfer_) transfer_->wait();
    transfer_.reset();
  }

 private:
  std::unique_ptr<Transfer> transfer_;
};

// The exchange of rows between all ranks of a group.
//   in    its rows go to ranks 0, 1, ... in this order, send_rows[r] of them to rank r
//   out   gets the rows from ranks 0, 1, ... in this order, recv_rows[r] of them from rank r
// A row is what one index of dim 0 holds. Both counts are on the host, one per rank.
// They must agree between ranks: what r sends to q is what q expects from r, else
// Error{distributed}. out and in may have more rows than the counts say (planned bounds); those
// rows are not touched.
struct AllToAllV {
  Tensor out;                                     // out
  Tensor in;                                      // in, must not overlap out
  std::span<const int64_t> recv_rows, send_rows;  // in
};

// The bytes that a rank wrote to the memory of others, beside the calls of a group, and how long it
// waited for them.
struct PeerTraffic {
  int64_t sent_bytes = 0, waited_ns = 0;
};

class Group {
 public:
  static constexpr int64_t kSumPiece = 1 << 18;

  virtual ~Group() = default;
  virtual const std::string& name() const = 0;        // "dp"
  virtual const std::vector<int>& ranks() const = 0;  // their world ranks, ascending; the index is the group rank
  virtual int rank() const = 0;                       // the caller's rank in the group
  int size() const { return static_cast<int>(ranks().size()); }

  virtual void all_reduce_sum(Stream& s, Tensor x) = 0;  // x = sum over ranks of x
  // out = this rank's rows of the sum of in, [size * M, ...] -> [M, ...]. out may be these rows of in.
  virtual void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) = 0;
  // out = in of rank 0, 1, ... along dim 0, [M, ...] -> [size * M, ...], any dtype.
  // in may be this rank's rows of out.
  virtual void all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void all_to_all_v(Stream& s, const AllToAllV& a) = 0;  // any dtype
  virtual void broadcast(Stream& s, Tensor x, int root) = 0;     // x = x of root, any dtype
  // These move x between two ranks of the group, any dtype; x is in use until wait().
  // Sends to one rank arrive in their order, independently of the collectives:
  // a send may come before a collective and its receive after the same collective.
  [[nodiscard]] virtual Pending send(Stream& s, Tensor x, int to) = 0;
  [[nodiscard]] virtual Pending recv(Stream& s, Tensor x, int from) = 0;
  // These start the collectives above, which are in flight until wait(). Until then out and in are
  // in use.
  // So is `arrived`, which is like `in` and holds what comes from the other ranks.
  // Ranks may begin and end other operations meanwhile, all in the same order.
  [[nodiscard]] virtual Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) = 0;
  [[nodiscard]] virtual Pending start_all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void barrier() = 0;  // returns when every rank has called it

  // For waits of the group's ranks that are not calls of the group (comm/peer_window.h).
  // check() throws Error{distributed} once another rank of the world is known to have failed.
  // A wait that takes longer than timeout_s() ends the run. rank_name() is "rank 3 (tp 1, ...)".
  virtual void check() = 0;
  virtual double timeout_s() const = 0;
  virtual std::string rank_name(int rank) const = 0;
  // Returns whether memory of GPUs travels through host memory, as where ranks of the world share a GPU. Then a kernel
  // that waits for another rank may keep the GPU from the work of a rank that the other waits for.
  virtual bool stages_gpu_memory() const { return false; }
  // From now on sent_bytes() and seconds() count these too.
  virtual void count_also(std::shared_ptr<const PeerTraffic> traffic) = 0;

  // Returns the bytes that this rank has sent to others so far.
  // With n ranks, and b the bytes of x, or of the larger of out and in, where n divides (sums of bf16
  // over more than 8 ranks send the more that comm/group_cost.h says):
  //   all_reduce_sum                   2 b (n-1)/n
  //   reduce_scatter_sum, all_gather   b (n-1)/n
  //   all_to_all_v                     the rows for others
  //   broadcast                        b for each rank that a rank passes x on to: n-1 at the root of
  //                                    at most 8 ranks, else the messages of comm/collective_levels.h
  //   send                             b
  //   barrier                          0
  virtual int64_t sent_bytes() const = 0;
  // Returns the seconds that the rank's thread has spent in these calls so far, barrier() excepted,
  // and in waiting for what they began: the time that communication adds to a step.
  // Over NCCL these are seconds of the GPU's stream, for work that has ended by now; each replay of
  // a captured call counts as long as the last one.
  virtual double seconds() const = 0;
};

}  // namespace moebius
