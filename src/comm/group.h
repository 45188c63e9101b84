// A Group is a set of ranks that communicate. Every reduction is a plain sum; no operation scales.
//
//   Order      All ranks of a group call the same operations in the same order, with the same shapes and
//              dtypes. No call depends on data, except for the sizes of all_to_all_v; ranks without rows
//              call it too.
//   Sums       Sums take f32, f64, i64 and bf16. They add in the order of the ranks,
//              ((x0 + x1) + x2) + ..., bf16 in f32 and rounded once at the end. A group of more than 8
//              ranks, or on several nodes, may have several levels, and adds such sums over them
//              (comm/collective_levels.h): ((x0 + ... + x7) + (x8 + ... + x15)) + ... With the same levels
//              the bits are the same on every rank, in every run and over every transport. Only
//              GpuSums::nccl has another order (comm/gpu/nccl.h).
//   Memory     Tensors are contiguous and in memory of the stream's device. When a call returns, its
//              tensors may be used again; on a GPU, by work launched on the stream later. For sums the
//              group keeps receive buffers of at most kSumPiece elements from each of 8 ranks; with NCCL 64 MiB.
//   Devices    Every transport moves CPU memory; comm/gpu/gpu_links.h moves GPU memory.
//              On the null device nothing is moved, and no call waits.
//   Errors     Wrong shapes and dtypes are Error{usage}. If another rank failed, ended, or did not join in
//              time, it is Error{distributed}: the message names that rank, its coordinates, the
//              collective, and the last collectives of both ranks.
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

// A communication in flight. Its tensors may be used again after wait(), which does nothing on an empty Pending. A
// Pending that is destroyed before wait(), as by an exception, is cancelled. Over NCCL its work still runs on the GPU.
class Pending {
 public:
  class Transfer {
   public:
    virtual ~Transfer() = default;
    virtual void wait() = 0;  // throws Error{distributed} as above
    // Waits on the host until the transfer has ended on a GPU, for measurements; wait() must follow.
    virtual void wait_on_host() {}
  };
  Pending() = default;
  explicit Pending(std::unique_ptr<Transfer> transfer) : transfer_(std::move(transfer)) {}
  void wait() {
    if (transfer_) transfer_->wait();
    transfer_.reset();
  }
  void wait_on_host() {
    if (transfer_) transfer_->wait_on_host();
  }

 private:
  std::unique_ptr<Transfer> transfer_;
};

// The exchange of rows between all ranks of a group.
//   in    its rows are sent to ranks 0, 1, ... in this order, send_rows[r] of them to rank r
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

// One-sided traffic outside of the calls of a group: bytes that this rank wrote to the memory of others, and the time
// that it waited.
struct PeerTraffic {
  int64_t sent_bytes = 0, waited_ns = 0;
};

class Group {
 public:
  // Sums through host memory run in pieces, of at most this many elements for each rank.
  static constexpr int64_t kSumPiece = 1 << 18;

  virtual ~Group() = default;
  virtual const std::string& name() const = 0;        // such as "dp"
  virtual const std::vector<int>& ranks() const = 0;  // their world ranks, ascending; the index is the group rank
  virtual int rank() const = 0;                       // the caller's rank in the group, from 0
  int size() const { return static_cast<int>(ranks().size()); }

  virtual void all_reduce_sum(Stream& s, Tensor x) = 0;  // x = sum over ranks of x
  // out [M, ...] = this rank's rows of the sum of in [size * M, ...]. out may be these rows of in.
  virtual void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) = 0;
  // out [size * M, ...] = in [M, ...] of ranks 0, 1, ... along dim 0, any dtype. in may be this rank's rows of out.
  virtual void all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void all_to_all_v(Stream& s, const AllToAllV& a) = 0;  // exchanges rows of any dtype
  virtual void broadcast(Stream& s, Tensor x, int root) = 0;     // x = x of the group rank `root`, any dtype
  // Send x to, or receive it from, another rank of the group, any dtype; x is in use until wait(). Messages between two
  // ranks arrive in order, independently of collectives: a send may come before a collective, and its receive after it.
  [[nodiscard]] virtual Pending send(Stream& s, Tensor x, int to) = 0;
  [[nodiscard]] virtual Pending recv(Stream& s, Tensor x, int from) = 0;
  // Start the collectives above, without waiting. Until wait() the tensors are in use, also `arrived`, a receive buffer
  // of the size of `in`. Other operations may begin and end in between, in the same order on all ranks.
  [[nodiscard]] virtual Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) = 0;
  [[nodiscard]] virtual Pending start_all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void barrier() = 0;  // returns when every rank has called it
  // Returns how many multiprocessors of a GPU start_reduce_scatter_sum() and start_all_gather() occupy until they end,
  // if the group limits them so that matrix products run beside them; else 0.
  virtual int multiprocessors_of_start() const { return 0; }

  // For waits outside of the calls of the group (comm/peer_window.h). check() throws Error{distributed} if another rank
  // of the world is known to have failed. A wait longer than timeout_s() must end the run. rank_name() returns the name
  // of a rank of the group, such as "rank 3 (tp 1, ...)".
  virtual void check() = 0;
  virtual double timeout_s() const = 0;
  virtual std::string rank_name(int rank) const = 0;
  // Returns whether GPU memory is staged through host memory, because ranks share a GPU. Then no kernel may wait for
  // another rank: it could block the GPU that the other rank needs.
  virtual bool stages_gpu_memory() const { return false; }
  // Makes sent_bytes() and seconds() include this traffic.
  virtual void count_also(std::shared_ptr<const PeerTraffic> traffic) = 0;

  // Returns the total bytes that this rank has sent to others. A call of a group of n ranks sends the following, if n
  // divides the elements; b is the bytes of x, or of the larger of out and in. Sums of bf16 over several levels send
  // more (comm/group_cost.h).
  //   all_reduce_sum                   2 b (n-1)/n
  //   reduce_scatter_sum, all_gather   b (n-1)/n
  //   all_to_all_v                     the rows for others
  //   broadcast                        b for each rank that this rank sends x to: n-1 at the root with one
  //                                    level, else the messages of comm/collective_levels.h
  //   send                             b
  //   barrier                          0
  virtual int64_t sent_bytes() const = 0;
  // Returns the exposed communication time: the seconds that the rank's thread has spent in these calls, except
  // barrier(), and in wait(). With NCCL it is time of the GPU's stream, of work that has ended; each replay of a
  // captured call counts the time of the last replay.
  virtual double seconds() const = 0;
};

}  // namespace moebius
