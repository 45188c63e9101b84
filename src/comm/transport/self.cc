// The world of one rank, and dry-run worlds:
// groups over them never send, so there are no messages to carry.
#include "comm/message_group.h"

namespace moebius {
namespace {

class SelfTransport final : public Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::unique_ptr<Message> send(int, int, const void*, int64_t) override { return nullptr; }
  std::unique_ptr<Message> recv(int, int, void*, int64_t) override { return nullptr; }
  void wait(std::span<const std::unique_ptr<Message>> messages, int64_t) override { MOEBIUS_ASSERT(messages.empty()); }
};

class DryRunTransport final : public Transport {
 public:
  DryRunTransport(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::unique_ptr<Message> send(int, int, const void*, int64_t) override { refuse(); }
  std::unique_ptr<Message> recv(int, int, void*, int64_t) override { refuse(); }
  void wait(std::span<const std::unique_ptr<Message>>, int64_t) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    MOEBIUS_FAIL(internal, "a dry-run world cannot communicate: only the null device may run on its ranks");
  }
  int rank_, size_;
};

}  // namespace

std::unique_ptr<Transport> make_dry_run_transport(int rank, int size) {
  MOEBIUS_ASSERT(rank >= 0 && rank < size);
  return std::make_unique<DryRunTransport>(rank, size);
}

std::unique_ptr<Transport> make_self_transport() { return std::make_unique<SelfTransport>(); }

}  // namespace moebius
