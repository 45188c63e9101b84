// A set of ranks that communicate. Every reduction is a SUM; nobody scales.
//
//   Order      All ranks of a group call the same operations in the same order with the same shapes and dtypes. No call
//              depends on data, but for the sizes of all_to_all_v: ranks without rows join like all others.
//   Sums       of f32, f64, i64 and bf16. Added in the order of the ranks,
//              ((x0 + x1) + x2) + ..., bf16 in f32 and rounded once at the end: the same bits
//              on every rank, in every run and over every transport for the same group size.
//   Memory     Tensors are contiguous, of the stream's device. A call returns when its tensors may be used again; on a
//              GPU by what is launched on the stream from then on.
//              Sums need memory for what arrives: at most kSumPiece elements from each rank, kept by the group.
//   Devices    Memory of the CPU moves over every transport, of GPUs as comm/gpu/gpu_links.h says. On the null device
//              nothing is moved and nobody is waited for.
//   Errors     Error{usage} for wrong shapes and dtypes. Error{distributed} when another rank failed, ended, or did not
//              join in time: it names that rank, its coordinates and the collective, with the last ones of both.
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

// A send or a receive on its way. wait() ends it: then the tensor may be used again. One that is destroyed before is
// withdrawn (an exception passes by); wait() on none does nothing.
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

// Rows change hands. The rows of `in` go to ranks 0, 1, ... in this order, send_rows[r] of them to rank r; `out` gets
// the rows from ranks 0, 1, ... in this order, recv_rows[r] of them from rank r. Both counts are on the host, one per
// rank, and agree: what r sends to q is what q awaits from r, else Error{distributed}. A row is what one index of dim 0
// holds. out and in may have more rows than the counts say (planned bounds); those are left alone.
struct AllToAllV {
  Tensor out;                                     // out
  Tensor in;                                      // in, must not overlap out
  std::span<const int64_t> recv_rows, send_rows;  // in
};

class Group {
 public:
  static constexpr int64_t kSumPiece = 1 << 18;

  virtual ~Group() = default;
  virtual const std::string& name() const = 0;        // "dp"
  virtual const std::vector<int>& ranks() const = 0;  // of the world, ascending; index = rank in the group
  virtual int rank() const = 0;                       // of the caller in the group
  int size() const { return static_cast<int>(ranks().size()); }

  virtual void all_reduce_sum(Stream& s, Tensor x) = 0;  // x = sum over ranks of x
  // out = this rank's rows of the sum of in, [size * M, ...] -> [M, ...]. out may be these rows of in.
  virtual void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) = 0;
  // out = in of rank 0, 1, ... along dim 0, [M, ...] -> [size * M, ...], any dtype. in may be this rank's rows of out.
  virtual void all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void all_to_all_v(Stream& s, const AllToAllV& a) = 0;  // any dtype
  virtual void broadcast(Stream& s, Tensor x, int root) = 0;     // x = x of root, any dtype
  // Between two ranks of the group, any dtype; x is in use until wait(). Sends to one rank arrive in their order, and
  // independently of the collectives: a send and its receive may stand on different sides of one.
  [[nodiscard]] virtual Pending send(Stream& s, Tensor x, int to) = 0;
  [[nodiscard]] virtual Pending recv(Stream& s, Tensor x, int from) = 0;
  // The same as the two above, on their way until wait(): out and in are in use, and so is arrived, which is like in
  // and holds what comes from the others. Ranks may begin and end other operations meanwhile, all in the same order.
  [[nodiscard]] virtual Pending start_reduce_scatter_sum(Stream& s, Tensor out, Tensor in, Tensor arrived) = 0;
  [[nodiscard]] virtual Pending start_all_gather(Stream& s, Tensor out, Tensor in) = 0;
  virtual void barrier() = 0;  // returns when every rank has called it

  // Bytes that left this rank for others so far. With n ranks and b the bytes of x, or of the larger of out and in,
  // where n divides: all_reduce_sum 2 b (n-1)/n, reduce_scatter_sum and all_gather b (n-1)/n, all_to_all_v the rows for
  // others, broadcast b (n-1) at the root, send b, barrier none.
  virtual int64_t sent_bytes() const = 0;
  // Seconds that the rank's thread has spent in these calls so far, but barrier(), and in waiting for what they began:
  // what communication adds to the time of a step. Over NCCL those of the GPU's stream, of what has ended by now; of
  // calls that are replayed (device/accelerator.h) each time as long as the last time.
  virtual double seconds() const = 0;
};

}  // namespace moebius
