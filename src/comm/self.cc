#include <cstring>

#include "comm/group.h"

namespace moebius {
namespace {

class SelfGroup final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(Stream&, Tensor) override {}
  void all_gather(Stream& s, Tensor out, Tensor in) override { copy_same(s, out, in); }
  void reduce_scatter_sum(Stream& s, Tensor out, Tensor in) override { copy_same(s, out, in); }
  void barrier() override {}

 private:
  static void copy_same(Stream& s, Tensor out, Tensor in) {
    MOEBIUS_CHECK(usage, out.shape == in.shape && out.dtype == in.dtype, "self group: out {} must be like in {}",
                  to_string(out), to_string(in));
    if (s.device() == DeviceKind::cpu && out.data != in.data) std::memcpy(out.data, in.data, in.num_bytes());
  }
};

}  // namespace

std::unique_ptr<Group> make_self_group() { return std::make_unique<SelfGroup>(); }

}  // namespace moebius
