// The world of one rank: a group over it never sends, so there is nothing to carry messages.
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

}  // namespace

std::unique_ptr<Transport> make_self_transport() { return std::make_unique<SelfTransport>(); }

}  // namespace moebius
