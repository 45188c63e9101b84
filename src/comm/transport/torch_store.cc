#include "comm/transport/torch_store.h"

#include "core/error.h"

namespace moebius {
namespace {

// A query begins with one of these bytes. A text is 8 bytes of length, then its characters.
constexpr unsigned char kValidate = 0, kSet = 1, kGet = 3, kWait = 6;
constexpr uint32_t kMagic = 0x3C85F7CE;  // sent after kValidate
constexpr const char* kWhat = "an entry of torchrun's store";

}  // namespace

TorchStore::TorchStore(const HostPort& at, Deadline deadline)
    : deadline_(deadline), socket_(connect_until(at, deadline)) {
  write_value(socket_, kValidate, deadline_, kWhat);
  write_value(socket_, kMagic, deadline_, kWhat);
}

void TorchStore::set(const std::string& key, const std::string& value) {
  write_value(socket_, kSet, deadline_, kWhat);
  write_text(socket_, key, deadline_, kWhat);
  write_text(socket_, value, deadline_, kWhat);
}

std::string TorchStore::wait_for(const std::string& key) {
  write_value(socket_, kWait, deadline_, kWhat);
  write_value<uint64_t>(socket_, 1, deadline_, kWhat);  // number of keys
  write_text(socket_, key, deadline_, kWhat);
  read_value<unsigned char>(socket_, deadline_, kWhat);  // the key exists
  write_value(socket_, kGet, deadline_, kWhat);
  write_text(socket_, key, deadline_, kWhat);
  return read_text(socket_, deadline_, kWhat);
}

}  // namespace moebius
