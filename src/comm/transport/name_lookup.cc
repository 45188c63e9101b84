#include "comm/transport/name_lookup.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace moebius {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(50);

// Waits for name servers, unless the host must be a number.
Addresses ask_system(const HostPort& to, bool only_number) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = only_number ? AI_NUMERICHOST : 0;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(to.host.c_str(), std::to_string(to.port).c_str(), &hints, &found);
  Addresses addresses;
  if (code != 0) {
    addresses.why_none = ::gai_strerror(code);
    return addresses;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> first(found, ::freeaddrinfo);
  for (const addrinfo* a = first.get(); a != nullptr; a = a->ai_next) {
    SocketAddress& address = addresses.all.emplace_back(SocketAddress{.size = a->ai_addrlen});
    std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
  }
  return addresses;
}

// Begins to connect to one address. On failure it returns a closed socket, with errno set.
Socket begin_connect(const SocketAddress& address) {
  Socket s(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!s.is_open()) return s;
  prepare_socket(s);
  if (::connect(s.descriptor(), address.get(), address.size) == 0 || errno == EINPROGRESS) return s;
  return {};
}

// Returns a connection to one address; on failure a closed socket, with errno set.
Socket try_connect(const SocketAddress& address, Deadline deadline) {
  Socket s = begin_connect(address);
  if (!s.is_open()) return s;
  errno = wait_writable(s, deadline) ? connect_error(s) : ETIMEDOUT;
  return errno == 0 ? std::move(s) : Socket();
}

}  // namespace

struct NameLookup::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Addresses> found;  // once set, it stays as it is
};

NameLookup::NameLookup(const HostPort& to, LookUp look_up) : state_(std::make_shared<State>()) {
  if (Addresses of_number = ask_system(to, /*only_number=*/true); !of_number.all.empty()) {
    state_->found = std::move(of_number);
    return;
  }
  if (!look_up) look_up = [](const HostPort& name) { return ask_system(name, /*only_number=*/false); };
  try {
    std::thread([state = state_, to, look_up = std::move(look_up)] {
      Addresses found = look_up(to);
      const std::lock_guard lock(state->mutex);
      state->found = std::move(found);
      state->changed.notify_all();
    }).detach();
  } catch (const std::system_error& e) {
    MOEBIUS_FAIL(distributed, "tcp: the system started no thread to look up {}: {}", to.host, e.what());
  }
}

const Addresses* NameLookup::wait(Deadline deadline) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_until(lock, deadline, [this] { return state_->found.has_value(); });
  return state_->found ? &*state_->found : nullptr;
}

Socket begin_connect(const HostPort& to, const Addresses& addresses, int attempt) {
  MOEBIUS_CHECK(distributed, !addresses.all.empty(), "tcp: {} has no address: {}", to_string(to), addresses.why_none);
  return begin_connect(addresses.all[static_cast<size_t>(attempt) % addresses.all.size()]);
}

Socket connect_until(const HostPort& to, Deadline deadline, const LookUp& look_up) {
  std::string why;
  do {
    const NameLookup name(to, look_up);
    const Addresses* addresses = name.wait(deadline);
    if (addresses == nullptr && !why.empty()) break;  // an earlier look-up was answered: its reason is reported
    MOEBIUS_CHECK(distributed, addresses != nullptr,
                  "tcp: {} was not reached in time: the name servers of this machine have not answered for {}; check "
                  "the name, or give a number",
                  to_string(to), to.host);
    why = addresses->why_none;
    for (const SocketAddress& address : addresses->all) {
      Socket s = try_connect(address, deadline);
      if (s.is_open()) return s;
      why = std::strerror(errno);
    }
    std::this_thread::sleep_for(kRetry);
  } while (milliseconds_until(deadline) > 0);
  MOEBIUS_FAIL(distributed, "tcp: {} was not reached in time: {}", to_string(to), why);
}

Socket connect_until(const HostPort& to, Deadline deadline) { return connect_until(to, deadline, nullptr); }

}  // namespace moebius
